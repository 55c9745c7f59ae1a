"""From checked arguments of attention to a `Task`: machine code, scratch, and the launch."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvkit.cpu import attend, products
from kvkit.cpu.launches import Launch, address, threads
from kvkit.cpu.online import MASKS
from kvkit.cpu.rows import LOAD, READ, rows
from kvkit.cpu.simd.attention import LANES, WIDE
from kvkit.cpu.task import NAMES
from kvkit.cpu.transfer import packed_strides
from kvkit.formats import BY_NAME

BLOCK, WIDE_BLOCK = 64, 128  # tokens; half of the first where heads lie side by side and all take turns
PARTS, LEAST_PART = 64, 512  # a call's work is split into so many parts, of at least so many tokens
SMALL = 2**18  # products; below it one thread is done before a second one is awake
AT = {name: i for i, name in enumerate(NAMES)}
COUNTING = np.arange(WIDE_BLOCK + LANES)
NO_MASK = (0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Reader:
    """Machine code of rows that formats and strides alone do not describe."""

    widen: int  # address: makes float32 of rows
    product: Callable | None  # rows -> addresses of the narrow products over such rows, if there are any
    orders: np.ndarray | None  # as `products.orders`


@dataclass(frozen=True, slots=True)
class Context:
    """Keys and values as kernels read them: formats, sizes, and address and byte strides of each side.

    Operators see what a load gives of floats, which rounds to the data where these are coarser; `as_loaded`
    says so. Codes are read as products with their scales, rounded only where scales are coarser than data.
    """

    packed: str
    stored: str
    cell: str | None
    group: int
    heads: int
    dim: int
    value_dim: int
    sides: tuple[tuple[int, ...], ...]  # [key|value]: elements, then scales (address, sequence, row, head)
    key_bytes: int
    value_bytes: int
    as_loaded: bool = True
    reader: Reader | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """How scores become weights, in canonical form."""

    scale: float
    causal: bool
    alibi: bool
    left: int
    right: int
    softcap: float
    sinks: np.ndarray | None
    mask: tuple[int, ...] = NO_MASK  # address, kind, strides (sequence, head, row, column), packed
    apart: int = 1  # sequences in a row that have sinks of their own


def mask_kind(name):
    return MASKS[name]


class Arena:
    """Memory that workers use during a launch, kept for the next one."""

    def __init__(self):
        self.memory, self.size, self.begin = np.empty(0, np.int64), -1, 0

    def at_least(self, size):
        """The address of so many bytes, at a multiple of 64."""
        if self.size < size:
            self.memory, self.size = np.empty(size // 8 + 16, np.int64), size
            self.begin = address(self.memory) + -address(self.memory) % 64
        return self.begin


scratch, partials = Arena(), Arena()


def padded(dim):
    return -(-dim // LANES) * LANES


@functools.cache
def scratch_offsets(dim, value_dim, narrow_rows, block):
    """Offsets of a worker's scratch arrays, in the order of the task's last fields, and its size."""
    rows, longest = max(narrow_rows, attend.TILES * WIDE), max(dim, value_dim)
    sizes = (
        2 * 8 * (WIDE_BLOCK + 16) + 8 * max(WIDE_BLOCK, block * narrow_rows // attend.NARROW),  # numbers
        4 * WIDE * (WIDE_BLOCK + LANES),  # scores
        4 * WIDE,  # factor
        *2 * (8 * rows,),  # top, total: narrow tiles have at least 16 lanes
        4 * rows * dim,  # queries
        4 * rows * value_dim,  # sums
        4 * WIDE_BLOCK * dim,  # wide_keys
        4 * WIDE_BLOCK * value_dim,  # wide_values
        4 * WIDE * longest,  # rows
    )
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // 64) * 64)
    return offsets[:-1], offsets[-1]


@functools.cache
def conversions(packed, rounds, exact, stored, cell, group):
    """Machine code that widens rows of the cache (or rounds them to the data), queries, narrows outputs."""
    direction = LOAD if exact or cell in (None, "float32") else READ
    to_float = rows(direction, packed if rounds else "float32", stored, cell, group).address
    return to_float, rows(LOAD, "float32", packed).address, rows(LOAD, packed, "float32").address


@functools.cache
def product(rows, wide_formats, *formats):
    """The addresses of both products of a tile."""
    formats = () if rows == WIDE or wide_formats else formats
    return products.scores(rows, *formats).address, products.sums(rows, *formats).address


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
    padded_dim, padded_value_dim = padded(dim), padded(value_dim)
    coded = context.cell is not None
    rounds = context.as_loaded and not coded and products.coarser(context.packed, context.stored)
    exact = coded and products.coarser(context.cell, context.packed)
    formats, reader = (context.stored, context.cell, context.group), context.reader
    if reader:
        widens = not reader.product
    else:
        widens = rounds or not products.in_place(context.cell, context.group, (dim, value_dim))
    (key, key_sequence, key_row, key_head, *key_cells) = context.sides[0]
    (value, value_sequence, value_row, value_head, value_cell, *_) = context.sides[1]
    together = (
        heads > 1
        and key_head == context.key_bytes < abs(key_row)
        and value_head == context.value_bytes < abs(value_row)
    )
    block = BLOCK // 2 if together else BLOCK
    narrow_rows = attend.NARROW * (heads if together else 1)
    offsets, scratch_bytes = scratch_offsets(padded_dim, padded_value_dim, narrow_rows, block)
    cell_bytes = dim // context.group * BY_NAME[context.cell].bytes(1) if context.cell else 0
    orders = None if widens else reader.orders if reader else products.orders(*formats, dim)
    constants = np.array([weights.scale, weights.softcap], np.float32)
    sinks = None if weights.sinks is None else np.ascontiguousarray(weights.sinks, np.float32)
    to_float, *conversions_of_data = conversions(context.packed, rounds, exact, *formats)
    where_lse = (address(lse), *packed_strides(lse[..., None])) if lse is not None else NO_MASK[:4]
    numbers = np.array(
        [
            0, len(steps.start_pos), address(steps.seqstarts), address(steps.kvstarts),
            address(steps.table), steps.table.strides[0], steps.page_size,
            decoding, weights.causal, weights.alibi, weights.left, weights.right,
            key, key_sequence, key_row, key_head, *key_cells,
            value, value_sequence, value_row, value_head, value_cell,
            address(query), *packed_strides(query), address(out), *packed_strides(out), *where_lse,
            0 if sinks is None else address(sinks), weights.apart,
            address(constants), weights.softcap != 0, address(constants) + 4, *weights.mask,
            heads, query.shape[-2] // heads, dim, value_dim, padded_dim, padded_value_dim,
            context.key_bytes, context.value_bytes, cell_bytes,
            0 if orders is None else address(orders), together, widens, block, WIDE_BLOCK,
            LEAST_PART, PARTS, *[0] * 7,
            rounds, reader.widen if reader else to_float, *conversions_of_data, *[0] * 10,
            0, max(narrow_rows, WIDE) * 4 * (padded_value_dim + 3), address(COUNTING),
            0, scratch_bytes, *offsets,
        ],
        np.int64,
    )  # fmt: skip
    attend.compiled(False)(attend.code("schedule").address, 1, address(numbers))
    units, items, parts, tiles, work = numbers[AT["units"] : AT["products"] + 1].tolist()
    for i, tile in enumerate((1, 2, 4, 8, WIDE)):
        if tiles & tile:
            at = AT["scores1"] + i
            if reader and not widens and tile != WIDE:
                numbers[at], numbers[at + 5] = reader.product(tile)
            else:
                numbers[at], numbers[at + 5] = product(tile, widens, *formats, exact)
    counters = np.zeros(units + 1, np.int64)
    numbers[AT["counters"]] = address(counters)
    part_bytes = parts * int(numbers[AT["part_bytes"]])
    code, one, task = attend.code("work").address, attend.compiled(False), address(numbers)
    most = items if work >= SMALL else 1
    several = attend.compiled(True) if most > 1 else one

    def run():
        workers = min(threads(), most) if most > 1 else 1
        numbers[AT["scratch"]] = scratch.at_least(workers * scratch_bytes)
        if parts:
            numbers[AT["partials"]] = partials.at_least(part_bytes)
        counters[:] = 0
        if items:
            (several if workers > 1 else one)(code, workers, task)

    owners = {place: owner for place, owner in OWNERS.items() if numbers[place]}
    return Launch(numbers, owners, run, alive=(steps, weights, constants, sinks, orders))
