"""Build the index tensors of Ascend operators from sequence lengths and compression windows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from kvkit.checks.ascend.reshape import EMPTY_WINDOWS, compression
from kvkit.checks.ascend.tensors import INT32_MAX
from kvkit.checks.index_tensors import index
from kvkit.checks.values import finite_number, integer, text
from kvkit.errors import argument_error, describe, hints_keywords
from kvkit.operators.compression import CompressType
from kvkit.typed import Array, Pair


@dataclass(frozen=True, slots=True)
class Slots:
    """Holds index tensors that place sequences in a cache in blocks.

    Attributes
    ----------
    slot_mapping : ndarray of int32, or int64 if slots need it
        For `reshape_and_cache`: a slot for each token; for a compressed cache, the first slot of each
        (sequence, head).
    block_tables : ndarray of int32, shape [entries, M]
        The blocks of each entry, -1 after the last block. An entry is a sequence, or a (sequence, head) of a
        compressed cache.
    context_lens : ndarray of int32, shape [entries]
        The number of rows of each entry.
    num_blocks : int
        Blocks that the cache must have at least: the last allocated block + 1.
    mean_slots : ndarray of int32 or int64, shape [entries]
        The slot of each entry's row that is a mean of tokens; -1 for entries without a mean.
    mean_counts : ndarray of int32, shape [entries]
        How many tokens each mean averages; 0 for entries without a mean.
    block_size : int
        Rows in a block.
    """

    slot_mapping: np.ndarray
    block_tables: np.ndarray
    context_lens: np.ndarray
    num_blocks: int
    mean_slots: np.ndarray
    mean_counts: np.ndarray
    block_size: int

    def razor_offset(self, softmax_scale: float, num_blocks: int | None = None) -> Array:
        """Return `paged_attention`'s razor_offset: ln(N) / softmax_scale for means of N tokens, else 0.

        With it a mean counts as the N tokens that it averages. The array is float32 [num_blocks, block_size];
        `num_blocks` is the number of blocks in the cache.
        """
        scale = finite_number("softmax_scale", softmax_scale)
        if scale == 0:
            raise argument_error("softmax_scale", "a number other than 0", scale)
        least = self.num_blocks
        blocks = least if num_blocks is None else integer("num_blocks", num_blocks, least, INT32_MAX)
        offset = np.zeros(blocks * self.block_size, np.float32)
        has_mean = self.mean_slots >= 0
        offset[self.mean_slots[has_mean]] = np.log(self.mean_counts[has_mean]) / scale
        return offset.reshape(blocks, self.block_size)

    def next_slots(self, step: int = 0) -> Array:
        """Return the slot for each entry's next token, or for the token `step` tokens after it."""
        positions = self.context_lens + np.int64(integer("step", step, 0, INT32_MAX))
        padded = np.pad(self.block_tables, ((0, 0), (0, 1)), constant_values=-1)
        column = np.minimum(positions // self.block_size, self.block_tables.shape[1])
        block = padded[np.arange(len(positions)), column].astype(np.int64)
        if len(block) and block.min() < 0:
            i = int(block.argmin())
            wanted = f"a position in the blocks of entry {i} (see headroom)"
            raise argument_error("step", wanted, f"position {positions[i]}")
        return as_indices(block * self.block_size + positions % self.block_size)


@hints_keywords
def slots(seq_lens: ArrayLike, *, block_size: int = 128, headroom: int = 0, first_block: int = 0) -> Slots:
    """Assign blocks to new sequences and return their slots, tables and lengths.

    Parameters
    ----------
    seq_lens : array of int, shape [B]
        The number of tokens of each sequence.
    block_size : int
        Rows in a block.
    headroom : int
        For how many more rows each sequence gets blocks.
    first_block : int
        The first free block. All later blocks must be free too.

    Returns
    -------
    Slots
        For `reshape_and_cache` without compression, and for `paged_attention`.

    Raises
    ------
    KvkitError
        If an argument is wrong.

    Examples
    --------
    >>> import kvkit
    >>> where = kvkit.ascend.slots([3, 1], block_size=2)
    >>> where.slot_mapping, where.block_tables
    (array([0, 1, 2, 4], dtype=int32), array([[ 0,  1],
           [ 2, -1]], dtype=int32))
    """
    lengths = checked_lengths(seq_lens)
    size = integer("block_size", block_size, 1, INT32_MAX)
    tables, num_blocks = assign_blocks(lengths, size, headroom, first_block)
    sequence = np.repeat(np.arange(len(lengths)), lengths)  # of each token
    position = np.arange(len(sequence)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    mapping = tables[sequence, position // size].astype(np.int64) * size + position % size
    no_means = np.full(len(lengths), -1, np.int32)
    no_counts = np.zeros_like(no_means)
    return Slots(as_indices(mapping), tables, as_indices(lengths), num_blocks, no_means, no_counts, size)


@hints_keywords
def compressed_slots(
    seq_lens: ArrayLike,
    num_head: int,
    wins: ArrayLike,
    offset_index: ArrayLike | None = None,
    *,
    compress_type: CompressType | int | str,
    block_size: int = 128,
    headroom: int = 0,
    first_block: int = 0,
    empty_window: Literal["copy", "skip"] = "copy",
) -> Slots:
    """Assign blocks to new sequences of a compressed cache, where each head stores its own rows.

    Parameters
    ----------
    seq_lens : array of int, shape [B]
        The number of tokens of each sequence.
    num_head : int
        The number of key heads.
    wins, offset_index : array of int, shape [B * num_head]
        As in `reshape_and_cache`.
    compress_type : CompressType
        KVHEAD, KVHEAD_ROPE or OMNI.
    block_size, headroom, first_block : int
        As in `slots`; `headroom` is for each head.
    empty_window : str
        As in `reshape_and_cache`.

    Returns
    -------
    Slots
        For `reshape_and_cache` with these windows, and for `paged_attention`.

    Raises
    ------
    KvkitError
        If an argument is wrong.

    Examples
    --------
    >>> import kvkit
    >>> where = kvkit.ascend.compressed_slots([10], 2, [5, 0], [3, -1], compress_type=2, block_size=4)
    >>> where.slot_mapping, where.context_lens, where.mean_slots
    (array([0, 8], dtype=int32), array([ 6, 10], dtype=int32), array([ 3, -1], dtype=int32))
    """
    mode = compression(compress_type)
    if mode is CompressType.UNDEFINED:
        raise argument_error("compress_type", "KVHEAD, KVHEAD_ROPE or OMNI (see `slots`)", mode.name)
    text("empty_window", empty_window, EMPTY_WINDOWS)
    heads = integer("num_head", num_head, 1, INT32_MAX)
    lengths = np.repeat(checked_lengths(seq_lens), heads)
    windows = index("wins", wins, length=len(lengths))
    if (offset_index is None) != (mode is CompressType.KVHEAD):
        wanted = "None" if mode is CompressType.KVHEAD else "an array"
        raise argument_error("offset_index", f"{wanted} for {mode.name}", describe(offset_index))
    offsets = np.full_like(windows, -1)
    if offset_index is not None:
        offsets = index("offset_index", offset_index, length=len(lengths))
    check_windows(mode, lengths, windows, offsets)
    loses_window = (offsets >= 0) & (windows > 0)
    has_mean = loses_window & (mode is CompressType.KVHEAD_ROPE)  # one row in place of the window
    if mode is CompressType.KVHEAD:
        rows = np.where(windows == 0, lengths if empty_window == "copy" else 0, windows)
    else:
        rows = lengths - np.where(loses_window, windows, 0) + has_mean
    size = integer("block_size", block_size, 1, INT32_MAX)
    tables, num_blocks = assign_blocks(rows, size, headroom, first_block)
    first_blocks = tables[:, 0].astype(np.int64) if tables.shape[1] else np.zeros(len(rows), np.int64)
    begins = np.where(first_blocks < 0, 0, first_blocks * size)  # slot 0 for entries that store nothing
    means, counts = np.where(has_mean, begins + offsets, -1), np.where(has_mean, windows, 0)
    begins, rows, means, counts = map(as_indices, (begins, rows, means, counts))
    return Slots(begins, tables, rows, num_blocks, means, counts, size)


@hints_keywords
def razor_windows(
    seq_lens: ArrayLike,
    num_head: int,
    retrieval_heads: Iterable[int],
    *,
    sinks: int = 4,
    recent: int = 4000,
    fraction: int = 5,
) -> Pair:
    """Return the tokens that RazorAttention averages: none for retrieval heads, the middle for other heads.

    Parameters
    ----------
    seq_lens : array of int, shape [B]
        The number of tokens of each sequence.
    num_head : int
        The number of key heads.
    retrieval_heads : sequence of int
        Heads that keep every token.
    sinks : int
        How many first tokens the other heads keep.
    recent, fraction : int
        The other heads keep max(recent, seq_len // fraction) recent tokens.

    Returns
    -------
    wins, offset_index : ndarray of int32, shape [B * num_head]
        For KVHEAD_ROPE: how many tokens each head averages into one, and the first of them, -1 for none.

    Raises
    ------
    KvkitError
        If an argument is wrong.

    Notes
    -----
    The defaults are those of RazorAttention (Tang et al., 2024): base length 4,000, fraction 5.

    Examples
    --------
    >>> import kvkit
    >>> kvkit.ascend.razor_windows([100], 3, [1], sinks=4, recent=16)
    (array([76,  0, 76], dtype=int32), array([ 4, -1,  4], dtype=int32))
    """
    heads = integer("num_head", num_head, 1, INT32_MAX)
    lengths = np.repeat(checked_lengths(seq_lens), heads)
    sinks, recent = integer("sinks", sinks, 0, INT32_MAX), integer("recent", recent, 0, INT32_MAX)
    fraction = integer("fraction", fraction, 1, INT32_MAX)
    is_retrieval = np.zeros(heads, bool)
    for head in retrieval_heads:
        is_retrieval[integer("retrieval_heads", head, 0, heads - 1)] = True
    middle = lengths - sinks - np.maximum(recent, lengths // fraction)
    has_mean = (middle > 1) & ~np.tile(is_retrieval, len(lengths) // heads)
    return as_indices(np.where(has_mean, middle, 0)), as_indices(np.where(has_mean, sinks, -1))


def checked_lengths(seq_lens: ArrayLike) -> Array:
    """Check the lengths of sequences, at least 1 each; return them as an array."""
    lengths = index("seq_lens", seq_lens)
    if len(lengths) and lengths.min() < 1:
        raise argument_error("seq_lens", "at least 1 token each", lengths.min())
    if len(lengths) and lengths.max() > INT32_MAX:
        raise argument_error("seq_lens", f"at most {INT32_MAX} tokens each", lengths.max())
    return lengths


def check_windows(mode: CompressType, lengths: Array, wins: Array, offsets: Array) -> None:
    """Raise if a window is not in its sequence, as `reshape_and_cache` would."""
    has_window = np.ones_like(wins, bool) if mode is CompressType.KVHEAD else offsets != -1
    wrong_windows = has_window & ((wins < 0) | (wins > lengths))
    if wrong_windows.any():
        i = int(wrong_windows.argmax())
        raise argument_error(f"wins[{i}]", f"0 to {lengths[i]}, the length of its sequence", wins[i])
    wrong_offsets = (offsets < -1) | (has_window & (offsets > lengths - wins))
    if wrong_offsets.any():
        i = int(wrong_offsets.argmax())
        wanted = f"-1, or an offset with offset + {wins[i]} <= {lengths[i]}"
        raise argument_error(f"offset_index[{i}]", wanted, offsets[i])


def assign_blocks(
    rows: Array, block_size: int, headroom: SupportsIndex, first_block: SupportsIndex
) -> tuple[Array, int]:
    """Give each entry consecutive blocks; return (block tables, last block + 1)."""
    need = -(-(rows + integer("headroom", headroom, 0, INT32_MAX)) // block_size)  # blocks of each entry
    first = integer("first_block", first_block, 0, INT32_MAX)
    begins = first + np.cumsum(need) - need
    column = np.arange(need.max(initial=0))
    tables = np.where(column < need[:, None], begins[:, None] + column, -1)
    return as_indices(tables), int(begins[-1] + need[-1]) if len(need) else first


def as_indices(array: Array) -> Array:
    """Return an array as int32, which Ascend takes, or as int64 if int32 is too small."""
    fits = array.size == 0 or int(array.max()) < 2**31
    return array.astype(np.int32 if fits else np.int64)
