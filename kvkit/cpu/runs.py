"""Rows from one cache to another, of any two layouts: runs of tokens, each in chunks of its content.

A chunk is what lies together in both caches: a token's whole row, a head, or a few elements. Nothing is
converted, so that only its bytes count.
"""

import functools

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from kvkit.cpu import memory
from kvkit.cpu.launches import Launch, threads
from kvkit.cpu.transfer import SMALL_BYTES
from kvkit.index import share
from kvkit.jit import helper, kernel

INT, INDEX2 = types.int64, types.Array(types.int64, 2, "C")
SIGNATURE = types.void(INT, INDEX2, INDEX2, INT, INT, INT, types.boolean)

load1, store1 = memory.load(types.uint8), memory.store(types.uint8)
load2, store2 = memory.load(types.uint16), memory.store(types.uint16)
load4, store4 = memory.load(types.uint32), memory.store(types.uint32)
load8, store8 = memory.load(types.uint64), memory.store(types.uint64)


@intrinsic
def copy(typingctx, source, target, size):
    """(source, target, size): bytes from one address to another."""

    def codegen(context, builder, signature, values):
        byte = ir.IntType(8).as_pointer()
        from_, to = (builder.inttoptr(value, byte) for value in values[:2])
        cgutils.raw_memcpy(builder, to, from_, values[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@helper
def along(source, source_step, target, target_step, count, width):
    """Pieces of `width` bytes, at steps of their own."""
    if source_step == width and target_step == width:
        copy(source, target, count * width)
    elif width == 2:
        for i in range(count):
            store2(target + i * target_step, load2(source + i * source_step))
    elif width == 4:
        for i in range(count):
            store4(target + i * target_step, load4(source + i * source_step))
    elif width == 1:
        for i in range(count):
            store1(target + i * target_step, load1(source + i * source_step))
    else:
        for i in range(count):
            copy(source + i * source_step, target + i * target_step, width)


@helper
def scattered(source, target, chunks, width):
    """The chunks of one token."""
    if width == 2:
        for k in range(chunks.shape[0]):
            store2(target + chunks[k, 1], load2(source + chunks[k, 0]))
    elif width == 4:
        for k in range(chunks.shape[0]):
            store4(target + chunks[k, 1], load4(source + chunks[k, 0]))
    elif width == 8:
        for k in range(chunks.shape[0]):
            store8(target + chunks[k, 1], load8(source + chunks[k, 0]))
    elif width == 1:
        for k in range(chunks.shape[0]):
            store1(target + chunks[k, 1], load1(source + chunks[k, 0]))
    else:
        for k in range(chunks.shape[0]):
            copy(source + chunks[k, 0], target + chunks[k, 1], width)


def move(shares, runs, chunks, source_step, target_step, width, by_chunk):
    """Move runs [source address, target address, tokens], whose tokens have chunks at [source, target] offsets.

    Chunk by chunk, or token by token: as the target lies in memory.
    """
    for item in prange(shares):
        first, end = (
            share(runs.shape[0], np.int64(item), shares),
            share(runs.shape[0], np.int64(item) + 1, shares),
        )
        for i in range(first, end):
            source, target, count = runs[i, 0], runs[i, 1], runs[i, 2]
            if by_chunk:
                for k in range(chunks.shape[0]):
                    along(
                        source + chunks[k, 0], source_step, target + chunks[k, 1], target_step, count, width
                    )
            else:
                for t in range(count):
                    scattered(source + t * source_step, target + t * target_step, chunks, width)


@functools.cache
def compiled(parallel):
    return kernel(move, SIGNATURE, parallel, parallel=parallel)


def prepare(runs, chunks, steps, width, by_chunk, alive):
    """A launch that moves runs; `alive` are the arrays that the addresses point into."""
    moved = int(runs[:, 2].sum()) * len(chunks) * width
    shares = threads() if moved >= SMALL_BYTES else 1
    code = compiled(shares > 1)
    arguments = runs, chunks, *steps, width, by_chunk
    return Launch(runs, {}, lambda: code(shares, *arguments), alive=alive)
