"""Units of work of attention: how many a sequence has, how long their parts are, which query rows one has."""

from numba import types

from kvkit.cpu import memory
from kvkit.cpu.attention.online_softmax import visible
from kvkit.cpu.simd import attention
from kvkit.runtime.jit import helper

TILES = 8  # most wide tiles in a unit
NARROW, WIDE = attention.NARROW, attention.WIDE

get = memory.load(types.int64)


@helper
def power_of_two(count):
    """The size of the narrow tile that holds so many query rows."""
    return 1 if count <= 1 else (2 if count == 2 else (4 if count <= 4 else 8))


@helper
def sequence(task, b):
    """(new tokens, context, query rows for a key head) of a sequence."""
    seqlen = get(task.seqstarts + 8 * b + 8) - get(task.seqstarts + 8 * b)
    kvlen = get(task.kvstarts + 8 * b + 8) - get(task.kvstarts + 8 * b)
    return seqlen, kvlen, seqlen * task.group


@helper
def units_of(task, b):
    """(units, parts of each) of a sequence; units of several wide tiles are not split."""
    seqlen, kvlen, query_rows = sequence(task, b)
    if query_rows == 0:
        return 0, 1
    units = 1 if task.together and query_rows <= NARROW else task.heads
    if query_rows > NARROW:
        units *= -(-query_rows // (WIDE * task.unit_tiles))
        if task.unit_tiles > 1:
            return units, 1
    low, _ = visible(task, b, seqlen, kvlen, 0)
    _, high = visible(task, b, seqlen, kvlen, seqlen - 1)
    parts = max(1, -(-(high - low) // task.part_tokens))
    return units, parts


@helper
def shape_of(task, b, unit):
    """(size of a tile, tiles, first query row, first key head, whether tiles are heads) of a unit."""
    _, _, query_rows = sequence(task, b)
    if query_rows > NARROW:
        most = WIDE * task.unit_tiles
        blocks = -(-query_rows // most)
        row = (blocks - 1 - unit % blocks) * most  # those that see most come first
        return WIDE, min(task.unit_tiles, -(-(query_rows - row) // WIDE)), row, unit // blocks, False
    tile = power_of_two(query_rows)
    if task.together:
        return tile, task.heads, 0, 0, True
    return tile, 1, 0, unit, True
