"""Copy and check a page table that is on the device, by the rules of `kvkit.checks.scan`.

The kernel finds whether a rule is broken. If so, the host reads the table and raises the error.
"""

import functools
from typing import Any

import numpy as np
from numba import cuda, types

from kvkit.checks import index_tensors
from kvkit.checks.index_tensors import INT64_MAX
from kvkit.formulas.index import filled_rows, overlapping_run, page_of, rows_inside
from kvkit.runtime.jit import shared
from kvkit_cuda.calls.tables import DeviceTables
from kvkit_cuda.device_runtime import device, host, memory

COPY_THREADS, SCAN_THREADS = 256, 1024  # of a block; the scan has one block
VERDICT = BROKEN, ROWS, RUNS = range(3)  # what a scan finds: a broken rule, rows in use, runs of new tokens
INTEGERS: dict[int, Any] = {4: np.int32, 8: np.int64}  # types of entries by their size

INT, INDEX1 = types.int64, types.Array(types.int64, 1, "C")
COPY = types.void(INT, INT, INT, INT, INDEX1)
SCAN = types.void(INDEX1, INDEX1, INDEX1, INT, INDEX1, INDEX1, INDEX1)

overlapping_run = device.inlined(overlapping_run.py_func)


def copy(size):
    """Return the kernel that copies a table whose entries have `size` bytes."""
    read, integer = memory.load(size, size), INTEGERS[size]

    @shared
    def entry(place):
        low, _ = read(place)
        return np.int64(integer(low))

    def copy(place, row_step, column_step, rows, table):
        """Copy the `rows` rows of entries at `place`, with byte strides, to a table of `DeviceTables`."""
        columns = table.shape[0] // rows - 1
        for i in range(cuda.grid(1), rows * columns, cuda.gridsize(1)):
            b = i // columns
            page = i - b * columns
            table[rows + i] = entry(place + b * row_step + page * column_step)
            if page == 0:
                table[b] = rows + i

    return copy


def scan(kvstarts, start_pos, table, page_size, begins, ends, verdict):
    """Check that rows are valid and that no new token overlaps another token; count the rows in use.

    The runs of new tokens are sorted in `begins` and `ends`, whose length is a power of two; pages of earlier
    tokens are searched in them.
    """
    thread, threads = cuda.threadIdx.x, cuda.blockDim.x
    rows, last = kvstarts.shape[0] - 1, 0
    columns, entries = table.shape[0] // rows - 1, table.shape[0] - rows
    for i in range(thread, begins.shape[0], threads):
        begins[i] = INT64_MAX
    for i in range(thread, verdict.shape[0], threads):
        verdict[i] = 0
    cuda.syncthreads()
    for i in range(thread, entries, threads):
        b = i // columns
        page, kvlen = i - b * columns, kvstarts[b + 1] - kvstarts[b]
        if page <= page_of(kvlen - 1, page_size):
            first, used = table[rows + i], filled_rows(kvlen, page, page_size)
            past = filled_rows(start_pos[b], page, page_size)
            if not rows_inside(first, used, INT64_MAX):
                verdict[BROKEN] = 1
            else:
                last = max(last, first + used)
                if past < used:
                    run = cuda.atomic.add(verdict, RUNS, 1)
                    begins[run], ends[run] = first + past, first + used
    cuda.atomic.max(verdict, ROWS, last)
    cuda.syncthreads()
    if verdict[BROKEN]:
        return

    sort(begins, ends, thread, threads)
    runs = verdict[RUNS]
    for run in range(thread + 1, runs, threads):
        if begins[run] < ends[run - 1]:
            verdict[BROKEN] = 1
    for i in range(thread, entries, threads):
        b = i // columns
        page = i - b * columns
        if page <= page_of(start_pos[b] - 1, page_size):
            first, past = table[rows + i], filled_rows(start_pos[b], page, page_size)
            if overlapping_run(begins, ends, runs, first, first + past) >= 0:
                verdict[BROKEN] = 1


@device.inlined
def sort(begins, ends, thread, threads):
    """Sort runs by their begin with all threads of the block, by bitonic merges; their number is 2^n."""
    size = 2
    while size <= begins.shape[0]:
        distance = size // 2
        while distance:
            for i in range(thread, begins.shape[0], threads):
                other = i ^ distance
                if i < other and (begins[i] > begins[other]) == (i & size == 0):
                    begins[i], begins[other] = begins[other], begins[i]
                    ends[i], ends[other] = ends[other], ends[i]
            cuda.syncthreads()
            distance //= 2
        size *= 2


compiled_copy = device.variants(copy, COPY)


@functools.cache
def compiled():
    return device.kernel(scan, SCAN)


class PageTable:
    """A page table [B, M] in memory of a device, which numpy reads only to raise an error."""

    __slots__ = ("shape", "size", "there")

    def __init__(self, there, shape):
        self.there, self.shape, self.size = there, shape, int(np.prod(shape))

    def __array__(self, dtype=None, copy=None):
        size = 8 * self.there.size
        contents = host.read(host.address(self.there), size, host.stream(None))
        return contents.view(np.int64)[self.shape[0] :].reshape(self.shape)


def device_tables(step, checked, stream, lasting):
    """Return the tables of a step whose page table is on the device; check the table if `checked`."""
    given, runs = step.table, index_tensors.stored_runs(step) if checked else 0
    there = host.empty(len(given) + given.size, np.int64, stream)
    blocks = min(-(-given.size // COPY_THREADS), host.most_blocks())
    arguments = given.ctypes.data, *given.strides, len(given), there
    host.launch(compiled_copy(given.itemsize), (blocks,), COPY_THREADS, stream, arguments)
    tables = DeviceTables(step._replace(table=PageTable(there, given.shape)), lasting, table=there)
    if checked:
        tables.steps = tables.steps._replace(rows=rows_in_use(tables, runs, stream))
    tables.write(stream)
    return tables


def rows_in_use(tables, runs, stream):
    """Return how many rows a step needs, or raise the error for a broken rule; `runs` is its stored runs."""
    step = tables.steps
    kvstarts, start_pos, table = tables.of(("kvstarts", "start_pos", "table"), stream)
    most = 1 << max(runs - 1, 0).bit_length()
    begins, ends = (host.empty(most, np.int64, stream) for _ in range(2))
    verdict = host.empty(len(VERDICT), np.int64, stream)
    threads = min(SCAN_THREADS, -(-step.table.size // device.WARP) * device.WARP)
    arguments = kvstarts, start_pos, table, step.page_size, begins, ends, verdict
    host.launch(compiled(), (1,), threads, stream, arguments)
    found = host.read(host.address(verdict), 8 * len(VERDICT), stream).view(np.int64)
    return index_tensors.check_step(step).rows if found[BROKEN] else int(found[ROWS])
