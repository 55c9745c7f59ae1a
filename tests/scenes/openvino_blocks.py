"""Hold blocks that OpenVINO's paged attention wrote of known rows."""

from pathlib import Path

import numpy as np

WRITTEN = Path(__file__).parents[1] / "files" / "written"
TOKENS, HEADS, DIM, PAGE = 40, 2, 64, 32
TABLE = 2, 0  # blocks of the sequence, of three
KINDS = "f32", "u8", "u4"


def rows():
    """Return keys and values, float32 [2, tokens, heads, content], with equal numbers in a channel."""
    x = np.random.default_rng(7).standard_normal((2, TOKENS, HEADS, DIM)).astype(np.float32)
    x[:, :, :, 5] = 3
    x[:, :, 1, 6] = 0
    return x


def written(kind):
    with np.load(WRITTEN / f"openvino-2026.4.1-{kind}.npz") as found:
        return dict(found)


def written_by(openvino, kind):
    """Run the engine's operator over the rows, 33 tokens and then the others; return its arrays."""
    from openvino import opset13 as op
    from openvino.op import _PagedAttentionExtension

    def parameter(name, dtype, *shape):
        made = op.parameter(openvino.PartialShape(shape), dtype, name)
        made.output(0).get_tensor().set_names({name})
        return made

    def constant(dtype, *value, shape=None):
        return op.constant(np.array(*value, dtype) if shape is None else np.zeros(shape, dtype))

    f4, i4 = np.float32, np.int32
    flat = [parameter(name, openvino.Type.f32, -1, HEADS * DIM) for name in ("query", "key", "value")]
    pools = [
        parameter(name, openvino.Type.dynamic, -1, -1, -1, -1) for name in ("key_cache.0", "value_cache.0")
    ]
    names = "past_lens", "subsequence_begins", "block_indices", "block_indices_begins"
    index = [parameter(name, openvino.Type.i32, -1) for name in names]
    most = parameter("max_context_len", openvino.Type.i32)
    none = constant(i4, shape=0)
    inputs = [
        *flat, *pools, *index, constant(f4, 0.125), constant(i4, 0), constant(f4, shape=0), most,
        constant(i4, 0), none, constant(i4, shape=(0, 0)), constant(f4, shape=(0, 0)),  # rotation
        constant(f4, shape=0), constant(i4, 64), constant(i4, 8),  # sparse attention
        constant(f4, shape=0), constant(i4, 0), none, none, none, none, constant(np.uint8, shape=0), none,
    ]  # fmt: skip
    attention = _PagedAttentionExtension([each.output(0) for each in inputs])
    for name, size in (
        ("num_k_heads", HEADS),
        ("k_head_size", DIM),
        ("num_v_heads", HEADS),
        ("v_head_size", DIM),
    ):
        attention.get_rt_info()[name] = size
    model = openvino.Model([op.result(attention.output(0))], [*flat, *pools, *index, most], "attention")
    compiled = openvino.Core().compile_model(model, "CPU", {"KV_CACHE_PRECISION": kind})
    request, found = compiled.create_infer_request(), {}
    for name in ("key_cache.0", "value_cache.0"):
        shape = [3, *(axis.get_length() for axis in list(compiled.input(name).get_partial_shape())[1:])]
        found[name] = openvino.Tensor(compiled.input(name).get_element_type(), openvino.Shape(shape))
        found[name].data[...] = 0
        request.set_tensor(name, found[name])
    x = rows()
    for begin, end in ((0, 33), (33, TOKENS)):
        key, value = (np.ascontiguousarray(side[begin:end].reshape(end - begin, -1)) for side in x)
        table = [
            np.array([begin], i4), np.array([0, end - begin], i4), np.array(TABLE, i4), np.array([0, 2], i4),
        ]  # fmt: skip
        given = {"query": key, "key": key, "value": value, "max_context_len": np.array(end, i4)}
        for name, array in (given | dict(zip(names, table, strict=True))).items():
            request.set_tensor(name, openvino.Tensor(array))
        request.infer()
    arrays = {
        name: np.array(tensor.data).reshape(3, HEADS, *tensor.shape[2:3], -1)
        for name, tensor in found.items()
    }
    return arrays | {"past_lens": np.array([TOKENS], i4)} | dict(zip(names[2:], table[2:], strict=True))
