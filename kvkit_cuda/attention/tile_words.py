"""Read chunks of a stored tile as words of 16-bit elements; codes are widened.

    x = code scale          for each code of a group with its scale, rounded to the type of the data

A chunk, 8 neighbouring elements, is read as 4 words of two elements. `tile.apart` is their distance:
floats are neighbours, and codes are as many places apart as codes fit in 16 bits, so that both halves of a
word are widened at once:

    a word of int8, from its low bits on    0 1 2 3                  widened to 0 2, 1 3
    a word of int4                          0 1 2 3 4 5 6 7          widened to 0 4, 1 5, 2 6, 3 7

`stored_tiles.py` draws panels, runs and pieces of a tile.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from kvkit.formats import BY_NAME
from kvkit.runtime.jit import shared
from kvkit_cuda.attention import tiles
from kvkit_cuda.attention.stored_tiles import TOKENS
from kvkit_cuda.attention.tiles import CHUNK
from kvkit_cuda.copy import chunks
from kvkit_cuda.device_runtime import device, memory, ptx

PIECE = 8  # words of a piece: up to 4 words of codes, then words of scales
int32, quotient, fresh_register = device.int32, tiles.quotient, ptx.fresh_register


class Start(NamedTuple):
    """The place in a tile where a thread of a panel begins."""

    rows: Any  # the address of its first chunk
    scales: Any  # the address of the scale of that chunk
    chunk: Any  # the number of that chunk
    mask: Any  # the bits of a code in both halves of a word


def four_of(load):
    """Return f(address) -> four words, from a load of up to 16 bytes."""

    @shared
    def four(address):
        low, high = load(address)
        return (
            np.uint32(low),
            np.uint32(low >> np.uint64(32)),
            np.uint32(high),
            np.uint32(high >> np.uint64(32)),
        )

    return four


def start(tile):
    """Return f(at, token, thread, mask) -> the `Start` of a thread in the row of a token.

    Addresses are in fresh registers, so that later panels are at constant offsets.
    """
    step, chunk_bytes, panel, scale_step = tile.step, tile.chunk_bytes, tile.panel, tile.scale_step
    scale_bytes, group = BY_NAME[tile.scale_format].bytes(1), tile.group // CHUNK
    regular, times = tile.regular, tile.first(1)
    last = tile.chunks - 1

    def start(at, token, thread, mask):
        chunk = min(thread, last) if last < panel - 1 else thread * times
        rows = np.int64(fresh_register(int32(at + token * step + chunk * chunk_bytes)))
        member = quotient(chunk, group) if regular else 0
        scales = at + TOKENS * step + token * scale_step + member * scale_bytes
        scales = np.int64(fresh_register(int32(scales)))
        return Start(rows, scales, chunk, np.uint32(mask))

    return device.inlined(start)


def code_mask(tile):
    """Return the mask of a code's bits in both halves of a word."""
    return (2 ** BY_NAME[tile.cache_format].bits - 1) * 0x10001 if tile.coded else 0


def within_row(tile):
    """Return f(panels, chunk) -> `panels`, or 0 if the row ends before that panel's chunk."""
    count, panel = tile.chunks, tile.panel
    ragged = count > panel and count % panel != 0

    def within(panels, chunk):
        return panels if not ragged or panels * panel + chunk < count else 0

    return device.inlined(within)


def reader(tile):
    """Return f(begin, tokens, panels, words, i), which reads a chunk `tokens` and `panels` after a start.

    Elements get the data's type. Threads beyond a row's last chunk read another chunk.
    """
    take, widen, piece = piece_loader(tile), word_decoder(tile), tile.piece

    def read(begin, tokens, panels, words, i):
        take(begin, tokens, panels // piece, words, i + 4)
        for k in range(4):
            words[i + k] = widen(begin, words, i + 4, panels % piece, k)

    return device.inlined(read)


def piece_loader(tile):
    """Return f(begin, tokens, piece, words, i), which loads a piece of codes and its scales, unconverted."""
    step, within, chunk_bytes = tile.step, within_row(tile), tile.chunk_bytes
    size = tile.piece * chunk_bytes
    load, load_scales = four_of(memory.load(size, size, space=memory.SHARED)), scale_loader(tile)
    pace, words_of = tile.piece * tile.pace, -(-size // 4)

    def take(begin, tokens, piece, words, i):
        piece = within(piece, begin.chunk)
        codes = load(begin.rows + (tokens * step + piece * pace * chunk_bytes))
        for j in range(words_of):
            words[i + j] = codes[j]
        load_scales(begin, tokens, piece, words, i + 4)

    return device.inlined(take)


def scale_loader(tile):
    """Return f(begin, tokens, piece, words, i), which loads the scales of a piece."""
    scale_step, pace, regular = tile.scale_step, tile.piece * tile.pace, tile.regular
    scale_bytes, group = BY_NAME[tile.scale_format].bytes(1), tile.group // CHUNK
    size = tile.piece_scales * scale_bytes
    load, words_of = four_of(memory.load(size, size, space=memory.SHARED)), -(-size // 4)

    def load_scales(begin, tokens, piece, words, i):
        at = begin.scales + tokens * scale_step
        if regular:
            at += piece * pace // group * scale_bytes
        else:
            at += quotient(piece * pace + begin.chunk, group) * scale_bytes
        scales = load(at)
        for j in range(words_of):
            words[i + j] = scales[j]

    return device.inlined(load_scales)


def word_decoder(tile):
    """Return f(begin, words, i, chunk, k) -> word k of a chunk of a piece, in the data's type."""
    extract, (scales, times), held = code_extractor(tile), scale_decoder(tile), tile.held
    chunk_words = tile.chunk_bytes // 4

    def widen(begin, words, i, chunk, k):
        codes = words[i + chunk * chunk_words + k // held]
        return times(extract(codes, k % held, begin), scales(words, i, i, chunk))

    return device.inlined(widen)


def pair_decoder(tile):
    """Return f(begin, words, i, j, chunk, k) -> (first elements, last elements) of word k of two pieces.

    Codes of both pieces are paired before they are widened, with a pair of scales.
    """
    extract, (scales, times), held = code_extractor(tile), scale_decoder(tile), tile.held
    chunk_words, low, high = tile.chunk_bytes // 4, ptx.low, ptx.high

    def decode_pairs(begin, words, i, j, chunk, k):
        at = chunk * chunk_words + k // held
        one, other, pair = words[i + at], words[j + at], scales(words, i, j, chunk)
        return (
            times(extract(low(one, other), k % held, begin), pair),
            times(extract(high(one, other), k % held, begin), pair),
        )

    return device.inlined(decode_pairs)


def code_extractor(tile):
    """Return f(word, k, begin) -> code k of each half of a word, as float16.

    Two codes at a time, with flipped signs, become the low bits of float16 numbers from 1024 on. Subtracting
    the number of code 0 gives the codes exactly, or 16 times the codes if they were not shifted down.
    """
    bits = BY_NAME[tile.cache_format].bits
    zero, minus, fused = np.uint32((0x6400 + 2 ** (bits - 1)) * 0x10001), ptx.halves("sub"), ptx.halves("fma")
    if bits == 8:

        def extract(word, k, begin):
            return minus((word >> np.uint32(8 * k)) & begin.mask ^ zero, zero)

        return device.inlined(extract)
    # as float16: 1024 + 128 (code 0, 4 bits up), 1 / 16, and -(1024 + 128) / 16.
    high_zero, sixteenth, high_shift = (np.uint32(n * 0x10001) for n in (0x6480, 0x2C00, 0xD480))

    def extract_short(word, k, begin):
        word >>= np.uint32(8 * (k // 2))
        if k % 2:
            return fused(word & (begin.mask << np.uint32(4)) ^ high_zero, sixteenth, high_shift)
        return minus(word & begin.mask ^ zero, zero)

    return device.inlined(extract_short)


def scale_decoder(tile):
    """Return two functions: scales of two pieces for a chunk, and code * scale for two codes, as a word.

    They are f(words, i, j, chunk) -> scales, and f(two codes as float16, scales) -> word.
    """
    element, scale_format, group = tile.element, tile.scale_format, tile.group // CHUNK
    halves = BY_NAME[scale_format].bytes(1) == 2
    low, high = ptx.low, ptx.high

    def words_of(words, i, j, chunk):
        member = chunk // group
        if halves:
            one, other = words[i + 4 + member // 2], words[j + 4 + member // 2]
            return high(one, other) if member % 2 else low(one, other)
        return words[i + 4 + member]

    words_of = device.inlined(words_of)
    if element == scale_format == "float16":
        return words_of, ptx.halves("mul")  # rounded once, like an exact float32 product

    raw, scale_of = chunks.DECODE[scale_format]
    packed, both_of, two = ptx.packed(element), both("float16"), both(scale_format if halves else "float16")
    rounded = ptx.packed(scale_format) if halves and scale_format != element else None

    @shared
    def as_float(bits):
        return np.float32(scale_of(raw(bits)))

    def scales(words, i, j, chunk):
        if halves:
            return two(words_of(words, i, j, chunk))
        return as_float(words[i + 4 + chunk // group]), as_float(words[j + 4 + chunk // group])

    def times(codes, scales):
        x, y = both_of(codes)
        x, y = np.float32(x) * scales[0], np.float32(y) * scales[1]
        if rounded is not None:
            x, y = two(rounded(x, y))
        return packed(x, y)

    return device.inlined(scales), device.inlined(times)


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
    """Return f(q, at, two words of 64 bits), which puts `count` words of elements that are `apart`."""

    def put(q, at, words):
        for k in range(count):
            e = k // apart * 2 * apart + k % apart  # the first element of the word
            if apart == 1:
                q[at + k] = half_of(words, k)
            else:
                one, other = half_of(words, e // 2), half_of(words, (e + apart) // 2)
                q[at + k] = ptx.high(one, other) if e % 2 else ptx.low(one, other)

    return device.inlined(put)


@device.inlined
def half_of(words, i):
    return np.uint32(words[i // 2] >> np.uint64(i % 2 * 32))


@functools.cache
def both(element):
    """Return f(word) -> its two elements as float32."""
    raw, decode = chunks.DECODE[element]

    @shared
    def both(word):
        return decode(raw(word & np.uint32(0xFFFF))), decode(raw(word >> np.uint32(16)))

    return both
