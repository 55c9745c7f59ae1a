"""All inline PTX: matrix products of a warp, asynchronous copies, and a fast exponential.

A warp holds matrices in fragments: words of two 16-bit elements (a, b), and float32 numbers (c). With
g = lane // 4 and t = lane % 4 a thread has (PTX ISA, "Matrix Fragments for mma.m16n8k16")

    A [16, 16]                          B [16, 8]                   C = A B [16, 8]
             2t, 2t+1   2t+8, 2t+9                      g                    2t   2t+1
    row g      a[0]        a[2]         2t, 2t+1      b[0]          row g    c[0]  c[1]
    row g+8    a[1]        a[3]         2t+8, 2t+9    b[1]          row g+8  c[2]  c[3]

Beside each instruction is its emulation for the simulator.
"""

import ctypes
import functools
import inspect
import threading

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvkit.formats import BY_NAME
from kvkit.formulas import numeric
from kvkit.runtime.jit import shared
from kvkit_cuda.device_runtime import device, memory

WORD, NUMBER, ADDRESS, OFFSET, HALF = types.uint32, types.float32, types.int64, types.int32, types.uint16
LLVM = {WORD: ir.IntType(32), OFFSET: ir.IntType(32), ADDRESS: ir.IntType(64), NUMBER: ir.FloatType()}
LLVM[HALF] = ir.IntType(16)
LETTER = {WORD: "r", OFFSET: "r", ADDRESS: "l", NUMBER: "f", HALF: "h"}
either, simulates = device.either, device.simulates
MINIFLOATS = 8, 9  # the first compute capability that converts floats of 8 bits
SHORT = {"float16": "f16", "bfloat16": "bf16"}


def instruction(text, results, arguments, ordered=False):
    """Return a device function that is one PTX instruction; operands are results, then arguments.

    An `ordered` instruction is not moved across reads and writes of memory. One that all threads of a warp
    run together is convergent: a compiler must not move it into a branch that some of them take.
    """
    returned = types.void if not results else (results[0] if len(results) == 1 else types.Tuple(results))
    parts = [LLVM[kind] for kind in results]
    form = ir.VoidType() if not parts else (parts[0] if len(parts) == 1 else ir.LiteralStructType(parts))
    constraints = ["=" + LETTER[kind] for kind in results] + [LETTER[kind] for kind in arguments]
    constraints += ["~{memory}"] if ordered else []

    def emit(typingctx, *given):
        def codegen(context, builder, signature, values):
            function = ir.FunctionType(form, [LLVM[kind] for kind in arguments])
            code = ir.InlineAsm(function, text, ",".join(constraints), side_effect=ordered)
            found = builder.call(code, values, attrs=("convergent",) if ".sync." in text else ())
            if len(parts) > 1:
                found = [builder.extract_value(found, i) for i in range(len(parts))]
                return context.make_tuple(builder, signature.return_type, found)
            return found if parts else context.get_dummy_value()

        return returned(*arguments), codegen

    names = ["typingctx", *(f"operand{i}" for i in range(len(arguments)))]  # numba needs named parameters
    given = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    emit.__signature__ = inspect.Signature(given)  # type: ignore[attr-defined]
    return intrinsic(emit)


# Matrices


@functools.cache
def matrices(transposed):
    """Return f(address, offset) -> 4 words, from four matrices [8, 8] of 16-bit elements in shared memory.

    Thread 8i + r gives the address of row r of matrix i, a multiple of 16 bytes. Each thread gets columns
    2t, 2t+1 of row g of each matrix, or of its transpose.
    """
    kind = ".trans" if transposed else ""
    text = f"ldmatrix.sync.aligned.m8n8.x4{kind}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
    load = instruction(text, [WORD] * 4, [OFFSET], ordered=True)

    def fragments(rows):
        contents = b"".join(ctypes.string_at(row, 16) for row in rows)
        elements = np.frombuffer(contents, np.uint16).reshape(4, 8, 8)
        words = np.ascontiguousarray(elements.swapaxes(1, 2) if transposed else elements).view(np.uint32)
        return [tuple(lane) for lane in words.reshape(4, 32).T]

    def emulation(address, offset):
        lane, words = device.share_with_warp(address + offset, combine=fragments)
        return words[lane]

    return either(emulation, lambda address, offset: load(np.int32(np.int32(address) + offset)))


@functools.cache
def mma(element):
    """Return f(a, b, c) -> the float32 fragment of A B + C, from fragments of A (4 words), B (2) and C."""
    short = SHORT[element]
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{short}.{short}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    emit = instruction(text, [NUMBER] * 4, [WORD] * 6 + [NUMBER] * 4)
    dtype = BY_NAME[element].dtype

    def products(words):
        numbers = np.array(words, np.uint32).view(dtype).astype(np.float32)
        numbers = numbers.reshape(8, 4, 6, 2)  # [g, t, word, element]
        left = numbers[:, :, [[0, 2], [1, 3]]].transpose(2, 0, 3, 1, 4).reshape(16, 16)
        right = numbers[:, :, 4:].swapaxes(1, 2).reshape(8, 16).T
        with np.errstate(all="ignore"):
            sums = left @ right
        return sums.reshape(2, 8, 4, 2).transpose(1, 2, 0, 3).reshape(32, 4)

    def emulation(a, b, c):
        lane, sums = device.share_with_warp((*a, *b), combine=products)
        return tuple(x + each for x, each in zip(c, sums[lane], strict=True))

    def mma(a, b, c):
        return emit(a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], c[2], c[3])

    return either(emulation, mma)


_transposed = instruction("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", [WORD], [WORD])


@simulates(lambda word: _transposed(word))
def transposed(word):
    """Return columns 2t, 2t+1 of row g of the transpose of a matrix [8, 8], whose own `word` has."""
    lane, words = device.share_with_warp(word)
    g, t = divmod(lane, 4)
    one, other = (int(words[4 * (2 * t + i) + g // 2]) >> g % 2 * 16 & 0xFFFF for i in range(2))
    return np.uint32(one | other << 16)


def bytes_of(choice):
    """Return f(x, y) -> a word of bytes of two words: bytes 0 to 3 are of x, 4 to 7 of y."""
    emit = instruction(f"prmt.b32 $0, $1, $2, {choice:#06x};", [WORD], [WORD] * 2)

    def emulation(x, y):
        both = int(x) | int(y) << 32
        return np.uint32(sum((both >> 8 * (choice >> 4 * i & 7) & 0xFF) << 8 * i for i in range(4)))

    return either(emulation, lambda x, y: emit(x, y))


# (x, y) -> the word of the low elements of two words, of the high ones.
low, high = bytes_of(0x5410), bytes_of(0x7632)


@functools.cache
def widened(stored, native=True):
    """Return f(word) -> the word of the floats of 8 bits in its two low bytes, as float16.

    `native` is for devices that have an instruction for it, from `MINIFLOATS` on.
    """
    if not native:
        return shifted(stored)
    emit = instruction(f"cvt.rn.f16x2.{stored}x2 $0, $1;", [WORD], [HALF])
    widen, narrow = numeric.widening(stored), numeric.narrowing("float16")

    def emulation(pair):
        one, other = (int(narrow(widen(np.uint8(int(pair) >> shift & 0xFF)))) for shift in (0, 8))
        return np.uint32(one | other << 16)

    return either(emulation, lambda pair: emit(np.uint16(pair)))


@functools.cache
def shifted(stored):
    """Return `widened` for any device: bytes become the high bytes of float16.

    That is all for e5m2. The exponent of e4m3 is one bit shorter, so all bits but the sign move down by one.
    The result is 2^-8 of the number, and NaN, whose bits are all 1, becomes a number; both are corrected.
    """
    apart, times = bytes_of(0x1404), halves("mul")  # bytes b0, b1 of x, 0 of y -> 0, b0, 0, b1
    if stored == "e5m2":
        return device.inlined(lambda word: apart(np.uint32(word), np.uint32(0)))
    signs, magnitudes = np.uint32(0x80008000), np.uint32(0x3F803F80)  # bits of both halves
    to_sign = np.uint32(0x40804080)  # added to a magnitude, it carries into the sign bit for NaN only
    two_to_8 = np.uint32(0x5C005C00)

    def shifted(word):
        word = apart(np.uint32(word), np.uint32(0))
        magnitude = np.uint32(word >> np.uint32(1)) & magnitudes
        is_nan = np.uint32(magnitude + to_sign) & signs
        exponents = np.uint32(is_nan - np.uint32(is_nan >> np.uint32(5)))  # all bits of a NaN's exponent
        return times(magnitude | (word & signs) | exponents, two_to_8)

    return device.inlined(shifted)


def has_minifloats():
    """Return whether the current device has an instruction for floats of 8 bits."""
    return device.SIMULATED or device.capability() >= MINIFLOATS


@functools.cache
def packed(element):
    """Return f(low, high) -> the word of two float32 numbers, rounded."""
    emit = instruction(f"cvt.rn.{SHORT[element]}x2.f32 $0, $2, $1;", [WORD], [NUMBER] * 2)
    narrow = numeric.narrowing(element)

    def emulation(low, high):
        return np.uint32(int(narrow(low)) | int(narrow(high)) << 16)

    return either(emulation, lambda low, high: emit(low, high))


@functools.cache
def halves(operation):
    """Return f(x, y) for "sub" and "mul", f(x, y, z) for "fma", on words of two float16 numbers."""
    known: dict = {"sub": np.subtract, "mul": np.multiply, "fma": lambda x, y, z: x * y + z}
    compute = known[operation]
    count = 3 if operation == "fma" else 2
    places = ", ".join(f"${i}" for i in range(count + 1))
    emit = instruction(f"{operation}.rn.f16x2 {places};", [WORD], [WORD] * count)

    def emulation(*words):
        numbers = [np.array([word], np.uint32).view(np.float16).astype(np.float64) for word in words]
        with np.errstate(all="ignore"):
            return compute(*numbers).astype(np.float16).view(np.uint32)[0]

    if operation == "fma":
        return either(emulation, lambda x, y, z: emit(x, y, z))
    return either(emulation, lambda x, y: emit(x, y))


# Copies


def copies(size, kind):
    """Return f(target, source), which begins to copy `size` bytes to shared memory."""
    text = f"cp.async.{kind}.shared.global [$0], [$1], {size};"
    begin = instruction(text, [], [OFFSET, ADDRESS], ordered=True)
    read, write = memory.load(size, size), memory.store(size, size, memory.SHARED)

    @shared
    def spoil(target):
        write(target, np.uint64(2**64 - 1), np.uint64(2**64 - 1))

    @shared
    def fill(target, source):
        low, high = read(source)
        write(target, low, high)

    def emulation(target, source):
        spoil(target)
        groups()[-1].append(functools.partial(fill, target, source))

    return either(emulation, lambda target, source: begin(np.int32(target), source))


def groups():
    """Return the groups of copies of a simulated thread; new copies go to the last group."""
    return threading.current_thread().__dict__.setdefault("groups", [[]])


def _end(count):
    """End the copies of the first groups of a simulated thread."""
    for _ in range(count):
        for fill in groups().pop(0):
            fill()


# Copies of 16 and of 4 bytes.
copy, copy_word = copies(16, "cg"), copies(4, "ca")

_arrived = instruction("cp.async.wait_all;", [], [], ordered=True)
_end_group = instruction("cp.async.commit_group;", [], [], ordered=True)


@simulates(lambda: _arrived())
def arrived():
    """Wait for all copies of the thread."""
    _end(len(groups()))
    groups().append([])


# (): make a group of the copies that the thread has begun since the last group.
end_group = either(lambda: groups().append([]), lambda: _end_group())


def all_but(count):
    """Return f(), which waits for all groups of copies of the thread except the last `count`."""
    wait = instruction(f"cp.async.wait_group {count};", [], [], ordered=True)

    def emulation():
        _end(len(groups()) - 1 - count)

    return either(emulation, lambda: wait())


_power = instruction("ex2.approx.ftz.f32 $0, $1;", [NUMBER], [NUMBER])


@simulates(lambda x: _power(x))
def power(x):
    """Return 2 to the power x, with a relative error below 2^-22; 0 where that is not a normal number."""
    with np.errstate(all="ignore"):
        return np.exp2(np.float32(x))


_larger = instruction("max.f32 $0, $1, $2;", [NUMBER], [NUMBER] * 2)


# (x, y) -> the larger one; the other one if one is NaN.
larger = either(np.fmax, lambda x, y: _larger(x, y))

_fresh_register = instruction("mov.b32 $0, $1;", [OFFSET], [OFFSET], ordered=True)


# (x) -> x in a register that is opaque to the compiler, so that it hoists nothing computed from x.
fresh_register = either(lambda x: x, lambda x: _fresh_register(x))
