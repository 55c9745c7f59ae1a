"""The records that checks produce and kernels read."""

from typing import NamedTuple

from kvkit.typed import Array

ENDLESS = 2**63 - 1  # the page size of offset mode: one page holds every position of a sequence
FRACTAL_BYTES = 32  # bytes of a group of elements in Ascend's NZ


class MaskPlace(NamedTuple):
    """A checked mask of attention: its address, type and strides for kernels."""

    address: int = 0
    kind: int = 0  # a number of `formats.MASKS`; 0 without a mask
    sequence: int = 0  # byte strides of the four axes: sequence, head, row and column
    head: int = 0
    row: int = 0
    column: int = 0
    packed: int = 0  # row: 0 a token of its sequence, 1 or 2 a packed token; with 2 column j is position j


NO_MASK = MaskPlace()


class StepIndex(NamedTuple):
    """Checked index tensors: where each sequence's tokens are packed and which rows they have."""

    seqstarts: Array  # [B + 1], where new tokens of a sequence begin among all new tokens
    kvstarts: Array  # [B + 1], where contexts begin among all contexts
    start_pos: Array  # [B], the position of a sequence's first new token
    load_starts: Array  # [B], the first position of each sequence that a load returns
    table: Array  # row ids of pages, [B, pages] or a list (`table_starts`); or an array-like on a device
    page_size: int
    tokens: int  # new tokens of all sequences
    context: int  # tokens of all contexts
    rows: int  # number of rows that the cache must have
    limits: tuple[int, int] = (0, 0)  # max_seqlen, max_kvlen
    value_table: Array | None = None  # the table of values; None if keys and values share one
    table_starts: Array | None = None  # where sequences begin in a table that is a list; None otherwise


class Side(NamedTuple):
    """Addresses and byte strides of the rows of keys, or of values, and of their scales."""

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


class Context(NamedTuple):
    """Keys and values as kernels read them, also a layer of a cache: formats, sizes, and where each side is.

    A row's offset is its row id times the row stride. Row ids of successive rows of a page differ by `steps`,
    so pages may begin at any address. `elements` is the byte stride of elements, 0 if they are contiguous. If
    `as_loaded`, attention rounds decoded values to `data_dtype`, as a load does. Pairs are (keys, values).
    """

    data_dtype: str
    cache_format: str
    scale_format: str | None
    group: int
    heads: int
    dim: int
    value_dim: int
    sides: tuple[Side, Side]  # of keys, of values
    key_bytes: int
    value_bytes: int
    as_loaded: bool = True
    decoder: object = None  # code that reads rows if formats and strides do not suffice
    value_format: str | None = None  # the format of values; None if it is `cache_format`
    steps: tuple[int, int] = (1, 1)
    pages: tuple[int, int] = (0, 0)  # distances of pages in row ids, in pools
    elements: tuple[int, int] = (0, 0)
    capacity: tuple[int, int] = (0, 0)  # sequences and rows, in a cache
    heads_adjoin: bool = False  # whether the heads of a row are known to lie without gaps
