"""Copy rows between packed tensors and caches in blocks, by slot; `transfer` copies by page table.

`checks.slots` describes pieces, which are runs of tokens and slots. Plain copies convert nothing, so their
code depends on the element size only. `prepare_encoding` quantizes, and means are computed in float32.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
from numba import types

from kvkit.checks.records import FRACTAL_BYTES
from kvkit.checks.slots import COUNT, HEAD, MEAN, PIECE, SLOT, TOKEN
from kvkit.cpu import memory
from kvkit.cpu.copy.rows import STORE, call_rows, rows
from kvkit.cpu.copy.transfer import SMALL_BYTES, aligned
from kvkit.cpu.launches import WORKER, Launch, Record, Workspace, address, run_workers, threads
from kvkit.cpu.positions.rotary import call_heads, halves_of, heads_of, put_pair
from kvkit.cpu.simd import means, panels
from kvkit.cpu.simd.attention import prefetch_bytes
from kvkit.cpu.simd.fractals import fractals, scattered_fractals
from kvkit.cpu.simd.lanes import LANES
from kvkit.formats import BY_DTYPE
from kvkit.formulas.index import page_of, rest_of_page, row_of, sequence_among, share
from kvkit.runtime.jit import callback, compiled, helper
from kvkit.runtime.repeats import Single

MOVES = {4: "float32", 2: "float16", 1: "int8"}  # a format for each element size in bytes
STREAM_BYTES = 4 * 2**20  # larger copies use non-temporal stores, which are faster beyond the L2 cache
FRACTAL_ROWS = 32  # NZ rows per batch: 8 heads of 128 float16 make 64 KB, which fit in the L2 cache
TILE = 16  # tokens per tile if the cache is head-major
SCALES = "scales scale_block scale_row scale_outer scale_inner"
ROTATION = "unrotated unrotated_token unrotated_head heads angles pairs begin halves rotate_code"
# A packed array and its cache: addresses, byte strides, and the loops that copy a row (see `RowLoops`).
POOL_SIDE = Record(
    "packed token head cache block row",
    "outer packed_outer cache_outer inner packed_inner cache_inner dim",
    "by_head by_fractal elements line_bytes stores",
    SCALES,
    ROTATION,
)
NO_SCALES, UNROTATED = (dict.fromkeys(line.split(), 0) for line in (SCALES, ROTATION))
PARAMS = Record(
    "rows_code mean_code chunks items workers sides side_bytes pieces starts count block_size",
    "lines item_bytes",
)


class RowLoops(NamedTuple):
    """Two nested loops that copy a token's row: counts and byte strides; `size` is copied at a time."""

    outer: int
    packed_outer: int
    cache_outer: int
    inner: int
    packed_inner: int
    cache_inner: int
    size: int

    def fields(self, row, unit):
        """Return fields of `POOL_SIDE`; tokens of the cache are `row` bytes apart, elements have `unit`."""
        loops = self._asdict()
        dim = loops.pop("size") // unit
        return loops | {"dim": dim, "by_head": abs(self.cache_inner) > abs(row)}


class KeyRotation(NamedTuple):
    """The rotation of keys before they are stored."""

    angles: np.ndarray  # [tokens, pairs, (cosine, sine)]
    begin: int  # the first element that is rotated
    halves: bool  # whether pairs are elements i and i + pairs, not neighbours


get, get_float = memory.load(types.int64), memory.load(types.float32)
put, addresses = memory.store(types.int64), memory.scratch(8 * FRACTAL_ROWS)
record, side, integers = memory.record(PARAMS), memory.record(POOL_SIDE), memory.integers


@memory.machine_code
def call_mean(code, source, step, count, target, dim):
    """Call the machine code of `mean`."""


@compiled(WORKER)
def copy_pieces(worker, params_at):
    """Copy pieces to or from their slots. A work item is an equal share of the tokens of one packed array.

    `starts` [pieces + 1] are the tokens before each piece; `sides` locate each packed array and its cache.
    Means and rotated keys are computed in a buffer of the work item (`lines`), and then stored.
    """
    params = record(params_at)
    starts, item = integers(params.starts), worker
    total = starts[params.count]
    while item < params.items:
        at, chunk = side(params.sides + item // params.chunks * params.side_bytes), item % params.chunks
        token, end = share(total, chunk, params.chunks), share(total, chunk + 1, params.chunks)
        piece = sequence_among(starts, params.count, token)
        while token < end:
            while token >= starts[piece + 1]:
                piece += 1
            fields = params.pieces + 8 * piece * PIECE
            done, slot = token - starts[piece], get(fields + 8 * SLOT)
            source = address_of(params, at, token, piece)
            if at.by_fractal and at.stores and not params.mean_code and not at.angles:
                token += store_fractals(params, at, token, end, piece)
            elif get(fields + 8 * MEAN):
                store_mean(params, at, item, fields, done, min(end, starts[piece + 1]) - token)
                token = min(end, starts[piece + 1])
            else:
                run = min(min(end, starts[piece + 1]) - token, rest_of_page(slot + done, params.block_size))
                run = min(run, TILE) if at.by_head or at.angles else run
                if at.angles:
                    first = get(fields + 8 * TOKEN) + done
                    source = rotate_keys(at, first, run, params.lines + item * params.item_bytes)
                move_run(params.rows_code, at, source, slot + done, run, params.block_size)
                token += run
        item += params.workers


@helper
def store_mean(params, at, item, fields, done, tokens):
    """Compute and store this worker's share of a piece's mean, for `tokens` tokens from token `done` on.

    Workers share the elements of a mean in proportion to their tokens, so that one worker sums an element in
    order. If rows are not contiguous, the worker with the first token computes the whole mean.
    """
    count, line = get(fields + 8 * COUNT), params.lines + item * params.item_bytes
    source = at.packed + get(fields + 8 * TOKEN) * at.token + get(fields + 8 * HEAD) * at.head
    slot = get(fields + 8 * SLOT)
    if at.outer == 1 and at.inner == 1 and not at.by_fractal:
        panels = at.elements // LANES
        first, last = done * panels // count, (done + tokens) * panels // count
        if first < last:
            offset, size = first * LANES * at.line_bytes // at.elements, (last - first) * LANES
            call_mean(params.mean_code, source + offset, at.token, count, line, size)
            target = at.cache + page_of(slot, params.block_size) * at.block
            target += row_of(0, slot, params.block_size) * at.row + offset
            call_rows(params.rows_code, packed=line, cache=target, dim=at.dim * size // at.elements)
    elif done == 0:
        call_mean(params.mean_code, source, at.token, count, line, at.elements)
        move_run(params.rows_code, at, line, slot, 1, params.block_size)


@helper
def rotate_keys(at, first, tokens, line):
    """Rotate the keys of some tokens, from token `first` on, into the buffer `line` [tokens, heads, dim]."""
    cosines = line + TILE * at.token
    sines = cosines + 8 * at.pairs
    front = at.begin * at.line_bytes // at.elements
    for token in range(first, first + tokens):
        for pair in range(at.pairs):
            angle = at.angles + 8 * (token * at.pairs + pair)
            put_pair(pair, at.pairs, at.halves, get_float(angle), get_float(angle + 4), cosines, sines)
        source, target = at.unrotated + token * at.unrotated_token, line + (token - first) * at.token
        if at.begin:
            call_heads(
                at.rotate_code, source=source, source_head=at.unrotated_head, target=target,
                target_head=at.line_bytes, heads=at.heads, dim=at.begin, rotary_dim=0,
                cosines=cosines, sines=sines,
            )  # fmt: skip
        call_heads(
            at.rotate_code, source=source + front, source_head=at.unrotated_head, target=target + front,
            target_head=at.line_bytes, heads=at.heads, dim=at.elements - at.begin, rotary_dim=2 * at.pairs,
            cosines=cosines, sines=sines,
        )  # fmt: skip
    return line


@helper
def store_fractals(params, at, token, end, piece):
    """Store tokens from `token` on while their slots are consecutive. Return how many were stored.

    A fractal is a token's 32 bytes of a group in NZ. The copy writes whole cache lines, which hold the
    fractals of two tokens. It prefetches the next tokens row by row, because it reads one group of each row
    at a time.
    """
    starts, sources, first, rows, later = integers(params.starts), addresses(), 0, 0, piece
    while token + rows < end and rows < FRACTAL_ROWS:
        while token + rows >= starts[piece + 1]:
            piece += 1
        slot = get(params.pieces + 8 * (piece * PIECE + SLOT)) + token + rows - starts[piece]
        if rows == 0:
            first = slot
        elif slot != first + rows or row_of(0, slot, params.block_size) == 0:
            break
        put(sources + 8 * rows, address_of(params, at, token + rows, piece))
        ahead = min(token + rows + FRACTAL_ROWS, end - 1)
        while ahead >= starts[later + 1]:
            later += 1
        prefetch_bytes(address_of(params, at, ahead, later), FRACTAL_BYTES * at.inner)
        rows += 1
    page, row = page_of(first, params.block_size), row_of(0, first, params.block_size)
    target = at.cache + page * at.block + row * at.row
    scattered_fractals(sources, at.packed_inner, target, at.row, at.cache_inner, rows, at.inner)
    return rows


@helper
def address_of(params, at, token, piece):
    """Return the address of a piece's token in the packed tensor."""
    fields, done = params.pieces + 8 * piece * PIECE, token - integers(params.starts)[piece]
    return at.packed + (get(fields + 8 * TOKEN) + done) * at.token + get(fields + 8 * HEAD) * at.head


@helper
def move_run(code, at, packed, slot, run, block_size):
    """Copy `run` consecutive rows between the packed tensor and one block."""
    page, row = page_of(slot, block_size), row_of(0, slot, block_size)
    cache, scales = at.cache + page * at.block + row * at.row, at.scales + page * at.scale_block
    scales += row * at.scale_row
    for outer in range(at.outer):
        source, target = packed + outer * at.packed_outer, cache + outer * at.cache_outer
        scale = scales + outer * at.scale_outer
        if at.by_fractal:
            if at.stores:  # means; `store_fractals` stores all else
                fractals(
                    source=source, source_row=at.token, source_group=at.packed_inner,
                    target=target, target_row=at.row, target_group=at.cache_inner, rows=run, groups=at.inner,
                )  # fmt: skip
            else:
                fractals(
                    source=target, source_row=at.row, source_group=at.cache_inner,
                    target=source, target_row=at.token, target_group=at.packed_inner,
                    rows=run, groups=at.inner,
                )  # fmt: skip
        elif at.by_head:
            call_rows(
                code, packed=source, packed_token=at.packed_inner, packed_head=at.token,
                cache=target, cache_token=at.cache_inner, cache_head=at.row,
                scale=scale, scale_token=at.scale_inner, scale_head=at.scale_row,
                tokens=at.inner, heads=run, dim=at.dim,
            )  # fmt: skip
        else:
            call_rows(
                code, packed=source, packed_token=at.token, packed_head=at.packed_inner,
                cache=target, cache_token=at.row, cache_head=at.cache_inner,
                scale=scale, scale_token=at.scale_row, scale_head=at.scale_inner,
                tokens=run, heads=at.inner, dim=at.dim,
            )  # fmt: skip


@functools.cache
def mean(element):
    """Compile f(source, step, count, target, dim), which writes the mean of `count` rows."""
    average = means.mean(element)

    def mean(source, step, count, target, dim):
        average(source, step, count, target, dim)

    return callback(mean, types.void(*[types.int64] * 5), ("mean", element))


lines = Workspace()


def prepare_pieces(direction, packed, caches, pieces, block_size, element=None, names=(), rotation=None):
    """Return a launch that copies pieces between one or two packed arrays and as many caches.

    packed: [tokens, heads, dim]. Caches: [blocks, rows, heads, dim], of any strides; if pieces name heads,
    they have one head. `element` is the format of rows that are averaged, None without means. `names` ("key",
    "value") name the owners of addresses. A `rotation` rotates the first array.
    """
    arrays, rotations, rotated_bytes = (*packed, *caches), [UNROTATED] * len(packed), 0
    if rotation is not None:
        line, rotations[0], rotated_bytes = rotated_line(packed[0], rotation)
        packed = [line, *packed[1:]]
    loops = [row_loops(array, cache) for array, cache in zip(packed, caches, strict=True)]
    unit = min(unit_of(each.size) for each in loops)
    sides, moved, line_bytes = [], 0, 0
    for array, cache, loop, rotated in zip(packed, caches, loops, rotations, strict=True):
        (_, _, heads, dim), size = cache.shape, cache.itemsize
        line_bytes = max(line_bytes, dim * size)
        moved += int(pieces[:, COUNT].sum()) * heads * dim * size
        sides.append(POOL_SIDE.filled({
            "packed": array, "token": array.strides[0], "head": array.strides[1],
            "cache": cache, "block": cache.strides[0], "row": cache.strides[1],
            **loop.fields(cache.strides[1], unit), "by_fractal": loop.size == FRACTAL_BYTES,
            "elements": dim, "line_bytes": dim * size, "stores": direction == STORE, **NO_SCALES, **rotated,
        }))  # fmt: skip
    stream = moved >= STREAM_BYTES and all(map(aligned, caches if direction == STORE else packed))
    code = rows(direction, MOVES[unit], MOVES[unit], stream=stream).address
    mean_code, item_bytes = (mean(element).address, line_bytes) if element else (0, rotated_bytes)
    return prepare_copy(
        sides, code, pieces, block_size, moved, alive=(*arrays, rotation), names=names,
        mean_code=mean_code, item_bytes=item_bytes,
    )  # fmt: skip


def rotated_line(tokens, rotation):
    """Return (an array like the buffer of rotated keys, the fields of their side, the buffer's bytes)."""
    _, heads, dim = tokens.shape
    line, pairs = np.empty((TILE, heads, dim), tokens.dtype), rotation.angles.shape[1]
    rotate = halves_of if rotation.halves else heads_of
    token, head, _ = tokens.strides
    fields = {
        "unrotated": tokens, "unrotated_token": token, "unrotated_head": head, "heads": heads,
        "angles": rotation.angles, "pairs": pairs, "begin": rotation.begin, "halves": rotation.halves,
        "rotate_code": rotate(BY_DTYPE[tokens.dtype].name).address,
    }  # fmt: skip
    return line, fields, -(-(line.nbytes + 16 * pairs) // 64) * 64


def prepare_copy(sides, code, pieces, block_size, moved, alive, names=(), mean_code=0, item_bytes=0):
    """Return a launch of `copy_pieces`, whose work items have buffers of `item_bytes` each."""
    numbers, starts = np.concatenate(sides), np.zeros(len(pieces) + 1, np.int64)
    np.cumsum(pieces[:, COUNT], out=starts[1:])
    count = threads() if moved >= SMALL_BYTES else 1
    chunks = count // math.gcd(count, len(sides))  # so that work items are equally large
    items = len(sides) * chunks
    workers = items if count > 1 else 1
    params = PARAMS.filled({
        "rows_code": code, "mean_code": mean_code, "chunks": chunks, "items": items, "workers": workers,
        "sides": numbers, "side_bytes": POOL_SIDE.dtype.itemsize,
        "pieces": pieces, "starts": starts, "count": len(pieces),
        "block_size": block_size, "lines": 0, "item_bytes": item_bytes,
    })  # fmt: skip
    kernel = copy_pieces.code

    def run():
        if item_bytes:
            params[PARAMS.at["lines"]] = lines.at_least(items * item_bytes)
        run_workers(kernel, workers, address(params))

    owners = {
        i * len(POOL_SIDE.names) + POOL_SIDE.at[field]: name + suffix
        for i, name in enumerate(names)
        for field, suffix in (("packed", ""), ("unrotated", ""), ("cache", "_cache"), ("scales", "_scale"))
    }
    place, size = address(params) + 8 * PARAMS.at["lines"], items * item_bytes
    grants = [(place, address(lines.words), size)] if item_bytes else []
    single = functools.partial(Single, kernel.address, address(params), grants=grants)
    alive = *alive, params, pieces, starts
    return Launch(numbers, owners, run, alive, single=single if moved < SMALL_BYTES else None)


def prepare_encoding(sides, pieces, rotation=None):
    """Return launches that store tokens as codes in pools, with the caller's or with computed scales.

    Keys and values that need the same machine code share a launch. A `rotation` rotates the keys.
    """
    by_code: dict[int, list] = {}
    item_bytes = 0
    for side in sides:
        tokens, rotated = side.tokens, UNROTATED
        if rotation is not None and side.name == "key":
            tokens, rotated, item_bytes = rotated_line(side.tokens, rotation)
        code, numbers = coded_side(side, tokens, rotated)
        by_code.setdefault(code, []).append((side, numbers))
    return [
        prepare_copy(
            [numbers for _, numbers in alike], code, pieces, alike[0][0].pool.shape[1],
            sum(side.tokens.nbytes for side, _ in alike), alive=(sides, rotation),
            names=[side.name for side, _ in alike], item_bytes=item_bytes,
        )
        for code, alike in by_code.items()
    ]  # fmt: skip


def coded_side(side, tokens, rotated):
    """Return (the code that stores a side as codes, its record), for tokens with the strides of `tokens`."""
    pool, scales = side.pool, side.scales
    _, _, heads, dim = pool.shape
    computed = side.group and side.cache_format == "int8"
    groups = panels.groups_in_panel(side.group, dim // side.group) if computed else 0
    code = rows(STORE, side.data_dtype, side.cache_format, side.scale_format, side.group, groups).address
    block = row = head = 0
    if scales is not None:
        block, row, head = scales.strides[:3] if side.group else (0, 0, scales.strides[0] if heads > 1 else 0)
        head = 0 if scales.shape == (1,) else head
    (token, packed_head, size), (pool_head, step) = tokens.strides, pool.strides[2:]
    loops = RowLoops(1, 0, 0, heads, packed_head, pool_head, dim)
    scale_strides = {"scale_outer": 0, "scale_inner": head}
    if dim > 1 and step != pool.itemsize:
        loops = RowLoops(heads, packed_head, pool_head, dim, size, step, 1)
        scale_strides = {"scale_outer": head, "scale_inner": 0}
    numbers = POOL_SIDE.filled({
        "packed": tokens, "token": token, "head": packed_head,
        "cache": pool, "block": pool.strides[0], "row": pool.strides[1],
        **loops.fields(pool.strides[1], unit=1), "by_fractal": 0,
        "elements": pool.shape[3], "line_bytes": tokens.itemsize * pool.shape[3],
        "stores": 1, "scales": scales, "scale_block": block, "scale_row": row,
        **scale_strides, **rotated,
    })  # fmt: skip
    return code, numbers


def row_loops(packed, cache):
    """Return the loops that copy a token's row: over heads and elements, over heads, or none."""
    (_, _, heads, dim), size = cache.shape, cache.itemsize
    (packed_head, packed_step), (cache_head, cache_step) = packed.strides[1:], cache.strides[2:]
    if dim > 1 and (packed_step != size or cache_step != size):
        return RowLoops(heads, packed_head, cache_head, dim, packed_step, cache_step, size)
    if heads == 1 or packed_head == cache_head == dim * size:
        return RowLoops(1, 0, 0, 1, 0, 0, heads * dim * size)
    return RowLoops(1, 0, 0, heads, packed_head, cache_head, dim * size)


def unit_of(size):
    """Return the largest of 4, 2 and 1 of which 16 elements divide `size` bytes, else one that divides it."""
    for unit in (4, 2, 1):
        if size % (16 * unit) == 0:
            return unit
    return 4 if size % 4 == 0 else 2 if size % 2 == 0 else 1
