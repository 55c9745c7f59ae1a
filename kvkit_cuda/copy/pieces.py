"""Copy rows between arrays in blocks, piece by piece, bit for bit or from floats to codes.

An array is [blocks, rows, heads, dim], of any strides: a cache, packed tokens (one block, or a block for each
head), or matrices. Rows are numbered through all blocks. A piece has a source row, a target row and a count:

    target[piece.target + i] = source[piece.source + i]     for i < piece.count

A negative source row stands for zeros. Rows are copied in chunks of bytes, or of elements.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import cuda, types

from kvkit.formulas.index import page_of, rest_of_page, row_of, share
from kvkit.runtime.jit import shared
from kvkit_cuda.copy import chunks
from kvkit_cuda.copy.transfer import Group, lanes_of, mates_of, on_chunk_of, sequence_of
from kvkit_cuda.device_runtime import device, host, memory
from kvkit_cuda.positions import angles, rotary

THREADS = 256  # of a block
WIDEST = 16  # bytes of a chunk
SOURCE, TARGET, COUNT = range(3)  # columns of pieces

INT = types.int64
INDEX1, INDEX2 = types.Array(INT, 1, "C"), types.Array(INT, 2, "C")


class Blocks(NamedTuple):
    """Address and strides of an array in blocks.

    A row has parts, such as heads, in which chunks are equally far apart:

        part 0: chunk 0, chunk 1, ..      `step` bytes from chunk to chunk
        part 1: ..                        `part_step` bytes after part 0
    """

    address: Any
    rows: Any  # of a block
    block: Any  # bytes from block to block
    row: Any  # bytes from row to row
    part: Any  # chunks of a part
    part_step: Any  # bytes from part to part
    step: Any  # bytes from chunk to chunk
    chunks: Any  # of a row


class CopiedRun(NamedTuple):
    """A chunk in neighbouring rows of source and target: addresses, and bytes from row to row."""

    source: Any
    source_row: Any
    target: Any
    target_row: Any
    scale: Any
    scale_row: Any
    rows: Any
    there: Any  # whether there is a source; otherwise the target becomes zeros
    element: Any  # the chunk's first element in its head
    angles: Any  # the address of the first row's angles; 0: nothing is rotated
    angles_row: Any


class RowRotation(NamedTuple):
    """The rotation of keys before they are stored, by angles [rows, pairs, (cosine, sine)]."""

    angles: Any = 0  # address; 0: nothing is rotated
    begin: Any = 0  # the first element that is rotated
    pairs: Any = 0
    chunks: Any = 1  # of a head


SIDE = types.NamedUniTuple(INT, len(Blocks._fields), Blocks)
ROTATION = types.NamedUniTuple(INT, len(RowRotation._fields), RowRotation)
SIGNATURE = types.void(INDEX1, INDEX2, *[SIDE] * 6, INT, INT, ROTATION)


def mover(size):
    """Return f(run, group, rotation), which copies a chunk of `size` bytes in the rows of a run."""
    read, write = memory.load(size, size), memory.store(size, size)

    @shared
    def move(run, group, rotation):
        source, target = run.source, run.target
        low, high = np.uint64(0), np.uint64(0)
        for _ in range(run.rows):
            if run.there:
                low, high = read(source)
            write(target, low, high)
            source += run.source_row
            target += run.target_row

    return move


def coder(packed, cache_format, scale_format, span, given):
    """Return f(run, group, rotation), which encodes a chunk of `span` elements in the rows of a run."""
    on_chunk = on_chunk_of("store", packed, cache_format, scale_format, span, given)

    def move(run, group, rotation):
        source, target, scale = run.source, run.target, run.scale
        for _ in range(run.rows):
            on_chunk(source, target, scale, group)
            source += run.source_row
            target += run.target_row
            scale += run.scale_row

    return device.inlined(move)


def rotating_coder(packed, cache_format, scale_format, span, given, halves):
    """Return f(run, group, rotation), which rotates chunks before it encodes them."""
    reader = rotary.rotating_reader(packed, span, halves)
    on_chunk = on_chunk_of("store", packed, cache_format, scale_format, span, given, reader)

    def move(run, group, rotation):
        source, target, scale, turn = run.source, run.target, run.scale, run.angles
        for _ in range(run.rows):
            chunk = rotary.Chunk(source, run.element, turn, rotation.begin, rotation.pairs)
            on_chunk(chunk, target, scale, group)
            source += run.source_row
            target += run.target_row
            scale += run.scale_row
            turn += run.angles_row

    return device.inlined(move)


@device.inlined
def row_at(side, row):
    """Return the address of a row."""
    return side.address + page_of(row, side.rows) * side.block + row_of(0, row, side.rows) * side.row


@device.inlined
def chunk_at(side, chunk):
    """Return the offset of a chunk in a row."""
    part = chunk // side.part
    return part * side.part_step + (chunk - part * side.part) * side.step


def copy_pieces(variant):
    """Return the kernel that copies chunks of bytes, encodes chunks of floats, or rotates them first.

    A variant is the arguments of `mover`, `coder` or `rotating_coder`, which have 1, 5 and 6 of them.
    """
    makers: dict[int, Any] = {1: mover, 5: coder, 6: rotating_coder}
    move = makers[len(variant)](*variant)
    span = variant[3] if len(variant) > 1 else 0

    def copy_pieces(
        starts, pieces, keys, to_keys, key_scales, values, to_values, value_scales, group, lanes, rotation
    ):
        """Copy every piece; `starts` [pieces + 1] are the rows before each.

        Teams of threads share the rows; a thread takes one chunk of all rows of its team. `group` chunks
        share a scale; the `lanes` threads that take them exchange maxima (0: each reads the whole group).
        """
        source = keys if cuda.blockIdx.y == 0 else values
        target = to_keys if cuda.blockIdx.y == 0 else to_values
        scales = key_scales if cuda.blockIdx.y == 0 else value_scales
        turn = rotation.angles if cuda.blockIdx.y == 0 else 0
        turn_row = rotation.pairs * angles.PAIR if turn != 0 else 0
        team = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
        teams = cuda.gridDim.x * cuda.blockDim.y
        total = starts[starts.shape[0] - 1]
        begin, end = share(total, team, teams), share(total, team + 1, teams)
        first = sequence_of(starts, begin)
        mates = mates_of(cuda.threadIdx.y * cuda.blockDim.x + cuda.threadIdx.x, lanes)
        for chunk in range(cuda.threadIdx.x, target.chunks, cuda.blockDim.x):
            in_source, in_target = chunk_at(source, chunk), chunk_at(target, chunk)
            in_scales, mine = chunk_at(scales, chunk // group), Group(chunk % group, group, lanes, mates)
            done, piece = begin, first
            while done < end:
                while done >= starts[piece + 1]:
                    piece += 1
                row, to_row = pieces[piece, SOURCE], pieces[piece, TARGET] + done - starts[piece]
                rows = min(min(end, starts[piece + 1]) - done, rest_of_page(to_row, target.rows))
                there, place, angle = row >= 0, source.address, turn
                if there:
                    row += done - starts[piece]
                    angle += row * turn_row
                    rows = min(rows, rest_of_page(row, source.rows))
                    place = row_at(source, row) + in_source
                run = CopiedRun(
                    source=place, source_row=source.row,
                    target=row_at(target, to_row) + in_target, target_row=target.row,
                    scale=row_at(scales, to_row) + in_scales, scale_row=scales.row,
                    rows=rows, there=there and chunk < source.chunks,
                    element=chunk % rotation.chunks * span, angles=angle, angles_row=turn_row,
                )  # fmt: skip
                move(run, mine, rotation)
                done += rows

    return copy_pieces


compiled = device.variants(copy_pieces, SIGNATURE)


def prepare(pairs, pieces, stream):
    """Return launches that copy the pieces of one pair of arrays (source, target), or of two at once."""
    return launch_copies(
        [byte_copy(source, target) for source, target in pairs if target.size], pieces, stream
    )


def launch_copies(copies, pieces, stream, rotated=None):
    """Return launches of copies, two of the same kind at once."""
    pieces = pieces[pieces[:, COUNT] > 0]
    if not len(pieces) or not copies:
        return []
    starts = np.zeros(len(pieces) + 1, np.int64)
    np.cumsum(pieces[:, COUNT], out=starts[1:])
    return copy_launches(copies, host.tables((starts, pieces), stream), int(starts[-1]), stream, rotated)


def copy_launches(copies, tables, rows, stream, rotated=None):
    """Return launches of copies of `rows` rows; `tables` are the starts of pieces and the pieces.

    The first copy is `rotated`: (its rope, the address of angles of all rows, elements of a head).
    """
    launches = []
    for kind in dict.fromkeys(copy.kind for copy in copies):
        alike = [copy for copy in copies if copy.kind == kind]
        arrays = [array for copy in alike for array in copy.arrays]
        names = [name for copy in alike for name in copy.owners]
        chunks = max(copy.arrays[1].chunks for copy in alike)
        team = min(THREADS, 1 << (chunks - 1).bit_length())
        teams = THREADS // team
        blocks = min(-(-rows // teams), host.most_blocks())
        turn = RowRotation()
        if rotated and kind == copies[0].kind:
            rope, place, dim = rotated
            turn = RowRotation(place, rope.begin, rope.rotary_dim // 2, dim // kind.variant[3])
        # One copy alone is passed for keys and for values.
        arguments = *tables, *(*arrays, *arrays)[:6], kind.group, kind.lanes, turn
        owners = {(len(tables) + i, 0): name for i, name in enumerate((*names, *names)[:6])}
        kernel, grid = compiled(kind.variant), (blocks, len(alike))
        launches.append(host.Launch(kernel, grid, (team, teams), stream, arguments, owners))
    return launches


class CopyKind(NamedTuple):
    """All that copies in one launch have in common."""

    variant: tuple  # of the kernel
    group: int  # chunks that share a scale
    lanes: int  # threads that exchange maxima of a group (see `Group`)


class Copy(NamedTuple):
    """A copy of pieces from an array to another one."""

    kind: CopyKind
    arrays: tuple[Blocks, Blocks, Blocks]  # source, target, scales
    owners: tuple[str, ...] = ()  # the names of these arrays, if launches may be repeated at other addresses


def byte_copy(source, target):
    """Return a copy of bytes, in chunks of up to 16 bytes."""
    size = min(aligned(source), aligned(target))
    to = side(target, size)
    return Copy(CopyKind((size,), 1, 0), (side(source, size), to, to))  # scales are not read


def code_copy(source, target, packed, cache_format, scale_format, group, scales, rope=None):
    """Return a copy of floats that become codes, or that `rope` rotates.

    `scales` [blocks, rows, heads, groups] are the scales, None without. With `group` 0 the caller gives one
    scale for each row of a head.
    """
    dim, span = target.shape[3], chunks.widest(packed, cache_format)
    given = scale_format is not None and not group
    sizes = [span * array.itemsize for array in (source, target)]
    whole = dim % span == 0 and group % span == 0
    if rope is not None:
        together = rope.rotary_dim if rope.interleaved else rope.rotary_dim // 2
        whole = whole and together % span == rope.begin % span == 0
    if not whole or any(aligned(array) % size for array, size in zip((source, target), sizes, strict=True)):
        span = chunks.smallest(cache_format)
        sizes = [span * array.itemsize for array in (source, target)]
    members = 1 if scale_format is None else (group or dim) // span
    lanes = lanes_of(members) if group else 0
    ends = [side(array, size) for array, size in zip((source, target), sizes, strict=True)]
    ends.append(ends[1] if scales is None else side(scales, scales.itemsize))
    halves = () if rope is None else (not rope.interleaved,)
    variant = packed, cache_format, scale_format, span, given, *halves
    return Copy(CopyKind(variant, members, lanes), tuple(ends))


def aligned(array):
    """Return the largest power of two, 16 at most, that divides an array's address and strides."""
    (length, part_step, step), size = parts_of(array), WIDEST
    if step != array.itemsize:
        return array.itemsize
    far = [stride for stride, count in zip(array.strides, array.shape[:2], strict=False) if count > 1]
    for number in (array.ctypes.data, length, part_step, *far):
        size |= number
    return size & -size


def parts_of(array):
    """Return (bytes, stride, stride of elements) of the parts of a row: its heads, or the whole row."""
    (_, _, heads, dim), size = array.shape, array.itemsize
    head, step = array.strides[2:]
    if dim == 1:
        step = size
    if heads == 1 or (head == dim * size and step == size):
        return heads * dim * size, 0, step
    return dim * size, head, step


def side(array, size):
    """Return the `Blocks` of an array, for chunks of `size` bytes."""
    (_, rows, heads, dim), (length, part_step, step) = array.shape, parts_of(array)
    chunks = heads * dim * array.itemsize // size
    chunk_step = size if step == array.itemsize else step
    places = array.ctypes.data, rows, *array.strides[:2], length // size, part_step, chunk_step, chunks
    return Blocks(*places)
