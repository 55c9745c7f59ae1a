"""Compile the steps of engines: C functions (params, block, tile) that take addresses of records."""

from numba import types

from kvkit.runtime.jit import callback

STEP = types.void(*[types.int64] * 3)


def step_code(function, key, control=False):
    """Compile a step of an engine, or load it; `key` has the values that the function closes over."""
    return callback(function, STEP, key, control=control)
