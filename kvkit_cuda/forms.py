"""The form of a plain kernel: how the threads of a block share the rows of a tile and of the cache."""

from dataclasses import dataclass

from kvkit.formats import BY_NAME
from kvkit_cuda import chunks
from kvkit_cuda.transfer import WARP

THREADS = 128  # of a block
ROWS, ELEMENTS = 8, 64  # most rows of a tile; most elements of its queries that a thread holds


@dataclass(frozen=True, slots=True)
class Form:
    """What decides a kernel's machine code."""

    packed: str
    stored: str
    cell: str | None
    cells: int  # scales of a chunk
    span: int  # elements of a chunk
    pieces: int  # chunks of a row for each thread of a team
    rows: int  # of a tile
    lanes: int  # threads of a team
    teams: int  # of a block


def form_of(record, context, most_rows):
    """The form of the kernel for a call.

    A chunk has as many elements as 16 bytes hold, or fewer: those of a row are whole chunks, chunks are
    aligned and hold whole groups or parts of one, and the rows of a tile fit into registers.
    """
    span, smallest = 128 // BY_NAME[context.stored].bits, chunks.smallest(context.stored)
    rows, dim = 1 << (min(most_rows, ROWS) - 1).bit_length(), max(context.dim, context.value_dim)
    while rows > 1 and rows * -(-dim // WARP) > ELEMENTS:
        rows //= 2
    while span > smallest and not (fits(record, context, span) and holds(dim, span, rows)):
        span //= 2
    lanes = min(WARP, THREADS, 1 << (-(-dim // span) - 1).bit_length())
    pieces = -(-dim // (span * lanes))
    cells = max(span // context.group, 1) if context.cell else 0
    formats = context.packed, context.stored, context.cell
    return Form(*formats, cells, span, pieces, rows, lanes, THREADS // lanes)


def holds(dim, span, rows):
    """Whether a thread can hold its part of the queries of a tile, or holds no less in smaller chunks."""
    return rows * span * -(-dim // (span * WARP)) <= ELEMENTS or span * WARP <= dim


def fits(record, context, span):
    """Whether rows are whole chunks of `span` elements, and chunks and their scales are aligned."""
    at = (record.keys, record.key_sequence, record.key_row, record.key_head,
          record.values, record.value_sequence, record.value_row, record.value_head)  # fmt: skip
    whole = context.dim % span == 0 and context.value_dim % span == 0
    if not whole or any(number % BY_NAME[context.stored].bytes(span) for number in at):
        return False
    if context.cell is None or context.group % span == 0:
        return True
    size = BY_NAME[context.cell].bytes(span // context.group)
    cells_at = record.key_cells, record.value_cells, record.cell_sequence, record.cell_row, record.cell_head
    return span % context.group == 0 and size <= 16 and not any(number % size for number in cells_at)
