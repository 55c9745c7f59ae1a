"""Convert page tables between every engine's convention and one form: first row of each page, and lengths.

Rows are counted through all blocks: token n of block b is row ``b * page_size + n``. Only active entries are
read: entries after a sequence's last page are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvkit.errors import argument_error, describe
from kvkit.interop import integers

Index = NDArray[np.int64]
MAX_ROW = 2**62  # the sum of two rows fits int64


@dataclass(frozen=True, eq=False)
class BlockTable:
    """Holds the page table of sequences and their lengths, in one form for all conventions.

    Token t of sequence b is in row ``table[b, t // page_size] + t % page_size``, as for operators
    in ``cache_mode`` 1.

    Attributes
    ----------
    table : ndarray of int64, shape [sequences, pages]
        The first row of each page; -1 after a sequence's last one.
    lengths : ndarray of int64, shape [sequences]
        Tokens of each sequence.
    page_size : int
        Tokens of a page.

    Examples
    --------
    >>> from kvkit.layouts import tables
    >>> pages = tables.from_blocks([[7, 2], [4, -1]], [5, 3], page_size=4)
    >>> pages.table.tolist()
    [[28, 8], [16, -1]]
    >>> pages.rows().tolist()
    [28, 29, 30, 31, 8, 16, 17, 18]
    """

    table: Index
    lengths: Index
    page_size: int

    def starts(self) -> Index:
        """Return where each sequence begins in packed tokens, then the number of tokens: [sequences + 1]."""
        return starts_of(self.lengths)

    def rows(self) -> Index:
        """Return the row of every token, sequence after sequence."""
        sequence, position = tokens_of(self.lengths)
        return self.table[sequence, position // self.page_size] + position % self.page_size

    def __eq__(self, other: object) -> bool:
        """Return whether page sizes are equal and all tokens have equal rows."""
        if not isinstance(other, BlockTable):
            return NotImplemented
        return (
            self.page_size == other.page_size
            and np.array_equal(self.lengths, other.lengths)
            and np.array_equal(self.rows(), other.rows())
        )


def starts_of(lengths: Index) -> Index:
    """Return where each sequence begins in a packed tensor, then the tensor's length."""
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def tokens_of(lengths: Index) -> tuple[Index, Index]:
    """Return (sequence, position) of every token."""
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    return sequence, np.arange(len(sequence)) - starts_of(lengths)[sequence]


def index_array(name: str, value: Any, ndim: int = 1, low: int | None = None) -> Index:
    """Return an index tensor as int64; raise if it has other axes or an entry below `low`."""
    array = integers(name, value, ndim).astype(np.int64)
    if low is not None and array.size and array.min() < low:
        at = int(array.argmin())
        raise argument_error(f"{name}[{at}]", f"at least {low}", int(array.flat[at]))
    return array


def positive_size(name: str, value: Any) -> int:
    """Return a positive integer; raise for other values."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise argument_error(name, "a positive integer", describe(value))
    return int(value)


def check_batch(name: str, array: NDArray[Any], batch: int) -> None:
    """Check that an array has an entry for each sequence."""
    if len(array) != batch:
        raise argument_error(name, f"{batch} entries, one a sequence", len(array))


def from_entries(name: str, entries: Index, lengths: Index, page_size: int, unit: int) -> BlockTable:
    """Return the table for entries [sequences, any]; entry x stands for row x * `unit`."""
    used = -(-lengths // page_size)
    if used.size and used.max() > entries.shape[1]:
        b = int(used.argmax())
        wanted = f"{used[b]} entries for the {lengths[b]} tokens of sequence {b}"
        raise argument_error(name, wanted, entries.shape[1])
    active = np.arange(entries.shape[1]) < used[:, None]  # entries before the end of a sequence
    if (bad := active & ((entries < 0) | (entries > MAX_ROW // unit))).any():
        b, page = (int(at[0]) for at in bad.nonzero())
        expected = f"at least 0, as sequence {b} has {lengths[b]} tokens"
        raise argument_error(f"{name}[{b}, {page}]", expected, int(entries[b, page]))
    return BlockTable(
        np.where(active, entries * unit, -1)[:, : max(used.max(initial=0), 1)], lengths, page_size
    )


def from_blocks(block_tables: ArrayLike, lengths: ArrayLike, page_size: int) -> BlockTable:
    """Convert a block table and lengths, as vLLM, flash-attn, Ascend's operators and TPUs use them.

    Parameters
    ----------
    block_tables : ndarray of int, shape [sequences, any]
        Numbers of blocks. Entries after a sequence's last block are ignored (-1, 0, stale numbers).
    lengths : ndarray of int, shape [sequences]
        Tokens of each sequence.
    page_size : int
        Tokens of a block.

    Examples
    --------
    >>> from kvkit.layouts import tables
    >>> tables.from_blocks([[3, 1, 99]], [17], 16).rows()[-2:].tolist()
    [63, 16]
    """
    page_size = positive_size("page_size", page_size)
    numbers, lengths = index_array("block_tables", block_tables, 2), index_array("lengths", lengths, low=0)
    check_batch("block_tables", numbers, len(lengths))
    return from_entries("block_tables", numbers, lengths, page_size, page_size)


def to_blocks(pages: BlockTable, padding: int = -1) -> tuple[Index, Index]:
    """Return (block table, lengths). After a sequence's last block, the table has `padding`.

    The first row of each page must be a multiple of the page size.

    Examples
    --------
    >>> from kvkit.layouts import tables
    >>> table, lengths = tables.to_blocks(tables.packed([5, 3], page_size=4), padding=0)
    >>> table.tolist(), lengths.tolist()
    ([[0, 1], [2, 0]], [5, 3])
    """
    active = pages.table >= 0
    misaligned = active & (pages.table % pages.page_size != 0)
    if misaligned.any():
        b, page = (int(at[0]) for at in misaligned.nonzero())
        wanted = f"pages that begin at multiples of {pages.page_size} rows, as blocks do"
        raise argument_error("pages", wanted, f"row {pages.table[b, page]} for page {page} of sequence {b}")
    return np.where(active, pages.table // pages.page_size, padding), pages.lengths.copy()


def from_csr(indptr: ArrayLike, indices: ArrayLike, last_page_len: ArrayLike, page_size: int) -> BlockTable:
    """Convert FlashInfer's page table, which is in compressed sparse rows (CSR).

    Parameters
    ----------
    indptr : ndarray of int, shape [sequences + 1]
        Where the pages of each sequence begin in `indices`.
    indices : ndarray of int, shape [indptr[-1] or more]
        Numbers of pages.
    last_page_len : ndarray of int, shape [sequences]
        Tokens of each sequence's last page, from 1 to `page_size`; ignored if it has no page.
    page_size : int
        Tokens of a page.

    Examples
    --------
    >>> from kvkit.layouts import tables
    >>> pages = tables.from_csr([0, 2, 3], [7, 2, 4], [1, 3], page_size=4)
    >>> pages == tables.from_blocks([[7, 2], [4, -1]], [5, 3], page_size=4)
    True
    """
    page_size = positive_size("page_size", page_size)
    indptr, indices = index_array("indptr", indptr, low=0), index_array("indices", indices)
    last = index_array("last_page_len", last_page_len)
    if not len(indptr) or indptr[0] != 0:
        wanted = "to begin with 0"
        raise argument_error("indptr", wanted, describe(indptr) if not len(indptr) else int(indptr[0]))
    used = np.diff(indptr)
    if (used < 0).any():
        raise argument_error("indptr", "never to decrease", int(indptr[used.argmin() + 1]))
    if indptr[-1] > len(indices):
        raise argument_error("indices", f"{indptr[-1]} entries, where indptr ends", len(indices))
    check_batch("last_page_len", last, len(used))
    wrong = (used > 0) & ((last < 1) | (last > page_size))
    if wrong.any():
        b = int(wrong.argmax())
        raise argument_error(f"last_page_len[{b}]", f"from 1 to {page_size}", int(last[b]))
    lengths = np.where(used > 0, (used - 1) * page_size + last, 0)
    sequence, page = tokens_of(used)
    table = np.full((len(used), max(used.max(initial=0), 1)), -1, np.int64)
    table[sequence, page] = indices[: indptr[-1]]
    return from_entries("indices", table, lengths, page_size, page_size)


def from_slots(slots: ArrayLike, lengths: ArrayLike) -> BlockTable:
    """Convert SGLang's ``req_to_token``, a slot for every token, into pages of one token.

    Parameters
    ----------
    slots : ndarray of int, shape [sequences, any]
        The row of each token. Entries after a sequence's last token are ignored.
    lengths : ndarray of int, shape [sequences]
        Tokens of each sequence.

    Examples
    --------
    >>> from kvkit.layouts import tables
    >>> tables.from_slots([[28, 29, 8], [16, 0, 0]], [3, 1]).rows().tolist()
    [28, 29, 8, 16]
    """
    numbers, lengths = index_array("slots", slots, 2), index_array("lengths", lengths, low=0)
    check_batch("slots", numbers, len(lengths))
    return from_entries("slots", numbers, lengths, 1, 1)


def to_slots(pages: BlockTable, padding: int = 0) -> Index:
    """Return a slot for every token, [sequences, longest], filled with `padding` after the last.

    Examples
    --------
    >>> from kvkit.layouts import tables
    >>> tables.to_slots(tables.from_blocks([[7, 2], [4, -1]], [5, 3], page_size=4)).tolist()
    [[28, 29, 30, 31, 8], [16, 17, 18, 0, 0]]
    """
    slots = np.full((len(pages.lengths), int(pages.lengths.max(initial=0))), padding, np.int64)
    slots[tokens_of(pages.lengths)] = pages.rows()
    return slots


def slot_mapping(pages: BlockTable, new: ArrayLike) -> Index:
    """Return the slots of the last ``new[b]`` tokens of each sequence b, packed: the new tokens of a step.

    Examples
    --------
    >>> from kvkit.layouts import tables
    >>> tables.slot_mapping(tables.from_blocks([[7, 2], [4, -1]], [5, 3], page_size=4), [2, 1]).tolist()
    [31, 8, 18]
    """
    count = index_array("new", new, low=0)
    check_batch("new", count, len(pages.lengths))
    if (over := count > pages.lengths).any():
        b = int(over.argmax())
        wanted = f"at most the {pages.lengths[b]} tokens of the sequence"
        raise argument_error(f"new[{b}]", wanted, int(count[b]))
    sequence, position = tokens_of(count)
    position += (pages.lengths - count)[sequence]
    return pages.table[sequence, position // pages.page_size] + position % pages.page_size


def from_tokens(
    slots: ArrayLike,
    sequences: ArrayLike,
    positions: ArrayLike,
    batch: int | None = None,
    *,
    gaps: bool = False,
) -> BlockTable:
    """Convert the slot mappings of all steps so far: slot, sequence and position of each token, in any order.

    Parameters
    ----------
    slots : ndarray of int, shape [tokens]
        The row of each token; below 0 for padding, which is skipped.
    sequences, positions : ndarray of int, shape [tokens]
        The sequence of each token, and its position in the sequence. Positions of a sequence may begin after
        0, as in a sliding window; the table begins with the first token that is stored.
    batch : int, optional
        The number of sequences, if the last ones may have no tokens.
    gaps : bool
        Whether positions may have gaps (removed tokens) and repeat (tokens of an image). Tokens of equal
        position keep their order.

    Returns
    -------
    BlockTable
        A table with pages of one token.

    Examples
    --------
    >>> from kvkit.layouts import tables
    >>> tables.from_tokens([9, 4, -1, 5], [0, 1, 1, 0], [0, 0, 1, 1]).rows().tolist()
    [9, 5, 4]
    """
    rows, owners, at = (
        index_array(name, value)
        for name, value in (("slots", slots), ("sequences", sequences), ("positions", positions))
    )
    for name, array in (("sequences", owners), ("positions", at)):
        if len(array) != len(rows):
            raise argument_error(name, f"{len(rows)} entries, one a slot", len(array))
    stored = rows >= 0
    rows, owners, at = rows[stored], owners[stored], at[stored]
    least = owners.max(initial=-1) + 1
    count = int(least) if batch is None else positive_size("batch", batch)
    if owners.size and (owners.min() < 0 or least > count):
        wanted = f"numbers from 0 to {count - 1}"
        raise argument_error("sequences", wanted, int(owners.min() if owners.min() < 0 else least - 1))
    order = np.lexsort((at, owners))
    rows, owners, at = rows[order], owners[order], at[order]
    follows = (np.diff(at) == 1) | (np.diff(owners) != 0)
    if not gaps and not follows.all():
        t = int(follows.argmin())
        wanted = f"{at[t] + 1} after {at[t]} in sequence {owners[t]}"
        raise argument_error("positions", wanted, int(at[t + 1]))
    lengths = np.bincount(owners, minlength=count).astype(np.int64)
    table = np.full((count, max(lengths.max(initial=0), 1)), -1, np.int64)
    table[tokens_of(lengths)] = rows
    return BlockTable(table, lengths, 1)


def to_tokens(pages: BlockTable) -> tuple[Index, Index, Index]:
    """Return (slots, sequences, positions) of every token, sequence after sequence.

    Examples
    --------
    >>> from kvkit.layouts import tables
    >>> [each.tolist() for each in tables.to_tokens(tables.packed([2, 1], page_size=4))]
    [[0, 1, 4], [0, 0, 1], [0, 1, 0]]
    """
    return (pages.rows(), *tokens_of(pages.lengths))


def from_cells(positions: ArrayLike, sequences: Any, batch: int | None = None) -> BlockTable:
    """Convert llama.cpp's cells, each with a position and sequence ids. Positions may have gaps and repeat.

    Parameters
    ----------
    positions : ndarray of int, shape [cells]
        The position of each cell's token; below 0 where a cell is empty.
    sequences : sequence of collections of int, or ndarray of int, shape [cells]
        The sequences that each cell's token belongs to; several sequences may share a token.
    batch : int, optional
        The number of sequences, if the last ones may have no cells.

    Returns
    -------
    BlockTable
        A table with pages of one token; the row of a token is its cell.

    Examples
    --------
    >>> from kvkit.layouts import tables
    >>> tables.from_cells([0, 1, -1, 2, 2], [{0, 1}, {0, 1}, (), {1}, {0}]).table.tolist()
    [[0, 1, 4], [0, 1, 3]]
    """
    at = index_array("positions", positions)
    if len(sequences) != len(at):
        raise argument_error("sequences", f"{len(at)} entries, one a cell", len(sequences))
    if isinstance(sequences, np.ndarray):
        owners, counts = index_array("sequences", sequences), np.ones(len(at), np.int64)
    else:
        counts = np.array([len(ids) for ids in sequences], np.int64)
        owners = index_array("sequences", [number for ids in sequences for number in ids])
    cells = np.repeat(np.arange(len(at)), counts)  # the cell of each owner
    filled = at[cells] >= 0
    cells, owners = cells[filled], owners[filled]
    return from_tokens(cells, owners, at[cells], batch, gaps=True)


def from_batch(
    lengths: ArrayLike,
    capacity: int,
    *,
    batch_index: ArrayLike | None = None,
    left_padding: ArrayLike | None = None,
) -> BlockTable:
    """Convert a batch whose sequences each have `capacity` rows, as in Transformers, MLX and flash-attn.

    Parameters
    ----------
    lengths : ndarray of int, shape [sequences]
        Tokens of each sequence, without padding.
    capacity : int
        Rows of each sequence's part of the cache.
    batch_index : ndarray of int, shape [sequences], optional
        The part of the cache that each sequence has (flash-attn's ``cache_batch_idx``); b for sequence b if
        left out.
    left_padding : ndarray of int, shape [sequences], optional
        Unused rows of each part before its first token (``cache_leftpad``).

    Returns
    -------
    BlockTable
        A table with one page for each sequence.

    Examples
    --------
    >>> from kvkit.layouts import tables
    >>> tables.from_batch([3, 2], 10, batch_index=[1, 0], left_padding=[7, 8]).rows().tolist()
    [17, 18, 19, 8, 9]
    """
    capacity, lengths = positive_size("capacity", capacity), index_array("lengths", lengths, low=0)
    part = np.arange(len(lengths)) if batch_index is None else index_array("batch_index", batch_index)
    pad = np.zeros_like(lengths) if left_padding is None else index_array("left_padding", left_padding)
    check_batch("batch_index", part, len(lengths))
    check_batch("left_padding", pad, len(lengths))
    active = lengths > 0
    for name, array in (("batch_index", part), ("left_padding", pad)):
        if (bad := active & ((array < 0) | (array > MAX_ROW // capacity))).any():
            b = int(bad.argmax())
            raise argument_error(f"{name}[{b}]", f"0 to {MAX_ROW // capacity}", int(array[b]))
    over = active & (lengths > capacity - pad)
    if over.any():
        b = int(over.argmax())
        wanted = f"at most {capacity - pad[b]}, in {capacity} rows after {pad[b]}"
        raise argument_error(f"lengths[{b}]", wanted, int(lengths[b]))
    return BlockTable(np.where(active, part * capacity + pad, -1)[:, None], lengths, capacity)


def packed(lengths: ArrayLike, page_size: int) -> BlockTable:
    """Return a table for sequences of these lengths, whose pages lie one after the other from row 0.

    Examples
    --------
    >>> from kvkit.layouts import tables
    >>> tables.packed([5, 3], page_size=4).table.tolist()
    [[0, 4], [8, -1]]
    """
    page_size, lengths = positive_size("page_size", page_size), index_array("lengths", lengths, low=0)
    used = -(-lengths // page_size)
    columns = np.arange(max(used.max(initial=0), 1))
    numbers = starts_of(used)[:-1, None] + columns
    return BlockTable(np.where(columns < used[:, None], numbers * page_size, -1), lengths, page_size)
