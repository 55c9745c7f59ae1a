"""Tiles: rows of 16-bit elements in shared memory, arranged so that loading fragments has no bank conflicts.

A chunk is 16 bytes, 8 elements. Eight threads take the chunks of a row, so that they read 128 neighbouring
bytes. Chunks of one column in 8 neighbouring rows are in different banks: rows have an odd number of chunks,
or chunks are swizzled if a row is a multiple of 128 bytes. Chunk c of row r is then at place c ^ (r % 8):

    row 0    0 1 2 3 4 5 6 7
    row 1    1 0 3 2 5 4 7 6
    row 2    2 3 0 1 6 7 4 5
"""

import functools

import numpy as np

from kvkit.formats import BY_NAME
from kvkit.formulas import numeric
from kvkit.runtime.jit import shared
from kvkit_cuda.copy import chunks
from kvkit_cuda.device_runtime import device, memory, ptx

CHUNK, CODES = 8, 16  # elements of a chunk; codes that a thread widens at once, two chunks
LONGEST = 2**31 - 2**10  # tokens of the longest context, so that sums of positions and tiles have 32 bits
LINE_ELEMENTS = memory.LINE // 2  # of a line of 128 bytes, which has each bank once

int32 = device.int32
_read, _write = memory.load(16, 16, space=memory.SHARED), memory.store(16, 16)
_write_word, _read_floats = memory.store(4, 4, memory.SHARED), memory.load(8, 8, space=memory.SHARED)


@device.inlined
def quotient(x, y):
    """Return the quotient of numbers below 2^31; a 64-bit division would need too many registers."""
    return int32(np.uint32(x) // np.uint32(y))


def reciprocal(divisor: int) -> int:
    """Return 1 / divisor for `quotient_by`: a factor in the low 32 bits, a shift in the high ones."""
    shift = (divisor - 1).bit_length()
    return (((1 << (31 + shift)) // divisor + 1) % 2**32) | (shift << 32)


@device.inlined
def quotient_by(x, by):
    """Return x // d for x and d below 2^31 and `by` of d (Granlund and Montgomery, 1994)."""
    product = np.uint64(np.uint32(x + x)) * np.uint64(by & 0xFFFFFFFF)
    return int32(np.uint32(product >> np.uint64(32)) >> np.uint32(by >> 32))


@device.inlined
def row_id_of(params, table, pages, position):
    """Return the cache row of a position below 2^31; `pages` is the index of the sequence's first page."""
    page = quotient_by(position, params.by_page)
    return table[np.uint32(int32(pages + page))] + int32(position - page * int32(params.page_size))


def row_bytes(dim):
    """Return the bytes from row to row of a tile; a chunk is added where rows would share banks."""
    return 2 * (dim if dim % LINE_ELEMENTS == 0 else dim + CHUNK)


@functools.cache
def place(dim):
    """Return f(row, chunk) -> the offset of a chunk in a tile whose rows have `dim` elements."""
    size, swizzle = row_bytes(dim), 7 if dim % LINE_ELEMENTS == 0 else 0

    def place(row, chunk):
        return int32(row * size + (chunk ^ (row & swizzle)) * 16)

    return device.inlined(place)


@functools.cache
def advance(dim):
    """Return f(address, pairs) -> the address of the chunk that is 2 * `pairs` chunks further on in its row.

    The chunk is among the first 8 of the row; `pairs` is a constant. Tiles begin at multiples of 128 bytes,
    so that places of swizzled chunks differ in bits that can be flipped.
    """
    swizzled, pair_bytes, line = dim % LINE_ELEMENTS == 0, 2 * 16, memory.LINE  # bytes

    def advance(address, pairs):
        if swizzled:
            return int32((address ^ (pairs * pair_bytes % line)) + pairs * pair_bytes // line * line)
        return int32(address + pairs * pair_bytes)

    return device.inlined(advance)


def code_bytes(cache_format):
    return CODES * BY_NAME[cache_format].bits // 8


@functools.cache
def copy_row(dim):
    """Return f(tile, row, address, scales, group, thread), which begins to copy a row."""
    at, copy, line_bytes, chunks_of_row = place(dim), ptx.copy, memory.LINE, dim // CHUNK

    def copy_row(tile, row, address, scales, group, thread):
        target, source = int32(tile + at(row, thread)), address + 16 * thread
        for chunk in range(0, chunks_of_row, 8):  # 8 chunks on, the swizzle is the same
            if chunk + 8 <= chunks_of_row or chunk + thread < chunks_of_row:
                copy(int32(target + chunk // 8 * line_bytes), source + chunk // 8 * line_bytes)

    return device.inlined(copy_row)


@functools.cache
def widen_row(dim, element, cache_format, scale_format, native=True):
    """Return f(tile, row, address, scales, group, thread), which widens a row of codes at once."""
    at, pieces, piece_bytes = place(dim), dim // CODES, code_bytes(cache_format)
    if scale_format:
        widen, scale_bytes = widen_codes(element, cache_format, scale_format), BY_NAME[scale_format].bytes(1)
    else:
        widen, scale_bytes = widen_unscaled(element, cache_format, native), 0

    def widen_row(tile, row, address, scales, group, thread):
        for begin in range(0, pieces, 8):
            piece = begin + thread
            if begin + 8 <= pieces or piece < pieces:
                first = scales + quotient(piece * CODES, group) * scale_bytes
                second = scales + quotient(piece * CODES + CHUNK, group) * scale_bytes
                targets = tile + at(row, 2 * piece), tile + at(row, 2 * piece + 1)
                widen(address + piece * piece_bytes, first, second, targets[0], targets[1])

    return device.inlined(widen_row)


@functools.cache
def widen_codes(element, cache_format, scale_format):
    """Return f(codes, scale, second scale, target, second target), which widens 16 codes to two chunks."""
    bits, encode = BY_NAME[cache_format].bits, chunks.ENCODE[element]
    (raw, code_of), (raw_scale, scale_of) = chunks.DECODE[cache_format], chunks.DECODE[scale_format]
    size = code_bytes(cache_format)
    read, read_scale = memory.load(size, size), memory.load(*chunks.access(scale_format, 1))
    write, dequantize = memory.store(16, 16, memory.SHARED), numeric.dequantizing(element, scale_format)

    @shared
    def widen(codes, first, second, first_target, second_target):
        low, high = read(codes)
        for chunk in range(2):
            scale_bits, _ = read_scale(second if chunk else first)
            step = scale_of(raw_scale(scale_bits))
            words = np.uint64(0), np.uint64(0)
            for i in range(CHUNK):
                code = code_of(raw(chunks.field(low, high, (chunk * CHUNK + i) * bits)))
                word = np.uint64(encode(dequantize(code, step)))
                word <<= np.uint64(i % 4 * 16)
                words = (words[0] | word, words[1]) if i < 4 else (words[0], words[1] | word)
            write(second_target if chunk else first_target, words[0], words[1])

    return widen


@functools.cache
def widen_unscaled(element, cache_format, native):
    """Return `widen_codes` for codes that no scale multiplies here; for `native` see `ptx.widened`."""
    size, bits = code_bytes(cache_format), 2 * BY_NAME[cache_format].bits
    read, write = memory.load(size, size), memory.store(16, 16, memory.SHARED)
    pair = pair_widener(element, cache_format, native)
    short, mask = size < CODES, np.uint64(2**bits - 1)

    @shared
    def load(address):
        low, high = read(address)
        return low, low >> np.uint64(32) if short else high

    @shared
    def put_words(address, a, b, c, d):
        write(
            address,
            np.uint64(a) | np.uint64(b) << np.uint64(32),
            np.uint64(c) | np.uint64(d) << np.uint64(32),
        )

    def word(codes, k):
        return pair(np.uint32(codes >> np.uint64(bits * k) & mask))

    word = device.inlined(word)

    def widen(codes, first, second, first_target, second_target):
        low, high = load(codes)
        low, high = np.uint64(low), np.uint64(high)
        put_words(first_target, word(low, 0), word(low, 1), word(low, 2), word(low, 3))
        put_words(second_target, word(high, 0), word(high, 1), word(high, 2), word(high, 3))

    return device.inlined(widen)


@functools.cache
def pair_widener(element, cache_format, native):
    """Return f(pair) -> the word of two codes, of which the first is in the low bits."""
    minifloat, packed = BY_NAME[cache_format].minifloat, ptx.packed(element)
    widest = "float16" if minifloat else cache_format
    (raw, decode), bits = chunks.DECODE[widest], BY_NAME[widest].bits
    mask = 2**bits - 1
    widened = ptx.widened(cache_format, native) if minifloat else device.inlined(lambda pair: pair)

    @shared
    def floats(word):
        x, y = word & np.uint32(mask), word >> np.uint32(bits)
        return np.float32(decode(raw(x))), np.float32(decode(raw(y)))

    def narrow(pair):
        x, y = floats(widened(pair))
        return packed(x, y)

    return widened if minifloat and element == "float16" else device.inlined(narrow)


@functools.cache
def store_row(dim):
    """Return f(tile, row, address, thread), which copies a tile's row to global memory."""
    at = place(dim)

    def store_row(tile, row, address, thread):
        for chunk in range(thread, dim // CHUNK, 8):
            move(tile + at(row, chunk), address + 16 * chunk)

    return device.inlined(store_row)


@shared
def move(source, target):
    low, high = _read(source)
    _write(target, low, high)


@functools.cache
def two(element):
    """Return f(address) -> two neighbouring elements of a tile as float32."""
    read, (raw, decode) = memory.load(4, 4, space=memory.SHARED), chunks.DECODE[element]

    @shared
    def two(address):
        word, _ = read(address)
        return decode(raw(word & np.uint64(0xFFFF))), decode(raw(word >> np.uint64(16)))

    return two


@shared
def two_floats(address):
    """Return two neighbouring float32 numbers of shared memory."""
    both, _ = _read_floats(address)
    return numeric.float_of(np.uint32(both)), numeric.float_of(np.uint32(both >> np.uint64(32)))


@functools.cache
def put(dim):
    """Return f(tile, row, chunk, word, bits), which writes two elements, a word of a chunk."""
    at = place(dim)

    def put(tile, row, chunk, word, bits):
        put_word(tile + at(row, chunk) + 4 * word, bits)

    return device.inlined(put)


@shared
def put_word(address, bits):
    _write_word(address, np.uint64(bits), np.uint64(0))
