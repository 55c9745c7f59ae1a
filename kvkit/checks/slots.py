"""Check slots in compiled passes, which return the pieces to move, or the first broken rule as numbers.

A piece moves `count` tokens of a packed tensor, from `token` on, to `count` slots, from `slot` on, for all
heads or for one `head`. A piece with `mean` moves the mean of the tokens to one slot. The slots [7, 8, -1, 3]
of tokens 0 to 3 are two pieces:

    token 3, head 0, slot 3, count 1, mean 0
    token 0, head 0, slot 7, count 2, mean 0
"""

from typing import Any

import numpy as np
from numba import types

from kvkit.checks.sorting import ascending
from kvkit.errors import KvkitError, argument_error
from kvkit.operators.compression import CompressType
from kvkit.runtime.jit import INDEX, Integers, address, compiled, helper
from kvkit.typed import Array

# The verdict of a pass is a rule and three numbers. An entry is an index into slot_mapping.
FINE = 0  # number of pieces; 0; whether the pieces' slots ascend
CAPACITY = 1  # entry, its slot, the rows to write from there on
TWICE = 2  # entry, another entry, a slot that both write
WINDOW = 3  # entry, its window, the length of its sequence
OFFSET = 4  # entry, its offset, 0
RANGE = 5  # entry, its offset, its window
FIELDS = TOKEN, HEAD, SLOT, COUNT, MEAN = range(5)
PIECE, VERDICT = len(FIELDS), 4  # numbers of a piece; numbers of a verdict
INT = types.int64
KVHEAD, KVHEAD_ROPE = int(CompressType.KVHEAD), int(CompressType.KVHEAD_ROPE)


def pieces_of_tokens(slots: Array, capacity: int) -> Array:
    """Return the pieces, by ascending slot, of tokens that have a slot each; raise if slots are wrong."""
    pieces, verdict = np.empty((len(slots), PIECE), np.int64), np.empty(VERDICT, np.int64)
    plain_pass.code.ctypes(address(verdict), address(slots), len(slots), capacity, address(pieces))
    rule, made, _, ascends = verdict.tolist()
    if rule:
        raise slot_error(verdict, capacity)
    pieces = pieces[:made]
    if ascends:
        return pieces
    in_order: Array = pieces[np.argsort(pieces[:, SLOT])]
    if (in_order[1:, SLOT] < in_order[:-1, SLOT] + in_order[:-1, COUNT]).any():
        order = np.argsort(pieces[:, SLOT], kind="stable")
        ends = pieces[order, SLOT] + pieces[order, COUNT]
        pair = order[(pieces[order[1:], SLOT] < ends[:-1]).argmax() :][:2]
        slot = pieces[pair[1], SLOT]
        tokens = sorted((pieces[pair, TOKEN] + slot - pieces[pair, SLOT]).tolist())
        raise slot_error(np.array([TWICE, *tokens, slot]), 0)
    return in_order


def compressed_pieces(
    mode: int, copies_empty: bool, slots: Array, wins: Array, offsets: Array, starts: Array, heads: int,
    capacity: int,
) -> Array:  # fmt: skip
    """Return the pieces of a run of rows for each sequence and head; raise if an entry is wrong."""
    runs = len(slots)
    pieces, verdict = np.empty((3 * runs, PIECE), np.int64), np.empty(VERDICT, np.int64)
    written, workspace = np.empty((runs, PIECE), np.int64), np.empty(2 * runs, np.int64)
    compressed_pass.code.ctypes(
        address(verdict), mode, copies_empty, address(slots), runs, address(wins), address(offsets),
        address(starts), heads, capacity, address(pieces), address(written), address(workspace),
    )  # fmt: skip
    rule, made, *_ = verdict.tolist()
    if rule:
        raise slot_error(verdict, capacity)
    return pieces[:made]


def slot_error(verdict: Array, capacity: int) -> KvkitError:
    """Return the error for the rule that a verdict says is broken, in a cache of `capacity` slots."""
    rule, entry, second, third = verdict.tolist()
    if rule == CAPACITY:
        rows = f"{third} rows from there on" if third > 1 else "that slot"
        wanted = f"{rows} within the {capacity} slots of the cache"
        return argument_error(f"slot_mapping[{entry}]", wanted, second)
    if rule == TWICE:
        got = f"slot {third} for entries {entry} and {second}"
        return argument_error("slot_mapping", "a slot for one row only", got)
    if rule == WINDOW:
        return argument_error(f"wins[{entry}]", f"0 to {third}, the length of its sequence", second)
    if rule == OFFSET:
        return argument_error(f"offset_index[{entry}]", "-1 or a token", second)
    wanted = f"{third} tokens from there on within the sequence"
    return argument_error(f"offset_index[{entry}]", wanted, second)


def table_pieces(
    blocks: Array, lengths: Array, first_columns: Array, block_size: int, block_count: int
) -> Array:
    """Return the pieces of contexts in blocks; tokens whose block does not exist have none."""
    pieces = np.empty((int((-(-lengths // block_size)).sum()), PIECE), np.int64)
    made = np.empty(1, np.int64)
    table_pass.code.ctypes(
        address(made), address(blocks), *blocks.shape, address(lengths), address(first_columns),
        block_size, block_count, address(pieces),
    )  # fmt: skip
    return pieces[: made[0]]


@compiled(types.void(INDEX, INDEX, INT, INT, INDEX))
def plain_pass(verdict: Integers, slots: Integers, tokens: int, capacity: int, pieces: Integers) -> None:
    """Write the pieces of tokens that have a slot each, and the verdict. A slot below 0 stores nothing."""
    made, count, ascends = 0, 0, True  # `count` is the length of the last piece
    for token in range(tokens):
        slot = slots[token]
        if slot < 0:
            continue
        if slot >= capacity:
            put_verdict(verdict, CAPACITY, token, slot, 1)
            return
        last = (made - 1) * PIECE
        if made and token == pieces[last + TOKEN] + count and slot == pieces[last + SLOT] + count:
            count += 1
            pieces[last + COUNT] = count
            continue
        if made and slot < pieces[last + SLOT] + count:
            ascends = False
        made, count = add(pieces, made, token, 0, slot, 1, 0), 1
    put_verdict(verdict, FINE, made, 0, ascends)


@compiled(types.void(INDEX, INT, INT, INDEX, INT, INDEX, INDEX, INDEX, INT, INT, INDEX, INDEX, INDEX))
def compressed_pass(
    verdict: Integers, mode: int, copies_empty: int, slots: Integers, entries: int, wins: Integers, offsets:
    Integers, starts: Integers, heads: int, capacity: int, pieces: Integers, written: Integers, workspace:
    Integers,
) -> None:  # fmt: skip
    """Write the pieces of compressed runs, and the verdict. A window of a sequence is stored, or replaced:

        KVHEAD         ..... [window]          stores the window; all if it is empty and `copies_empty`
        KVHEAD_ROPE    before [window] after   stores before, the mean of the window, after
        OMNI           before [window] after   stores before, after
                              ^ offset         all if the offset is -1 or the window empty

    `written` gets what each entry writes, as a piece whose token is the entry.
    """
    made, runs = 0, 0
    for i in range(entries):
        slot, begin, head = slots[i], starts[i // heads], i % heads
        if slot < 0:
            continue
        length = starts[i // heads + 1] - begin
        window, offset = wins[i], -1 if mode == KVHEAD else offsets[i]
        if offset < -1:
            put_verdict(verdict, OFFSET, i, offset, 0)
            return
        has_window = mode == KVHEAD or offset >= 0
        if has_window and (window < 0 or window > length):
            put_verdict(verdict, WINDOW, i, window, length)
            return
        if offset >= 0 and offset > length - window:
            put_verdict(verdict, RANGE, i, offset, window)
            return
        first = made
        if mode == KVHEAD:
            stored = window if window or not copies_empty else length
            made = add(pieces, made, begin + length - stored, head, slot, stored, 0)
        elif offset == -1 or window == 0:
            made = add(pieces, made, begin, head, slot, length, 0)
        else:
            made = add(pieces, made, begin, head, slot, offset, 0)
            slot += offset
            if mode == KVHEAD_ROPE:
                made = add(pieces, made, begin + offset, head, slot, window, 1)
                slot += 1
            made = add(pieces, made, begin + offset + window, head, slot, length - offset - window, 0)
        rows = 0
        for p in range(first, made):
            rows += 1 if pieces[p * PIECE + MEAN] else pieces[p * PIECE + COUNT]
        if rows > capacity - slots[i]:
            put_verdict(verdict, CAPACITY, i, slots[i], rows)
            return
        runs = add(written, runs, i, 0, slots[i], rows, 0)
    first, second, slot = overlapping(written, runs, workspace, entries)
    if first >= 0:
        put_verdict(verdict, TWICE, written[first * PIECE + TOKEN], written[second * PIECE + TOKEN], slot)
    else:
        put_verdict(verdict, FINE, made, 0, 0)


@helper
def put_verdict(verdict: Integers, rule: int, first: int, second: int, third: int) -> None:
    """Write a rule and its three numbers."""
    verdict[0], verdict[1], verdict[2], verdict[3] = rule, first, second, third


@helper
def add(pieces: Integers, made: int, token: int, head: int, slot: int, count: int, mean: int) -> int:
    """Add a piece to `made` pieces unless it is empty; return the new number of pieces."""
    if count == 0:
        return made
    at = made * PIECE
    pieces[at + TOKEN], pieces[at + HEAD], pieces[at + SLOT] = token, head, slot
    pieces[at + COUNT], pieces[at + MEAN] = count, mean
    return made + 1


@helper
def overlapping(pieces: Integers, count: int, workspace: Integers, most: int) -> tuple[int, int, int]:
    """Return two pieces and a slot that they share, or three times -1. Pieces are sorted unless they ascend.

    `workspace` has two numbers for each of at most `most` pieces.
    """
    ascends = True
    for p in range(1, count):
        if slot_of(pieces, p) < slot_of(pieces, p - 1) + pieces[(p - 1) * PIECE + COUNT]:
            ascends = False
    if ascends:
        return -1, -1, -1
    ascending(pieces, SLOT, PIECE, count, workspace, 0, most)
    for k in range(1, count):
        first, second = workspace[k - 1], workspace[k]
        if slot_of(pieces, second) < slot_of(pieces, first) + pieces[first * PIECE + COUNT]:
            return min(first, second), max(first, second), slot_of(pieces, second)
    return -1, -1, -1


@helper
def slot_of(pieces: Integers, number: int) -> Any:
    """Return the first slot of piece `number`."""
    return pieces[number * PIECE + SLOT]


@compiled(types.void(INDEX, INDEX, INT, INT, INDEX, INDEX, INT, INT, INDEX))
def table_pass(
    count_of_pieces: Integers, blocks: Integers, batch: int, columns: int, lengths: Integers, first_columns:
    Integers, block_size: int, block_count: int, pieces: Integers,
) -> None:  # fmt: skip
    """Write the pieces of contexts in blocks, and their number."""
    made, token = 0, np.int64(0)
    for b in range(batch):
        column, end = first_columns[b], token + lengths[b]
        while token < end:
            count = min(block_size, end - token)
            if column < columns and 0 <= blocks[b * columns + column] < block_count:
                slot = blocks[b * columns + column] * block_size
                made = add(pieces, made, token, 0, slot, count, 0)
            column += 1
            token += count
    count_of_pieces[0] = made
