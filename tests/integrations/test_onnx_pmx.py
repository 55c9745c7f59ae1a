"""The custom ONNX operators of PMX, in graphs.

The order of a node's inputs is written out here, from the specification.
"""

import functools

import numpy as np
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx_graphs import graph, run_node

import kvkit
from kvkit.integrations.onnx import OPERATORS

DYNAMIC = ".dynamic_batching"
STEP = "seqstarts kvstarts cachestarts start_pos"
PMX_INPUTS = {
    ("", "KeyValueCache"): "current_key current_value start_pos cache scale",
    (DYNAMIC, "KeyValueCache"): f"current_key current_value {STEP} max_seqlen max_kvlen cache scale",
    ("", "MultiHeadAttention"): "query key value attn_mask",
    (DYNAMIC, "MultiHeadAttention"):
        "query key value seqstarts kvstarts decoding_batches max_seqlen max_kvlen attn_mask",
    ("", "MultiHeadCacheAttention"): "query current_key current_value start_pos cache scale attn_mask",
    (DYNAMIC, "MultiHeadCacheAttention"):
        f"query current_key current_value {STEP} decoding_batches max_seqlen max_kvlen cache scale attn_mask",
    (DYNAMIC, "PositionIndex"): "sequences seqstarts start_pos max_seqlen",
    ("", "ALiBiSlope"): "",
    ("", "ALiBiMask"): "seqlen_q seqlen_kv attn_mask",
    (DYNAMIC, "ALiBiMask"): "seqstarts kvstarts attn_mask",
    ("", "RotaryPositionEmbedding"): "query key start_pos pad_len",
    (DYNAMIC, "RotaryPositionEmbedding"): "query key seqstarts start_pos max_seqlen",
}  # fmt: skip
FUNCTIONS = {
    "KeyValueCache": "key_value_cache", "MultiHeadAttention": "multi_head_attention",
    "MultiHeadCacheAttention": "multi_head_cache_attention", "PositionIndex": "position_index",
    "ALiBiSlope": "alibi_slope", "ALiBiMask": "alibi_mask",
    "RotaryPositionEmbedding": "rotary_position_embedding",
}  # fmt: skip
OUTPUTS = {"KeyValueCache": ("key", "value"), "RotaryPositionEmbedding": ("query", "key")}
HEADS, KV_HEADS, DIM = 4, 2, 8
SEQLENS, STARTS = (1, 4), (5, 2)
LENGTHS = [6, 6]  # of the contexts, in both kinds of batching
roots = pytest.mark.parametrize("root", ["opmx", "pmx"])


def pmx_arrays(suffix, quant_bit):
    """Return every array that an operator of a kind of batching may take."""
    rng = np.random.default_rng(0)
    lead, past = ((sum(SEQLENS),), (sum(LENGTHS),)) if suffix else ((2, 4), (2, 6))
    arrays = {"query": rng.standard_normal((*lead, HEADS, DIM))}
    arrays |= {name: rng.standard_normal((*lead, KV_HEADS, DIM)) for name in ("current_key", "current_value")}
    arrays |= {name: rng.standard_normal((*past, KV_HEADS, DIM)) for name in ("key", "value")}
    arrays["attn_mask"] = rng.standard_normal((lead[0], 12) if suffix else (HEADS, 4, 6))
    cache = (32, 2, 2, KV_HEADS, DIM) if suffix else (3, 2, 2, 7, KV_HEADS, DIM)
    arrays["cache"] = rng.standard_normal(cache)
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    arrays["scale"] = None
    if quant_bit:
        arrays["cache"] = rng.integers(-99, 100, cache).astype(np.int8)
        arrays["scale"] = rng.uniform(0.01, 0.02, (*cache[:-1], 2)).astype(np.float32)
    integers = {"start_pos": 2, "pad_len": (0, 1), "seqlen_q": 4, "seqlen_kv": 6}
    if suffix:
        starts = {name: np.cumsum([0, *of]) for name, of in (("seqstarts", SEQLENS), ("kvstarts", LENGTHS))}
        integers = starts | {"start_pos": STARTS, "cachestarts": [[8, 28], [4, 20]], "decoding_batches": 1}
        integers |= {"max_seqlen": [4], "max_kvlen": [6], "sequences": np.arange(sum(SEQLENS))}
    return arrays | {name: np.array(value, np.int64) for name, value in integers.items()}


def feeds_of(suffix, op_type, arrays):
    if op_type == "RotaryPositionEmbedding":
        arrays = arrays | {"key": arrays["current_key"]}
    return {name: arrays[name] for name in PMX_INPUTS[suffix, op_type].split()}


def copies(feeds):
    return {name: None if array is None else array.copy() for name, array in feeds.items()}


def function_of(suffix, op_type):
    if op_type == "RotaryPositionEmbedding" and not suffix:
        return functools.partial(kvkit.rotary_position_embedding, interleaved=True)  # as PMX pairs
    return getattr(kvkit.dynamic_batching if suffix else kvkit, FUNCTIONS[op_type])


def attend(query, key, value, mask=None, causal=True):
    """Attend in one sequence by the formula, in float64."""
    (n, heads, dim), m = query.shape, len(key)
    out = np.empty((n, heads, value.shape[2]))
    for i in range(n):
        for h in range(heads):
            g = h * key.shape[1] // heads
            seen = m - n + i + 1 if causal else m
            x = key[:seen, g].astype(np.float64) @ query[i, h] / dim**0.5
            x += 0 if mask is None else mask[h % len(mask), i, :seen]
            p = np.exp(x - x.max())
            out[i, h] = p @ value[:seen, g].astype(np.float64) / p.sum()
    return out


def test_every_pmx_operator_is_in_both_roots():
    made = {(cls.op_domain, cls.__name__) for cls in OPERATORS if cls.op_domain}
    assert made == {(root + suffix, name) for root in ("opmx", "pmx") for suffix, name in PMX_INPUTS}
    assert len(made) == len([cls for cls in OPERATORS if cls.op_domain])


CACHE = {"num_layer": 2, "layer_idx": 1, "quant_group": 4}
PAGED = {"cache_mode": 1, "page_size": 4}
ATTENTION = {"num_heads": HEADS, "head_dim": DIM, "num_kv_heads": KV_HEADS}
LINEAR = {"rotary_dim": 6, "theta": 100.0, "scaling_type": "linear", "scaling_factor": 2.0}


def pmx_case(suffix, op_type, quant_bit=0):
    """Return the arrays and attributes of a node."""
    attributes = {}
    if "Cache" in op_type:
        attributes |= CACHE | (PAGED if suffix else {}) | {"quant_bit": quant_bit}
    if "Attention" in op_type:
        attributes |= ATTENTION
    if "ALiBi" in op_type:
        attributes["num_heads"] = HEADS
    if "Rotary" in op_type:
        attributes |= LINEAR
    return pmx_arrays(suffix, quant_bit), attributes


@roots
@pytest.mark.parametrize(("suffix", "op_type"), PMX_INPUTS)
@pytest.mark.parametrize("quant_bit", [0, 8])
def test_a_pmx_node_is_a_call_of_kvkit(root, suffix, op_type, quant_bit):
    arrays, attributes = pmx_case(suffix, op_type, quant_bit)
    if "Cache" not in op_type and quant_bit:
        arrays["attn_mask"] = None  # the other variant of an operator without a cache
    feeds = feeds_of(suffix, op_type, arrays)
    fed = copies(feeds)
    while fed and [*fed.values()][-1] is None:
        fed.popitem()  # a node leaves out its last inputs
    names = OUTPUTS.get(op_type, ["out"])
    got = run_node(op_type, fed, [f"out_{name}" for name in names], root + suffix, **attributes)
    called = copies(feeds)
    expected = function_of(suffix, op_type)(**called, **attributes)
    for a, b in zip(got, expected if isinstance(expected, tuple) else (expected,), strict=True):
        np.testing.assert_array_equal(a, b, strict=True)
    for name, array in fed.items():
        np.testing.assert_array_equal(array, called[name], strict=True)
        if array is not None:
            assert (array != feeds[name]).any() == (name in ("cache", "scale")), name


def rotated(x, positions, turned=None, theta=1e4):
    """Rotate neighbouring pairs of [..., tokens, heads, dim] as complex numbers, in float64."""
    turned = turned or x.shape[-1]
    angles = np.multiply.outer(positions, theta ** (-np.arange(0, turned, 2) / turned))
    pairs = (x[..., 0:turned:2] + 1j * x[..., 1:turned:2]) * np.exp(1j * angles)[..., None, :]
    out = x.astype(np.float64)
    out[..., 0:turned:2], out[..., 1:turned:2] = pairs.real, pairs.imag
    return out


# A whole attention block, step by step, on one cache

WIDTH = 16


def block(suffix, weights):
    """Return the model of x + (attention of its rotated projections) @ out; cache and scale are inputs."""
    step = [name for name in PMX_INPUTS[suffix, "RotaryPositionEmbedding"].split()[2:] if name != "pad_len"]
    call = PMX_INPUTS[suffix, "MultiHeadCacheAttention"].replace("attn_mask", "").split()
    lead = [0] if suffix else [0, 0]  # Reshape's "as it is"
    shapes = {"by_head": [*lead, HEADS, DIM], "by_kv_head": [*lead, KV_HEADS, DIM], "flat": [*lead, -1]}
    nodes = []
    for name, shape in (("query", "by_head"), ("key", "by_kv_head"), ("value", "by_kv_head")):
        nodes.append(helper.make_node("MatMul", ["x", f"w_{name}"], [f"x_{name}"]))
        nodes.append(helper.make_node("Reshape", [f"x_{name}", shape], [name]))
    names = {"query": "turned_query", "current_key": "turned_key", "current_value": "value"}
    domain = "opmx" + suffix
    turned = ["turned_query", "turned_key"]
    attributes = ATTENTION | (PAGED if suffix else {}) | {"quant_bit": 8, "quant_group": 4}
    nodes += [
        helper.make_node("RotaryPositionEmbedding", ["query", "key", *step], turned, domain=domain),
        helper.make_node(
            "MultiHeadCacheAttention", [names.get(name, name) for name in call], ["heads"], domain=domain,
            is_causal=1, **attributes,
        ),
        helper.make_node("Reshape", ["heads", "flat"], ["joined"]),
        helper.make_node("MatMul", ["joined", "w_out"], ["projected"]),
        helper.make_node("Add", ["x", "projected"], ["y"]),
    ]  # fmt: skip
    constants = weights | {name: np.array(shape) for name, shape in shapes.items()}
    constants = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    return graph(nodes, ["x", *dict.fromkeys([*step, *call[3:]])], ["y"], constants)


def block_formula(x, weights):
    """Compute the block for all tokens of one sequence at once, in float64."""
    at = np.arange(len(x))
    query, key, value = (
        (x @ weights[f"w_{name}"].astype(np.float64)).reshape(len(x), -1, DIM)
        for name in ("query", "key", "value")
    )
    heads = attend(rotated(query, at), rotated(key, at), value)
    return x + heads.reshape(len(x), -1) @ weights["w_out"]


@pytest.mark.parametrize("suffix", ["", DYNAMIC])
def test_an_attention_block_step_by_step(suffix):
    rng = np.random.default_rng(0)
    widths = {"w_query": HEADS, "w_key": KV_HEADS, "w_value": KV_HEADS}
    weights = {name: rng.standard_normal((WIDTH, heads * DIM)) / 4 for name, heads in widths.items()}
    weights["w_out"] = rng.standard_normal((HEADS * DIM, WIDTH)) / 6
    weights = {name: weight.astype(np.float32) for name, weight in weights.items()}
    evaluator = ReferenceEvaluator(block(suffix, weights), new_ops=OPERATORS)
    x = rng.standard_normal((2, 8, WIDTH)).astype(np.float32)
    shape = (32, 1, 2, KV_HEADS) if suffix else (2, 1, 2, 8, KV_HEADS)
    caches = {"cache": np.zeros((*shape, DIM), np.int8), "scale": np.zeros((*shape, 2), np.float16)}
    expected = np.stack([block_formula(sequence, weights) for sequence in x])
    done = np.zeros(2, np.int64)
    for new in ((3, 3), (1, 1), (2, 2), (1, 1)) if not suffix else ((3, 5), (1, 1), (0, 2), (4, 0)):
        ends = done + new
        parts = [slice(*ends_) for ends_ in zip(done, ends, strict=True)]
        if suffix:
            feeds = {"x": np.concatenate([x[b, part] for b, part in enumerate(parts)]), "start_pos": done}
            feeds["seqstarts"], feeds["kvstarts"] = np.cumsum([0, *new]), np.cumsum([0, *ends])
            feeds["cachestarts"] = np.array([[12, 4], [20, 0]])
            feeds |= {name: np.array(n) for name, n in (("max_seqlen", max(new)), ("max_kvlen", max(ends)))}
            feeds["decoding_batches"] = np.array(0)
            wanted = np.concatenate([expected[b, part] for b, part in enumerate(parts)])
        else:
            feeds = {"x": x[:, parts[0]], "start_pos": done[:1]}
            wanted = expected[:, parts[0]]
        [got] = evaluator.run(None, feeds | caches)
        np.testing.assert_allclose(got, wanted, atol=0.05)
        assert np.abs(got - wanted).mean() < 0.01
        done = ends


def test_attributes_of_exported_graphs():
    """Booleans are integers, 10 is float16, a softmax_scale of 0 is the default."""
    feeds = feeds_of("", "ALiBiMask", pmx_arrays("", 0))
    for number, dtype in ((1, np.float32), (10, np.float16)):
        [got] = run_node("ALiBiMask", feeds, ["out"], "opmx", num_heads=HEADS, data_type=number)
        expected = kvkit.alibi_mask(**feeds, num_heads=HEADS, data_type=np.dtype(dtype).name)
        np.testing.assert_array_equal(got, expected, strict=True)
    arrays, attributes = pmx_case("", "MultiHeadCacheAttention")
    arrays["scale"] = np.empty(0, np.float32)
    feeds = feeds_of("", "MultiHeadCacheAttention", arrays)
    attributes |= {"is_causal": 0, "is_alibi": 0, "softmax_scale": 0.0}
    [got] = run_node("MultiHeadCacheAttention", copies(feeds), ["out"], "opmx", **attributes)
    attributes |= {"is_causal": False, "is_alibi": False, "softmax_scale": None}
    np.testing.assert_array_equal(got, kvkit.multi_head_cache_attention(**feeds, **attributes), strict=True)


def test_a_static_node_exported_under_the_dynamic_domain():
    arrays, attributes = pmx_case("", "MultiHeadCacheAttention", 8)
    feeds = feeds_of("", "MultiHeadCacheAttention", arrays)
    del feeds["attn_mask"]
    [got] = run_node("MultiHeadCacheAttention", copies(feeds), ["out"], "opmx" + DYNAMIC, **attributes)
    np.testing.assert_array_equal(got, kvkit.multi_head_cache_attention(**feeds, **attributes), strict=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "num_kv_heads: expected a divisor of the 3 query heads"),
        ({"heads": 4}, "unexpected keyword argument 'heads'"),
        ({"cache": None}, "cache: expected a numpy array, got None"),
        ({"more": np.zeros(1)}, "8 inputs"),
        ({"layer_idx": 2}, "layer_idx: expected an integer from 0 to 1, got 2"),
    ],
)
def test_what_pmx_nodes_refuse(change, message):
    arrays, attributes = pmx_case("", "MultiHeadCacheAttention")
    feeds = feeds_of("", "MultiHeadCacheAttention", arrays)
    before = arrays["cache"].copy()
    for name, value in change.items():
        into = feeds if name in (*feeds, "more") else attributes
        into[name] = value
    attributes = {name: value for name, value in attributes.items() if value is not None}
    with pytest.raises(kvkit.KvkitError, match=message):
        run_node("MultiHeadCacheAttention", feeds, ["out"], "opmx", **attributes)
    np.testing.assert_array_equal(arrays["cache"], before)
