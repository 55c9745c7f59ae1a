"""Copy tiles in the cache's format to shared memory: rows and scales of 16 tokens, by one warp."""

from dataclasses import dataclass

import numpy as np

from kvkit.formats import BY_NAME
from kvkit.runtime.jit import shared
from kvkit_cuda.attention.tiles import CHUNK
from kvkit_cuda.copy.transfer import WARP
from kvkit_cuda.device_runtime import device, memory, ptx

TILE_TOKENS = 16  # in a tile
KEY_PANEL, VALUE_PANEL = 4, 8  # chunks of a panel: one for each of the threads that share a row
RUN_BYTES = 32  # of the longest run of keys; a run of values has half as many
SCALE_UNITS = 16, 4  # bytes that one copy of scales may have
SLICE = 16  # bytes of a row that `slices` loads together
LARGE_GROUP = 32  # codes of the smallest group that `slices` multiplies before its scale
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

    `slices` and `panels` multiply tiles. The threads that share a row in `panels`, 4 for keys and 8 for
    values, take one chunk of each panel. A thread's chunks are a panel apart, or they are neighbours, a run,
    of which it reads up to 16 bytes at once, a piece. The threads of a row of 16 chunks of keys are

                   chunk  0 1 2 3   4 5 6 7   8 9 ..            thread_step   panel_step
        by panels         0 1 2 3 | 0 1 2 3 | 0 1 2 3 | ..           1            4
        in runs           0 0 0 0 | 1 1 1 1 | 2 2 2 2 | ..           4            1
    """

    element: str
    cache_format: str
    scale_format: str | None
    group: int
    dim: int
    panel: int  # chunks of a panel
    unit: int  # bytes of one copy of scales, one of `SCALE_UNITS`
    native: bool = True  # whether the device converts floats of 8 bits

    @property
    def sliced(self):
        """Return whether `slices` multiplies the tile: floats, or codes of which many share a scale."""
        return self.group == 0 or not self.scale_format or is_in_slices(self.cache_format, self.group)

    @property
    def slices(self):
        """Return how many slices a row has."""
        return self.row_bytes // SLICE

    @property
    def groups(self):
        """Return how many scales a row has; 1 for a row without scales."""
        return self.dim // self.group if self.scale_format and self.group else 1

    @property
    def group_slices(self):
        """Return how many slices share a scale."""
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
        size, panel_bytes = self.row_bytes, KEY_PANEL * self.chunk_bytes
        if self.panel == VALUE_PANEL or self.sliced:
            return odd_multiple(size, 16)  # 8 rows begin in 8 different units of 16 of the banks' 128 bytes
        if not self.in_runs:
            return -(-odd_multiple(size, panel_bytes) // 16) * 16
        return size + (16 if self.panels * self.chunk_bytes > 16 else 0)

    @property
    def scale_step(self):
        """Return the bytes between the scales of neighbouring rows, also without bank conflicts."""
        size = self.scale_bytes + -self.scale_bytes % 16
        return odd_multiple(size, 16) if size and self.panel == VALUE_PANEL and not self.sliced else size

    @property
    def bytes(self):
        return TILE_TOKENS * (self.step + self.scale_step)

    @property
    def chunk_bytes(self):
        return BY_NAME[self.cache_format].bytes(CHUNK)

    @property
    def in_16_bits(self):
        """Return how many elements 16 bits hold."""
        return 16 // BY_NAME[self.cache_format].bits

    @property
    def apart(self):
        """Return the distance of the two elements of a word (see `tile_words`)."""
        return 1 if self.minifloat else self.in_16_bits

    @property
    def in_runs(self):
        """Return whether a thread's chunks are neighbours: short runs of codes, of whole groups or in one."""
        most, group = RUN_BYTES * KEY_PANEL // self.panel, self.group if self.scale_format else self.dim
        whole = self.coded and self.chunks % self.panel == 0 and self.panels * self.chunk_bytes <= most
        run, group_chunks, power_of_two = self.panels, group // CHUNK, self.panels & (self.panels - 1) == 0
        return bool(whole and power_of_two and (run % group_chunks == 0 or group_chunks % run == 0))

    @property
    def piece(self):
        """Return the chunks of a piece: 1 if four pieces with scales would need too many registers."""
        large = self.panel == VALUE_PANEL and self.group == CHUNK and self.scale_format == "float32"
        return min(self.panels, 16 // self.chunk_bytes) if self.in_runs and not large else 1

    @property
    def piece_scales(self):
        """Return how many scales a piece has."""
        return max(1, self.piece * CHUNK // self.group)

    @property
    def regular(self):
        """Return whether scales have the same distance between panels for every chunk."""
        group = self.group // CHUNK if self.scale_format else 1
        return self.in_runs or self.panel % group == 0 or group % self.panel == 0

    @property
    def thread_step(self):
        """Return the distance, in chunks, between the first chunks of neighbouring threads."""
        return self.panels if self.in_runs else 1

    @property
    def panel_step(self):
        """Return the distance, in chunks, between a thread's chunks."""
        return 1 if self.in_runs else self.panel


def odd_multiple(size, unit):
    """Return the least odd multiple of `unit` from `size` on."""
    return size + (unit - size) % (2 * unit)


def is_in_slices(cache_format, group):
    """Return whether groups of codes are large, and whole slices."""
    return group >= LARGE_GROUP and group * BY_NAME[cache_format].bits % (8 * SLICE) == 0


def fill(keys, values):
    """Return f(place, row_id, bases, params, lane), which begins to copy a tile of keys, then one of values.

    A lane's `row_id` is the cache row of its token; lanes without a token have any valid row. At `bases`,
    shared memory has four addresses: row 0 of keys and of values, then their scales.
    """
    both, scaled, begins = (keys, values), keys.scale_format is not None, [0, keys.bytes]
    counts, steps = [tile.row_bytes // 16 for tile in both], [tile.step for tile in both]
    copy_rows = rows_copier(16, counts, steps, begins)
    counts, steps = [tile.scale_bytes // keys.unit for tile in both], [tile.scale_step for tile in both]
    begins = [begin + TILE_TOKENS * tile.step for begin, tile in zip(begins, both, strict=True)]
    copy_scales = rows_copier(keys.unit, counts, steps, begins)

    def fill(place, row_id, bases, params, lane):
        lane, strides = fresh_register(lane), (np.uint32(params.key_row), np.uint32(params.value_row))
        copy_rows(place, row_id, bases, strides, lane)
        if scaled:
            strides = np.uint32(params.scale_row), np.uint32(params.scale_row)
            copy_scales(place, row_id, int32(bases + 16), strides, lane)  # 16: after two addresses

    return device.force_inlined(fill)


def rows_copier(unit, counts, steps, begins):
    """Return f(place, row_id, bases, strides, lane), which begins to copy 16 rows of keys and values.

    Rows, or rows of scales, are copied in units of `unit` bytes, by 1, 2, 4 or 8 threads a row: with 4,

        lane  0 1 2 3   4 5 6 7   8 ..  31
        row   0         1         2     7       then rows 8 to 15

    `counts`, `steps` and `begins` have an entry for keys and one for values: units of a row, bytes between
    rows of a tile, offset of the first row.
    """
    threads = next((n for n in (1, 2, 4) if max(counts) <= n), 8)  # that copy a row
    from_lane = device.from_lane
    (key_step, value_step), (key_begin, value_begin) = steps, begins
    copy_key, copy_value = (row_copier(unit, count, threads) for count in counts)
    shift = threads.bit_length() - 1

    def copy_rows(place, row_id, bases, strides, lane):
        first_unit, first_row = int32(lane & (threads - 1)), int32((lane & (WARP - 1)) >> shift)
        keys, values = two_addresses(bases)
        keys, values = keys + unit * first_unit, values + unit * first_unit
        at_keys = int32(place + key_begin + first_row * key_step + unit * first_unit)
        at_values = int32(place + value_begin + first_row * value_step + unit * first_unit)
        for i in range(0, TILE_TOKENS, WARP // threads):
            row = from_lane(row_id, int32((i + first_row) & (TILE_TOKENS - 1)))
            if (
                TILE_TOKENS * threads >= WARP or first_row < TILE_TOKENS
            ):  # a thread a row leaves 16 lanes idle
                copy_key(int32(at_keys + i * key_step), keys + product(row, strides[0]), first_unit)
                copy_value(int32(at_values + i * value_step), values + product(row, strides[1]), first_unit)

    return device.inlined(copy_rows)


def row_copier(unit, count, threads):
    """Return f(target, source, first_unit), which begins to copy every `threads`-th unit of a row."""
    copy = ptx.copy if unit == 16 else ptx.copy_word

    def copy_row(target, source, first_unit):
        for j in range(0, count, threads):
            if j + threads <= count or j + first_unit < count:
                copy(int32(target + j * unit), source + j * unit)

    return device.inlined(copy_row)


@shared
def two_addresses(at):
    one, other = _read_addresses(at)
    return np.int64(one), np.int64(other)


@device.inlined
def product(x, y):
    """Return the product of numbers below 2^32."""
    return np.int64(np.uint64(np.uint32(x)) * np.uint64(y))
