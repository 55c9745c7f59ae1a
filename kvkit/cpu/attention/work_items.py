"""Work items: the tile groups of a sequence, and the splits of their context.

    query rows of a key head     token 0 head 0, token 0 head 1, token 1 head 0, ..   if two heads share it
    tiles                        [rows 0..31] [rows 32..63] ..                        32 rows if they are wide
    tile groups                  [tiles 0, 1, 2] [tiles 3, 4, 5] ..                   up to `group_tiles`
    splits of the context        [positions 0..511] [positions 512..1023] ..          of `split_tokens`

A work item is one tile group with one split. Up to 8 query rows, or 16 of 16-bit floats on processors with
tiles (AMX), are one narrow tile, which is a group by itself; if heads are interleaved, the narrow tiles of
all heads are a group. `params.group` is the number of query heads that share a key head.
"""

from numba import types

from kvkit.cpu import memory
from kvkit.cpu.attention.online_softmax import visible
from kvkit.cpu.simd.attention import WIDE
from kvkit.runtime.jit import helper

TILES = 8  # most wide tiles in a group
get = memory.load(types.int64)


@helper
def narrow_rows(count):
    """Round a number of query rows up to the rows of a narrow tile: 1, 2, 4, 8 or 16."""
    rows = 1
    while rows < count:
        rows *= 2
    return rows


@helper
def set_sequence(params, block, b):
    """Set the block's sequence: its new tokens, its context, and its query rows per key head."""
    block.sequence, block.table_row, block.ready = b, b * params.table_row, 0
    if params.table_starts:
        block.table_row = params.table_entry * get(params.table_starts + 8 * b)
    block.seqlen = get(params.seqstarts + 8 * b + 8) - get(params.seqstarts + 8 * b)
    block.kvlen = get(params.kvstarts + 8 * b + 8) - get(params.kvstarts + 8 * b)
    block.query_rows = block.seqlen * params.group


@helper
def visible_to_any(params, block):
    """Return the range (first, end) of positions that some query of the sequence sees."""
    return visible(params, block, 0)[0], visible(params, block, block.seqlen - 1)[1]


@helper
def state_stride(params, rows):
    """Return the bytes of the state of a tile of so many rows in a split."""
    return 4 * rows * (params.values.padded_dim + 3)


@helper
def split_bytes(params):
    """Return the bytes of a split's state, for all tiles of a group."""
    return params.tile_state_bytes * params.group_tiles


@helper
def groups_and_splits(params, block):
    """Return (tile groups, splits of a group) of a sequence."""
    if block.query_rows == 0:
        return 0, 1
    groups = 1 if params.heads_interleaved and block.query_rows <= params.most_narrow else params.heads
    if block.query_rows > params.most_narrow:
        groups *= -(-block.query_rows // (WIDE * params.group_tiles))
        if not params.groups_are_split:
            return groups, 1
    first, end = visible_to_any(params, block)
    return groups, max(1, -(-(end - first) // params.split_tokens))


@helper
def set_tile_group(params, block, group):
    """Set the rows of a tile, the tiles, the first query row and the first key head of a tile group."""
    if block.query_rows > params.most_narrow:
        most = WIDE * params.group_tiles
        groups = -(-block.query_rows // most)  # of a head
        block.row = (groups - 1 - group % groups) * most  # the last rows, which see most positions, first
        block.rows, block.head = WIDE, group // groups
        block.tiles = min(params.group_tiles, -(-(block.query_rows - block.row) // WIDE))
        return
    block.rows, block.row = narrow_rows(block.query_rows), 0
    block.tiles, block.head = (params.heads, 0) if params.heads_interleaved else (1, group)
