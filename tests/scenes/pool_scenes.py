"""Make pools of pages as engines have them: memory, arguments of a call, and views for an oracle."""

from dataclasses import dataclass

import numpy as np

from kvkit.formats.elements import BY_NAME
from kvkit.tools.vectors.draws import ANY_INDEX

AXES = ("b", "n", "h", "c")
# (axes of the memory; what keys and values are of it: "pools", "pool", "views" or "halves" of the content)
ENGINES = {
    "flash-attn": ("b n h c", "pools"), "separate HND": ("b h n c", "pools"),
    "FlashInfer": ("b kv n h c", "pool"), "FlashInfer HND": ("b kv h n c", "pool"),
    "vLLM 0.25": ("kv b n h c", "pool"), "vLLM LBNHC": ("b n h kv c", "pool"),
    "vLLM LBHNC": ("b h n c", "halves"), "vLLM LBNHC halves": ("b n h c", "halves"),
    "DeepSpeed": ("b n kv h c", "views"), "TensorRT-LLM": ("b l kv h n c", "views"),
    "content apart": ("b h c n", "pools"), "shared pages": ("b n h c", "one after the other"),
}  # fmt: skip


@dataclass
class Pools:
    """Holds pools: `given` to a call with `layout`, and views [pages, tokens, heads, elements]."""

    memory: list
    given: tuple
    layout: str
    keys: np.ndarray
    values: np.ndarray


def made(engine, blocks, rows, heads, dim, value_dim, dtype):
    """Return pools of an engine, all 0xFF; a pool with one head size takes the larger one."""
    axes, kind = ENGINES[engine]
    names, dtype = axes.split(), np.dtype(dtype)
    sizes = {"b": blocks, "n": rows, "h": heads, "c": dim, "l": 3, "kv": 2}

    def filled(shape, kind=dtype):
        return (
            np.full(int(np.prod(shape)) * np.dtype(kind).itemsize, 0xFF, np.uint8).view(kind).reshape(shape)
        )

    def seen(array, names):
        return array.transpose([names.index(axis) for axis in AXES])

    def shape(c):
        return [c if axis == "c" else sizes[axis] for axis in names]

    if kind == "pools":
        memory = [filled(shape(c)) for c in (dim, value_dim)]
        return Pools(memory, tuple(memory), axes, *(seen(array, names) for array in memory))
    if kind == "halves":  # keys and values side by side in a row
        pool = filled(shape(dim + value_dim))
        given = pool[..., :dim], pool[..., dim:]
        return Pools([pool], given, axes, *(seen(array, names) for array in given))
    if kind == "one after the other":  # a page has keys, a gap, then values, of sizes of their own
        spans = [rows * heads * c * dtype.itemsize for c in (dim, value_dim)]
        at = -(-spans[0] // 64) * 64
        pool = filled((blocks, at + -(-spans[1] // 64) * 64 + 6), np.uint8)
        given = []
        for begin, c in ((0, dim), (at, value_dim)):
            strides = pool.strides[0], heads * c * dtype.itemsize, c * dtype.itemsize, dtype.itemsize
            given.append(np.ndarray((blocks, rows, heads, c), dtype, pool.data, begin, strides))
        return Pools([pool], tuple(given), axes, *given)
    sizes["c"] = max(dim, value_dim)
    pool = filled([sizes[axis] for axis in names])
    part, left = pool, list(names)
    if "l" in left:
        part = part[(slice(None),) * left.index("l") + (1,)]
        left.remove("l")
    at = left.index("kv")
    left.remove("kv")
    views = [part[(slice(None),) * at + (side,)][..., :c] for side, c in enumerate((dim, value_dim))]
    if kind == "pool" and dim == value_dim:
        return Pools([pool], (pool, pool), axes, *(seen(view, left) for view in views))
    layout = axes.replace("l ", "") if dim == value_dim else " ".join(left)
    return Pools([pool], tuple(views), layout, *(seen(view, left) for view in views))


def as_table(rng, pages, blocks):
    """Return pages as a table [B, M], with random numbers after the last page of a sequence."""
    columns = max(map(len, pages), default=0) + int(rng.integers(0, 3))
    table = rng.choice([blocks, *ANY_INDEX], (len(pages), columns))
    for row, own in zip(table, pages, strict=True):
        row[: len(own)] = own
    return table


def as_lists(pages):
    """Return pages as (indptr, indices)."""
    starts = np.cumsum([0, *map(len, pages)])
    return starts, np.concatenate([*pages, []]).astype(np.int64)


def drawn(rng, engine, name):
    """Return pools of 6 pages of 4 rows, 2 heads and 16 elements, with random contents."""
    pools = made(engine, 6, 4, 2, 16, 16, BY_NAME[name].dtype)
    for side in (pools.keys, pools.values):
        side[...] = (rng.standard_normal(side.shape) * (30 if name == "int8" else 1)).astype(side.dtype)
    return pools
