"""Read files of torch.save. torch maps their tensors and runs no code of the file (weights_only).

Lists, tuples and dicts of tensors become names with dots between: a list of pairs of keys and values is
``cache.LAYER.KV``. Strides are as they were saved.
"""

import os
import pickle
import re
from typing import Any

import numpy as np

from kvkit.errors import brief
from kvkit.files import members
from kvkit.files.contents import CACHE, Contents
from kvkit.files.errors import file_error, reading_errors
from kvkit.files.packages import import_package
from kvkit.interop import as_numpy
from kvkit.typed import Array, FilePath

OBJECT = re.compile(r"Unsupported global: GLOBAL ([\w.]*Cache)\b")
SAVES_ARRAYS = (
    "arrays = {f'past_key_values.{i}.{side}': getattr(layer, f'{side}s') "
    "for i, layer in enumerate(cache.layers) for side in ('key', 'value')}; torch.save(arrays, path)"
)
DEEPEST = 8
MOST = 100_000  # the most arrays of a file
# The most bytes of a tensor per byte of file: strides of 0 may repeat heads, but not fill a disk.
EXPANDED = 64


def read(path: FilePath) -> Contents:
    """Read the tensors of a file, and numbers and texts beside them."""
    torch = import_package(path, "torch", "torch")
    with reading_errors(path, "torch cannot load it without running code of its own"):
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            if (named := OBJECT.search(str(error))) is None:
                raise
            what = f"it has a {brief(named[1])}, which torch loads by running its code"
            raise file_error(path, what, f"save its arrays: {SAVES_ARRAYS}") from error
    arrays: dict[str, Array] = {}
    metadata: dict[str, Any] = {}
    collect_tensors(path, torch, found, "", 0, arrays, metadata)
    status, total = os.stat(path), sum(array.nbytes for array in arrays.values())
    if total > EXPANDED * status.st_size:
        what = f"its tensors repeat {status.st_size} bytes by strides of 0 until they are {total}"
        raise file_error(path, what, "save them without repeated elements")
    return Contents(arrays, metadata, status, "file of torch.save")


def collect_tensors(
    path: FilePath,
    torch: Any,
    found: Any,
    name: str,
    depth: int,
    arrays: dict[str, Array],
    metadata: dict[str, Any],
) -> None:
    """Collect all tensors and plain values of a file by their names with dots."""
    if depth > DEEPEST or len(arrays) > MOST:
        raise file_error(
            path, f"more than {MOST} arrays, or {DEEPEST} levels", "save a cache's keys and values"
        )
    if isinstance(found, torch.Tensor):
        arrays[name or CACHE] = tensor_to_array(path, torch, found, name or CACHE)
    elif isinstance(found, (list, tuple, dict)):
        if not isinstance(found, dict):
            name, found = name or CACHE, dict(enumerate(found))
        for key, each in found.items():
            inner = f"{name}.{key}" if name else str(key)
            if inner in arrays or inner in metadata:
                raise file_error(path, f"two entries are called {brief(inner)}", "give each its own name")
            collect_tensors(path, torch, each, inner, depth + 1, arrays, metadata)
    elif isinstance(found, (int, float, str, bool, type(None))):
        metadata[brief(name)] = found
    else:
        raise file_error(
            path, f"{brief(name) or 'it'} is a {type(found).__name__}", "save tensors, in lists or dicts"
        )


def tensor_to_array(path: FilePath, torch: Any, tensor: Any, name: str) -> Array:
    """Return a tensor's memory as a numpy array."""
    with reading_errors(path, f"tensor {brief(name)} cannot be an array of numpy"):
        if tensor.layout is not torch.strided:
            raise ValueError(f"it is {tensor.layout}")
        own = members.FLOAT8.get(str(tensor.dtype).removeprefix("torch."))
        if own is not None:  # torch can pass only its bytes to numpy
            array: Array = as_numpy(tensor.detach().view(torch.uint8)).view(own)
            return array
        return np.asarray(as_numpy(tensor.detach(), brief(name)))
