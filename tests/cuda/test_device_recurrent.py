"""Steps of the gated delta rule on a device, against the plain loops of the reference."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from device_arrays import Array, contents

import kvkit
import kvkit_cuda
from kvkit.reference import recurrent as plain
from kvkit_cuda import prompts, recurrent

SIZES = (2, 2, 4, 6, 5), (4, 2, 2, 8, 3)  # heads of q, k and v, dk, dv: shared keys, shared states
RULES = {"linear": (), "gated": ("g",), "delta": ("beta",), "gated_delta": ("g", "beta")}


@pytest.fixture
def taken(monkeypatch):
    """Return a list that gets the formats of each kernel in use."""
    found, compiled = [], recurrent.compiled
    monkeypatch.setattr(recurrent, "compiled", lambda *formats: found.append(formats) or compiled(*formats))
    return found


def step_of(rng, sizes, layout, by_channel):
    queries, keys, heads, dk, dv = sizes
    call = {name: rng.standard_normal((3, count, dim), np.float32)
            for name, count, dim in (("q", queries, dk), ("k", keys, dk), ("v", heads, dv))}  # fmt: skip
    call["g"] = -rng.random((3, heads, dk) if by_channel else (3, heads), np.float32)
    call["g"][0, 0] = -np.inf
    inner = (dk, dv) if layout == "KV" else (dv, dk)
    return call | {
        "beta": rng.random((3, heads), np.float32),
        "state": rng.random((6, heads, *inner), np.float32),
    }


@pytest.mark.parametrize("layout", ["KV", "VK"])
@pytest.mark.parametrize("by_channel", [False, True], ids=["heads", "channels"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_steps(sizes, by_channel, layout, taken):
    call = step_of(np.random.default_rng(0), sizes, layout, by_channel)
    for rule, moves in itertools.product(RULES, (False, True)):
        given = {name: array for name, array in call.items() if name not in ("g", "beta", *RULES[rule]) or
                 name in RULES[rule]}  # fmt: skip
        options = {"state_indices": [4, -1, 0], "norm": True, "state_layout": layout, "scale": 0.5}
        options |= {"out_state_indices": [5, -1, 0]} if moves else {}
        state = call["state"].astype(np.float64)
        expected = plain.gated_delta_step(**given | {"state": state}, **options)
        there = {name: Array(array.copy()) for name, array in given.items()}
        out = contents(kvkit_cuda.gated_delta_step(**there, **options))
        np.testing.assert_allclose(out, expected, atol=2e-5)
        np.testing.assert_allclose(contents(there["state"]), state, atol=2e-5)
        here = call["state"].copy()  # arrays of the host are copied to the device, and back if they change
        assert np.array_equal(kvkit_cuda.gated_delta_step(**given | {"state": here}, **options), out)
        assert np.array_equal(here, contents(there["state"]))
    assert set(taken) == {("float32", "float32", "float32")}


def test_tokens_of_16_bits(taken):
    call = step_of(np.random.default_rng(0), SIZES[0], "KV", False)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        narrow = {name: call[name].astype(dtype) for name in ("q", "k", "v")}
        state = call["state"].copy()
        expected = kvkit.gated_delta_step(**call | narrow | {"state": state}, state_indices=[4, -1, 0])
        there = {
            name: Array(array) for name, array in (call | narrow | {"state": call["state"].copy()}).items()
        }
        out = contents(kvkit_cuda.gated_delta_step(**there, state_indices=[4, -1, 0]))
        np.testing.assert_allclose(out.astype(np.float32), expected.astype(np.float32), rtol=1e-2, atol=1e-2)
        np.testing.assert_allclose(contents(there["state"]), state, atol=2e-5)
    assert len(taken) == 2


def prompt_of(rng, sizes, layout, by_channel, tokens):
    call = step_of(rng, sizes, layout, by_channel)
    queries, keys, heads, dk, dv = sizes
    for name, count, dim in (("q", queries, dk), ("k", keys, dk), ("v", heads, dv)):
        call[name] = rng.standard_normal((tokens, count, dim), np.float32)
    g = -rng.random((tokens, *call["g"].shape[1:]), np.float32)
    g[5, 0], g[7], g[8, 1] = -np.inf, -60, -200
    return call | {"g": g, "beta": rng.random((tokens, heads), np.float32)}


@pytest.fixture
def prompted(monkeypatch):
    """Return a list that gets the formats of each kernel of prompts in use."""
    found, compiled = [], prompts.compiled
    monkeypatch.setattr(prompts, "compiled", lambda *formats: found.append(formats) or compiled(*formats))
    return found


@pytest.mark.parametrize("layout", ["KV", "VK"])
@pytest.mark.parametrize("by_channel", [False, True], ids=["heads", "channels"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_prompts(sizes, by_channel, layout, prompted):
    """Packed sequences of 19, 0, 2, 1 and 4 tokens, one without a state; slots of nobody stay."""
    call = prompt_of(np.random.default_rng(0), sizes, layout, by_channel, 26)
    options = {"starts": [0, 19, 19, 21, 22, 26], "state_indices": [4, 3, 0, -1, 2], "state_layout": layout}
    for rule in RULES if sizes == SIZES[0] else ("gated_delta",):
        given = {name: array for name, array in call.items() if name not in ("g", "beta") or
                 name in RULES[rule]}  # fmt: skip
        state = call["state"].astype(np.float64)
        more = options | {"norm": rule != "linear"}
        expected, _ = plain.gated_delta_rule(**given | {"state": state}, **more)
        there = {name: Array(array.copy()) for name, array in given.items()}
        out, last = kvkit_cuda.gated_delta_rule(**there, **more)
        assert last is there["state"]
        near = {"atol": 2e-5, "rtol": 2e-5}
        np.testing.assert_allclose(contents(out), expected, **near)
        np.testing.assert_allclose(contents(last), state, **near)
        assert np.array_equal(contents(last)[[1, 3, 5]], call["state"][[1, 3, 5]])
    here = call["state"].copy()  # arrays of the host are copied to the device, and back if they change
    found, last = kvkit_cuda.gated_delta_rule(**given | {"state": here}, **more)
    assert last is here
    assert np.array_equal(found, contents(out))
    assert np.array_equal(here, contents(there["state"]))
    assert set(prompted) == {("float32", "float32")}


def test_prompts_side_by_side(prompted):
    """Rows behind the lengths are ignored, and 0 in the output; heads of v take more than one block."""
    sizes = 1, 1, 1, 3, 35
    call = prompt_of(np.random.default_rng(0), (*sizes[:2], 2, *sizes[3:]), "KV", False, 12)
    apart = {name: call[name][:, :1].copy().reshape(2, 6, *call[name][:, :1].shape[1:])
             for name in ("q", "k", "v", "g", "beta")}  # fmt: skip
    state = call["state"][:2, :1].copy()
    expected, last = kvkit.gated_delta_rule(**apart, state=state.copy(), lengths=[4, 0])
    there = {name: Array(array) for name, array in (apart | {"state": state}).items()}
    out, after = kvkit_cuda.gated_delta_rule(**there, lengths=[4, 0])
    np.testing.assert_allclose(contents(out), expected, atol=2e-5)
    np.testing.assert_allclose(contents(after), last, atol=2e-5)
    assert not contents(out)[1].any()
    assert len(prompted) == 1


def test_what_the_cpu_computes(taken):
    """Raw gates, states of bfloat16, prompts, capsules and the convolution: results lie on the device."""
    rng = np.random.default_rng(0)
    call = step_of(rng, SIZES[0], "KV", False)
    call["g"][0, 0] = -1
    gates = rng.random(4, np.float32), rng.random(4, np.float32)
    for change in ({"gates": gates}, {"state": call["state"].astype(ml_dtypes.bfloat16)}):
        given = {name: array.copy() for name, array in (call | change).items() if name != "gates"}
        more = {"gates": gates} if "gates" in change else {}
        there = {name: Array(array.copy()) for name, array in given.items()}
        expected = kvkit.gated_delta_step(**given, state_indices=[4, -1, 0], **more)
        out = kvkit_cuda.gated_delta_step(**there, state_indices=[4, -1, 0], **more)
        assert np.array_equal(contents(out), expected)
        assert contents(there["state"]).tobytes() == given["state"].tobytes()
    given = {name: array.copy() for name, array in call.items()}
    there = {name: Array(array.copy()) for name, array in given.items()}
    options = {"state_indices": [4, 0], "starts": [0, 2, 3], "return_capsule": 2}
    expected, found = (
        kvkit.gated_delta_rule(**given, **options),
        kvkit_cuda.gated_delta_rule(**there, **options),
    )
    assert found[1] is there["state"]
    for got, wanted in zip(found, expected, strict=True):
        assert np.array_equal(contents(got), wanted)
    capsule, accepted = expected[2], {"accepted": [1, 1], "state_indices": [4, 0]}
    kvkit.gated_delta_replay(given["state"], capsule, **accepted)
    kvkit_cuda.gated_delta_replay(there["state"], Array(capsule), **accepted)
    assert np.array_equal(contents(there["state"]), given["state"])
    assert not taken


@pytest.mark.parametrize("kind", [np.array, Array], ids=["host", "device"])
def test_out_of_what_the_cpu_computes(kind):
    """With a wrong `out` states stay; with a right one it and the states change, on host and device."""
    rng = np.random.default_rng(0)
    inputs = {"x": rng.random((3, 5), np.float32), "weight": rng.random((5, 4), np.float32)}
    state = rng.random((6, 5, 3), np.float32)
    given = {name: kind(array.copy()) for name, array in (inputs | {"state": state}).items()}
    slots = {"state_indices": [4, -1, 0]}
    for shape, dtype in (((3, 4), np.float32), ((3, 5), np.float16)):
        with pytest.raises(kvkit.KvkitError, match=r"^out: expected "):
            kvkit_cuda.causal_conv_update(**given, **slots, out=kind(np.zeros(shape, dtype)))
        assert np.array_equal(contents(given["state"]), state)
    out = kind(np.zeros((3, 5), np.float32))
    expected = kvkit.causal_conv_update(**inputs, state=state, **slots)
    assert kvkit_cuda.causal_conv_update(**given, **slots, out=out) is out
    assert np.array_equal(contents(out), expected)
    assert np.array_equal(contents(given["state"]), state)
    a, b, a_log, bias = (kind(rng.random(shape, np.float32)) for shape in ((3, 5), (3, 5), (5,), (5,)))
    results = kind(np.zeros((3, 5), np.float32)), kind(np.zeros((3, 5), np.float32))
    g, beta = kvkit_cuda.delta_gates(a, b, a_log, bias, out=results)
    assert g is results[0]
    assert beta is results[1]
    expected = kvkit.delta_gates(*map(contents, (a, b, a_log, bias)))
    assert np.array_equal(contents(g), expected[0])
    assert np.array_equal(contents(beta), expected[1])
