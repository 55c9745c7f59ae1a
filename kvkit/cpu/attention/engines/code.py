"""Steps of engines as machine code: C functions (params, block, tile) over addresses of records."""

from numba import types

from kvkit.runtime.jit import callback

STEP = types.void(*[types.int64] * 3)


def step_code(function, key, control=False):
    """Compile a step of an engine, or load it; `key` names what the function closes over."""
    return callback(function, STEP, key, control=control)
