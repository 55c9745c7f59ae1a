"""What the static and the dynamic operators share: the way from the arrays of a call to its launches.

`checked` makes a checked call of numpy arrays: of those that are given, so that an error costs no copy, and
again of what lies on the device then.
"""

from dataclasses import dataclass

import numpy as np

from kvkit import attention, check
from kvkit.formats import Format
from kvkit.steps import Steps
from kvkit_cuda import arrays, transfer
from kvkit_cuda import attention as kernels
from kvkit_cuda.tables import Tables

NEW, RESULTS = ("current_key", "current_value"), ("key", "value")
ROWS = ("query", *RESULTS, *NEW)  # whose last axis is in one piece


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


def append_and_load(checked, current_key, current_value, cache, scale, out, stream, tables=None):
    """Append the new tokens and return the contexts read back; `tables` are those of a planned step."""
    given = {"current_key": current_key, "current_value": current_value, "cache": cache, "scale": scale}
    here = {name: arrays.operand(name, array, stream) for name, array in given.items()}
    here |= {name: here[name].one_piece(stream) for name in NEW}
    call = checked(*(operand.seen for operand in here.values()))
    written = ["cache", "scale"] if call.layer.cell else ["cache"]
    results, returned = outputs(out, call, current_key, here, stream)

    there = {name: here[name].moved(stream) if name in (*NEW, *written) else here[name] for name in here}
    call = checked(*(operand.seen for operand in there.values()))
    key, value = (result.moved(stream, contents=False) for result in results)
    tables = tables or Tables(call.step)
    store = transfer.store(call.current_key, call.current_value, call.layer, tables, stream)
    load = transfer.load(key.seen, value.seen, call.layer, tables, call.repeat, stream)
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


def attend(checked, given, out, return_lse, stream, tables=None):
    """Attention over the arrays `given`, by name, after an append if the call has a cache."""
    here = {name: arrays.operand(name, array, stream) for name, array in given.items()}
    here |= {name: here[name].one_piece(stream) for name in ROWS if name in here}
    call = checked(**{name: operand.seen for name, operand in here.items()})
    results, returned = attention_outputs(out, call, given["query"], here, return_lse, stream)

    written = [name for name, _ in call.written]
    there = {
        name: operand.moved(stream) if name in (*written, *dict(call.inputs)) else operand
        for name, operand in here.items()
    }
    call = checked(**{name: operand.seen for name, operand in there.items()})
    copies = [result.moved(stream, contents=False) for result in results]
    attn_output, lse = copies[0].seen, copies[1].seen if len(copies) > 1 else None
    tables = tables or Tables(call.steps)
    launches = kernels.prepare(
        call.query, attn_output, lse, call.context, tables, call.decoding, call.weights, stream
    )
    if call.layer:
        current_key, current_value = call.current
        launches.insert(0, transfer.store(current_key, current_value, call.layer, tables, stream))
    for launch in launches:  # nothing has been written so far, and nothing can fail any more
        launch()
    for name in written:
        here[name].take(there[name], stream)
    for result, copy in zip(results, copies, strict=True):
        result.take(copy, stream)
    return returned


def attention_outputs(out, call, query, here, return_lse, stream):
    """The operands of the results, checked, and what is returned: given arrays, or new ones like `query`."""
    wants_lse = attention.flag("return_lse", return_lse)
    forms = [(call.shape, call.fmt.dtype), (call.shape[:-1], np.dtype(np.float32))][: 1 + wants_lse]
    if out is None and here["query"].on_device:
        out = tuple(arrays.like(query, *form, stream) for form in forms)
    elif out is None:
        out = tuple(np.empty(*form) for form in forms)
    elif not wants_lse:
        out = (out,)
    pair = isinstance(out, (tuple, list))
    results = [arrays.operand("out", array, stream) for array in out] if pair else []
    seen = tuple(result.seen for result in results) if pair else out
    attention.outputs(
        seen if wants_lse else seen[0], call.shape, call.fmt, return_lse, call.inputs + call.written
    )
    return results, tuple(out) if wants_lse else out[0]
