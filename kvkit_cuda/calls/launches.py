"""Build the kernel launches of a checked call, one function per operator."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvkit.checks import caches, slots
from kvkit.checks.ascend import blocks, tensors
from kvkit_cuda.attention import merge, params
from kvkit_cuda.calls import arrays, attention, paged
from kvkit_cuda.calls.steps import PlannedPages, PlannedStep
from kvkit_cuda.calls.tables import DeviceTables, angle_bits
from kvkit_cuda.copy import means, pieces, transfer
from kvkit_cuda.device_runtime import host
from kvkit_cuda.positions import alibi, angles, index, rotary

ZEROS = -1  # a source row that stands for zeros


@dataclass(frozen=True, slots=True)
class DeviceCall:
    """A checked call whose arrays are on the device. It owns the device memory that its launches use."""

    call: Any
    outputs: list[np.ndarray]
    step: PlannedStep | PlannedPages | None  # the step of a plan, or of packed sequences in a cache
    stream: object
    scale: arrays.Operand | None = None  # per-head scales, copied from the host
    changed: list = field(default_factory=list)  # (array of the host, array of the device to copy it to)
    owners: list = field(default_factory=list)

    @property
    def layer(self):
        """Return the cache layer, with device scales if the call has any; None without a cache."""
        layer = self.call.layer
        if self.scale is None:
            return layer
        return caches.at_scales(layer, self.scale.seen)

    @property
    def tables(self):
        """Return the tables of the call's step on the device."""
        if self.step:
            return self.step.of(self.call).tables
        self.owners.append(DeviceTables(self.call.steps, lasting=False))
        return self.owners[-1]


def append(placed: DeviceCall):
    """Return the launches of `key_value_cache`: store the new tokens, load the contexts."""
    call, layer, tables, stream = placed.call, placed.layer, placed.tables, placed.stream
    return [
        transfer.store(call.current_key, call.current_value, layer, tables, stream),
        transfer.load(placed.outputs[0], placed.outputs[1], layer, tables, call.repeat, stream),
    ]


def attend(placed: DeviceCall):
    """Return the launches of attention, after an append if the call has a cache."""
    call, tables, stream = placed.call, placed.tables, placed.stream
    named = dict(zip(call.results.forms, placed.outputs, strict=True))
    out, lse, sums = (named.get(name) for name in ("attn_output", "lse", "key_weights"))
    if sums is not None and lse is None:
        lse = arrays.allocated(call.query.shape[:-1], np.dtype(np.float32), placed.owners, stream)
    layer, context, rows = placed.layer, call.context, call.steps.rows
    if layer:
        context, rows = context._replace(sides=layer.sides), layer.capacity[1]
    given = call.decoding, call.weights, rows, stream
    launches = attention.prepare(call.query, out, lse, context, tables, *given, sums=sums)
    if layer:
        key, value = call.current
        launches.insert(0, transfer.store(key, value, layer, tables, stream))
    if call.blocks:
        for launch in launches:
            launch.owners = params.POOL_OWNERS
    return launches


def attend_to_blocks(placed: DeviceCall):
    """Return the launches of Ascend's attention over a cache in blocks."""
    return paged.prepare(placed.call, placed.outputs, placed.owners, placed.stream)


def merge_parts(placed: DeviceCall):
    """Return the launch that merges attention over parts."""
    call, (out, lse) = placed.call, placed.outputs
    return [merge.prepare_states(call.fmt.name, [*call.outputs, out, *call.lses, lse], placed.stream)]


def rotate(placed: DeviceCall):
    """Return the launches of rotary embedding: fill the table of angles, rotate queries and keys."""
    if not placed.call.starts[-1]:
        return []
    table, starts, fill = angles.table(placed.call, placed.stream)
    placed.owners.append(table)
    return [fill, rotary.prepare(placed.call, placed.outputs, table, starts, placed.stream)]


def mask(placed: DeviceCall):
    """Return the launch that writes a mask of ALiBi biases."""
    (target,) = placed.outputs
    target = target if target.ndim == 4 else target[None]
    return [alibi.prepare(placed.call, target, placed.stream)] if target.size else []


def slope(placed: DeviceCall):
    """Return the launch that copies ALiBi slopes, which are computed on the host."""
    (target,) = placed.outputs
    slopes = arrays.Operand(alibi.slopes(target.size), False, None).moved(placed.stream)
    placed.owners.append(slopes)
    pair = slopes.seen.reshape(1, 1, 1, -1), target.reshape(1, 1, 1, -1)
    return pieces.prepare([pair], np.array([[0, 0, 1]]), placed.stream)


def position_index(placed: DeviceCall):
    """Return the launch that writes the positions of packed tokens."""
    (target,) = placed.outputs
    return [index.prepare(placed.call.starts, placed.call.first, target, placed.stream)]


def move(placed: DeviceCall, pairs, *rows):
    """Return launches that copy pieces of rows, (source rows, target rows, counts), in pairs of arrays."""
    stacked = np.concatenate([np.stack(np.broadcast_arrays(*each), axis=1) for each in rows])
    return pieces.prepare(pairs, stacked, placed.stream)


def store_rows(placed: DeviceCall):
    """Return the launches of `ascend.reshape_and_cache`: copies of rows, and means of rows."""
    call = placed.call
    token, head, slot, count, mean = call.pieces.T
    rows = np.stack([head * len(call.tokens[0]) + token, slot, count], axis=1)
    tokens = [  # one block, or in compressed modes a block for each head
        each.transpose(1, 0, 2)[:, :, None] if call.mode else each[None] for each in call.tokens
    ]
    pairs = list(zip(tokens, call.caches, strict=True))
    launches = pieces.prepare(pairs, rows[mean != 1], placed.stream)
    return launches + means.prepare(pairs, rows[mean == 1], call.averaged, placed.stream)


def load_rows(placed: DeviceCall):
    """Return the launches of `ascend.paged_cache_load`; tokens without a block are zeros."""
    call = placed.call
    token, _, slot, count, _ = blocks.pieces_of(call).T
    begins, ends = np.append(0, token + count), np.append(token, call.tokens)
    both = zip(call.caches, placed.outputs, strict=True)
    pairs = [(cache, out.reshape(1, call.tokens, *cache.shape[2:])) for cache, out in both]
    return move(placed, pairs, (slot, token, count), (ZEROS, begins, ends - begins))


def group_columns(placed: DeviceCall):
    """Return the launches of `ascend.nd_to_nz`."""
    call, (y,) = placed.call, placed.outputs
    each, rows, whole = np.arange(call.shape[0]), call.source.shape[1], call.shape[2]
    copied, padding = (each * rows, each * whole, rows), (ZEROS, each * whole + rows, whole - rows)
    return move(placed, [(call.source[:, :, None], tensors.in_rows(y, "NZ"))], copied, padding)


def join_columns(placed: DeviceCall):
    """Return the launches of `ascend.nz_to_nd`."""
    call, (x,) = placed.call, placed.outputs
    each, rows = np.arange(call.shape[0]), call.shape[1]
    copied = each * call.source.shape[2], each * rows, rows
    return move(placed, [(tensors.in_rows(call.source, "NZ"), x[:, :, None])], copied)


def append_to_pools(placed: DeviceCall):
    """Return the launches that store tokens in pools, bit for bit or as codes, after `rope` rotates keys."""
    call, stream, moves = placed.call, placed.stream, []
    for side in call.sides:
        source, scales, cache = side.tokens[None], side.scales, f"{side.name}_cache"
        if side.data_dtype == side.cache_format and call.rope is None:
            moves.append(pieces.byte_copy(source, side.pool)._replace(owners=(side.name, cache, cache)))
            continue
        owners = side.name, cache, f"{side.name}_scale" if scales is not None else cache
        if scales is not None and not side.group:
            given = arrays.Operand(scales, False, None).moved(stream)
            placed.owners.append(given)
            scales = np.broadcast_to(given.seen[:, None], (*side.pool.shape[:3], 1))
        formats = side.data_dtype, side.cache_format, side.scale_format
        move = pieces.code_copy(source, side.pool, *formats, side.group, scales, call.rope)
        moves.append(move._replace(owners=owners))
    if placed.step:
        tables = placed.tables
        *where, angles = tables.new_tokens(call.rope, stream)
        return pieces.copy_launches(moves, where, tables.steps.tokens, stream, rotation(call, angles))
    where = np.stack([call.pieces[:, column] for column in (slots.TOKEN, slots.SLOT, slots.COUNT)], 1)
    angles = None
    if call.rope is not None:
        (angles,) = host.tables([angle_bits(call.rope, call.positions)], stream)
        placed.owners.append(angles)
    return pieces.launch_copies(moves, where, stream, rotation(call, angles))


def rotation(call, angles):
    """Return the argument `rotated` of `copy_launches`, with a table of angles; None without rope."""
    if call.rope is None:
        return None
    return call.rope, host.address(angles), call.sides[0].pool.shape[3]


def copy_blocks(placed: DeviceCall):
    """Return the launches that copy blocks, at most two views per launch.

    Views are grouped by rows per block, which may differ between keys and values.
    """
    call = placed.call
    views = [pair for each in call.arrays for pair in zip(*map(in_four_axes, each), strict=True)]
    launches = []
    for rows in sorted({source.shape[1] for source, _ in views}):
        pairs = [pair for pair in views if pair[0].shape[1] == rows]
        for i in range(0, len(pairs), 2):  # block ids and counts are in units of rows
            launches += move(placed, pairs[i : i + 2], (call.src * rows, call.dst * rows, rows))
    return launches


def in_four_axes(cache):
    """Return views [blocks, rows, heads, dim] of a cache with any number of axes; the first is blocks."""
    if cache.ndim < 4:
        return [cache.reshape(len(cache), *[1] * (4 - cache.ndim), *cache.shape[1:])]
    return [cache[(slice(None), *at)] for at in np.ndindex(cache.shape[1:-3])]
