"""A plan: index tensors checked once, the bits of the plain functions for every layer."""

import copy
import time

import attention_scenes as scenes
import numba
import numpy as np
import pytest
import random_calls
from attention_scenes import FP16, FP32, INT8, assert_unchanged
from plan_scenes import CACHED, PLANNED, STEPS, TOKENS, append, attend, planned
from refusals import legal_attention as legal
from scenes import INT64_MAX, assert_same

import kvkit
from kvkit import KvkitError, checks
from kvkit.reference.cache import DYNAMIC_LAYOUTS, cache_row
from kvkit.tools.vectors.calls import LAYER, LAYERS
from kvkit.tools.vectors.draws import normal, poison

LENGTHS = [(40, 1), (3, 1), (0, 5), (9, 0), (1, 20), (700, 2)]
modes = pytest.mark.parametrize("mode", [0, 1], ids=["offsets", "pages"])
formats_of = pytest.mark.parametrize("formats", [FP32, FP16, INT8], ids=str)


def function(call, **more):
    """Return key_value_cache with the tokens of an attention call."""
    attrs = {name: call.attributes[name] for name in (*CACHED, *PLANNED)}
    arrays = [call[name] for name in ("current_key", "current_value", *STEPS)]
    hints = call["max_seqlen"], call["max_kvlen"]
    cache = call["cache"], call["scale"]
    return kvkit.dynamic_batching.key_value_cache(*arrays, *hints, *cache, **{**attrs, **more})


def layers(rng, call):
    """Return the call for each layer, with new tokens; all layers of the cache have layer 1's contents."""
    axis = DYNAMIC_LAYOUTS[call.attributes["cache_layout"]].split().index("l")
    arrays = {
        name: np.repeat(call[name].take([LAYER], axis), LAYERS, axis)
        for name in ("cache", "scale")
        if call[name] is not None
    }
    for layer in range(LAYERS):
        tokens = {name: normal(rng, call[name].shape, call[name].dtype) for name in TOKENS}
        yield call.but(**arrays, **tokens, layer_idx=layer)


# The same bits


@formats_of
def test_random_calls(formats):
    """Attention and appends of two layers, twice each, have the bits of the plain functions."""
    for seed in range(20):
        rng = np.random.default_rng([seed, 2])
        call = random_calls.attention(rng, "dynamic_cache", formats)
        step = planned(call.but(**random_calls.one(rng, [{}, {"max_seqlen": None, "max_kvlen": 2**70}])))
        for _ in range(2):
            call = call.but(**{name: normal(rng, call[name].shape, call[name].dtype) for name in TOKENS})
            expected, other, appended = call.copy(), call.copy(), call.copy()
            want, new = expected.run(return_lse=True), function(call.copy())
            for _ in range(2):
                out = [None, tuple(np.empty_like(array) for array in want)][rng.integers(2)]
                for got, right in zip(attend(step, other, return_lse=True, out=out), want, strict=True):
                    assert_same(got, right)
                assert_unchanged(other, call, expected["cache"], expected["scale"])
                for got, right in zip(append(step, appended), new, strict=True):
                    assert_same(got, right)
                for name in ("cache", "scale"):
                    assert_same(appended[name], expected[name], name)


@modes
def test_one_plan_serves_several_calls_and_caches(mode, rng):
    """Of other types and head counts; only the tokens must be as many."""
    step = planned(scenes.dynamic_cache(rng, FP32, LENGTHS, mode=mode))
    first = scenes.dynamic_cache(rng, FP32, LENGTHS, mode=mode)
    for formats, options in ((FP16, {"heads": 8}), (INT8, {"dim": 8}), (FP32, {"kv_heads": 1, "layout": 2})):
        call = scenes.dynamic_cache(rng, formats, LENGTHS, mode=mode, **options)
        index = {name: first[name] for name in STEPS}
        step = planned(first)
        axis = DYNAMIC_LAYOUTS[call.attributes["cache_layout"]].split().index("n")
        rows = first["cache"].shape[0]
        for name in ("cache", "scale"):
            if call[name] is not None:
                shape = list(call[name].shape)
                shape[axis] = rows
                call.inputs[name] = np.ones(shape, call[name].dtype)
        call = call.but(**index)
        assert_same(attend(step, call.copy()), call.copy().run())


@modes
def test_a_plan_keeps_copies(mode, rng):
    call = scenes.dynamic_cache(rng, FP32, LENGTHS, mode=mode)
    expected, other = call.copy().run(), call.copy()
    step = planned(other)
    for name in STEPS:
        other[name][...] = INT64_MAX if name == "cachestarts" else -5
    for _ in range(2):
        assert_same(attend(step, other), expected)


# Errors


def error_of(action, *arguments, **more):
    with pytest.raises(KvkitError) as error:
        action(*arguments, **more)
    return str(error.value)


@modes
def test_a_cache_with_too_few_rows(mode):
    """The last row in use is the last a cache must have."""
    for formats in (FP32, INT8):
        call = legal("dynamic_cache", formats, mode=mode)
        step = planned(call)
        rows = 0
        for b, kvlen in enumerate(np.diff(call["kvstarts"])):
            for t in range(kvlen):
                place = cache_row(call["cachestarts"], b, t, mode, call.attributes["page_size"])
                rows = max(rows, place + 1)
        arrays = {n: call[n] for n in ("cache", "scale") if call[n] is not None}
        exact = {
            n: np.concatenate([a, poison(np.random.default_rng(0), a.shape, a.dtype)])[:rows]
            for n, a in arrays.items()
        }
        attend(step, call.but(**exact))
        short = {n: a[: rows - 1].copy() for n, a in exact.items()}
        before = {n: a.copy() for n, a in short.items()}
        for action in (attend, append):
            message = error_of(action, step, call.but(**short))
            assert message.startswith(("cachestarts", "cache"))
            assert ": expected " in message
        for name, array in short.items():
            assert_same(array, before[name], name)


def test_other_numbers_of_tokens():
    call = legal("dynamic_cache")
    step = planned(call)
    for tokens in (slice(0, 3), [0, 1, 2, 3, 3]):
        other = call.but(**{name: call[name][tokens] for name in TOKENS})
        before = other.copy()
        for action, names in ((attend, ("seqstarts", "query")), (append, ("seqstarts", "current_key"))):
            message = error_of(action, step, other)
            assert message.startswith(names)
        assert_unchanged(other, before)


def test_mode_and_page_size_belong_to_the_plan():
    call = legal("dynamic_cache")
    step = planned(call)
    for name in PLANNED:
        with pytest.raises(TypeError, match=name):
            attend(step, call, **{name: call.attributes[name]})


# Calls that repeat


def warmed(call, times=3):
    """Return a plan that has run this call before, and key_value_cache too."""
    step, other = planned(call), call.copy()
    for _ in range(times):
        attend(step, other)
        attend(step, other, out=np.empty_like(call["query"]))
        append(step, other)
        append(step, other, out=list(function(call.copy())))
        append(step, other, out=function(call.copy()))
    return step


@formats_of
def test_other_arrays_layers_and_outputs_in_turn(formats, rng):
    """Calls of the same form and of others, at new addresses each time."""
    call = scenes.dynamic_cache(rng, formats, LENGTHS, layout=3)
    step = warmed(call)
    for turn in range(3):
        for one in layers(rng, call):
            expected, other = one.copy(), one.copy()
            more = [{}, {"softcap": 4.0}, {"is_causal": False}][turn]
            want = expected.run(**more) if not more else expected.but(**more).run()
            out = np.full_like(want, 7)
            assert_same(attend(step, other, **more), want)
            assert attend(step, other, out=out, **more) is out
            assert_same(out, want)
            for got, right in zip(append(step, other), function(expected), strict=True):
                assert_same(got, right)
            for name in ("cache", "scale"):
                assert_same(other[name], expected[name], name)


@formats_of
def test_outputs_below_the_address_of_an_array_that_runs_backwards(formats, rng):
    """They overlap a cache whose rows descend, as the first call of their form would have found."""
    call = scenes.dynamic_cache(rng, formats, LENGTHS, layout=0)
    call = call.but(cache=np.flip(np.flip(call["cache"], 0).copy(), 0))
    step, tokens = planned(call), call["query"]
    for _ in range(2):
        assert_same(attend(step, call.copy(), out=np.empty_like(tokens)), call.copy().run())
        attend(step, call, out=np.empty_like(tokens))
    below = np.flip(call["cache"], 0).reshape(-1).view(np.uint8)
    low = -below.ctypes.data % 16
    inside = below[low : low + tokens.nbytes].view(tokens.dtype).reshape(tokens.shape)
    before = call.copy()
    assert inside.ctypes.data + inside.nbytes < call["cache"].ctypes.data
    assert error_of(attend, step, call, out=inside).startswith("out: expected memory")
    assert_unchanged(call, before)


def test_a_copy_of_a_plan_repeats_nothing_of_it(rng):
    """Prepared calls know addresses, which a copy does not have."""
    call = scenes.dynamic_cache(rng, FP16, LENGTHS)
    step = copy.deepcopy(warmed(call))
    for _ in range(2):
        assert_same(attend(step, call.copy()), call.copy().run())


def test_threads_may_change_between_calls(rng):
    call = scenes.dynamic_cache(rng, FP16, [(3000, 1), (900, 1), (0, 40)], heads=8, layout=3)
    step = warmed(call)
    expected = attend(step, call.copy())
    before = numba.get_num_threads()
    try:
        for count in (1, before, 1):
            numba.set_num_threads(count)
            assert_same(attend(step, call.copy()), expected)
            for got, right in zip(append(step, call.copy()), function(call.copy()), strict=True):
                assert_same(got, right)
    finally:
        numba.set_num_threads(before)


WRONG_NOW = {
    "num_heads_float": {"num_heads": 4.0}, "head_dim_float": {"head_dim": 8.0},
    "num_layer_float": {"num_layer": 3.0}, "layer_idx_bool": {"layer_idx": True},
    "layer_idx_float": {"layer_idx": 1.0}, "quant_bit_bool": {"quant_bit": False},
    "cache_layout_bool": {"cache_layout": False}, "cache_layout_float": {"cache_layout": 0.0},
    "is_causal_float": {"is_causal": 1.0}, "is_alibi_float": {"is_alibi": 0.0},
    "softcap_bool": {"softcap": False}, "window_floats": {"window": (-1.0, -1)},
    "num_heads_other": {"num_heads": 2}, "layer_idx_other": {"layer_idx": 5},
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_NOW)
def test_wrong_after_right(case):
    """What equals a legal value is not legal for that."""
    call = legal("dynamic_cache")
    step, before = warmed(call), call.copy()
    message = error_of(attend, step, call, **WRONG_NOW[case])
    assert message == error_of(scenes.Call(call.name, call.inputs, call.attributes | WRONG_NOW[case]).run)
    assert_unchanged(call, before)


def test_wrong_arrays_after_right_ones():
    call = legal("dynamic_cache", INT8)
    step = warmed(call)
    readable = {}
    for name in ("cache", "scale"):
        readable[name] = call[name].copy()
        readable[name].flags.writeable = False
    memory = np.zeros(4 * call["cache"].size, np.float16)
    cells = memory[: call["scale"].size].reshape(call["scale"].shape)
    query = memory[1 : 1 + call["query"].size].reshape(call["query"].shape)
    wrong = {
        "cache": [readable["cache"], None, call["cache"].tolist(), memory.view(np.int8)[: cells.nbytes]],
        "scale": [readable["scale"], None, call["scale"].astype(np.float64)],
        "query": [call["query"][:-1], call["query"].astype(np.float32), None],
        "current_key": [call["current_value"][..., :4], call["current_key"].astype(np.float32)],
    }
    for name, arrays in wrong.items():
        for array in arrays:
            error_of(attend, step, call.but(**{name: array}))
            if name != "query":
                error_of(append, step, call.but(**{name: array}))
    error_of(attend, step, call.but(scale=cells, query=query))
    error_of(attend, step, call.but(scale=cells, current_key=query[:, :2].reshape(call["current_key"].shape)))


def test_wrong_outputs_after_right_ones():
    """Nothing is written, neither to outputs nor past them."""
    call = legal("dynamic_cache")
    step, before = warmed(call), call.copy()
    shape = call["query"].shape
    wrong = [
        np.zeros(shape, np.float16),
        np.zeros((1, *shape[1:]), np.float32),
        call["query"],
        call["current_key"],
    ]
    readable = np.zeros(shape, np.float32)
    readable.flags.writeable = False
    inside = call["cache"].reshape(-1)[: call["query"].size].reshape(shape)
    for out in (*wrong, readable, inside, [], (readable,)):
        assert error_of(attend, step, call, out=out).startswith("out")
    key, value = function(call.copy())
    short = np.zeros_like(key[:1])
    pairs = [
        (key, short), (short, value), (key, key), (key, value.astype(np.float16)),
        (key, call["current_key"]),
    ]  # fmt: skip
    pairs += [(key,), (key, value, value), (key[..., ::2], value)]
    for pair in pairs:
        for out in (pair, list(pair)):
            assert error_of(append, step, call, out=out).startswith("out")
    assert error_of(append, step, call, out=np.stack([key, value])).startswith("out")
    assert error_of(append, step, call, out="no").startswith("out")
    assert not short.any()
    assert_unchanged(call, before)


# Cost


def fastest(action, times=1000):
    action()
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


@pytest.mark.perf
@formats_of
def test_a_tiny_step_takes_under_60_microseconds(formats, rng, microsecond):
    """What a layer costs besides its work."""
    call = scenes.dynamic_cache(rng, formats, [(3, 1), (5, 1)], heads=2, kv_heads=1, dim=8, decoding=2)
    step = planned(call)
    assert fastest(lambda: attend(step, call)) < 60 * microsecond


def test_index_tensors_are_checked_with_the_plan_alone(rng, monkeypatch):
    call = scenes.dynamic_cache(rng, FP16, [(30, 1), (5, 2)], heads=2, kv_heads=1, dim=8)
    expected, step = call.run(), planned(call)

    def checked(*args):
        raise LookupError

    monkeypatch.setattr(checks.scan, "scan_step", checked)
    assert_same(attend(step, call), expected)
    with pytest.raises(LookupError):
        call.but(start_pos=call["start_pos"] - 1).run()
