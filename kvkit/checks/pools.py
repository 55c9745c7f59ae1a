"""Check engines' pools of pages, of any strides: their layouts, block tables and slots."""

import functools
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from kvkit import checks
from kvkit.checks.index_tensors import index
from kvkit.checks.outputs import same_place
from kvkit.checks.records import Context, Side
from kvkit.checks.values import FORMATS, check_bytes, checked_format, element_step, is_broadcast
from kvkit.errors import argument_error, describe
from kvkit.formats import BY_DTYPE, FLOATS, Element
from kvkit.runtime.arrays import address
from kvkit.typed import Array

PAGE, ROW, HEAD, CONTENT = range(4)  # the axes of a view of a pool
AXES = ("b", "n", "h", "c")
NAMES = "key_cache", "value_cache"

Views = list[Array | None]  # [pages, rows, heads, content] of keys and of values


class BlockCopy(NamedTuple):
    """A checked copy of blocks, in each pair of a source and a target."""

    arrays: list[tuple[Array, Array]]
    src: Array
    dst: Array


def pool_axes(layout: object) -> tuple[str, ...]:
    """Return the axes of a pool in a layout line, outermost first."""
    axes = known_axes(layout) if isinstance(layout, str) else None
    if axes is None:
        legal = "the axes of a pool, 'b n h c' in any order, with 'kv' if keys and values share it"
        raise argument_error("layout", f"{legal} ('h' and 'n' may be left out)", describe(layout))
    return axes


@functools.cache
def known_axes(layout: str) -> tuple[str, ...] | None:
    """Return the axes of a layout line, None if it is not that of a pool."""
    axes = tuple(layout.split())
    known = len(set(axes)) == len(axes) and set(axes) <= {*AXES, "kv"} and {"b", "c"} <= set(axes)
    return axes if known else None


def pool_views(
    key_cache: Array | None,
    value_cache: Array | None,
    layout: str,
    legal: Collection[Element] | None,
    names: tuple[str, str] = NAMES,
) -> Views:
    """Return views [pages, rows, heads, content] of keys and values in pools of any strides.

    Elements have one of the formats `legal`, or are bytes if that is None. A pool whose layout has an axis
    `kv` is passed as both arguments, or as one with None for the other.
    """
    axes = pool_axes(layout)
    given: Views = [key_cache, value_cache]
    if "kv" in axes:  # arrays with this axis are the whole pool, others views of its keys or values
        wholes = [array for array in given if isinstance(array, np.ndarray) and array.ndim == len(axes)]
        if wholes:
            pool, at = wholes[0], axes.index("kv")
            for name, array in zip(names, given, strict=True):
                if array is not None and not (isinstance(array, np.ndarray) and same_place(array, pool)):
                    wanted = f"the same pool as {names[0]}, or views without the axis kv of {layout!r}"
                    raise argument_error(name, wanted, describe(array))
            if pool.shape[at] != 2:
                raise argument_error(names[0], f"keys and values along axis {at} (kv)", f"shape {pool.shape}")
            given = [pool[(slice(None),) * at + (side,)] for side in (0, 1)]
        axes = tuple(axis for axis in axes if axis != "kv")
    views = [
        None if array is None else pool_view(name, array, axes, legal)
        for name, array in zip(names, given, strict=True)
    ]
    key, value = views
    if key is not None and value is not None and value.shape[:CONTENT] != key.shape[:CONTENT]:
        sizes = "{} blocks of {} rows and {} heads, as {}".format(*key.shape[:CONTENT], names[0])
        raise argument_error(names[1], sizes, "{} of {} and {}".format(*value.shape[:CONTENT]))
    return views


def present(name: str, array: Array | None, wanted: str) -> Array:
    """Return an array, which must not be None."""
    if array is None:
        raise argument_error(name, wanted, "None")
    return array


def pool_view(name: str, array: Array, axes: tuple[str, ...], legal: Collection[Element] | None) -> Array:
    """Return a view [pages, rows, heads, content] of a pool."""
    if legal is None:
        check_bytes(name, array, len(axes))
    else:
        checked_format(name, array, legal, len(axes))
    if 0 in array.shape and 0 in [size for size, axis in zip(array.shape, axes, strict=True) if axis != "b"]:
        raise argument_error(name, "no axis of size 0 but that of blocks", f"shape {array.shape}")
    if axes != AXES:
        array = array.transpose([axes.index(axis) for axis in AXES if axis in axes])
        for axis, letter in enumerate(AXES):
            if letter not in axes:
                array = np.expand_dims(array, axis)
    if is_broadcast(array) and array.size:
        got = f"a broadcast array (strides {array.strides})"
        raise argument_error(name, "elements at different addresses", got)
    return array


def place_of(pool: Array) -> tuple[int, int, int]:
    """Return (unit, page, step) of a view [pages, rows, heads, content]: its strides in row ids.

    A row id counts units of bytes: row j of page i has the id ``i * page + j * step``. With pages 640 bytes
    apart and rows 64, the unit is 64 bytes, `page` is 10 and `step` is 1.
    """
    page, row = pool.strides[:2]
    # The stride of an axis of size 1 is arbitrary. It is replaced, so that it cannot make the unit smaller.
    if pool.shape[ROW] == 1:
        row = page or pool.itemsize
    if len(pool) == 1:
        page = row * pool.shape[ROW]
    unit = math.gcd(page, row) or pool.itemsize
    unit = -unit if row < 0 else unit
    return unit, page // unit, row // unit


def is_per_token(scale: object, batch: int, heads: int) -> bool:
    """Return whether the shape of scales means a scale per token and head, not per head or for all."""
    return isinstance(scale, np.ndarray) and scale.shape not in ((), (heads,), (batch, heads))


def scale_views(given: Sequence[Any], views: Sequence[Array | None], one_pool: bool, layout: str) -> Views:
    """Return views [pages, rows, heads, groups] of the scales of codes in pools, which are viewed as `views`.

    Scales have the axes of `layout`, perhaps without c. `one_pool` says whether one pool holds keys and
    values. If a view of a pool is None, its scales are too.
    """
    names, arrays = ("key_scale", "value_scale"), list(given)
    axes = [axis for axis in pool_axes(layout) if one_pool or axis != "kv"]
    for i, array in enumerate(arrays):
        if isinstance(array, np.ndarray) and array.ndim == len(axes) - 1:
            arrays[i] = np.expand_dims(array, axes.index("c"))
    scales = pool_views(arrays[0], arrays[1], " ".join(axes), FLOATS, names)
    for i, (name, pool_name, pool) in enumerate(zip(names, NAMES, views, strict=True)):
        if pool is None:
            scales[i] = None
            continue
        scale = present(name, scales[i], f"an array, for codes in {pool_name}")
        groups, dim = scale.shape[CONTENT], pool.shape[CONTENT]
        if scale.shape[:CONTENT] != pool.shape[:CONTENT] or dim % groups:
            wanted = f"scales for {pool.shape[:CONTENT]} (pages, tokens, heads), of groups of the {dim} codes"
            raise argument_error(name, wanted, scale.shape)
        if place_of(scale)[1:] != place_of(pool)[1:]:  # a row and its scales have the same row id
            wanted = f"pages and tokens in the order of {pool_name}"
            raise argument_error(name, wanted, f"strides {scale.strides[:2]}")
        for array_name, array in ((pool_name, pool), (name, scale)):
            if element_step(array):
                raise argument_error(array_name, "a contiguous last axis", f"strides {array.strides}")
    return scales


def check_alike(scales: Sequence[Array], views: Sequence[Array]) -> None:
    """Check that scales of keys and values have the same dtype, groups and strides."""
    of_keys, of_values = (
        (scale.dtype, group, place_of(scale)[0], scale.strides[HEAD] if scale.shape[HEAD] > 1 else 0)
        for scale, group in zip(scales, groups_of(scales, views), strict=True)
    )
    if of_keys != of_values:
        raise argument_error("value_scale", "the dtype, groups and strides of key_scale", describe(scales[1]))


def groups_of(scales: Sequence[Array], views: Sequence[Array]) -> list[int]:
    """Return how many elements of keys, and of values, share a scale; 0 if a whole head of float8 does."""
    counts, dims = ([array.shape[CONTENT] for array in arrays] for arrays in (scales, views))
    if max(counts) == 1:  # kernels have one group size for both: the larger head, of one scale
        return [0 if FORMATS[views[0].dtype].minifloat else max(dims)] * 2
    return [dim // count for dim, count in zip(dims, counts, strict=True)]


def elements_of(pool: Array, stored: Element) -> int:
    """Return how many elements a head has in a view of a pool."""
    count: int = pool.shape[CONTENT]
    return count // stored.block.bytes * stored.block.elements if stored.block else count


def context_of(
    fmt: Element,
    key: Array,
    value: Array,
    scales: Sequence[Array] | None = None,
    stored: tuple[Element, Element] | None = None,
) -> Context:
    """Return the `Context` of pools [pages, rows, heads, content] and their scales, for queries of `fmt`.

    `stored` are the formats of keys and values, if dtypes do not say them.
    """
    key_format, value_format = stored or (FORMATS[key.dtype], FORMATS[value.dtype])
    (key_unit, key_page, key_step), (value_unit, value_page, value_step) = place_of(key), place_of(value)
    key_side = Side(address(key), 0, key_unit, key.strides[HEAD])
    value_side = Side(address(value), 0, value_unit, value.strides[HEAD])
    if scales:
        key_side, value_side = (
            side.with_scales(address(scale), 0, place_of(scale)[0], scale.strides[HEAD])
            for side, scale in zip((key_side, value_side), scales, strict=True)
        )
    return Context(
        data_dtype=fmt.name, cache_format=key_format.name,
        scale_format=BY_DTYPE[scales[0].dtype].name if scales else None,
        group=groups_of(scales, (key, value))[0] if scales else 0, heads=key.shape[HEAD],
        dim=elements_of(key, key_format), value_dim=elements_of(value, value_format),
        sides=(key_side, value_side),
        key_bytes=key.shape[CONTENT] * key.itemsize, value_bytes=value.shape[CONTENT] * value.itemsize,
        as_loaded=False, value_format=value_format.name, steps=(key_step, value_step),
        pages=(key_page, value_page), elements=(element_step(key), element_step(value)),
    )  # fmt: skip


# Slots


def plain_pieces(tokens: int, capacity: int, slot_mapping: ArrayLike) -> Array:
    """Return the pieces (runs of tokens and slots) of a mapping from tokens to slots."""
    slots = index("slot_mapping", slot_mapping, length=tokens)
    return checks.slots.pieces_of_tokens(slots, capacity)


# Copies


def blocks_within(name: str, ids: Array, blocks: int) -> None:
    """Check that block ids are within a cache of `blocks` blocks."""
    outside = np.flatnonzero((ids < 0) | (ids >= blocks))
    if len(outside):
        raise argument_error(f"{name}[{outside[0]}]", f"a block from 0 to {blocks - 1}", ids[outside[0]])


def copied_once(name: str, src: Array, dst: Array, one_cache: bool) -> None:
    """Check that no block is written twice and, within `one_cache`, none is both read and written."""
    blocks, times = np.unique(dst, return_counts=True)
    if len(blocks) < len(dst):
        raise argument_error(name, "blocks that are written once", f"block {blocks[times > 1][0]} twice")
    if one_cache and np.isin(dst, src).any():
        raise argument_error(name, "no block that is copied too", f"block {dst[np.isin(dst, src)][0]}")
