"""Score positions for the indexer of sparse attention: products of tiles, and a sum over heads beside them.

    S = K Q^T                                 [tokens, WIDE] for every WIDE heads of a query
    o_s = sum over heads h of w_h max(0, S_sh)

A work item has some queries that read the same pages, and a block of keys. Its keys are read where they lie
if they are bfloat16 in rows that tiles can load; others are copied to the worker's memory once for all
queries of the item, as bfloat16 if that holds queries and keys, else as float32. Queries were packed before.
"""

import functools

import numpy as np
from numba import types

from kvkit.cpu import machine, memory
from kvkit.cpu.copy.rows import LOAD, call_rows, rows
from kvkit.cpu.launches import WORKER, Launch, Record, Workspace, address, run_in_scratch, threads
from kvkit.cpu.recurrent.rows import move_row, store_row
from kvkit.cpu.simd import attention, index_scores, pairs, tile_products
from kvkit.cpu.simd.attention import WIDE, write_sequence
from kvkit.cpu.simd.tile_products import GROUP_BYTES, STEP
from kvkit.cpu.simd.tiles import ROWS
from kvkit.formats import BY_DTYPE
from kvkit.formats.elements import BFLOAT16, E4M3, FLOAT32
from kvkit.runtime.arrays import zeros
from kvkit.runtime.jit import callback, helper

CACHE_LINE = 64
ITEM = Record("begin end group")  # queries of a group of sequences with the same pages
ITEM_BYTES = ITEM.dtype.itemsize
PARAMS = Record(
    "items counter item blocks workers columns packs heads dim width block",
    "query pack weights weight_token limits pages of_group page_size",
    "keys key_block key_row copy in_place scale scale_block scale_row",
    "scores score_token store_float scratch scratch_bytes",
)
FEW, MANY = 128, 512  # keys of a block: with few queries they stay in the L1 cache, with many in L2
QUERIES = 256  # of an item at most
SUB = 64  # keys whose scores stay in the L1 cache
SMALL_WORK = 2**20  # products below which one thread does it all
PART, RUN, LINE = 4 * SUB * WIDE, GROUP_BYTES * MANY // ROWS, 4 * MANY  # bytes of scores, groups, sums
HEAD = PART + RUN + 8 * (MANY + 8) + 2 * LINE + 64  # bytes of a worker before its copied rows
FLOAT, PAIRS = "float", "pairs"  # engines beside tiles, which have the names of `machine.tiles`
record, item_at, integers = memory.record(PARAMS), memory.record(ITEM), memory.integers
put_float, put = memory.store(types.float32), memory.store(types.int64)
get_float = memory.load(types.float32)
workspace = Workspace()


def engine_of(query, keys):
    """Return what multiplies queries and keys of two elements: tiles, pairs of bfloat16, or float32."""
    if query is not BFLOAT16 or keys not in (BFLOAT16, E4M3):
        return FLOAT
    return machine.tiles() or (PAIRS if machine.has_pairs() else FLOAT)


@functools.cache
def products_of(engine):
    """Return a helper that writes S of some tokens of a block: (queries, rows, groups, addresses, ..)."""
    wide_scores, paired, tiled = attention.wide_scores, pairs.scores, None
    if engine == FLOAT:

        def products(queries, rows, groups, addresses, number, count, dim, target):
            wide_scores(queries, rows, 4 * dim, (count + 7) // 8 * 8, dim, target)

    elif engine == PAIRS:

        def products(queries, rows, groups, addresses, number, count, dim, target):
            paired(
                queries, addresses, ahead=0, count=(count + 7) // 8 * 8, dim=dim, target=target, scale=number,
                rows=WIDE,
            )  # fmt: skip

    else:
        tiled = tile_products.scores(engine == machine.MEMORY, tile_products.BFLOAT16)

        def products(queries, rows, groups, addresses, number, count, dim, target):
            tiled(queries, groups, key_term=0, count=count, dim=dim, target=target, ahead=0, each=0)

    return helper(products)


@functools.cache
def load_keys(row_of, codes):
    """Return a helper that finds or copies the keys first .. last - 1 of a group, and their scales.

    It lists (address, stride) of every 16 keys, an even number of them, and the address of each key. Rows of
    e4m3 `codes` are widened to bfloat16 by vectors of 32.
    """
    widen_codes = index_scores.widen_codes

    def load_keys(params, group, first, last, groups, addresses, scales, rows):
        pages, page_size = integers(params.pages + 8 * integers(params.of_group)[group]), params.page_size
        size, p = row_of * params.dim, first
        while p < last:
            page, offset = pages[p // page_size], p % page_size
            at = p - first
            count = min(ROWS - at % ROWS, page_size - offset, last - p)
            source = params.keys + page * params.key_block + offset * params.key_row
            if params.in_place and at % ROWS == 0 and page_size - offset >= ROWS:
                stride = params.key_row
            else:
                if codes:
                    widen_codes(source, params.key_row, rows + at * size, size, count, params.dim)
                else:
                    call_rows(
                    params.copy, packed=rows + at * size, packed_token=size, cache=source,
                    cache_token=params.key_row, tokens=count, dim=params.width,
                )  # fmt: skip
                source, stride = rows + at // ROWS * ROWS * size, size
            if at % ROWS == 0 or stride == size:
                put(groups + GROUP_BYTES * (at // ROWS), source)
                put(groups + GROUP_BYTES * (at // ROWS) + 8, stride)
                write_sequence(source, stride, ROWS, addresses + 8 * (at // ROWS * ROWS))
            if params.scale:
                from_scale = params.scale + page * params.scale_block + offset * params.scale_row
                for i in range(count):
                    put_float(scales + 4 * (at + i), get_float(from_scale + i * params.scale_row))
            p += count
        used = (last - first + ROWS - 1) // ROWS
        if used % 2:
            put(groups + GROUP_BYTES * used, integers(groups)[2 * used - 2])
            put(groups + GROUP_BYTES * used + 8, integers(groups)[2 * used - 1])

    return helper(load_keys)


@functools.cache
def score_code(engine, row_of, scaled, codes):
    """Compile the scoring of work items with an engine, over rows that have `row_of` bytes an element.

    `scaled` keys have scales; `codes` are widened by vectors.
    """
    add, products, load = index_scores.add_heads(scaled), products_of(engine), load_keys(row_of, codes)
    tiled = engine in (machine.INSTRUCTIONS, machine.MEMORY)
    open_tiles, close_tiles = (tile_products.state(engine == machine.MEMORY, s) for s in ("open", "close"))

    def score(worker, params_at):
        params = record(params_at)
        part = params.scratch + worker * params.scratch_bytes  # S [SUB, WIDE]
        groups, line, scales = part + PART, part + PART + RUN, part + PART + RUN + LINE
        number, addresses = scales + LINE, scales + LINE + 64
        rows = part + HEAD
        put_float(number, np.float32(1))
        if params.width < params.dim:  # zeros follow the elements of a row
            attention.clear(rows, params.block * params.dim * row_of // 4)
        if tiled:
            open_tiles()
        while True:
            i = memory.count_up(params.counter)
            if i >= params.items:
                break
            item = item_at(params.item + ITEM_BYTES * (i // params.blocks))
            first = last = i % params.blocks * params.block
            width = min(params.block, params.columns - first)
            for q in range(item.begin, item.end):
                last = max(last, min(integers(params.limits)[q], first + width))
            load(
                params, item.group, first, last, groups=groups, addresses=addresses, scales=scales, rows=rows
            )
            for q in range(item.begin, item.end):
                visible = max(0, min(integers(params.limits)[q] - first, width))
                for sub in range(0, visible, SUB):
                    count = min(SUB, visible - sub)
                    for pack in range(params.packs):
                        products(
                            params.query + (q * params.packs + pack) * params.pack,
                            rows + sub * row_of * params.dim, groups + sub // ROWS * GROUP_BYTES,
                            addresses + 8 * sub, number=number, count=count, dim=params.dim, target=part,
                        )  # fmt: skip
                        add(
                            part, params.weights + q * params.weight_token + 4 * WIDE * pack,
                            params.heads - WIDE * pack, scales + 4 * sub, count, 1 - pack, line + 4 * sub,
                        )  # fmt: skip
                target = params.scores + q * params.score_token + 4 * first
                move_row(params.store_float, line, target, visible)
                for s in range(visible, width):
                    put_float(target + 4 * s, -np.float32(np.inf))
        if tiled:
            close_tiles()

    return callback(score, WORKER, (engine, row_of, scaled, codes))


def prepare_scores(call, scores):
    """Return a launch that writes the scores [tokens, N] of a checked call of `indexer_scores`."""
    keys, (tokens, heads, width) = call.pool.parts[0], call.query.shape
    element, fmt = E4M3 if call.scaled else BY_DTYPE[keys.dtype], BY_DTYPE[call.query.dtype]
    engine = engine_of(fmt, element)
    row = FLOAT32 if engine == FLOAT else BFLOAT16
    dim = width if engine == FLOAT else -(-width // STEP) * STEP
    if width > 1 and keys.strides[2] != keys.itemsize:
        keys = np.ascontiguousarray(keys)
    packs = -(-heads // WIDE)
    query, weights = packed_queries(call, engine, packs, dim)
    limits, items, pages, of_group = work_of(call.contexts, tokens)
    block = MANY if tokens > len(of_group) else FEW
    blocks = -(-scores.shape[1] // block)
    scale, of_scale = (call.pool.parts[1], call.pool.parts[1].strides) if call.scaled else (None, (0, 0))
    in_place = row is element and dim == width and engine != FLOAT
    if engine not in (FLOAT, PAIRS):  # tiles of rows that begin at cache lines
        in_place = in_place and not any(x % CACHE_LINE for x in (address(keys), *keys.strides[:2]))
    small = tokens * scores.shape[1] * heads * width < SMALL_WORK
    workers = 1 if small else threads()
    room = HEAD + block * dim * row.bytes(1)
    room += -room % CACHE_LINE
    counter = np.zeros(1, np.int64)
    params = PARAMS.filled({
        "items": len(items) * blocks, "counter": counter, "item": items, "blocks": blocks, "workers": workers,
        "columns": scores.shape[1], "packs": packs, "heads": heads, "dim": dim, "width": width,
        "block": block, "query": query, "pack": query.strides[1], "weights": weights,
        "weight_token": weights.strides[0], "limits": limits, "pages": pages, "of_group": of_group,
        "page_size": call.contexts.page_size, "keys": keys, "key_block": keys.strides[0],
        "key_row": keys.strides[1], "copy": rows(LOAD, row.name, element.name).address,
        "in_place": int(in_place), "scale": scale, "scale_block": of_scale[0], "scale_row": of_scale[1],
        "scores": scores, "score_token": scores.strides[0], "store_float": store_row("float32").address,
        "scratch": 0, "scratch_bytes": room,
    })  # fmt: skip
    codes = element is E4M3 and row is BFLOAT16 and dim == width and machine.has_integers()
    code = score_code(engine, row.bytes(1), call.scaled, codes)
    run = functools.partial(run_in_scratch, code, workers, params, PARAMS.at["scratch"], workspace, room)
    alive = call, keys, query, weights, limits, items, pages, of_group, counter
    return Launch(params, {}, run, alive=alive)


def packed_queries(call, engine, packs, dim):
    """Return queries [tokens, packs, dim, WIDE], or pairs of their elements, and weights [tokens, heads]."""
    tokens, heads, width = call.query.shape
    weights = np.zeros((tokens, packs * WIDE), np.float32)
    weights[:, :heads] = call.weights
    if engine == FLOAT:
        query = call.query.astype(np.float32) * np.float32(call.softmax_scale)
    else:
        query, weights = call.query, weights * np.float32(call.softmax_scale)
    padded = np.zeros((tokens, packs * WIDE, dim), query.dtype)
    padded[:, :heads, :width] = query
    words = padded.view(np.float32).reshape(tokens, packs, WIDE, -1)  # a word is two elements of bfloat16
    packed = zeros((tokens, packs, words.shape[3], WIDE), np.float32)  # begins at a cache line
    packed[...] = words.swapaxes(2, 3)
    return packed, weights


def work_of(contexts, tokens):
    """Return how many positions each query sees, the queries of items, pages, and where a group's begin.

    Neighbouring sequences with the same pages, which have one query each where queries see different
    numbers of positions, are one group.
    """
    lengths, starts, table = contexts.lengths, contexts.starts, contexts.table
    counts = np.diff(starts)
    limits = np.arange(tokens) - np.repeat(starts[1:] - lengths, counts) + 1
    if contexts.table_starts is None:
        begins = np.arange(len(lengths)) * table.shape[1]
        new = np.ones(len(lengths), bool)
        new[1:] = (table[1:] != table[:-1]).any(axis=1)
    else:
        begins, new = contexts.table_starts[:-1], np.ones(len(lengths), bool)
    first = np.flatnonzero(new)
    ends = starts[[*first[1:], len(lengths)]]
    items = [
        (q, min(q + QUERIES, end), group)
        for group, (begin, end) in enumerate(zip(starts[first].tolist(), ends.tolist(), strict=True))
        for q in range(begin, end, QUERIES)
    ]
    pages = np.ascontiguousarray(table, np.int64)
    return limits, np.array(items, np.int64).reshape(-1, 3), pages, begins[first].astype(np.int64)
