"""Code the numbers of a cache again in another format, a layer at a time."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvkit import files
from kvkit.errors import argument_error
from kvkit.files.arrays import CACHE
from kvkit.files.paths import check_target, name_in_errors
from kvkit.formats import BY_NAME, FLOATS
from kvkit.formats.schemes import Coded, formats_named
from kvkit.tools.readers import LINE, CacheReader, LayerReader, SideReader, open_cache
from kvkit.tools.source import CacheSource

SOME = 2048  # tokens that are encoded at a time
Form = Any  # a `Coded` format, or a float type


def recode(
    source: CacheSource,
    target: str | os.PathLike[str] | None,
    format: str,
    from_format: str | None,
    progress: Callable[[int, int], object] | None,
) -> tuple[dict[str, Any], files.Description, str, int]:
    """Return (arrays, none if they are written; their description; the format before; bytes)."""
    floats = format in map(str, FLOATS)
    forms = [BY_NAME[format]] * 2 if floats else [Coded(one.name, one) for one in formats_named(format)]
    if target is not None:
        check_target(target)
    found = open_cache(source, from_format=from_format)
    made: dict[str, Any] = {}
    folder = None if target is None else Path(target).parent
    total = sum(array.nbytes for array in source.arrays.values())
    for i in range(found.count):
        layer = found.layer(i)
        starts = layer.starts[: 1 + source.paged.get("rows", len(layer.starts))]
        with nullcontext() if target is None else name_in_errors(target):
            made |= encode_layer(i, layer, starts, forms, folder)
        if progress is not None:
            progress(total * (i + 1) // found.count, total)
    description = replace(
        source.contents.description,
        layout=LINE,
        sizes=sizes_of_layer(found, layer, starts, floats),
        format=format,
        tables=None,
    )
    before = found.format or str(layer.value.read(slice(0)).dtype)
    size = sum(array.nbytes for array in made.values())
    if not source.saved:
        made |= source.other_arrays((CACHE, *source.scales), tables=False)
    if target is not None:
        files.write(target, made, description)
        made = {}
    return made, description, before, size


def encode_layer(
    i: int, layer: LayerReader, starts: Sequence[int], forms: Sequence[Form], folder: Path | None
) -> dict[str, np.ndarray]:
    """Return the arrays of a layer's sequences, which must have one length; in files of a folder's disk."""
    made = {}
    lengths = np.diff(starts).tolist()
    if len({*lengths, 0}) != 2:
        raise argument_error("source", "sequences of one length", ", ".join(map(str, lengths)) or "none")
    for kv, side in enumerate((layer.key, layer.value)):
        sequences = [encode_sequence(side, start, lengths[0], forms[kv]) for start in starts[:-1]]
        for part in sequences[0]:
            name = f"{CACHE if part == 'codes' else part}.{i}.{kv}"
            pieces = [piece for one in sequences for piece in one[part]]
            made[name] = join_pieces(pieces, len(sequences), folder)
    return made


def sizes_of_layer(
    found: CacheReader, layer: LayerReader, starts: Sequence[int], floats: bool
) -> dict[str, int]:
    """Return the sizes of a recoded cache; the content's only of floats."""
    key, value = layer.key, layer.value
    sizes = {"l": found.count, "b": len(starts) - 1, "n": starts[1] - starts[0], "h": value.heads}
    if floats:
        sizes |= {"c": key.dim} | ({} if value.dim == key.dim else {"v": value.dim})
    return sizes


def encode_sequence(side: SideReader, start: int, count: int, form: Form) -> dict[str, list[np.ndarray]]:
    """Encode a sequence some tokens at a time; return each array in pieces."""
    step = max(SOME // form.step, 1) * form.step if isinstance(form, Coded) else SOME
    parts = [slice(i, min(i + step, start + count)) for i in range(start, start + count, step)]
    if not isinstance(form, Coded):
        return {"codes": [side.read(part).astype(form.dtype) for part in parts]}
    if count % form.step:
        raise argument_error("source", f"a multiple of {form.step} tokens, for {form.name}", count)
    form = form.over(side.read(part) for part in parts)
    shared = () if form.ends is None else form.shared
    found = {} if form.format.whole else {"whole": [np.asarray(np.float32(1))]}  # which `encode` leaves out
    for part in parts:
        for name, array in form.encode(side.read(part)).items():
            if name in shared:
                found[name] = [array]
            elif name != "rest":
                found.setdefault(name, []).append(array)
    return found


def join_pieces(pieces: Sequence[np.ndarray], count: int, folder: Path | None) -> np.ndarray:
    """Join the pieces of `count` sequences; on a folder's disk, as a cache need not fit into memory.

    The file has no name, so that it goes with the process, however that ends.
    """
    shape = pieces[0].shape
    if len(pieces) > count:
        shape = sum(map(len, pieces)) // count, *shape[1:]
    if folder is None or not pieces[0].size:
        return np.concatenate(pieces, axis=None).reshape(count, *shape)
    with tempfile.TemporaryFile(dir=folder) as file:
        for piece in pieces:
            file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
        file.flush()
        return np.memmap(file, pieces[0].dtype, "r", shape=(count, *shape))
