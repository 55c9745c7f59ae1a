"""Read chunks of a stored tile as words of 16-bit elements; codes are widened.

    x = code scale          for each code of a group with its scale, rounded to the type of the data

A chunk, 8 neighbouring elements, becomes 4 words of two elements. The elements of a word are `tile.apart`
places apart: floats are neighbours, codes are as far apart as codes fit in 16 bits, so that both halves of a
word are widened at once:

    a word of int8, from its low bits on    0 1 2 3                  widened to 0 2, 1 3
    a word of int4                          0 1 2 3 4 5 6 7          widened to 0 4, 1 5, 2 6, 3 7

Several chunks of a thread, a piece (see `stored_tiles`), are loaded at once into 8 words of registers:

    word      0 .. 3                             4 .. 7
    int8      chunk 0, 0, chunk 1, 1             scales of the piece
    int4      chunk 0, 1, 2, 3                   scales of the piece
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from kvkit.formats import BY_NAME
from kvkit.runtime.jit import shared
from kvkit_cuda.attention import tiles
from kvkit_cuda.attention.stored_tiles import TILE_TOKENS
from kvkit_cuda.attention.tiles import CHUNK
from kvkit_cuda.copy import chunks
from kvkit_cuda.device_runtime import device, memory, ptx

PIECE, SCALES = 8, 4  # words of a piece, and the first one of its scales
int32, quotient, fresh_register = device.int32, tiles.quotient, ptx.fresh_register


class Start(NamedTuple):
    """The place in a tile where a thread of a panel begins."""

    rows: Any  # the address of its first chunk
    scales: Any  # the address of the scale of that chunk
    chunk: Any  # the number of that chunk
    mask: Any  # the bits of a code in both halves of a word


@functools.cache
def four_of(load):
    """Return f(address) -> four words, from a load of up to 16 bytes."""

    @shared
    def four(address):
        low, high = load(address)
        upper = np.uint64(32)
        return np.uint32(low), np.uint32(low >> upper), np.uint32(high), np.uint32(high >> upper)

    return four


def start(tile):
    """Return f(at, token, thread, mask) -> the `Start` of a thread in the row of a token.

    Addresses are in fresh registers, so that later panels are at constant offsets.
    """
    step, chunk_bytes, scale_step = tile.step, tile.chunk_bytes, tile.scale_step
    scale_bytes, group_chunks = BY_NAME[tile.scale_format].bytes(1), tile.group // CHUNK
    regular, thread_step, last = tile.regular, tile.thread_step, tile.chunks - 1
    more_threads = tile.chunks < tile.panel  # than chunks: the others read the last chunk too

    def start(at, token, thread, mask):
        chunk = min(thread, last) if more_threads else thread * thread_step
        rows = np.int64(fresh_register(int32(at + token * step + chunk * chunk_bytes)))
        group = quotient(chunk, group_chunks) if regular else 0  # else `scale_loader` finds it
        scales = at + TILE_TOKENS * step + token * scale_step + group * scale_bytes
        scales = np.int64(fresh_register(int32(scales)))
        return Start(rows, scales, chunk, np.uint32(mask))

    return device.inlined(start)


def code_mask(tile):
    """Return the mask of a code's bits in both halves of a word."""
    return (2 ** BY_NAME[tile.cache_format].bits - 1) * 0x10001 if tile.coded else 0


def reader(tile):
    """Return f(begin, tokens, panels, words, i), which reads a chunk `tokens` and `panels` after a start.

    Elements get the data's type, in words i to i+3. Threads beyond a row's last chunk read another chunk.
    """
    load_piece, widen, piece = piece_loader(tile), word_decoder(tile), tile.piece

    def read(begin, tokens, panels, words, i):
        load_piece(begin, tokens, panels // piece, words, i + 4)
        for k in range(4):
            words[i + k] = widen(begin, words, i + 4, panels % piece, k)

    return device.inlined(read)


def piece_loader(tile):
    """Return f(begin, tokens, piece, words, i), which loads a piece of codes and its scales, unconverted."""
    step, chunk_bytes, panel, chunks = tile.step, tile.chunk_bytes, tile.panel, tile.chunks
    ragged = chunks > panel and chunks % panel != 0
    size = tile.piece * chunk_bytes
    load, load_scales = four_of(memory.load(size, size, space=memory.SHARED)), scale_loader(tile)
    piece_step, count = tile.piece * tile.panel_step, -(-size // 4)  # in chunks; words of codes

    def load_piece(begin, tokens, piece, words, i):
        # Where a row may end earlier, a piece is one panel.
        piece = piece if not ragged or piece * panel + begin.chunk < chunks else 0
        codes = load(begin.rows + (tokens * step + piece * piece_step * chunk_bytes))
        for j in range(count):
            words[i + j] = codes[j]
        load_scales(begin, tokens, piece, words, i + SCALES)

    return device.inlined(load_piece)


def scale_loader(tile):
    """Return f(begin, tokens, piece, words, i), which loads the scales of a piece."""
    scale_step, piece_step, regular = tile.scale_step, tile.piece * tile.panel_step, tile.regular
    scale_bytes, group_chunks = BY_NAME[tile.scale_format].bytes(1), tile.group // CHUNK
    size = tile.piece_scales * scale_bytes
    load, count = four_of(memory.load(size, size, space=memory.SHARED)), -(-size // 4)

    def load_scales(begin, tokens, piece, words, i):
        at = begin.scales + tokens * scale_step
        if regular:
            at += piece * piece_step // group_chunks * scale_bytes
        else:
            at += quotient(piece * piece_step + begin.chunk, group_chunks) * scale_bytes
        scales = load(at)
        for j in range(count):
            words[i + j] = scales[j]

    return device.inlined(load_scales)


def word_decoder(tile):
    """Return f(begin, words, i, chunk, k) -> word k of a chunk of the piece at word i, in the data's type."""
    extract, (scales_of, scale_codes) = code_extractor(tile), scale_decoder(tile)
    chunk_words, widened = tile.chunk_bytes // 4, tile.in_16_bits  # words that a word of codes becomes

    def widen(begin, words, i, chunk, k):
        codes = words[i + chunk * chunk_words + k // widened]
        return scale_codes(extract(codes, k % widened, begin), scales_of(words, i, i, chunk))

    return device.inlined(widen)


def pair_decoder(tile):
    """Return f(begin, words, i, j, chunk, k) -> two words, of word k of the pieces at words i and j.

    (x, y) of one token and (z, u) of the other become (x, z) and (y, u). Codes are paired before they are
    widened, and scaled with the scales of both tokens.
    """
    extract, (scales_of, scale_codes) = code_extractor(tile), scale_decoder(tile)
    chunk_words, widened, low, high = tile.chunk_bytes // 4, tile.in_16_bits, ptx.low, ptx.high

    def decode_pairs(begin, words, i, j, chunk, k):
        at = chunk * chunk_words + k // widened
        one, other, scales = words[i + at], words[j + at], scales_of(words, i, j, chunk)
        return (
            scale_codes(extract(low(one, other), k % widened, begin), scales),
            scale_codes(extract(high(one, other), k % widened, begin), scales),
        )

    return device.inlined(decode_pairs)


def code_extractor(tile):
    """Return f(word, k, begin) -> code k of each half of a word, as float16.

    A code becomes the low bits of a float16 number from 1024 on, 0x6400; adding 1 to its bits adds 1 to it.
    `^ zero` puts those bits around the code and flips its sign, which makes it unsigned. For 8 bits:

        -3 = 0xFD,  0xFD ^ 0x6480 = 0x647D = 1024 + 125,  minus 0x6480 = 1024 + 128:  -3

    A code of 4 bits in the upper half of a byte is not shifted down, but divided by 16.
    """
    bits = BY_NAME[tile.cache_format].bits
    zero, minus, fused = twice(0x6400 + 2 ** (bits - 1)), ptx.halves("sub"), ptx.halves("fma")
    if bits == 8:

        def extract(word, k, begin):
            return minus(((word >> np.uint32(8 * k)) & begin.mask) ^ zero, zero)

        return device.inlined(extract)
    upper_zero, sixteenth = twice(0x6480), twice(0x2C00)  # 1024 + 128, which is code 0 four bits up; 1 / 16
    minus_zero = twice(0xD480)  # -(1024 + 128) / 16

    def extract_short(word, k, begin):
        word >>= np.uint32(8 * (k // 2))
        if k % 2:
            return fused((word & (begin.mask << np.uint32(4))) ^ upper_zero, sixteenth, minus_zero)
        return minus((word & begin.mask) ^ zero, zero)

    return device.inlined(extract_short)


def twice(half):
    """Return the word whose two halves have these bits."""
    return np.uint32(half * 0x10001)


def scale_decoder(tile):
    """Return two functions: scales of two pieces for a chunk, and code * scale for two codes, as a word.

    They are f(words, i, j, chunk) -> scales, and f(two codes as float16, scales) -> word.
    """
    element, scale_format, group_chunks = tile.element, tile.scale_format, tile.group // CHUNK
    are_short = BY_NAME[scale_format].bytes(1) == 2
    low, high = ptx.low, ptx.high

    def pair_scales(words, i, j, chunk):
        group = chunk // group_chunks
        one, other = words[i + SCALES + group // 2], words[j + SCALES + group // 2]
        return high(one, other) if group % 2 else low(one, other)

    pair_scales = device.inlined(pair_scales)
    if element == scale_format == "float16":
        return pair_scales, ptx.halves("mul")  # rounded once, like an exact float32 product

    raw, scale_of = chunks.DECODE[scale_format]
    packed, both_codes = ptx.packed(element), both("float16")
    both_short = both(scale_format if are_short else "float16")  # not called for float32 scales
    rounded = ptx.packed(scale_format) if are_short and scale_format != element else None

    @shared
    def as_float(bits):
        return np.float32(scale_of(raw(bits)))

    def scales_of(words, i, j, chunk):
        if are_short:
            return both_short(pair_scales(words, i, j, chunk))
        group = SCALES + chunk // group_chunks
        return as_float(words[i + group]), as_float(words[j + group])

    def scale_codes(codes, scales):
        x, y = both_codes(codes)
        x, y = np.float32(x) * scales[0], np.float32(y) * scales[1]
        if rounded is not None:
            x, y = both_short(rounded(x, y))
        return packed(x, y)

    return device.inlined(scales_of), device.inlined(scale_codes)


@functools.cache
def words_loader(size):
    """Return f(address) -> two words of 64 bits, from a load of up to 16 bytes."""
    load = memory.load(size, size)

    @shared
    def load_words(address):
        low, high = load(address)
        return np.uint64(low), np.uint64(high)

    return load_words


def arranged(count, apart):
    """Return f(q, at, words), which puts elements that are `apart` together in `count` words of q.

    `words` are two words of 64 bits. With 4 words and 2 apart, 0 1 2 3 4 5 6 7 -> 0 2, 1 3, 4 6, 5 7.
    """

    def put(q, at, words):
        for k in range(count):
            first = first_of_word(k, apart)
            if apart == 1:
                q[at + k] = word_of(words, k)
            else:
                one, other = word_of(words, first // 2), word_of(words, (first + apart) // 2)
                q[at + k] = ptx.high(one, other) if first % 2 else ptx.low(one, other)

    return device.inlined(put)


@device.inlined
def first_of_word(k, apart):
    """Return the first element of word k; the other one is `apart` places after it."""
    return k // apart * 2 * apart + k % apart


@device.inlined
def word_of(words, i):
    """Return word i of 32 bits of two words of 64 bits."""
    return np.uint32(words[i // 2] >> np.uint64(i % 2 * 32))


@functools.cache
def both(element):
    """Return f(word) -> its two elements as float32."""
    raw, decode = chunks.DECODE[element]

    @shared
    def both(word):
        return decode(raw(word & np.uint32(0xFFFF))), decode(raw(word >> np.uint32(16)))

    return both
