"""The form of a plain kernel: how the threads of a block share the rows of a tile and of the cache."""

from dataclasses import dataclass

from kvkit.formats import BY_NAME
from kvkit_cuda.attention.params import scale_places
from kvkit_cuda.copy import chunks
from kvkit_cuda.copy.transfer import WARP

THREADS = 128  # of a block
ROWS = 8  # most rows of a tile
# Most query elements that a thread holds: in one chunk, in several chunks, or if types are mixed.
ELEMENTS, IN_PIECES, MIXED = 64, 48, 32


@dataclass(frozen=True, slots=True)
class PlainForm:
    """All that decides the machine code of a plain kernel."""

    data_dtype: str
    cache_format: str
    scale_format: str | None
    chunk_scales: int  # scales of a chunk
    span: int  # elements of a chunk
    pieces: int  # chunks of a row for each thread of a team
    rows: int  # of a tile
    lanes: int  # threads of a team
    teams: int  # of a block
    value_format: str
    as_loaded: bool  # whether decoded values are rounded to `data_dtype`, as a load does
    general: bool  # whether strides, scales or slopes are more general than a cache's, as in pools of pages

    @property
    def in_blocks(self):
        """Return whether codes lie in blocks, each with its scale."""
        return BY_NAME[self.cache_format].block is not None

    @property
    def rounded_to(self):
        """Return the format that `chunks.widen` rounds decoded values to, or one that changes nothing."""
        return self.data_dtype if self.as_loaded else self.scale_format or "float32"

    @property
    def ahead(self):
        """Return how many tokens, 4 at most, a team can process at once with its registers."""
        held, most = self.rows * self.pieces * self.span, 2 * ELEMENTS
        full = held == ELEMENTS or self.pieces > 1
        if self.scale_format or full or not self.data_dtype == self.cache_format == self.value_format:
            most = MIXED // 2 if mixed(self.data_dtype, self.scale_format) else ELEMENTS
        return max(1, min(4, 16 // self.rows, most // held, 32 // self.span))


def form_of(record, context, most_rows):
    """Return the form of the kernel for a call.

    A chunk has up to 16 bytes, such that rows are whole chunks, chunks are aligned and hold whole groups or
    parts of one group, and the rows of a tile fit into registers.
    """
    values = context.value_format or context.cache_format
    block = BY_NAME[context.cache_format].block
    span = 128 // max(BY_NAME[context.cache_format].bits, BY_NAME[values].bits)
    span = min(span, block.elements // 2) if block else span
    smallest = chunks.smallest(context.cache_format)
    rows, dim = 1 << (min(most_rows, ROWS) - 1).bit_length(), max(context.dim, context.value_dim)
    most = ELEMENTS if dim <= span * WARP else IN_PIECES
    if mixed(context.data_dtype, context.scale_format):
        span, most = min(span, MIXED // 2), MIXED
    while rows > 1 and rows * -(-dim // WARP) > most:
        rows //= 2
    while span > smallest and not (fits(record, context, span) and holds(dim, span, rows, most)):
        span //= 2
    lanes = min(WARP, THREADS, 1 << (-(-dim // span) - 1).bit_length())
    pieces = -(-dim // (span * lanes))
    chunk_scales = max(span // (context.group or context.dim), 1) if context.scale_format else 0
    formats: dict = {name: getattr(context, name) for name in ("data_dtype", "cache_format", "scale_format")}
    shape = {"chunk_scales": chunk_scales, "span": span, "pieces": pieces, "rows": rows}
    team = {"lanes": lanes, "teams": THREADS // lanes}
    options = {"as_loaded": context.as_loaded, "general": bool(record.general)}
    return PlainForm(**formats, **shape, **team, value_format=values, **options)


def mixed(data_dtype, scale_format):
    """Return whether scales and data differ in type: widening codes then takes more registers."""
    return scale_format not in (None, data_dtype)


def holds(dim, span, rows, most):
    """Return whether chunks need not be smaller: a thread can hold its part of a tile's queries.

    Or smaller chunks would not help, because each thread of a warp has one of the row already.
    """
    return rows * span * -(-dim // (span * WARP)) <= most or span * WARP <= dim


def fits(record, context, span):
    """Return whether rows are whole chunks of `span` elements, and chunks and their scales are aligned."""
    keys = record.keys, record.key_sequence, record.key_row, record.key_head
    values = record.values, record.value_sequence, record.value_row, record.value_head
    whole = context.dim % span == 0 and context.value_dim % span == 0 and not any(context.elements)
    if BY_NAME[context.cache_format].block:
        return whole
    value_format = context.value_format or context.cache_format
    for side_format, at in ((context.cache_format, keys), (value_format, values)):
        if not whole or any(number % BY_NAME[side_format].bytes(span) for number in at):
            return False
    if context.scale_format is None or context.group % span == 0:
        return True
    size = BY_NAME[context.scale_format].bytes(span // context.group)
    whole = span % context.group == 0 and size <= 16
    return whole and not any(number % size for number in scale_places(record))
