"""Fill the params of attention from checked arguments, group by group, and return a launch."""

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvkit.checks.records import Side
from kvkit.checks.values import packed_strides
from kvkit.cpu import machine, prefetching
from kvkit.cpu.attention import scheduler
from kvkit.cpu.attention.biases import biases_code
from kvkit.cpu.attention.engines import (
    bfloat16_pairs,
    integers,
    narrow,
    narrow_tiles,
    wide,
    wide_integers,
    wide_tiles,
)
from kvkit.cpu.attention.epilogue import merge_code, scaled_row
from kvkit.cpu.attention.key_weights import UNIT, key_tiles, weights_bytes, weights_code
from kvkit.cpu.attention.params import (
    ADDRESS_OWNER,
    ATTENTION_PARAMS,
    BLOCK,
    COUNTING,
    ENGINE,
    ENGINE_ROWS,
    EXTRA_ADDRESSES,
    EXTRA_IDS,
    FIELD,
    LATE_FIELDS,
    SPECIAL_ENGINE,
    TILE,
    WIDE_BLOCK,
)
from kvkit.cpu.attention.work_items import TILES
from kvkit.cpu.copy.rows import LOAD, READ, rows
from kvkit.cpu.launches import Launch, Workspace, address, run_in_workspace
from kvkit.cpu.simd import tile_products
from kvkit.cpu.simd.attention import WIDE
from kvkit.cpu.simd.chunks import LINE, NARROW
from kvkit.cpu.simd.lanes import LANES
from kvkit.formats.elements import BY_NAME, coarser
from kvkit.runtime.repeats import Single

BLOCK_TOKENS = 64
# Most tokens and bytes of a block of interleaved heads: with the next block, which is prefetched meanwhile,
# it takes half of an L2 cache of 1 MB.
INTERLEAVED_TOKENS, INTERLEAVED_BYTES = 32, 2**18
# In a long run, blocks of one query row have RUN_TOKENS tokens: each change between keys and values stops
# the processor's own prefetches. Rows up to UNAIDED_ROW bytes are not prefetched, rows up to LONGEST_ROW
# bytes are prefetched LONG_RUN_AHEAD bytes ahead, and longer rows as in short runs.
RUN_TOKENS = 1024
UNAIDED_ROW, LONGEST_ROW, LONG_RUN_AHEAD = 256, 512, 5 * 1024
LEAST_LEAD = 8  # tokens: the least distance between a prefetch and the product
SPLITS, LEAST_SPLIT = 64, 512  # the most splits of a call, and the least tokens of a split
LEAST_SPLIT_IN_TILES = 1024  # of 32 query rows, which tiles (AMX) multiply
# The largest magnitude of values for integer sums; with larger ones they exceed the format's tolerance.
MOST_VALUE = {"float16": 8, "bfloat16": 64}
SMALL = 2**15  # products; one thread finishes fewer before a second one is awake

workspace, partials, kept_weights = Workspace(), Workspace(), Workspace()


@dataclass(frozen=True, slots=True, eq=False)
class RowDecoder:
    """Machine code that reads rows which formats and strides alone do not describe."""

    to_float: int  # address of the code that decodes rows to float32
    engine: Callable | None  # f(query rows) -> the narrow engine over such rows, if there is one
    orders: np.ndarray | None  # orders of query elements, as `narrow.orders` returns them
    to_bfloat16: int = 0  # address of the code that decodes rows to bfloat16 for the engine of pairs, or 0


class Form(NamedTuple):
    """Formats, sizes and the placement of rows: all that decides the machine code of a call."""

    data: str  # the format of queries and outputs
    cache_formats: tuple[str, str]  # formats of keys and of values
    scale: str | None
    group: int  # elements that share a scale; 0 for one scale a row
    heads: int
    dim: int
    value_dim: int
    as_loaded: bool  # whether decoded values are rounded to `data`, as a load does
    spread: bool  # whether the elements of a row have gaps between them
    interleaved: bool  # whether all heads of a token lie together
    decoder: RowDecoder | None
    integers: bool  # whether integer engines may be used
    pairs: bool  # whether the engine of bfloat16 pairs may be used
    tiles: str | None  # what multiplies tiles, unless nothing may (see `machine.tiles`)


class Reading(NamedTuple):
    """The reading of keys and values by the kernels of a form: roundings, products and widths."""

    rounds: bool  # whether rows are rounded to the format of the data, as a load does
    exact: bool  # whether code * scale is rounded to the format of the scales
    widens: bool  # whether narrow tiles read widened rows too
    pairs: bool  # whether wide tiles use the engine of bfloat16 pairs: bfloat16 holds all keys and values
    width: int | None  # elements that integer products multiply at a time; None without them
    tiles: str | None  # what multiplies wide tiles, instead of pairs
    narrow_tiles: str | None  # what multiplies tiles of 8 and 16 query rows; None without them


class Division(NamedTuple):
    """Counts the parts of a call. A launch can serve another step only if its division is equal."""

    tile_groups: int
    work_items: int
    splits: int  # of all tile groups whose context is split
    tiles: int  # the kinds of tiles
    group_tiles: int  # tiles of a wide group
    is_small: bool  # whether one thread computes the call


def prepare_attention(query, out, lse, context, steps, decoding, weights, key_weights=None):
    """Return a launch that computes attention into `out` and, unless None, `lse` and `key_weights`."""
    shared = shared_scales(context)
    if shared:  # multiplied into queries and outputs, at no cost per token
        own = np.ones((2, 1, context.heads), np.float32)
        context, weights = context._replace(scale_format=None), weights._replace(scales=own)
    form = form_of(context)
    if key_weights is not None:  # tiles keep float32 weights, and those of one head at a time
        form = form._replace(interleaved=False, integers=False, tiles=None)
    constants = np.array([weights.scale, weights.softcap], np.float32)
    sinks = None if weights.sinks is None else np.ascontiguousarray(weights.sinks, np.float32)
    params = ATTENTION_PARAMS.filled({
        **fixed_fields(form, prefetching.distances()),
        **side_fields("keys", context, 0, steps.table),
        **side_fields("values", context, 1, steps.table if steps.value_table is None else steps.value_table),
        **step_fields(steps, decoding),
        **scoring_fields(weights, constants, sinks),
        **factor_fields(weights.scales, constants),
        **mask_fields(weights.mask),
        "add_biases": biases_code().address if has_biases(weights) else 0,
        **key_sum_fields(key_weights, steps),
        "values_have_own_table": steps.value_table is not None or not alike(context),
        **long_run_fields(context),
        **token_fields(query, out, lse, context.heads),
    })  # fmt: skip
    if key_weights is not None:
        keep_items_whole(params, steps)
    division = schedule(params, params.ctypes.data)
    fill_engines(params, form)
    return launch(
        params, division, (steps, weights, constants, sinks), shared and (shared, weights), key_weights
    )


def launch(params, division, alive, shared, key_weights=None):
    """Return a launch of scheduled attention; each run reads the `shared` scales anew."""
    at = params.ctypes.data
    counters = np.zeros(division.tile_groups + 1, np.int64)
    params[FIELD["counters"]] = counters.ctypes.data
    grants = [(FIELD["workspace_at"], workspace, int(params[FIELD["workspace_bytes"]]), 0)]
    if division.splits:
        params[FIELD["merge_splits"]] = merge_code().address
        split_bytes = division.splits * division.group_tiles * int(params[FIELD["tile_state_bytes"]])
        grants.append((FIELD["partials"], partials, 0, split_bytes))
    if key_weights is not None:
        grants.append((FIELD["weights_at"], kept_weights, int(params[FIELD["weights_bytes"]]), 0))
    run = functools.partial(
        run_in_workspace, scheduler.scheduler_code("work"),
        min(division.work_items, 1) if division.is_small else division.work_items, params,
        at=at, grants=grants, counters=counters,
    )  # fmt: skip

    def run_with_scales_and_sums():
        if shared:
            fill, weights = shared
            fill(params, weights)
        if key_weights is not None:
            sums = np.zeros(key_weights.shape, np.int64)
            params[FIELD["key_sums"]] = address(sums)
        run()
        if key_weights is not None:
            np.multiply(sums, UNIT, out=key_weights, casting="unsafe")

    owners = {place: owner for place, owner in ADDRESS_OWNER.items() if params[place]}
    plain, single = not shared and key_weights is None, None
    if plain and division.is_small and division.work_items:
        places = [
            (at + 8 * field, address(space.words), each + whole) for field, space, each, whole in grants
        ]
        codes = scheduler.scheduler_code("work").address, scheduler.scheduler_code("schedule").address
        single = Single(codes[0], at, counters, places, codes[1], words_of(division, at))
    return Launch(
        params, owners, run if plain else run_with_scales_and_sums, alive,
        lambda: schedule(params, at) == division, single,
    )  # fmt: skip


def words_of(division, at):
    """Return (address, least, most) of the params' words that a division decides."""
    names = "tile_groups", "work_items", "splits", "tiles", "group_tiles"
    words = [(at + 8 * FIELD[name], *2 * [getattr(division, name)]) for name in names]
    return [*words, (at + 8 * FIELD["products"], 0, SMALL - 1)]


def schedule(params, at):
    """Divide the call into work items: write their number, and the kinds of tiles, to the params at `at`."""
    scheduler.scheduler_code("schedule").ctypes(0, at)
    groups, items, splits, tiles, products = params[FIELD["tile_groups"] : FIELD["products"] + 1].tolist()
    return Division(groups, items, splits, tiles, int(params[FIELD["group_tiles"]]), products < SMALL)


# What formats and sizes decide


def form_of(context):
    """Return the form of a call over a context."""
    return Form(
        cache_formats=(context.cache_format, context.value_format or context.cache_format),
        data=context.data_dtype, scale=context.scale_format, group=context.group,
        heads=context.heads, dim=context.dim, value_dim=context.value_dim,
        as_loaded=context.as_loaded, spread=any(context.elements), interleaved=interleaved(context),
        decoder=context.decoder, integers=machine.has_integers(), pairs=machine.has_pairs(),
        tiles=machine.tiles() if context.data_dtype != "float32" else None,
    )  # fmt: skip


@functools.cache
def reading(form):
    """Choose how the kernels of a form read keys and values."""
    dims, coded, decoder = (form.dim, form.value_dim), form.scale is not None, form.decoder
    rounds = form.as_loaded and not coded and coarser(form.data, form.cache_formats[0])
    minifloat = BY_NAME[form.cache_formats[0]].minifloat
    exact = form.as_loaded and coded and not minifloat and coarser(form.scale, form.data)
    if decoder:
        widens = not decoder.engine
    else:
        widens = rounds or form.spread or not narrow.in_place(form.scale, form.group, dims)
    width = None
    # Integer products have 16 bits, which is not enough for float32.
    if form.integers and form.data != "float32" and not (widens or decoder or exact):
        widths = {integers.width(side, form.scale, form.group, dims) for side in form.cache_formats}
        width = widths.pop() if len(widths) == 1 else None
    pairs = bool(decoder.to_bfloat16) if decoder else rounds or fits_bfloat16(form)
    pairs = pairs and form.data == "bfloat16" and form.pairs
    in_tiles = pairs and not (widens or decoder)
    in_tiles = in_tiles and narrow_tiles.fits(form.cache_formats, dims)
    whole = all(padded(dim) % tile_products.STEP == 0 for dim in dims)
    fits = form.pairs and whole and (pairs or terms(form) != tile_products.BFLOAT16)
    large, few_rows = (form.tiles if allowed else None for allowed in (fits, in_tiles))
    return Reading(rounds, exact, widens, pairs, width, large, few_rows)


def as_is(form, i, element="bfloat16"):
    """Return whether keys, or values (1), lie in memory as whole steps of adjacent elements of a format."""
    dim = (form.dim, form.value_dim)[i]
    is_element = form.decoder is None and form.cache_formats[i] == element
    return is_element and not form.spread and dim % tile_products.STEP == 0


def terms(form):
    """Return the terms of bfloat16 in which tiles multiply numbers of a form: one unless more are needed."""
    if form.data == "float16" and as_is(form, 0, "float16") and as_is(form, 1, "float16"):
        return tile_products.FLOAT16
    coded = form.data == "bfloat16" and form.scale is not None and form.decoder is None
    return tile_products.CODES if coded else tile_products.BFLOAT16


def fits_bfloat16(form):
    """Return whether bfloat16 holds every key and value."""
    most = BY_NAME["bfloat16"].significant
    return form.scale is None and all(0 < BY_NAME[side].significant <= most for side in form.cache_formats)


def interleaved(context):
    """Return whether the heads of a token lie together in memory, for keys and for values."""
    (keys, values), (key_step, value_step), heads = context.sides, context.steps, context.heads
    return (
        heads > 1
        and context.key_bytes <= keys.head <= abs(keys.row * key_step) // heads
        and context.value_bytes <= values.head <= abs(values.row * value_step) // heads
    )


def long_run_fields(context):
    """Return `long_run`, the least bytes of a long run, and `long_run_lead`, the tokens to prefetch there.

    A long run is adjacent rows of floats, which the processor prefetches by itself; with long rows it is
    faster if the kernel prefetches too.
    """
    sizes = context.key_bytes, context.value_bytes
    floats = context.decoder is None and BY_NAME[context.cache_format].bits >= 16
    adjacent = all(
        size == side.row * step for side, step, size in zip(context.sides, context.steps, sizes, strict=True)
    )
    fits, longest = floats and adjacent and max(sizes) <= LONGEST_ROW, max(*sizes, 1)
    return {
        "long_run": prefetching.distances().long_run if fits else prefetching.NEVER,
        "long_run_lead": 0 if longest <= UNAIDED_ROW else LONG_RUN_AHEAD // longest,
    }


def alike(context):
    """Return whether the rows of keys and of values have the same strides."""
    keys, values = context.sides
    return keys.row == values.row and (context.heads == 1 or keys.head == values.head)


@functools.cache
def fixed_fields(form, distances):
    """Return the fields that a form decides, and zeros for fields that are set later."""
    read, orders = reading(form), orders_of(form)
    block = interleaved_tokens(form) if form.interleaved else BLOCK_TOKENS
    leads = [lead_tokens(form, rows, block, distances) for rows in ENGINE_ROWS]
    return dict.fromkeys(LATE_FIELDS, 0) | workspace_fields(form, block, max(leads)) | code_fields(form) | {
        "heads": form.heads, "heads_interleaved": form.interleaved,
        "scale_bytes": scale_bytes(form),
        "scaled_run": prefetching.ALWAYS if form.interleaved else distances.scaled_run,
        "widens": read.widens, "rounds": read.rounds, "integers": read.width is not None,
        "pairs": read.pairs or read.tiles is not None,
        "most_narrow": most_narrow(form),
        "least_in_tiles": narrow_tiles.ROWS[0] if read.narrow_tiles else prefetching.NEVER,
        "most_value": MOST_VALUE.get(form.data, 0),
        "keys.dim": form.dim, "keys.padded_dim": padded(form.dim),
        "values.dim": form.value_dim, "values.padded_dim": padded(form.value_dim),
        "block": block, "wide_block": WIDE_BLOCK, "run_block": RUN_TOKENS,
        "leads": np.array(leads), "short_run": distances.short_run, "touched_run": distances.touched_run,
        "least_split": LEAST_SPLIT, "least_wide_split": LEAST_SPLIT_IN_TILES if read.tiles else LEAST_SPLIT,
        "most_splits": SPLITS, "counting": COUNTING,
        "orders": orders,
    }  # fmt: skip


def lead_tokens(form, tile_rows, block, distances):
    """Return how many tokens before its product a tile of `tile_rows` rows prefetches a row of the cache."""
    if form.decoder or reading(form).widens or tile_rows == WIDE:
        return 0
    if form.interleaved or (reading(form).narrow_tiles and tile_rows in narrow_tiles.ROWS):
        return block  # all steps of a block prefetch rows of the next one
    distance = distances.of_rows(tile_rows)
    return min(max(distance.bytes // max(*side_bytes(form), 1), LEAST_LEAD), distance.tokens)


def code_fields(form):
    """Return the fields of machine code that converts rows."""
    read = reading(form)
    # Rows are decoded as a load does, or without rounding code * scale.
    direction = LOAD if read.exact or form.scale in (None, "float32") else READ
    target = form.data if read.rounds else "float32"
    keys, values = (
        form.decoder.to_float
        if form.decoder
        else rows(direction, target, side, form.scale, form.group).address
        for side in form.cache_formats
    )
    return {
        "keys.to_float": keys, "values.to_float": values,
        "query_to_float": rows(LOAD, "float32", form.data).address,
        "float_to_out": scaled_row(form.data).address,
    }  # fmt: skip


def rows_to_bfloat16(form):
    """Return the addresses of the code that makes bfloat16 of keys and of values."""
    if form.decoder:
        return [form.decoder.to_bfloat16] * 2
    return [rows(LOAD, "bfloat16", side).address for side in form.cache_formats]


def workspace_fields(form, block, lead):
    """Return byte offsets of a worker's buffers, and the sizes of its workspace and of a split's state."""
    dim, value_dim, read = padded(form.dim), padded(form.value_dim), reading(form)
    together = form.heads if form.interleaved else 1
    narrow_rows = most_narrow(form) * together
    rows, tiles = max(narrow_rows, TILES * WIDE), max(together, TILES)
    query_bytes = 5 * dim + 64 if read.width else 4 * dim if read.tiles else 2 * dim if read.pairs else 0
    ids = RUN_TOKENS + max(lead, LONG_RUN_AHEAD // UNAIDED_ROW) + EXTRA_IDS
    addresses = max(RUN_TOKENS, block * together) + EXTRA_ADDRESSES
    sizes = {  # row ids and addresses: of keys, then of values
        "block": BLOCK.dtype.itemsize, "tiles": tiles * TILE.dtype.itemsize, "number": 4,
        "row_ids": 16 * (ids + addresses),
        "scores": 4 * max(2 * WIDE * (WIDE_BLOCK + LANES), narrow_rows * max(block, 32)),
        "alpha": 8 * rows + 8 * WIDE, "m": 8 * rows, "l": 8 * rows,  # narrow tiles have at least 16 lanes
        "queries": 4 * rows * dim, "engine_queries": rows * query_bytes, "o": 4 * rows * value_dim,
        "wide_keys": 4 * WIDE_BLOCK * dim, "wide_values": 4 * WIDE_BLOCK * value_dim,
        "lines": 4 * WIDE * max(dim, value_dim, WIDE_BLOCK),
    }  # fmt: skip
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[f"workspace.{name}"], end = end, end + -(-size // 64) * 64
    return offsets | {
        "workspace_bytes": end, "engine_query_bytes": query_bytes,
        "tile_state_bytes": -(-max(narrow_rows, WIDE) * 4 * (value_dim + 3) // LINE) * LINE,
    }  # fmt: skip


def most_narrow(form):
    """Return the most query rows of a narrow tile."""
    return narrow_tiles.ROWS[-1] if reading(form).narrow_tiles else NARROW


def padded(dim):
    """Round a head size up to whole vectors."""
    return -(-dim // LANES) * LANES


def side_bytes(form):
    """Return the bytes of a head of keys, and of values."""
    return [
        BY_NAME[side].bytes(dim)
        for side, dim in zip(form.cache_formats, (form.dim, form.value_dim), strict=True)
    ]


def scale_bytes(form):
    """Return the bytes of the scales of a head of keys."""
    return form.dim // (form.group or form.dim) * BY_NAME[form.scale].bytes(1) if form.scale else 0


def interleaved_tokens(form):
    """Return the tokens of a block of interleaved heads: whole tiles of the narrow products."""
    size = form.heads * (sum(side_bytes(form)) + 2 * scale_bytes(form))
    return max(8, min(INTERLEAVED_TOKENS, INTERLEAVED_BYTES // max(size, 1) // 8 * 8))


def orders_of(form):
    """Return the orders of query elements that narrow scores need; None for the natural order."""
    if reading(form).widens or reading(form).width:
        return None
    if form.decoder:
        return form.decoder.orders
    return narrow.orders(form.cache_formats[0], form.scale, form.group, form.dim)


def fill_engines(params, form):
    """Write the address of the table of engines for the kinds of tiles that a scheduled call has."""
    tiles, several = int(params[FIELD["tiles"]]), params[FIELD["group"]] > NARROW
    params[FIELD["engines"]], _ = engines(form, tiles, prefetching.distances(), bool(several))
    if tiles & WIDE and reading(form).pairs:
        params[FIELD["keys.to_bfloat16"]], params[FIELD["values.to_bfloat16"]] = rows_to_bfloat16(form)


@functools.cache
def engines(form, tiles, distances, several):
    """Return the address of the table of engines, and the table, zeros for kinds of tiles that are absent.

    `several` says whether a token has more query rows than a narrow tile.
    """
    read, table = reading(form), np.zeros((SPECIAL_ENGINE + 1, len(ENGINE.names)), np.int64)
    chosen = {
        kind: engine(form, tile_rows, not form.interleaved and distances.of_rows(tile_rows).near)
        for kind, tile_rows in enumerate(ENGINE_ROWS)
        if tiles & tile_rows
    }
    if tiles & WIDE and (read.pairs or read.tiles):
        whole = form.dim % tile_products.STEP == 0, as_is(form, 0), as_is(form, 1)
        chosen[SPECIAL_ENGINE] = (
            wide_tiles.engine(read.tiles == machine.MEMORY, terms(form), *whole)
            if read.tiles
            else bfloat16_pairs.engine()
        )
    elif tiles & WIDE and read.width and (several or form.data == "bfloat16"):  # else floats are as fast
        scales = form.scale, form.group, read.width
        chosen[SPECIAL_ENGINE] = wide_integers.engine(form.cache_formats, scales)
    for kind, steps in chosen.items():
        table[kind] = ENGINE.filled(dict.fromkeys(ENGINE.names, 0) | steps)
    return table.ctypes.data, table


def engine(form, tile_rows, near):
    """Return the engine of tiles of `tile_rows` rows."""
    read, scales = reading(form), (form.scale, form.group)
    if tile_rows == WIDE:
        return wide.engine()
    if form.decoder and form.decoder.engine:
        return form.decoder.engine(tile_rows)
    if read.narrow_tiles and tile_rows in narrow_tiles.ROWS:
        return narrow_tiles.engine(tile_rows, read.narrow_tiles == machine.MEMORY)
    if read.width:
        return integers.engine(tile_rows, near, form.cache_formats, (*scales, read.width))
    if read.widens:
        return narrow.engine(tile_rows, ("float32", "float32"), (None, 0), False, False, True)
    paired = read.pairs and form.cache_formats[0] == "bfloat16"
    return narrow.engine(
        tile_rows, form.cache_formats, scales, read.exact, near, not form.interleaved, paired
    )


# What the arguments of a call decide


SIDE_FIELDS = {
    name: [
        f"{name}.{field}" for field in (*Side._fields, "table", "step", "element", "bytes", "scale_tokens")
    ]
    for name in ("keys", "values")
}


def side_fields(name, context, i, table):
    """Return the fields of keys or values: addresses and strides, the page table, steps and sizes."""
    size, side, step = (context.key_bytes, context.value_bytes)[i], context.sides[i], context.steps[i]
    scale_tokens = LINE // 2 // max(1, abs(side.scale_row * step))
    numbers = *side, table, step, context.elements[i], size, max(1, scale_tokens)
    return dict(zip(SIDE_FIELDS[name], numbers, strict=True))


def step_fields(steps, decoding):
    """Return the fields of a step's sequences."""
    return {
        "batch": len(steps.start_pos), "decoding": decoding,
        "seqstarts": steps.seqstarts, "kvstarts": steps.kvstarts,
        "table_row": steps.table.strides[0], "table_entry": steps.table.itemsize,
        "page_size": steps.page_size,
        "table_starts": 0 if steps.table_starts is None else address(steps.table_starts),
    }  # fmt: skip


def token_fields(query, out, lse, heads):
    """Return the fields of queries and of both outputs."""
    fields = {"query": query, "out": out, "lse": lse, "group": query.shape[-2] // heads}
    for name, array in ("query", query), ("out", out), ("lse", None if lse is None else lse[..., None]):
        strides = (0, 0, 0) if array is None else packed_strides(array)
        fields[f"{name}_sequence"], fields[f"{name}_token"], fields[f"{name}_head"] = strides
    return fields


def scoring_fields(weights, constants, sinks):
    """Return the fields of the causal rule, window, ALiBi, soft cap and sinks."""
    slopes = weights.slopes
    return {
        "causal": weights.causal, "alibi": weights.alibi, "left": weights.left, "right": weights.right,
        "cap": weights.softcap != 0, "cap_at": constants[1:],
        "sinks": sinks, "sink_sequences": weights.sink_sequences,
        "slopes": slopes,
        "slopes_sequence": slopes.strides[0] if slopes is not None and len(slopes) > 1 else 0,
    }  # fmt: skip


def factor_fields(scales, constants):
    """Return the fields of factors: `scales` [2, sequences or 1, heads or 1], or one for all keys."""
    if scales is None:
        keys, values, sequence, head = constants, None, 0, 0
    else:
        keys, values = scales
        sequence, head = (
            0 if size == 1 else stride
            for size, stride in zip(scales.shape[1:], scales.strides[1:], strict=True)
        )
    return {"key_factors": keys, "value_factors": values, "factor_sequence": sequence, "factor_head": head}


def has_biases(weights):
    """Return whether a call caps its scores, or adds a bias to them."""
    return bool(weights.softcap or weights.alibi or weights.slopes is not None or weights.mask.address)


def set_mask(params, mask):
    """Write another mask into the params."""
    params[FIELD["mask"] : FIELD["mask"] + len(mask)] = mask
    if mask.address:
        params[FIELD["add_biases"]] = biases_code().address


def mask_fields(mask):
    """Return the fields of a mask."""
    place, kind, sequence, head, row, column, packed = mask
    return {
        "mask": place, "mask_kind": kind, "mask_sequence": sequence, "mask_head": head, "mask_row": row,
        "mask_column": column, "mask_packed": packed,
    }  # fmt: skip


def key_sum_fields(key_weights, steps):
    """Return the fields of the sums of key weights, int64 [B, query heads, tokens]; zeros without them."""
    if key_weights is None:
        fields = "key_sums", "key_sums_sequence", "key_sums_head", "weights_bytes"
        return dict.fromkeys((*fields, "keep_weights", "add_key_weights"), 0)
    _, heads, tokens = key_weights.shape
    most = int(np.diff(steps.kvstarts).max(initial=0))
    sizes = (key_tiles(most), WIDE, WIDE_BLOCK), (1, NARROW, BLOCK_TOKENS)
    size = max(weights_bytes(tiles, rows, most, block) for tiles, rows, block in sizes)
    return weights_code() | {
        "key_sums": 1, "key_sums_sequence": 8 * heads * tokens, "key_sums_head": 8 * tokens,
        "weights_bytes": -(-size // 64) * 64,
    }  # fmt: skip


def keep_items_whole(params, steps):
    """Set limits so that no context is split, and no tile group has more weights than a worker can keep."""
    params[FIELD["least_split"]] = params[FIELD["least_wide_split"]] = 2**40
    params[FIELD["long_run"]] = prefetching.NEVER  # blocks of any item
    queries, kvlens = np.diff(steps.seqstarts), np.diff(steps.kvstarts)
    rows = queries * int(params[FIELD["group"]])
    wide = int((-(-rows[rows > NARROW] // WIDE)).sum()) * int(params[FIELD["heads"]])
    most = key_tiles(int(kvlens.max(initial=0)))
    params[FIELD["most_splits"]] = max(SPLITS, wide // (most + 1) + 1)


def shared_scales(context):
    """Return f(params, weights), which reads scales that all tokens share into `weights`; None without such.

    Each run of a launch calls it, because the caller may change the scales, or pass other ones.
    """
    keys = context.sides[0]
    if not context.scale_format or context.group or keys.scale_sequence or keys.scale_row:
        return None
    dtype, head = BY_NAME[context.scale_format].dtype, keys.scale_head
    size = head * (context.heads - 1) + dtype.itemsize

    def fill(params, weights):
        for side, field in enumerate(("keys.scales", "values.scales")):
            memory = (ctypes.c_char * size).from_address(int(params[FIELD[field]]))
            weights.scales[side, 0] = np.ndarray(context.heads, dtype, memory, strides=(head,))
        weights.scales[0] *= np.float32(weights.scale)

    return fill
