"""The parts of a split context put together, in order."""

import functools

import numpy as np
from numba import cuda, types

from kvkit.formats import BY_NAME
from kvkit.formulas import numeric
from kvkit_cuda.attention import scores
from kvkit_cuda.attention.task import OWNERS, RECORD
from kvkit_cuda.calls.tables import SCRATCH
from kvkit_cuda.copy import chunks
from kvkit_cuda.copy.transfer import INDEX1, INDEX2, sequence_of
from kvkit_cuda.device_runtime import device, host

THREADS = 128  # of a block; a block takes a row
SIGNATURE = types.void(RECORD, INDEX1, INDEX1, INDEX1, types.int64)
STATE = 3  # floats behind the sums of a row: its top, its total and what its weights were multiplied by


read_float, write_float = chunks.read("float32"), chunks.write("float32")
with_sink, log_sum, weight = numeric.with_sink, numeric.log_sum, numeric.weight


@device.inlined
def place(task, slot, rows, row):
    """Where a row of a slot lies."""
    return task.partials + (slot * rows + row) * (task.value_dim + STATE) * 4


@device.inlined
def written_to(task, b, start, head, row):
    """Where a row of the output lies."""
    token = row // task.group
    query = head * task.group + row - token * task.group
    return task.out + b * task.out_sequence + (start + token) * task.out_token + query * task.out_head


@device.inlined
def ended(task, b, start, head, row, top, total, shrink):
    """What the sums of a row are multiplied by in the end; its log-sum-exp is written."""
    token = row // task.group
    query = head * task.group + row - token * task.group
    less = np.float32(1)
    if task.sinks:
        at = b % task.apart * task.heads * task.group + query
        top, total, less = with_sink(
            top, total, scores.number(task.sink_kind, task.sinks + at * task.sink_head)
        )
    if task.lse:
        at = task.lse + b * task.lse_sequence + (start + token) * task.lse_token + query * task.lse_head
        write_float(at, log_sum(top, total))
    return numeric.share_of(less, total, np.float32(1) / shrink)


def merge(packed):
    """The kernel for outputs of a format. A block takes a row of the output; tiles have so many rows."""
    write, packed_bytes = chunks.write(packed), BY_NAME[packed].bytes(1)

    def merge(task, seqstarts, items, slots, rows):
        position = cuda.blockIdx.x // (task.heads * task.group)
        query = cuda.blockIdx.x - position * (task.heads * task.group)
        b = sequence_of(seqstarts, position)
        if slots[b + 1] == slots[b]:
            return
        start, head = seqstarts[b], query // task.group
        row = (position - start) * task.group + query - head * task.group
        tiles = ((seqstarts[b + 1] - start) * task.group + rows - 1) // rows
        parts = (items[b + 1] - items[b]) // (tiles * task.heads)
        slot = slots[b] + (head * tiles + row // rows) * parts
        first = place(task, slot, rows, row % rows)
        step = place(task, slot + 1, rows, row % rows) - first
        state = first + 4 * task.value_dim
        top, total = numeric.MINUS_INF, np.float32(0)
        for part in range(parts):
            top = max(top, read_float(state + part * step))
        for part in range(parts):
            at = state + part * step
            total = numeric.with_total(total, top, read_float(at + 4), read_float(at))
        factor = ended(task, b, start, head, row, top, total, np.float32(1))
        out = written_to(task, b, start, head, row)
        for e in range(cuda.threadIdx.x, task.value_dim, cuda.blockDim.x):
            whole = np.float32(0)
            for part in range(parts):
                at = state + part * step
                share = scores.part_of(weight(read_float(at), top), factor, read_float(at + 8))
                whole = scores.with_part(whole, read_float(first + part * step + 4 * e), share)
            write(out + e * packed_bytes, whole)

    return merge


@functools.cache
def compiled(packed):
    return device.kernel(merge(packed), SIGNATURE, packed)


def prepare(kernel, record, packed, tables, rows, block, stream, most=0, shared=0):
    """Launches: of a kernel over tiles of so many rows, and of the merge if contexts are split.

    A call is split into at most so many parts (0: as many as `tables` has it). A lasting step may come to
    have more of them, or to be split. `shared` is how much dynamic memory a block of the kernel takes.
    """
    work, key = tables.work(record, rows, most)
    slots = work.most_slots if tables.lasting else work.split
    scratch = slots * rows * (record.value_dim + STATE) * 4
    where = host.current(), host.number(stream), host.capturing(stream)
    record = record._replace(partials=SCRATCH.of(scratch, *where))
    names = key.names()
    launch = functools.partial(host.Launch, stream=stream, owners=OWNERS, scratch=scratch)

    def arguments(*read):
        return record, *tables.of(read, stream)

    def items(captured):
        return work.most_items if captured else work.count

    def outputs(captured):
        return tokens * record.heads * record.group if captured or work.split else 0

    tokens, read = tables.steps.tokens, ("seqstarts", "kvstarts", "table", *names)
    first = launch(kernel, (work.count, 1), block, arguments=arguments(*read), grow=items, shared=shared)
    launches = [first]
    if slots:
        each, given = compiled(packed), (*arguments("seqstarts", *names[:2]), rows)
        launches.append(launch(each, (tokens, 1), (THREADS, 1), arguments=given, grow=outputs))
    return launches


# Parts that are arrays of their own

STATES = types.void(INDEX1, INDEX2)


@device.inlined
def row_at(sizes, places, array, axes):
    """Where the row of a block begins in an array."""
    index, at = cuda.blockIdx.x, places[array, 0]
    for axis in range(axes - 1, -1, -1):
        rest = index // sizes[axis]
        at += (index - rest * sizes[axis]) * places[array, 1 + axis]
        index = rest
    return at


@device.inlined
def lse_at(sizes, places, array, axes):
    """The log-sum-exp of a block's row: -inf where a part has no keys, which may say so with +inf."""
    lse = read_float(row_at(sizes, places, array, axes))
    return numeric.MINUS_INF if lse == -numeric.MINUS_INF else lse


def merge_states(packed):
    """The kernel for parts of a format: a block takes a row."""
    read, write = chunks.read(packed), chunks.write(packed)

    def merge_states(sizes, places):
        """`sizes` are those of the axes; `places` [array, 1 + axes] holds addresses and byte strides.

        The arrays are the outputs of the parts and attn_output, then the same of the log-sum-exps.
        """
        axes, parts = sizes.shape[0] - 1, places.shape[0] // 2 - 1
        top, total = numeric.MINUS_INF, np.float32(0)
        for part in range(parts):
            top = max(top, lse_at(sizes, places, parts + 1 + part, axes))
        for part in range(parts):
            lse = lse_at(sizes, places, parts + 1 + part, axes)
            total = numeric.with_total(total, top, np.float32(1), lse)
        if cuda.threadIdx.x == 0:
            write_float(row_at(sizes, places, 2 * parts + 1, axes), log_sum(top, total))
        factor = numeric.share_of(np.float32(1), total, np.float32(1))
        for e in range(cuda.threadIdx.x, sizes[axes], cuda.blockDim.x):
            whole = np.float32(0)
            for part in range(parts):
                share = weight(lse_at(sizes, places, parts + 1 + part, axes), top) * factor
                at = row_at(sizes, places, part, axes) + e * places[part, axes + 1]
                whole = scores.with_part(whole, read(at), share)
            write(row_at(sizes, places, parts, axes) + e * places[parts, axes + 1], whole)

    return merge_states


@functools.cache
def compiled_states(packed):
    return device.kernel(merge_states(packed), STATES, packed)


def prepare_states(packed, arrays, stream):
    """A launch that merges parts; `arrays` as the kernel has them, on the device."""
    sizes = arrays[0].shape
    places = np.zeros((len(arrays), 1 + len(sizes)), np.int64)
    for place, array in zip(places, arrays, strict=True):
        place[: 1 + array.ndim] = array.ctypes.data, *array.strides
    blocks = int(np.prod(sizes[:-1]))
    tables = host.tables((np.array(sizes), places), stream) if blocks else ()
    return host.Launch(compiled_states(packed), (blocks, 1), (THREADS, 1), stream, tables)
