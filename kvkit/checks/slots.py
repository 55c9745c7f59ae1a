"""Check slots in compiled passes, which return the pieces to move, or the first broken rule as numbers.

A piece moves `count` tokens of a packed tensor, from `token` on, to `count` slots, from `slot` on, for all
heads or for one `head`. A piece with `mean` moves the mean of the tokens to one slot.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from kvkit.checks.sorting import ascending
from kvkit.runtime.jit import INDEX, Code, Integers, address, callback, helper
from kvkit.typed import Array

Verdict = tuple[int, int, int, int]  # broken rule, and three numbers for the message; or (FINE, pieces, 0, 0)

FINE, CAPACITY, TWICE, WINDOW, OFFSET, RANGE = range(6)
PLAIN, KVHEAD, ROPE, OMNI = range(4)
FIELDS = TOKEN, HEAD, SLOT, COUNT, MEAN = range(5)
PIECE, FOUND = len(FIELDS), 4  # numbers of a piece; numbers of a verdict


def plain_slots(slots: Array, capacity: int) -> tuple[Verdict, Array]:
    """Return (rule, token, slot, 0) for a slot of each token, and the pieces by ascending slot."""
    pieces, found = np.empty((len(slots), PIECE), np.int64), np.empty(FOUND, np.int64)
    pass_code(plain_pass).ctypes(address(found), address(slots), len(slots), capacity, address(pieces))
    rule, made, slot, ascends = found.tolist()
    if rule or ascends:
        return (rule, made, slot, 0), pieces
    given, pieces = pieces[:made], pieces[np.argsort(pieces[:made, SLOT])]
    if (pieces[1:, SLOT] < pieces[:-1, SLOT] + pieces[:-1, COUNT]).any():
        return stored_twice(given), given
    return (FINE, made, 0, 0), pieces


def stored_twice(pieces: Array) -> Verdict:
    """Return (TWICE, token, later token, slot) for the first slot that two pieces share."""
    order = np.argsort(pieces[:, SLOT], kind="stable")
    ends = pieces[order, SLOT] + pieces[order, COUNT]
    pair = order[(pieces[order[1:], SLOT] < ends[:-1]).argmax() :][:2]
    slot = pieces[pair[1], SLOT]
    first, second = sorted((pieces[pair, TOKEN] + slot - pieces[pair, SLOT]).tolist())
    return TWICE, first, second, int(slot)


def compressed_slots(
    mode: int, copies_empty: bool, slots: Array, wins: Array, offsets: Array, starts: Array, heads: int,
    capacity: int,
) -> tuple[Verdict, Array]:  # fmt: skip
    """Return (rule, entry, number, number) for a run of each sequence and head, and the pieces."""
    runs = len(slots)
    pieces, scratch = np.empty((3 * runs, PIECE), np.int64), np.empty(FOUND + (2 + PIECE) * runs, np.int64)
    spans = address(scratch) + 8 * FOUND
    pass_code(compressed_pass).ctypes(
        address(scratch), mode, copies_empty, address(slots), runs, address(wins), address(offsets),
        address(starts), heads, capacity, address(pieces), spans, spans + 8 * PIECE * runs,
    )  # fmt: skip
    rule, one, two, three = scratch[:FOUND].tolist()
    return (rule, one, two, three), pieces


def table_pieces(
    blocks: Array, lengths: Array, first_columns: Array, block_size: int, block_count: int
) -> Array:
    """Return the pieces of contexts in blocks; tokens whose block does not exist have none."""
    pieces = np.empty((int((-(-lengths // block_size)).sum()), PIECE), np.int64)
    made = np.empty(1, np.int64)
    pass_code(table_pass).ctypes(
        address(made), address(blocks), *blocks.shape, address(lengths), address(first_columns),
        block_size, block_count, address(pieces),
    )  # fmt: skip
    return pieces[: made[0]]


def plain_pass(found: Integers, slots: Integers, tokens: int, capacity: int, pieces: Integers) -> None:
    """Write the pieces of slots, and the verdict; its last number says whether the pieces' slots ascend."""
    made, last, ascends = 0, 0, True
    for token in range(tokens):
        slot = slots[token]
        if slot < 0:
            continue
        if slot >= capacity:
            put_verdict(found, CAPACITY, token, slot, 1)
            return
        at = (made - 1) * PIECE
        if last and token == pieces[at + TOKEN] + last and slot == pieces[at + SLOT] + last:
            last += 1
            pieces[at + COUNT] = last
            continue
        if made and slot < pieces[at + SLOT] + last:
            ascends = False
        made, last = add(pieces, made, token, 0, slot, 1, 0), 1
    put_verdict(found, FINE, made, 0, ascends)


def compressed_pass(
    found: Integers, mode: int, copies_empty: int, slots: Integers, entries: int, wins: Integers, offsets:
    Integers, starts: Integers, heads: int, capacity: int, pieces: Integers, spans: Integers, scratch:
    Integers,
) -> None:  # fmt: skip
    """Write the pieces of compressed runs, and the verdict."""
    made, runs = 0, 0
    for i in range(entries):
        slot, begin, head = slots[i], starts[i // heads], i % heads
        if slot < 0:
            continue
        length = starts[i // heads + 1] - begin
        window, offset = wins[i], -1
        if mode == KVHEAD:
            if window < 0 or window > length:
                put_verdict(found, WINDOW, i, window, length)
                return
        else:
            offset = offsets[i]
            if offset < -1:
                put_verdict(found, OFFSET, i, offset, length)
                return
            if offset >= 0 and (window < 0 or window > length):
                put_verdict(found, WINDOW, i, window, length)
                return
            if offset > length - window and offset >= 0:
                put_verdict(found, RANGE, i, offset, window)
                return
        first = made
        if mode == KVHEAD:
            kept = window if window or not copies_empty else length
            made = add(pieces, made, begin + length - kept, head, slot, kept, 0)
        elif offset == -1 or window == 0:
            made = add(pieces, made, begin, head, slot, length, 0)
        else:
            made = add(pieces, made, begin, head, slot, offset, 0)
            slot += offset
            if mode == ROPE:
                made = add(pieces, made, begin + offset, head, slot, window, 1)
                slot += 1
            made = add(pieces, made, begin + offset + window, head, slot, length - offset - window, 0)
        written = 0
        for p in range(first, made):
            written += 1 if pieces[p * PIECE + MEAN] else pieces[p * PIECE + COUNT]
        if written > capacity - slots[i]:
            put_verdict(found, CAPACITY, i, slots[i], written)
            return
        runs = add(spans, runs, i, 0, slots[i], written, 0)
    first, second, slot = overlapping(spans, runs, scratch, entries)
    if first >= 0:
        put_verdict(found, TWICE, spans[first * PIECE + TOKEN], spans[second * PIECE + TOKEN], slot)
    else:
        put_verdict(found, FINE, made, 0, 0)


@helper
def put_verdict(found: Integers, rule: int, one: int, two: int, three: int) -> None:
    """Write a verdict to `found`."""
    found[0], found[1], found[2], found[3] = rule, one, two, three


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
def overlapping(pieces: Integers, count: int, scratch: Integers, most: int) -> tuple[int, int, int]:
    """Return two pieces and a slot that they share, or three times -1. Pieces are sorted unless they ascend.

    `scratch` has two numbers for each of at most `most` pieces.
    """
    ascends = True
    for p in range(1, count):
        if slot_of(pieces, p) < slot_of(pieces, p - 1) + pieces[(p - 1) * PIECE + COUNT]:
            ascends = False
    if ascends:
        return -1, -1, -1
    ascending(pieces, SLOT, PIECE, count, scratch, 0, most)
    for k in range(1, count):
        first, second = scratch[k - 1], scratch[k]
        if slot_of(pieces, second) < slot_of(pieces, first) + pieces[first * PIECE + COUNT]:
            return min(first, second), max(first, second), slot_of(pieces, second)
    return -1, -1, -1


@helper
def slot_of(pieces: Integers, number: int) -> Any:
    """Return the first slot of piece `number`."""
    return pieces[number * PIECE + SLOT]


def table_pass(
    found: Integers, blocks: Integers, batch: int, columns: int, lengths: Integers, first_columns: Integers,
    block_size: int, block_count: int, pieces: Integers,
) -> None:  # fmt: skip
    """Write the pieces of contexts in blocks, and their number to `found`."""
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
    found[0] = made


INT = types.int64
SIGNATURES = {
    plain_pass: types.void(INDEX, INDEX, INT, INT, INDEX),
    compressed_pass: types.void(
        INDEX, INT, INT, INDEX, INT, INDEX, INDEX, INDEX, INT, INT, INDEX, INDEX, INDEX
    ),
    table_pass: types.void(INDEX, INDEX, INT, INT, INDEX, INDEX, INT, INT, INDEX),
}


@functools.cache
def pass_code(function: Callable[..., None]) -> Code:
    """Return the machine code of a pass."""
    return callback(function, SIGNATURES[function])
