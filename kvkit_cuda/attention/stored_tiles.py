"""Copy tiles in the cache's format to shared memory: rows and scales of 16 tokens, by one warp."""

from dataclasses import dataclass

import numpy as np

from kvkit.formats import BY_NAME
from kvkit.runtime.jit import shared
from kvkit_cuda.attention.tiles import CHUNK
from kvkit_cuda.copy.transfer import WARP
from kvkit_cuda.device_runtime import device, memory, ptx

TOKENS = 16  # in a tile
KEYS, VALUES = 4, 8  # chunks in a panel
LINE = 32  # most bytes of a run of keys; a run of values has half as many
UNITS = 16, 4  # bytes of one copy of scales
SLICE, LARGE = 16, 32  # bytes of a row that are loaded together; codes of a group that are multiplied first
int32, fresh_register = device.int32, ptx.fresh_register
_read_addresses = memory.load(16, 16, space=memory.SHARED)


@dataclass(frozen=True, slots=True)
class Tile:
    """The keys or values of 16 tokens in shared memory: their rows, then their scales.

        token 0    chunk 0 | chunk 1 | ...  gap     `step` bytes from row to row: the gap avoids
        ..                                          bank conflicts
        token 15   chunk 0 | chunk 1 | ...  gap
        token 0    scale 0 | scale 1 | ...  gap     `scale_step` bytes from row to row
        ..

    The threads of a product, 4 for keys and 8 for values, take one chunk of each panel. A thread's chunks
    are a panel apart, or they are neighbours, a run. It reads up to 16 bytes of a run at once, a piece. With
    4 threads and 12 chunks they take

        by panels  0 1 2 3 | 0 1 2 3 | 0 1 2 3         in runs  0 0 0 | 1 1 1 | 2 2 2 | 3 3 3
    """

    element: str
    cache_format: str
    scale_format: str | None
    group: int
    dim: int
    panel: int  # chunks of a panel
    unit: int  # bytes of one copy of scales
    native: bool = True  # whether the device converts floats of 8 bits

    @property
    def sliced(self):
        """Return whether `slices` multiplies the tile: floats, or codes of which many share a scale."""
        return self.group == 0 or not self.scale_format or in_slices(self.cache_format, self.group)

    @property
    def slices(self):
        return self.row_bytes // SLICE

    @property
    def groups(self):
        """Return how many scales a row has; 1 for a row without scales."""
        return self.dim // self.group if self.scale_format and self.group else 1

    @property
    def group_slices(self):
        return self.slices // self.groups

    @property
    def integer(self):
        return self.coded and not self.minifloat

    @property
    def coded(self):
        """Return whether elements are widened on their way to a product."""
        return self.cache_format != self.element

    @property
    def minifloat(self):
        return BY_NAME[self.cache_format].minifloat

    @property
    def chunks(self):
        return self.dim // CHUNK

    @property
    def panels(self):
        return -(-self.chunks // self.panel)

    @property
    def row_bytes(self):
        return BY_NAME[self.cache_format].bytes(self.dim)

    @property
    def scale_bytes(self):
        """Return the bytes of the scales of a row."""
        return BY_NAME[self.scale_format].bytes(self.groups) if self.scale_format else 0

    @property
    def step(self):
        """Return the bytes from row to row, so that 8, 16 or 32 threads read without bank conflicts."""
        size = self.row_bytes
        if self.panel == VALUES or self.sliced:
            return size + (16 - size) % 32
        if not self.in_runs:
            size += (KEYS * self.chunk_bytes - size) % (2 * KEYS * self.chunk_bytes)
            return size + -size % 16
        return size + (16 if self.panels * self.chunk_bytes > 16 else 0)

    @property
    def scale_step(self):
        """Return the bytes between the scales of neighbouring rows, also without bank conflicts."""
        size = self.scale_bytes + -self.scale_bytes % 16
        return size + (16 - size) % 32 if size and self.panel == VALUES and not self.sliced else size

    @property
    def bytes(self):
        return TOKENS * (self.step + self.scale_step)

    @property
    def chunk_bytes(self):
        return BY_NAME[self.cache_format].bytes(CHUNK)

    @property
    def held(self):
        """Return how many codes 16 bits hold."""
        return 16 // BY_NAME[self.cache_format].bits

    @property
    def apart(self):
        """Return the distance of the two elements of a word."""
        return 1 if self.minifloat else self.held

    @property
    def in_runs(self):
        most, group = LINE * KEYS // self.panel, (self.group if self.scale_format else self.dim) // CHUNK
        whole = self.coded and self.chunks % self.panel == 0 and self.panels * self.chunk_bytes <= most
        power = self.panels & (self.panels - 1) == 0
        return bool(whole and power and (self.panels % group == 0 or group % self.panels == 0))

    @property
    def piece(self):
        """Return the chunks of a piece; 1 for values with float32 scales, since threads hold four pieces."""
        dear = self.panel == VALUES and self.group == CHUNK and self.scale_format == "float32"
        return min(self.panels, 16 // self.chunk_bytes) if self.in_runs and not dear else 1

    @property
    def piece_scales(self):
        """Return how many scales a piece has."""
        return max(1, self.piece * CHUNK // self.group)

    @property
    def regular(self):
        """Return whether scales have the same distance between panels for every chunk."""
        group = self.group // CHUNK if self.scale_format else 1
        return self.in_runs or self.panel % group == 0 or group % self.panel == 0

    def first(self, thread):
        """Return the first chunk of a thread of a panel."""
        return thread * self.panels if self.in_runs else thread

    def chunk(self, thread, panel):
        return self.first(thread) + panel * self.pace

    @property
    def pace(self):
        """Return the distance between a thread's chunks, in chunks."""
        return 1 if self.in_runs else self.panel


def in_slices(cache_format, group):
    """Return whether groups of codes are large, and whole slices."""
    return group >= LARGE and group * BY_NAME[cache_format].bits % (8 * SLICE) == 0


def fill(keys, values):
    """Return f(place, row_id, bases, params, lane), which begins to copy a tile of keys, then one of values.

    A lane's `row_id` is the cache row of its token; lanes without a token have any valid row. `bases` is the
    shared memory with the addresses of row 0 of keys, values and the scales of both.
    """
    both, coded, begins = (keys, values), keys.scale_format is not None, [0, keys.bytes]
    counts, steps = [tile.row_bytes // 16 for tile in both], [tile.step for tile in both]
    copy_rows = rows_copier(16, counts, steps, begins)
    counts, steps = [tile.scale_bytes // keys.unit for tile in both], [tile.scale_step for tile in both]
    begins = [begin + TOKENS * tile.step for begin, tile in zip(begins, both, strict=True)]
    copy_scales = rows_copier(keys.unit, counts, steps, begins)

    def fill(place, row_id, bases, params, lane):
        lane, strides = fresh_register(lane), (np.uint32(params.key_row), np.uint32(params.value_row))
        copy_rows(place, row_id, bases, strides, lane)
        if coded:
            strides = np.uint32(params.scale_row), np.uint32(params.scale_row)
            copy_scales(place, row_id, int32(bases + 16), strides, lane)

    return device.force_inlined(fill)


def rows_copier(unit, counts, steps, begins):
    """Return f(place, row_id, bases, strides, lane), which begins to copy 16 rows of keys and values.

    Rows, or rows of scales, are copied in units of `unit` bytes. `counts`, `steps` and `begins` have an entry
    for keys and one for values: units of a row, bytes between rows of a tile, offset of the first row.
    """
    threads, from_lane = threads_of(max(counts)), device.from_lane
    (key_step, value_step), (key_begin, value_begin) = steps, begins
    copy_key, copy_value = (row_copier(unit, count, threads) for count in counts)
    shift = threads.bit_length() - 1

    def copy_rows(place, row_id, bases, strides, lane):
        mine, first = int32(lane & threads - 1), int32((lane & WARP - 1) >> shift)
        keys, values = two_addresses(bases)
        keys, values = keys + unit * mine, values + unit * mine
        at_keys = int32(place + key_begin + first * key_step + unit * mine)
        at_values = int32(place + value_begin + first * value_step + unit * mine)
        for i in range(0, TOKENS, WARP // threads):
            row = from_lane(row_id, int32(i + first & TOKENS - 1))
            if TOKENS * threads >= WARP or first < TOKENS:
                copy_key(int32(at_keys + i * key_step), keys + product(row, strides[0]), mine)
                copy_value(int32(at_values + i * value_step), values + product(row, strides[1]), mine)

    return device.inlined(copy_rows)


def row_copier(unit, count, threads):
    """Return f(target, source, mine), which begins to copy every `threads`-th unit of a row."""
    copy, pace = ptx.copy if unit == 16 else ptx.copy_word, unit

    def copy_row(target, source, mine):
        for j in range(0, count, threads):
            if j + threads <= count or j + mine < count:
                copy(int32(target + j * pace), source + j * pace)

    return device.inlined(copy_row)


def threads_of(units):
    """Return how many threads copy a row of `units` units."""
    return next((n for n in (1, 2, 4) if units <= n), 8)


@shared
def two_addresses(at):
    one, other = _read_addresses(at)
    return np.int64(one), np.int64(other)


@device.inlined
def product(x, y):
    """Return the product of numbers below 2^32."""
    return np.int64(np.uint64(np.uint32(x)) * np.uint64(y))
