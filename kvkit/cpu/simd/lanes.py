"""The vocabulary of the micro-kernels: vectors of float32 lanes, with numpy's operators.

A micro-kernel is a Python function that runs once, while Numba compiles a kernel, and emits the LLVM
instructions of its operations. LLVM splits a vector into the registers of the host (one of
AVX-512, two of AVX2, four of NEON). Addresses are byte addresses of any alignment.

    @micro_kernel                                     # in a kernel: scale_by(source, target, count, number)
    def scale_by(b, source, target, count, number):   # b is the LLVM builder, the others are int64
        factor = broadcast(b, number, LANES)
        with loop(b, count, LANES) as i:              # target[i : i + 16] = source[i : i + 16] * factor
            offset = b.mul(i, I64(4))
            write(b, b.add(target, offset), read(b, b.add(source, offset), F32, LANES) * factor)
"""

import functools
import inspect

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvkit.cpu import machine
from kvkit.formats.elements import BY_NAME, FLOAT16, FLOAT32

LANES = 16  # float32 lanes of a vector
F32, F16 = ir.FloatType(), ir.HalfType()
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
SUBNORMALS_AS_ZERO = 0x8040  # bits of x86's control word: of results and of operands
BITS = {F32: 32, F16: 16, I8: 8, I16: 16, I32: 32, I64: 64}
FLOAT_TYPES = {FLOAT32: F32, FLOAT16: F16}
# The LLVM type of each element as it lies in memory.
RAW = {fmt.name: FLOAT_TYPES.get(fmt, ir.IntType(fmt.word.itemsize * 8)) for fmt in BY_NAME.values()}


def padded(count):
    """Return a count, rounded up to whole vectors."""
    return -(-count // LANES) * LANES


class Lanes:
    """A vector in the code being generated. Operators work lane by lane; a number fills all lanes."""

    def __init__(self, builder, value):
        self.builder, self.value, self.type = builder, value, value.type
        self.count = value.type.count

    def of(self, other):
        """Return the LLVM value of another vector, of a list of numbers, or of a number in all lanes."""
        if isinstance(other, Lanes):
            return other.value
        return ir.Constant(self.type, other if isinstance(other, list) else [other] * self.count)

    def full(self, number):
        """Return a vector like this one with a number in all lanes."""
        return Lanes(self.builder, self.of(number))

    def apply(self, instruction, *others):
        """Emit an instruction of the builder by its name."""
        return Lanes(self.builder, getattr(self.builder, instruction)(self.value, *map(self.of, others)))

    def call(self, name, *others):
        """Call an intrinsic of LLVM that has a form for every type of vector, as `fma` or `smin`."""
        kind = "f" if self.type.element == F32 else "i"
        name = f"llvm.{name}.v{self.count}{kind}{BITS[self.type.element]}"
        return call_intrinsic(self.builder, name, self.type, self.value, *map(self.of, others))

    def cast(self, instruction, element):
        """Convert each lane to another type of element by a cast instruction."""
        target = ir.VectorType(element, self.type.count)
        return Lanes(self.builder, getattr(self.builder, instruction)(self.value, target))

    def as_bits(self, width=32):
        """Return the bits as integers of `width` bits."""
        lanes = ir.VectorType(ir.IntType(width), self.count * BITS[self.type.element] // width)
        return Lanes(self.builder, self.builder.bitcast(self.value, lanes))

    def __add__(self, other):
        return self.apply("fadd", other)

    def __sub__(self, other):
        return self.apply("fsub", other)

    def __mul__(self, other):
        return self.apply("fmul", other)

    def __rsub__(self, other):
        return self.full(other) - self

    def __truediv__(self, other):
        return self.apply("fdiv", other)

    def __rtruediv__(self, other):
        return self.full(other) / self

    def __abs__(self):
        return self.call("fabs")

    def __neg__(self):
        return Lanes(self.builder, self.builder.fneg(self.value))

    def fma(self, factor, addend):
        """Return self * factor + addend, rounded once."""
        return self.call("fma", factor, addend)

    def max(self, other):
        """Return the larger of each lane; integers compare as unsigned."""
        return self._choose(">", other)

    def min(self, other):
        return self._choose("<", other)

    def _choose(self, relation, other):
        other = self.of(other)
        floats = self.type.element == F32
        compare = self.builder.fcmp_ordered if floats else self.builder.icmp_unsigned
        return Lanes(
            self.builder, self.builder.select(compare(relation, self.value, other), self.value, other)
        )

    def plus(self, other):
        return self.apply("add", other)

    def __and__(self, other):
        return self.apply("and_", other)

    def __or__(self, other):
        return self.apply("or_", other)

    def __lshift__(self, places):
        return self.apply("shl", places)

    def __rshift__(self, places):
        return self.apply("lshr", places)

    def signed_rshift(self, places):
        return self.apply("ashr", places)

    def pick(self, lanes, other=None):
        """Return the lanes with these numbers; lanes of `other` are counted after this vector's own."""
        lanes = list(lanes)
        mask = ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
        return Lanes(self.builder, self.builder.shuffle_vector(self.value, self.of(other or self), mask))

    def rotate(self, distance):
        """Return all lanes `distance` places further down, the first ones at the end."""
        return self.pick((lane + distance) % self.count for lane in range(self.count))

    def unless_nan(self, floats, other):
        """Return `other` in lanes where `floats` are NaN, itself in the rest."""
        nan = self.builder.fcmp_unordered("uno", floats.value, floats.value)
        return Lanes(self.builder, self.builder.select(nan, self.of(other), self.value))


def where(floats, relation, limit, then, other):
    """Return `then` in lanes where a relation to a limit holds (never for NaN), else the vector `other`."""
    true = floats.builder.fcmp_ordered(relation, floats.value, floats.of(limit))
    return Lanes(floats.builder, floats.builder.select(true, other.of(then), other.value))


def call_intrinsic(builder, name, result, *values):
    """Call an intrinsic of LLVM by its full name; `result` is the type of the vector that it returns."""
    signature = ir.FunctionType(result, [value.type for value in values])
    function = cgutils.get_or_insert_function(builder.module, signature, name)
    return Lanes(builder, builder.call(function, values))


def read(builder, address, element, count):
    """Read `count` elements at an address, as raw bits."""
    value = builder.load(builder.inttoptr(address, ir.VectorType(element, count).as_pointer()))
    value.align = 1
    return Lanes(builder, value)


def write(builder, address, lanes, stream=False):
    """Write raw lanes to an address; `stream` bypasses the caches and needs a multiple of 16."""
    done = builder.store(lanes.value, builder.inttoptr(address, lanes.type.as_pointer()))
    done.align = 16 if stream else 1
    if stream:
        done.set_metadata("nontemporal", builder.module.add_metadata([I32(1)]))


def fill(builder, number, count):
    """Return a vector with a number in all lanes."""
    empty = Lanes(builder, ir.Constant(ir.VectorType(number.type, 1), ir.Undefined))
    return Lanes(builder, builder.insert_element(empty.value, number, I32(0))).pick([0] * count)


def stack_buffer(builder, size):
    """Return the address of some bytes on the stack, twice, so that LLVM does not see that both are equal.

    Data written to the first and read from the second go through memory, not from register to register.
    """
    with builder.goto_entry_block():
        place = builder.alloca(ir.ArrayType(I8, size))
    place.align = 64
    begin = builder.ptrtoint(place, I64)
    return begin, builder.asm(ir.FunctionType(I64, [I64]), "", "=r,0", [begin], False)


def broadcast(builder, address, count):
    """Read the float32 at an address into every lane."""
    value = builder.load(builder.inttoptr(address, F32.as_pointer()))
    value.align = 1
    return fill(builder, value, count)


def word_at(builder, address):
    """Read the 32 bits at an address into every lane."""
    return broadcast(builder, address, LANES).as_bits()


def row_id_at(builder, address, i):
    """Read entry i of an array of int64."""
    return builder.load(builder.inttoptr(builder.add(address, builder.mul(i, I64(8))), I64.as_pointer()))


class StackSlots:
    """Vectors that a loop changes. They are stack variables, which LLVM moves to registers."""

    def __init__(self, builder, start):
        self.builder = builder
        self.places = [cgutils.alloca_once_value(builder, vector.value) for vector in start]

    def __getitem__(self, i):
        return Lanes(self.builder, self.builder.load(self.places[i]))

    def __setitem__(self, i, vector):
        self.builder.store(vector.value, self.places[i])


def concatenate(vectors):
    """Join 1, 2, 4, ... vectors into one."""
    while len(vectors) > 1:
        vectors = [x.pick(range(2 * x.count), y) for x, y in pairs(vectors)]
    return vectors[0]


def zeros(builder, count, vectors=1):
    """Return a list of vectors of float32 zeros."""
    zero = ir.Constant(ir.VectorType(F32, count), [0.0] * count)
    return [Lanes(builder, zero) for _ in range(vectors)]


def loop(builder, count, step=1):
    """Emit a loop: ``with loop(builder, count) as i`` counts i from 0 to count - 1 in steps, as int64."""
    return _Loop(builder, count, step)


class _Loop:
    def __init__(self, builder, count, step):
        self.range = cgutils.for_range_slice(builder, I64(0), count, I64(step), I64)

    def __enter__(self):
        index, _ = self.range.__enter__()
        return index

    def __exit__(self, *error):
        return self.range.__exit__(*error)


def never_unroll(builder):
    """Mark the loop that is being emitted, so that LLVM does not unroll it."""
    nothing = builder.asm(ir.FunctionType(ir.VoidType(), []), "", "", [], True)
    nothing.attributes.add("convergent")


def prefetch(builder, address, near=False):
    """Prefetch the cache line at an address into the L2 cache, or into L1 if `near`."""
    pointer = builder.inttoptr(address, I8.as_pointer())
    signature = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    builder.call(function, [pointer, I32(0), I32(3 if near else 1), I32(1)])


def widen(lanes, element):
    """Convert raw lanes of a float format, or int8 codes, to float32, exactly."""
    return WIDEN[BY_NAME[element].widen](lanes)


def narrow(lanes, element):
    """Convert float32 lanes to raw lanes of a float format, rounded once, ties to even."""
    return NARROW[BY_NAME[element].narrow](lanes)


def as_halves(codes, element):
    """Convert raw lanes of an 8-bit float to halves; halves of e4m3 are 256 times too small."""
    if element == "e5m2":
        return (codes.cast("zext", I16) << 8).cast("bitcast", F16)
    return e4m3_halves(codes.cast("sext", I16) << 7)


def pair_halves(codes, element):
    """Return the even and the odd codes as halves, by shifts in 16-bit words, so that no lane moves."""
    words = codes.as_bits(16)
    if element == "e5m2":
        return [half.cast("bitcast", F16) for half in (words << 8, words & 0xFF00)]
    return [e4m3_halves(half.signed_rshift(1)) for half in (words << 8, words)]


def e4m3_halves(codes):
    """Return halves of e4m3 codes that were sign-extended and shifted left by 7. NaN keeps its top bit."""
    bits = codes.apply("xor", codes.plus(0x80) & 0x407F)  # clears the sign's copies in the exponent
    return bits.cast("bitcast", F16)


def bfloat16_lanes(lanes):
    bits = lanes.as_bits()
    rounded = bits.plus((bits >> 16) & 1).plus(0x7FFF) >> 16
    return rounded.unless_nan(lanes, (bits >> 16) | 0x40).cast("trunc", I16)


def minifloat_lanes(x, name):
    """Round float32 lanes to an 8-bit float, as `numeric.float_to_minifloat` does."""
    element = BY_NAME[name]
    fraction = element.significant - 1
    bias, shift = (1 << 6 - fraction) - 1, 23 - fraction
    rounder = 2.0 ** (24 - bias - fraction)
    size = abs(x).min(float(element.limits[1]))
    bits = size.as_bits()
    code = (bits.plus((bits >> shift) & 1).plus((1 << shift - 1) - 1) >> shift).plus(
        -(127 - bias << fraction) % 2**32
    )
    small = (size + rounder).as_bits().plus(-int(np.float32(rounder).view(np.uint32)) % 2**32)
    code = where(size, "<", 2.0 ** (1 - bias), small, code).unless_nan(x, 0x7F)
    return (code | ((x.as_bits() >> 24) & 0x80)).cast("trunc", I8)


# The vector forms of the formulas in `numeric.py`, by their names.
WIDEN = {
    "half_to_float": lambda lanes: lanes.cast("fpext", F32),
    "bfloat16_to_float": lambda lanes: (lanes.cast("zext", I32) << 16).cast("bitcast", F32),
    "int8_to_float": lambda lanes: lanes.cast("sitofp", F32),
    "float_of": lambda lanes: lanes,
    "e4m3_to_float": lambda lanes: as_halves(lanes, "e4m3").cast("fpext", F32) * 256.0,
    "e5m2_to_float": lambda lanes: as_halves(lanes, "e5m2").cast("fpext", F32),
}
NARROW = {
    "float_to_half": lambda lanes: lanes.cast("fptrunc", F16),
    "float_to_bfloat16": bfloat16_lanes,
    "bits_of": lambda lanes: lanes,
    "float_to_e4m3": lambda lanes: minifloat_lanes(lanes, "e4m3"),
    "float_to_e5m2": lambda lanes: minifloat_lanes(lanes, "e5m2"),
}


def unpack_nibbles(pairs):
    """Unpack int8 lanes of two nibbles into twice as many codes, the low nibble first."""
    low, high = (pairs << 4).signed_rshift(4), pairs.signed_rshift(4)
    return low.pick((lane // 2 + lane % 2 * pairs.count for lane in range(2 * pairs.count)), high)


def pack_codes(vectors, largest, nibbles):
    """Pack int32 lanes, limited to -largest..largest, into bytes, or into nibbles with the even code low.

    AVX-512 packs four vectors into one with saturation, four lanes of each in turn. Numbers that become
    nibbles are in range already.
    """
    if len(vectors) % 4 or not machine.has_integers():
        codes = [x.call("smax", -largest).call("smin", largest) for x in vectors]
        codes = codes if len(codes) % 4 else [concatenate(four) for four in fours(codes)]
        codes = [x.cast("trunc", I8) for x in codes]
        words = [x.as_bits(16) for x in codes] if nibbles else ()
        return [((x & 0x0F) | ((x >> 4) & 0xF0)).cast("trunc", I8) for x in words] if nibbles else codes
    halves = [[call_avx512("packssdw", I16, x, y) for x, y in pairs(four)] for four in fours(vectors)]
    codes = [call_avx512("packsswb", I8, x, y) for x, y in halves]
    if not nibbles:
        order = [4 * lane + vector for vector in range(4) for lane in range(4)]
        return [x.call("smax", -largest).as_bits().pick(order) for x in codes]
    words = [call_avx512("pmaddubs.w", I16, x & 15, x.full([1, 16] * 32)) for x in codes]
    order = [8 * lane + 4 * half + vector for half in range(2) for vector in range(4) for lane in range(4)]
    if len(words) % 2:  # a vector is packed with itself, and half of the result is used
        return [call_avx512("packuswb", I8, x, x).as_bits(16).pick(order[:16]) for x in words]
    return [call_avx512("packuswb", I8, x, y).as_bits(16).pick(order) for x, y in pairs(words)]


def call_avx512(name, element, x, y):
    """Call an AVX-512 BW instruction on two vectors of 64 bytes."""
    result = ir.VectorType(element, 512 // BITS[element])
    return call_intrinsic(x.builder, f"llvm.x86.avx512.{name}.512", result, x.value, y.value)


def fours(vectors):
    return [vectors[i : i + 4] for i in range(0, len(vectors), 4)]


def pairs(vectors):
    return zip(vectors[::2], vectors[1::2], strict=True)


def exp(x):
    """Return e to the power of lanes up to 88, within 2 ulp; subnormal results are 0."""
    rounder = 1.5 * 2.0**23
    shifted = x.fma(1.4426950408889634, rounder)  # its low bits are the exponent of 2
    power = shifted - rounder
    rest = power.fma(-0.693359375, x)
    rest = power.fma(2.12194440e-4, rest)
    series = x.full(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        series = series.fma(rest, coefficient)
    result = series.fma(rest * rest, rest) + 1.0
    scale = (shifted.as_bits() << 23).plus(127 << 23)
    return where(x, "<", -87.33654, 0.0, result * scale.cast("bitcast", F32))


def sums_of(vectors, apart=1):
    """Return the sums of 16 or 8 vectors of 16 lanes: lane i is the sum of vectors[i].

    With `apart` 2 or 4, a vector has 2 or 4 sums, each in every second or fourth lane; then lane i is sum
    i % apart of vectors[i // apart]. Shuffles within 128 bits are cheap, so they come first.
    """
    if apart == 1:
        vectors = [add_lanes(x, y, (0, 16, 1, 17), (2, 18, 3, 19)) for x, y in pairs(vectors)]
    if apart <= 2:
        vectors = [add_lanes(x, y, (0, 1, 16, 17), (2, 3, 18, 19)) for x, y in pairs(vectors)]
    vectors = [add_blocks(x, y) for x, y in pairs(vectors)]
    return add_blocks(*vectors)


def add_lanes(x, y, low, high):
    """Add lanes `low` and `high` of each block of four; numbers from 16 on are lanes of y."""
    low, high = ([block + lane for block in (0, 4, 8, 12) for lane in lanes] for lanes in (low, high))
    return x.pick(low, y) + x.pick(high, y)


def add_blocks(x, y=None):
    """Add neighbouring blocks of four lanes, of one vector or of two in a row."""
    starts = range(0, 16 if y is None else 32, 8)
    low = [start + lane for start in starts for lane in range(4)]
    return x.pick(low, y) + x.pick([lane + 4 for lane in low], y)


def micro_kernel(build):
    """Turn a builder function (builder, *int64 values) into an intrinsic; arguments may be given by name."""
    arguments = len(inspect.signature(build).parameters) - 1

    def codegen(context, builder, signature, values):
        build(builder, *values)
        return context.get_dummy_value()

    @intrinsic
    @functools.wraps(build)
    def typer(typingctx, *given, **named):
        return types.void(*[types.int64] * arguments), codegen

    return typer


@micro_kernel
def subnormals_as_zero(b, saved):
    """Take subnormal numbers as 0 in this thread on x86, which computes a hundred times slower with them.

    The control word before it is saved at an address.
    """
    control_word(b, "st", saved)
    word = b.load(b.inttoptr(saved, I32.as_pointer()))
    changed = b.add(saved, I64(4))
    b.store(b.or_(word, I32(SUBNORMALS_AS_ZERO)), b.inttoptr(changed, I32.as_pointer()))
    control_word(b, "ld", changed)


@micro_kernel
def restore_float_control(b, saved):
    """Restore the control word of float arithmetic that `subnormals_as_zero` has saved."""
    control_word(b, "ld", saved)


def control_word(b, verb, address):
    """Store or load the control word of float arithmetic on x86."""
    if not b.module.triple.startswith("x86"):
        return
    pointer = b.inttoptr(address, I8.as_pointer())
    signature = ir.FunctionType(ir.VoidType(), [pointer.type])
    b.call(cgutils.get_or_insert_function(b.module, signature, f"llvm.x86.sse.{verb}mxcsr"), [pointer])
