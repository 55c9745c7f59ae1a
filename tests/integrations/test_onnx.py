"""Standard ONNX operators: ONNX's own node tests, and its reference evaluator as an oracle."""

import importlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnx.backend.test.case import node as node_cases
from onnx.backend.test.runner import Runner
from onnx.reference import ReferenceEvaluator
from onnx_graphs import run_node

import kvkit
from kvkit.integrations.onnx import OPERATORS, attention, recurrent


@pytest.fixture
def calls(monkeypatch):
    """Return a list that gets the arguments of each call of kvkit.multi_head_attention."""
    made, function = [], kvkit.multi_head_attention

    def counted(*arguments, **keywords):
        made.append((arguments, keywords))
        return function(*arguments, **keywords)

    monkeypatch.setattr(attention, "multi_head_attention", counted)
    return made


# ONNX's node tests


@pytest.fixture(scope="module")
def cases():
    """Return the cases of some operators, by name. Their modules make them, which takes seconds for all."""
    for name in ("attention", "tensorscatter", "linear_attention", "causal_conv_with_state"):
        importlib.import_module(f"{node_cases.__name__}.{name}")
    return {case.name: case for case in node_cases._NodeTestCases if not case.name.endswith("_expanded")}


def passes(case):
    """Run a case as ONNX's own runner does, with its tolerances."""
    evaluator = ReferenceEvaluator(case.model, new_ops=OPERATORS)
    for inputs, expected in case.data_sets:
        got = evaluator.run(None, dict(zip(evaluator.input_names, inputs, strict=True)))
        Runner.assert_similar_outputs(expected, got, case.rtol, case.atol)
    return len(case.data_sets)


def test_all_node_tests_of_attention_run_on_kvkit(cases, calls):
    passed = {}
    for name in cases:
        if name.startswith("test_attention_"):
            before = len(calls)
            assert passes(cases[name]) == 1, name
            passed[name] = len(calls) - before
    assert len(passed) == 93
    assert min(passed.values()) >= 1


def test_all_node_tests_of_tensor_scatter_run_on_kvkit(cases, monkeypatch):
    [scatter] = [cls for cls in OPERATORS if cls.__name__ == "TensorScatter"]
    ran, function = [], scatter._run
    monkeypatch.setattr(scatter, "_run", lambda *args, **kw: ran.append(args) or function(*args, **kw))
    passed = [name for name in cases if name.startswith("test_tensorscatter") and passes(cases[name])]
    assert len(passed) == len(ran) == 3


@pytest.mark.parametrize(("prefix", "operator", "count"), [
    ("test_linear_attention", "gated_delta_rule", 14), ("test_causal_conv_with_state", "causal_conv", 13),
])  # fmt: skip
def test_all_node_tests_of_recurrent_states_run_on_kvkit(cases, monkeypatch, prefix, operator, count):
    ran, function = [], getattr(recurrent, operator)
    monkeypatch.setattr(recurrent, operator, lambda *args, **kw: ran.append(args) or function(*args, **kw))
    passed = [name for name in cases if name.startswith(prefix) and passes(cases[name])]
    assert len(passed) == len(ran) == count


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["linear", "gated", "delta", "gated_delta"]), st.integers(1, 70), st.integers(1, 3),
    st.integers(1, 3), st.booleans(), st.booleans(), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_linear_attention(rule, tokens, groups, heads, by_channel, past, seed):
    """Any rule, heads and length, against ONNX's evaluator; the past is not changed."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    key = normal(2, tokens, heads, 8)
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    feeds = {"query": normal(2, tokens, groups * heads * 8), "key": key.reshape(2, tokens, -1)}
    feeds["value"] = normal(2, tokens, heads * 5)
    if past:
        feeds["past_state"] = normal(2, heads, 8, 5)
    if rule.startswith("gated"):
        feeds["decay"] = -rng.random((2, tokens, heads * (8 if by_channel else 1))).astype(np.float32)
    if rule.endswith("delta"):
        feeds["beta"] = rng.random((2, tokens, heads)).astype(np.float32)
    before = {name: array.copy() for name, array in feeds.items()}
    names = "query", "key", "value", "past_state", "decay", "beta"
    attributes = {"q_num_heads": groups * heads, "kv_num_heads": heads, "update_rule": rule}
    node = helper.make_node(
        "LinearAttention",
        [name if name in feeds else "" for name in names],
        ["output", "state"],
        **attributes,
    )
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in feeds]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("output", "state")]
    graph = helper.make_graph([node], "graph", values, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 27)])
    expected = ReferenceEvaluator(model).run(None, feeds)
    for got, wanted in zip(
        ReferenceEvaluator(model, new_ops=OPERATORS).run(None, feeds), expected, strict=True
    ):
        np.testing.assert_allclose(got, wanted, atol=3e-5, rtol=3e-5)
    assert all(np.array_equal(feeds[name], array) for name, array in before.items())


# Attention beyond the node tests: against ONNX's reference evaluator, which shares nothing with kvkit


def attention_feeds(rng, *, batch, heads, kv_heads, rows, keys, past, nonpad, mask, columns, flat):
    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    def tokens(count, heads, dim):
        return normal(batch, count, heads * dim) if flat else normal(batch, heads, count, dim)

    feeds = {"Q": tokens(rows, heads, 8), "K": tokens(keys, kv_heads, 8), "V": tokens(keys, kv_heads, 16)}
    feeds |= dict.fromkeys(("attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"))
    if past:
        feeds["past_key"] = normal(batch, kv_heads, past, 8)
        feeds["past_value"] = normal(batch, kv_heads, past, 16)
    if nonpad:
        feeds["nonpad_kv_seqlen"] = rng.integers(0, keys + 1, batch)
    if mask is not None:
        rank, boolean, broadcast = mask
        full = [batch, heads, rows][4 - rank :] if rank > 1 else []
        shape = [1 if rng.random() < broadcast else size for size in full]
        drawn = rng.random((*shape, columns)) < 0.7
        feeds["attn_mask"] = drawn if boolean else np.where(drawn, normal(*drawn.shape), np.float32(-np.inf))
    return feeds


ranks = st.tuples(st.integers(1, 4), st.booleans(), st.sampled_from([0, 0.5, 1]))
window_sizes = st.sampled_from([-1, -1, 0, 1, 3])


@settings(max_examples=120)
@given(st.data(), st.integers(0, 2**32 - 1), ranks | st.none(), st.integers(0, 3))
def test_agrees_with_the_reference_evaluator(data, seed, mask, mode):
    rng, draw = np.random.default_rng(seed), data.draw
    rows, keys = draw(st.integers(1, 6), "rows"), draw(st.integers(1, 7), "keys")
    cached = draw(st.sampled_from(["", "past", "nonpad"]), "cached")
    past = draw(st.integers(1, 5), "past") if cached == "past" else 0
    columns = draw(st.integers(1, past + keys), "columns")
    heads, kv_heads = draw(st.sampled_from([(1, 1), (4, 2), (3, 3)]), "heads")
    flat = draw(st.booleans(), "flat")
    sizes = {"batch": draw(st.integers(1, 3), "batch"), "heads": heads, "kv_heads": kv_heads, "rows": rows}
    sizes |= {"keys": keys, "past": past, "columns": columns}
    feeds = attention_feeds(rng, **sizes, nonpad=cached == "nonpad", mask=mask, flat=flat)
    attributes = {
        "is_causal": draw(st.integers(0, 1), "causal"),
        "left_window_size": draw(window_sizes, "left"),
        "right_window_size": draw(window_sizes, "right"),
        "softcap": draw(st.sampled_from([0.0, 2.0]), "softcap") if mode else 0.0,
        "qk_matmul_output_mode": mode,
    }
    if flat:
        attributes |= {"q_num_heads": heads, "kv_num_heads": kv_heads}
    if draw(st.booleans(), "scaled"):
        attributes["scale"] = 0.2
    outputs = ["Y", "present_key", "present_value", "qk_matmul_output"]
    got = run_node("Attention", feeds, outputs, **attributes)
    if mask:  # the evaluator's own causal mask takes the rows of this one for those of the query
        drawn = feeds["attn_mask"]
        feeds["attn_mask"] = np.broadcast_to(drawn, (*drawn.shape[:-2], rows, columns))
    expected = run_node("Attention", feeds, outputs, new_ops=None, **attributes)
    for name, a, b in zip(outputs, got, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("kind", [bool, np.float16, np.float32])
def test_inputs_of_two_types_are_widened(kind):
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((2, 3, 5, 8)).astype(np.float32) for name in "QKV"}
    feeds["V"] = feeds["V"].astype(np.float16)
    feeds["attn_mask"] = (rng.random((5, 5)) < 0.7).astype(kind)
    [got] = run_node("Attention", feeds, ["Y"])
    whole = {
        name: array if array.dtype == bool else array.astype(np.float32) for name, array in feeds.items()
    }
    [expected] = run_node("Attention", whole, ["Y"], new_ops=None)
    np.testing.assert_allclose(got, expected, atol=2e-3)


def test_attention_copies_no_input_and_writes_into_its_output(calls):
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((2, 3, 5, 8)).astype(np.float16) for name in "QKV"}
    [got] = run_node("Attention", feeds, ["Y"])
    [(arrays, keywords)] = calls
    for name, array in zip("QKV", arrays[:3], strict=True):
        assert np.shares_memory(array, feeds[name])
        assert array.shape == (2, 5, 3, 8)
    assert np.shares_memory(keywords["out"], got)


def test_keys_past_the_valid_ones_are_never_touched():
    rng = np.random.default_rng(0)
    query = rng.standard_normal((2, 2, 1, 8)).astype(np.float32)
    key, value = rng.standard_normal((2, 2, 2, 6, 8)).astype(np.float32)
    feeds = {"Q": query, "K": key, "V": value}
    feeds |= dict.fromkeys(("attn_mask", "past_key", "past_value"), None)
    feeds["nonpad_kv_seqlen"] = np.array([4, 0])
    [clean] = run_node("Attention", feeds, ["Y"], is_causal=1)
    key[0, :, 4:], value[0, :, 4:], key[1], value[1] = np.nan, np.inf, np.nan, np.nan
    [got] = run_node("Attention", feeds, ["Y"], is_causal=1)
    np.testing.assert_array_equal(got, clean)
    assert got[0].any()
    assert not got[1].any()


def test_the_first_mode_of_qk_matmul_output_is_before_softcap():
    """As in the operator's function body; ONNX's evaluator gives the capped scores here."""
    rng = np.random.default_rng(0)
    feeds = {name: 3 * rng.standard_normal((1, 2, 4, 8)).astype(np.float32) for name in "QKV"}
    _, got = run_node("Attention", feeds, ["Y", "", "", "qk"], softcap=0.5, scale=0.5)
    np.testing.assert_allclose(got, feeds["Q"] @ feeds["K"].swapaxes(2, 3) / 2, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"Q": np.zeros((1, 2, 3, 8))}, "query: expected dtype"),
        ({"Q": np.zeros((1, 3, 16), np.float32)}, "Q: expected 4 axes, or 3 and heads"),
        ({"Q": np.zeros((2, 2, 3, 8), np.float32)}, "K, V: expected keys and values of 2 sequences"),
        ({"V": np.zeros((1, 2, 4, 8), np.float32)}, "K, V: expected keys and values of 1 sequences, alike"),
        ({"attn_mask": np.zeros((2, 5), np.float32)}, "attn_mask: expected a shape that broadcasts"),
        ({"attn_mask": np.zeros((3, 6), np.float32)}, "attn_mask: expected a shape that broadcasts"),
        ({"attn_mask": np.zeros((1, 1, 1, 3, 5), bool)}, "attn_mask: expected a shape that broadcasts"),
        ({"attn_mask": np.zeros((3, 5), np.int32)}, "attn_mask: expected"),
        ({"past_key": np.zeros((1, 2, 1, 8), np.float32)}, "past_key, past_value: expected both"),
        (
            dict.fromkeys(("past_key", "past_value"), np.zeros((1, 2, 1, 4), np.float32)),
            "past_key: expected s",
        ),
        ({"nonpad_kv_seqlen": np.array([6])}, "nonpad_kv_seqlen: expected lengths from 0 to 5"),
        ({"nonpad_kv_seqlen": np.array([1, 1])}, "nonpad_kv_seqlen: expected shape"),
        ({"softmax_precision": 7}, "softmax_precision: expected a float type"),
        ({"left_window_size": -2}, "left_window_size, right_window_size: expected -1 or more"),
        ({"qk_matmul_output_mode": 4}, "qk_matmul_output_mode: expected 0 or 1 or 2 or 3, got 4"),
    ],
)
def test_what_attention_refuses(change, message):
    feeds = {"Q": np.zeros((1, 2, 3, 8), np.float32)}
    feeds |= {name: np.zeros((1, 2, 5, 8), np.float32) for name in "KV"}
    feeds |= dict.fromkeys(("attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"))
    attributes = {name: value for name, value in change.items() if name not in feeds}
    feeds |= {name: value for name, value in change.items() if name in feeds}
    with pytest.raises(kvkit.KvkitError, match=message):
        run_node("Attention", feeds, ["Y", "", "", "qk"], **attributes)


# TensorScatter beyond the node tests


@settings(max_examples=60)
@given(st.data(), st.integers(0, 2**32 - 1), st.sampled_from(["linear", "circular"]), st.integers(2, 4))
def test_tensor_scatter_agrees_with_the_reference_evaluator(data, seed, mode, ndim):
    rng, draw = np.random.default_rng(seed), data.draw
    shape = [draw(st.integers(1, 4)) for _ in range(ndim)]
    axis = draw(st.integers(1, ndim - 1))
    new = draw(st.integers(0, shape[axis]))
    update = rng.integers(0, 99, [*shape[:axis], new, *shape[axis + 1 :]]).astype(np.uint8)
    last = 3 * shape[axis] if mode == "circular" else shape[axis] - new
    feeds = {"past_cache": rng.integers(0, 99, shape).astype(np.uint8), "update": update}
    feeds["write_indices"] = None if draw(st.booleans()) else rng.integers(0, last + 1, shape[0])
    attributes = {"mode": mode, "axis": axis - ndim * draw(st.integers(0, 1))}
    before = feeds["past_cache"].copy()
    [got] = run_node("TensorScatter", feeds, ["present"], **attributes)
    [expected] = run_node("TensorScatter", feeds, ["present"], new_ops=None, **attributes)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(feeds["past_cache"], before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"update": np.zeros((2, 1, 5, 3), np.float32)}, "update: expected the shape of past_cache"),
        ({"update": np.zeros((2, 2, 1, 3), np.float32)}, "update: expected the shape of past_cache"),
        ({"update": np.zeros((2, 1, 1, 3))}, "update: expected the dtype of past_cache"),
        ({"write_indices": np.array([0, 3])}, "write_indices: expected indices from 0 to 2"),
        ({"write_indices": np.array([-1, 0])}, "write_indices: expected indices from 0 to 2"),
        ({"write_indices": np.array([0])}, "write_indices: expected shape"),
        ({"axis": 0}, "axis: expected"),
        ({"mode": "round"}, "mode: expected linear or circular"),
    ],
)
def test_what_tensor_scatter_refuses(change, message):
    feeds = {"past_cache": np.zeros((2, 1, 4, 3), np.float32), "update": np.zeros((2, 1, 2, 3), np.float32)}
    feeds["write_indices"] = np.array([0, 1])
    attributes = {name: value for name, value in change.items() if name not in feeds}
    feeds |= {name: value for name, value in change.items() if name in feeds}
    with pytest.raises(kvkit.KvkitError, match=message):
        run_node("TensorScatter", feeds, ["present"], **attributes)
