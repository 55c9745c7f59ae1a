"""Make caches of engines whose elements tell where they are, by the oracles of `engine_layouts`."""

import itertools

import engine_layouts
import numpy as np

from kvkit.layouts import NAMED

SIZES = {"L": 2, "B": 2, "N": 32, "H": 2, "C": 32}
NAMES = sorted(engine_layouts.make(**SIZES))
SPLIT = {"ascend-nz", "vllm-ascend-nz", "vllm-v0", "vllm-cpu-amx"}


def axes_of(name):
    return NAMED[name].layout.names


def sizes_for(*names, **sizes):
    """Return sizes that all of these layouts can have: 1 for an axis that one of them lacks."""
    common = frozenset.intersection(*map(axes_of, names))
    absent = {axis: 1 for axis, letter in (("L", "l"), ("H", "h")) if letter not in common}
    return SIZES | sizes | absent


def said(name, sizes):
    """Return sizes by the names of kvkit's axes."""
    known = {axis.lower(): size for axis, size in sizes.items() if axis.lower() in axes_of(name)}
    if "b" not in axes_of(name):
        known["n"] = sizes["B"] * sizes["N"]
    return known


def empty(engine, dtype=np.uint16):
    """Return the empty arrays of a layout, in nested lists."""

    def made(lists, path):
        if not lists:
            is_value = engine.value_shape != engine.shape and path[-1:] == (1,)
            return np.zeros(engine.value_shape if is_value else engine.shape, dtype)
        return [made(lists[1:], (*path, i)) for i in range(lists[0])]

    return made(engine.lists, ())


def array_at(arrays, path):
    for i in path:
        arrays = arrays[i]
    return arrays


def elements(name, sizes):
    """Yield (layer, kv, b, index of the array, offsets [N, H, C]) by the engine's index formula."""
    engine = engine_layouts.make(**sizes)[name]
    n, h, c = np.ogrid[: sizes["N"], : sizes["H"], : sizes["C"]]
    kinds = range(2 if "kv" in axes_of(name) else 1)
    for layer, kv, b in itertools.product(range(sizes["L"]), kinds, range(sizes["B"])):
        path, offset = engine.index(layer, kv, b, n, h, c)
        yield layer, kv, b, path, np.broadcast_to(offset, (sizes["N"], sizes["H"], sizes["C"]))


def values(sizes, kinds=2, dtype=np.uint16):
    """Return different numbers [L, kv, B, N, H, C] in random order."""
    shape = sizes["L"], kinds, sizes["B"], sizes["N"], sizes["H"], sizes["C"]
    return np.random.default_rng(0).permutation(np.prod(shape)).astype(dtype).reshape(shape)


def filled(name, sizes, data):
    """Return the cache of an engine with these values, written by its index formula."""
    arrays = empty(engine_layouts.make(**sizes)[name], data.dtype)
    for layer, kv, b, path, offsets in elements(name, sizes):
        array_at(arrays, path).reshape(-1)[offsets] = data[layer, kv, b]
    return arrays


def kinds_of(name):
    return 2 if "kv" in axes_of(name) else 1


def same(one, other):
    """Return whether nested lists of arrays are equal."""
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()


def flat(arrays):
    """Return the bytes of each array, in the order of the lists."""
    if not isinstance(arrays, list):
        yield arrays.tobytes()
        return
    for each in arrays:
        yield from flat(each)
