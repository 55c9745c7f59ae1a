"""Copy rows between caches of any two layouts, as runs of tokens. A token's row is split into chunks.

A chunk is the largest part that is contiguous in both caches: a token's whole row, a head, or a few elements.
Nothing is converted, so only a chunk's size matters. From [token, head, dim] to [head, token, dim] a chunk is
a head; the loop over chunks is outside, so that tokens of a head are written one after the other.
"""

import functools

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvkit.cpu import memory
from kvkit.cpu.copy.transfer import SMALL_BYTES
from kvkit.cpu.launches import WORKER, Launch, Record, address, run_workers, threads
from kvkit.formulas.index import share
from kvkit.runtime.jit import compiled, helper

COPY_BYTES, MEMCPY_BYTES = 256, 4096  # bytes of a copy by vectors; from MEMCPY_BYTES on memcpy is faster
PARAMS = Record("workers runs count chunks chunk_count source_step target_step width by_chunk")
RUN, CHUNK = 8 * 3, 8 * 2  # bytes of a run and of a chunk in their lists

get, record = memory.load(types.int64), memory.record(PARAMS)


@intrinsic
def copy(typingctx, source, target, size):
    """Copy `size` bytes from address `source` to address `target`."""

    def codegen(context, builder, signature, values):
        byte = ir.IntType(8).as_pointer()
        from_, to = (builder.inttoptr(value, byte) for value in values[:2])
        cgutils.raw_memcpy(builder, to, from_, values[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@helper
def copy_bytes(source, target, size):
    """Copy `size` bytes; below 4 KB in pieces of 256 bytes, because memcpy is slower there."""
    if size < MEMCPY_BYTES:
        while size >= COPY_BYTES:
            copy(source, target, COPY_BYTES)
            source, target, size = source + COPY_BYTES, target + COPY_BYTES, size - COPY_BYTES
    copy(source, target, size)


def compile_copies(size):
    """Return functions that copy pieces of `size` bytes: with a stride on each side; a token's chunks."""

    def copy_pieces(source, source_step, target, target_step, count):
        for i in range(count):
            copy(source + i * source_step, target + i * target_step, size)

    def copy_listed(source, target, chunks, end):
        for chunk in range(chunks, end, CHUNK):
            copy(source + get(chunk), target + get(chunk + 8), size)

    return helper(copy_pieces), helper(copy_listed)


(strided2, listed2), (strided4, listed4), (strided16, listed16), (strided32, listed32) = map(
    compile_copies, (2, 4, 16, 32)
)


@helper
def copy_strided(source, source_step, target, target_step, count, width):
    """Copy `count` pieces of `width` bytes, with a stride on each side."""
    if source_step == width and target_step == width:
        copy_bytes(source, target, count * width)
    elif width == 2:
        strided2(source, source_step, target, target_step, count)
    elif width == 4:
        strided4(source, source_step, target, target_step, count)
    elif width == 16:
        strided16(source, source_step, target, target_step, count)
    elif width == 32:
        strided32(source, source_step, target, target_step, count)
    else:
        for i in range(count):
            copy_bytes(source + i * source_step, target + i * target_step, width)


@helper
def copy_chunks(source, target, chunks, end, width):
    """Copy one token's chunks; their offsets are listed from `chunks` to `end`."""
    if width == 2:
        listed2(source, target, chunks, end)
    elif width == 4:
        listed4(source, target, chunks, end)
    elif width == 16:
        listed16(source, target, chunks, end)
    elif width == 32:
        listed32(source, target, chunks, end)
    else:
        for chunk in range(chunks, end, CHUNK):
            copy_bytes(source + get(chunk), target + get(chunk + 8), width)


@compiled(WORKER)
def copy_runs(worker, params_at):
    """Copy this worker's runs.

    A run is [source address, target address, tokens]; a chunk is [source offset, target offset] in a token.
    The outer loop runs over chunks or over tokens, whichever writes the target in order.
    """
    params = record(params_at)
    source_step, target_step, width = params.source_step, params.target_step, params.width
    end = params.chunks + CHUNK * params.chunk_count
    for i in range(
        share(params.count, worker, params.workers), share(params.count, worker + 1, params.workers)
    ):
        run = params.runs + RUN * i
        source, target, count = get(run), get(run + 8), get(run + 16)
        if params.by_chunk:
            for chunk in range(params.chunks, end, CHUNK):
                at, to = source + get(chunk), target + get(chunk + 8)
                copy_strided(at, source_step, to, target_step, count, width)
        else:
            for t in range(count):
                copy_chunks(source + t * source_step, target + t * target_step, params.chunks, end, width)


def prepare_runs(runs, chunks, steps, width, by_chunk, alive):
    """Return a launch that copies runs; `alive` are the arrays that their addresses point into."""
    moved = int(runs[:, 2].sum()) * len(chunks) * width
    workers = threads() if moved >= SMALL_BYTES else 1
    params = PARAMS.filled({
        "workers": workers, "runs": runs, "count": len(runs),
        "chunks": chunks, "chunk_count": len(chunks),
        "source_step": steps[0], "target_step": steps[1], "width": width, "by_chunk": by_chunk,
    })  # fmt: skip
    run = functools.partial(run_workers, copy_runs.code, workers, address(params))
    return Launch(runs, {}, run, alive=(*alive, params, chunks))
