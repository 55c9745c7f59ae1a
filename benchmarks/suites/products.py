"""Multiply as often as attention does, in registers: a bound of arithmetic, as a plain read is of memory."""

import functools

import numba
import numpy as np
from llvmlite import ir
from numba import prange

from kvkit.cpu import machine
from kvkit.cpu.attention.engines import integers as integer_engine
from kvkit.cpu.simd import integers, pairs, quarters
from kvkit.cpu.simd.lanes import F32, I64, LANES, Lanes, StackSlots, loop, micro_kernel, read, write

CHAINS = 12  # sums that do not wait for one another, in registers
INSTRUCTIONS = {  # (sums, x) -> sums + x x, by name
    "floats": lambda sums, x: x.fma(x, sums),
    "pairs": lambda sums, x: pairs.add_products(sums, x, x),
    "bytes": lambda sums, x: integers.dot(sums.as_bits(), x, x).cast("bitcast", F32),
    "words": lambda sums, x: integers.dot_pairs(sums.as_bits(), x, x).cast("bitcast", F32),
}


def instructions(kind: str, rows: int, elements: int) -> dict[str, int]:
    """Return how often decoding multiplies `rows` query rows with `elements` of keys and of values.

    Counts are by instruction, as kvkit's kernels choose it. Widening, scales and softmax are not counted.
    """
    products = rows * elements
    if kind in integer_engine.STORED and machine.has_integers():
        return {"bytes": integers.PARTS * products // 64, "words": products // 32}
    if kind == "bfloat16" and machine.has_pairs() and quarters.fits(rows, kind, True):
        return {"pairs": products // 32, "floats": products // LANES}
    return {"floats": 2 * products // LANES}


def plain_products(counts: dict[str, int]):
    """Return a function of the round that runs so many instructions, a share in each thread."""
    threads = numba.get_num_threads()
    memory = np.ones((1 + threads) * CHAINS * LANES, np.float32)

    def multiply(i):
        for name, count in counts.items():
            multiplier(name)(memory.ctypes.data, count, threads)

    return multiply


@functools.cache
def multiplier(name):
    """Compile f(memory, count, threads) for an instruction."""

    @micro_kernel
    def multiply(b, source, count, target):
        x = read(b, source, F32, LANES)
        sums = StackSlots(b, CHAINS * [Lanes(b, ir.Constant(x.type, [0.0] * LANES))])
        with loop(b, count, CHAINS):
            for k in range(CHAINS):
                sums[k] = INSTRUCTIONS[name](sums[k], x)
        for k in range(CHAINS):
            write(b, b.add(target, I64(4 * LANES * k)), sums[k])

    @numba.njit(parallel=True)
    def run(memory, count, threads):
        for part in prange(threads):
            multiply(memory, count // threads, memory + 4 * LANES * CHAINS * (1 + part))

    return run
