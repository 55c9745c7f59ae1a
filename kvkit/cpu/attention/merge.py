"""Merge attention over parts of a context: an output row is the weighted sum of the parts' rows.

m = max lse_i      w_i = exp(lse_i - m)      l = sum w_i      out = sum w_i out_i / l      lse = m + log l
"""

import functools

import numba
import numpy as np
from numba import types

from kvkit.cpu import memory
from kvkit.cpu.copy.transfer import SMALL_BYTES
from kvkit.cpu.launches import WORKER, Launch, Record, address, run_workers, threads
from kvkit.cpu.simd import lanes
from kvkit.cpu.simd.lanes import I64, LANES, RAW, loop, micro_kernel
from kvkit.formats.elements import BY_NAME
from kvkit.formulas import numeric
from kvkit.formulas.index import share
from kvkit.runtime.jit import callback

PARAMS = Record("workers parts rows dim outputs lses out lse entries")
ENTRY = 16  # bytes of workspace for one part of a row: the address of its output, and its weight
INF, MINUS_INF, ZERO, ONE = np.float32(np.inf), numeric.MINUS_INF, np.float32(0), np.float32(1)

record, integers = memory.record(PARAMS), memory.integers
get, put = memory.load(types.int64), memory.store(types.int64)
get_float, put_float = memory.load(types.float32), memory.store(types.float32)


@functools.cache
def panel(element):
    """Return a micro-kernel (entries, count, offset, target) that writes 16 elements of a merged row."""

    @micro_kernel
    def panel(b, entries, count, offset, target):
        sums = lanes.StackSlots(b, lanes.zeros(b, LANES))
        with loop(b, count) as i:
            entry = b.add(entries, b.mul(i, I64(ENTRY)))
            source = b.load(b.inttoptr(entry, I64.as_pointer()))
            x = lanes.widen(lanes.read(b, b.add(source, offset), RAW[element], LANES), element)
            sums[0] = sums[0] + x * lanes.broadcast(b, b.add(entry, I64(8)), LANES)
        lanes.write(b, target, lanes.narrow(sums[0], element))

    return panel


@functools.cache
def merge_code(element, plain=False):
    """Compile the merge of all rows; `plain` uses scalar code only (tests)."""
    size, vector = BY_NAME[element].bytes(1), panel(element)
    get_element, put_element = memory.read(element), memory.write(element)

    def merge_rows(worker, params_at):
        params = record(params_at)
        outputs, lses = integers(params.outputs), integers(params.lses)
        entries = params.entries + worker * params.parts * ENTRY
        whole = 0 if plain else params.dim - params.dim % LANES
        for row in range(
            share(params.rows, worker, params.workers), share(params.rows, worker + 1, params.workers)
        ):
            m, l, count = MINUS_INF, ZERO, 0
            for part in range(params.parts):
                lse = get_float(lses[part] + 4 * row)
                if lse != INF:  # FlashAttention 2 returns +inf if no key was seen
                    m = max(m, lse)
            for part in range(params.parts):
                lse = get_float(lses[part] + 4 * row)
                weight = numeric.weight(lse, m) if lse != INF else ZERO
                if weight != ZERO:
                    l += weight
                    put(entries + count * ENTRY, outputs[part] + row * params.dim * size)
                    put_float(entries + count * ENTRY + 8, weight)
                    count += 1
            for i in range(count):
                at = entries + i * ENTRY + 8
                put_float(at, numeric.normalizer(get_float(at), l, ONE))
            target = params.out + row * params.dim * size
            for j in range(0, whole, LANES):
                vector(entries, count, j * size, target + j * size)
            for j in range(whole, params.dim):
                x = ZERO
                for i in range(count):
                    entry = entries + i * ENTRY
                    x += get_element(get(entry) + j * size) * get_float(entry + 8)
                put_element(target + j * size, x)
            put_float(params.lse + 4 * row, numeric.log_sum(m, l))

    return callback(merge_rows, WORKER, (element, plain))


def prepare_merge(element, outputs, lses, out, lse):
    """Return a launch that merges checked contiguous parts: outputs [.., heads, Dv] and lses [.., heads].

    The owners of their addresses are numbers as text: `outputs` first, then `lses`.
    """
    several = len(outputs) * out.nbytes >= SMALL_BYTES  # workers
    most, parts = numba.config.NUMBA_NUM_THREADS if several else 1, len(outputs)
    entries = np.empty(most * parts * ENTRY, np.uint8)
    numbers = np.empty(len(PARAMS.names) + 2 * parts, np.int64)
    numbers[len(PARAMS.names) :] = [*map(address, outputs), *map(address, lses)]
    places = address(numbers) + 8 * len(PARAMS.names)
    numbers[: len(PARAMS.names)] = PARAMS.filled({
        "workers": 1, "parts": parts, "rows": lse.size, "dim": out.shape[-1],
        "outputs": places, "lses": places + 8 * parts,
        "out": out, "lse": lse, "entries": entries,
    })  # fmt: skip
    merge_rows, params = merge_code(element), address(numbers)

    def run():
        workers = min(threads(), most) if several else 1
        numbers[PARAMS.at["workers"]] = workers
        run_workers(merge_rows, workers, params)

    owners = {PARAMS.at["out"]: "out", PARAMS.at["lse"]: "lse"}
    owners |= {len(PARAMS.names) + i: str(i) for i in range(2 * parts)}
    return Launch(numbers, owners, run, alive=(entries,))
