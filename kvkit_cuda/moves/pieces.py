"""Rows between arrays in blocks, piece by piece: the bits as they are.

Every array is [blocks, rows, heads, dim], of any strides, and its rows are counted through its blocks: a
cache, packed tokens (one block of them, or a block for each head), matrices. A piece is a source row, a
target row and a count of rows from there on; a source row below 0 is zeros. The kernel knows bytes only,
which it moves in chunks.
"""

import functools

import numpy as np
from numba import cuda, types

from kvkit.index import page_of, rest_of_page, row_of, share
from kvkit.jit import shared
from kvkit_cuda.ground import device, host, memory
from kvkit_cuda.moves.transfer import sequence_of

THREADS = 256  # of a block
WIDEST = 16  # bytes of a chunk
FIELDS = SOURCE, TARGET, COUNT = range(3)

# An array as kernels see it: its address, rows and strides of a block, its row in parts of neighbouring
# chunks, and how many chunks that are.
ADDRESS, ROWS, BLOCK, ROW, PART, PART_STEP, STEP, CHUNKS = range(8)

SIDE = types.UniTuple(types.int64, 8)
INDEX1, INDEX2 = types.Array(types.int64, 1, "C"), types.Array(types.int64, 2, "C")
SIGNATURE = types.void(INDEX1, INDEX2, SIDE, SIDE, SIDE, SIDE)


@functools.cache
def mover(size):
    """(source, its row stride, target, its row stride, rows, whether there is a source): chunks of rows."""
    read, write = memory.load(size, size), memory.store(size, size)

    @shared
    def move(source, source_row, target, target_row, rows, there):
        low, high = np.uint64(0), np.uint64(0)
        for _ in range(rows):
            if there:
                low, high = read(source)
            write(target, low, high)
            source += source_row
            target += target_row

    return move


@device.inlined
def row_at(side, row):
    """Where a row begins."""
    return side[ADDRESS] + page_of(row, side[ROWS]) * side[BLOCK] + row_of(0, row, side[ROWS]) * side[ROW]


@device.inlined
def chunk_at(side, chunk):
    """How far into a row a chunk lies."""
    part = chunk // side[PART]
    return part * side[PART_STEP] + (chunk - part * side[PART]) * side[STEP]


def walk(size):
    """The kernel for chunks of `size` bytes."""
    move = mover(size)

    def walk(starts, pieces, from_keys, to_keys, from_values, to_values):
        """Move every piece; `starts` [pieces + 1] are the rows before each.

        Rows are shared out to teams of threads, of which each takes a chunk of a row and follows it.
        """
        source = from_keys if cuda.blockIdx.y == 0 else from_values
        target = to_keys if cuda.blockIdx.y == 0 else to_values
        team = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
        teams = cuda.gridDim.x * cuda.blockDim.y
        total = starts[starts.shape[0] - 1]
        begin, end = share(total, team, teams), share(total, team + 1, teams)
        first = sequence_of(starts, begin)
        for chunk in range(cuda.threadIdx.x, target[CHUNKS], cuda.blockDim.x):
            in_source, in_target = chunk_at(source, chunk), chunk_at(target, chunk)
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
                to_place = row_at(target, to_row) + in_target
                move(place, source[ROW], to_place, target[ROW], rows, there and chunk < source[CHUNKS])
                done += rows

    return walk


@functools.cache
def compiled(size):
    return device.kernel(walk(size), SIGNATURE, size)


def prepare(pairs, pieces, stream):
    """A launch that moves the pieces of one pair of arrays (source, target), or of two at once."""
    pieces = pieces[pieces[:, COUNT] > 0]
    moves = [sides(source, target) for source, target in pairs if target.size]
    if not len(pieces) or not moves:
        return nothing
    starts = np.zeros(len(pieces) + 1, np.int64)
    np.cumsum(pieces[:, COUNT], out=starts[1:])
    tables = host.tables((starts, pieces), stream)
    launches = []
    for size in {size for size, *_ in moves}:
        alike = [array for other, *arrays in moves if other == size for array in arrays]
        chunks = max(target[CHUNKS] for target in alike[1::2])
        team = min(THREADS, 1 << (chunks - 1).bit_length())
        teams = THREADS // team
        blocks = min(-(-int(starts[-1]) // teams), host.most_blocks())
        grid, arguments = (blocks, len(alike) // 2), (*tables, *alike, *alike)[:6]
        launches.append(host.Launch(compiled(size), grid, (team, teams), stream, arguments))

    def start():
        for launch in launches:
            launch()

    return start


def nothing():
    """The launch of no pieces."""


def sides(source, target):
    """(bytes of a chunk, source, target): as many as 16 bytes hold, if rows and addresses are so aligned."""
    arrays, size = (source, target), WIDEST
    forms = [form(array) for array in arrays]
    for array, (length, part_step, _) in zip(arrays, forms, strict=True):
        far = [stride for stride, count in zip(array.strides, array.shape[:2], strict=False) if count > 1]
        for number in (array.ctypes.data, length, part_step, *far):
            size |= number
    size &= -size  # the largest power of two that divides them all
    if any(step != array.itemsize for array, (_, _, step) in zip(arrays, forms, strict=True)):
        size = source.itemsize  # elements apart
    return size, *(side(array, row, size) for array, row in zip(arrays, forms, strict=True))


def form(array):
    """(bytes, stride, stride of elements) of the parts of a row: its heads, or all of them at once."""
    (_, _, heads, dim), size = array.shape, array.itemsize
    head, step = array.strides[2:]
    if dim == 1:
        step = size
    if heads == 1 or (head == dim * size and step == size):
        return heads * dim * size, 0, step
    return dim * size, head, step


def side(array, row, size):
    """An array as kernels see it, whose rows have a `form`."""
    (_, rows, heads, dim), (length, part_step, step) = array.shape, row
    chunks = heads * dim * array.itemsize // size
    apart = size if step == array.itemsize else step
    return array.ctypes.data, rows, *array.strides[:2], length // size, part_step, apart, chunks
