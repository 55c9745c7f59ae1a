"""What the static and the dynamic position operators share on the device."""

import functools

import numpy as np
from numba import cuda, types

from kvkit.jit import shared
from kvkit_cuda.calls import arrays, results
from kvkit_cuda.ground import device, memory
from kvkit_cuda.moves.transfer import sequence_of
from kvkit_cuda.positions import alibi, angles, rotary

THREADS = 256  # of a block

INDEX1 = types.Array(types.int64, 1, "C")
SIGNATURE = types.void(INDEX1, INDEX1, types.int64)

write = memory.store(8, 8)


def rotate(checked, query, key, out, stream):
    """Turn queries and keys; `checked` makes a call of the arrays as the checks of `kvkit` see them."""
    given = {"query": query, "key": key}
    here = [arrays.operand(name, array, stream).one_piece(stream) for name, array in given.items()]
    call = checked(*(operand.seen for operand in here))
    made, returned = results.outputs(out, call.results, (query, here[0]), stream)
    if call.starts[-1]:
        there = [operand.moved(stream) for operand in here]
        copies = [result.moved(stream, contents=False) for result in made]
        call = checked(*(operand.seen for operand in there))
        table, starts, fill = angles.table(call, stream)
        turn = rotary.prepare(call, [copy.seen for copy in copies], table, starts, stream)
        fill()  # nothing has been written so far, and nothing can fail any more
        turn()
        for result, copy in zip(made, copies, strict=True):
            result.take(copy, stream)
    return returned


def mask(checked, attn_mask, out, stream):
    """A mask with ALiBi biases; `checked` makes a call of another mask, likewise."""
    here = arrays.operand("attn_mask", attn_mask, stream).one_piece(stream)
    call = checked(here.seen)
    made, returned = results.outputs(out, call.results, (attn_mask, here), stream)
    if made[0].seen.size:
        there = here if here.seen is None else here.moved(stream)
        copy = made[0].moved(stream, contents=False)
        target = copy.seen if copy.seen.ndim == 4 else copy.seen[None]
        alibi.prepare(checked(there.seen), target, stream)()
        made[0].take(copy, stream)
    return returned


@shared
def put(target, position):
    write(target, np.uint64(position), np.uint64(0))


def walk(starts, first, target):
    """Write the position of every packed token."""
    for token in range(cuda.grid(1), starts[starts.shape[0] - 1], cuda.gridsize(1)):
        sequence = sequence_of(starts, token)
        put(target + token * 8, first[sequence] + token - starts[sequence])


@functools.cache
def compiled():
    return device.kernel(walk, SIGNATURE)


def index(starts, first, target, stream):
    """Write the position of every packed token to an array of the device."""
    tables, tokens = device.tables((starts, first), stream), int(starts[-1])
    blocks = min(-(-tokens // THREADS), device.most_blocks())
    device.launch(compiled(), (blocks, 1), (THREADS, 1), stream, (*tables, target.ctypes.data))
