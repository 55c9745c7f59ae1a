"""Read, convert and write chunks: neighbouring elements of a head that a thread processes at once.

A chunk's bytes are two 64-bit words, and loops over its elements have constant bounds, so that chunks stay
in registers. `packed` and `cache_format` are the formats of tokens outside and in a cache; the functions that
are made take addresses, `packed` and `cache`. The formulas are those of `kvkit.formulas.numeric`:

    code = round(x / scale), x = code scale, with a scale for each group of a row
"""

import functools

import numpy as np

from kvkit.formats import BY_NAME, FLOATS, INT4, INT8, coarser
from kvkit.formats.elements import FLOATS8
from kvkit.formulas import numeric
from kvkit.runtime.jit import shared
from kvkit_cuda.device_runtime import memory

MAGNITUDE = 0x7FFFFFFF  # bits of a float32's magnitude, which compare as integers


def widest(packed, cache_format):
    """Return the most elements of a chunk: an access has at most 16 bytes."""
    return 128 // max(BY_NAME[packed].bits, BY_NAME[cache_format].bits)


def smallest(cache_format):
    """Return the fewest elements of a chunk: whole bytes."""
    return max(8 // BY_NAME[cache_format].bits, 1)


def access(element, span):
    """Return (size, alignment) of `span` elements; short chunks are aligned like their elements."""
    size = BY_NAME[element].bytes(span)
    return size, min(size, max(BY_NAME[element].bits // 8, 1)) if span < 4 else size


@shared
def field(low, high, place):
    """Return the bits of two words from `place` on; higher bits are arbitrary."""
    return (low if place < 64 else high) >> np.uint64(place & 63)


@shared
def insert_bits(low, high, word, place):
    """Return the two words of a chunk with an element's bits at `place`."""
    if place < 64:
        return low | (word << np.uint64(place)), high
    return low, high | (word << np.uint64(place - 64))


# (type of an element's bits, formula from bits to a number); then formulas from a number to bits.
DECODE = {fmt.name: (fmt.word.type, numeric.widening(fmt.name)) for fmt in (*FLOATS, *FLOATS8, INT8, INT4)}
ENCODE = {fmt.name: numeric.narrowing(fmt.name) for fmt in (*FLOATS, *FLOATS8)}
ENCODE["int8"] = numeric.nearest_code


@functools.cache
def convert(source, target, span):
    """Return f(low, high) -> (low, high), which converts a chunk of floats to another format."""
    if source == target:
        return keep_bits
    (raw, decode), encode = DECODE[source], ENCODE[target]
    source_bits, target_bits = BY_NAME[source].bits, BY_NAME[target].bits

    @shared
    def convert(low, high):
        new_low, new_high = np.uint64(0), np.uint64(0)
        for i in range(span):
            bits = np.uint64(encode(decode(raw(field(low, high, i * source_bits)))))
            new_low, new_high = insert_bits(new_low, new_high, bits, i * target_bits)
        return new_low, new_high

    return convert


@shared
def keep_bits(low, high):
    """Return a chunk as it is."""
    return low, high


@functools.cache
def store(packed, cache_format, span, read):
    """Return f(packed, cache address), which stores a chunk of new elements that `read` reads."""
    write, to_stored = memory.store(*access(cache_format, span)), convert(packed, cache_format, span)

    @shared
    def store(packed, cache):
        low, high = read(packed)
        low, high = to_stored(low, high)
        write(cache, low, high)

    return store


@functools.cache
def load(packed, cache_format, span):
    """Return f(packed address, cache address), which loads a chunk of the cache."""
    read, write = memory.load(*access(cache_format, span)), memory.store(*access(packed, span))
    to_packed = convert(cache_format, packed, span)

    @shared
    def load(packed, cache):
        low, high = read(cache)
        low, high = to_packed(low, high)
        write(packed, low, high)

    return load


@functools.cache
def dequantize(packed, cache_format, scale_format, span):
    """Return f(packed address, cache address, scale address), which loads a chunk of codes."""
    # A float of 8 bits times its scale is not rounded to the scale's format.
    product = numeric.dequantizing(packed, "float32" if BY_NAME[cache_format].minifloat else scale_format)
    read, write = memory.load(*access(cache_format, span)), memory.store(*access(packed, span))
    read_scale, (raw_scale, scale_of) = memory.load(*access(scale_format, 1)), DECODE[scale_format]
    (raw, code_of), encode = DECODE[cache_format], ENCODE[packed]
    code_bits, bits = BY_NAME[cache_format].bits, BY_NAME[packed].bits

    @shared
    def dequantize(packed, cache, scale):
        low, high = read(cache)
        scale_bits, _ = read_scale(scale)
        step = scale_of(raw_scale(scale_bits))
        new_low, new_high = np.uint64(0), np.uint64(0)
        for i in range(span):
            code = code_of(raw(field(low, high, i * code_bits)))
            word = np.uint64(encode(product(code, step)))
            new_low, new_high = insert_bits(new_low, new_high, word, i * bits)
        write(packed, new_low, new_high)

    return dequantize


@functools.cache
def largest(packed, span, read):
    """Return f(packed) -> the largest magnitude of a chunk, as the bits of a float32."""
    bits, (raw, decode) = BY_NAME[packed].bits, DECODE[packed]

    @shared
    def largest(packed):
        low, high = read(packed)
        found = np.int32(0)
        for i in range(span):
            magnitude = numeric.bits_of(decode(raw(field(low, high, i * bits)))) & np.uint32(MAGNITUDE)
            found = max(found, np.int32(magnitude))
        return found

    return largest


@functools.cache
def quantize(packed, cache_format, scale_format, span, read):
    """Return f(packed, cache, scale address, largest of the group, first), which encodes a chunk.

    The chunk that is `first` in its group also stores the scale."""
    _, qmax = BY_NAME[cache_format].limits
    group_scale, code_of = numeric.group_scaling(packed), numeric.quantizing(packed)
    write = memory.store(*access(cache_format, span))
    write_scale, scale_from = memory.store(*access(scale_format, 1)), ENCODE[scale_format]
    (raw, decode), bits, code_bits = DECODE[packed], BY_NAME[packed].bits, BY_NAME[cache_format].bits
    mask = 2**code_bits - 1

    @shared
    def quantize(packed, cache, scale, largest, first):
        low, high = read(packed)
        step = group_scale(numeric.float_of(np.uint32(largest)), qmax)
        codes = np.uint64(0)
        for i in range(span):
            code = code_of(decode(raw(field(low, high, i * bits))), step, qmax)
            codes |= (np.uint64(code) & np.uint64(mask)) << np.uint64(i * code_bits)
        write(cache, codes, np.uint64(0))
        if first:
            write_scale(scale, np.uint64(scale_from(step)), np.uint64(0))

    return quantize


@functools.cache
def divide(packed, cache_format, scale_format, span, given, read):
    """Return f(packed, cache, scale address, largest, first), which encodes x / scale.

    The scale is computed, or read if it is `given`. Quotients are rounded once, unlike those of `quantize`.
    """
    write = memory.store(*access(cache_format, span))
    (raw, decode), bits, limit = DECODE[packed], BY_NAME[packed].bits, BY_NAME[cache_format].limits[1]
    read_scale, (raw_scale, scale_from_bits) = memory.load(*access(scale_format, 1)), DECODE[scale_format]
    write_scale, scale_from = memory.store(*access(scale_format, 1)), ENCODE[scale_format]
    encode, code_bits = ENCODE[cache_format], BY_NAME[cache_format].bits
    largest_scale = numeric.largest_scaling(scale_format)

    @shared
    def scale_of(scale, largest, first):
        if given:
            scale_bits, _ = read_scale(scale)
            return scale_from_bits(raw_scale(scale_bits))
        step = largest_scale(numeric.float_of(np.uint32(largest)), limit)
        if first:
            write_scale(scale, np.uint64(scale_from(step)), np.uint64(0))
        return step

    @shared
    def divide(packed, cache, scale, largest, first):
        low, high = read(packed)
        step = scale_of(scale, largest, first)
        new_low, new_high = np.uint64(0), np.uint64(0)
        for i in range(span):
            code = np.uint64(encode(decode(raw(field(low, high, i * bits))) / step)) & np.uint64(0xFF)
            new_low, new_high = insert_bits(new_low, new_high, code, i * code_bits)
        write(cache, new_low, new_high)

    return divide


@functools.cache
def widen(packed, cache_format, scale_format, scales, span):
    """Return f(cache address, scale address, elements), which loads a chunk as attention reads it.

    Floats are rounded to the coarser of the formats of data and cache. code * scale is rounded only if the
    format of scales is coarser than that of the data.
    """
    read, (raw, decode) = memory.load(*access(cache_format, span)), DECODE[cache_format]
    bits, minifloat = BY_NAME[cache_format].bits, BY_NAME[cache_format].minifloat
    if scale_format is None:
        return widen_floats(packed, cache_format, span)
    rounds = coarser(scale_format, packed) and not minifloat
    product = numeric.dequantizing("float32", scale_format if rounds else "float32")
    (raw_scale, scale_of), scale_bits = DECODE[scale_format], BY_NAME[scale_format].bits
    read_scales, group = memory.load(*access(scale_format, scales)), span // scales

    @shared
    def widen(cache, scale, elements):
        low, high = read(cache)
        low_scales, high_scales = read_scales(scale)
        for i in range(span):
            code = decode(raw(field(low, high, i * bits)))
            step = scale_of(raw_scale(field(low_scales, high_scales, i // group * scale_bits)))
            elements[i] = product(code, step)

    return widen


def widen_floats(packed, cache_format, span):
    """Return `widen` for floats."""
    read, bits = memory.load(*access(cache_format, span)), BY_NAME[cache_format].bits
    raw, decode = DECODE[cache_format]
    rounded = numeric.rounding(packed if coarser(packed, cache_format) else "float32")

    @shared
    def widen(cache, scale, elements):
        low, high = read(cache)
        for i in range(span):
            elements[i] = rounded(decode(raw(field(low, high, i * bits))))

    return widen


@functools.cache
def read(element, invariant=True):
    """Return f(address) -> the element as float32; the kernel writes no `invariant` memory."""
    load, (raw, decode) = memory.load(*access(element, 1), invariant=invariant), DECODE[element]

    @shared
    def read(address):
        low, _ = load(address)
        return np.float32(decode(raw(low)))

    return read


@functools.cache
def write(element):
    """Return f(address, x), which writes a float32 in another format."""
    store, encode = memory.store(*access(element, 1)), ENCODE[element]

    @shared
    def write(address, x):
        store(address, np.uint64(encode(x)), np.uint64(0))

    return write
