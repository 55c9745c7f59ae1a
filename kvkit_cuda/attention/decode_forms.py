"""Choose the form of a decode kernel, and the calls that it suits."""

from dataclasses import dataclass

from kvkit.formats import BY_NAME
from kvkit_cuda.attention import forms, fragments, params
from kvkit_cuda.attention.fragments import LONGEST, are_widened
from kvkit_cuda.attention.panels import WORDS
from kvkit_cuda.attention.slices import WEIGHTS
from kvkit_cuda.attention.stored_tiles import (
    KEY_PANEL,
    SCALE_UNITS,
    TILE_TOKENS,
    VALUE_PANEL,
    Tile,
    is_in_slices,
)
from kvkit_cuda.attention.tiles import CHUNK
from kvkit_cuda.device_runtime import ptx

WARPS = 4  # most warps of a block
SHARED_MEMORY = 47 * 1024  # of a block's 48 KiB, for tiles
STAGES = 4  # most tiles in a warp's ring
ROWS = 16  # most rows of a call
DIM = 128  # elements of the largest head for so many rows; larger ones have at most 8


@dataclass(frozen=True, slots=True)
class DecodeForm:
    """All that decides the machine code of a decode kernel."""

    data_dtype: str  # of queries and outputs
    keys: Tile
    values: Tile
    blocks: int  # of 8 rows
    warps: int
    stages: int  # tiles of a warp
    has_bias: bool  # whether scores have a cap, bias or mask

    @property
    def sliced(self):
        """Return whether `slices` computes the products, not `panels`."""
        return self.keys.sliced

    @property
    def scaled(self):
        """Return whether weights are multiplied by scales of values; if so, each row finds its own `lift`."""
        return self.sliced and self.keys.scale_format is not None

    @property
    def element(self):
        """Return the 16-bit type that tensor cores multiply."""
        return self.keys.element

    @property
    def lift(self):
        """Return the power of 2 that weights are multiplied by: float16 then holds those down to 2^-38."""
        return 0 if self.element == self.data_dtype or self.scaled else 14

    @property
    def rows(self):
        return 8 * self.blocks

    @property
    def thread_rows(self):
        return 2 * self.blocks

    @property
    def columns(self):
        return TILE_TOKENS // 8

    @property
    def width(self):
        return self.values.dim // 8 if self.sliced else CHUNK * self.values.panels

    @property
    def held_queries(self):
        """Return how many words of queries a thread holds."""
        return self.blocks * (self.keys.dim // 8 if self.sliced else 4 * self.keys.panels)

    @property
    def held_words(self):
        """Return how many words of keys, values and weights a thread holds for a product."""
        return WEIGHTS + 2 * self.blocks if self.sliced else WORDS

    @property
    def held_zeros(self):
        """Return how many scores of a thread begin at numbers of their own."""
        return self.keys.groups * self.thread_rows * self.columns

    @property
    def fragment(self):
        return fragments.BY_TOKENS

    @property
    def stage_bytes(self):
        return self.keys.bytes + self.values.bytes

    @property
    def ring_bytes(self):
        """Return the bytes of a warp's tiles and four addresses."""
        return self.stages * self.stage_bytes + 32

    @property
    def shared_bytes(self):
        """Return the bytes of all warps' tiles, which their sums overwrite in the end."""
        return self.warps * max(self.ring_bytes, self.rows * self.values.dim * 4)


def form(
    data_dtype, cache_format, scale_format, group, dim, value_dim, rows, has_bias, unit=SCALE_UNITS[0],
    native=True,
):  # fmt: skip
    """Return the form with the most warps, then the most tiles, that fit in shared memory.

    `slices` multiplies codes in float16, where they are exact, with queries that are converted to it;
    `panels` multiplies codes of small groups in the data's type.
    """
    in_panels = scale_format and group and not is_in_slices(cache_format, group)
    element = data_dtype if in_panels or cache_format == data_dtype else "float16"
    keys, values = (
        Tile(element, cache_format, scale_format, group, size, panel, unit, native=native)
        for size, panel in ((dim, KEY_PANEL), (value_dim, VALUE_PANEL))
    )
    warps, stage_bytes = WARPS, keys.bytes + values.bytes
    while warps * stage_bytes > SHARED_MEMORY:
        warps //= 2
    stages = min(STAGES, SHARED_MEMORY // (warps * stage_bytes))
    return DecodeForm(data_dtype, keys, values, -(-rows // 8), warps, stages, bool(has_bias))


def form_of(record, context, most_rows):
    """Return the form of the kernel for a call."""
    sizes, has_bias = (context.dim, context.value_dim), fragments.needs_bias_or_mask(record)
    kinds = context.data_dtype, context.cache_format, context.scale_format, context.group
    unit = next(unit for unit in SCALE_UNITS if scales_suit(record, context, sizes, unit))
    return form(*kinds, *sizes, most_rows, has_bias, unit, ptx.has_minifloats())


def suits(record, context, reach, most_rows):
    """Return whether decode takes a call: few rows of 16-bit data or codes, whole fragments and copies."""
    sizes = context.dim, context.value_dim
    few = most_rows <= (ROWS if max(sizes) <= DIM else forms.ROWS)
    whole = not any(BY_NAME[context.cache_format].bytes(size) % 16 for size in sizes)
    short_steps = all(0 <= step < 2**32 for step in (record.key_row, record.value_row, record.scale_row))
    in_32_bits = short_steps and reach.rows < LONGEST
    fits = fragments.suits(record, context, reach, most_rows, 16) and few and has_products(context)
    return fits and whole and in_32_bits and scales_suit(record, context, sizes, min(SCALE_UNITS))


def has_products(context):
    """Return whether there are products for the formats: 16-bit floats as they are, codes with any scales."""
    cache_format, group = context.cache_format, context.group
    if context.scale_format and (not group or is_in_slices(cache_format, group)):
        return BY_NAME[cache_format].bits <= 8
    return are_widened(context) or (context.data_dtype, cache_format) == ("bfloat16", "float16")


def scales_suit(record, context, sizes, unit):
    """Return whether scales can be copied in units of `unit` bytes."""
    if context.scale_format is None:
        return True
    sizes = [BY_NAME[context.scale_format].bytes(size // (context.group or size)) for size in sizes]
    return not any(number % unit for number in (*params.scale_places(record), *sizes))
