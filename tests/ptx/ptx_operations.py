"""What PTX's arithmetic does to numbers, one for each thread."""

import ctypes
import functools
import re
from fractions import Fraction

import ml_dtypes
import numpy as np

DTYPES = {
    "pred": np.dtype(bool), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32), "f64": np.dtype(np.float64),
}  # fmt: skip
BYTES = {"pred": 1, "p": 1, "h": 2, "rs": 2, "r": 4, "f": 4, "rd": 8, "fd": 8}  # of a register


@functools.cache
class Type:
    """Describes how an instruction reads the bits of a register."""

    def __init__(self, name):
        self.name = name
        self.dtype = DTYPES.get(name) or np.dtype(f"{'i' if name[0] == 's' else 'u'}{int(name[1:]) // 8}")
        self.size = self.dtype.itemsize

    @property
    def floating(self):
        return "f" in self.name

    def of(self, raw):
        """Return the values of a register; its upper bits do not count."""
        if raw.dtype == self.dtype:
            return raw
        if raw.itemsize != self.size:
            raw = raw.astype(f"u{self.size}")
        return raw.view(self.dtype)

    def constant(self, text, count):
        if text.startswith("0f"):
            bits = np.uint32(int(text[2:], 16))
            return np.full(count, bits).view(self.dtype)
        if text.startswith("0d"):
            return np.full(count, np.uint64(int(text[2:], 16))).view(self.dtype)
        if self.name == "pred":
            return np.full(count, int(text, 0) != 0)
        number = int(text.rstrip("U"), 0) & (2 ** (8 * self.size) - 1)
        return np.full(count, number, f"u{self.size}").view(self.dtype)

    def bits(self, number):
        return int(np.array(number, self.dtype).view(f"u{self.size}")) if self.floating else int(number)


def raw(values, register):
    """Return the bits of values in a register."""
    size = BYTES[re.match(r"%([a-z]+)", register)[1]]
    if values.dtype == bool:
        return values
    if values.itemsize != size:
        values = values.astype(f"{'i' if values.dtype.kind == 'i' else 'u'}{size}")
    return values.view(f"u{size}")


def compute(opcode, sources, value):
    """Return the result of an instruction; `value` returns an operand as a type."""
    with np.errstate(all="ignore"):
        return OPERATIONS[opcode[0]](opcode, sources, value)


def plain(function):
    """Return an operation whose operands and result have the type that the opcode ends with."""

    def operation(opcode, sources, value):
        kind = Type(opcode[-1].removesuffix("x2"))
        if kind.name == opcode[-1]:
            return function(*(value(source, kind) for source in sources)).astype(kind.dtype, copy=False)
        words = (np.ascontiguousarray(value(source, Type("b32"))) for source in sources)
        return (
            function(*(word.view(kind.dtype) for word in words))
            .astype(kind.dtype, copy=False)
            .view(np.uint32)
        )

    return operation


def rounded_to_odd(a, b, c):
    """Return a b + c of float32 numbers as float64, with its last bit set unless it is exact."""
    a, b, c = (np.float64(x) for x in (a, b, c))
    product = a * b  # exact
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    bits = np.array(total).view(np.int64)
    moves = (error != 0) & np.isfinite(total) & (bits & 1 == 0)
    return (bits + np.where((error > 0) == (total > 0), 1, -1) * moves).view(np.float64)


def fused(opcode, sources, value):
    if opcode[-1] == "f64":
        exact = ctypes.CDLL(None).fma
        exact.restype, exact.argtypes = ctypes.c_double, [ctypes.c_double] * 3
        operands = (value(source, Type("f64")) for source in sources)
        return np.array([exact(*numbers) for numbers in zip(*operands, strict=True)])
    if opcode[1:] == ("rn", "f16x2"):
        words = (np.ascontiguousarray(value(source, Type("b32"))) for source in sources)
        return rounded_to_odd(*(word.view(np.float16) for word in words)).astype(np.float16).view(np.uint32)
    exact = rounded_to_odd(*(value(source, Type("f32")) for source in sources))
    near = exact.astype(np.float32)
    if opcode[1] == "rm":
        return np.where(near > exact, np.nextafter(near, np.float32(-np.inf)), near)
    if opcode[1] == "rz":
        return np.where(np.abs(near) > np.abs(exact), np.nextafter(near, np.float32(0)), near)
    return near


def multiply(opcode, sources, value):
    if "f" in opcode[-1]:
        return plain(np.multiply)(opcode, sources, value)
    kind = Type(opcode[-1])
    a, b = (value(source, kind) for source in sources)
    if opcode[1] == "wide":
        wide = Type(f"{kind.name[0]}{16 * kind.size}").dtype
        return a.astype(wide) * b.astype(wide)
    if opcode[1] == "hi":
        bits = 8 * kind.size
        return np.array([int(x) * int(y) >> bits for x, y in zip(a, b, strict=True)]).astype(kind.dtype)
    return a * b


def multiply_add(opcode, sources, value):
    product = multiply(opcode, sources[:2], value)
    return product + value(sources[2], Type(f"{opcode[-1][0]}{8 * product.itemsize}"))


def divide(a, b):
    """Divide integers, rounding towards zero; a division by 0 gives any number."""
    if a.dtype.kind == "f":
        return a / b
    b = np.where(b == 0, np.ones_like(b), b)
    if a.dtype.kind == "u":
        return a // b
    quotient = a // b
    return quotient + ((quotient < 0) & (quotient * b != a))


def remainder(a, b):
    return a - divide(a, b) * np.where(b == 0, np.ones_like(b), b)


def larger(a, b):
    """Return the larger number; of two zeros the positive one."""
    return np.where((a == 0) & (b == 0), a + b, np.fmax(a, b))


def smaller(a, b):
    return np.where((a == 0) & (b == 0), -(-a - b), np.fmin(a, b))


def shifted(opcode, sources, value):
    kind = Type(opcode[-1])
    x, by = value(sources[0], kind), value(sources[1], Type("u32"))
    bits = 8 * kind.size
    places = np.minimum(by, bits - 1).astype(kind.dtype)
    if opcode[0] == "shl":
        return np.where(by < bits, x << places, np.zeros_like(x))
    return x >> places if kind.name[0] == "s" else np.where(by < bits, x >> places, np.zeros_like(x))


COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


def compared(opcode, sources, value):
    kind, test = Type(opcode[-1]), opcode[1]
    a, b = (value(source, kind) for source in sources)
    if not kind.floating:
        return COMPARE[test](a, b)
    odd = np.isnan(a) | np.isnan(b)
    if test in ("num", "nan"):
        return odd == (test == "nan")
    if test.endswith("u") and test != "u":  # or not ordered
        return COMPARE[test[:-1]](a, b) | odd
    return COMPARE[test](a, b) & ~odd


def selected(opcode, sources, value):
    kind = Type(opcode[-1])
    return np.where(value(sources[2], Type("pred")), value(sources[0], kind), value(sources[1], kind))


ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def towards_zero(x, dtype):
    """Round numbers towards zero."""
    near = x.astype(dtype)
    larger = [
        abs(Fraction(float(y))) > abs(Fraction(z)) if np.isfinite(y) else np.isfinite(np.float64(z))
        for y, z in zip(near.tolist(), x.tolist(), strict=True)
    ]
    return np.where(larger, np.nextafter(near, dtype.type(0)), near)


MINIFLOATS = {"e4m3x2": ml_dtypes.float8_e4m3fn, "e5m2x2": ml_dtypes.float8_e5m2}


def converted(opcode, sources, value):
    if opcode[-1] in MINIFLOATS:  # the first of two is the low byte
        pair = value(sources[0], Type("u16"))
        low, high = (
            (pair >> shift).astype(np.uint8).view(MINIFLOATS[opcode[-1]]).astype(np.float16).view(np.uint16)
            for shift in (0, 8)
        )
        return low | high.astype(np.uint32) << 16
    target, source = Type(opcode[-2].removesuffix("x2")), Type(opcode[-1])
    values = [value(name, source) for name in sources]
    if opcode[-2].endswith("x2"):  # the first operand becomes the upper half
        high, low = (x.astype(target.dtype).view(np.uint16).astype(np.uint32) for x in values)
        return low | high << 16
    (x,) = values
    if target.floating:
        x = towards_zero(x, target.dtype) if "rz" in opcode else x.astype(target.dtype)
        if "sat" in opcode:
            x = np.where(np.isnan(x), 0, np.clip(x, 0, 1)).astype(target.dtype)
        rounding = [word for word in opcode if word in ROUND]
        return ROUND[rounding[0]](x) if rounding else x
    if source.floating:
        rounding = next(ROUND[word] for word in opcode if word in ROUND)
        limits = np.iinfo(target.dtype)
        nan = (limits.min or limits.max // 2 + 1) if 8 in (source.size, target.size) else 0
        whole = [
            nan if np.isnan(n) else int(min(max(n, limits.min), limits.max)) for n in rounding(np.float64(x))
        ]
        return np.array(whole, target.dtype)
    return x.astype(target.dtype)


def moved(opcode, sources, value):
    kind = Type(opcode[-1])
    if isinstance(sources[0], tuple):  # the first part is the lowest one
        part = Type(f"b{8 * kind.size // len(sources[0])}")
        words = [value(name, part).astype(kind.dtype) << np.array(8 * part.size * i, kind.dtype)
                 for i, name in enumerate(sources[0])]  # fmt: skip
        return np.bitwise_or.reduce(words)
    return value(sources[0], kind)


def inserted(opcode, sources, value):
    """Emulate bfi: replace bits of b from a place on by the low bits of a."""
    kind = Type(opcode[-1])
    a, b = (value(name, kind) for name in sources[:2])
    place, length = (int(value(name, Type("u32"))[0]) & 0xFF for name in sources[2:])
    bits = 8 * kind.size
    mask = ((1 << length) - 1 << place) & (2**bits - 1) if place < bits else 0
    mask = np.array(mask, kind.dtype)
    return (b & ~mask) | (a << np.array(min(place, bits - 1), kind.dtype) & mask)


def permuted(opcode, sources, value):
    word = Type("b32")
    a, b, choice = (value(name, word) for name in sources)
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    found = np.zeros_like(a)
    for i in range(4):
        which = (choice >> np.uint32(4 * i)) & np.uint32(15)
        byte = (both >> ((which & np.uint32(7)).astype(np.uint64) * np.uint64(8))).astype(np.uint8)
        sign = np.where(byte & 0x80, 0xFF, 0).astype(np.uint8)
        byte = np.where(which & np.uint32(8), sign, byte)
        found |= byte.astype(np.uint32) << np.uint32(8 * i)
    return found


def looked_up(opcode, sources, value):
    """Emulate lop3: look each bit up in a table by three bits."""
    a, b, c = (value(name, Type("b32")) for name in sources[:3])
    table, found = int(sources[3], 0), np.zeros_like(a)
    for place in range(8):
        if table >> place & 1:
            term = (a if place & 4 else ~a) & (b if place & 2 else ~b) & (c if place & 1 else ~c)
            found |= term
    return found


def flushed(x):
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def approximate(function):
    """Emulate functions of float32 that a GPU approximates; subnormal numbers may count as zeros."""

    def operation(opcode, sources, value):
        x = value(sources[0], Type("f32"))
        if "ftz" not in opcode:
            return function(x)
        return flushed(function(flushed(x)))

    return operation


OPERATIONS = {
    "add": plain(np.add), "sub": plain(np.subtract), "mul": multiply, "mad": multiply_add, "fma": fused,
    "div": plain(divide), "rem": plain(remainder), "neg": plain(np.negative), "abs": plain(np.abs),
    "max": plain(larger), "min": plain(smaller),
    "and": plain(np.bitwise_and), "or": plain(np.bitwise_or), "xor": plain(np.bitwise_xor),
    "not": plain(np.invert), "shl": shifted, "shr": shifted, "setp": compared, "selp": selected,
    "cvt": converted, "cvta": moved, "mov": moved, "bfi": inserted, "prmt": permuted, "lop3": looked_up,
    "copysign": plain(lambda sign, x: np.copysign(x, sign)), "ex2": approximate(np.exp2),
    "rcp": approximate(lambda x: np.float32(1) / x), "lg2": approximate(np.log2),
    "sqrt": approximate(np.sqrt),
}  # fmt: skip
