"""What the static and the dynamic operators share: the way from the arrays of a call to its launches.

`checked` makes a checked call of numpy arrays: of those that are given, so that an error costs no copy, and
again of what lies on the device then.
"""

from kvkit_cuda.calls import arrays, results
from kvkit_cuda.calls import attention as kernels
from kvkit_cuda.calls.tables import Tables
from kvkit_cuda.moves import transfer

NEW = "current_key", "current_value"
ROWS = ("query", "key", "value", *NEW)  # whose last axis is in one piece


def append_and_load(checked, current_key, current_value, cache, scale, out, stream, tables=None):
    """Append the new tokens and return the contexts read back; `tables` are those of a planned step."""
    given = {"current_key": current_key, "current_value": current_value, "cache": cache, "scale": scale}
    here = {name: arrays.operand(name, array, stream) for name, array in given.items()}
    here |= {name: here[name].one_piece(stream) for name in NEW}
    call = checked(**{name: operand.seen for name, operand in here.items()})
    written = [name for name, _ in call.written]
    source = current_key, here["current_key"]
    made, returned = results.outputs(out, call.results, source, stream)

    there = {name: here[name].moved(stream) if name in (*NEW, *written) else here[name] for name in here}
    call = checked(**{name: operand.seen for name, operand in there.items()})
    key, value = (result.moved(stream, contents=False) for result in made)
    tables = tables or Tables(call.steps, lasting=False)
    store = transfer.store(call.current_key, call.current_value, call.layer, tables, stream)
    load = transfer.load(key.seen, value.seen, call.layer, tables, call.repeat, stream)
    store()  # nothing has been written so far, and nothing can fail any more
    load()
    for name in written:
        here[name].take(there[name], stream)
    for result, copy in zip(made, (key, value), strict=True):
        result.take(copy, stream)
    return returned


def attend(checked, given, out, stream, tables=None):
    """Attention over the arrays `given`, by name, after an append if the call has a cache."""
    here = {name: arrays.operand(name, array, stream) for name, array in given.items()}
    here |= {name: here[name].one_piece(stream) for name in ROWS if name in here}
    call = checked(**{name: operand.seen for name, operand in here.items()})
    source = given["query"], here["query"]
    made, returned = results.outputs(out, call.results, source, stream)

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
