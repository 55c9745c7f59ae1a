"""What the static and the dynamic operators share once each has checked its own arguments."""

import numpy as np

from kvkit import check, cpu

RESULTS = "key", "value"


def check_outputs(out, fmt, shape, current_key, current_value, cache, scale, layer):
    """Check arrays that are given for the results, or their size, and what else an append writes."""
    if out is None:
        check.holdable("num_repeat", shape, fmt)
    else:
        check.outputs(out, RESULTS, shape, fmt)
    given = [("current_key", current_key), ("current_value", current_value)]
    written = check.written_apart(cache, scale, layer, given)
    if out is not None:
        key, value = out
        check.apart("out (key)", key, [("out (value)", value), *given, *written])
        check.apart("out (value)", value, [*given, *written])


def append_and_load(fmt, current_key, current_value, cache, scale, layer, step, repeat, shape, out):
    """Append the new tokens and return the contexts read back; arguments are checked but for overlaps."""
    check_outputs(out, fmt, shape, current_key, current_value, cache, scale, layer)
    key, value = (np.empty(shape, fmt.dtype) for _ in RESULTS) if out is None else out
    store = cpu.transfer.store(current_key, current_value, layer, step)
    load = cpu.transfer.load(key, value, layer, step, repeat, new=out is None)
    cpu.launches.start(store, load)
    return (key, value), (store, load)
