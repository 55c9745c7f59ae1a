"""Vector forms of the pooling of compressed caches: a softmax over tokens in every lane, and RMSNorm."""

from llvmlite import ir

from kvkit.cpu.simd.lanes import (
    F32,
    I64,
    LANES,
    StackSlots,
    broadcast,
    exp,
    fill,
    loop,
    micro_kernel,
    write,
    zeros,
)
from kvkit.cpu.simd.recurrent import BYTES, floats, offset, total


@micro_kernel
def add_vectors(b, x, y, target, count):
    """Write the sums of `count` vectors of two arrays."""
    with loop(b, count) as i:
        sums = floats(b, offset(b, x, i, BYTES)) + floats(b, offset(b, y, i, BYTES))
        write(b, offset(b, target, i, BYTES), sums)


@micro_kernel
def pool_columns(b, values, scores, pitch, rows, target, count):
    """Write the sums of the rows of `values`, weighted by the softmax over rows of `scores`.

    m = max of s      l = sum of e^(s - m)      o = sum of e^(s - m) v / l
    """
    lowest = fill(b, ir.Constant(F32, float("-inf")), LANES)
    with loop(b, count) as column:
        at = b.mul(column, I64(BYTES))
        value_at, score_at = b.add(values, at), b.add(scores, at)
        begin = [lowest, *zeros(b, LANES, 2)]  # m, l, o
        sums = StackSlots(b, begin)
        for i, vector in enumerate(begin):  # in each column
            sums[i] = vector
        with loop(b, rows) as i:
            sums[0] = sums[0].max(floats(b, offset(b, score_at, i, pitch)))
        with loop(b, rows) as i:
            p = exp(floats(b, offset(b, score_at, i, pitch)) - sums[0])  # [channels]
            sums[1] = sums[1] + p
            sums[2] = p.fma(floats(b, offset(b, value_at, i, pitch)), sums[2])
        write(b, b.add(target, at), sums[2] / sums[1])


@micro_kernel
def norm_row(b, row, weight, numbers, count):
    """Divide a row by the root of its mean square, and multiply it by weights; `numbers` are 1 / dim, eps."""
    share, eps = broadcast(b, numbers, LANES), broadcast(b, b.add(numbers, I64(4)), LANES)
    squares = StackSlots(b, zeros(b, LANES))
    squares[0] = zeros(b, LANES)[0]
    with loop(b, count) as i:
        x = floats(b, offset(b, row, i, BYTES))
        squares[0] = x.fma(x, squares[0])
    factor = 1.0 / total(squares[0]).fma(share, eps).call("sqrt")
    with loop(b, count) as i:
        x = floats(b, offset(b, row, i, BYTES)) * factor
        write(b, offset(b, row, i, BYTES), x * floats(b, offset(b, weight, i, BYTES)))
