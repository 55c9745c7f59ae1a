"""Prompt caches of MLX: safetensors files whose metadata has a class for each layer.

Tensors are called LAYER.PART, in the order of each class's state; the metadata's 0 has the numbers of each
layer, 1 what its owner added, 2 the class of each layer. What is known of a class becomes ``cache.LAYER.KV``.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from kvkit.errors import brief
from kvkit.files.contents import Contents
from kvkit.files.description import Description
from kvkit.files.errors import file_error
from kvkit.typed import Array, FilePath

LINE = "l kv | b h n c"
CLASSES = re.compile(r"2\.(\d{1,6})")
PLAIN = "KVCache", "ConcatenateKVCache"
CODED = "QuantizedKVCache"
PARTS = "cache", "scales", "minima"  # of a coded layer: words of codes, and what they are turned back with


def is_cache(contents: Contents) -> bool:
    """Return whether a safetensors file is a prompt cache."""
    return "2.0" in contents.metadata and all(isinstance(text, str) for text in contents.metadata.values())


def read(path: FilePath, contents: Contents) -> Contents:
    """Return the contents with kvkit's names, if all layers are of known classes."""
    texts = contents.metadata
    by_layer = {int(match[1]): texts[name] for name in texts if (match := CLASSES.fullmatch(name))}
    if sorted(by_layer) != list(range(len(by_layer))):
        raise file_error(path, "its metadata does not name the class of every layer")
    kinds = [by_layer[layer] for layer in range(len(by_layer))]
    about = {"classes": kinds, "metadata": {k[2:]: text for k, text in texts.items() if k.startswith("1.")}}
    found = replace(contents, metadata=about, kind="prompt cache of MLX")
    if set(kinds) <= set(PLAIN):
        return with_float_layers(path, found, len(kinds))
    if set(kinds) == {CODED}:
        return with_coded_layers(path, found, len(kinds), texts)
    others = ", ".join(brief(kind) for kind in sorted(set(kinds) - {*PLAIN, CODED})) or "several"
    return replace(found, notes=(f"layers are of class {others}: what their arrays mean is not known here",))


def with_float_layers(path: FilePath, found: Contents, layers: int) -> Contents:
    """Return the contents of layers of floats."""
    arrays = {
        f"cache.{layer}.{kv}": find_tensor(path, found.arrays, f"{layer}.{kv}", 4)
        for layer in range(layers)
        for kv in range(2)
    }
    return replace(found, arrays=arrays, description=describe_arrays(arrays, layers))


def with_coded_layers(path: FilePath, found: Contents, layers: int, texts: Mapping[str, str]) -> Contents:
    """Return the contents of layers of codes, which have one width and group size."""
    numbers = {tuple(texts.get(f"0.{layer}.{i}", "") for i in (1, 2)) for layer in range(layers)}
    if len(numbers) != 1 or not all(text.isascii() and text.isdecimal() for text in min(numbers)):
        raise file_error(path, "its layers have codes of several kinds, or none is said")
    group, bits = map(int, min(numbers))
    if bits not in (2, 3, 4, 5, 6, 8) or group not in (16, 32, 64, 128):
        raise file_error(path, f"codes of {bits} bits in groups of {group} are none of MLX's")
    arrays = {
        f"{name}.{layer}.{kv}": find_tensor(path, found.arrays, f"{layer}.{kv}.{part}", 4)
        for part, name in enumerate(PARTS)
        for layer in range(layers)
        for kv in range(2)
    }
    said = describe_arrays(arrays, layers)
    sizes = {axis: count for axis, count in said.sizes.items() if axis != "c"}  # which are words of codes
    notes = (f"values are code x scale + minimum, in groups of {group}: words of 32 bits, low codes first",)
    return replace(
        found,
        arrays=arrays,
        metadata=found.metadata
        | {"bits": bits, "group": group, "head_dim": said.sizes.get("c", 0) * 32 // bits},
        description=replace(said, sizes=sizes, format=f"mlx{bits}:g{group}"),
        notes=notes,
    )


def find_tensor(path: FilePath, arrays: Mapping[str, Array], name: str, axes: int) -> Array:
    """Return a tensor by its name, which has to have so many axes."""
    if name not in arrays:
        raise file_error(path, f"tensor {name} is missing")
    if arrays[name].ndim != axes:
        raise file_error(path, f"tensor {name} has {arrays[name].ndim} axes, not {axes}")
    return arrays[name]


def describe_arrays(arrays: Mapping[str, Array], layers: int) -> Description:
    """Return the line and sizes of a cache's arrays, as far as all layers have the same."""
    shapes = {(kv, arrays[f"cache.{layer}.{kv}"].shape) for layer in range(layers) for kv in range(2)}
    sizes = {"l": layers}
    if len(shapes) == 2:
        (_, keys), (_, values) = sorted(shapes)
        sizes |= dict(zip("bhnc", keys, strict=True))
        if values[3] != keys[3]:
            sizes["v"] = values[3]
    return Description(LINE, sizes, arrays["cache.0.0"].dtype.name, rope_applied=True)
