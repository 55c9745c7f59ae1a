"""Open a cache in a folder, and repair what a crash left unfinished.

    the process died in       what tells                                        the repair
    the write of a file       a name `*.new`, or a data file without sidecar    delete the file
    a change of all layers    a sidecar `.next-N`; committed if N <= `changes`  rename or delete the sidecar
    a crop or reset of all    `due`, in layers with lower `changes`             crop or reset these layers
    a step                    layers have different lengths                     undo the last update

`changes` and `due` are in `cache.json`.
"""

import contextlib
import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvkit.cache.layers import kinds
from kvkit.cache.layers.layer import Layer
from kvkit.cache.offload import UNFINISHED, Folder, hash_layer
from kvkit.cache.stores.mapped import VERSION, WAITING, follow_change
from kvkit.checks.values import integer
from kvkit.errors import argument_error
from kvkit.typed import FilePath


def open_folder(directory: FilePath, keep: bool) -> tuple[Folder, list[Layer]]:
    """Open the folder and layers of a cache that was closed and kept, or whose process died."""
    folder = Folder(directory, True, keep)
    with contextlib.suppress(FileNotFoundError):  # `open_layers` reports it
        folder.hold("a cache that is not open")
    try:
        return folder, open_layers(folder)
    except BaseException:
        folder.release()
        raise


def open_layers(folder: Folder) -> list[Layer]:
    """Open the layers of a folder, with all repairs."""
    about = read_json(folder.path / "cache.json")
    with opening_errors(folder.path / "cache.json"):
        closed, folder.changes, due = about["closed"], integer("changes", about["changes"], 0), about["due"]
        if "layers" in about:
            folder.layers = integer("layers", about["layers"], 0)
    for path in folder.path.glob(f"layer-*{WAITING}*"):
        with opening_errors(path):
            follow_change(path, folder.changes)
    paths = sorted(folder.path.glob("layer-*.json"))
    if len(paths) < folder.layers:
        wanted = f"{folder.layers} layers"
        raise argument_error("directory", wanted, f"{len(paths)}: the process died during offload")
    layers = [open_layer(folder, number, None if closed else due) for number in range(len(paths))]
    if "digests" in about:
        check_digests(folder.path, layers, about["digests"])
    folder.layers = len(layers)
    for pattern in UNFINISHED:
        for path in folder.path.glob(pattern):
            path.unlink()
    used = {layer.store.file.path for layer in layers if layer.store}
    for path in set(folder.path.glob("layer-*.raw")) - used:
        path.unlink()
    if not closed:
        undo_cut_step(layers, folder.path)
    for layer in layers:
        layer.finish()
    folder.write_index(closed=False)
    return layers


def check_digests(path: Path, layers: Sequence[Layer], recorded: Any) -> None:
    """Raise if files have changed since the cache was closed: `recorded` has the digest of each layer."""
    digests = [hash_layer(layer) for layer in layers]
    if recorded == digests:
        return
    expected = dict(enumerate(recorded if isinstance(recorded, list) else ()))
    changed = [layers[i].home.sidecar.stem for i, digest in enumerate(digests) if digest != expected.get(i)]
    got = f"{path} with changed files of {', '.join(changed)}"
    raise argument_error("directory", "files as they were when it was closed", got)


def undo_cut_step(layers: Sequence[Layer], folder: Path) -> None:
    """Undo a step that only some layers have completed.

    A layer is undone if another one has the length that this one had before its last update::

        lengths [9, 9, 8] after [8, 8, 8]  ->  [8, 8, 8]: the last layer missed the step
        lengths [5, 0, 5] after [4, 0, 4]  ->  no change: empty layers are unused by the model
        lengths [5, 5, 0] after [0, 0, 0]  ->  [0, 0, 0]: the first step missed the last layer
    """
    layers = [layer for layer in layers if layer.of is None]  # those with rows of their own
    used = [layer for layer in layers if layer.get_seq_length()]
    lengths = {layer.get_seq_length() for layer in used}
    in_first_step = not any(layer.span.before for layer in used)
    if used and used[-1] is not layers[-1] and in_first_step:
        lengths.add(0)
        message = f"{folder}: the last layers are empty, so the first step is undone: give its tokens again"
        warnings.warn(message, stacklevel=5)
    for layer in used:
        new = layer.span.length - layer.span.before
        if new > 0 and layer.get_seq_length() - new in lengths:
            layer.undo_update()
    left = [layer.get_seq_length() for layer in used]
    if len(set(left)) > 1:
        message = f"{folder}: layers hold {left} tokens, which no step explains: crop them to equal lengths"
        warnings.warn(message, stacklevel=5)


def open_layer(folder: Folder, number: int, due: Any) -> Layer:
    """Open one layer, and crop or reset it if that is still `due`."""
    path = folder.path / f"layer-{number:03}.json"
    about = read_json(path)
    if about.get("in_memory"):
        wanted = f"layer {number} in a file"
        raise argument_error("directory", wanted, "a process that died while the layer was in memory")
    with opening_errors(path):
        layer = kinds.make_layer(about)
        layer.open(folder.home(number, layer), about)
        changes = about.get("state", about)["changes"]  # an empty layer has no state
        if due is not None and changes < folder.changes:
            layer.reset() if due == "reset" else layer.crop(due[number] - layer.get_seq_length())
    return layer


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of this version."""
    with opening_errors(path):
        about = json.loads(path.read_text())
        if about["version"] != VERSION:
            raise ValueError(f"version {about['version']}, not {VERSION}")
    return about


@contextlib.contextmanager
def opening_errors(path: Path) -> Iterator[None]:
    """Turn errors about the contents of a file into errors about the folder."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, LookupError, TypeError, ValueError) as error:
        why = getattr(error, "strerror", None) or repr(error)
        raise argument_error("directory", "a cache that kvkit has written", f"{path}: {why}") from error
