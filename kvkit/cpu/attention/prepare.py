"""Fill the params of attention from checked arguments, group by group, and return a launch."""

import ctypes
import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvkit.checks.records import Side
from kvkit.checks.values import packed_strides
from kvkit.cpu import launches, machine, prefetching
from kvkit.cpu.attention import scheduler
from kvkit.cpu.attention.biases import add_biases
from kvkit.cpu.attention.engines import (
    bfloat16_pairs,
    narrow,
    narrow_tiles,
    wide,
    wide_integers,
    wide_tiles,
)
from kvkit.cpu.attention.engines import integers as integer_engine
from kvkit.cpu.attention.epilogue import merge_splits, scaled_row
from kvkit.cpu.attention.key_weights import UNIT, add_key_weights, keep_weights, key_tiles, weights_bytes
from kvkit.cpu.attention.params import (
    ATTENTION_PARAMS,
    BLOCK,
    CACHE_OWNERS,
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
from kvkit.cpu.copy.rows import LOAD, READ
from kvkit.cpu.copy.rows import rows as rows_code
from kvkit.cpu.launches import Launch, Workspace, address, run_in_workspace
from kvkit.cpu.simd import tile_products
from kvkit.cpu.simd.attention import WIDE
from kvkit.cpu.simd.chunks import LINE, NARROW
from kvkit.cpu.simd.lanes import LANES, padded
from kvkit.formats.elements import BY_NAME, FLOATS, coarser
from kvkit.runtime.arrays import addresses_of
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
DIVISION = "tile_groups", "work_items", "splits", "tiles", "group_tiles"  # fields that `schedule` writes
SMALL = 2**15  # products; one thread finishes fewer before a second one is awake
SMALL_IN_TEAM = 2**11  # the same if threads of another library run kernels, which wait for work awake

workspace, partials, kept_weights = Workspace(), Workspace(), Workspace()


@dataclass(frozen=True, slots=True, eq=False)
class RowDecoder:
    """Machine code that reads rows which formats and strides alone do not describe."""

    to_float: int  # address of the code that decodes rows to float32
    engine: Callable | None  # f(query rows) -> the narrow engine over such rows, if there is one
    orders: np.ndarray | None  # orders of query elements, as `narrow.orders` returns them
    to_bfloat16: int = 0  # address of the code that decodes rows to bfloat16 for the engine of pairs, or 0


class KernelForm(NamedTuple):
    """Formats, sizes and places of rows, and how kernels read them: all that decides machine code."""

    data: str  # the format of queries and outputs
    cache_formats: tuple[str, str]  # formats of keys and of values
    scale: str | None
    group: int  # elements that share a scale; 0 for one scale a row
    heads: int
    dim: int
    value_dim: int
    spread: bool  # whether the elements of a row have gaps between them
    interleaved: bool  # whether all heads of a token lie together
    decoder: RowDecoder | None
    rounds: bool  # whether rows are rounded to the format of the data, as a load does
    exact: bool  # whether code * scale is rounded to the format of the scales
    widens: bool  # whether narrow tiles read widened rows too
    pairs: bool  # whether wide tiles use the engine of bfloat16 pairs: bfloat16 holds all keys and values
    width: int | None  # elements that integer products multiply at a time; None without them
    tiles: str | None  # what multiplies wide tiles, instead of pairs (see `machine.tiles`)
    narrow_tiles: str | None  # what multiplies tiles of 8 or 16 query rows; None without them


def prepare_attention(query, out, lse, context, steps, decoding, weights, key_weights=None):
    """Return a launch that computes attention into `out` and, unless None, `lse` and `key_weights`."""
    shared = shared_scales(context) if context.scale_format else None
    if shared:  # multiplied into queries and outputs, at no cost per token
        own = np.ones((2, 1, context.heads), np.float32)
        context, weights = context._replace(scale_format=None), weights._replace(scales=own)
    form, distances = form_of(context, key_weights is not None), prefetching.distances()
    constants = np.array([weights.scale, weights.softcap], np.float32)
    sinks = None if weights.sinks is None else np.ascontiguousarray(weights.sinks, np.float32)
    (keys, values), value_table = context.sides, steps.value_table
    # A long run is adjacent rows of floats, which the processor prefetches by itself; with long rows it is
    # faster if the kernel prefetches too, `lead` tokens ahead.
    sizes, (key_step, value_step) = (context.key_bytes, context.value_bytes), context.steps
    longest, floats = max(*sizes, 1), context.decoder is None and BY_NAME[context.cache_format].bits >= 16
    is_long = floats and longest <= LONGEST_ROW and sizes == (keys.row * key_step, values.row * value_step)
    lead = 0 if longest <= UNAIDED_ROW else LONG_RUN_AHEAD // longest
    numbers: list[int] = []  # of the fields of keys and values
    for side, table, step, element, size in zip(
        context.sides, (steps.table, value_table), context.steps, context.elements, sizes, strict=True
    ):
        table_at = address(steps.table if table is None else table)
        scale_tokens = LINE // 2 // max(1, abs(side.scale_row * step))
        numbers += *side, table_at, step, element, size, max(1, scale_tokens)
    same_strides = keys.row == values.row and (context.heads == 1 or keys.head == values.head)
    fields = {
        **dict(zip(SIDE_FIELDS, numbers, strict=True)),
        **scoring_fields(weights, constants, sinks),
        **(NO_KEY_SUMS if key_weights is None else key_sum_fields(key_weights, steps)),
        "values_have_own_table": value_table is not None or not same_strides,
        "long_run": distances.long_run if is_long else prefetching.NEVER,
        "long_run_lead": lead,
        **token_fields(query, out, lse, context.heads, steps, decoding),
    }
    known = FIXED.get((form, distances))
    if known is None:  # where threads make it at once, all get the first one
        known = FIXED.setdefault((form, distances), fixed_params(form, distances))
    record, places, in_order, fixed = known
    if len(fields) + len(fixed) != len(ATTENTION_PARAMS.names):
        ATTENTION_PARAMS.filled(fixed | fields)  # raises, and says what is wrong
    params = record.copy()
    params[places] = np.fromiter(in_order(fields), np.int64, len(places))
    if key_weights is not None:  # no context is split, no tile group has more weights than a worker can keep
        params[FIELD["least_split"]] = params[FIELD["least_wide_split"]] = 2**40
        params[FIELD["long_run"]] = prefetching.NEVER  # blocks of any item
        rows = np.diff(steps.seqstarts) * int(params[FIELD["group"]])
        tiles = int((-(-rows[rows > NARROW] // WIDE)).sum()) * context.heads
        most = key_tiles(int(np.diff(steps.kvstarts).max(initial=0)))
        params[FIELD["most_splits"]] = max(SPLITS, tiles // (most + 1) + 1)
    division = schedule(params, address(params))
    tiles = int(params[FIELD["tiles"]])
    several_tiles = bool(params[FIELD["group"]] > NARROW)  # of the query rows of a token
    params[FIELD["engines"]], _ = engines(form, tiles, distances, several_tiles)
    if tiles & WIDE and form.pairs:  # bfloat16 holds all keys and values
        for name, side in zip(("keys", "values"), form.cache_formats, strict=True):
            code = form.decoder.to_bfloat16 if form.decoder else rows_code(LOAD, "bfloat16", side).address
            params[FIELD[f"{name}.to_bfloat16"]] = code
    return launch(
        params, division, (steps, weights, constants, sinks, fixed), shared and (shared, weights), key_weights
    )


def launch(params, division, alive, shared, key_weights=None):
    """Return a launch of scheduled attention; each run reads the `shared` scales anew."""
    at = address(params)
    groups, items, splits, _, group_tiles, is_alone = division
    counters = np.zeros(groups + 1, np.int64)
    params[FIELD["counters"]] = address(counters)
    grants = [(FIELD["workspace_at"], workspace, int(params[FIELD["workspace_bytes"]]), 0)]
    if splits:
        params[FIELD["merge_splits"]] = merge_splits.code.address
        split_bytes = splits * group_tiles * int(params[FIELD["tile_state_bytes"]])
        grants.append((FIELD["partials"], partials, 0, split_bytes))
    if key_weights is not None:
        grants.append((FIELD["weights_at"], kept_weights, int(params[FIELD["weights_bytes"]]), 0))
    run = functools.partial(
        run_in_workspace, scheduler.work.code,
        min(items, 1) if is_alone else items, params,
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

    plain, single = not shared and key_weights is None, None
    if plain and items and params[FIELD["products"]] < SMALL:
        single = functools.partial(single_kernel, at, division, counters, grants)
    return Launch(
        params, CACHE_OWNERS, run if plain else run_with_scales_and_sums, alive,
        lambda: schedule(params, at) == division, single,
    )  # fmt: skip


def single_kernel(at, division, counters, grants):
    """Return what runs scheduled attention with params at `at`, in one thread or in a team's, or None."""
    kernel, alone = scheduler.work.code, division[-1]
    workers = 1 if alone else min(division[1], launches.threads())
    if workers > 1 and not launches.parallel:
        return None
    team = launches.team_of(kernel, workers, at) if workers > 1 else None
    code = kernel.address if team is None else launches.start_team.code.address
    places = [
        (at + 8 * field, address(space.words), workers * each + whole) for field, space, each, whole in grants
    ]
    # (address, least, most) of the params' words that a division decides
    words = [(at + 8 * FIELD[name], *2 * [number]) for name, number in zip(DIVISION, division, strict=False)]
    limits = (0, least_shared() - 1) if alone else (least_shared(), SMALL - 1)
    words.append((at + 8 * FIELD["products"], *limits))
    divide = scheduler.schedule.code.address, at
    return Single(code, at if team is None else address(team), counters, places, divide, words, team)


def schedule(params, at):
    """Divide the call into work items: write their number, and the kinds of tiles, to the params at `at`.

    Return the division: the numbers of tile groups, of work items, and of splits of all tile groups whose
    context is split; the kinds of tiles; the tiles of a wide group; and whether one thread computes the call.
    A launch can serve another step only if its division is equal.
    """
    scheduler.schedule.code.ctypes(0, at)
    *counts, products = params[FIELD["tile_groups"] : FIELD["products"] + 1].tolist()
    return *counts, int(params[FIELD["group_tiles"]]), products < least_shared()


def least_shared():
    """Return the least products that several threads compute."""
    return SMALL_IN_TEAM if launches.parallel else SMALL


FIXED: dict[Any, Any] = {}  # what `fixed_params` has returned, by its arguments


# What formats and sizes decide


def form_of(context, keeps_weights=False):
    """Return the form of a call over a context; with `keeps_weights` tiles keep the weights of keys.

    These are float32, and of one head at a time.
    """
    (keys, values), (key_step, value_step), heads = context.sides, context.steps, context.heads
    interleaved = (
        not keeps_weights
        and heads > 1
        and context.key_bytes <= keys.head <= abs(keys.row * key_step) // heads
        and context.value_bytes <= values.head <= abs(values.row * value_step) // heads
    )
    formats = context.cache_format, context.value_format or context.cache_format
    rounded = keeps_weights or context.data_dtype == "float32"
    return chosen_form(
        data=context.data_dtype, cache_formats=formats, scale=context.scale_format, group=context.group,
        heads=heads, dim=context.dim, value_dim=context.value_dim, as_loaded=context.as_loaded,
        spread=any(context.elements), interleaved=interleaved, decoder=context.decoder,
        integers=machine.has_integers() and not keeps_weights, pairs=machine.has_pairs(),
        tiles=None if rounded else machine.tiles(),
    )  # fmt: skip


@functools.cache
def chosen_form(*, as_loaded, integers, pairs, tiles, **given):
    """Return the form that has what is `given`, and choose how its kernels read keys and values.

    If rows are read `as_loaded`, decoded values are rounded to the format of the data. `integers`, `pairs`
    and `tiles` say which engines the machine has.
    """
    unread: Any = dict.fromkeys(KernelForm._fields[len(given) :])
    form = KernelForm(**given, **unread)
    dims, coded, decoder = (form.dim, form.value_dim), form.scale is not None, form.decoder
    rounds = as_loaded and not coded and coarser(form.data, form.cache_formats[0])
    minifloat = BY_NAME[form.cache_formats[0]].minifloat
    exact = as_loaded and form.scale is not None and not minifloat and coarser(form.scale, form.data)
    if decoder:
        widens = not decoder.engine
    else:
        widens = rounds or form.spread or not narrow.in_place(form.scale, form.group, dims)
    width = None
    # Integer products have 16 bits, which is not enough for float32.
    if integers and form.data != "float32" and not (widens or decoder or exact):
        widths = {integer_engine.width(side, form.scale, form.group, dims) for side in form.cache_formats}
        width = widths.pop() if len(widths) == 1 else None
    most = BY_NAME["bfloat16"].significant
    fits = not coded and all(0 < BY_NAME[side].significant <= most for side in form.cache_formats)
    may_pair, pairs = pairs, bool(decoder.to_bfloat16) if decoder else rounds or fits
    pairs = pairs and form.data == "bfloat16" and may_pair
    split, narrow_split = terms(form._replace(pairs=pairs, exact=exact))
    in_tiles = may_pair and not widens and narrow_split
    whole = all(padded(dim) % tile_products.STEP == 0 for dim in dims)
    in_wide_tiles = may_pair and whole and (pairs or split != tile_products.BFLOAT16)
    return form._replace(
        rounds=rounds, exact=exact, widens=widens, pairs=pairs, width=width,
        tiles=tiles if in_wide_tiles else None, narrow_tiles=tiles if in_tiles else None,
    )  # fmt: skip


def as_is(form, i, element="bfloat16"):
    """Return whether keys, or values (1), lie in memory as whole steps of adjacent elements of a format."""
    dim = (form.dim, form.value_dim)[i]
    is_element = form.decoder is None and form.cache_formats[i] == element
    return is_element and not form.spread and dim % tile_products.STEP == 0


def terms(form):
    """Return the terms of bfloat16 in which wide tiles multiply, and those of narrow ones or None."""
    element, halves = form.cache_formats[0], form.data == "float16"
    small = element in narrow_tiles.EIGHT_BITS
    fits = (small or form.pairs or halves) and all(as_is(form, i, element) for i in range(2))
    if halves and fits and element == "float16":
        return tile_products.FLOAT16, tile_products.FLOAT16
    coded = form.data == "bfloat16" and form.scale is not None and form.decoder is None
    wide = tile_products.CODES if coded else tile_products.BFLOAT16
    if not small:
        return wide, wide if fits and form.pairs and element == "bfloat16" else None
    dims = form.dim, form.value_dim
    fits = fits and not any(dim % LINE for dim in dims) and (form.group or max(dims)) >= max(dims)
    known = element == "int8" or machine.features_of("lookups")
    narrow_terms = tile_products.Terms(1, 1 + halves, element, form.scale is not None)
    return wide, narrow_terms if fits and known and not form.exact else None


def fixed_params(form, distances):
    """Return (params with the fields of a form, where those of a call lie, f(fields of a call), the fields).

    The function returns the numbers of a call's fields in order. Fields that are set later are 0. The params
    hold addresses of arrays that are among the fields.
    """
    decoder, block, dims = form.decoder, BLOCK_TOKENS, (form.dim, form.value_dim)
    size = [BY_NAME[side].bytes(dim) for side, dim in zip(form.cache_formats, dims, strict=True)]  # of a head
    scale_bytes = form.dim // (form.group or form.dim) * BY_NAME[form.scale].bytes(1) if form.scale else 0
    if form.interleaved:  # whole tiles of the narrow products
        token_bytes = form.heads * (sum(size) + 2 * scale_bytes)
        block = max(8, min(INTERLEAVED_TOKENS, INTERLEAVED_BYTES // max(token_bytes, 1) // 8 * 8))
    orders = None  # of query elements: the natural one
    if not (form.widens or form.width):
        one_side = form.cache_formats[0], form.scale, form.group, form.dim
        orders = decoder.orders if decoder else narrow.orders(*one_side)
    in_tiles = narrow_tiles.tile_rows(terms(form)[1]) if form.narrow_tiles else ()
    leads = []  # how many tokens before its product a tile prefetches a row of the cache
    for rows in ENGINE_ROWS:
        distance = distances.of_rows(rows)
        if decoder or form.widens or rows == WIDE:
            leads.append(0)
        elif form.interleaved or rows in in_tiles:
            leads.append(block)  # all steps of a block prefetch rows of the next one
        else:
            leads.append(min(max(distance.bytes // max(*size, 1), LEAST_LEAD), distance.tokens))
    # Rows are decoded as a load does, or without rounding code * scale.
    direction = LOAD if form.exact or form.scale in (None, "float32") else READ
    # Heads of one scale share a group as long as the larger; in a smaller head it is the whole row's.
    target, groups = (
        form.data if form.rounds else "float32",
        [form.group * (form.group <= dim) for dim in dims],
    )
    to_float = [
        decoder.to_float if decoder else rows_code(direction, target, side, form.scale, group).address
        for side, group in zip(form.cache_formats, groups, strict=True)
    ]
    most_narrow = in_tiles[-1] if in_tiles else NARROW  # rows of a narrow tile
    fixed = dict.fromkeys(LATE_FIELDS, 0) | workspace_fields(form, most_narrow, block, max(leads)) | {
        "heads": form.heads, "heads_interleaved": form.interleaved,
        "scale_bytes": scale_bytes, "scale_format": FLOATS.index(BY_NAME[form.scale or "float32"]),
        "scaled_run": prefetching.ALWAYS if form.interleaved else distances.scaled_run,
        "widens": form.widens, "rounds": form.rounds, "integers": form.width is not None,
        "pairs": form.pairs or form.tiles is not None,
        "most_paired": prefetching.NEVER if form.tiles or not machine.has_slow_pairs() else LANES,
        "most_narrow": most_narrow,
        "least_in_tiles": in_tiles[0] if in_tiles else prefetching.NEVER,
        "most_value": MOST_VALUE.get(form.data, 0),
        "keys.dim": form.dim, "keys.padded_dim": padded(form.dim),
        "values.dim": form.value_dim, "values.padded_dim": padded(form.value_dim),
        "block": block, "wide_block": WIDE_BLOCK, "run_block": RUN_TOKENS,
        "leads": np.array(leads), "short_run": distances.short_run, "touched_run": distances.touched_run,
        "least_split": LEAST_SPLIT, "least_wide_split": LEAST_SPLIT_IN_TILES if form.tiles else LEAST_SPLIT,
        "most_splits": SPLITS, "counting": COUNTING,
        "orders": orders,
        "keys.to_float": to_float[0], "values.to_float": to_float[1],
        "query_to_float": rows_code(LOAD, "float32", form.data).address,
        "float_to_out": scaled_row(form.data).address,
    }  # fmt: skip
    names = [name for name in ATTENTION_PARAMS.names if name not in fixed]
    record = ATTENTION_PARAMS.filled(fixed | dict.fromkeys(names, 0))
    return record, np.array([FIELD[name] for name in names]), operator.itemgetter(*names), fixed


def workspace_fields(form, most_narrow, block, lead):
    """Return byte offsets of a worker's buffers, and the sizes of its workspace and of a split's state."""
    dim, value_dim = padded(form.dim), padded(form.value_dim)
    together = form.heads if form.interleaved else 1
    narrow_rows = most_narrow * together
    rows, tiles = max(narrow_rows, TILES * WIDE), max(together, TILES)
    in_tiles = form.tiles or form.narrow_tiles
    query_bytes = 5 * dim + 64 if form.width else 4 * dim if in_tiles else 2 * dim if form.pairs else 0
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


@functools.cache
def engines(form, tiles, distances, several):
    """Return the address of the table of engines, and the table, zeros for kinds of tiles that are absent.

    `several` says whether a token has more query rows than a narrow tile.
    """
    table = np.zeros((SPECIAL_ENGINE + 1, len(ENGINE.names)), np.int64)
    chosen, stored, scales = {}, form.cache_formats, (form.scale, form.group)
    paired, (split, narrow_split) = form.pairs and stored[0] == "bfloat16", terms(form)
    for kind, rows in enumerate(ENGINE_ROWS):
        near = not form.interleaved and distances.of_rows(rows).near
        if not tiles & rows:
            continue
        if rows == WIDE:
            chosen[kind] = wide.engine()
        elif form.decoder and form.decoder.engine:
            chosen[kind] = form.decoder.engine(rows)
        elif form.narrow_tiles and rows in narrow_tiles.tile_rows(narrow_split):
            chosen[kind] = narrow_tiles.engine(rows, form.narrow_tiles == machine.MEMORY, narrow_split)
        elif form.width:
            chosen[kind] = integer_engine.engine(rows, near, stored, (*scales, form.width))
        elif form.widens:
            chosen[kind] = narrow.engine(rows, ("float32", "float32"), (None, 0), False, False, True)
        else:
            in_order = not form.interleaved
            chosen[kind] = narrow.engine(rows, stored, scales, form.exact, near, in_order, paired)
    if tiles & WIDE and form.tiles:
        whole = form.dim % tile_products.STEP == 0, as_is(form, 0), as_is(form, 1)
        chosen[SPECIAL_ENGINE] = wide_tiles.engine(form.tiles == machine.MEMORY, split, *whole)
    elif tiles & WIDE and form.pairs:
        chosen[SPECIAL_ENGINE] = bfloat16_pairs.engine()
    elif tiles & WIDE and form.width and (several or form.data == "bfloat16"):  # else floats are as fast
        chosen[SPECIAL_ENGINE] = wide_integers.engine(stored, (*scales, form.width))
    for kind, steps in chosen.items():
        table[kind] = ENGINE.filled(dict.fromkeys(ENGINE.names, 0) | steps)
    return table.ctypes.data, table


# What the arguments of a call decide


NO_KEY_SUMS = dict.fromkeys(
    ("key_sums", "key_sums_sequence", "key_sums_head", "weights_bytes", "keep_weights", "add_key_weights"), 0
)

SIDE_FIELDS = [
    f"{name}.{field}"
    for name in ("keys", "values")
    for field in (*Side._fields, "table", "step", "element", "bytes", "scale_tokens")
]


def token_fields(query, out, lse, heads, steps, decoding):
    """Return the fields of queries, of both outputs, and of a step's sequences."""
    starts = steps.seqstarts, steps.kvstarts, steps.table_starts
    query_at, out_at, lse_at, seqstarts, kvstarts, table_starts = addresses_of((query, out, lse, *starts))
    fields = {
        "query": query_at, "out": out_at, "lse": lse_at, "group": query.shape[-2] // heads,
        "batch": len(steps.start_pos), "decoding": decoding, "seqstarts": seqstarts, "kvstarts": kvstarts,
        "table_row": steps.table.strides[0], "table_entry": steps.table.itemsize,
        "page_size": steps.page_size, "table_starts": table_starts,
    }  # fmt: skip
    fields["query_sequence"], fields["query_token"], fields["query_head"] = packed_strides(query)
    fields["out_sequence"], fields["out_token"], fields["out_head"] = packed_strides(out)
    strides = (0, 0, 0) if lse is None else packed_strides(lse[..., None])
    fields["lse_sequence"], fields["lse_token"], fields["lse_head"] = strides
    return fields


def scoring_fields(weights, constants, sinks):
    """Return the fields of the causal rule, window, ALiBi, soft cap, sinks and masks, and of factors.

    Factors are one for all keys, or `weights.scales` [2, sequences or 1, heads or 1].
    """
    slopes, scales, mask, softcap = weights.slopes, weights.scales, weights.mask, weights.softcap
    sinks_at, slopes_at, constants_at = addresses_of((sinks, slopes, constants))
    biases = softcap or weights.alibi or slopes_at or mask.address
    keys_at, values_at, factor_sequence, factor_head = constants_at, 0, 0, 0
    if scales is not None:
        keys_at, values_at = address(scales), address(scales) + scales.strides[0]
        factor_sequence, factor_head = (
            stride if size > 1 else 0
            for size, stride in zip(scales.shape[1:], scales.strides[1:], strict=True)
        )
    return {
        "causal": weights.causal, "alibi": weights.alibi, "left": weights.left, "right": weights.right,
        "cap": softcap != 0, "cap_at": constants_at + constants.itemsize,
        "sinks": sinks_at, "sink_sequences": weights.sink_sequences,
        "slopes": slopes_at,
        "slopes_sequence": slopes.strides[0] if slopes is not None and len(slopes) > 1 else 0,
        "key_factors": keys_at, "value_factors": values_at,
        "factor_sequence": factor_sequence, "factor_head": factor_head,
        "add_biases": add_biases.code.address if biases else 0,
        "mask": mask.address, "mask_kind": mask.kind, "mask_sequence": mask.sequence,
        "mask_head": mask.head, "mask_row": mask.row, "mask_column": mask.column, "mask_packed": mask.packed,
    }  # fmt: skip


def set_mask(params, mask):
    """Write another mask into the params."""
    params[FIELD["mask"] : FIELD["mask"] + len(mask)] = mask
    if mask.address:
        params[FIELD["add_biases"]] = add_biases.code.address


def key_sum_fields(key_weights, steps):
    """Return the fields of the sums of key weights, int64 [B, query heads, tokens]."""
    _, heads, tokens = key_weights.shape
    most = int(np.diff(steps.kvstarts).max(initial=0))
    sizes = (key_tiles(most), WIDE, WIDE_BLOCK), (1, NARROW, BLOCK_TOKENS)
    size = max(weights_bytes(tiles, rows, most, block) for tiles, rows, block in sizes)
    return {
        "keep_weights": keep_weights.code.address, "add_key_weights": add_key_weights.code.address,
        "key_sums": 1, "key_sums_sequence": 8 * heads * tokens, "key_sums_head": 8 * tokens,
        "weights_bytes": -(-size // 64) * 64,
    }  # fmt: skip


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
