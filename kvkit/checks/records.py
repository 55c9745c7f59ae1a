"""What checks make of the arguments of a call, and kernels read."""

from typing import NamedTuple

import numpy as np

NO_MASK = (0, 0, 0, 0, 0, 0, 0)


class Steps(NamedTuple):
    """Checked index tensors: where each sequence's tokens are packed and which rows they have."""

    seqstarts: np.ndarray
    kvstarts: np.ndarray
    start_pos: np.ndarray
    zeros: np.ndarray
    table: np.ndarray  # or something else of its shape that numpy can read
    page_size: int
    tokens: int
    context: int
    rows: int  # that the cache must have
    limits: tuple[int, int] = (0, 0)
    value_table: np.ndarray | None = None  # where values have other rows than keys


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


class Cache(NamedTuple):
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
