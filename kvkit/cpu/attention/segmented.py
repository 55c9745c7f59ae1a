"""Attend to keys and values stored in three segments: floats (sinks), then codes, then floats (tail).

A table describes the segments of keys or of values. Row ids are positions. The "address" of a row is the
number table's address + (position * batch + sequence) * heads + head, from which the kernels here compute
position, sequence and head.
"""

import functools
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numba import types

from kvkit.checks.records import Context, Side
from kvkit.cpu import memory, prefetching
from kvkit.cpu.attention import prepare
from kvkit.cpu.attention.engines import narrow
from kvkit.cpu.attention.params import COUNTING, block_at, params_at, step_code, tile_at, whole_tiles
from kvkit.cpu.copy.codes import scale_format_of
from kvkit.cpu.copy.rows import LOAD, SIGNATURE, call_rows, rows
from kvkit.cpu.launches import Record, address
from kvkit.cpu.simd import attention as simd
from kvkit.cpu.simd import chunks
from kvkit.cpu.simd.codes import whole_panels
from kvkit.formats.elements import CODES, coarser
from kvkit.runtime.jit import compiled, helper


class Segment(NamedTuple):
    """A segment of positions up to `end`; a position is stored at address + position * row.

    `scales` is 0 for floats. `blocks` is 0, or the address of an int64 for each position: the block whose
    scales it has.
    """

    end: int
    to_float: int
    address: int
    sequence: int
    head: int
    row: int
    scales: int = 0
    scale_sequence: int = 0
    scale_head: int = 0
    scale_block: int = 0
    blocks: int = 0

    def from_row(self, row: int) -> "Segment":
        """Return the segment with positions counted from `row` on."""
        moved = self._replace(end=self.end - row, address=self.address + row * self.row)
        if self.blocks:
            return moved._replace(blocks=self.blocks + 8 * row)
        return moved._replace(scales=self.scales + row * self.scale_block)


SEGMENT = Record(" ".join(Segment._fields))
TABLE = Record("heads planes counting clamped ones", sinks=SEGMENT, codes=SEGMENT, tail=SEGMENT)
SEGMENTS_AT, SEGMENT_BYTES = 8 * TABLE.at["sinks.end"], SEGMENT.dtype.itemsize
TILE = 8  # most tokens that narrow scores take at a time
# Rows of a run for a tile with n < TILE tokens, in row n: 0, 1, .., n - 1, n - 1, ..
CLAMPS = np.minimum(np.arange(TILE), np.arange(-1, TILE - 1)[:, None]).clip(0)
UNITS = np.ones(chunks.NARROW, np.float32)  # alpha of runs after the first one

get, table_at, segment_at = memory.load(types.int64), memory.record(TABLE), memory.record(SEGMENT)


def new_table(heads, batch):
    """Return a new table; `set_segments` has to write its segments."""
    fields = dict.fromkeys(TABLE.names, 0) | {"heads": heads, "planes": batch * heads}
    addresses = {"counting": COUNTING, "clamped": CLAMPS, "ones": UNITS}
    return TABLE.filled(fields | addresses)


def set_segments(table: np.ndarray, *, sinks: Segment, codes: Segment, tail: Segment) -> None:
    """Write the segments of a table, once for each step of a cache."""
    table[TABLE.at["sinks.end"] :] = (*sinks, *codes, *tail)


@helper
def run_at(table, at, plane, position, end):
    """Find the run of tokens from `position` on that is in one segment and, if that has blocks, in one block.

    Return (address of its segment, end of the run, address of its first row, of its scales, strides of both).
    `at` is the address of that segment or of an earlier one. A plane is a head of a sequence.
    """
    sequence, head = divmod(plane, table.heads)
    while segment_at(at).end <= position:
        at += SEGMENT_BYTES
    segment = segment_at(at)
    stop = min(end, segment.end)
    block, scale_row = position, segment.scale_block
    if segment.blocks:
        block, scale_row, last = get(segment.blocks + 8 * position), 0, stop
        stop = position + 1
        while stop < last and get(segment.blocks + 8 * stop) == block:
            stop += 1
    row = segment.address + sequence * segment.sequence + head * segment.head + position * segment.row
    scales = segment.scales + sequence * segment.scale_sequence + head * segment.scale_head
    scales += block * segment.scale_block
    return at, stop, row, scales, segment.row, scale_row


@compiled(SIGNATURE)
def widen_segments(
    target, target_row, target_head, row, row_step, row_head, table_address, table_row, table_head,
    tokens, heads, repeat, dim,
):  # fmt: skip
    """Write `tokens` rows as float32, run by run, from the row with the address `row` on."""
    table = table_at(table_address)
    position, plane = divmod(row - table_address, table.planes)
    segment, end = table_address + SEGMENTS_AT, position + tokens
    while position < end:
        segment, stop, source, scales, step, scale_row = run_at(table, segment, plane, position, end)
        call_rows(
            segment_at(segment).to_float, packed=target, packed_token=target_row,
            cache=source, cache_token=step, scale=scales, scale_token=scale_row,
            tokens=stop - position, dim=dim,
        )  # fmt: skip
        target += (stop - position) * target_row
        position = stop


@functools.cache
def floats_code(element):
    """Return the address of the machine code that widens rows of floats."""
    return rows(LOAD, "float32", element).address


def stored_as(codes):
    """Return (stored, scale_format, group, rounds) of codes, the arguments of micro-kernels.

    Attention does not round decoded rows to the dtype of the data, as reading an array does, because that
    would slow down decoding. Only a symmetric code times a scale of a coarser dtype is rounded, to that.
    """
    if codes.cache_format:
        return codes.cache_format, *scale_format_of(codes), ()
    stored, rounded = CODES[codes.bits, codes.symmetric].name, coarser(codes.scale_format, codes.element)
    rounds = (codes.scale_format,) if codes.symmetric and rounded else ()
    return stored, codes.scale_format, codes.group, rounds


@functools.cache
def scores(count, codes):
    """Compile S = K Q^T for `count` query rows; queries are in the order that scores of these codes need."""
    # Floats are read in the order of the codes, `like`. `near` prefetches into L1.
    (*like, rounds), distance = stored_as(codes), prefetching.distances().of_rows(count)
    floats = simd.narrow_scores(count, codes.element, None, 0, like=tuple(like), near=distance.near)
    coded = simd.narrow_scores(count, *like, rounds, tuple(like), near=distance.near)
    tile_tokens, shared, shift = chunks.tile_tokens(count), codes.tokens > 1, distance.bytes

    @helper
    def of_run(tile, row, step, scales, scale_row, row_ids, tokens, dim, target):
        if scales == 0:
            floats(
                queries=tile.queries, keys=row, key_row=step, scale_base=0, scale_row=0, row_ids=row_ids,
                ahead=0, shift=shift, count=tokens, dim=dim, scores=target,
            )  # fmt: skip
        else:  # with a constant `scale_row` of 0 a tile reads shared scales once
            coded(
                queries=tile.queries, keys=row, key_row=step, scale_base=scales,
                scale_row=np.int64(0) if shared else scale_row, row_ids=row_ids, ahead=0,
                shift=shift, count=tokens, dim=dim, scores=target,
            )  # fmt: skip

    def scores(params_address, block_address, tile_address):
        params, block, tile = params_at(params_address), block_at(block_address), tile_at(tile_address)
        table, plane, target = table_at(tile.key_scales), tile.keys - tile.key_scales, tile.scores
        position = get(block.key_ids)
        end = get(block.key_ids + 8 * (whole_tiles(tile.count) - 1)) + 1
        segment = tile.key_scales + SEGMENTS_AT
        while position < end:
            segment, stop, row, scales, step, scale_row = run_at(table, segment, plane, position, end)
            live = stop - position
            done = live if live < tile_tokens else live - live % tile_tokens  # whole tiles, then the rest
            row_ids = table.clamped + 8 * TILE * live if live < tile_tokens else table.counting
            of_run(
                tile, row, step, scales, scale_row, row_ids=row_ids, tokens=max(done, tile_tokens),
                dim=params.keys.padded_dim, target=target,
            )  # fmt: skip
            target += 4 * count * done
            position += done

    return step_code(scores, ("segment scores", count, codes, distance))


@functools.cache
def sums(count, codes):
    """Compile O = O alpha + P V for `count` query rows."""
    distance = prefetching.distances().of_rows(count)
    floats = simd.narrow_sums(count, codes.element, None, 0, neighbours=True, near=distance.near)
    coded = simd.narrow_sums(count, *stored_as(codes), neighbours=True, near=distance.near)
    shared, shift = codes.tokens > 1, distance.bytes

    @helper
    def of_run(tile, row, step, scales, scale_row, row_ids, tokens, dim, weights, alpha):
        if scales == 0:
            floats(
                weights=weights, values=row, value_row=step, scale_base=0, scale_row=0, row_ids=row_ids,
                ahead=0, shift=shift, count=tokens, dim=dim, sums=tile.o, factors=alpha,
            )  # fmt: skip
        else:
            coded(
                weights=weights, values=row, value_row=step, scale_base=scales,
                scale_row=np.int64(0) if shared else scale_row, row_ids=row_ids, ahead=0,
                shift=shift, count=tokens, dim=dim, sums=tile.o, factors=alpha,
            )  # fmt: skip

    def sums(params_address, block_address, tile_address):
        params, block, tile = params_at(params_address), block_at(block_address), tile_at(tile_address)
        table, plane = table_at(tile.value_scales), tile.values - tile.value_scales
        position, weights, alpha = get(block.value_ids), tile.scores, tile.alpha
        end, segment = position + tile.count, tile.value_scales + SEGMENTS_AT
        while position < end:
            segment, stop, row, scales, step, scale_row = run_at(table, segment, plane, position, end)
            of_run(
                tile, row, step, scales, scale_row, row_ids=table.counting, tokens=stop - position,
                dim=params.values.padded_dim, weights=weights, alpha=alpha,
            )  # fmt: skip
            weights += 4 * count * (stop - position)
            alpha = table.ones
            position = stop

    return step_code(sums, ("segment sums", count, codes, distance))


@functools.cache
def row_decoder(key, value, dims):
    """Return the decoder of keys and values with these codes; it reads in place if rows are whole vectors."""
    # Machine code only depends on whether a block has several tokens.
    key, value = (replace(side, tokens=min(side.tokens, 2)) for side in (key, value))
    vectors = all(whole_panels(side.group) for side in (key, value))
    if not vectors or any(dim % chunks.LANES for dim in dims):
        return prepare.RowDecoder(widen_segments.code.address, None, None)

    def engine(count):
        return {"scores": scores(count, key).address, "sums": sums(count, value).address}

    stored, scale_format, group, _ = stored_as(key)
    return prepare.RowDecoder(
        widen_segments.code.address, engine, narrow.orders(stored, scale_format, group, dims[0])
    )


def context(packed, batch, heads, dims, forms, tables):
    """Return a `Context` of keys and values in segments; `tables` are those of keys and of values."""
    key, value = (Side(address(table), heads, batch * heads, 1, scales=address(table)) for table in tables)
    dim, value_dim = dims
    return Context(
        data_dtype=packed, cache_format="float32", scale_format=None, group=0,
        heads=heads, dim=dim, value_dim=value_dim,
        sides=(key, value), key_bytes=4 * dim, value_bytes=4 * value_dim, as_loaded=False,
        decoder=row_decoder(*forms, dims),
    )  # fmt: skip
