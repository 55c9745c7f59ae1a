"""Check engines' pools of pages, of any strides: their layouts, block tables and slots."""

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from kvkit import checks
from kvkit.checks import index_tensors
from kvkit.checks.index_tensors import INT64_MAX, index, index_form, validate_table
from kvkit.checks.outputs import same_place
from kvkit.checks.records import Context, Side, StepIndex
from kvkit.checks.values import FORMATS, check_bytes, checked_format, element_step, is_broadcast
from kvkit.errors import argument_error, describe
from kvkit.formats import BY_DTYPE, FLOATS, Element
from kvkit.typed import Array

PAGE, ROW, HEAD, CONTENT = range(4)  # the axes of a view of a pool
AXES = ("b", "n", "h", "c")
NAMES = "key_cache", "value_cache"
INT32_MAX = np.iinfo(np.int32).max

Views = list[Array | None]  # [pages, rows, heads, content] of keys and of values


class PageTable(NamedTuple):
    """The pages of contexts: a table [B, M] of int64, or with `starts` a list of pages.

    In a list the pages of sequence b begin at ``starts[b]``. It keeps the caller's dtype, int64 or int32.
    """

    table: Array
    starts: Array | None = None


class PoolPlace(NamedTuple):
    """The strides of pages (`page`) and of rows (`step`) in a pool, in multiples of `unit` bytes.

    A row id counts units: row j of page i has the id ``i * page + j * step``. With pages 640 bytes apart and
    rows 64, the unit is 64 bytes, `page` is 10 and `step` is 1.
    """

    unit: int
    page: int
    step: int


def pool_axes(layout: object) -> list[str]:
    """Return the axes of a pool in a layout line, outermost first."""
    axes = layout.split() if isinstance(layout, str) else []
    known = len(set(axes)) == len(axes) and set(axes) <= {*AXES, "kv"}
    if not known or not {"b", "c"} <= set(axes):
        legal = "the axes of a pool, 'b n h c' in any order, with 'kv' if keys and values share it"
        raise argument_error("layout", f"{legal} ('h' and 'n' may be left out)", describe(layout))
    return axes


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
            given = split_pool(given, wholes[0], axes.index("kv"), layout, names)
        axes = [axis for axis in axes if axis != "kv"]
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


def split_pool(given: Views, pool: Array, at: int, layout: str, names: Sequence[str]) -> Views:
    """Return views of the keys and the values of one pool, whose axis `at` has both."""
    for name, array in zip(names, given, strict=True):
        if array is not None and not (isinstance(array, np.ndarray) and same_place(array, pool)):
            wanted = f"the same pool as {names[0]}, or views without the axis kv of {layout!r}"
            raise argument_error(name, wanted, describe(array))
    if pool.shape[at] != 2:
        raise argument_error(names[0], f"keys and values along axis {at} (kv)", f"shape {pool.shape}")
    return [pool[(slice(None),) * at + (side,)] for side in (0, 1)]


def pool_view(name: str, array: Array, axes: Sequence[str], legal: Collection[Element] | None) -> Array:
    """Return a view [pages, rows, heads, content] of a pool."""
    if legal is None:
        check_bytes(name, array, len(axes))
    else:
        checked_format(name, array, legal, len(axes))
    if 0 in [size for size, axis in zip(array.shape, axes, strict=True) if axis != "b"]:
        raise argument_error(name, "no axis of size 0 but that of blocks", f"shape {array.shape}")
    array = array.transpose([axes.index(axis) for axis in AXES if axis in axes])
    for axis, letter in enumerate(AXES):
        if letter not in axes:
            array = np.expand_dims(array, axis)
    if array.size and is_broadcast(array):
        got = f"a broadcast array (strides {array.strides})"
        raise argument_error(name, "elements at different addresses", got)
    return array


def place_of(pool: Array) -> PoolPlace:
    """Return the strides of pages and of rows in a view [pages, rows, heads, content]."""
    page, row = pool.strides[:2]
    # The stride of an axis of size 1 is arbitrary. It is replaced, so that it cannot make the unit smaller.
    if pool.shape[ROW] == 1:
        row = page or pool.itemsize
    if len(pool) == 1:
        page = row * pool.shape[ROW]
    unit = math.gcd(page, row) or pool.itemsize
    unit = -unit if row < 0 else unit
    return PoolPlace(unit, page // unit, row // unit)


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
        (scale.dtype, group, place_of(scale).unit, scale.strides[HEAD] if scale.shape[HEAD] > 1 else 0)
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
    key_place, value_place = place_of(key), place_of(value)
    key_side = Side(key.ctypes.data, 0, key_place.unit, key.strides[HEAD])
    value_side = Side(value.ctypes.data, 0, value_place.unit, value.strides[HEAD])
    if scales:
        key_side, value_side = (
            side.with_scales(scale.ctypes.data, 0, place_of(scale).unit, scale.strides[HEAD])
            for side, scale in zip((key_side, value_side), scales, strict=True)
        )
    return Context(
        data_dtype=fmt.name, cache_format=key_format.name,
        scale_format=BY_DTYPE[scales[0].dtype].name if scales else None,
        group=groups_of(scales, (key, value))[0] if scales else 0, heads=key.shape[HEAD],
        dim=elements_of(key, key_format), value_dim=elements_of(value, value_format),
        sides=(key_side, value_side),
        key_bytes=key.shape[CONTENT] * key.itemsize, value_bytes=value.shape[CONTENT] * value.itemsize,
        as_loaded=False, value_format=value_format.name, steps=(key_place.step, value_place.step),
        pages=(key_place.page, value_place.page),
        elements=(element_step(key), element_step(value)),
    )  # fmt: skip


def steps_of(key: Array, value: Array, pages: PageTable, lengths: Array, starts: Array) -> StepIndex:
    """Return the step of new tokens that begin at `starts`, over contexts in pages of two pools.

    The table of `pages` is overwritten with row ids, and becomes the table of the step.
    """
    keys, values = place_of(key), place_of(value)
    if max(len(key), 1) * max(abs(keys.page), abs(values.page)) > INT32_MAX:  # row ids may exceed int32
        pages = pages._replace(table=pages.table.astype(np.int64, copy=False))
    same_row_ids = keys[1:] == values[1:]
    value_page = None if same_row_ids else values.page
    return steps_over(pages, lengths, starts, key.shape[ROW], keys.page, value_page, pool_end(key, keys))


def steps_over(
    pages: PageTable, lengths: Array, starts: Array, page_size: int, page: int, value_page: int | None,
    rows: int,
) -> StepIndex:  # fmt: skip
    """Return the step of new tokens in a cache of `rows` rows, whose pages are `page` row ids apart.

    Pages of values are `value_page` row ids apart, or share the row ids of keys if it is None.
    """
    table, table_starts = pages
    kvstarts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=kvstarts[1:])
    value_table = None if value_page is None else table * table.dtype.type(value_page)
    np.multiply(table, page, out=table)
    return StepIndex(
        seqstarts=starts, kvstarts=kvstarts, start_pos=lengths, load_starts=lengths,
        table=table, table_starts=table_starts, value_table=value_table,
        page_size=page_size, tokens=int(starts[-1]), context=int(kvstarts[-1]), rows=rows,
    )  # fmt: skip


def pool_end(pool: Array, place: PoolPlace) -> int:
    """Return an upper bound of a pool's row ids; no bound is known if pages descend in memory."""
    pages, rows = pool.shape[:2]
    return INT64_MAX if place.page < 0 else (pages - 1) * place.page + (rows - 1) * place.step + 1


# Tables


def checked_table(
    block_tables: ArrayLike | tuple[ArrayLike, ArrayLike], lengths: Array, blocks: int, page_size: int
) -> PageTable:
    """Return the checked pages of contexts, from a table [B, M] or a tuple (indptr, indices)."""
    if isinstance(block_tables, tuple):
        return listed_pages(block_tables, lengths, blocks, page_size)
    table = index("block_tables", block_tables, 2)
    if len(table) != len(lengths):
        raise argument_error("block_tables", f"{len(lengths)} rows, one for each length", len(table))
    check_table(table, lengths, blocks, page_size)
    return PageTable(table)


def listed_pages(block_tables: tuple[Any, ...], lengths: Array, blocks: int, page_size: int) -> PageTable:
    """Return the checked pages of contexts from (indptr, indices)."""
    if len(block_tables) != 2:
        raise argument_error("block_tables", "[B, M], or a tuple (indptr, indices)", describe(block_tables))
    starts = index("block_tables", block_tables[0], length=len(lengths) + 1)
    pages = index_form("block_tables", block_tables[1], 1).copy()  # int32 stays int32: half the memory
    if starts[0] < 0 or (starts[1:] < starts[:-1]).any() or starts[-1] > len(pages):
        wanted = f"indptr that never decreases, within the {len(pages)} of indices"
        raise argument_error("block_tables", wanted, describe(block_tables[0]))
    need = pages_needed(lengths, page_size)
    short = np.flatnonzero(need > np.diff(starts))
    if len(short):
        i = short[0]
        held = f"{starts[i + 1] - starts[i]} of indices"
        wanted = f"{need[i]} blocks for the {lengths[i]} tokens of sequence {i}"
        raise argument_error("block_tables", wanted, held)
    if len(pages) and (pages.min() < 0 or pages.max() >= blocks):  # an error only if a sequence needs it
        for start, count in zip(starts.tolist(), need.tolist(), strict=False):
            used = pages[start : start + count]
            if count and (used.min() < 0 or used.max() >= blocks):
                i = int(((used < 0) | (used >= blocks)).argmax())
                wanted = f"a block from 0 to {blocks - 1}, one of {count} for a sequence"
                raise argument_error(f"block_tables[1][{start + i}]", wanted, used[i])
    if index_tensors.VALIDATES:
        validate_table(expanded_table(pages, starts, need), lengths, blocks, page_size)
    return PageTable(pages, starts)


def expanded_table(pages: Array, starts: Array, need: Array) -> Array:
    """Return listed pages as a table [B, M]; entries after a sequence's `need` pages are arbitrary."""
    at = starts[:-1, None] + np.arange(need.max(initial=0))
    table = pages.take(at, mode="clip") if len(pages) else np.zeros(at.shape, np.int64)
    return table.astype(np.int64, copy=False)


def used_pages(pages: PageTable, lengths: Array, page_size: int) -> Array:
    """Return the pages that contexts use, one sequence after the other."""
    need = pages_needed(lengths, page_size)
    if pages.starts is None:
        return pages.table[in_use(pages.table, need)]
    before = np.cumsum(need) - need
    return pages.table.take(np.repeat(pages.starts[:-1] - before, need) + np.arange(need.sum()))


def check_table(table: Array, lengths: Array, blocks: int, page_size: int) -> None:
    """Check the blocks of contexts in a table; entries after a context's last block are ignored."""
    need = pages_needed(lengths, page_size)
    if len(need) and need.max() > table.shape[1]:
        i = int(need.argmax())
        wanted = f"{need[i]} blocks for the {lengths[i]} tokens of sequence {i}"
        raise argument_error("block_tables", wanted, table.shape[1])
    outside = in_use(table, need) & ((table < 0) | (table >= blocks))
    if outside.any():
        i, j = np.argwhere(outside)[0]
        wanted = f"a block from 0 to {blocks - 1}, one of {need[i]} for {lengths[i]} tokens of sequence {i}"
        raise argument_error(f"block_tables[{i}, {j}]", wanted, table[i, j])
    validate_table(table, lengths, blocks, page_size)


def pages_needed(lengths: Array, page_size: int) -> Array:
    """Return how many pages each context needs."""
    if len(lengths) and lengths.min() < 0:
        raise argument_error("context_lens", "no length below 0", lengths.min())
    return -(-lengths // page_size)


def in_use(table: Array, need: Array) -> Array:
    """Return a mask [B, M] of the first `need[b]` entries of each row of a table."""
    return np.arange(table.shape[1]) < need[:, None]


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
