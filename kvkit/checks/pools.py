"""Pools of pages as engines have them, of any strides: their layouts, places, tables and slots."""

import math
from typing import NamedTuple

import numpy as np

from kvkit import checks
from kvkit.checks import validation
from kvkit.checks.index_tensors import INT64_MAX, index
from kvkit.checks.outputs import one_place
from kvkit.checks.records import Context, Side, Steps
from kvkit.checks.tensors import FORMATS, in_one_place, step, tensor
from kvkit.errors import argument_error, describe
from kvkit.formats import BY_DTYPE, FLOATS

PAGE, ROW, HEAD, CONTENT = range(4)  # the axes of a view of a pool
AXES = ("b", "n", "h", "c")
NAMES = "key_cache", "value_cache"


class Place(NamedTuple):
    """How far apart pages and rows lie, counted in `unit` bytes."""

    unit: int
    page: int
    step: int


def axes_of(layout):
    """The axes of a pool, outermost first, in a layout line."""
    axes = layout.split() if isinstance(layout, str) else []
    known = len(set(axes)) == len(axes) and set(axes) <= {*AXES, "kv"}
    if not known or not {"b", "c"} <= set(axes):
        legal = "the axes of a pool, 'b n h c' in any order, with 'kv' if keys and values share it"
        raise argument_error("layout", f"{legal} ('h' and 'n' may be left out)", describe(layout))
    return axes


def pools(key_cache, value_cache, layout, legal, names=NAMES):
    """Views [pages, rows, heads, content] of keys and values in pools of any strides; None stays None.

    A pool of both, whose layout has an axis `kv`, is given twice, or once beside None.
    """
    axes = axes_of(layout)
    given = [key_cache, value_cache]
    if "kv" in axes:
        both = [array for array in given if isinstance(array, np.ndarray) and array.ndim == len(axes)]
        if both:
            given = halves(given, both[0], axes.index("kv"), layout, names)
        axes = [axis for axis in axes if axis != "kv"]
    views = [
        None if array is None else view(name, array, axes, legal)
        for name, array in zip(names, given, strict=True)
    ]
    there = [view for view in views if view is not None]
    for name, other in zip(names, views, strict=True):
        if other is not None and other.shape[:CONTENT] != there[0].shape[:CONTENT]:
            blocks, rows, heads, _ = there[0].shape
            sizes = f"{blocks} blocks of {rows} rows and {heads} heads, as {names[0]}"
            raise argument_error(name, sizes, "{} of {} and {}".format(*other.shape[:CONTENT]))
    return views


def halves(given, pool, at, layout, names):
    """Keys and values of one pool."""
    for name, array in zip(names, given, strict=True):
        if array is not None and not (isinstance(array, np.ndarray) and one_place(array, pool)):
            wanted = f"the same pool as {names[0]}, or views without the axis kv of {layout!r}"
            raise argument_error(name, wanted, describe(array))
    if pool.shape[at] != 2:
        raise argument_error(names[0], f"keys and values along axis {at} (kv)", f"shape {pool.shape}")
    return [pool[(slice(None),) * at + (side,)] for side in (0, 1)]


def view(name, array, axes, legal):
    """A pool as [pages, rows, heads, content]."""
    tensor(name, array, legal, len(axes))
    if min(array.shape) < 1:
        raise argument_error(name, "no axis of size 0", f"shape {array.shape}")
    array = array.transpose([axes.index(axis) for axis in AXES if axis in axes])
    for axis, letter in enumerate(AXES):
        if letter not in axes:
            array = np.expand_dims(array, axis)
    if in_one_place(array):
        raise argument_error(
            name, "elements apart", f"strides {array.strides}, of an array that is broadcast"
        )
    return array


def place_of(pool):
    """The `Place` of a view [pages, rows, heads, content]."""
    page, row = pool.strides[:2]
    if pool.shape[ROW] == 1:
        row = page or pool.itemsize
    if len(pool) == 1:
        page = row * pool.shape[ROW]
    unit = math.gcd(page, row) or pool.itemsize
    unit = -unit if row < 0 else unit
    return Place(unit, page // unit, row // unit)


def of_tokens(scale, batch, heads):
    """Whether scales are for each token and head, by their shape; others are for heads, or for all."""
    return isinstance(scale, np.ndarray) and scale.shape not in ((), (heads,), (batch, heads))


def scales(key_scale, value_scale, views, whole, layout):
    """Views [pages, rows, heads, groups] of the scales of codes, whose axes are those of their pools.

    The last may be left out; `whole` says whether one pool holds both sides. A side without a pool has none.
    """
    names, given = ("key_scale", "value_scale"), [key_scale, value_scale]
    axes = [axis for axis in axes_of(layout) if whole or axis != "kv"]
    for i, array in enumerate(given):
        if isinstance(array, np.ndarray) and array.ndim == len(axes) - 1:
            given[i] = np.expand_dims(array, axes.index("c"))
    cells = pools(given[0], given[1], " ".join(axes), FLOATS, names)
    for i, (name, pool_name, cell, pool) in enumerate(zip(names, NAMES, cells, views, strict=True)):
        if pool is None:
            cells[i] = None
            continue
        if cell is None:
            raise argument_error(name, f"an array, for codes in {pool_name}", "None")
        groups, dim = cell.shape[CONTENT], pool.shape[CONTENT]
        if cell.shape[:CONTENT] != pool.shape[:CONTENT] or dim % groups:
            wanted = f"scales for {pool.shape[:CONTENT]} (pages, tokens, heads), of groups of the {dim} codes"
            raise argument_error(name, wanted, cell.shape)
        if place_of(cell)[1:] != place_of(pool)[1:]:
            raise argument_error(
                name, f"pages and tokens in the order of {pool_name}", f"strides {cell.strides[:2]}"
            )
        for each, array in ((pool_name, pool), (name, cell)):
            if step(array):
                raise argument_error(each, "a contiguous last axis", f"strides {array.strides}")
    return cells


def alike(cells, views):
    """Check that scales of keys and of values differ in nothing but where they begin."""
    keys, values = (
        (cell.dtype, group_of(cell, pool), place_of(cell).unit, cell.strides[HEAD])
        for cell, pool in zip(cells, views, strict=True)
    )
    if keys != values:
        raise argument_error("value_scale", "the dtype, groups and strides of key_scale", describe(cells[1]))


def group_of(cell, pool):
    """The elements that share a scale; 0 for floats of 8 bits that a whole head shares one of."""
    groups = cell.shape[CONTENT]
    return 0 if groups == 1 and FORMATS[pool.dtype].minifloat else pool.shape[CONTENT] // groups


def context_of(fmt, key, value, cells=None):
    """Pools as attention sees them, with the scales of codes, for queries of a format."""
    formats = [FORMATS[pool.dtype].name for pool in (key, value)]
    places, ends = [place_of(pool) for pool in (key, value)], [(0, 0, 0, 0)] * 2
    cell = cells and BY_DTYPE[cells[0].dtype].name
    group = group_of(cells[0], key) if cells else 0
    if cells:
        ends = [(each.ctypes.data, 0, place_of(each).unit, each.strides[HEAD]) for each in cells]
    key_side, value_side = (
        Side(pool.ctypes.data, 0, place.unit, pool.strides[HEAD], *end)
        for pool, place, end in zip((key, value), places, ends, strict=True)
    )
    sizes = key.shape[HEAD], key.shape[CONTENT], value.shape[CONTENT]
    spans = sizes[1] * key.itemsize, sizes[2] * value.itemsize
    return Context(
        fmt.name, formats[0], cell, group, *sizes, (key_side, value_side), *spans, as_loaded=False,
        value_stored=formats[1], steps=tuple(place.step for place in places),
        elements=(step(key), step(value)),
    )  # fmt: skip


def steps_of(key, value, table, lengths, starts):
    """Sequences of new tokens that begin at `starts`, over contexts in the pages of a table."""
    kvstarts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=kvstarts[1:])
    keys, values = place_of(key), place_of(value)
    own = None if keys[1:] == values[1:] else table * values.page
    return Steps(
        starts, kvstarts, lengths, lengths, table * keys.page, key.shape[ROW],
        int(starts[-1]), int(kvstarts[-1]), end(key, keys), value_table=own,
    )  # fmt: skip


def end(pool, place):
    """More than the number of any row of a pool; where pages come in descending order those are negative."""
    pages, rows = pool.shape[:2]
    return INT64_MAX if place.page < 0 else (pages - 1) * place.page + (rows - 1) * place.step + 1


# Tables


def table_of(block_tables, lengths, blocks, page_size):
    """The checked pages of contexts of some lengths [B, M], of such a table or of (indptr, indices)."""
    if isinstance(block_tables, tuple):
        return listed_pages(block_tables, lengths, blocks, page_size)
    table = index("block_tables", block_tables, 2, len(lengths))
    check_table(table, lengths, blocks, page_size)
    return table


def listed_pages(block_tables, lengths, blocks, page_size):
    """The pages of contexts that are listed one sequence after the other."""
    if len(block_tables) != 2:
        raise argument_error("block_tables", "[B, M], or a tuple (indptr, indices)", describe(block_tables))
    starts = index("block_tables", block_tables[0], length=len(lengths) + 1)
    pages = index("block_tables", block_tables[1])
    if starts[0] < 0 or (starts[1:] < starts[:-1]).any() or starts[-1] > len(pages):
        wanted = f"indptr that never decreases, within the {len(pages)} of indices"
        raise argument_error("block_tables", wanted, describe(block_tables[0]))
    need = needed(lengths, page_size)
    short = np.flatnonzero(need > np.diff(starts))
    if len(short):
        i = short[0]
        held = f"{starts[i + 1] - starts[i]} of indices"
        raise argument_error("block_tables", f"{need[i]} blocks for the {lengths[i]} rows of entry {i}", held)
    column = np.arange(need.max(initial=0))
    at = starts[:-1, None] + column
    table = pages.take(at, mode="clip") if len(pages) else np.zeros(at.shape, np.int64)
    outside = there(table, need) & ((table < 0) | (table >= blocks))
    if outside.any():
        i, j = np.argwhere(outside)[0]
        raise argument_error(f"block_tables[1][{at[i, j]}]", f"a block from 0 to {blocks - 1}", table[i, j])
    validation.block_tables(table, lengths, blocks, page_size)
    return table


def check_table(table, lengths, blocks, page_size):
    """Check the blocks that contexts lie in; what is behind them may be anything."""
    need = needed(lengths, page_size)
    if len(need) and need.max() > table.shape[1]:
        i = int(need.argmax())
        raise argument_error(
            "block_tables", f"{need[i]} blocks for the {lengths[i]} rows of entry {i}", table.shape[1]
        )
    outside = there(table, need) & ((table < 0) | (table >= blocks))
    if outside.any():
        i, j = np.argwhere(outside)[0]
        raise argument_error(f"block_tables[{i}, {j}]", f"a block from 0 to {blocks - 1}", table[i, j])
    validation.block_tables(table, lengths, blocks, page_size)


def needed(lengths, page_size):
    """How many pages contexts take."""
    if len(lengths) and lengths.min() < 0:
        raise argument_error("context_lens", "no length below 0", lengths.min())
    return -(-lengths // page_size)


def there(table, need):
    """Which entries of a table hold something."""
    return np.arange(table.shape[1]) < need[:, None]


# Slots


def plain_pieces(tokens, capacity, slot_mapping):
    """The pieces of a slot for each token."""
    slots = index("slot_mapping", slot_mapping, length=tokens)
    (rule, one, two, three), pieces = checks.slots.plain(slots, capacity)
    if rule:
        raise broken_rule(rule, one, two, three, capacity)
    return pieces[:one]


def broken_rule(rule, one, two, three, capacity):
    """The error for what `checks.slots` found."""
    slots = checks.slots
    if rule == slots.CAPACITY:
        rows = f"{three} rows from there on" if three > 1 else "that slot"
        return argument_error(f"slot_mapping[{one}]", f"{rows} within the {capacity} slots of the cache", two)
    if rule == slots.TWICE:
        return argument_error(
            "slot_mapping", "a slot for one row only", f"slot {three} for entries {one} and {two}"
        )
    if rule == slots.WINDOW:
        return argument_error(f"wins[{one}]", f"0 to {three}, the length of its sequence", two)
    if rule == slots.OFFSET:
        return argument_error(f"offset_index[{one}]", "-1 or a token", two)
    return argument_error(f"offset_index[{one}]", f"{three} tokens from there on within the sequence", two)


# Copies


def blocks_within(name, ids, blocks):
    """Check that blocks are there."""
    outside = np.flatnonzero((ids < 0) | (ids >= blocks))
    if len(outside):
        raise argument_error(f"{name}[{outside[0]}]", f"a block from 0 to {blocks - 1}", ids[outside[0]])


def copied_once(name, src, dst, within):
    """Check that no block is written twice; `within` one cache, none that is read."""
    blocks, times = np.unique(dst, return_counts=True)
    if len(blocks) < len(dst):
        raise argument_error(name, "blocks that are written once", f"block {blocks[times > 1][0]} twice")
    if within and np.isin(dst, src).any():
        raise argument_error(name, "no block that is copied too", f"block {dst[np.isin(dst, src)][0]}")
