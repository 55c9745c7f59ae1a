"""Copy and read memory in parallel, as the limits that operators are compared with."""

from pathlib import Path

import numba
import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def largest_cache():
    """Return the bytes of the largest cache of the CPU, 0 if the system does not say them."""
    units = {"K": 2**10, "M": 2**20}
    sizes = [file.read_text().strip() for file in CACHES.glob("index*/size")]
    return max((int(size[:-1]) * units[size[-1]] for size in sizes), default=0)


FAR = max(256 * 2**20, 2 * largest_cache())  # bytes to rotate through: they come from memory


def sets(size):
    """Return how many sets of `size` bytes to rotate through, so that they come from memory."""
    return max(1, -(-FAR // size))


def plain_copy(moved, fresh=False):
    """Return a function of the round that reads and writes `moved` bytes: a copy of half of them."""
    size = moved // 2
    count = sets(size)
    source = np.ones(count * size, np.uint8)
    target = np.ones(1 if fresh else count * size, np.uint8)

    def copy(i):
        at = i % count * size
        into = np.empty(size, np.uint8) if fresh else target[at : at + size]
        parallel_copy(into.ctypes.data, source.ctypes.data + at, size, numba.get_num_threads())

    return copy


def plain_read(turns, moved):
    """Return a function of the round that reads `moved` bytes of one set of arrays after the other."""
    views = [[words(array) for array in arrays] for arrays in turns]
    total = sum(view.nbytes for view in views[0])
    views = [[view[: view.size * moved // total] for view in turn] for turn in views]

    def read(i):
        for view in views[i % len(views)]:
            parallel_read(view, numba.get_num_threads())

    return read


def read_of_pieces(turns, size):
    """Return a function that reads all of the arrays, in pieces of `size` bytes in random order."""
    views = [[words(array) for array in arrays] for arrays in turns]
    rng, piece = np.random.default_rng(0), size // 8
    starts = [rng.permutation(view.size // piece) * piece for view in views[0]]

    def read(i):
        for view, order in zip(views[i % len(views)], starts, strict=True):
            parallel_pieces(view, order, piece, numba.get_num_threads())

    return read


def words(array):
    flat = array.reshape(-1).view(np.uint8)
    return flat[: flat.size // 8 * 8].view(np.int64)


@intrinsic
def memcpy(typingctx, target, source, size):
    def codegen(context, builder, signature, values):
        pointer = ir.IntType(8).as_pointer()
        function = ir.FunctionType(ir.VoidType(), [pointer, pointer, ir.IntType(64), ir.IntType(1)])
        name = "llvm.memcpy.p0.p0.i64"
        addresses = [builder.inttoptr(value, pointer) for value in values[:2]]
        called = cgutils.get_or_insert_function(builder.module, function, name)
        builder.call(called, [*addresses, values[2], ir.IntType(1)(0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@numba.njit(parallel=True)
def parallel_copy(target, source, size, parts):
    for part in prange(parts):
        begin, end = part * size // parts, (part + 1) * size // parts
        memcpy(target + begin, source + begin, end - begin)


@numba.njit(parallel=True)
def parallel_read(words, parts):
    mixed = np.zeros(parts, np.int64)
    for part in prange(parts):
        # A slice, because an index that could be negative would prevent vector code.
        share = words[part * len(words) // parts : (part + 1) * len(words) // parts]
        bits = np.int64(0)
        for i in range(len(share)):
            bits ^= share[i]
        mixed[part] = bits
    return mixed.sum()


@numba.njit(parallel=True)
def parallel_pieces(words, starts, size, parts):
    mixed = np.zeros(parts, np.int64)
    for part in prange(parts):
        bits = np.int64(0)
        for start in starts[part * len(starts) // parts : (part + 1) * len(starts) // parts]:
            piece = words[start : start + size]
            for i in range(len(piece)):
                bits ^= piece[i]
        mixed[part] = bits
    return mixed.sum()
