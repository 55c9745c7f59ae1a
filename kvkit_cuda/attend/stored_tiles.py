"""Tiles as the cache has them: rows and scales of 16 tokens in shared memory, and their chunks as words.

A chunk, 8 neighbouring elements, is read as 4 words of two 16-bit elements; codes are widened on the way. The
elements of a word are `apart`: those of floats are neighbours, those of codes lie as far from each other as
codes fill 16 bits.
"""

import functools
from dataclasses import dataclass

import numpy as np

from kvkit.formats import BY_NAME
from kvkit.jit import shared
from kvkit_cuda.attend import tiles
from kvkit_cuda.attend.tiles import CHUNK
from kvkit_cuda.ground import device, memory, ptx
from kvkit_cuda.moves import chunks

TOKENS = 16  # of a tile
KEYS, VALUES = 4, 8  # chunks of a panel
int32, quotient, anew = device.int32, tiles.quotient, ptx.anew
_read_chunk = memory.load(16, 16, space=memory.SHARED)


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
    def chunk_bytes(self):
        return BY_NAME[self.stored].bytes(CHUNK)

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


def fill(tile):
    """(at, number, rows, row_step, cells, cells_step, lane): begin to copy a tile.

    A lane's `number` is the row of the cache that holds its token, or that of some token.
    """
    step, units, words, cell_step = tile.step, tile.row_bytes // 16, tile.cell_words, tile.cell_step
    from_lane, copy, copy_word = device.from_lane, ptx.copy, ptx.copy_word

    def fill(at, number, rows, row_step, cells, cells_step, lane):
        first, place = lane >> 3 & 3, lane & 7
        rows, cells = rows + 16 * place, cells + 4 * place
        cells_at = int32(at + TOKENS * step + first * cell_step + 4 * place)
        at = int32(at + first * step + 16 * place)
        for i in range(0, TOKENS, 4):
            row = from_lane(number, i + first)
            source = rows + row * np.int64(np.uint32(row_step))
            for j in range(0, units, 8):
                if j + place < units:
                    copy(int32(at + (i * step + 16 * j)), source + 16 * j)
            source = cells + row * np.int64(np.uint32(cells_step))
            for j in range(0, words, 8):
                if j + place < words:
                    copy_word(int32(cells_at + (i * cell_step + 4 * j)), source + 4 * j)

    return device.part(fill)


@shared
def four(address):
    low, high = _read_chunk(address)
    return np.uint32(low), np.uint32(low >> np.uint64(32)), np.uint32(high), np.uint32(high >> np.uint64(32))


def start(tile, panel):
    """(at, token, chunk) -> where a thread begins: a chunk and its scale, its number, and the mask of a code.

    They are made anew, so that what is further, in panels of so many chunks, is a constant away.
    """
    step, chunk_bytes, coded = tile.step, tile.chunk_bytes, tile.cell is not None
    cell_bytes, cell_step, mask = BY_NAME[tile.cell].bytes(1) if coded else 0, tile.cell_step, code_mask(tile)
    group, regular = tile.group // CHUNK if coded else 1, regularly(tile, panel)
    last = tile.chunks - 1

    def start(at, token, chunk):
        chunk = min(chunk, last) if last < panel - 1 else chunk
        rows, cells, codes = np.int64(anew(int32(at + token * step + chunk * chunk_bytes))), np.int64(0), 0
        if coded:
            member = quotient(chunk, group) if regular else 0
            cells = np.int64(anew(int32(at + TOKENS * step + token * cell_step + member * cell_bytes)))
            codes = anew(mask)
        return rows, cells, chunk, codes

    return device.inlined(start)


def code_mask(tile):
    """The bits of a code in both halves of a word."""
    return (2 ** BY_NAME[tile.stored].bits - 1) * 0x10001 if tile.cell else 0


def regularly(tile, panel):
    """Whether scales are as far from panel to panel for every chunk."""
    group = tile.group // CHUNK if tile.cell else 1
    return panel % group == 0 or group % panel == 0


def within_row(tile, panel):
    """(panels, chunk) -> so many panels, or 0 if a row ends before that chunk of them."""
    ragged, count = tile.chunks > panel and tile.chunks % panel != 0, tile.chunks

    def within(panels, chunk):
        return panels if not ragged or panels * panel + chunk < count else 0

    return device.inlined(within)


def reader(tile, panel):
    """(begin, tokens, panels, words, i): the chunk so far from where a thread begins, in the data's type.

    Threads beyond a row's last chunk read another one.
    """
    step, panel_bytes, within = tile.step, panel * tile.chunk_bytes, within_row(tile, panel)
    if tile.cell:
        return widening_reader(tile, panel)

    def read(begin, tokens, panels, words, i):
        at = begin[0] + (tokens * step + within(panels, begin[2]) * panel_bytes)
        words[i], words[i + 1], words[i + 2], words[i + 3] = four(at)

    return device.inlined(read)


def widening_reader(tile, panel):
    """The same for codes.

    Two codes at a time, their signs turned, are put below the exponent of float16s from 1024 on. What these
    exceed the number of 0 by is, exactly, what the codes mean.
    """
    bits, apart, step, cell_step = BY_NAME[tile.stored].bits, tile.apart, tile.step, tile.cell_step
    chunk_bytes, cell_bytes, group = tile.chunk_bytes, BY_NAME[tile.cell].bytes(1), tile.group // CHUNK
    load = memory.load(chunk_bytes, chunk_bytes, space=memory.SHARED)
    load_cell = memory.load(cell_bytes, cell_bytes, space=memory.SHARED)
    minus, (scale_of, times), regular = (
        ptx.halves("sub"),
        scaling(tile.element, tile.cell),
        regularly(tile, panel),
    )
    within = within_row(tile, panel)
    zero, panel_bytes = np.uint32((0x6400 + 2 ** (bits - 1)) * 0x10001), panel * chunk_bytes
    first, second, third, last = (np.uint64(32 * (k // apart) + bits * (k % apart)) for k in range(4))

    @shared
    def codes_at(address, mask):
        codes, _ = load(address)
        return (
            (np.uint32(codes >> first) & np.uint32(mask)) ^ zero,
            (np.uint32(codes >> second) & np.uint32(mask)) ^ zero,
            (np.uint32(codes >> third) & np.uint32(mask)) ^ zero,
            (np.uint32(codes >> last) & np.uint32(mask)) ^ zero,
        )

    @shared
    def cell_at(address):
        return np.uint32(load_cell(address)[0])

    def read(begin, tokens, panels, words, i):
        rows, cells, chunk, mask = begin
        panels = within(panels, chunk)
        if regular:
            cells = cells + (tokens * cell_step + panels * panel // group * cell_bytes)
        else:
            cells = cells + (tokens * cell_step + quotient(panels * panel + chunk, group) * cell_bytes)
        scale = scale_of(cell_at(cells))
        codes = codes_at(rows + (tokens * step + panels * panel_bytes), mask)
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


@functools.cache
def both(element):
    """(word) -> its elements, as float32."""
    raw, decode = chunks.DECODE[element]

    @shared
    def both(word):
        return decode(raw(word & np.uint32(0xFFFF))), decode(raw(word >> np.uint32(16)))

    return both
