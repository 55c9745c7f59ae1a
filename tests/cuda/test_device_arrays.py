"""Every operator over arrays of the device, of every kind: the CPU's results, as arrays of that kind."""

import doctest
import itertools
import types

import numpy as np
import pytest
from attention_scenes import TOLERANCE, assert_near
from calls import CALLS, arrays_of
from device_arrays import KINDS, Array, Tensor, contents
from scenes import assert_same

import kvkit
import kvkit_cuda
from kvkit_cuda import ascend
from kvkit_cuda.attention import plain
from kvkit_cuda.calls import attention
from kvkit_cuda.copy import means, pieces, transfer
from kvkit_cuda.device_runtime import host
from kvkit_cuda.positions import angles, rotary

ROOMS = kvkit_cuda, kvkit_cuda.dynamic_batching, ascend
OPERATORS = {
    f"{room.__name__}.{name}": getattr(room, name)
    for room in ROOMS
    for name in room.__all__
    if isinstance(getattr(room, name), types.FunctionType)
}


def is_near(call):
    """Sums are in another order than the CPU's."""
    return "attention" in call.name or call.name in ("gated_delta_step", "gated_delta_rule")


def cases():
    """Yield each call with two kinds of arrays: what takes an array is the same for every operator."""
    others = itertools.cycle(kind for kind in KINDS if kind != "interface")
    for label, make in CALLS.items():
        for kind in ("interface", next(others)):
            slow = "attention" in make().name and (kind != "interface" or "codes" in label)
            yield pytest.param(label, kind, marks=[pytest.mark.slow] * slow)


def assert_alike(call, got, right, name=""):
    assert got.dtype == right.dtype
    if is_near(call) and name not in ("cache", "scale"):
        # Devices round code * scale to the format of scales, as `key_value_cache` does.
        dtypes = right.dtype, getattr(call.inputs.get("scale"), "dtype", right.dtype)
        assert_near(got, right, max(TOLERANCE[str(dtype)] for dtype in dtypes))
    else:
        assert_same(got, right)


@pytest.mark.parametrize(("label", "kind"), [*cases()])
def test_arrays_of_the_device(label, kind):
    """They are used where they are, index tensors are read; results are of the kind of the first array."""
    call, twin = CALLS[label](), CALLS[label]()
    has_lse = "attention" in call.name and call.name != "merge_attention_states"
    more = {"return_lse": True} if has_lse else {}
    expected, given = twin.run(kvkit, **more), {}
    for array in call.operator.inputs:
        value = call.inputs.get(array.name)
        if isinstance(value, np.ndarray) and value.ndim and not value.dtype.name.startswith("float8"):
            is_index = "int64" in array.dtypes
            given[array.name] = Array(value) if is_index else KINDS[kind](np.ascontiguousarray(value))
    results = call.but(**given).run(**more)
    inout = [array.name for array in call.operator.inputs if array.inout and array.name in given]
    for name in inout:
        assert_alike(call, contents(given[name]), twin[name], name)
    if not call.operator.outputs:
        assert all(result is given[name] for result, name in zip(arrays_of(results), inout, strict=False))
        return
    is_index = call.name == "compressed_slots"  # an index tensor of index tensors stays on the host
    wanted = type(host.empty(1, np.int8, 0)) if given and not is_index else np.ndarray
    if Tensor in map(type, given.values()):
        wanted = Tensor
    for got, right in zip(arrays_of(results), arrays_of(expected), strict=True):
        assert type(got) is wanted or any(got is given[name] for name in inout)  # some arguments are results
        assert_alike(call, contents(got), right)


def own_results(call):
    """Return the results of a call on the CPU that are not its arguments, which `out` holds."""
    results = arrays_of(call.run(kvkit))
    return [x for x in results if not any(x is given for given in call.inputs.values())]


@pytest.mark.parametrize(
    "label",
    [
        pytest.param(label, marks=[pytest.mark.slow] * (is_near(make()) and "codes" in label))
        for label, make in CALLS.items()
        if make().operator.outputs
    ],
)
def test_results_that_are_given(label):
    """On the device and on the host, each of several elsewhere."""
    call = CALLS[label]()
    expected = own_results(call.copy())
    for on_device in (0, 1):
        places = [Array if i % 2 == on_device else np.asarray for i in range(len(expected))]
        given = [place(np.ones_like(x)) for place, x in zip(places, expected, strict=True)]
        results = arrays_of(call.copy().run(out=given[0] if len(given) == 1 else tuple(given)))
        for got, out, right in zip(results[: len(given)], given, expected, strict=True):
            assert got is out
            assert_alike(call, contents(got), right)


BROKEN = {  # what prepares a launch, and a call that asks for it
    "store": (transfer, "store", "static cache of floats"),
    "load": (transfer, "load", "static cache of floats"),
    "angles": (angles, "table", "rotary"),
    "rotary": (rotary, "prepare", "rotary"),
    "pieces": (pieces, "prepare", "blocks nd"),
    "means": (means, "prepare", "blocks rope"),
    "attention": (attention, "prepare", "paged attention"),
    "the kernel of attention": (plain, "prepare", "static cache attention"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_nothing_is_written_if_a_launch_cannot_be_prepared(what, monkeypatch):
    """Not into caches, and not into outputs."""
    module, name, label = BROKEN[what]
    call = CALLS[label]()
    arrays = {n: x for n, x in call.inputs.items() if isinstance(x, np.ndarray) and x.dtype.kind != "i"}
    before = {n: x.tobytes() for n, x in arrays.items()}

    def interrupted(*arguments, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, name, interrupted)
    out = {}
    if call.name.endswith(("rotary_position_embedding", "paged_attention")):
        outs = [np.ones_like(call[n]) for n in ("query", "key") if n in call.inputs]
        out = {"out": tuple(map(Array, outs)) if len(outs) > 1 else Array(outs[0])}
    with pytest.raises(KeyboardInterrupt):
        call.but(**{n: Array(x) for n, x in arrays.items()}).run(**out)
    assert {n: x.tobytes() for n, x in arrays.items()} == before
    assert all((x == 1).all() for x in (outs if out else ()))


@pytest.mark.parametrize("name", OPERATORS)
def test_docstring_example(name):
    test = doctest.DocTestParser().get_doctest(OPERATORS[name].__doc__, {}, name, None, 0)
    assert len(test.examples) > 1
    assert doctest.DocTestRunner().run(test).failed == 0
