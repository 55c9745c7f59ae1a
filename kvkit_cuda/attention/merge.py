"""Merge the results of a context's splits, or of parts of a context in separate arrays. A block takes a row.

    m = max m_i
    l = sum e^(m_i - m) l_i
    o = sum e^(m_i - m) / l o_i     [value dim]     for splits i, in order

The results of splits are in slots. A slot has a tile's rows, each of them value dim + 3 numbers of float32:

    sums of values o_i [value dim], m_i, l_i, shrink

Weights were multiplied by shrink: 1, or 2^-40 in a second attempt, after sums overflowed. Threads share the
splits to find m, l and the factors of all splits, then the elements of the row to sum them. Results in
separate arrays are normalized: m_i is their log-sum-exp, and l_i is 1 (`merge_states`).
"""

import functools

import numpy as np
from numba import cuda, types

from kvkit.formats import BY_NAME
from kvkit.formulas import numeric
from kvkit_cuda.attention import scores
from kvkit_cuda.attention.params import OWNERS, RECORD
from kvkit_cuda.attention.work_items import Row, StepTables, lse_address, output_address
from kvkit_cuda.calls.tables import SCRATCH
from kvkit_cuda.copy import chunks
from kvkit_cuda.copy.transfer import INDEX1, INDEX2, WARP, sequence_of
from kvkit_cuda.device_runtime import device, host

THREADS = 128  # of a block
MERGE_WARPS = THREADS // WARP
MOST_SPLITS = 1024  # of a row
SIGNATURE = types.void(RECORD, INDEX1, INDEX1, INDEX1, types.int64)
STATE = 3  # numbers after the sums of a slot's row

read_float, write_float = chunks.read("float32"), chunks.write("float32")
DISTANCES = 1, 2, 4, 8, 16  # between lanes that exchange, so that in the end each has the result of all
exchange, EVERYONE = device.exchange, device.EVERYONE
add_sink, log_sum, weight = numeric.add_sink, numeric.log_sum, numeric.weight


@device.inlined
def slot_address(params, slot, rows, row):
    """Return the address of a slot's row."""
    return params.partials + (slot * rows + row) * (params.value_dim + STATE) * 4


@device.inlined
def put_state(params, address, m, l, shrink):
    """Write m, l and shrink after the sums of a slot's row."""
    at = address + params.value_dim * 4
    write_float(at, m)
    write_float(at + 4, l)
    write_float(at + 8, shrink)


@device.inlined
def finish_row(params, step, row, m, l, shrink):
    """Return the factor that normalizes a row's sums, and write its log-sum-exp."""
    factor = np.float32(1)
    if params.sinks:
        i = row.b % params.sink_sequences * params.heads * params.group + row.query
        sink = scores.read_number(params.sink_kind, params.sinks + i * params.sink_head)
        m, l, factor = add_sink(m, l, sink)
    if params.lse:
        write_float(lse_address(params, step, row), log_sum(m, l))
    return numeric.normalizer(factor, l, np.float32(1) / shrink)


def merge_splits(packed):
    """Return the kernel for outputs of a format. A block takes a row; tiles have `rows` rows."""
    write, packed_bytes = chunks.write(packed), BY_NAME[packed].bytes(1)

    def merge_splits(params, seqstarts, items, slots, rows):
        position = cuda.blockIdx.x // (params.heads * params.group)
        query = cuda.blockIdx.x - position * (params.heads * params.group)
        b = sequence_of(seqstarts, position)
        if slots[b + 1] == slots[b]:
            return
        # The merge reads neither kvstarts, table nor slopes: any array of the type will do.
        step = StepTables(seqstarts, seqstarts, slots, items, slots, slots)
        row, head = Row(b, position - seqstarts[b], query), query // params.group
        number = row.token * params.group + query - head * params.group
        tiles = ((seqstarts[b + 1] - seqstarts[b]) * params.group + rows - 1) // rows
        splits = (items[b + 1] - items[b]) // (tiles * params.heads)
        slot = slots[b] + (head * tiles + number // rows) * splits
        sums = slot_address(params, slot, rows, number % rows)  # [splits, value dim]
        stride = slot_address(params, slot + 1, rows, number % rows) - sums
        state = sums + 4 * params.value_dim  # [splits, STATE]
        thread, threads = cuda.threadIdx.x, cuda.blockDim.x
        warps = (threads + WARP - 1) // WARP
        factors = cuda.shared.array(MOST_SPLITS, types.float32)  # [splits]
        maxima = cuda.shared.array(MERGE_WARPS, types.float32)
        totals = cuda.shared.array(MERGE_WARPS, types.float32)
        m, l = numeric.MINUS_INF, np.float32(0)
        for split in range(thread, splits, threads):
            m = max(m, read_float(state + split * stride))
        for distance in DISTANCES:
            if distance < threads:
                m = max(m, exchange(EVERYONE, m, distance))
        if thread % WARP == 0:
            maxima[thread // WARP] = m
        cuda.syncthreads()
        for warp in range(warps):
            m = max(m, maxima[warp])
        for split in range(thread, splits, threads):
            at = state + split * stride
            l = numeric.add_split_sum(l, m, read_float(at + 4), read_float(at))
        for distance in DISTANCES:
            if distance < threads:
                l += exchange(EVERYONE, l, distance)
        if thread % WARP == 0:
            totals[thread // WARP] = l
        cuda.syncthreads()
        l = np.float32(0)
        for warp in range(warps):
            l += totals[warp]
        factor = finish_row(params, step, row, m, l, np.float32(1))
        for split in range(thread, splits, threads):
            at = state + split * stride
            factors[split] = scores.split_factor(weight(read_float(at), m), factor, read_float(at + 8))
        cuda.syncthreads()
        out = output_address(params, step, row)
        for e in range(thread, params.value_dim, threads):
            o = np.float32(0)
            for split in range(splits):
                o = scores.add_split(o, read_float(sums + split * stride + 4 * e), factors[split])
            write(out + e * packed_bytes, o)

    return merge_splits


compiled = device.variants(merge_splits, SIGNATURE)


def prepare(kernel, record, packed, tables, rows, block, stream, most=0, shared=0, placed=False):
    """Return the launches of a kernel over tiles of `rows` rows, and of the merge if contexts are split.

    A call has at most `most` splits (0: the default of `tables`). A lasting step, which is captured or
    refilled later, has memory for the most splits that it may need. `shared` is the bytes of a
    block's dynamic shared memory. With `placed`, the kernel reads its work items from `Work.placed`.
    """
    work, key = tables.work(record, rows, most, placed)
    items, slots, slopes = key.names()
    slot_count, tokens = work.most_slots if tables.lasting else work.slot_count, tables.steps.tokens
    scratch = slot_count * rows * (record.value_dim + STATE) * 4
    place = host.current(), host.stream_address(stream), host.capturing(stream)
    record = record._replace(partials=SCRATCH.of(scratch, *place))
    launch = functools.partial(host.Launch, stream=stream, owners=OWNERS, scratch=scratch)

    def item_blocks(captured):
        return work.most_items if captured else work.count

    def merge_blocks(captured):
        return tokens * record.heads * record.group if captured or work.slot_count else 0

    read = "seqstarts", "kvstarts", "table", ("placed", key) if placed else items, slots, slopes
    arguments = record, *tables.of(read, stream)
    launches = [launch(kernel, (work.count, 1), block, arguments=arguments, grow=item_blocks, shared=shared)]
    if slot_count:
        arguments = record, *tables.of(("seqstarts", items, slots), stream), rows
        merge = compiled(packed)
        launches.append(launch(merge, (tokens, 1), (THREADS, 1), arguments=arguments, grow=merge_blocks))
    return launches


OF_STATES = types.void(INDEX1, INDEX2)  # the signature of `merge_states`


@device.inlined
def row_at(sizes, places, array, axes):
    """Return the address of a block's row in an array, for sizes and places of `merge_states`."""
    index, at = cuda.blockIdx.x, places[array, 0]
    for axis in range(axes - 1, -1, -1):
        rest = index // sizes[axis]
        at += (index - rest * sizes[axis]) * places[array, 1 + axis]
        index = rest
    return at


@device.inlined
def lse_at(sizes, places, array, axes):
    """Return the log-sum-exp of a block's row: -inf if a part has no keys, where some libraries give +inf."""
    lse = read_float(row_at(sizes, places, array, axes))
    return numeric.MINUS_INF if lse == -numeric.MINUS_INF else lse


def merge_states(packed):
    """Return the kernel for parts of a format: a block takes a row."""
    read, write = chunks.read(packed), chunks.write(packed)

    def merge_states(sizes, places):
        """Merge the rows of all parts; `places` [array, 1 + axes] has addresses and byte strides.

        `sizes` are the lengths of the axes. The order of arrays is

            0 .. parts - 1: outputs      parts: attn_output      then log-sum-exps      2 parts + 1: lse
        """
        axes, parts = sizes.shape[0] - 1, places.shape[0] // 2 - 1
        m, l = numeric.MINUS_INF, np.float32(0)
        for part in range(parts):
            m = max(m, lse_at(sizes, places, parts + 1 + part, axes))
        for part in range(parts):
            lse = lse_at(sizes, places, parts + 1 + part, axes)
            l = numeric.add_split_sum(l, m, np.float32(1), lse)
        if cuda.threadIdx.x == 0:
            write_float(row_at(sizes, places, 2 * parts + 1, axes), log_sum(m, l))
        factor = numeric.normalizer(np.float32(1), l, np.float32(1))
        for e in range(cuda.threadIdx.x, sizes[axes], cuda.blockDim.x):
            o = np.float32(0)
            for part in range(parts):
                share = weight(lse_at(sizes, places, parts + 1 + part, axes), m) * factor
                at = row_at(sizes, places, part, axes) + e * places[part, axes + 1]
                o = scores.add_split(o, read(at), share)
            write(row_at(sizes, places, parts, axes) + e * places[parts, axes + 1], o)

    return merge_states


compiled_states = device.variants(merge_states, OF_STATES)


def prepare_states(packed, arrays, stream):
    """Return a launch that merges parts; `arrays` are in the order of `merge_states`, on the device."""
    sizes = arrays[0].shape
    places = np.zeros((len(arrays), 1 + len(sizes)), np.int64)
    for place, array in zip(places, arrays, strict=True):
        place[: 1 + array.ndim] = array.ctypes.data, *array.strides
    blocks = int(np.prod(sizes[:-1]))
    tables = host.tables((np.array(sizes), places), stream) if blocks else ()
    return host.Launch(compiled_states(packed), (blocks, 1), (THREADS, 1), stream, tables)
