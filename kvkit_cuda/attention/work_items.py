"""Work items of attention: the query rows that a CUDA block takes, and the positions of their context.

A row is one query head of one query token. A tile is some rows of a sequence that share a key head. A work
item is a tile over one split of the context that its rows see; blocks take work items in the order
[sequences, key heads, tiles, splits]. Decode has one tile a sequence: the host places its work items.
"""

from typing import Any, NamedTuple

import numpy as np

from kvkit.formulas import numeric
from kvkit.formulas.index import visible_range
from kvkit.runtime.jit import shared
from kvkit_cuda.attention.tiles import quotient_by
from kvkit_cuda.calls.tables import ITEM, SEQUENCE_BITS
from kvkit_cuda.copy.transfer import sequence_of
from kvkit_cuda.device_runtime import device, memory, ptx

int32, fresh_register, load_word = device.int32, ptx.fresh_register, memory.load(8, 8)


class StepTables(NamedTuple):
    """The int64 arrays of a step that kernels of attention read."""

    seqstarts: Any  # [B + 1]: packed query tokens before each sequence
    kvstarts: Any  # [B + 1]: context tokens before each sequence
    table: Any  # [B + pages]: index of each sequence's first page in it, then rows where pages begin
    items: Any  # [B + 1]: work items before each sequence
    slots: Any  # [B + 1]: slots of splits before each sequence; then one more number, the tokens of a split
    slopes: Any  # [heads], or [sequences, heads] if given: ALiBi slopes as bits of float32


class WorkItem(NamedTuple):
    """A tile of rows that share a key head, over one split of the context."""

    b: Any  # sequence
    pages: Any  # index of its first page in the table
    head: Any  # of keys
    first: Any  # first row of the tile
    last: Any  # last row of the sequence
    split: Any
    splits: Any  # of the context
    slot: Any  # the slot of the result until splits are merged; -1 for a single split
    start: Any  # packed query tokens before the sequence


class Row(NamedTuple):
    """A query head of a query token of a sequence."""

    b: Any
    token: Any
    query: Any  # the number of the query head


class Range(NamedTuple):
    """Positions begin .. end - 1."""

    begin: Any
    end: Any


def item_loader(narrow=True):
    """Return f(params, step, block, rows) -> the work item of a block; tiles have `rows` rows.

    With `narrow`, fields have 32 bits.
    """
    number = int32 if narrow else int

    def load_item(params, step, block, rows):
        b = number(sequence_of(step.items, block))
        count = (step.seqstarts[b + 1] - step.seqstarts[b]) * params.group  # rows of a key head
        tiles = (count + rows - 1) // rows
        splits = (step.items[b + 1] - step.items[b]) // (tiles * params.heads)
        item = block - step.items[b]  # [heads, tiles, splits]
        tile_of_heads = item // splits  # [heads, tiles]
        head = tile_of_heads // tiles
        tile = tiles - 1 - (tile_of_heads - head * tiles)  # rows that see most keys come first
        split, first = item - tile_of_heads * splits, tile * rows
        slot = step.slots[b] + (head * tiles + tile) * splits + split if splits > 1 else -1
        return WorkItem(
            b=b, pages=number(step.table[b]), head=number(head), first=number(first), last=number(count - 1),
            split=split, splits=splits, slot=number(slot), start=step.seqstarts[b],
        )  # fmt: skip

    return device.inlined(load_item)


class SeenPositions(NamedTuple):
    """Positions begin .. end - 1 that some rows of a work item see, and those that all of them see."""

    begin: Any
    end: Any
    common_begin: Any
    common_end: Any


@device.inlined
def two_of(word):
    """Return the two numbers of 32 bits in a word of 64."""
    return int32(word << 32 >> 32), int32(word >> 32)


@device.inlined
def load_placed(items, block):
    """Return the work item of a block, its `SeenPositions`, and whether there is one, from `Work.placed`.

    Without an item all words are -1. All are tested, so that their loads overlap.
    """
    at = np.uint32(block * ITEM)
    b, head = two_of(items[at])
    pages, start = two_of(items[at + np.uint32(1)])
    begin, end = two_of(items[at + np.uint32(2)])
    common_begin, common_end = two_of(items[at + np.uint32(3)])
    item = WorkItem(
        b=int32(b & ((1 << SEQUENCE_BITS) - 1)), pages=fresh_register(pages), head=int32(head & 0xFFFF),
        first=int32(0), last=int32(b >> SEQUENCE_BITS),
        split=0, splits=1, slot=int32((head >> 16) - 1), start=start,
    )  # fmt: skip
    seen = SeenPositions(begin, end, common_begin, common_end)
    return item, seen, (b & pages & end & common_end) >= 0


@device.inlined
def refreshed(item):
    """Return a work item in fresh registers: the compiler then hoists nothing derived from it."""
    return WorkItem(
        b=fresh_register(item.b), pages=item.pages, head=fresh_register(item.head),
        first=item.first, last=fresh_register(item.last),
        split=item.split, splits=item.splits, slot=fresh_register(item.slot), start=item.start,
    )  # fmt: skip


@device.inlined
def row_of(params, item, number):
    """Return a row of a work item by its number in the sequence."""
    token = number // params.group
    return Row(item.b, token, item.head * params.group + number - token * params.group)


@device.inlined
def row_of_int32(params, item, number):
    """Return a row of a work item by its number, below 2^31, in the sequence, with a faster division."""
    token, group = quotient_by(number, params.by_group), int32(params.group)
    return Row(item.b, token, int32(item.head * group + number - token * group))


# (number, stride) -> number * stride as int64, for a number below 2^32, which is not negative.
byte_offset = device.either(
    lambda number, stride: number * stride,
    lambda number, stride: np.int64(np.uint64(np.uint32(number)) * np.uint64(stride)),
)


@device.inlined
def query_address(params, item, row):
    """Return the address of a row's query."""
    at = params.query + byte_offset(row.b, params.query_sequence) + byte_offset(row.query, params.query_head)
    return at + byte_offset(item.start + row.token, params.query_token)


@device.inlined
def output_address(params, step, row):
    """Return the address of a row's output."""
    at = params.out + row.b * params.out_sequence + row.query * params.out_head
    return at + (step.seqstarts[row.b] + row.token) * params.out_token


@device.inlined
def lse_address(params, step, row):
    """Return the address of a row's log-sum-exp."""
    at = params.lse + row.b * params.lse_sequence + row.query * params.lse_head
    return at + (step.seqstarts[row.b] + row.token) * params.lse_token


@device.inlined
def mask_address(params, step, row):
    """Return the address of a row's mask, at the first position."""
    at = params.mask + row.b * params.mask_sequence + row.query * params.mask_head
    at += row.token * params.mask_row
    if params.mask_packed:
        at += step.seqstarts[row.b] * params.mask_row
    if params.mask_packed == 1:  # packed rows and columns; 2: packed rows only
        at += step.kvstarts[row.b] * params.mask_column
    return at


@device.inlined
def head_scales(params, b, head):
    """Return the factor of the scores of a head of keys, and that of its sums of values."""
    if params.key_head_scales:
        at = byte_offset(b, params.head_scale_sequence) + byte_offset(head, params.head_scale_head)
        return float_at(params.key_head_scales + at), float_at(params.value_head_scales + at)
    return numeric.float_of(np.uint32(params.scale)), numeric.float_of(np.uint32(params.value_scale))


@shared
def float_at(address):
    """Return the float32 whose bits are in the word at an address."""
    low, _ = load_word(address)
    return numeric.float_of(np.uint32(low))


@device.inlined
def lengths(step, b):
    """Return how many query tokens and how many positions a sequence has."""
    return step.seqstarts[b + 1] - step.seqstarts[b], step.kvstarts[b + 1] - step.kvstarts[b]


@device.inlined
def visible(params, step, b, token):
    """Return the range of positions that the causal rule and the window let a query token see."""
    seqlen, kvlen = lengths(step, b)
    # ALiBi is causal. The first `decoding` sequences see their whole context.
    causal = params.alibi != 0 or (params.causal != 0 and b >= params.decoding)
    begin, end = visible_range(seqlen, kvlen, token, params.left, params.right, causal)
    return Range(begin, end)


@device.inlined
def seen_by(params, step, b, first, last):
    """Return the positions that some of the rows first .. last see, and those that all of them see."""
    early = visible(params, step, b, quotient_by(first, params.by_group))
    late = visible(params, step, b, quotient_by(last, params.by_group))
    return Range(early.begin, late.end), Range(late.begin, early.end)


@device.inlined
def within_split(step, item, seen):
    """Return the positions of a range that belong to the work item's split."""
    begin, end = seen.begin, seen.end
    if item.splits > 1:
        tokens = step.slots[step.slots.shape[0] - 1]
        begin = min(begin + item.split * tokens, end)
        end = min(end, begin + tokens)
    return Range(begin, end)
