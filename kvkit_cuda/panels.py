"""Products of a warp with a tile of 16 tokens of its own, where a fragment is a chunk of keys or values.

Tokens, or elements of values, are the 16 rows of a product, and rows of queries are its 8 columns. Its inner
axis may be in any order that both sides share, and its rows may be any. So a thread finds what it multiplies
as chunks, 8 neighbouring elements, and codes are widened between shared memory and the product. With
g = lane // 4 and t = lane % 4 a thread takes

    keys     chunk t of each panel of 4 chunks of tokens g and g+8
    values   chunk g of each panel of 8 chunks of tokens 2t, 2t+1, 2t+8, 2t+9

and has scores [rows 2t, 2t+1; tokens g, g+8] and sums [rows 2t, 2t+1; elements of its chunks of values].

A chunk is 4 words. The two elements of a word are `apart`: those of floats are neighbours, those of codes lie
as far from each other as bits of the codes fill 16.
"""

import functools
from dataclasses import dataclass

import numpy as np

from kvkit.formats import BY_NAME
from kvkit.jit import shared
from kvkit_cuda import chunks, device, memory, ptx, tiles
from kvkit_cuda.fragments import EVERYONE, rotate
from kvkit_cuda.tiles import CHUNK

TOKENS = 16  # of a tile
KEYS, VALUES = 4, 8  # chunks of a panel
WORDS, ZERO = 20, np.float32(0)  # words that a thread holds on their way to a product
int32, quotient = device.int32, tiles.quotient
_read_chunk, _read_query = memory.load(16, 16, space=memory.SHARED), memory.load(16, 16)


@dataclass(frozen=True, slots=True)
class Tile:
    """The keys or values of 16 tokens in shared memory: their rows, then their scales."""

    element: str
    stored: str
    cell: str | None
    group: int
    dim: int
    step: int  # from a row to the next one

    @property
    def chunks(self):
        return self.dim // CHUNK

    @property
    def row_bytes(self):
        return BY_NAME[self.stored].bytes(self.dim)

    @property
    def cell_words(self):
        return BY_NAME[self.cell].bytes(self.dim // self.group) // 4 if self.cell else 0

    @property
    def cell_step(self):
        return 4 * (self.cell_words + 1) if self.cell else 0

    @property
    def bytes(self):
        return TOKENS * (self.step + self.cell_step)

    @property
    def apart(self):
        """How far apart the two elements of a word are."""
        return 16 // BY_NAME[self.stored].bits

    def panels(self, chunks):
        """How many panels of so many chunks it has."""
        return -(-self.chunks // chunks)


def keys(element, stored, cell, group, dim):
    """A tile of keys: what 8 threads, or 16, or 32 read at once is in different banks."""
    size, panel = BY_NAME[stored].bytes(dim), KEYS * BY_NAME[stored].bytes(CHUNK)
    return Tile(element, stored, cell, group, dim, size + (panel - size) % (2 * panel))


def values(element, stored, cell, group, dim):
    size = BY_NAME[stored].bytes(dim)
    return Tile(element, stored, cell, group, dim, size + (16 - size) % 32)


def fill(tile, side):
    """(task, at, number, b, head, begin, high, lane): begin to copy a tile of keys (0) or values (1).

    A lane's `number` is the row of the cache that holds its token; nothing is read from `high` on.
    """
    step, units, words, cell_step = tile.step, tile.row_bytes // 16, tile.cell_words, tile.cell_step
    from_lane, copy, copy_word = device.from_lane, ptx.copy, ptx.copy_word

    def fill(task, at, number, b, head, begin, high, lane):
        if side == 0:
            rows, row_step = task.keys + b * task.key_sequence + head * task.key_head, task.key_row
            cells = task.key_cells
        else:
            rows, row_step = task.values + b * task.value_sequence + head * task.value_head, task.value_row
            cells = task.value_cells
        cells += b * task.cell_sequence + head * task.cell_head
        for i in range(0, TOKENS, 4):
            r = i + (lane >> 3)
            row, size = from_lane(number, r), 16 if begin + r < high else 0
            for j in range(0, units, 8):
                unit = j + (lane & 7)
                if units % 8 == 0 or unit < units:
                    copy(int32(at + r * step + 16 * unit), rows + row * row_step + 16 * unit, size)
            for j in range(0, words, 8):
                word = j + (lane & 7)
                if words % 8 == 0 or word < words:
                    target = int32(at + TOKENS * step + r * cell_step + 4 * word)
                    copy_word(target, cells + row * task.cell_row + 4 * word, size >> 2)

    return device.part(fill)


@shared
def four(address):
    low, high = _read_chunk(address)
    return np.uint32(low), np.uint32(low >> np.uint64(32)), np.uint32(high), np.uint32(high >> np.uint64(32))


@shared
def four_of_memory(address):
    low, high = _read_query(address)
    return np.uint32(low), np.uint32(low >> np.uint64(32)), np.uint32(high), np.uint32(high >> np.uint64(32))


def reader(tile):
    """(at, token, chunk, words, first): a chunk of a tile as four words, as the type of the data."""
    step = tile.step
    if tile.cell:
        return widening_reader(tile)

    def read(at, token, chunk, words, i):
        words[i], words[i + 1], words[i + 2], words[i + 3] = four(
            at + (np.int64(token) * step + np.int64(chunk) * 16)
        )

    return device.inlined(read)


def widening_reader(tile):
    """The same for codes.

    Two codes at a time, their signs turned, are put below the exponent of float16s from 1024 on. What these
    exceed the number of 0 by is, exactly, what the codes mean.
    """
    bits, apart, step, cell_step = BY_NAME[tile.stored].bits, tile.apart, tile.step, tile.cell_step
    chunk_bytes, cell_bytes, chunks_of_group = bits, BY_NAME[tile.cell].bytes(1), tile.group // CHUNK
    load = memory.load(chunk_bytes, chunk_bytes, space=memory.SHARED)
    load_cell = memory.load(cell_bytes, cell_bytes, space=memory.SHARED)
    minus, (scale_of, times) = ptx.halves("sub"), scaling(tile.element, tile.cell)
    mask = np.uint64((2**bits - 1) * 0x10001)
    zero = np.uint32((0x6400 + 2 ** (bits - 1)) * 0x10001)
    first, second, third, last = (np.uint64(32 * (k // apart) + bits * (k % apart)) for k in range(4))

    @shared
    def codes_at(address):
        codes, _ = load(address)
        return (
            np.uint32((codes >> first) & mask) ^ zero,
            np.uint32((codes >> second) & mask) ^ zero,
            np.uint32((codes >> third) & mask) ^ zero,
            np.uint32((codes >> last) & mask) ^ zero,
        )

    @shared
    def cell_at(address):
        return np.uint32(load_cell(address)[0])

    def read(at, token, chunk, words, i):
        cell = cell_at(
            at + np.int64(TOKENS * step) + np.int64(token) * cell_step
            + np.int64(quotient(chunk, chunks_of_group)) * cell_bytes
        )  # fmt: skip
        scale = scale_of(cell)
        codes = codes_at(at + np.int64(token) * step + np.int64(chunk) * chunk_bytes)
        words[i], words[i + 1], words[i + 2], words[i + 3] = codes
        for k in range(i, i + 4):
            words[k] = times(minus(words[k], zero), scale)

    return device.inlined(read)


def scaling(element, cell):
    """(bits of a scale) -> the scale, and (two codes as float16s, it) -> what they mean, as a word."""
    raw, cell_of = chunks.DECODE[cell]
    if element == cell == "float16":

        @shared
        def twice(bits):
            return np.uint32(bits | (bits << np.uint32(16)))

        return twice, ptx.halves("mul")  # a product of float32s would be exact, and rounded once as well

    two, packed, halves = both(cell), ptx.packed(element), both("float16")
    rounded = ptx.packed(cell) if cell in ptx.SHORT and cell != element else None

    @shared
    def scale_of(bits):
        return np.float32(cell_of(raw(bits)))

    def times(codes, scale):
        x, y = halves(codes)
        x, y = np.float32(x) * scale, np.float32(y) * scale
        if rounded is not None:
            x, y = two(rounded(x, y))
        return packed(x, y)

    return scale_of, device.inlined(times)


@shared
def low(x, y):
    """The low elements of two words."""
    return np.uint32((x & np.uint32(0xFFFF)) | (y << np.uint32(16)))


@shared
def high(x, y):
    return np.uint32((x >> np.uint32(16)) | (y & np.uint32(0xFFFF0000)))


def query_reader(tile):
    """(address, there, lane, words, queries, block): a row of queries, as the chunks of keys are; else zeros.

    A thread's queries lie as [block of 8 rows, panel, word].
    """
    apart, panels, whole = tile.apart, tile.panels(KEYS), tile.chunks % KEYS == 0
    chunks_of_row = tile.chunks

    def read(address, there, lane, words, queries, block):
        for panel in range(panels):
            chunk = KEYS * panel + (lane & 3)
            for k in range(4):
                words[k] = np.uint32(0)
            if there and (whole or chunk < chunks_of_row):
                words[0], words[1], words[2], words[3] = four_of_memory(address + 16 * chunk)
            for k in range(4):
                e = k // apart * 2 * apart + k % apart  # the first element of the word
                word = words[k]
                if apart > 1:
                    one, other = words[e // 2], words[(e + apart) // 2]
                    word = high(one, other) if e % 2 else low(one, other)
                queries[(block * panels + panel) * 4 + k] = word

    return device.part(read)


def multiply_keys(form):
    """(queries, at, lane, words, scores): scores of a tile of tokens."""
    tile, blocks, columns, product = form.keys, form.blocks, form.columns, ptx.product(form.element)
    panels, last, whole = tile.panels(KEYS), tile.chunks - 1, tile.chunks % KEYS == 0
    read = reader(tile)

    def multiply_keys(queries, at, lane, words, scores):
        for i in range(2 * blocks * columns):
            scores[i] = ZERO
        for panel in range(panels):
            chunk = KEYS * panel + (lane & 3)
            for half in range(2):
                read(at, 8 * half + (lane >> 2), min(chunk, last), words, 4 * half)
            if not whole and chunk > last:  # not even NaN
                for k in range(8):
                    words[k] = np.uint32(0)
            for block in range(blocks):
                c0, c1, c2, c3 = 4 * block, 4 * block + 2, 4 * block + 1, 4 * block + 3
                for k in range(0, 4, 2):
                    i = (block * panels + panel) * 4 + k
                    scores[c0], scores[c1], scores[c2], scores[c3] = product(
                        words[k], words[4 + k], words[k + 1], words[5 + k], queries[i], queries[i + 1],
                        scores[c0], scores[c1], scores[c2], scores[c3],
                    )  # fmt: skip

    return device.part(multiply_keys)


def multiply_values(form):
    """(weights, at, lane, words, sums): weights, rounded to the type of the data, times the tile's values."""
    tile, blocks, width, product = form.values, form.blocks, form.width, ptx.product(form.element)
    panels, last, read = tile.panels(VALUES), tile.chunks - 1, reader(tile)
    packed, turned, b = ptx.packed(form.element), ptx.turned, 16  # b: the words behind 16 of values

    def multiply_values(weights, at, lane, words, sums):
        for i in range(2 * blocks):
            j = i // 2 * 4 + i % 2
            words[b + i] = turned(packed(weights[j], weights[j + 2]))
        for panel in range(panels):
            chunk = min(VALUES * panel + (lane >> 2), last)
            for i in range(4):
                read(at, (lane & 3) * 2 + (i >> 1) * 8 + (i & 1), chunk, words, 4 * i)
            for k in range(4):
                a0, a1 = low(words[k], words[4 + k]), high(words[k], words[4 + k])
                a2, a3 = low(words[8 + k], words[12 + k]), high(words[8 + k], words[12 + k])
                for block in range(blocks):
                    i = 2 * block * width + panel * VALUES + 2 * k
                    j = i + width
                    b0, b1 = words[b + 2 * block], words[b + 2 * block + 1]
                    sums[i], sums[j], sums[i + 1], sums[j + 1] = product(
                        a0, a1, a2, a3, b0, b1, sums[i], sums[j], sums[i + 1], sums[j + 1]
                    )

    return device.part(multiply_values)


def multiply_carefully(form):
    """The same in float32, leaving out values without weight: one of 0 hides NaN and infinity."""
    tile, rows, columns, width = form.values, form.thread_rows, form.columns, form.width
    panels, last, turn = tile.panels(VALUES), tile.chunks - 1, rotate(form)
    read, two, exchange = reader(tile), both(form.element), device.exchange

    def multiply_carefully(weights, at, lane, words, sums):
        for column in range(columns):
            for other in range(8):
                token = column * 8 + ((lane >> 2) ^ other)
                for r in range(rows):
                    weight = exchange(EVERYONE, weights[r * columns], 4 * other)
                    if weight != ZERO:
                        for panel in range(panels):
                            chunk = min(VALUES * panel + (lane >> 2), last)
                            read(at, token, chunk, words, 0)
                            for k in range(4):
                                x, y = two(words[k])
                                i = r * width + panel * VALUES + 2 * k
                                sums[i] += weight * x
                                sums[i + 1] += weight * y
            turn(weights, 1)

    return device.part(multiply_carefully)


@functools.cache
def both(element):
    """(word) -> its elements, as float32."""
    raw, decode = chunks.DECODE[element]

    @shared
    def both(word):
        return decode(raw(word & np.uint32(0xFFFF))), decode(raw(word >> np.uint32(16)))

    return both
