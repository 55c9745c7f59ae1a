"""What checks make of the arguments of a call, and kernels read."""

from typing import NamedTuple

from kvkit.typed import Array


class MaskPlace(NamedTuple):
    """A checked mask of attention, as kernels see it."""

    address: int = 0
    kind: int = 0
    sequence: int = 0  # strides
    head: int = 0
    row: int = 0
    column: int = 0
    packed: int = 0  # whether rows are packed tokens; 2 if columns are positions in a token's own context


NO_MASK = MaskPlace()


class StepIndex(NamedTuple):
    """Checked index tensors: where each sequence's tokens are packed and which rows they have."""

    seqstarts: Array
    kvstarts: Array
    start_pos: Array
    zeros: Array
    table: Array  # or something else of its shape that numpy can read
    page_size: int
    tokens: int
    context: int
    rows: int  # that the cache must have
    limits: tuple[int, int] = (0, 0)
    value_table: Array | None = None  # where values have other rows than keys


class Side(NamedTuple):
    """Locates the rows of keys or of values, and the scales of codes: an address and byte strides of each."""

    address: int
    sequence: int
    row: int
    head: int
    scales: int = 0
    scale_sequence: int = 0
    scale_row: int = 0
    scale_head: int = 0

    def with_scales(self, address: int, sequence: int = 0, row: int = 0, head: int = 0) -> "Side":
        """Return the side with scales at an address, and their byte strides."""
        return self._replace(scales=address, scale_sequence=sequence, scale_row=row, scale_head=head)


class CacheLayer(NamedTuple):
    """A layer of a checked cache as kernels see it: format names, and address and strides of each side."""

    packed: str
    stored: str
    cell: str | None
    group: int
    heads: int
    dim: int
    stored_bytes: int  # of a head
    capacity: tuple[int, int]  # sequences, rows
    heads_adjoin: bool
    sides: tuple[Side, Side]  # of keys, of values


class Context(NamedTuple):
    """Keys and values as kernels read them: formats, sizes, and address and byte strides of each side.

    A row's number times its side's row stride is where it lies; neighbours are `steps` numbers apart, so that
    pages may begin anywhere. Elements lie side by side, or `elements` bytes apart. Operators see what a load
    gives, which rounds to the data where these are coarser; `as_loaded` says so.
    """

    packed: str
    stored: str
    cell: str | None
    group: int
    heads: int
    dim: int
    value_dim: int
    sides: tuple[Side, Side]  # of keys, of values
    key_bytes: int
    value_bytes: int
    as_loaded: bool = True
    reader: object = None  # machine code of rows that formats and strides alone do not describe
    value_stored: str | None = None  # the format of values, if it is another
    steps: tuple[int, int] = (1, 1)
    elements: tuple[int, int] = (0, 0)
