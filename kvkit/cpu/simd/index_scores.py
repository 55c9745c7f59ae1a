"""Sum the scores of an indexer over heads, after products of keys with WIDE query rows; widen its codes.

o_s = sum over rows r of w_r max(0, S_sr)        S [token, WIDE]
"""

import functools

import ml_dtypes
import numpy as np
from llvmlite import ir

from kvkit.cpu.simd import lanes
from kvkit.cpu.simd.attention import WIDE
from kvkit.cpu.simd.lanes import F32, I8, I16, I32, I64, LANES, Lanes, loop, micro_kernel, read, write

HALVES = WIDE // LANES


@functools.cache
def add_heads(scaled):
    """Return the micro-kernel of o; with `scaled`, S of a token is multiplied by its scale first."""

    @micro_kernel
    def add_heads(b, scores, weights, live, scales, count, first, target):
        """Add the sums of `count` tokens, rounded up to 16, to the target; if `first`, write them.

        Rows of S from `live` on are ignored, whatever they contain.
        """
        row = ir.Constant(ir.VectorType(I32, LANES), list(range(LANES)))
        factors, inside = [], []
        for half in range(HALVES):
            limit = lanes.fill(b, b.trunc(b.sub(live, I64(LANES * half)), I32), LANES)
            inside.append(b.icmp_signed("<", row, limit.value))
            factors.append(read(b, b.add(weights, I64(4 * LANES * half)), F32, LANES))
        with loop(b, count, LANES) as begin:
            sums = []
            for t in range(LANES):
                token, total = b.add(begin, I64(t)), None
                if scaled:
                    scale = lanes.broadcast(b, b.add(scales, b.mul(token, I64(4))), LANES)
                for half in range(HALVES):
                    at = b.add(scores, b.add(b.mul(token, I64(4 * WIDE)), I64(4 * LANES * half)))
                    x = read(b, at, F32, LANES)
                    x = Lanes(b, b.select(inside[half], x.value, x.of(0.0)))
                    x = x.full(0.0).max(x * scale if scaled else x)  # of NaN, the second one
                    total = x * factors[half] if total is None else x.fma(factors[half], total)
                sums.append(total)
            to = b.add(target, b.mul(begin, I64(4)))
            new = lanes.sums_of(sums)
            old = read(b, to, F32, LANES)
            old = Lanes(b, b.select(b.icmp_signed("!=", first, I64(0)), old.of(0.0), old.value))
            write(b, to, new + old)

    return add_heads


@micro_kernel
def widen_codes(b, source, source_row, target, target_row, tokens, dim):
    """Widen rows of e4m3 codes to bfloat16, which holds them; 32 divides `dim` (AVX-512 BW).

    A code without its sign selects one of 128 numbers, which are four registers.
    """
    kind = ir.VectorType(I16, 32)
    numbers = np.arange(128, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(ml_dtypes.bfloat16)
    tables = [ir.Constant(kind, part.tolist()) for part in numbers.view(np.uint16).reshape(4, 32)]
    choose = "llvm.x86.avx512.vpermi2var.hi.512"
    with loop(b, tokens) as t:
        begin, to = b.add(source, b.mul(t, source_row)), b.add(target, b.mul(t, target_row))
        with loop(b, dim, 32) as i:
            code = read(b, b.add(begin, i), I8, 32).cast("zext", I16)
            small, large = (
                lanes.call_intrinsic(b, choose, kind, tables[k], code.value, tables[k + 1]) for k in (0, 2)
            )
            is_large = b.icmp_unsigned("!=", (code & 64).value, code.of(0))
            number = Lanes(b, b.select(is_large, large.value, small.value)) | ((code & 128) << 8)
            write(b, b.add(to, b.mul(i, I64(2))), number)
