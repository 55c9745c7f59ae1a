"""Tiles as the cache has them: rows and scales of 16 tokens in shared memory, and their chunks as words.

A chunk, 8 neighbouring elements, is read as 4 words of two 16-bit elements; codes are widened on the way. The
elements of a word are `apart`: those of floats are neighbours, those of codes lie as far from each other as
codes fill 16 bits.
"""

import functools
from dataclasses import dataclass

import numpy as np

from kvkit.formats import BY_NAME
from kvkit.runtime.jit import shared
from kvkit_cuda.attention import tiles
from kvkit_cuda.attention.tiles import CHUNK
from kvkit_cuda.copy import chunks
from kvkit_cuda.copy.transfer import WARP
from kvkit_cuda.device_runtime import device, memory, ptx

TOKENS = 16  # of a tile
KEYS, VALUES = 4, 8  # chunks of a panel
LINE = 32  # most bytes of a run of keys; half as many of values
UNITS = 16, 4  # bytes that scales are copied by
PIECE = 8  # words of a piece of codes: up to 4 of codes, then those of their scales
int32, quotient, fresh_register = device.int32, tiles.quotient, ptx.fresh_register


@dataclass(frozen=True, slots=True)
class Tile:
    """The keys or values of 16 tokens in shared memory: their rows, then their scales.

    Threads take the chunks of a row by panels, a chunk of each. They are as far from each other as panels are
    long; or they are neighbours, a run, of which a thread reads up to 16 bytes at once, a piece.
    """

    element: str
    stored: str
    cell: str | None
    group: int
    dim: int
    panel: int  # chunks of a panel
    unit: int  # bytes that scales are copied by

    @property
    def chunks(self):
        return self.dim // CHUNK

    @property
    def panels(self):
        return -(-self.chunks // self.panel)

    @property
    def row_bytes(self):
        return BY_NAME[self.stored].bytes(self.dim)

    @property
    def cell_bytes(self):
        """Return the bytes of the scales of a row."""
        return BY_NAME[self.cell].bytes(self.dim // self.group) if self.cell else 0

    @property
    def step(self):
        """Return the bytes from row to row: what 8, 16 or 32 threads read at once is in different banks."""
        size = self.row_bytes
        if self.panel == VALUES:
            return size + (16 - size) % 32
        if not self.in_runs:
            size += (KEYS * self.chunk_bytes - size) % (2 * KEYS * self.chunk_bytes)
            return size + -size % 16
        return size + (16 if self.panels * self.chunk_bytes > 16 else 0)

    @property
    def cell_step(self):
        """Return the bytes from the scales of a row to those of the next one, likewise."""
        size = self.cell_bytes + -self.cell_bytes % 16
        return size + (16 - size) % 32 if size and self.panel == VALUES else size

    @property
    def bytes(self):
        return TOKENS * (self.step + self.cell_step)

    @property
    def chunk_bytes(self):
        return BY_NAME[self.stored].bytes(CHUNK)

    @property
    def apart(self):
        """Return how far apart the two elements of a word are."""
        return 16 // BY_NAME[self.stored].bits

    @property
    def in_runs(self):
        most, group = LINE * KEYS // self.panel, self.group // CHUNK
        whole = self.cell and self.chunks % self.panel == 0 and self.panels * self.chunk_bytes <= most
        power = self.panels & (self.panels - 1) == 0
        return bool(whole and power and (self.panels % group == 0 or group % self.panels == 0))

    @property
    def piece(self):
        """Return the chunks of a piece; one of values with a float32 each, as threads hold four pieces."""
        dear = self.panel == VALUES and self.group == CHUNK and self.cell == "float32"
        return min(self.panels, 16 // self.chunk_bytes) if self.in_runs and not dear else 1

    @property
    def piece_cells(self):
        """Return how many scales a piece has."""
        return max(1, self.piece * CHUNK // self.group)

    @property
    def regular(self):
        """Return whether scales are as far from panel to panel for every chunk."""
        group = self.group // CHUNK if self.cell else 1
        return self.in_runs or self.panel % group == 0 or group % self.panel == 0

    def first(self, thread):
        """Return the first chunk of a thread of a panel."""
        return thread * self.panels if self.in_runs else thread

    def chunk(self, thread, panel):
        return self.first(thread) + panel * self.pace

    @property
    def pace(self):
        """Return how many chunks lie from panel to panel."""
        return 1 if self.in_runs else self.panel


def fill(keys, values):
    """(place, row_id, bases, params, lane): begin to copy a tile of keys, and one of values behind it.

    A lane's `row_id` is the row of the cache that holds its token, or that of some token. At `bases` lie the
    addresses of keys, values and the scales of both, of row 0.
    """
    units, cells = (
        max(each.row_bytes for each in (keys, values)) // 16,
        max(keys.cell_bytes, values.cell_bytes),
    )
    unit, from_lane, begin_values = keys.unit, device.from_lane, keys.bytes
    rows_by, cells_by = threads_of(units), threads_of(cells // unit)
    copy, copy_cells = ptx.copy, ptx.copy if unit == 16 else ptx.copy_word
    key_units, value_units = keys.row_bytes // 16, values.row_bytes // 16
    key_cells, value_cells = keys.cell_bytes // unit, values.cell_bytes // unit
    key_step, value_step = keys.step, values.step
    key_cell_step, value_cell_step = keys.cell_step, values.cell_step
    cells_of_keys, cells_of_values = TOKENS * key_step, begin_values + TOKENS * value_step

    def copied(by, units, step, pace, copy):
        """(target, source, there): copy a row's share of a thread."""

        def copied(target, source, there):
            for j in range(0, units, by):
                if j + by <= units or j + there < units:
                    copy(int32(target + j * pace), source + j * pace)

        return device.inlined(copied)

    copy_keys, copy_values = (
        copied(rows_by, n, s, 16, copy) for n, s in ((key_units, key_step), (value_units, value_step))
    )
    copy_key_cells, copy_value_cells = (
        copied(cells_by, n, s, unit, copy_cells)
        for n, s in ((key_cells, key_cell_step), (value_cells, value_cell_step))
    )

    rows_shift, cells_shift = rows_by.bit_length() - 1, cells_by.bit_length() - 1

    def fill(place, row_id, bases, params, lane):
        lane = fresh_register(lane)
        there, first = int32(lane & rows_by - 1), int32((lane & WARP - 1) >> rows_shift)
        rows, others = two_addresses(bases)
        rows, others = rows + 16 * there, others + 16 * there
        key_row, value_row = np.uint32(params.key_row), np.uint32(params.value_row)
        at = int32(place + first * key_step + 16 * there)
        at_values = int32(place + begin_values + first * value_step + 16 * there)
        for i in range(0, TOKENS, WARP // rows_by):
            row = from_lane(row_id, int32(i + first & TOKENS - 1))
            if TOKENS * rows_by >= WARP or first < TOKENS:
                copy_keys(int32(at + i * key_step), rows + wide(row, key_row), there)
                copy_values(int32(at_values + i * value_step), others + wide(row, value_row), there)
        if cells:
            there, first = int32(lane & cells_by - 1), int32((lane & WARP - 1) >> cells_shift)
            rows, others = two_addresses(int32(bases + 16))
            rows, others = rows + unit * there, others + unit * there
            step = np.uint32(params.scale_row)
            at = int32(place + cells_of_keys + first * key_cell_step + unit * there)
            at_values = int32(place + cells_of_values + first * value_cell_step + unit * there)
            for i in range(0, TOKENS, WARP // cells_by):
                row = wide(from_lane(row_id, int32(i + first & TOKENS - 1)), step)
                if TOKENS * cells_by >= WARP or first < TOKENS:
                    copy_key_cells(int32(at + i * key_cell_step), rows + row, there)
                    copy_value_cells(int32(at_values + i * value_cell_step), others + row, there)

    return device.part(fill)


_read_chunk = memory.load(16, 16, space=memory.SHARED)


@shared
def two_addresses(at):
    one, other = _read_chunk(at)
    return np.int64(one), np.int64(other)


@device.inlined
def wide(x, y):
    """Return the product of numbers below 2^32."""
    return np.int64(np.uint64(np.uint32(x)) * np.uint64(y))


def threads_of(units):
    """Return how many threads copy a row of so many units."""
    return next((n for n in (1, 2, 4) if units <= n), 8)


def four_of(load):
    """(address) -> four words, of a load of up to 16 bytes."""

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


four = four_of(_read_chunk)


def start(tile):
    """(at, token, thread, mask) -> where a thread of a panel begins: its first chunk and its scale, the
    chunk's number, and the mask of codes.

    All are in fresh registers, so that what is further on, in panels, is a constant away.
    """
    step, chunk_bytes, coded, panel = tile.step, tile.chunk_bytes, tile.cell is not None, tile.panel
    cell_bytes, cell_step = BY_NAME[tile.cell].bytes(1) if coded else 0, tile.cell_step
    group, regular, times = tile.group // CHUNK if coded else 1, tile.regular, tile.first(1)
    last = tile.chunks - 1

    def start(at, token, thread, mask):
        chunk = min(thread, last) if last < panel - 1 else thread * times
        rows, cells = np.int64(fresh_register(int32(at + token * step + chunk * chunk_bytes))), np.int64(0)
        if coded:
            member = quotient(chunk, group) if regular else 0
            cells = np.int64(
                fresh_register(int32(at + TOKENS * step + token * cell_step + member * cell_bytes))
            )
        return rows, cells, chunk, np.uint32(mask)

    return device.inlined(start)


def code_mask(tile):
    """Return the bits of a code in both halves of a word, to be kept in a register."""
    return (2 ** BY_NAME[tile.stored].bits - 1) * 0x10001 if tile.cell else 0


def within_row(tile):
    """(panels, chunk) -> so many panels, or 0 if a row ends before that chunk of them."""
    count, panel = tile.chunks, tile.panel
    ragged = count > panel and count % panel != 0

    def within(panels, chunk):
        return panels if not ragged or panels * panel + chunk < count else 0

    return device.inlined(within)


def reader(tile):
    """(begin, tokens, panels, words, i): the chunk so far from where a thread begins, in the data's type.

    Threads beyond a row's last chunk read another one.
    """
    step, panel_bytes, within = tile.step, tile.pace * tile.chunk_bytes, within_row(tile)
    if tile.cell:
        take, widen, piece = taker(tile), widener(tile), tile.piece

        def read_codes(begin, tokens, panels, words, i):
            take(begin, tokens, panels // piece, words, i + 4)
            words[i], words[i + 1], words[i + 2], words[i + 3] = (
                widen(begin, words, i + 4, panels % piece, 0),
                widen(begin, words, i + 4, panels % piece, 1),
                widen(begin, words, i + 4, panels % piece, 2),
                widen(begin, words, i + 4, panels % piece, 3),
            )

        return device.inlined(read_codes)

    def read(begin, tokens, panels, words, i):
        at = begin[0] + (tokens * step + within(panels, begin[2]) * panel_bytes)
        words[i], words[i + 1], words[i + 2], words[i + 3] = four(at)

    return device.inlined(read)


def taker(tile):
    """(begin, tokens, piece, words, i): a piece of codes as it is, and its scales."""
    step, cell_step, within = tile.step, tile.cell_step, within_row(tile)
    cell_bytes, group, regular = BY_NAME[tile.cell].bytes(1), tile.group // CHUNK, tile.regular
    size, cells_size, chunk_bytes = (
        tile.piece * tile.chunk_bytes,
        tile.piece_cells * cell_bytes,
        tile.chunk_bytes,
    )
    loaded = four_of(memory.load(size, size, space=memory.SHARED))
    loaded_cells = four_of(memory.load(cells_size, cells_size, space=memory.SHARED))
    pace, words_of, words_of_cells = tile.piece * tile.pace, -(-size // 4), -(-cells_size // 4)

    def take(begin, tokens, piece, words, i):
        rows, cells, chunk, _ = begin
        piece = within(piece, chunk)
        if regular:
            cells = cells + (tokens * cell_step + piece * pace // group * cell_bytes)
        else:
            cells = cells + (tokens * cell_step + quotient(piece * pace + chunk, group) * cell_bytes)
        codes = loaded(rows + (tokens * step + piece * pace * chunk_bytes))
        for j in range(words_of):
            words[i + j] = codes[j]
        scales = loaded_cells(cells)
        for j in range(words_of_cells):
            words[i + 4 + j] = scales[j]

    return device.inlined(take)


def widener(tile):
    """(begin, words, i, chunk, k) -> word k of a chunk of a piece of codes, in the data's type."""
    extract, (scales, times), apart = extractor(tile), scaling(tile), tile.apart
    chunk_words = tile.chunk_bytes // 4

    def widen(begin, words, i, chunk, k):
        codes = words[i + chunk * chunk_words + k // apart]
        return times(extract(codes, k % apart, begin), scales(words, i, i, chunk))

    return device.inlined(widen)


def zipper(tile):
    """(begin, words, i, j, chunk, k) -> words of two pieces: first elements of their words k, last ones.

    Codes are brought together before they are widened, with a pair of scales.
    """
    extract, (scales, times), apart = extractor(tile), scaling(tile), tile.apart
    chunk_words, low, high = tile.chunk_bytes // 4, ptx.low, ptx.high

    def zipped(begin, words, i, j, chunk, k):
        at = chunk * chunk_words + k // apart
        one, other, pair = words[i + at], words[j + at], scales(words, i, j, chunk)
        return (
            times(extract(low(one, other), k % apart, begin), pair),
            times(extract(high(one, other), k % apart, begin), pair),
        )

    return device.inlined(zipped)


def extractor(tile):
    """(word, k, begin) -> the code k of each half of a word as float16s.

    Two codes at a time, their signs turned, are put below the exponent of float16s from 1024 on. What these
    exceed the number of 0 by is, exactly, what the codes mean; or 16 times that, if they stay where they are.
    """
    bits = BY_NAME[tile.stored].bits
    zero, minus, fused = np.uint32((0x6400 + 2 ** (bits - 1)) * 0x10001), ptx.halves("sub"), ptx.halves("fma")
    if bits == 8:

        def extract(word, k, begin):
            return minus((word >> np.uint32(8 * k)) & begin[3] ^ zero, zero)

        return device.inlined(extract)
    high_zero, sixteenth, high_shift = (np.uint32(n * 0x10001) for n in (0x6480, 0x2C00, 0xD480))

    def extract_short(word, k, begin):
        word >>= np.uint32(8 * (k // 2))
        if k % 2:
            return fused(word & (begin[3] << np.uint32(4)) ^ high_zero, sixteenth, high_shift)  # / 16 - 72
        return minus(word & begin[3] ^ zero, zero)

    return device.inlined(extract_short)


def scaling(tile):
    """(words, i, j, chunk) -> the scales of two pieces for a chunk; (two codes as float16s, they) -> what the
    codes mean, as a word.
    """
    element, cell, group, halves = (
        tile.element,
        tile.cell,
        tile.group // CHUNK,
        BY_NAME[tile.cell].bytes(1) == 2,
    )
    low, high = ptx.low, ptx.high

    def words_of(words, i, j, chunk):
        member = chunk // group
        if halves:
            one, other = words[i + 4 + member // 2], words[j + 4 + member // 2]
            return high(one, other) if member % 2 else low(one, other)
        return words[i + 4 + member]

    words_of = device.inlined(words_of)
    if element == cell == "float16":
        return words_of, ptx.halves("mul")  # a product of float32s would be exact, and rounded once as well

    raw, cell_of = chunks.DECODE[cell]
    packed, both_of, two = ptx.packed(element), both("float16"), both(cell if halves else "float16")
    rounded = ptx.packed(cell) if halves and cell != element else None

    @shared
    def as_float(bits):
        return np.float32(cell_of(raw(bits)))

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
def both(element):
    """(word) -> its elements, as float32."""
    raw, decode = chunks.DECODE[element]

    @shared
    def both(word):
        return decode(raw(word & np.uint32(0xFFFF))), decode(raw(word >> np.uint32(16)))

    return both
