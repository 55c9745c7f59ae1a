"""Units of work of attention: how many a sequence has, how long their parts are, which rows one has."""

from numba import types

from kvkit.cpu import memory
from kvkit.cpu.online import visible
from kvkit.cpu.simd import attention
from kvkit.jit import helper

TILES = 8  # most wide tiles in a unit
NARROW, WIDE = attention.NARROW, attention.WIDE

get = memory.load(types.int64)


@helper
def power_of_two(rows):
    """The rows of the narrow tile that holds so many."""
    return 1 if rows <= 1 else (2 if rows == 2 else (4 if rows <= 4 else 8))


@helper
def sequence(task, b):
    """(new tokens, context, rows for a key head) of a sequence."""
    seqlen = get(task.seqstarts + 8 * b + 8) - get(task.seqstarts + 8 * b)
    kvlen = get(task.kvstarts + 8 * b + 8) - get(task.kvstarts + 8 * b)
    return seqlen, kvlen, seqlen * task.group


@helper
def units_of(task, b):
    """(units, parts of each) of a sequence; units of several wide tiles are not split."""
    seqlen, kvlen, rows = sequence(task, b)
    if rows == 0:
        return 0, 1
    units = 1 if task.together and rows <= NARROW else task.heads
    if rows > NARROW:
        units *= -(-rows // (WIDE * task.unit_tiles))
        if task.unit_tiles > 1:
            return units, 1
    low, _ = visible(task, b, seqlen, kvlen, 0)
    _, high = visible(task, b, seqlen, kvlen, seqlen - 1)
    parts = max(1, -(-(high - low) // task.part_tokens))
    return units, parts


@helper
def shape_of(task, b, unit):
    """(rows of a tile, tiles, first row, first key head, whether tiles are heads) of a unit."""
    _, _, rows = sequence(task, b)
    if rows > NARROW:
        most = WIDE * task.unit_tiles
        blocks = -(-rows // most)
        row = (blocks - 1 - unit % blocks) * most  # the rows that see most come first
        return WIDE, min(task.unit_tiles, -(-(rows - row) // WIDE)), row, unit // blocks, False
    tile = power_of_two(rows)
    if task.together:
        return tile, task.heads, 0, 0, True
    return tile, 1, 0, unit, True
