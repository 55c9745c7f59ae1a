"""Formats against the packages that define them: the same bytes, and the same numbers of any bytes."""

import numpy as np
import pytest

from kvkit.formats import decode, encode

pytestmark = pytest.mark.peers
GGML = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "ggml_mxfp4")


def some(rng, shape=(64, 4, 128)):
    x = rng.standard_normal(shape) * np.exp(3 * rng.standard_normal((*shape[:-1], 1)))
    x[0, 0], x[1, 1, :32] = 0, 3
    return x.astype(np.float32)


@pytest.mark.parametrize("name", GGML)
def test_gguf(rng, name):
    gguf = pytest.importorskip("gguf")
    kind, x = getattr(gguf.GGMLQuantizationType, name.removeprefix("ggml_").upper()), some(rng)
    theirs = gguf.quants.quantize(x, kind)
    np.testing.assert_array_equal(encode(x, name)["codes"], theirs)
    np.testing.assert_array_equal(decode(theirs, name), gguf.quants.dequantize(theirs, kind))


def test_gguf_reads_iq4_nl(rng):
    gguf = pytest.importorskip("gguf")
    blocks = encode(some(rng), "iq4_nl")["codes"]
    theirs = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.IQ4_NL)
    np.testing.assert_array_equal(decode(blocks, "iq4_nl"), theirs)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_mlx_affine(rng, bits, group, dtype):
    mx = pytest.importorskip("mlx.core")
    x = (some(rng) / 50).astype(dtype)
    words, scales, biases = map(np.asarray, mx.quantize(mx.array(x), group_size=group, bits=bits))
    arrays = encode(x, f"mlx{bits}:g{group}")
    np.testing.assert_array_equal(arrays["codes"], words.view(np.uint8))
    np.testing.assert_array_equal(arrays["scale"], scales)
    np.testing.assert_array_equal(arrays["minimum"], biases)


@pytest.mark.parametrize(("mode", "group", "bits"), [("mxfp4", 32, 4), ("mxfp8", 32, 8), ("nvfp4", 16, 4)])
def test_mlx_floats(rng, mode, group, bits):
    mx = pytest.importorskip("mlx.core")
    x, how = (
        rng.standard_normal((64, 4, 128)).astype(np.float32),
        {"group_size": group, "bits": bits, "mode": mode},
    )
    x[0, 0] = 0
    words, scales = mx.quantize(mx.array(x), **how)
    theirs = {"codes": np.asarray(words), "scale": np.asarray(scales)}
    arrays = encode(x, f"mlx_{mode}")
    np.testing.assert_array_equal(arrays["codes"], theirs["codes"].view(np.uint8))
    np.testing.assert_array_equal(arrays["scale"], theirs["scale"])
    numbers = mx.dequantize(words, scales, dtype=mx.float32, **how)
    np.testing.assert_array_equal(decode(theirs, f"mlx_{mode}"), np.asarray(numbers))


def sizes(rng):
    x = rng.standard_normal(10**5) * 10.0 ** rng.uniform(-9, 6, 10**5)
    return np.concatenate((x, [np.nan, -np.nan, np.inf, -np.inf, 0, -0.0])).astype(np.float32)


def test_torch_e4m3(rng):
    torch, x = pytest.importorskip("torch"), sizes(rng)
    theirs = torch.tensor(x).to(torch.float8_e4m3fn)
    np.testing.assert_array_equal(encode(x, "e4m3")["codes"], theirs.view(torch.uint8).numpy())


def test_torch_e5m2(rng):
    """torch does not saturate e5m2."""
    torch, x = pytest.importorskip("torch"), sizes(rng).clip(-57344, 57344)
    theirs = torch.tensor(x).to(torch.float8_e5m2)
    np.testing.assert_array_equal(encode(x, "e5m2")["codes"], theirs.view(torch.uint8).numpy())


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_torch_reads_every_code(name):
    torch, codes = pytest.importorskip("torch"), np.arange(256, dtype=np.uint8)
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[name]
    np.testing.assert_array_equal(decode(codes, name), torch.tensor(codes).view(dtype).float().numpy())


def group_query_attention(helper, kinds, key, value, scales, bits, how):
    """Return onnxruntime's present keys and values, codes [1, heads, tokens, bytes]."""
    ort = pytest.importorskip("onnxruntime")
    (tokens, heads, dim), kind = key.shape, {8: kinds.INT8, 4: kinds.UINT8}[bits]
    past = np.zeros((1, heads, 0, dim * bits // 8), {8: np.int8, 4: np.uint8}[bits])
    given = {name: x.reshape(1, tokens, -1) for name, x in (("query", key), ("key", key), ("value", value))}
    given |= {"past_key": past, "past_value": past}
    given |= {"seqlens_k": np.array([tokens - 1], np.int32), "total": np.array(tokens, np.int32)}
    given |= {"k_scale": scales[0], "v_scale": scales[1]}
    outputs = {"out": kinds.FLOAT, "present_key": kind, "present_value": kind}
    names = [*given][:7] + [""] * 5 + ["k_scale", "v_scale"]
    node = helper.make_node(
        "GroupQueryAttention", names, [*outputs], domain="com.microsoft", num_heads=heads, kv_num_heads=heads,
        k_quant_type=how, v_quant_type=how, kv_cache_bit_width=bits,
    )  # fmt: skip
    types = {name: helper.np_dtype_to_tensor_dtype(x.dtype) for name, x in given.items()}
    ends = [
        [helper.make_tensor_value_info(name, t, None) for name, t in side.items()]
        for side in (types, outputs)
    ]
    versions = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "attention", *ends)
    model = helper.make_model(graph, opset_imports=versions, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run([*outputs][1:], given)


@pytest.mark.parametrize("how", ["PER_TENSOR", "PER_CHANNEL"])
@pytest.mark.parametrize("bits", [8, 4])
def test_onnxruntime(rng, bits, how):
    onnx = pytest.importorskip("onnx")
    sides = rng.standard_normal((2, 5, 2, 32)).astype(np.float32)
    shape = (1,) if how == "PER_TENSOR" else (2, 32)
    scales = rng.uniform(0.01, 0.03, (2, *shape)).astype(np.float32) * np.float32(1 if bits == 8 else 10)
    found = group_query_attention(onnx.helper, onnx.TensorProto, *sides, scales, bits, how)
    for x, scale, codes in zip(sides, scales, found, strict=True):
        ours = encode(x, f"ort_int{bits}", scale=scale)["codes"]
        np.testing.assert_array_equal(ours, codes[0].swapaxes(0, 1))
