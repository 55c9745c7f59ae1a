"""Return the outputs of a call: the caller's arrays, or new ones on the device of an input."""

from typing import Any

from kvkit_cuda.calls import arrays


def outputs(results, usual, out, source, stream):
    """Return (operands of a call's results, what the call returns). New arrays are on the device of `source`.

    `usual` is the number of results that do not depend on an option. Those that a call does not have are
    returned as None, and their entries in `out` are ignored.
    """
    absent = [None] * (usual - len(results.forms))
    if absent and isinstance(out, (tuple, list)):
        out = out[: len(results.forms)]
    targets: Any = [out] if results.alone else out
    if out is None:
        targets = [source.like(*form, stream) for form in results.forms.values()]
    elif not isinstance(targets, (tuple, list)) or len(targets) != len(results.forms):
        results.checked(out)
    labelled = zip(results.labels, targets, strict=True)
    operands = [arrays.operand(label, result, stream) for label, result in labelled]
    if out is not None:
        seen = tuple(result.seen for result in operands)
        results.checked(seen[0] if results.alone else seen)
    return operands, targets[0] if results.alone else (*targets, *absent)


def computed(names, call, values, source, stream):
    """Return (operands of new results, what the call returns) of a call that the CPU has computed.

    Results that are arguments, changed in place, are the caller's own arrays; `out` gives no others.
    """
    usual = call.results.forms
    operands, given = outputs(call.results, len(usual), values.get("out"), source, stream)
    targets = dict(zip(usual, [given] if call.results.alone else given, strict=True))
    for name, array in call.arrays.items():
        if name not in targets:
            targets[name] = source.like(array.shape, array.dtype, stream)
            operands.append(arrays.operand(name, targets[name], stream))
    returned = tuple(targets[name] if name in targets else values[name] for name in names)
    return operands, returned if len(returned) > 1 else returned[0]
