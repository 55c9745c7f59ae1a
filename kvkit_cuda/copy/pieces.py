"""Rows between arrays in blocks, piece by piece: the bits as they are, or floats as codes.

Every array is [blocks, rows, heads, dim], of any strides, and its rows are counted through its blocks: a
cache, packed tokens (one block of them, or a block for each head), matrices. A piece is a source row, a
target row and a count of rows from there on; a source row below 0 is zeros. The kernel takes rows in chunks:
of bytes, or of as many elements of source and target.
"""

import functools

import numpy as np
from numba import cuda, types

from kvkit.formulas.index import page_of, rest_of_page, row_of, share
from kvkit.runtime.jit import shared
from kvkit_cuda.copy import chunks
from kvkit_cuda.copy.transfer import lanes_of, mates_of, on_chunk_of, sequence_of
from kvkit_cuda.device_runtime import device, host, memory

THREADS = 256  # of a block
WIDEST = 16  # bytes of a chunk
FIELDS = SOURCE, TARGET, COUNT = range(3)

# An array as kernels see it: its address, rows and strides of a block, its row in parts of neighbouring
# chunks, and how many chunks that are.
ADDRESS, ROWS, BLOCK, ROW, PART, PART_STEP, STEP, CHUNKS = range(8)

SIDE = types.UniTuple(types.int64, 8)
INDEX1, INDEX2 = types.Array(types.int64, 1, "C"), types.Array(types.int64, 2, "C")
SIGNATURE = types.void(INDEX1, INDEX2, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, types.int64, types.int64)


def mover(size):
    """What happens to a chunk of `size` bytes in some rows, of which there may be no source."""
    read, write = memory.load(size, size), memory.store(size, size)

    @shared
    def move(
        source, source_row, target, target_row, cell, cell_row, rows, there, member, group, lanes, mates
    ):
        low, high = np.uint64(0), np.uint64(0)
        for _ in range(rows):
            if there:
                low, high = read(source)
            write(target, low, high)
            source += source_row
            target += target_row

    return move


def coder(packed, stored, cell, span, given):
    """Likewise of `span` elements that become codes, member by member of a group with a scale."""
    on_chunk = on_chunk_of("store", packed, stored, cell, span, given)

    def move(
        source, source_row, target, target_row, cell, cell_row, rows, there, member, group, lanes, mates
    ):
        for _ in range(rows):
            on_chunk(source, target, cell, member, group, lanes, mates)
            source += source_row
            target += target_row
            cell += cell_row

    return device.inlined(move)


@device.inlined
def row_at(side, row):
    """Where a row begins."""
    return side[ADDRESS] + page_of(row, side[ROWS]) * side[BLOCK] + row_of(0, row, side[ROWS]) * side[ROW]


@device.inlined
def chunk_at(side, chunk):
    """How far into a row a chunk lies."""
    part = chunk // side[PART]
    return part * side[PART_STEP] + (chunk - part * side[PART]) * side[STEP]


def walk(variant):
    """The kernel for chunks of so many bytes, or of floats that become codes."""
    move = mover(*variant) if len(variant) == 1 else coder(*variant)

    def walk(
        starts, pieces, from_keys, to_keys, key_cells, from_values, to_values, value_cells, group, lanes
    ):
        """Move every piece; `starts` [pieces + 1] are the rows before each.

        Rows are shared out to teams of threads, of which each takes a chunk of a row and follows it. `group`
        chunks share a scale, and the `lanes` threads that take them tell each other of it (0: each looks).
        """
        source = from_keys if cuda.blockIdx.y == 0 else from_values
        target = to_keys if cuda.blockIdx.y == 0 else to_values
        cells = key_cells if cuda.blockIdx.y == 0 else value_cells
        team = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
        teams = cuda.gridDim.x * cuda.blockDim.y
        total = starts[starts.shape[0] - 1]
        begin, end = share(total, team, teams), share(total, team + 1, teams)
        first = sequence_of(starts, begin)
        mates = mates_of(cuda.threadIdx.y * cuda.blockDim.x + cuda.threadIdx.x, lanes)
        for chunk in range(cuda.threadIdx.x, target[CHUNKS], cuda.blockDim.x):
            in_source, in_target = chunk_at(source, chunk), chunk_at(target, chunk)
            in_cells, member = chunk_at(cells, chunk // group), chunk % group
            done, piece = begin, first
            while done < end:
                while done >= starts[piece + 1]:
                    piece += 1
                row, to_row = pieces[piece, SOURCE], pieces[piece, TARGET] + done - starts[piece]
                rows = min(min(end, starts[piece + 1]) - done, rest_of_page(to_row, target[ROWS]))
                there, place = row >= 0, source[ADDRESS]
                if there:
                    row += done - starts[piece]
                    rows = min(rows, rest_of_page(row, source[ROWS]))
                    place = row_at(source, row) + in_source
                to_place, cell = row_at(target, to_row) + in_target, row_at(cells, to_row) + in_cells
                there = there and chunk < source[CHUNKS]
                move(
                    place, source[ROW], to_place, target[ROW], cell, cells[ROW], rows, there,
                    member, group, lanes, mates,
                )  # fmt: skip
                done += rows

    return walk


@functools.cache
def compiled(variant):
    return device.kernel(walk(variant), SIGNATURE, variant)


def prepare(pairs, pieces, stream):
    """A launch that moves the pieces of one pair of arrays (source, target), or of two at once."""
    return launched([moved(source, target) for source, target in pairs if target.size], pieces, stream)


def launched(moves, pieces, stream):
    """A launch of moves: what is alike, two at once."""
    pieces = pieces[pieces[:, COUNT] > 0]
    if not len(pieces) or not moves:
        return nothing
    starts = np.zeros(len(pieces) + 1, np.int64)
    np.cumsum(pieces[:, COUNT], out=starts[1:])
    tables = host.tables((starts, pieces), stream)
    launches = []
    for how in {how for how, _ in moves}:
        variant, group, lanes = how
        alike = [array for other, arrays in moves if other == how for array in arrays]
        chunks = max(target[CHUNKS] for target in alike[1::3])
        team = min(THREADS, 1 << (chunks - 1).bit_length())
        teams = THREADS // team
        blocks = min(-(-int(starts[-1]) // teams), host.most_blocks())
        grid, arguments = (blocks, len(alike) // 3), (*tables, *(*alike, *alike)[:6], group, lanes)
        launches.append(host.Launch(compiled(variant), grid, (team, teams), stream, arguments))

    def start():
        for launch in launches:
            launch()

    return start


def nothing():
    """The launch of no pieces."""


def moved(source, target):
    """(how, its sides): chunks of 16 bytes, if rows and addresses are so aligned."""
    size = min(aligned(source), aligned(target))
    to = side(target, size)
    return ((size,), 1, 0), (side(source, size), to, to)


def coded(source, target, packed, stored, cell, group, cells):
    """(how, its sides) where floats become codes; `cells` [blocks, rows, heads, groups] have their scales.

    Without a cell there is none; those of `group` 0 are given, one for a row of a head.
    """
    dim, span, given = target.shape[3], chunks.widest(packed, stored), cell is not None and not group
    sizes = [span * array.itemsize for array in (source, target)]
    whole = dim % span == 0 and group % span == 0
    if not whole or any(aligned(array) % size for array, size in zip((source, target), sizes, strict=True)):
        span = chunks.smallest(stored)
        sizes = [span * array.itemsize for array in (source, target)]
    members = 1 if cell is None else (group or dim) // span
    lanes = lanes_of(members) if group else 0
    ends = [side(array, size) for array, size in zip((source, target), sizes, strict=True)]
    ends.append(ends[1] if cells is None else side(cells, cells.itemsize))
    return ((packed, stored, cell, span, given), members, lanes), tuple(ends)


def aligned(array):
    """The largest power of two, 16 at most, that divides an array's address and strides."""
    (length, part_step, step), size = form(array), WIDEST
    if step != array.itemsize:
        return array.itemsize
    far = [stride for stride, count in zip(array.strides, array.shape[:2], strict=False) if count > 1]
    for number in (array.ctypes.data, length, part_step, *far):
        size |= number
    return size & -size


def form(array):
    """(bytes, stride, stride of elements) of the parts of a row: its heads, or all of them at once."""
    (_, _, heads, dim), size = array.shape, array.itemsize
    head, step = array.strides[2:]
    if dim == 1:
        step = size
    if heads == 1 or (head == dim * size and step == size):
        return heads * dim * size, 0, step
    return dim * size, head, step


def side(array, size):
    """An array as kernels see it, in chunks of `size` bytes."""
    (_, rows, heads, dim), (length, part_step, step) = array.shape, form(array)
    chunks = heads * dim * array.itemsize // size
    apart = size if step == array.itemsize else step
    return array.ctypes.data, rows, *array.strides[:2], length // size, part_step, apart, chunks
