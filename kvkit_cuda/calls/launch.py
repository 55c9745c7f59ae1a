"""What the static and the dynamic operators share: the way from the arrays of a call to its launches.

`checked` makes a checked call of numpy arrays: of those that are given, so that an error costs no copy, and
again of what lies on the device then.
"""

from dataclasses import dataclass

import numpy as np

from kvkit import check
from kvkit import launch as twin
from kvkit.formats import Format
from kvkit.launch import RESULTS
from kvkit.steps import Steps
from kvkit_cuda.calls import arrays, results
from kvkit_cuda.calls import attention as kernels
from kvkit_cuda.calls.tables import Tables
from kvkit_cuda.moves import transfer

NEW = "current_key", "current_value"
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

    def check_outputs(given):
        seen = {name: operand.seen for name, operand in here.items()}
        twin.check_outputs(given, call.fmt, call.shape, layer=call.layer, **seen)

    if out is None:
        check_outputs(None)
    made, returned = results.outputs(
        out,
        [f"out ({name})" for name in RESULTS],
        [(call.shape, call.fmt.dtype)] * 2,
        (current_key, here["current_key"]),
        check_outputs,
        stream,
    )

    there = {name: here[name].moved(stream) if name in (*NEW, *written) else here[name] for name in here}
    call = checked(*(operand.seen for operand in there.values()))
    key, value = (result.moved(stream, contents=False) for result in made)
    tables = tables or Tables(call.step, lasting=False)
    store = transfer.store(call.current_key, call.current_value, call.layer, tables, stream)
    load = transfer.load(key.seen, value.seen, call.layer, tables, call.repeat, stream)
    store()  # nothing has been written so far, and nothing can fail any more
    load()
    for name in written:
        here[name].take(there[name], stream)
    for result, copy in zip(made, (key, value), strict=True):
        result.take(copy, stream)
    return returned


def attend(checked, given, out, return_lse, stream, tables=None):
    """Attention over the arrays `given`, by name, after an append if the call has a cache."""
    here = {name: arrays.operand(name, array, stream) for name, array in given.items()}
    here |= {name: here[name].one_piece(stream) for name in ROWS if name in here}
    call = checked(**{name: operand.seen for name, operand in here.items()})
    source = given["query"], here["query"]
    inputs = call.inputs + call.written
    made, returned = results.of_attention(out, call, inputs, source, return_lse, stream)

    written = [name for name, _ in call.written]
    there = {
        name: operand.moved(stream) if name in (*written, *dict(call.inputs)) else operand
        for name, operand in here.items()
    }
    call = checked(**{name: operand.seen for name, operand in there.items()})
    copies = [result.moved(stream, contents=False) for result in made]
    attn_output, lse = copies[0].seen, copies[1].seen if len(copies) > 1 else None
    tables = tables or Tables(call.steps, lasting=False)
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
    for result, copy in zip(made, copies, strict=True):
        result.take(copy, stream)
    return returned
