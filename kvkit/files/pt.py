"""Read files of torch.save. torch maps their tensors and runs no code of the file (weights_only).

Tensors in lists, tuples and dicts get names joined by dots: a list of pairs of keys and values becomes
``cache.LAYER.KV``. Strides stay as saved.
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

CACHE_CLASS = re.compile(r"Unsupported global: GLOBAL ([\w.]*Cache)\b")  # in an error of torch.load
SAVES_ARRAYS = (  # code that an error proposes
    "arrays = {f'past_key_values.{i}.{side}': getattr(layer, f'{side}s') "
    "for i, layer in enumerate(cache.layers) for side in ('key', 'value')}; torch.save(arrays, path)"
)
MAX_DEPTH, MAX_ARRAYS = 8, 100_000  # of nested lists and dicts; more is no cache
MAX_EXPANSION = 64  # bytes of tensors for a byte of file: strides of 0 may repeat heads, but not fill a disk


def read(path: FilePath) -> Contents:
    """Read the tensors of a file; its numbers and texts become metadata."""
    torch = import_package(path, "torch", "torch")
    with reading_errors(path, "torch cannot load it without running code of its own"):
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            if (named := CACHE_CLASS.search(str(error))) is None:
                raise
            what = f"it has a {brief(named[1])}, which torch loads by running its code"
            raise file_error(path, what, f"save its arrays: {SAVES_ARRAYS}") from error
    arrays: dict[str, Array] = {}
    metadata: dict[str, Any] = {}
    collect_tensors(path, torch, saved, "", 0, arrays, metadata)
    status, total = os.stat(path), sum(array.nbytes for array in arrays.values())
    if total > MAX_EXPANSION * status.st_size:
        what = f"strides of 0 repeat its {status.st_size} bytes in tensors of {total} bytes"
        raise file_error(path, what, "save them without repeated elements")
    return Contents(arrays, metadata, status, "file of torch.save")


def collect_tensors(
    path: FilePath, torch: Any, value: Any, name: str, depth: int, arrays: dict[str, Array],
    metadata: dict[str, Any],
) -> None:  # fmt: skip
    """Add the tensors in a value of a file to `arrays`, and numbers and texts to `metadata`, by name."""
    if depth > MAX_DEPTH or len(arrays) > MAX_ARRAYS:
        what = f"more than {MAX_ARRAYS} arrays, or {MAX_DEPTH} levels"
        raise file_error(path, what, "save a cache's keys and values")
    if isinstance(value, torch.Tensor):
        name = name or CACHE
        with reading_errors(path, f"tensor {brief(name)} cannot be an array of numpy"):
            if value.layout is not torch.strided:
                raise ValueError(f"it is {value.layout}")
            float8 = members.FLOAT8.get(str(value.dtype).removeprefix("torch."))
            if float8 is not None:  # torch can pass only its bytes to numpy
                arrays[name] = as_numpy(value.detach().view(torch.uint8)).view(float8)
            else:
                arrays[name] = np.asarray(as_numpy(value.detach(), brief(name)))
    elif isinstance(value, (list, tuple, dict)):
        if not isinstance(value, dict):
            name, value = name or CACHE, dict(enumerate(value))
        for key, member in value.items():
            inner = f"{name}.{key}" if name else str(key)
            if inner in arrays or inner in metadata:
                raise file_error(path, f"two entries are called {brief(inner)}", "give each its own name")
            collect_tensors(path, torch, member, inner, depth + 1, arrays, metadata)
    elif isinstance(value, (int, float, str, bool, type(None))):
        metadata[brief(name)] = value
    else:
        what = f"{brief(name) or 'it'} is a {type(value).__name__}"
        raise file_error(path, what, "save tensors, in lists or dicts")
