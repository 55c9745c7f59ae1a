"""The wide engine of bfloat16, of float16 and of codes on processors with tiles (AMX).

    S = K Q^T                          [tokens, rows], queries [dim / 2, rows, 2]
    P = 2^(c S - m), O = O alpha + P V [dim, rows], weights [tokens / 2, rows, 2]

Tiles of keys are loaded from the cache where 16 rows lie closely together, at cache lines; other rows are
copied first, once for all tiles of the block. Values are transposed, once, from where they lie. m is in
powers of 2 until the work item ends (see `tile_products`).

Numbers of float16, and codes times their scales, are two terms of bfloat16 each: keys and values of a block
are split when they are copied.
"""

import functools

import numpy as np
from numba import types

from kvkit.cpu import memory
from kvkit.cpu.attention.biases import only_adds_mask
from kvkit.cpu.attention.engines.load import (
    find_next_rows,
    load_range,
    load_rows,
    query_at,
    row_run,
    rows_of_head,
    run_end,
)
from kvkit.cpu.attention.params import TILE, block_at, params_at, step_code, tile_at
from kvkit.cpu.simd import attention, pairs, tile_products
from kvkit.cpu.simd.attention import WIDE
from kvkit.cpu.simd.tile_products import GROUP_BYTES
from kvkit.cpu.simd.tiles import ROW, ROWS
from kvkit.runtime.jit import helper

CLOSE = 2  # rows are read in place if less than so many times their size apart: others miss the L1 cache
TILE_BYTES, address_of = TILE.dtype.itemsize, memory.address_of
get, put = memory.load(types.int64), memory.store(types.int64)
get_float, put_float = memory.load(types.float32), memory.store(types.float32)


@functools.cache
def paired_queries(in_memory, terms, whole):
    """Compile the load of queries as pairs of bfloat16, which opens the thread's tiles.

    Rows of the call are read as they are if they are `whole` steps, else converted from float32.
    """
    open_tiles, pack = tile_products.state(in_memory, "open"), tile_products.pack_queries(terms)

    def paired_queries(params_address, block_address, tile_address):
        params, block, tile = params_at(params_address), block_at(block_address), tile_at(tile_address)
        if not tile.index:
            open_tiles()
        dim, r, addresses = params.keys.padded_dim, 0, block.key_addresses
        if not whole:
            pairs.pair_rows(tile.queries, dim, tile.engine_queries)
            return
        while r < tile.live:
            count, step = row_run(params, tile, r, params.query_token, params.query_head)
            attention.write_sequence(query_at(params, block, tile, r), step, count, addresses + 8 * r)
            r += count
        pack(addresses, tile.live, dim, tile.engine_queries)

    return step_code(paired_queries, ("queries", in_memory, terms, whole), in_memory=in_memory)


@functools.cache
def finish(in_memory):
    """Compile the end of a work item: the thread's tiles are released, and m becomes that of e^x."""
    close_tiles = tile_products.state(in_memory, "close")

    def finish(params_address, block_address, _):
        params, block = params_at(params_address), block_at(block_address)
        close_tiles()
        m, l = block.workspace + params.workspace.m, block.workspace + params.workspace.l
        tile_products.natural_maximum(m, l, WIDE * block.tiles)

    return step_code(finish, ("finish", in_memory), in_memory=in_memory)


def load_code(load, *key, both=False):
    """Compile the load of a block by load(params, block, tile); list rows of the next block, to prefetch.

    Latent rows are long; of others `both` keys and values are listed, or none.
    """
    load = helper(load)

    def load_block(params_address, block_address, tile_address):
        params, block, tile = params_at(params_address), block_at(block_address), tile_at(tile_address)
        block.scored = 0
        load(params, block, tile)
        if both or block.values_in_keys:
            find_next_rows(params, block, params.keys, tile.head, block.value_addresses)
        if both and not block.values_in_keys:
            list_at = block.value_addresses + 8 * block.size
            find_next_rows(params, block, params.values, tile.head, list_at)

    return step_code(load_block, ("load", *key, both))


@functools.cache
def load(keys_as_is, values_as_is):
    """Compile the load of a block: find or copy rows of keys, and transpose values.

    A side that is as it is in the cache has whole rows of bfloat16; others are converted.
    """
    transpose = tile_products.transpose_values(tile_products.BFLOAT16)

    def load(params, block, tile):
        values, dim, addresses = params.values, params.values.padded_dim, block.value_addresses
        copied = load_keys(params, block, tile, keys_as_is)
        if values_as_is:
            rows, _ = rows_of_head(values, block, tile.head)
            attention.addresses(rows, values.row, block.value_row_ids, block.count, addresses)
        elif block.values_in_keys and copied:
            attention.write_sequence(block.wide_keys, 2 * params.keys.padded_dim, block.count, addresses)
        else:
            rows = block.wide_values + 2 * block.size * dim
            load_rows(values.to_bfloat16, values, block, tile.head, block.value_row_ids,
                      target=rows, target_row=2 * dim, element=2)  # fmt: skip
            attention.write_sequence(rows, 2 * dim, block.count, addresses)
        transpose(addresses, block.count, whole(block.count), dim, block.wide_values)

    return load_code(load, keys_as_is, values_as_is)


@functools.cache
def load_halves():
    """Compile the load of a block of float16: both terms of keys are copied, those of values transposed."""
    split = tile_products.split_rows(tile_products.FLOAT16)
    transpose = tile_products.transpose_values(tile_products.FLOAT16)

    def load_halves(params, block, tile):
        keys, values, addresses = params.keys, params.values, block.value_addresses
        rows, _ = rows_of_head(keys, block, tile.head)
        attention.addresses(rows, keys.row, block.key_row_ids, block.count, addresses)
        split(addresses, block.count, keys.padded_dim, block.wide_keys, term_bytes(block, keys))
        list_copied_keys(block, 2 * keys.padded_dim)
        if not block.values_in_keys:
            rows, _ = rows_of_head(values, block, tile.head)
            attention.addresses(rows, values.row, block.value_row_ids, block.count, addresses)
        transpose(addresses, block.count, whole(block.count), values.padded_dim, block.wide_values)

    return load_code(load_halves, "halves", both=True)


@functools.cache
def load_codes():
    """Compile the load of a block of codes: 32 rows at a time are decoded, then split into terms as above."""
    split = tile_products.split_rows(tile_products.CODES)
    transpose = tile_products.transpose_values(tile_products.CODES)

    def load_codes(params, block, tile):
        keys, values, addresses = params.keys, params.values, block.value_addresses
        size, tokens = term_bytes(block, keys), whole(block.count)
        for begin in range(0, block.count, tile_products.STEP):
            count = decode_rows(params, block, tile, keys, block.key_row_ids, begin)
            split(addresses, count, keys.padded_dim, block.wide_keys + 2 * keys.padded_dim * begin, size)
        for begin in range(0, block.count, tile_products.STEP):
            count = decode_rows(params, block, tile, values, block.value_row_ids, begin)
            transpose(addresses, count, tokens, values.padded_dim, block.wide_values + 2 * ROWS * begin)
        list_copied_keys(block, 2 * keys.padded_dim)

    return load_code(load_codes, "codes")


@helper
def decode_rows(params, block, tile, side, row_ids, begin):
    """Decode up to 32 rows of codes to float32, list their addresses, and return their number."""
    lines, row = block.workspace + params.workspace.lines, 4 * side.padded_dim
    end = min(begin + tile_products.STEP, block.count)
    if side.dim < side.padded_dim:
        attention.clear(lines, tile_products.STEP * side.padded_dim)
    load_range(side.to_float, side, block, tile.head, row_ids, begin, end=end,
               target=lines - begin * row, target_row=row, element=4)  # fmt: skip
    attention.write_sequence(lines, row, end - begin, block.value_addresses)
    return end - begin


@helper
def term_bytes(block, keys):
    """Return the bytes from term 0 of a block's keys to term 1."""
    return 2 * block.size * keys.padded_dim


@helper
def list_copied_keys(block, row):
    """List the address and the stride of every 16 rows of keys, which were copied, in whole pairs."""
    for i in range(-(-block.count // (2 * ROWS)) * 2):
        put(block.key_addresses + i * GROUP_BYTES, block.wide_keys + i * ROWS * row)
        put(block.key_addresses + i * GROUP_BYTES + 8, row)


@helper
def load_keys(params, block, tile, as_is):
    """List the address and the stride of every 16 rows of keys; return whether all of them were copied."""
    keys, groups, row = params.keys, block.key_addresses, 2 * params.keys.padded_dim
    rows, _ = rows_of_head(keys, block, tile.head)
    stride = keys.step * keys.row
    near = as_is and 0 < stride < CLOSE * row and stride % ROW == 0
    if not near:
        load_rows(keys.to_bfloat16, keys, block, tile.head, block.key_row_ids,
                  target=block.wide_keys, target_row=row, element=2)  # fmt: skip
    list_copied_keys(block, row)
    if near:
        for begin in range(0, block.count, ROWS):
            first = rows + get(block.key_row_ids + 8 * begin) * keys.row
            end, at = min(begin + ROWS, block.count), groups + begin // ROWS * GROUP_BYTES
            run = run_end(block.key_row_ids, begin, end, keys.step) - begin
            if run == ROWS and first % ROW == 0:
                put(at, first)
                put(at + 8, stride)
            else:
                load_range(keys.to_bfloat16, keys, block, tile.head, block.key_row_ids, begin, end=end,
                           target=block.wide_keys, target_row=row, element=2)  # fmt: skip
    return not near


@helper
def rows_ahead(block, tile, both):
    """Return the list of a tile's share of the next block's rows, and how many belong to a step of tokens."""
    of_token = 1 if block.values_in_keys else 2 * both
    at = block.value_addresses + 8 * tile.index * (of_token * block.size // block.tiles)
    return at, -(-of_token * tile_products.STEP // block.tiles)


@helper
def scaled_in_softmax(params, tile):
    """Return whether the softmax multiplies scores with the scale; else it is multiplied before biases."""
    return not params.add_biases and get_float(tile.factor) > np.float32(0)


@functools.cache
def scores(in_memory, terms):
    """Compile S = K Q^T, times the scale unless the softmax or `add_biases` multiplies with it."""
    multiply, both = tile_products.scores(in_memory, terms), terms == tile_products.FLOAT16

    def scores(params_address, block_address, tile_address):
        params, block, tile = params_at(params_address), block_at(block_address), tile_at(tile_address)
        if not (tile.index and block.scored == tile.index):
            ahead, each = rows_ahead(block, tile, both)
            multiply(
                queries=tile.engine_queries, groups=block.key_addresses,
                key_term=term_bytes(block, params.keys), count=tile.count, dim=params.keys.padded_dim,
                target=tile.scores, ahead=ahead, each=each,
            )  # fmt: skip
        block.unscaled = params.add_biases and only_adds_mask(params)
        if not (block.unscaled or scaled_in_softmax(params, tile)):
            attention.scale_by(tile.scores, tile.scores, tile.count * WIDE, tile.factor)

    return step_code(scores, ("scores", in_memory, terms), in_memory=in_memory)


@functools.cache
def sums(in_memory, terms):
    """Compile the softmax and O = O alpha + P V; weights lie after the scores.

    Between the softmax's steps the scores of the next tile are multiplied, in the place of these scores, if
    both tiles see all of the block.
    """
    multiply, weigh = tile_products.sums(in_memory, terms), tile_products.weights(terms)
    weigh_and_score = tile_products.weights_and_scores(in_memory, terms)
    both = terms == tile_products.FLOAT16

    def sums(params_address, block_address, tile_address):
        params, block, tile = params_at(params_address), block_at(block_address), tile_at(tile_address)
        dim, scale = params.values.padded_dim, tile.factor
        p = tile.scores + 4 * WIDE * whole(block.size)
        if not scaled_in_softmax(params, tile):
            scale = block.number
            put_float(scale, np.float32(1))
        tile_products.grow_maximum(tile.scores, tile.count, tile.m, tile.l, tile.o, dim, scale)
        if next_sees_all(block, tile):
            after = tile_at(tile_address + TILE_BYTES)
            ahead, each = rows_ahead(block, after, both)
            weigh_and_score(
                scores=tile.scores, count=tile.count, m_at=tile.m, l_at=tile.l, scale=scale, target=p,
                queries=after.engine_queries, groups=block.key_addresses,
                key_term=term_bytes(block, params.keys), dim=params.keys.padded_dim,
                ahead=ahead, each=each,
            )  # fmt: skip
            block.scored = after.index
        else:
            weigh(tile.scores, whole(tile.count), tile.m, tile.l, scale, p)
        multiply(p, block.wide_values, whole(block.count), whole(tile.count), dim, tile.o)

    return step_code(sums, ("sums", in_memory, terms), in_memory=in_memory)


@helper
def next_sees_all(block, tile):
    """Return whether a tile and the next one see all of the block, which is whole steps."""
    if tile.index + 1 >= block.tiles or tile.count < block.count or block.count % tile_products.STEP:
        return False
    after, end = tile_at(address_of(tile) + TILE_BYTES), block.begin + block.count
    return after.unseen_to < end <= after.unseen_from


@helper
def whole(count):
    """Round a number of tokens up to whole steps of products."""
    return -(-count // tile_products.STEP) * tile_products.STEP


def engine(in_memory, terms, whole_queries, keys_as_is, values_as_is):
    """Return the engine of tiles, by the processor's instructions or `in_memory`.

    `whole_queries` says that queries are whole steps of the call's format, `.._as_is` that rows of the cache
    are whole steps of bfloat16.
    """
    loads = {tile_products.FLOAT16: load_halves, tile_products.CODES: load_codes}.get(terms)
    return {
        "queries": paired_queries(in_memory, terms, whole_queries).address, "reads_queries": whole_queries,
        "load": (loads() if loads else load(keys_as_is, values_as_is)).address,
        "scores": scores(in_memory, terms).address, "sums": sums(in_memory, terms).address,
        "finish": finish(in_memory).address, "softmax": True, "scales_scores": True,
    }  # fmt: skip
