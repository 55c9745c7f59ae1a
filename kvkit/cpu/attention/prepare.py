"""From checked arguments of attention to a `Task`: machine code, scratch, and the launch."""

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvkit.cpu import machine
from kvkit.cpu.attention import integers, pairs, products, scheduler
from kvkit.cpu.attention.params import TASK
from kvkit.cpu.copy.rows import LOAD, READ, rows
from kvkit.cpu.launches import Arena, Launch, address, share_out, threads
from kvkit.cpu.simd.attention import LANES, WIDE
from kvkit.formats.elements import BY_NAME, coarser
from kvkit.layouts.places import packed_strides

BLOCK, WIDE_BLOCK = 64, 128  # tokens
# Tokens on which heads that lie side by side take turns, and the bytes of a turn: with the next one, which is
# asked for meanwhile, they take half of a second cache of 1 MB.
TURN, TURN_BYTES = 32, 2**18
LEAST_LEAD = 8  # tokens before one is multiplied it is asked for
PARTS, LEAST_PART = 64, 512  # a call's work is split into so many parts, of at least so many tokens
SMALL = 2**15  # products; below it one thread is done before a second one is awake
AT = TASK.at
COUNTING = np.arange(WIDE_BLOCK + LANES)
# What `schedule` sets, what depends on its tiles, and what a launch sets.
LATER = (
    "unit_tiles", "part_tokens", "units", "items", "parts", "tiles", "products",
    "scores1", "scores2", "scores4", "scores8", "scores32", "sums1", "sums2", "sums4", "sums8", "sums32",
    "queries1", "queries2", "queries4", "queries8",
    "integer_queries", "integer_keys", "integer_values", "integer_scores", "integer_sums",
    "counters", "partials", "scratch",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reader:
    """Machine code of rows that formats and strides alone do not describe."""

    widen: int  # address: makes float32 of rows
    product: Callable | None  # rows -> addresses of the narrow products over such rows, if there are any
    orders: np.ndarray | None  # as `products.orders`


scratch, partials = Arena(), Arena()


def padded(dim):
    return -(-dim // LANES) * LANES


def scratch_offsets(dim, value_dim, narrow_rows, block, pairs, integers):
    """Offsets of a worker's scratch arrays, by the names of the task's last fields, and its size."""
    rows, longest = max(narrow_rows, scheduler.TILES * WIDE), max(dim, value_dim)
    sizes = {  # numbers and addresses: of keys, then of values
        "numbers": 16 * (WIDE_BLOCK + 24) + 16 * (block * narrow_rows // scheduler.NARROW + 8),
        "scores": 4 * max(WIDE * (WIDE_BLOCK + LANES), narrow_rows * block),
        "factor": 8 * rows + 8 * WIDE,
        "top": 8 * rows,  # narrow tiles have at least 16 lanes
        "total": 8 * rows,
        "queries": 4 * rows * dim,
        "query_pairs": 2 * rows * dim if pairs else 0,
        "query_integers": rows * (4 * dim + 64) if integers else 0,
        "sums": 4 * rows * value_dim,
        "wide_keys": 4 * WIDE_BLOCK * dim,
        "wide_values": 4 * WIDE_BLOCK * value_dim,
        "lines": 4 * WIDE * longest,
    }
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name], end = end, end + -(-size // 64) * 64
    return offsets, end


def token_bytes(stored, cell, group, heads, dim, value_dim):
    """Of the keys and values of one token in a cache, with their scales."""
    scales = 2 * (dim // (group or dim)) * BY_NAME[cell].bytes(1) if cell else 0
    codes = sum(BY_NAME[side].bytes(size) for side, size in zip(stored, (dim, value_dim), strict=True))
    return heads * (codes + scales)


def turn(size):
    """How many tokens of `size` bytes: whole tiles of the narrow products."""
    return max(8, min(TURN, TURN_BYTES // max(size, 1) // 8 * 8))


@functools.cache
def fixed_fields(
    packed, rounds, exact, stored, cell, group, heads, dim, value_dim, together, widen, integers
):  # fmt: skip
    """The fields of a task that formats and sizes decide, and zeros for those that are set later.

    Rows of the cache are widened by the machine code at `widen`; if that is 0 by that for their format, which
    may round them to the data.
    """
    padded_dim, padded_value_dim = padded(dim), padded(value_dim)
    block = turn(token_bytes(stored, cell, group, heads, dim, value_dim)) if together else BLOCK
    longest = max(BY_NAME[side].bytes(size) for side, size in zip(stored, (dim, value_dim), strict=True))
    ahead = machine.ahead()
    lead = min(max(ahead.bytes // max(longest, 1), LEAST_LEAD), ahead.tokens)
    narrow_rows = scheduler.NARROW * (heads if together else 1)
    paired = {packed, *stored} == {"bfloat16"} and not widen and machine.has_pairs()
    direction = LOAD if exact or cell in (None, "float32") else READ
    widened = [
        widen or rows(direction, packed if rounds else "float32", side, cell, group).address
        for side in stored
    ]
    offsets, scratch_bytes = scratch_offsets(
        padded_dim, padded_value_dim, narrow_rows, block, paired, integers
    )
    codes = pairs.codes() if paired else dict.fromkeys(pairs.FUNCTIONS, 0)
    return dict.fromkeys(LATER, 0) | offsets | codes | {
        "integers": integers,
        "pairs": paired, "copy_row": rows(LOAD, packed, packed).address if paired else 0,
        "heads": heads, "dim": dim, "value_dim": value_dim,
        "padded_dim": padded_dim, "padded_value_dim": padded_value_dim,
        "cell_bytes": dim // (group or dim) * BY_NAME[cell].bytes(1) if cell else 0,
        "together": together, "block": block, "wide_block": WIDE_BLOCK,
        "lead": 0 if widen else block if together else lead,
        "least_part": LEAST_PART, "most_parts": PARTS, "rounds": rounds,
        "key_to_float": widened[0], "value_to_float": widened[1],
        "query_to_float": rows(LOAD, "float32", packed).address,
        "float_to_out": rows(LOAD, packed, "float32").address,
        "part_bytes": max(narrow_rows, WIDE) * 4 * (padded_value_dim + 3),
        "counting": address(COUNTING), "scratch_bytes": scratch_bytes,
    }  # fmt: skip


@functools.cache
def product(rows, wide_formats, stored, *form):
    """The addresses of both products of a tile, over keys and values `stored` as two formats."""
    if rows == WIDE or wide_formats:
        return products.scores(rows).address, products.sums(rows).address
    key, value = stored
    return products.scores(rows, key, *form).address, products.sums(rows, value, *form).address


OWNERS = {
    AT[field]: owner
    for field, owner in {
        "query": "query", "out": "out", "lse": "lse",
        "keys": "cache", "values": "cache", "key_cells": "scale", "value_cells": "scale",
    }.items()
}  # fmt: skip


def prepare(query, out, lse, context, steps, decoding, weights):
    """A launch that computes attention into `out` and, unless None, `lse`."""
    heads, dim, value_dim = context.heads, context.dim, context.value_dim
    shared = shared_scales(context)
    if shared:  # factors of queries and outputs cost nothing for a token
        own = np.ones((2, 1, heads), np.float32)
        context, weights = context._replace(cell=None), weights._replace(scales=own)
    coded = context.cell is not None
    rounds = context.as_loaded and not coded and coarser(context.packed, context.stored)
    minifloat = BY_NAME[context.stored].minifloat
    exact = context.as_loaded and coded and not minifloat and coarser(context.cell, context.packed)
    stored = context.stored, context.value_stored or context.stored
    formats, reader = (stored, context.cell, context.group), context.reader
    (key_step, value_step), (key_element, value_element) = context.steps, context.elements
    if reader:
        widens = not reader.product
    else:
        in_place = products.in_place(context.cell, context.group, (dim, value_dim))
        widens = rounds or not in_place or bool(key_element or value_element)
    keys, key_sequence, key_row, key_head, key_cells, cell_sequence, cell_row, cell_head = context.sides[0]
    values, value_sequence, value_row, value_head, value_cells, *_ = context.sides[1]
    together = (
        heads > 1
        and context.key_bytes <= key_head <= abs(key_row * key_step) // heads
        and context.value_bytes <= value_head <= abs(value_row * value_step) // heads
    )
    alike = key_row == value_row and (heads == 1 or key_head == value_head)
    own_places = steps.value_table is not None or not alike
    value_table = steps.table if steps.value_table is None else steps.value_table
    sizes, widen = (heads, dim, value_dim), reader.widen if reader else 0
    whole = integer_width(context, stored) if not (widens or reader or exact) else None
    fixed = fixed_fields(
        context.packed, rounds, exact, *formats, *sizes, together, widen, whole is not None
    )  # fmt: skip
    orders = (
        None
        if widens or whole
        else reader.orders
        if reader
        else products.orders(stored[0], *formats[1:], dim)
    )
    constants = np.array([weights.scale, weights.softcap], np.float32)
    key_scales, value_scales, scale_sequence, scale_head = address(constants), 0, 0, 0
    if weights.scales is not None:  # [keys | values, sequences or 1, heads or 1]
        key_scales, value_scales = (
            address(weights.scales) + side * weights.scales.strides[0] for side in (0, 1)
        )
        scale_sequence, scale_head = (
            0 if size == 1 else stride
            for size, stride in zip(weights.scales.shape[1:], weights.scales.strides[1:], strict=True)
        )
    slopes = weights.slopes
    sinks = None if weights.sinks is None else np.ascontiguousarray(weights.sinks, np.float32)
    query_sequence, query_token, query_head = packed_strides(query)
    out_sequence, out_token, out_head = packed_strides(out)
    lse_sequence, lse_token, lse_head = (0, 0, 0) if lse is None else packed_strides(lse[..., None])
    mask, mask_kind, mask_sequence, mask_head, mask_row, mask_column, mask_packed = weights.mask
    numbers = TASK.filled({
        **fixed,
        "keys": keys, "key_sequence": key_sequence, "key_row": key_row, "key_step": key_step,
        "key_head": key_head, "key_element": key_element,
        "pairs": fixed["pairs"] and not (key_element or value_element),
        "key_cells": key_cells, "cell_sequence": cell_sequence, "cell_row": cell_row, "cell_head": cell_head,
        "values": values, "value_sequence": value_sequence, "value_row": value_row,
        "value_step": value_step, "value_head": value_head, "value_element": value_element,
        "value_cells": value_cells, "own_places": own_places,
        "query": address(query), "query_sequence": query_sequence, "query_token": query_token,
        "query_head": query_head,
        "out": address(out), "out_sequence": out_sequence, "out_token": out_token, "out_head": out_head,
        "lse": 0 if lse is None else address(lse), "lse_sequence": lse_sequence, "lse_token": lse_token,
        "lse_head": lse_head,
        "mask": mask, "mask_kind": mask_kind, "mask_sequence": mask_sequence, "mask_head": mask_head,
        "mask_row": mask_row, "mask_column": mask_column, "mask_packed": mask_packed,
        "batch": len(steps.start_pos), "group": query.shape[-2] // heads,
        "seqstarts": address(steps.seqstarts), "kvstarts": address(steps.kvstarts),
        "table": address(steps.table), "value_table": address(value_table),
        "table_row": steps.table.strides[0], "page_size": steps.page_size,
        "decoding": decoding, "causal": weights.causal, "alibi": weights.alibi,
        "left": weights.left, "right": weights.right,
        "key_scales": key_scales, "value_scales": value_scales, "scale_sequence": scale_sequence,
        "scale_head": scale_head, "slopes": 0 if slopes is None else address(slopes),
        "slopes_sequence": slopes.strides[0] if slopes is not None and len(slopes) > 1 else 0,
        "cap": weights.softcap != 0, "cap_at": address(constants) + 4,
        "sinks": 0 if sinks is None else address(sinks), "apart": weights.apart,
        "key_bytes": context.key_bytes, "value_bytes": context.value_bytes,
        "orders": 0 if orders is None else address(orders), "widens": widens,
    })  # fmt: skip
    schedule(numbers)
    units, items, parts, tiles, work = numbers[AT["units"] : AT["products"] + 1].tolist()
    near = not together and machine.ahead().near
    for i, tile in enumerate((1, 2, 4, 8, WIDE)):
        if tiles & tile:
            at = AT["scores1"] + i
            if reader and not widens and tile != WIDE:
                numbers[at], numbers[at + 5] = reader.product(tile)
            elif whole and tile != WIDE:
                form = context.cell, context.group, whole
                numbers[AT["queries1"] + i], numbers[at], numbers[at + 5] = integers.addresses(
                    tile, near, stored, form
                )
            else:
                numbers[at], numbers[at + 5] = product(tile, widens, *formats, exact, near)
    if whole and tiles & WIDE and query.shape[-2] // heads > scheduler.NARROW:  # some may be of one token
        for name, code in integers.wide_addresses(stored, (context.cell, context.group, whole)).items():
            numbers[AT[name]] = code
    counters = np.zeros(units + 1, np.int64)
    numbers[AT["counters"]] = address(counters)
    part_bytes, scratch_bytes = parts * fixed["part_bytes"], fixed["scratch_bytes"]
    code, task = scheduler.code("work"), address(numbers)
    most = items if work >= SMALL else 1

    def run():
        if shared:
            shared(numbers, weights)
        workers = min(threads(), most) if most > 1 else 1
        numbers[AT["scratch"]] = scratch.at_least(workers * scratch_bytes)
        if parts:
            numbers[AT["partials"]] = partials.at_least(part_bytes)
        counters[:] = 0
        if items:
            share_out(code, workers, task)

    owners = {place: owner for place, owner in OWNERS.items() if numbers[place]}
    return Launch(numbers, owners, run, alive=(steps, weights, constants, sinks, orders))


def integer_width(context, stored):
    """What `integers.width` says of both sides; None where the processor has none, or data have 24 bits."""
    if not machine.has_integers() or context.packed == "float32":
        return None
    dims = context.dim, context.value_dim
    widths = {integers.width(side, context.cell, context.group, dims) for side in stored}
    return widths.pop() if len(widths) == 1 else None


def shared_scales(context):
    """A function that fills in scales which all tokens share, of floats of 8 bits; None if there are none.

    They may change, and lie elsewhere, from one run of a launch to the next.
    """
    _, sequence, row, head = context.sides[0][4:]
    if not context.cell or context.group or sequence or row:
        return None
    dtype, size = BY_NAME[context.cell].dtype, head * (context.heads - 1)
    places = AT["key_cells"], AT["value_cells"]

    def fill(numbers, weights):
        for side, place in enumerate(places):
            memory = (ctypes.c_char * (size + dtype.itemsize)).from_address(int(numbers[place]))
            weights.scales[side, 0] = np.ndarray(context.heads, dtype, memory, strides=(head,))
        weights.scales[0] *= np.float32(weights.scale)

    return fill


def schedule(numbers):
    """Share the work of a task out."""
    scheduler.code("schedule").ctypes(0, address(numbers))


def planned(numbers):
    """What decides the launch of a task: units, items, parts, tiles, and whether one thread is enough."""
    *planned, work = numbers[AT["units"] : AT["products"] + 1].tolist()
    return planned, work < SMALL
