"""What the static and the dynamic operators share: the way from the arrays of a call to its launches."""

from dataclasses import dataclass

import numpy as np

from kvkit import check
from kvkit.formats import Format
from kvkit.steps import Steps
from kvkit_cuda import arrays, transfer

NEW, RESULTS = ("current_key", "current_value"), ("key", "value")


@dataclass(frozen=True, slots=True)
class Call:
    """A checked call of `key_value_cache`."""

    fmt: Format
    current_key: np.ndarray
    current_value: np.ndarray
    layer: check.Cache
    step: Steps
    repeat: int
    shape: tuple[int, ...]  # of the results


def append_and_load(checked, current_key, current_value, cache, scale, out, stream):
    """Append the new tokens and return the contexts read back.

    `checked` makes a `Call` of numpy arrays: of those that are given, so that an error costs no copy, and
    again of what lies on the device then.
    """
    given = {"current_key": current_key, "current_value": current_value, "cache": cache, "scale": scale}
    here = {name: arrays.operand(name, array, stream) for name, array in given.items()}
    here |= {name: here[name].one_piece(stream) for name in NEW}
    call = checked(*(operand.seen for operand in here.values()))
    written = ["cache", "scale"] if call.layer.cell else ["cache"]
    results, returned = outputs(out, call, current_key, here, stream)

    there = {name: here[name].moved(stream) if name in (*NEW, *written) else here[name] for name in here}
    call = checked(*(operand.seen for operand in there.values()))
    key, value = (result.moved(stream, contents=False) for result in results)
    store = transfer.store(call.current_key, call.current_value, call.layer, call.step, stream)
    load = transfer.load(key.seen, value.seen, call.layer, call.step, call.repeat, stream)
    store()  # nothing has been written so far, and nothing can fail any more
    load()
    for name in written:
        here[name].take(there[name], stream)
    for result, copy in zip(results, (key, value), strict=True):
        result.take(copy, stream)
    return returned


def outputs(out, call, current_key, here, stream):
    """The operands of the results, checked, and what is returned: given arrays, or new ones like the keys."""
    tokens = [(name, here[name].seen) for name in NEW]
    written = check.written_apart(here["cache"].seen, here["scale"].seen, call.layer, tokens)
    if out is None:
        if here["current_key"].on_device:
            made = tuple(arrays.like(current_key, call.shape, call.fmt.dtype, stream) for _ in RESULTS)
        else:
            made = check.outputs(None, RESULTS, call.shape, call.fmt)
        return [arrays.operand(name, array, stream) for name, array in zip(RESULTS, made, strict=True)], made
    results = []
    if isinstance(out, (tuple, list)):
        results = [arrays.operand(f"out[{i}]", array, stream) for i, array in enumerate(out)]
    key, value = check.outputs(tuple(r.seen for r in results) or out, RESULTS, call.shape, call.fmt)
    check.apart("out (key)", key, [("out (value)", value), *tokens, *written])
    check.apart("out (value)", value, [*tokens, *written])
    return results, tuple(out)
