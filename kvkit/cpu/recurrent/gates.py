"""Compute the gates of the delta rule.

g = -e^A_log softplus(a + dt_bias), or with a bound L: g = L sigmoid(e^A_log (a + dt_bias))
beta = sigmoid(b), or twice that
"""

import numpy as np
from numba import types

from kvkit.cpu import memory
from kvkit.cpu.launches import WORKER, Launch, Record, address, run_workers, threads
from kvkit.cpu.simd import recurrent as simd
from kvkit.cpu.simd.lanes import LANES
from kvkit.formulas import recurrent as formulas
from kvkit.formulas.index import share
from kvkit.runtime.jit import compiled

PARAMS = Record("workers rows width a rates biases g bound count b beta factor")
record = memory.record(PARAMS)
get_float, put_float = memory.load(types.float32), memory.store(types.float32)
SMALL = 2**15  # gates below which one thread computes all


@compiled(WORKER)
def compute_gates(worker, params_at):
    """Write g of rows of a [rows, width], and beta of `count` numbers b."""
    params = record(params_at)
    width, bound = params.width, get_float(params.bound)
    bounded = get_float(params.bound + 4) > types.float32(0)
    whole = width - width % LANES
    for row in range(
        share(params.rows, worker, params.workers), share(params.rows, worker + 1, params.workers)
    ):
        a, g = params.a + 4 * row * width, params.g + 4 * row * width
        simd.decay_gates(a, params.rates, params.biases, g, whole // LANES, params.bound)
        for i in range(whole, width):
            x = get_float(a + 4 * i) + get_float(params.biases + 4 * i)
            put_float(g + 4 * i, formulas.decay_gate(x, get_float(params.rates + 4 * i), bound, bounded))
    first, last = share(params.count, worker, params.workers), share(params.count, worker + 1, params.workers)
    whole = last - (last - first) % LANES
    simd.write_gates(params.b + 4 * first, params.factor, params.beta + 4 * first, (whole - first) // LANES)
    factor = get_float(params.factor)
    for i in range(whole, last):
        put_float(params.beta + 4 * i, factor * formulas.sigmoid(get_float(params.b + 4 * i)))


def prepare_gates(call, g, beta):
    """Return a launch that writes g (like a) and beta (like b, or None) of checked raw gates."""
    rows, width = len(call.a), call.rates.size
    numbers = np.array([call.bound or 0, call.bound is not None, 1 + call.double_beta], np.float32)
    workers = min(threads(), max(rows, 1)) if g.size >= SMALL else 1
    params = PARAMS.filled({
        "workers": workers, "rows": rows, "width": width, "a": call.a, "rates": call.rates,
        "biases": call.biases, "g": g, "bound": numbers, "count": 0 if call.b is None else call.b.size,
        "b": call.b, "beta": beta, "factor": address(numbers) + 8,
    })  # fmt: skip
    kernel = compute_gates.code
    run = lambda: run_workers(kernel, workers, address(params))  # noqa: E731
    return Launch(params, {}, run, alive=(call, g, beta, numbers))
