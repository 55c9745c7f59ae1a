"""Store tokens in a cache or gather them from it: one loop over tokens, for every layout, mode and format.

`store` and `load` differ only in the machine code that `copy_tokens` calls for a run of neighbouring rows,
and in the tokens of a sequence that they copy.
"""

import functools

from numba import types

from kvkit.checks.values import packed_strides
from kvkit.cpu import memory
from kvkit.cpu.copy.rows import COPY_SIDE, LOAD, STORE, call_rows, copy_side_at, rows
from kvkit.cpu.launches import WORKER, Launch, Record, address, run_workers, threads
from kvkit.cpu.simd import panels
from kvkit.formats.elements import BY_NAME
from kvkit.formulas.index import page_of, rest_of_page, row_of, sequence_among, share
from kvkit.runtime.jit import compiled
from kvkit.runtime.repeats import Single

# Tokens of keys, and then of values, that are copied in turn; a store computes their scales together.
BLOCKS = {LOAD: 1, STORE: 8}
SMALL_BYTES = 128 * 1024  # one thread finishes fewer before a second one is awake
STREAM_BYTES = 64 * 2**20  # larger outputs use non-temporal stores, because they stay in no cache

PARAMS = Record(
    "rows_code chunks items workers block heads repeat dim",
    "starts first batch table table_row page_size",
    keys=COPY_SIDE, values=COPY_SIDE,
)  # fmt: skip
SIDES, SIDE_BYTES = 8 * PARAMS.at["keys.packed"], COPY_SIDE.dtype.itemsize
SIDE_FIELDS = [f"{side}.{field}" for side in ("keys", "values") for field in COPY_SIDE.names]
OWNERS = {  # the array that an address points into, by its index in the params
    direction: {PARAMS.at[f"{side}.packed"]: name for side, name in names.items()}
    | {PARAMS.at[f"{side}.{name}"]: name for side in names for name in ("cache", "scale")}
    for direction, names in (
        (STORE, {"keys": "current_key", "values": "current_value"}),
        (LOAD, {"keys": "key", "values": "value"}),
    )
}  # fmt: skip

get = memory.load(types.int64)
record, integers = memory.record(PARAMS), memory.integers


@compiled(WORKER)
def copy_tokens(worker, params_at):
    """Copy the packed tokens of each sequence, whose positions begin at `first`, to or from their cache rows.

    With `block` 0, keys and values are separate work items. If they are neighbours in the cache, one item
    copies both, `block` tokens of each in turn.
    """
    params = record(params_at)
    starts, first = integers(params.starts), integers(params.first)
    total, block = starts[params.batch], params.block
    item = worker
    while item < params.items:
        side = item // params.chunks
        chunk = item - side * params.chunks
        token, end = share(total, chunk, params.chunks), share(total, chunk + 1, params.chunks)
        sequence = sequence_among(starts, params.batch, token)
        while token < end:
            while token >= starts[sequence + 1]:
                sequence += 1
            position = first[sequence] + token - starts[sequence]
            page = get(params.table + sequence * params.table_row + 8 * page_of(position, params.page_size))
            row = row_of(page, position, params.page_size)
            run = min(min(end, starts[sequence + 1]) - token, rest_of_page(position, params.page_size))
            run = min(run, block) if block else run
            for kv in range(side, 2 if block else side + 1):
                place = copy_side_at(
                    params_at + SIDES + SIDE_BYTES * kv
                )  # packed_sequence: see `packed_strides`
                call_rows(
                    params.rows_code,
                    packed=place.packed + sequence * place.packed_sequence + token * place.packed_token,
                    packed_token=place.packed_token, packed_head=place.packed_head,
                    cache=place.cache + sequence * place.cache_sequence + row * place.cache_row,
                    cache_token=place.cache_row, cache_head=place.cache_head,
                    scale=place.scale + sequence * place.scale_sequence + row * place.scale_row,
                    scale_token=place.scale_row, scale_head=place.scale_head,
                    tokens=run, heads=params.heads, repeat=params.repeat, dim=params.dim,
                )  # fmt: skip
            token += run
        item += params.workers


def prepare_transfer(direction, key, value, cache, steps, repeat=1):
    """Return a launch that stores packed new tokens in the cache, or loads the rows of every context.

    Loads repeat the heads of keys and values, to packed outputs.
    """
    is_store = direction == STORE
    starts, first = (steps.seqstarts, steps.start_pos) if is_store else (steps.kvstarts, steps.load_starts)
    adjacent = key.strides[-2] == value.strides[-2] == cache.dim * key.itemsize
    heads, dim = cache.heads, cache.dim
    moved = int(starts[-1]) * 2 * repeat * heads * key.itemsize * dim
    stream = not is_store and moved >= STREAM_BYTES and aligned(key) and aligned(value)
    if repeat == 1 and cache.heads_adjoin and adjacent:
        heads, dim = 1, heads * dim
    codes = cache.scale_format and not BY_NAME[cache.cache_format].minifloat
    groups = panels.groups_in_panel(cache.group, dim // cache.group) if is_store and codes else 0
    formats = cache.data_dtype, cache.cache_format, cache.scale_format
    rows_code = rows(direction, *formats, cache.group, groups, stream).address
    keys, values = cache.sides
    # The fields of a `Side` are those of a `COPY_SIDE` from `cache` on.
    sides = address(key), *packed_strides(key), *keys, address(value), *packed_strides(value), *values
    together = abs(values.address - keys.address) <= abs(keys.row)  # a token's key and value are neighbours
    block = BLOCKS[direction] if together else 0
    chunks = threads() if moved >= SMALL_BYTES else 1
    items = chunks if block else 2 * chunks
    workers = items if chunks > 1 else 1
    params = PARAMS.filled({
        "rows_code": rows_code, "chunks": chunks, "items": items, "workers": workers, "block": block,
        "heads": heads, "repeat": repeat, "dim": dim, **dict(zip(SIDE_FIELDS, sides, strict=True)),
        "starts": starts, "first": first, "batch": len(first),
        "table": steps.table, "table_row": steps.table.strides[0], "page_size": steps.page_size,
    })  # fmt: skip
    code = copy_tokens.code
    run = functools.partial(run_workers, code, workers, address(params))
    single = functools.partial(Single, code.address, address(params)) if moved < SMALL_BYTES else None
    return Launch(params, OWNERS[direction], run, (starts, first, steps.table), single=single)


def aligned(array):
    """Return whether every row begins at a multiple of 16 bytes, as non-temporal stores require."""
    bits = array.ctypes.data
    for stride in array.strides[:-1]:
        bits |= stride
    return bits % 16 == 0
