"""Divide attention into work items and run them on all workers.

A query row is one query head of one token; `work_items` says how rows become tiles. Narrow tiles read the
cache in place if its rows are whole vectors; wide tiles share keys and values that are widened in the
workspace. A long context is split, at positions that depend on the shapes only. The worker that finishes the
last split of a tile group merges all splits in order. So results do not depend on the number or the timing of
threads.
"""

import numpy as np

from kvkit.cpu import memory
from kvkit.cpu.attention.epilogue import finish
from kvkit.cpu.attention.online_softmax import visible
from kvkit.cpu.attention.params import BLOCK, block_at, call_engine, call_merge, params_at
from kvkit.cpu.attention.walk import (
    attend_blocks,
    clear_padding,
    engine_of,
    load_queries,
    set_head,
    set_up_block,
    set_up_tiles,
    tile_of,
)
from kvkit.cpu.attention.work_items import (
    TILES,
    WIDE,
    groups_and_splits,
    narrow_rows,
    set_sequence,
    set_tile_group,
    split_bytes,
    visible_to_any,
)
from kvkit.cpu.launches import WORKER
from kvkit.runtime.jit import compiled, helper

ENOUGH = 32  # work items that give every thread some
count_up, block_memory = memory.count_up, memory.scratch(BLOCK.dtype.itemsize)


@compiled(WORKER, passes="few")
def schedule(worker, params_address):
    """Write the kinds of tiles, the length of splits and the number of work items into the params.

    `params.tiles` is the sum of the kinds of tiles, their numbers of rows: 1, 2, 4, 8, 16 or `WIDE`.
    """
    params, block = params_at(params_address), block_at(block_memory())
    wide_tiles = most_tiles = shortest_items = np.int64(0)  # all; of a head; with splits as short as allowed
    tokens = np.int64(0)  # of the contexts of all groups that may be split
    params.tiles = params.products = 0
    for b in range(params.batch):
        set_sequence(params, block, b)
        params.products += block.query_rows * block.kvlen * params.heads
        if block.query_rows > params.most_narrow:
            first, end = visible_to_any(params, block)
            tiles = -(-block.query_rows // WIDE)
            params.tiles |= WIDE
            wide_tiles += params.heads * tiles
            shortest_items += params.heads * tiles * (-(-(end - first) // params.least_split))
            most_tiles = max(most_tiles, tiles)
        elif block.query_rows:
            params.tiles |= narrow_rows(block.query_rows)
    # Larger groups read keys fewer times; smaller groups, and splits, give every thread a work item. Sums by
    # key need groups of one tile.
    params.group_tiles = min(wide_tiles // params.most_splits, TILES)
    params.groups_are_split = params.group_tiles < 2
    if params.groups_are_split:
        enough = 0 if params.key_sums else shortest_items // ENOUGH
        params.group_tiles = max(1, min(min(most_tiles, TILES), enough))
    params.split_tokens = 2**62
    for b in range(params.batch):
        set_sequence(params, block, b)
        if block.query_rows and (block.query_rows <= params.most_narrow or params.groups_are_split):
            first, end = visible_to_any(params, block)
            tokens += (end - first) * groups_and_splits(params, block)[0]
    equal_share = -(-tokens // params.most_splits)
    least = params.least_wide_split if params.tiles == WIDE else params.least_split
    params.split_tokens = max(least, -(-equal_share // params.block) * params.block)
    params.tile_groups = params.work_items = params.splits = 0
    for b in range(params.batch):
        set_sequence(params, block, b)
        groups, splits = groups_and_splits(params, block)
        params.tile_groups += groups
        params.work_items += groups * splits
        params.splits += groups * splits if splits > 1 else 0


@compiled(WORKER, passes="few")
def work(worker, params_address):
    """Run work items until none is left.

    The first of `params.counters` counts items that workers have begun, the others the splits of each tile
    group that are done. The states of splits lie at `params.partials`.
    """
    params = params_at(params_address)
    workspace = params.workspace_at + worker * params.workspace_bytes
    block = block_at(workspace + params.workspace.block)
    block.workspace = workspace
    block.weights = params.weights_at + worker * params.weights_bytes
    first_item = first_group = first_split = np.int64(0)
    set_sequence(params, block, 0)
    groups, splits = groups_and_splits(params, block)
    item = count_up(params.counters)
    while item < params.work_items:
        while item >= first_item + groups * splits:
            first_item, first_group = first_item + groups * splits, first_group + groups
            first_split += groups * splits if splits > 1 else 0
            set_sequence(params, block, block.sequence + 1)
            groups, splits = groups_and_splits(params, block)
        group, split = (item - first_item) // splits, (item - first_item) % splits
        states = params.partials + (first_split + group * splits) * split_bytes(params) if splits > 1 else 0
        set_tile_group(params, block, group)
        attend(params, block, split, splits, states)
        if splits > 1 and count_up(params.counters + 8 * (1 + first_group + group)) == splits - 1:
            call_merge(params.merge_splits, params, block, splits, states)
        item = count_up(params.counters)


@helper
def attend(params, block, split, splits, states):
    """Compute one work item: the query rows of a tile group over one split of the context."""
    block.nan_safe = 0
    if not block.ready:
        set_range(params, block, split, splits)
        set_up_block(params, block)
    engine, state = engine_of(params, block), states + split * split_bytes(params) if states else states
    block.in_states = block.wide and states and not engine.interleaves
    if block.ready:
        set_head(params, block, tile_of(params, block, 0), block.head)
    else:
        set_up_tiles(params, block, state)
    load_queries(params, block, engine)
    attend_blocks(params, block, engine)
    if engine.finish:
        call_engine(engine.finish, params, block, block)
    is_narrow = block.tiles == 1 and not block.wide
    block.ready = is_narrow and splits == 1 and block.end - block.first <= block.size
    if not finish(params, block, engine, state):  # a sum is not finite
        block.nan_safe, block.ready = 1, 0
        block.size = min(block.size, params.wide_block)  # values are widened
        clear_padding(params, block)
        floats = engine_of(params, block)
        if block.wide:
            load_queries(params, block, floats)
        attend_blocks(params, block, floats)
        finish(params, block, engine, state)
    if params.key_sums:
        call_engine(params.add_key_weights, params, block, block)


@helper
def set_range(params, block, split, splits):
    """Set the range of positions that a work item attends to."""
    last_row = (
        min(block.query_rows, block.row + (block.rows if block.rows < WIDE else WIDE * block.tiles)) - 1
    )
    block.first, _ = visible(params, block, block.row // params.group)
    _, block.end = visible(params, block, last_row // params.group)
    if splits > 1:  # for query rows that see fewer positions, a split may be empty
        block.first = min(block.first + split * params.split_tokens, block.end)
        block.end = min(block.end, block.first + params.split_tokens)
