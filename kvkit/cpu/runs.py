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

from kvkit.cpu.launches import Launch, threads
from kvkit.cpu.transfer import SMALL_BYTES
from kvkit.index import share
from kvkit.jit import helper, kernel

PIECE, LONG = 256, 4096  # bytes
INT, INDEX2 = types.int64, types.Array(types.int64, 2, "C")
SIGNATURE = types.void(INT, INDEX2, INDEX2, INT, INT, INT, types.boolean)


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
def moved(source, target, size):
    """Bytes from one address to another: the libraries' own copy is at half its speed for 1 to 4 KB."""
    if size < LONG:
        while size >= PIECE:
            copy(source, target, PIECE)
            source, target, size = source + PIECE, target + PIECE, size - PIECE
    copy(source, target, size)


def evenly(size):
    """(source, step, target, step, count): pieces of `size` bytes, known when this is compiled."""

    def evenly(source, source_step, target, target_step, count):
        for i in range(count):
            copy(source + i * source_step, target + i * target_step, size)

    return helper(evenly)


def scattered(size):
    """(source, target, chunks): the chunks of one token, of `size` bytes."""

    def scattered(source, target, chunks):
        for k in range(chunks.shape[0]):
            copy(source + chunks[k, 0], target + chunks[k, 1], size)

    return helper(scattered)


even2, even4, even16, even32 = map(evenly, (2, 4, 16, 32))
chunks2, chunks4, chunks16, chunks32 = map(scattered, (2, 4, 16, 32))


@helper
def along(source, source_step, target, target_step, count, width):
    """Pieces of `width` bytes, at steps of their own."""
    if source_step == width and target_step == width:
        moved(source, target, count * width)
    elif width == 2:
        even2(source, source_step, target, target_step, count)
    elif width == 4:
        even4(source, source_step, target, target_step, count)
    elif width == 16:
        even16(source, source_step, target, target_step, count)
    elif width == 32:
        even32(source, source_step, target, target_step, count)
    else:
        for i in range(count):
            moved(source + i * source_step, target + i * target_step, width)


@helper
def across(source, target, chunks, width):
    """The chunks of one token."""
    if width == 2:
        chunks2(source, target, chunks)
    elif width == 4:
        chunks4(source, target, chunks)
    elif width == 16:
        chunks16(source, target, chunks)
    elif width == 32:
        chunks32(source, target, chunks)
    else:
        for k in range(chunks.shape[0]):
            moved(source + chunks[k, 0], target + chunks[k, 1], width)


def move(shares, runs, chunks, source_step, target_step, width, by_chunk):
    """Move runs [source address, target address, tokens], whose tokens have chunks at [source, target].

    Chunk by chunk, or token by token: as the target lies in memory.
    """
    for item in prange(shares):
        turn = np.int64(item)  # prange counts in uint64
        for i in range(share(runs.shape[0], turn, shares), share(runs.shape[0], turn + 1, shares)):
            source, target, count = runs[i, 0], runs[i, 1], runs[i, 2]
            if by_chunk:
                for k in range(chunks.shape[0]):
                    from_, to = source + chunks[k, 0], target + chunks[k, 1]
                    along(from_, source_step, to, target_step, count, width)
            else:
                for t in range(count):
                    across(source + t * source_step, target + t * target_step, chunks, width)


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
