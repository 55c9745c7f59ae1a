"""Sum the weights that each key gets from all queries.

    w = sum over queries of exp(S - m) / l            [query heads, keys]

m and l of a query row are known only at the end of its context. So a work item keeps P = exp(S - m') of every
block, where m' is the maximum so far, and at the end sums P exp(m' - m) / l over its rows. Sums of work items
are added as fixed point, because the result then does not depend on their order.
"""

import numpy as np
from numba import types

from kvkit.cpu import memory
from kvkit.cpu.attention.online_softmax import fold
from kvkit.cpu.attention.params import STEP, TILE, WIDE_BLOCK, block_at, params_at, tile_at, whole_tiles
from kvkit.cpu.attention.work_items import TILES
from kvkit.cpu.simd import attention
from kvkit.formulas import numeric
from kvkit.runtime.jit import compiled, helper

LANES, WIDE = attention.LANES, attention.WIDE
UNIT = 2.0**-40  # of fixed point: 2^23 queries of a key fit int64
MATRIX, SUMS = 4 * WIDE * WIDE, 4 * WIDE * WIDE_BLOCK  # bytes of rows' factors, of a block's sums
TILE_BYTES = TILE.dtype.itemsize
MOST_BYTES = 2**25  # that a worker keeps, unless one tile takes more

get_float, put_float = memory.load(types.float32), memory.store(types.float32)
wide_scores, add_scaled = attention.wide_scores, attention.add_scaled


def weights_bytes(tiles, rows, tokens, size):
    """Return the bytes that a worker keeps for a work item over `tokens` tokens, in blocks of `size`."""
    record = 4 * (rows * size + max(rows, LANES))  # P and m' of a tile and a block
    return 2 * SUMS + MATRIX + tiles * (-(-tokens // size) + 1) * record


@helper
def record_at(params, block, tile):
    """Return the address where P and m' of a tile and the current block are kept."""
    bytes = 4 * (block.rows * block.size + max(block.rows, LANES))
    number = (block.begin - block.first) // block.size * block.tiles + tile.index
    return block.weights + 2 * SUMS + MATRIX + number * bytes


@compiled(STEP, passes="few")
def keep_weights(params_address, block_address, tile_address):
    """Keep P and m' of a tile, after the softmax of a block."""
    params, block, tile = params_at(params_address), block_at(block_address), tile_at(tile_address)
    at, one = record_at(params, block, tile), block.number
    put_float(one, np.float32(1))
    attention.scale_by(tile.scores, at, -(-tile.count * block.rows // LANES) * LANES, one)
    attention.scale_by(tile.m, at + 4 * block.rows * block.size, max(block.rows, LANES), one)


@compiled(STEP, passes="few")
def add_key_weights(params_address, block_address, _):
    """Add the weights of a work item's query rows to the sums of their keys."""
    params, block = params_at(params_address), block_at(block_address)
    sums = block.weights
    shared = params.group <= WIDE  # whether each query head of the group has one column in all tiles
    block.begin = block.first
    while block.begin < block.end:
        most = 0
        attention.clear(sums, WIDE * WIDE_BLOCK)
        for t in range(block.tiles):
            tile = tile_at(block.workspace + params.workspace.tiles + TILE_BYTES * t)
            count = min(min(block.size, block.end - block.begin), tile.unseen_from - block.begin)
            if count <= 0:
                continue
            add_tile(params, block, tile, count, shared)
            most = max(most, count)
            if not shared or not block.wide:
                add_sums(params, block, tile, count, shared)
                attention.clear(sums, WIDE * WIDE_BLOCK)
        if shared and block.wide:
            add_sums(params, block, tile_at(block.workspace + params.workspace.tiles), most, shared)
        block.begin += block.size


@helper
def add_tile(params, block, tile, count, shared):
    """Add P exp(m' - m) / l of a tile to the sums [tokens, WIDE] of its block."""
    sums, kept = block.weights, record_at(params, block, tile)
    product, factors = sums + SUMS, sums + 2 * SUMS
    tops = kept + 4 * block.rows * block.size
    attention.clear(factors, WIDE * WIDE)
    for r in range(tile.live):
        m, l = fold(tile.m, tile.l, r, block.rows)
        member = (tile.first + r) % params.group
        if params.sinks:
            row = block.sequence % params.sink_sequences * params.heads * params.group
            at = params.sinks + 4 * (row + tile.head * params.group + member)
            m, l, _ = numeric.add_sink(m, l, get_float(at))
        share = numeric.normalizer(numeric.weight(get_float(tops + 4 * r), m), l, np.float32(1))
        put_float(factors + 4 * (r * WIDE + (member if shared else r)), share)
    if block.wide:
        wide_scores(factors, kept, 4 * WIDE, whole_tiles(count), WIDE, product)
        put_float(block.number, np.float32(1))
        add_scaled(product, sums, count * WIDE, block.number)
        return
    for r in range(tile.live):
        column = (tile.first + r) % params.group if shared else r
        share = get_float(factors + 4 * (r * WIDE + column))
        for t in range(count):
            at = sums + 4 * (t * WIDE + column)
            put_float(at, get_float(at) + share * get_float(kept + 4 * (t * block.rows + r)))


@helper
def add_sums(params, block, tile, count, shared):
    """Add the sums of a block [tokens, WIDE] to the call's sums of its keys."""
    columns = params.group if shared else tile.live
    for c in range(columns):
        member = c if shared else (tile.first + c) % params.group
        head = tile.head * params.group + member
        at = params.key_sums + block.sequence * params.key_sums_sequence + head * params.key_sums_head
        for t in range(count):
            weight = get_float(block.weights + 4 * (t * WIDE + c))
            if weight > np.float32(0):
                memory.add_at(at + 8 * (block.begin + t), np.int64(np.float64(weight) / UNIT + 0.5))


def key_tiles(tokens):
    """Return how many wide tiles a work item may have, so that a worker keeps at most MOST_BYTES."""
    return max(1, min(TILES, MOST_BYTES // (WIDE * 4 * max(tokens, 1))))
