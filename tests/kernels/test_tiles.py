"""Products of tiles, by instructions and in memory, bit for bit against plain loops; the state of tiles."""

import functools
import os
import subprocess
import sys
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from llvmlite import ir
from numba import types
from numpy.testing import assert_array_equal
from tile_scenes import HAVE_TILES, needs_tiles

from kvkit.cpu.simd.lanes import micro_kernel
from kvkit.cpu.simd.tiles import BFLOAT16, FULL, PRODUCTS, Shape, Tiles
from kvkit.runtime import jit
from kvkit.runtime.arrays import zeros

pytestmark = pytest.mark.cpu
BF16 = ml_dtypes.bfloat16


FORMS = [True, pytest.param(False, marks=needs_tiles)]
forms = pytest.mark.parametrize("in_memory", FORMS, ids=lambda memory: "memory" if memory else "instructions")
NARROW = Shape((16, 16, 4, 4, 16, 16, 16, 16), (16, 64, 64, 64, 64, 64, 16, 16))


@functools.cache
def product(elements, in_memory, shape=FULL, numbers=(0, 1, 2)):
    """Return machine code (a, b, c) that adds the product of two tiles to a third, each of dense rows."""

    @micro_kernel
    def kernel(builder, a, b, c):
        tiles, places = Tiles(builder, shape, in_memory), dict(zip(numbers, (c, a, b), strict=True))
        tiles.open()
        for tile, place in places.items():
            tiles.load(tile, place, shape.bytes[tile])
        tiles.multiply(*numbers, elements)
        tiles.store(numbers[0], c, shape.bytes[numbers[0]])
        tiles.close()

    def run(a, b, c):
        kernel(a, b, c)

    with mock.patch.object(jit, "cache_folder", return_value=None):
        return jit.callback(run, types.void(*[types.int64] * 3))


def multiplied(code, a, b, c):
    """Return c + a * b, computed by the code."""
    arrays = [zeros((len(x), *x.shape[1:]), x.dtype) for x in (a, b, c)]
    for array, x in zip(arrays, (a, b, c), strict=True):
        array[...] = x
    code.ctypes(*[array.ctypes.data for array in arrays])
    return arrays[2]


def flushed(x):
    return np.where(np.abs(x) < np.float32(2**-126), np.copysign(np.float32(0), x), x)


def fma(x, y, z):
    """Return x * y + z of float32, rounded once: the product is exact in float64, and so is the sum here."""
    return (x.astype(np.longdouble) * y + z).astype(np.float32)


def expected_bfloat16(a, b, c):
    """Return c + a b of a [m, k, 2] and b [k, n, 2] by the rule of the instruction, in plain loops."""
    a, b = (flushed(x.astype(np.float32)) for x in (a, b))
    sums = [np.zeros(c.shape, np.float32) for _ in range(2)]
    for part in range(2):
        for k in range(len(b)):
            sums[part] = flushed(fma(a[:, k, part][:, None], b[k, :, part][None], sums[part]))
    return flushed(flushed(c) + flushed(sums[0] + sums[1]))


FILLS = "normal", "subnormal", "some subnormal", "subnormal sums", "special"


def fill(rng, how, *shape):
    """Return bfloat16 numbers whose products test a rule of the instruction."""
    bits = rng.integers(0, 128, shape).astype(np.uint16)
    normal = rng.standard_normal(shape, np.float32).astype(BF16)
    if how == "subnormal":
        return bits.view(BF16)
    if how == "some subnormal":
        return np.where(rng.random(shape) < 0.3, bits.view(BF16), normal)
    if how == "subnormal sums":
        return (normal.astype(np.float32) * np.float32(2.0**-64)).astype(BF16)
    if how == "special":
        special = rng.choice(np.array([0x7F80, 0xFF80, 0x7FC0, 0x7F7F], np.uint16), shape).view(BF16)
        return np.where(rng.random(shape) < 0.01, special, normal)
    return normal


@pytest.mark.parametrize("how", FILLS)
@forms
def test_products_of_bfloat16(in_memory, how, rng):
    """Each result has the bits of plain loops; of NaN only that it is one."""
    for shape, numbers in (FULL, (0, 1, 2)), (NARROW, (0, 4, 6)), (NARROW, (2, 3, 5)):
        rows, words = shape.rows, [size // 4 for size in shape.bytes]
        c, x, y = numbers
        a, b = fill(rng, how, rows[x], words[x], 2), fill(rng, how, rows[y], words[y], 2)
        start = rng.standard_normal((rows[c], words[c]), np.float32) * np.float32(how != "subnormal sums")
        found = multiplied(product(BFLOAT16, in_memory, shape, numbers), a, b, start.astype(np.float32))
        with np.errstate(invalid="ignore", over="ignore"):
            expected = expected_bfloat16(a, b, start.astype(np.float32))
        assert_array_equal(np.isnan(found), np.isnan(expected))
        real = ~np.isnan(expected)
        assert_array_equal(found.view(np.int32)[real], expected.view(np.int32)[real])


@pytest.mark.parametrize("elements", [pair for pair in PRODUCTS if pair != BFLOAT16], ids="-".join)
@forms
def test_products_of_bytes(in_memory, elements, rng):
    a, b = (rng.integers(0, 256, (16, 16, 4), np.uint8).view(element) for element in elements)
    c = rng.integers(-1000, 1000, (16, 16), np.int32)
    expected = c + np.einsum("mkj,knj->mn", *(x.astype(np.int32) for x in (a, b)))
    assert_array_equal(multiplied(product(elements, in_memory), a, b, c), expected)


@needs_tiles
@pytest.mark.parametrize("how", FILLS)
def test_instructions_and_memory_give_the_same_bits(how, rng):
    for _ in range(20):
        a, b = (fill(rng, how, 16, 16, 2) for _ in range(2))
        c = rng.standard_normal((16, 16), np.float32)
        found = [multiplied(product(BFLOAT16, in_memory), a, b, c).view(np.int32) for in_memory in (0, 1)]
        assert_array_equal(*found)


def test_products_of_tiles_that_do_not_fit_are_refused():
    """The processor would stop the process."""
    function = ir.Function(ir.Module(), ir.FunctionType(ir.VoidType(), []), "empty")
    tiles = Tiles(ir.IRBuilder(function.append_basic_block()), NARROW)
    for numbers in (0, 4, 5), (2, 4, 5), (2, 0, 5):
        with pytest.raises(ValueError, match="do not fit"):
            tiles.multiply(*numbers)


# The state of tiles; each script runs in a process of its own

SIGNAL_STACK = """
import ctypes, faulthandler, os, sys
from kvkit.cpu import machine

class Stack(ctypes.Structure):
    _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

def set_stack(size):
    global stack
    stack = ctypes.create_string_buffer(size)
    return ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(stack), 0, size)), None)

"""
HOLD = """
import os, signal, threading
import numpy as np
from llvmlite import ir
from numba import njit, prange
from numba.core import cgutils
from kvkit.cpu import machine
from kvkit.cpu.simd.lanes import I64, loop, micro_kernel
from kvkit.cpu.simd.tiles import Tiles
from kvkit.runtime.arrays import zeros

@micro_kernel
def hold(b, a, turns):
    "Keep a tile while the thread waits, then store it."
    tiles = Tiles(b)
    tiles.open()
    tiles.load(1, a, 64)
    with loop(b, turns):
        kind = ir.FunctionType(ir.VoidType(), [])
        b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.x86.sse2.pause"), [])
    tiles.store(1, b.add(a, I64(1024)), 64)
    tiles.close()

@njit(nogil=True)
def holding(a, turns):
    hold(a, turns)

@njit(parallel=True)
def holding_in_threads(a, count):
    for i in prange(count):
        hold(a + 2048 * i, 20000)

def filled(seed, count=1):
    a = zeros((count, 2, 1024), np.uint8)
    a[:, 0] = np.random.default_rng(seed).integers(0, 256, (count, 1024))
    return a

def lost(a):
    return int((a[:, 0] != a[:, 1]).any())

assert machine.tiles() == "instructions"
"""


def run_script(text, **variables):
    """Run a script; return what it prints."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "KVKIT_TILES": "", "KVKIT_CPU": ""}
    done = subprocess.run([sys.executable, "-c", text], env=env | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@needs_tiles
def test_small_signal_stacks_leave_the_process_without_tiles():
    text = "assert set_stack(8192) == 0; print(machine.tiles(), machine.tiles_obstacle())"
    words = "None not permitted, because a thread has a signal stack that is too small to save them"
    assert run_script(SIGNAL_STACK + text) == words


@needs_tiles
def test_faulthandler_works_before_and_after():
    text = "faulthandler.enable(); print(machine.tiles(), set_stack(8192)); faulthandler.enable()"
    assert run_script(SIGNAL_STACK + text) == "instructions -1"
    text = "print(machine.tiles()); faulthandler.enable(); print(set_stack(65536))"
    assert run_script(SIGNAL_STACK + text).split() == ["instructions", "0"]


def test_importing_asks_for_nothing():
    """Permission is a change of the process, which only those who use tiles need."""
    text = """
import ctypes, kvkit, kvkit.cpu.attention.prepare
bits = ctypes.c_uint64()
ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(bits))
print(bits.value >> 18 & 1)
"""
    if sys.platform.startswith("linux"):
        assert run_script(text) == "0"


@needs_tiles
def test_tiles_survive_forks_threads_and_signals():
    text = """
first = filled(0)
holding(first.ctypes.data, 1)
assert not lost(first)
if not (child := os.fork()):  # it has the permission too
    first[:, 1] = 0
    holding(first.ctypes.data, 1)
    os._exit(lost(first))
assert os.waitpid(child, 0)[1] == 0
several = filled(1, 16)
holding_in_threads(several.ctypes.data, 16)
assert not lost(several)
wrong = []
def use(seed):
    for i in range(20):
        mine = filled(100 * seed + i)
        holding(mine.ctypes.data, 20000)
        wrong.append(lost(mine))
threads = [threading.Thread(target=use, args=(i,)) for i in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
count = [0]
signal.signal(signal.SIGALRM, lambda *_: count.__setitem__(0, count[0] + 1))
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
for i in range(50):
    mine = filled(i)
    holding(mine.ctypes.data, 200000)
    wrong.append(lost(mine))
signal.setitimer(signal.ITIMER_REAL, 0)
assert count[0] > 5, count
print(len(wrong), sum(wrong))
"""
    assert run_script(HOLD + text) == "170 0"


@pytest.mark.slow
def test_switches():
    text = "from kvkit.cpu import machine; print(machine.tiles(), machine.tiles_obstacle())"
    assert run_script(text, KVKIT_TILES="memory").split()[0] == "memory"
    lower = "None KVKIT_CPU=avx512bf16" if HAVE_TILES else "None this CPU has none"
    assert run_script(text, KVKIT_CPU="avx512bf16") == lower
    text = "from kvkit.cpu import machine\ntry: machine.tiles()\nexcept ValueError as e: print(e)"
    assert run_script(text, KVKIT_TILES="on") == "KVKIT_TILES: expected memory, got 'on'"
