"""Append and gather: one walk over tokens and rows, for every layout, mode and format.

Store and load differ only in the machine code that `walk` calls for a run of neighbouring rows, and in
which tokens of a sequence they walk.
"""

import functools

import numpy as np
from numba import prange, types

from kvkit.cpu import memory
from kvkit.cpu.launches import Launch, address, threads
from kvkit.cpu.rows import LOAD, STORE, rows
from kvkit.cpu.simd import panels
from kvkit.index import page_of, rest_of_page, row_of, sequence_of, share
from kvkit.jit import kernel
from kvkit.layouts.places import packed_strides

BLOCKS = {LOAD: 1, STORE: 8}  # tokens; a store needs several rows to find scales ahead of codes
SMALL_BYTES = 128 * 1024  # below it one thread is done before a second one is awake
STREAM_BYTES = 64 * 2**20  # larger outputs do not stay in any cache, so they need not pass through one

call_rows = memory.call(13)

INT, INDEX1, INDEX2 = types.int64, types.Array(types.int64, 1, "C"), types.Array(types.int64, 2, "C")
SIGNATURE = types.void(INT, INT, INT, INDEX1, INDEX1, INDEX2, INT, INDEX2, INT, INT, INT)


def walk(rows_code, chunks, block, starts, first, table, page_size, sides, heads, repeat, dim):
    """Move the packed tokens of every sequence, which take positions from `first` on, to or from their rows.

    `sides` [key|value, 12] holds address and byte strides: packed (address, sequence, token, head), then
    cache and scale (address, sequence, row, head). Keys and values are items of their own, or, where they
    are neighbours in the cache, in one, `block` tokens of each in turn (0: apart).
    """
    total = starts[-1]
    items = chunks if block else 2 * chunks
    for item in prange(items):
        side = np.int64(item) // chunks  # prange counts in uint64, which would turn int64 into float64
        chunk = np.int64(item) - side * chunks
        token, end = share(total, chunk, chunks), share(total, chunk + 1, chunks)
        sequence = sequence_of(starts, token)
        while token < end:
            while token >= starts[sequence + 1]:
                sequence += 1
            position = first[sequence] + token - starts[sequence]
            row = row_of(table[sequence, page_of(position, page_size)], position, page_size)
            run = min(min(end, starts[sequence + 1]) - token, rest_of_page(position, page_size))
            run = min(run, block) if block else run
            for kv in range(side, 2 if block else side + 1):
                at = sides[kv]
                call_rows(
                    rows_code,
                    at[0] + sequence * at[1] + token * at[2], at[2], at[3],
                    at[4] + sequence * at[5] + row * at[6], at[6], at[7],
                    at[8] + sequence * at[9] + row * at[10], at[10], at[11],
                    run, heads, repeat, dim,
                )  # fmt: skip
            token += run


@functools.cache
def compiled(parallel):
    return kernel(walk, SIGNATURE, parallel, parallel=parallel)


OWNERS = {
    STORE: {0: "current_key", 12: "current_value", 4: "cache", 16: "cache"},
    LOAD: {0: "key", 12: "value", 4: "cache", 16: "cache"},
}
SCALE = {8: "scale", 20: "scale"}


def store(current_key, current_value, cache, steps):
    """A launch that appends the packed new tokens to their rows."""
    return prepare(STORE, current_key, current_value, cache, steps.seqstarts, steps.start_pos, steps, 1)


def load(key, value, cache, steps, repeat, new):
    """A launch that gathers the rows of every sequence's context into packed outputs.

    `new` memory is in the caches already: the system has just filled it with zeros.
    """
    return prepare(LOAD, key, value, cache, steps.kvstarts, steps.zeros, steps, repeat, stream=not new)


def prepare(direction, key, value, cache, starts, first, steps, repeat, stream=False):
    """Compile what a transfer needs, or find it, and gather its arguments."""
    strides = key.strides, value.strides
    heads, dim = cache.heads, cache.dim
    moved = int(starts[-1]) * 2 * repeat * heads * key.itemsize * dim
    stream = stream and moved >= STREAM_BYTES and aligned(key) and aligned(value)
    if repeat == 1 and cache.heads_adjoin and strides[0][-2] == strides[1][-2] == dim * key.itemsize:
        heads, dim = 1, heads * dim
    groups = (
        panels.groups_in_panel(cache.group, dim // cache.group) if direction == STORE and cache.cell else 0
    )
    code = rows(direction, cache.packed, cache.stored, cache.cell, cache.group, groups, stream).address
    sides = np.array(
        [
            (address(array), *packed_strides(array), *place)
            for array, place in zip((key, value), cache.sides, strict=True)
        ],
        np.int64,
    )
    (key_at, _, row, *_), (value_at, *_) = cache.sides
    block = 0 if abs(value_at - key_at) > abs(row) else BLOCKS[direction]
    parallel = moved >= SMALL_BYTES
    chunks = threads() if parallel else 1
    arguments = code, chunks, block, starts, first, steps.table, steps.page_size, sides, heads, repeat, dim
    owners = OWNERS[direction] | (SCALE if cache.cell else {})
    return Launch(sides.reshape(-1), owners, functools.partial(compiled(parallel), *arguments))


def aligned(array):
    """Whether every row begins at a multiple of 16, as streaming needs."""
    bits = array.ctypes.data
    for stride in array.strides[:-1]:
        bits |= stride
    return bits % 16 == 0
