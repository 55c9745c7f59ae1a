"""Compute attention of one work item, block by block, as FlashAttention does.

    S = scale K Q^T + bias                                   [tokens, rows]
    m' = max(m, max S)     alpha = exp(m - m')     P = exp(S - m')
    l' = l alpha + sum P   O' = O alpha + P V                [rows, dim]

Engines compute the products; `params.py` describes the records.
"""

import numpy as np
from numba import types

from kvkit.cpu import memory
from kvkit.cpu.attention.engines.load import query_at, row_run, rows_of_head, widen_rows
from kvkit.cpu.attention.engines.nan_safe import nan_safe_scores, nan_safe_sums, shrink_weights
from kvkit.cpu.attention.online_softmax import hide, hides, softmax, visible
from kvkit.cpu.attention.params import (
    EXTRA_ADDRESSES,
    EXTRA_IDS,
    SPECIAL_ENGINE,
    TILE,
    WIDE_ENGINE,
    call_engine,
    engine_of_kind,
    kind_of,
    rows_computed,
    tile_at,
    whole_steps,
)
from kvkit.cpu.attention.work_items import WIDE, state_stride
from kvkit.cpu.copy.rows import call_rows
from kvkit.cpu.simd import attention
from kvkit.formulas import numeric
from kvkit.formulas.index import page_of
from kvkit.runtime.jit import helper

LANES, TILE_BYTES = attention.LANES, TILE.dtype.itemsize
MINUS_INF = numeric.MINUS_INF

get, get_int32 = memory.load(types.int64), memory.load(types.int32)
get_float, put_float = memory.load(types.float32), memory.store(types.float32)


@helper
def attend_blocks(params, block, engine):
    """Attend with every tile to positions first..end, block by block. O, m, l as in FlashAttention."""
    clear_sums(params, block)
    block.begin = block.first
    together = 1 if block.nan_safe else block.together
    while block.begin < block.end:
        if not block.ready:
            find_block(params, block)
        if block.lead and (block.begin == block.first or block.prefetch_twice) and block.tiles == 1:
            prefetch_rows(params, block, params.keys, block.key_row_ids)
            prefetch_rows(params, block, params.values, block.value_row_ids)
        for begin in range(0, block.tiles, together):
            tile = tile_of(params, block, begin)
            load_block(params, block, tile, engine)  # K, V in the engine's form      [tokens, dim]
            count = min(block.count, tile.unseen_from - block.begin)
            sees_none = block.wide and engine.softmax and block.begin + count <= tile.unseen_to
            if count <= 0 or (sees_none and not block.nan_safe):
                continue
            for t in range(begin, begin + together):
                tile = tile_of(params, block, t)
                tile.count = count
                score_tile(params, block, tile, engine)  # S = scale K Q^T           [tokens, rows]
                if params.add_biases:
                    call_engine(params.add_biases, params, block, tile)
                if hides(block, tile):
                    hide(params, block, tile)
            for t in range(begin, begin + together):
                tile = tile_of(params, block, t)
                if block.nan_safe or not engine.softmax:
                    rows = rows_computed(params, block, tile)
                    softmax(tile.scores, block.rows, rows, count, tile.m, tile.l, tile.alpha)
                if params.key_sums:
                    call_engine(params.keep_weights, params, block, tile)
            for t in range(begin, begin + together):
                tile = tile_of(params, block, t)
                add_values(params, block, tile, engine)  # O = O alpha + P V         [rows, dim]
        block.begin += block.size


@helper
def engine_of(params, block):
    """Return the engine of a work item's tiles.

    Wide tiles over codes are multiplied as integers where fixed point keeps the bits of their queries. If a
    row of a prompt sees few keys, one of them has most weight, and floats keep the bits of its value. More
    query rows than `most_paired` are faster in floats than in pairs.
    """
    if not block.wide:
        return engine_of_kind(params, kind_of(block.rows))
    special = engine_of_kind(params, SPECIAL_ENGINE)
    low, high = visible(params, block, block.row // params.group)
    fits = params.pairs or block.seqlen == 1 or high - low >= params.wide_block
    fits = fits and not (params.pairs and block.query_rows > params.most_paired)
    return special if special.scores and fits and not block.nan_safe else engine_of_kind(params, WIDE_ENGINE)


@helper
def tile_of(params, block, t):
    """Return the record of a tile."""
    return tile_at(block.workspace + params.workspace.tiles + TILE_BYTES * t)


@helper
def set_up_block(params, block):
    """Set the length of a work item's blocks, and its buffers.

    The buffer `row_ids` has four lists, of which some may be unused:

        key row ids [size + lead + EXTRA_IDS]      of the block and of the `lead` tokens after it
        key addresses, value addresses             of rows to prefetch, [tiles * size + EXTRA_ADDRESSES] each
        value row ids                              if values have a page table of their own
    """
    at, offsets, keys, values = block.workspace, params.workspace, params.keys, params.values
    block.number = at + offsets.number
    block.wide = block.rows == WIDE
    block.widens = block.wide or params.widens
    block.together = 1 if block.widens else block.tiles  # tiles that do each step of a block together
    run_bytes = min(block.end - block.first, params.page_size) * keys.bytes  # of adjacent rows, at most
    long_run = block.rows == 1 and not block.widens and run_bytes >= params.long_run
    in_tiles = params.least_in_tiles <= block.rows < WIDE
    block.size = params.wide_block if block.wide else params.run_block if long_run else params.block
    block.lead = params.long_run_lead if long_run else get(params.leads + 8 * kind_of(block.rows))
    block.prefetch_twice = run_bytes <= params.short_run
    block.prefetch_scales = params.scale_bytes and not block.widens and run_bytes <= params.scaled_run
    block.touches_pages = block.tiles == 1 and params.page_size <= params.touched_run // keys.bytes
    addresses_bytes = 8 * ((2 if block.wide else block.tiles) * block.size + EXTRA_ADDRESSES)
    block.key_row_ids = block.value_row_ids = at + offsets.row_ids
    block.key_addresses = block.key_row_ids + 8 * (block.size + block.lead + EXTRA_IDS)
    block.value_addresses = block.key_addresses + addresses_bytes
    if params.values_have_own_table:
        block.value_row_ids = block.value_addresses + addresses_bytes
    block.wide_keys, block.wide_values = at + offsets.wide_keys, at + offsets.wide_values
    clear_padding(params, block)
    if block.widens:  # engines read rows 0, 1, .. of the widened block
        block.key_ids = block.value_ids = params.counting
        block.key_row, block.value_row = 4 * keys.padded_dim, 4 * values.padded_dim
    else:
        block.key_ids, block.value_ids = block.key_row_ids, block.value_row_ids
        block.key_row, block.value_row = keys.row, values.row
    block.values_in_keys = values_lie_in_keys(params)
    set_up_prefetches(params, block, long_run, in_tiles)


@helper
def clear_padding(params, block):
    """Clear the buffers of widened keys and values whose rows are longer than those of the cache."""
    keys, values = params.keys, params.values
    if block.widens and (keys.dim < keys.padded_dim or values.dim < values.padded_dim):
        attention.clear(block.wide_keys, block.size * keys.padded_dim)
        attention.clear(block.wide_values, block.size * values.padded_dim)


@helper
def values_lie_in_keys(params):
    """Return whether each value is the beginning of its key in memory, as in latent caches."""
    keys, values = params.keys, params.values
    return (
        keys.address == values.address
        and keys.sequence == values.sequence
        and keys.row == values.row
        and (params.heads == 1 or keys.head == values.head)
        and keys.dim >= values.dim
        and not params.values_have_own_table
    )


@helper
def set_up_prefetches(params, block, long_run, in_tiles):
    """Set the lists of addresses that engines prefetch while they compute scores and sums; 0 is no list.

    Scores prefetch the keys of rows `lead` tokens further on, and sums the values. Values with the row ids of
    the keys need no list: they lie `prefetch_shift` bytes from the keys. If heads are interleaved, scores
    prefetch the values of the block itself, and sums the keys of the next block; over tiles (AMX), both
    prefetch rows of the next block.
    """
    keys, values = params.keys, params.values
    block.prefetch_in_scores = block.prefetch_in_sums = block.key_addresses
    block.prefetch_shift = values.address - keys.address
    block.value_lead = block.lead
    if params.heads_interleaved and not in_tiles:
        block.prefetch_in_scores, block.prefetch_shift, block.value_lead = block.value_addresses, 0, 0
    elif params.heads_interleaved or params.values_have_own_table:
        block.prefetch_in_sums, block.prefetch_shift = block.value_addresses, 0
    if long_run and not block.lead:  # the processor prefetches by itself
        block.prefetch_in_scores = block.prefetch_in_sums = 0
    elif not (block.lead or block.wide):  # narrow engines over widened rows prefetch the first row each time
        attention.write_sequence(keys.address, 0, block.tiles * block.size, block.key_addresses)
        attention.write_sequence(values.address, 0, block.tiles * block.size, block.value_addresses)


@helper
def set_up_tiles(params, block, state):
    """Set the query rows, the key head and the buffers of each tile; O may lie in the state of a split."""
    at, offsets, rows, lanes = block.workspace, params.workspace, block.rows, max(block.rows, LANES)
    dim, value_dim = params.keys.padded_dim, params.values.padded_dim
    score_bytes = 4 * rows * whole_steps(block.size)
    for t in range(block.tiles):
        tile = tile_of(params, block, t)
        tile.index, tile.head, tile.first = t, block.head, block.row + t * rows
        if not block.wide:
            tile.head, tile.first = block.head + t, block.row
        tile.live = min(rows, block.query_rows - tile.first)
        tile.unseen_to, tile.seen_to = visible(params, block, tile.first // params.group)
        tile.seen_from, tile.unseen_from = visible(
            params, block, (tile.first + tile.live - 1) // params.group
        )
        set_head(params, block, tile, tile.head)
        tile.queries = at + offsets.queries + 4 * t * rows * dim
        tile.engine_queries = at + offsets.engine_queries + t * rows * params.engine_query_bytes
        tile.scores = at + offsets.scores + t % block.together * score_bytes
        tile.alpha = at + offsets.alpha + 4 * lanes * (t % block.together)
        tile.m, tile.l = at + offsets.m + 4 * lanes * t, at + offsets.l + 4 * lanes * t
        tile.o = at + offsets.o + 4 * t * rows * value_dim
        if block.in_states:
            tile.o = state + t * state_stride(params, rows)


@helper
def set_head(params, block, tile, head):
    """Set the key head of a tile: the addresses of its rows and of its factor."""
    tile.head = head
    tile.keys, tile.key_scales = rows_of_head(params.keys, block, head)
    tile.values, tile.value_scales = rows_of_head(params.values, block, head)
    if block.widens:
        tile.keys, tile.values = block.wide_keys, block.wide_values
    tile.factor = params.key_factors + block.sequence * params.factor_sequence + head * params.factor_head


@helper
def load_queries(params, block, engine):
    """Load the queries of every tile as float32 times the scale, [dim, rows] if wide, else in panels.

    An engine whose queries have another form converts them further, or loads them itself.
    """
    lines, dim, wide = block.workspace + params.workspace.lines, params.keys.padded_dim, block.wide
    fixed = params.integers and not (wide or engine.scales_scores)  # queries become fixed point
    in_order = not (wide or fixed) and (engine.scales_scores or not params.orders)
    put_float(block.number, np.float32(1))
    for t in range(block.tiles):
        tile = tile_of(params, block, t)
        if engine.reads_queries:
            call_engine(engine.queries, params, block, tile)
            continue
        place = tile.queries if fixed else lines  # [rows, dim], in natural order
        if tile.live < block.rows or params.keys.dim < dim:
            attention.clear(place, block.rows * dim)
        r = 0
        while r < tile.live:
            count, step = row_run(params, tile, r, params.query_token, params.query_head)
            line = place + 4 * r * dim
            call_rows(
                params.query_to_float, packed=line, packed_token=4 * dim,
                cache=query_at(params, block, tile, r), cache_token=step, tokens=count, dim=params.keys.dim,
            )  # fmt: skip
            if not (engine.scales_scores or in_order):
                attention.scale_by(line, line, count * dim, tile.factor)
            r += count
        if wide:
            transpose(lines, 4 * dim, WIDE, dim, tile.queries, 4 * WIDE)
        elif in_order:
            factor = block.number if engine.scales_scores else tile.factor
            attention.to_panels(place, tile.queries, block.rows, dim, factor)
        elif not fixed:
            in_panels(place, tile.queries, block.rows, dim, params.orders)
        if engine.queries:
            call_engine(engine.queries, params, block, tile)


@helper
def in_panels(source, target, rows, dim, orders):
    """Write query rows [row, dim] as panels [dim / LANES, row, LANES], ordered by `orders`."""
    order, panel = orders + 8 * rows * dim, 4 * LANES
    for r in range(rows):
        for i in range(dim):
            at = target + (i // LANES * rows + r) * panel + 4 * (i % LANES)
            put_float(at, get_float(source + 4 * (r * dim + get(order + 8 * i))))


@helper
def transpose(source, source_row, rows, columns, target, target_row):
    """Write [rows, columns] as [columns, rows], both multiples of 16."""
    for r in range(0, rows, LANES):
        for c in range(0, columns, LANES):
            attention.transpose(
                source + r * source_row + 4 * c, source_row, target + c * target_row + 4 * r, target_row
            )


@helper
def clear_sums(params, block):
    """Begin with m = -inf, l = 0, O = 0."""
    lanes = max(block.rows, LANES)
    m, l = block.workspace + params.workspace.m, block.workspace + params.workspace.l
    attention.fill_minus_inf(m, block.tiles * lanes)
    attention.clear(l, block.tiles * lanes)
    count = block.rows * params.values.padded_dim
    for t in range(block.tiles):
        attention.clear(tile_of(params, block, t).o, count)


@helper
def find_block(params, block):
    """Write the row ids of the next block, and the addresses of rows that its steps prefetch."""
    block.count = min(block.size, block.end - block.begin)
    block.known = min(block.count + block.lead, block.end - block.begin)
    keys, values = params.keys, params.values
    find_rows(params, block, keys, block.key_row_ids)
    if params.values_have_own_table:
        find_rows(params, block, values, block.value_row_ids)
    if block.lead:
        lead = 8 * block.lead
        find_addresses(block, keys, block.key_row_ids + lead, block.key_addresses)
        if params.heads_interleaved or params.values_have_own_table:
            value_row_ids = block.value_row_ids + 8 * block.value_lead
            find_addresses(block, values, value_row_ids, block.value_addresses)
        if block.touches_pages:
            touch_pages(params, block, keys)
            touch_pages(params, block, values)


@helper
def touch_pages(params, block, side):
    """Prefetch the first line of each page after the known tokens: its address is translated early."""
    size, begin = params.page_size, block.begin + block.known
    page, end = page_of(begin + size - 1, size), min(begin + block.size, block.end)
    base, _ = rows_of_head(side, block, block.head)
    entry = side.table + block.table_row + params.table_entry * page
    while page * size < end:
        row_id = np.int64(get_int32(entry)) if params.table_entry == 4 else get(entry)
        attention.prefetch_bytes(base + row_id * side.row, 1)
        entry, page = entry + params.table_entry, page + 1


@helper
def find_rows(params, block, side, row_ids):
    """Write the row ids of the block's tokens and of the next ones: lead + count + 16, and up to 7 more.

    After the last token its row id is repeated. The table has the row id where each page begins; rows in a
    page are `step` apart.
    """
    position, end, row_id = block.begin, block.begin + block.known, np.int64(0)
    page = page_of(position, params.page_size)
    skipped = position - page * params.page_size  # rows of the first page
    entry = side.table + block.table_row + params.table_entry * page
    while position < end:
        row_id = np.int64(get_int32(entry)) if params.table_entry == 4 else get(entry)
        row_id += skipped * side.step
        run = min(params.page_size - skipped, end - position)
        attention.write_sequence(row_id, side.step, run, row_ids + 8 * (position - block.begin))
        position += run
        row_id += (run - 1) * side.step
        entry, skipped = entry + params.table_entry, 0
    attention.write_sequence(
        row_id, 0, block.lead + block.count + 16 - block.known, row_ids + 8 * block.known
    )


@helper
def find_addresses(block, side, row_ids, addresses):
    """Write the addresses of the block's rows, all heads of a token in order, and up to 7 addresses more."""
    base, _ = rows_of_head(side, block, block.head)
    if block.tiles == 1:
        attention.addresses(base, side.row, row_ids, block.count, addresses)
        return
    for i in range(block.count):
        row = base + get(row_ids + 8 * i) * side.row
        attention.write_sequence(row, side.head, block.tiles, addresses + 8 * i * block.tiles)


@helper
def prefetch_rows(params, block, side, row_ids):
    """Prefetch the rows of a block and their scales: of the first block, or again of one of short runs."""
    base, scales = rows_of_head(side, block, block.head)
    for i in range(min(block.lead, block.count)):
        row_id = get(row_ids + 8 * i)
        attention.prefetch_bytes(base + row_id * side.row, side.bytes)
        if block.prefetch_scales:
            attention.prefetch_bytes(scales + row_id * side.scale_row, params.scale_bytes)


@helper
def prefetch_scales(params, block, tile, side, row_ids):
    """Prefetch a tile's share of the scales of the next tokens, so that loads are spread over the tiles."""
    _, scales = rows_of_head(side, block, block.head)
    later, size = block.known - block.count, block.tiles * params.scale_bytes  # tokens after the block; bytes
    i, end = tile.index * later // block.tiles, (tile.index + 1) * later // block.tiles
    while i < end:
        row_id = get(row_ids + 8 * (block.count + i))
        attention.prefetch_bytes(scales + row_id * side.scale_row, size)
        i += side.scale_tokens


# The steps of a block


@helper
def load_block(params, block, tile, engine):
    """Load K and V of the block in the form that the engine needs; wide tiles share them."""
    if block.wide and tile.index:
        return
    block.uneven = block.unscaled = 0
    if engine.load:
        call_engine(engine.load, params, block, tile)
        if block.uneven:  # integers cannot hold the scales of values: `add_values` multiplies floats
            widen_rows(params, params.values, block, tile.head, block.value_row_ids, block.wide_values)
        return
    keys, values = params.keys, params.values
    if block.widens or (params.integers and block.nan_safe):
        widen_rows(params, keys, block, tile.head, block.key_row_ids, block.wide_keys)
    if block.widens or block.nan_safe:
        widen_rows(params, values, block, tile.head, block.value_row_ids, block.wide_values)


@helper
def score_tile(params, block, tile, engine):
    """S = scale K Q^T."""
    if block.prefetch_scales:
        prefetch_scales(params, block, tile, params.keys, block.key_row_ids)
        prefetch_scales(params, block, tile, params.values, block.value_row_ids)
    if block.nan_safe and params.integers and not (block.wide or engine.scales_scores):
        nan_safe_scores(params, block, tile, tile.queries)
    else:
        call_engine(engine.scores, params, block, tile)


@helper
def add_values(params, block, tile, engine):
    """O = O alpha + P V."""
    if block.nan_safe:
        shrink_weights(block, tile)
        nan_safe_sums(params, block, tile)
        return
    call_engine(engine.sums, params, block, tile)
    if block.uneven:  # the engine of integers has done nothing: softmax and sums by floats
        softmax(tile.scores, block.rows, block.rows, tile.count, tile.m, tile.l, tile.alpha)
        if block.wide:
            call_engine(engine_of_kind(params, WIDE_ENGINE).sums, params, block, tile)
        else:
            block.uneven = 0
            widen_rows(params, params.values, block, tile.head, block.value_row_ids, block.wide_values)
            nan_safe_sums(params, block, tile)
