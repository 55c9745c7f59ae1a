"""Every operator says what is wrong with an output in the same words; `test_refusals.py` has all that is."""

import numpy as np
import pytest
from calls import CALLS, arrays_of, like, with_outputs
from refusals import refused

import kvkit
from kvkit import KvkitError
from kvkit.operators import OPERATORS


def named_results(make, more):
    """(call, results, [(label, array)]) of a call."""
    call = make()
    results = call.copy().run(kvkit, **more)
    if not isinstance(results, tuple):
        return call, results, [("out", results)]
    returned = OPERATORS[call.name].returned({"return_lse": "return_lse" in more})
    return call, results, list(zip([f"out ({name})" for name in returned], results, strict=True))


def test_every_operator_with_outputs_is_here():
    names = {make().name for make in CALLS.values()}
    assert {name for name, op in OPERATORS.items() if op.outputs} <= names


@with_outputs
def test_what_is_wrong_with_each_output(make, more):
    call, results, pairs = named_results(make, more)
    arrays = arrays_of(results)
    for i, (label, array) in enumerate(pairs):
        fixed = array.copy()
        fixed.flags.writeable = False
        longer = (array.shape[0] + 1, *array.shape[1:])
        others = {
            "a numpy array, got str 'no'": "no",
            f"dtype {array.dtype}, got int16": np.zeros(array.shape, np.int16),
            f"{array.ndim} axes, got shape {(1, *array.shape)}": array[None],
            f"shape {array.shape}, got {longer}": np.zeros(longer, array.dtype),
            "a writeable array, got a read-only one": fixed,
        }
        for message, wrong in others.items():
            out = like(results, [*arrays[:i], wrong, *arrays[i + 1 :]])
            assert refused(call, label, out=out, **more) == f"{label}: expected {message}"


@with_outputs
def test_what_is_wrong_with_several(make, more):
    """Another number of them, and arrays that overlap."""
    call, results, pairs = named_results(make, more)
    if len(pairs) == 1:
        return
    names = ", ".join(label[len("out (") : -1] for label, _ in pairs)
    wanted = f"out: expected a tuple of {len(pairs)} arrays ({names}), got "
    for out in (results[0], results[:1], (*results, results[0]), 1):
        assert refused(call, "out", out=out, **more).startswith(wanted)
    room = np.zeros(2 * max(array.nbytes for array in results), np.uint8)
    out = tuple(room[: array.nbytes].view(array.dtype).reshape(array.shape) for array in results)
    apart = f"{pairs[0][0]}: expected memory apart from {pairs[1][0]}, got arrays that overlap"
    assert refused(call, "out", out=out, **more) == apart


def test_keys_alone_are_one_of_two_outputs():
    call = CALLS["contexts"]().but(value_cache=None)
    expected, nothing = call.run(kvkit)
    given = np.empty_like(expected)
    key, value = call.run(kvkit, out=(given, None))
    assert key is given
    assert nothing is value is None
    assert key.tobytes() == expected.tobytes()
    with pytest.raises(KvkitError, match=r"^out \(key\): expected dtype float16, got float32$"):
        call.run(kvkit, out=(given.astype(np.float32),))
    with pytest.raises(KvkitError, match=r"^out: expected a tuple of 1 arrays \(key\), got an array"):
        call.run(kvkit, out=given)


def test_an_output_may_be_its_own_input_where_that_is_said():
    call = CALLS["rotary"]()
    expected, given = call.copy().run(kvkit), (call["query"], call["key"])
    got = call.run(kvkit, out=given)
    assert [array is one for array, one in zip(got, given, strict=True)] == [True, True]
    assert [array.tobytes() for array in got] == [array.tobytes() for array in expected]
