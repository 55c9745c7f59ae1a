"""Open the description of a model: transformers' config.json, or the header of a GGUF file."""

from __future__ import annotations

import json
import stat
import struct
import zipfile
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

from kvkit.errors import KvkitError, argument_error, brief
from kvkit.files.file_kinds import kind_of_file
from kvkit.files.paths import no_such_file
from kvkit.models.configuration import entries_of, read_layers
from kvkit.models.description import ModelShape
from kvkit.models.gguf import entries_of_header
from kvkit.models.known import known_model, like_known

# {type of a value in a GGUF header: its code for `struct`}
GGUF_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
GGUF_TEXT, GGUF_ARRAY = 8, 9
MOST_MEMBERS = 2**20  # the most members of an array, or characters of a text, in a GGUF header
MOST_FIELDS = 2**14  # of a GGUF header
LONGEST_CONFIG = 2**24  # bytes of a config.json


def read_model(model: Any) -> ModelShape:
    """Read what the layers of a model keep: see `read_entries`."""
    return read_layers(read_entries(model))


def read_entries(model: Any) -> Mapping[str, Any]:
    """Read the entries of a config.json, a folder with one, a GGUF file, or a configuration in memory.

    Those of a GGUF file are translated to the words of a config.json. The name of a public model that kvkit
    knows (`kvkit.models.known`) gives its entries, where no file has that name.

    Raises
    ------
    KvkitError
        If there is no such file, if it is something else, or damaged.
    OSError
        If a file cannot be opened.
    """
    if not isinstance(model, (str, PathLike)):
        return entries_of(model)
    path = Path(model)
    if not path.exists():
        if (known := known_model(str(model))) is not None:
            return known
        likely = like_known(str(model))
        if likely and path.suffix not in (".json", ".gguf"):
            raise argument_error(
                str(model), f"a file, a folder, or a model as {', '.join(likely)}", "none of them"
            )
        raise no_such_file(path)
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise no_such_file(path)
    if not stat.S_ISREG(path.stat().st_mode):
        raise argument_error(str(path), "a regular file", "a pipe, device or socket")
    try:
        with path.open("rb") as file:
            if file.read(4) == b"GGUF":
                return entries_of_header(read_gguf(file))
            file.seek(0)
            text = file.read(LONGEST_CONFIG + 1)
        if len(text) > LONGEST_CONFIG:
            raise ValueError(f"more than {LONGEST_CONFIG} bytes")
        if not text:
            raise ValueError("it is empty")
        config = json.loads(text)
    except KvkitError as error:
        raise KvkitError(f"{path}: {error}") from None
    except (ValueError, struct.error, RecursionError, OverflowError) as error:
        other = other_kind(path)
        cut = "it is cut short" if isinstance(error, struct.error) else brief(error)
        why = f": it is {other} (kvkit inspect prints its sizes)" if other else f": {cut}"
        raise KvkitError(f"{path}: neither a config.json nor a GGUF file{why}") from None
    if not isinstance(config, dict):
        raise KvkitError(f"{path}: expected a config.json, got {type(config).__name__}")
    return config


def other_kind(path: Path) -> str | None:
    """Return the kind of a file that `kvkit inspect` can read; None for other files."""
    with path.open("rb") as file:
        kind = kind_of_file(file)
        if kind is None and zipfile.is_zipfile(file):
            return "a .npz file or one of torch.save"
    return None if kind is None or kind[0].startswith("a GGUF") else kind[0]


def read_gguf(file: BinaryIO) -> dict[str, Any]:
    """Return the metadata of a GGUF file, from which the magic number (4 bytes) has been read."""

    def number(code: str) -> Any:
        return struct.unpack(f"<{code}", file.read(struct.calcsize(f"<{code}")))[0]

    def count(most: int = MOST_MEMBERS) -> int:
        found = int(number("Q"))
        if found > most:
            raise ValueError(f"a length of {found} in its header")
        return found

    def text() -> str:
        length = count()
        found = file.read(length)
        if len(found) != length:
            raise ValueError("a text that ends with the file")
        return found.decode(errors="replace")

    def value(kind: int) -> Any:
        if kind == GGUF_TEXT:
            return text()
        if kind not in GGUF_NUMBERS:
            raise ValueError(f"a value of type {kind} in its header")
        return number(GGUF_NUMBERS[kind])

    def values() -> list[Any]:
        kind, length = number("I"), count()
        if kind in GGUF_NUMBERS:
            code = f"<{length}{GGUF_NUMBERS[kind]}"
            return list(struct.unpack(code, file.read(struct.calcsize(code))))
        return [value(kind) for _ in range(length)]  # an array of arrays is an error

    number("I"), number("Q")  # version, tensors
    fields: dict[str, Any] = {}
    for _ in range(count(MOST_FIELDS)):
        name, kind = text(), number("I")
        fields[name] = values() if kind == GGUF_ARRAY else value(kind)
    return fields
