"""Append and gather rows: copy between packed tokens and a cache, for every layout, mode and format.

    cache[b, row(p), head] = packed[starts[b] + p - first[b], head]      or in the other direction
    row(p) = table[table[b] + p // page_size] + p % page_size

Teams of threads share the tokens. A team goes through its tokens as a worker of the CPU does; each of its
threads copies a chunk of a row.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, types

from kvkit.checks.values import packed_strides
from kvkit.formats import BY_NAME
from kvkit.formulas.index import page_of, rest_of_page, row_of, sequence_among, share
from kvkit_cuda.copy import blocks, chunks
from kvkit_cuda.device_runtime import device, host, memory

THREADS = 256  # of a block
WARP = 32

INT, INDEX1, INDEX2 = types.int64, types.Array(types.int64, 1, "C"), types.Array(types.int64, 2, "C")


class Places(NamedTuple):
    """Addresses and byte strides of packed tokens, of the rows of a cache, and of their scales."""

    packed: Any
    packed_sequence: Any
    packed_token: Any
    packed_head: Any
    cache: Any
    cache_sequence: Any
    cache_row: Any
    cache_head: Any
    scale: Any
    scale_sequence: Any
    scale_row: Any
    scale_head: Any


class Group(NamedTuple):
    """The part of a thread in a group of codes with one scale, which needs the largest number of the group.

    For 4 chunks:

        lanes = 4    thread 0 reads chunk 0, thread 1 chunk 1, ..; then they exchange maxima
        lanes = 0    each thread reads chunks 0 to 3 and encodes its own
    """

    member: Any  # the number of its chunk
    members: Any  # chunks of the group
    lanes: Any  # threads that exchange maxima; 0 for none
    mates: Any  # the mask of these threads


PLACES = types.NamedUniTuple(INT, len(Places._fields), Places)
SIGNATURE = types.void(INDEX1, INDEX1, INDEX1, INT, PLACES, PLACES, *[INT] * 5)

sequence_among = device.inlined(sequence_among.py_func)


@device.inlined
def sequence_of(starts, token):
    return sequence_among(starts, starts.shape[0] - 1, token)


def copy_tokens(direction, packed, cache_format, scale_format, span, given=False):
    """Return the kernel for a direction ("store" or "load"), formats and a chunk size.

    `scale_format` is None without codes. With `given`, the caller gives one scale for a row.
    """
    on_chunk = on_chunk_of(direction, packed, cache_format, scale_format, span, given)
    packed_bytes, stored_bytes = BY_NAME[packed].bytes(span), BY_NAME[cache_format].bytes(span)
    scale_bytes = BY_NAME[scale_format].bytes(1) if scale_format else 0

    def copy_tokens(starts, first, table, page_size, keys, values, heads, repeat, chunks, group, lanes):
        """Copy the packed tokens of every sequence, which take positions from `first` on, to or from rows.

        A head has `chunks` chunks, a group of codes `group`; `lanes` threads share a group.
        """
        at = keys if cuda.blockIdx.y == 0 else values
        team = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
        teams = cuda.gridDim.x * cuda.blockDim.y
        total = starts[starts.shape[0] - 1]
        token, end = share(total, team, teams), share(total, team + 1, teams)
        sequence = sequence_of(starts, token)
        mates = mates_of(cuda.threadIdx.y * cuda.blockDim.x + cuda.threadIdx.x, lanes)
        while token < end:
            while token >= starts[sequence + 1]:
                sequence += 1
            position = first[sequence] + token - starts[sequence]
            row = row_of(table[table[sequence] + page_of(position, page_size)], position, page_size)
            run = min(min(end, starts[sequence + 1]) - token, rest_of_page(position, page_size))
            for column in range(cuda.threadIdx.x, heads * repeat * chunks, cuda.blockDim.x):
                packed_head = column // chunks
                chunk = column - packed_head * chunks
                head, mine = packed_head // repeat, Group(chunk % group, group, lanes, mates)
                packed = at.packed + sequence * at.packed_sequence + token * at.packed_token
                packed += packed_head * at.packed_head + chunk * packed_bytes
                cache = at.cache + sequence * at.cache_sequence + row * at.cache_row
                cache += head * at.cache_head + chunk * stored_bytes
                scale = at.scale + sequence * at.scale_sequence + row * at.scale_row
                scale += head * at.scale_head + chunk // group * scale_bytes
                for _ in range(run):
                    on_chunk(packed, cache, scale, mine)
                    packed += at.packed_token
                    cache += at.cache_row
                    scale += at.scale_row
            token += run

    return copy_tokens


class Reader(NamedTuple):
    """Holds the functions that read new elements: `plain_reader` makes them, or rotary.py, to rotate keys."""

    read: Any  # f(source) -> the two words of a chunk
    beside: Any  # f(source, i) -> the source i chunks on


@functools.cache
def plain_reader(packed, span):
    """Return the reader of elements at an address."""
    chunk_bytes = BY_NAME[packed].bytes(span)

    def beside(packed, other):
        return packed + other * chunk_bytes

    return Reader(memory.load(*chunks.access(packed, span)), device.inlined(beside))


def store_codes(packed, cache_format, scale_format, span, reader):
    read, beside = reader
    largest = chunks.largest(packed, span, read)
    if BY_NAME[cache_format].minifloat:
        quantize = chunks.divide(packed, cache_format, scale_format, span, given=False, read=read)
    else:
        quantize = chunks.quantize(packed, cache_format, scale_format, span, read)
    exchange = device.exchange

    def on_chunk(packed, cache, scale, group):
        peak = np.int32(0)
        before = 0 if group.lanes else group.member
        for other in range(-before, 1 if group.lanes else group.members - before):
            peak = max(peak, np.int32(largest(beside(packed, other))))
        distance = 1
        while distance < group.lanes:
            peak = max(peak, np.int32(exchange(group.mates, peak, distance)))
            distance *= 2
        quantize(packed, cache, scale, peak, group.member == 0)

    return device.inlined(on_chunk)


@device.inlined
def mates_of(thread, lanes):
    """Return the mask of the `lanes` threads of a warp that share a group with a thread, or 0."""
    return ((1 << lanes) - 1) << (thread % WARP & -lanes)


def lanes_of(members, team=WARP):
    """Return how many threads of a team exchange maxima of a group of `members` chunks; 0 for none."""
    return members if members <= min(WARP, team) and members & (members - 1) == 0 else 0


def on_chunk_of(direction, packed, cache_format, scale_format, span, given, reader=None):
    """Return f(packed, cache, scale address, group), which copies a chunk; a `reader` takes other sources."""
    reader, block = reader or plain_reader(packed, span), BY_NAME[cache_format].block
    coded = packed, cache_format, scale_format, span
    if direction == "load" and scale_format:
        dequantize = chunks.dequantize(*coded)
        return device.inlined(lambda packed, cache, scale, group: dequantize(packed, cache, scale))
    if direction == "load":
        load = blocks.load(packed, cache_format) if block else chunks.load(packed, cache_format, span)
        return device.inlined(lambda packed, cache, scale, group: load(packed, cache))
    if given:
        divide = chunks.divide(*coded, given=True, read=reader.read)
        zero = np.int32(0)
        return device.inlined(lambda packed, cache, scale, _: divide(packed, cache, scale, zero, False))
    if scale_format:
        return store_codes(*coded, reader)
    new = packed, cache_format
    store = blocks.store(*new) if block else chunks.store(*new, span, reader.read)
    return device.inlined(lambda packed, cache, scale, group: store(packed, cache))


# The arrays that addresses of keys and of values point into.
OWNERS = {"store": ("current_key", "current_value"), "load": ("result 0", "result 1")}


compiled = device.variants(copy_tokens, SIGNATURE)


def store(current_key, current_value, cache, tables, stream):
    """Return a launch that appends the packed new tokens to their rows."""
    pair, names = (current_key, current_value), ("seqstarts", "start_pos")
    return prepare("store", pair, cache, tables, names, 1, stream)


def load(key, value, cache, tables, repeat, stream):
    """Return a launch that gathers the rows of every sequence's context into packed outputs."""
    return prepare("load", (key, value), cache, tables, ("kvstarts", "load_starts"), repeat, stream)


def prepare(direction, pair, cache, tables, names, repeat, stream):
    """Return a launch that copies a pair of packed arrays, by the tables with these names."""
    steps = tables.steps
    sides = [
        Places(array.ctypes.data, *packed_strides(array), *place)
        for array, place in zip(pair, cache.sides, strict=True)
    ]
    span, given = span_of(cache, sides), cache.scale_format is not None and not cache.group  # given scales
    kernel = compiled(direction, cache.data_dtype, cache.cache_format, cache.scale_format, span, given)
    in_head, group = cache.dim // span, max((cache.dim if given else cache.group) // span, 1)
    tokens, heads = int(getattr(steps, names[0])[-1]), cache.heads
    team = min(THREADS, 1 << (heads * repeat * in_head - 1).bit_length())
    lanes = 0 if given else lanes_of(group, team)
    teams = THREADS // team
    blocks = min(-(-tokens // teams), host.most_blocks())
    copies = tables.of((*names, "table"), stream) if tokens else ()
    arguments = *copies, steps.page_size, *sides, heads, repeat, in_head, group, lanes
    first = len(copies) + 1
    owners = {
        (first + i, Places._fields.index(field)): owner
        for i, packed in enumerate(OWNERS[direction])
        for field, owner in (("packed", packed), ("cache", "cache"), ("scale", "scale"))
    }
    return host.Launch(kernel, (blocks, 2), (team, teams), stream, arguments, owners)


def span_of(cache, sides):
    """Return the elements of a chunk: 16 bytes, or the fewest if rows or addresses do not fit."""
    if BY_NAME[cache.cache_format].block:
        return BY_NAME[cache.cache_format].block.elements
    span = chunks.widest(cache.data_dtype, cache.cache_format)
    packed_bytes = BY_NAME[cache.data_dtype].bytes(span)
    stored_bytes = BY_NAME[cache.cache_format].bytes(span)
    packed_at = cache_at = 0  # all bits of addresses and strides
    for side in sides:
        for number in side[:4]:
            packed_at |= number
        for number in side[4:8]:
            cache_at |= number
    whole = cache.dim % span == 0 and cache.group % span == 0
    if whole and packed_at % packed_bytes == 0 and cache_at % stored_bytes == 0:
        return span
    return chunks.smallest(cache.cache_format)
