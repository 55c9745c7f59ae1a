"""Cases of recurrent states: a step beside an in-place scaling, prompts beside torch's float32 product.

Peers are onnxruntime's GatedDeltaNet and transformers' torch functions, if they are installed. Times of the
product are scaled to the operations of the rule, so a goal is a share of a rate.
"""

import functools
import inspect

import click
import numba
import numpy as np
from numba import prange

import kvkit
from benchmarks.suites.measuring import Case, Work
from benchmarks.suites.other_libraries import installed

SEQUENCES, PROMPT = 32, 2048
HEADS, KEY_HEADS, DIM, CHUNK = 32, 16, 128, 64
SHARE = 8  # peers read the first eighth of a prompt, and their times are multiplied
SIDE = 2048  # of the square matrices whose product is measured
RULES = {  # {kind of decays: (module, functions of transformers: of a prompt, of a step)}
    "gdn": ("qwen3_next", "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
    "kda": ("kimi_linear", "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
}


@numba.njit(parallel=True)
def scale_states(states, factor):
    """Multiply states [N, heads, dk, dv] in place, a head at a time in each thread."""
    batch, heads = states.shape[:2]
    for i in prange(batch * heads):
        head = states[i // heads, i % heads]
        for row in range(head.shape[0]):
            for column in range(head.shape[1]):
                head[row, column] *= factor


def inputs(kind, sequences, tokens):
    """Return arrays of a call by name: [sequences, tokens, heads, dim], or without tokens if that is 0."""
    rng, front = np.random.default_rng(0), (sequences, tokens) if tokens else (sequences,)
    key_heads = KEY_HEADS if kind == "gdn" else HEADS
    q, k = (rng.standard_normal((*front, key_heads, DIM), np.float32) for _ in range(2))
    v = rng.standard_normal((*front, HEADS, DIM), np.float32)
    decays = (*front, HEADS) if kind == "gdn" else (*front, HEADS, DIM)
    g, beta = -0.2 * rng.random(decays, np.float32), rng.random((*front, HEADS), np.float32)
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta}


def transformers_rule(kind, arrays, state, prompt):
    """Return transformers' own function of the rule on these arrays; None without it."""
    if not installed("torch", "transformers"):
        return None
    import importlib

    import torch

    torch.set_num_threads(numba.get_num_threads())
    name, *functions = RULES[kind]
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    function = inspect.unwrap(getattr(module, functions[0 if prompt else 1]))
    tensors = [torch.from_numpy(each if prompt else each[:, None]) for each in arrays.values()]
    if kind == "gdn":  # whose caller repeats the key heads
        tensors[:2] = [each.repeat_interleave(HEADS // KEY_HEADS, 2) for each in tensors[:2]]
    own = torch.from_numpy(state.copy())

    def run(i):
        with torch.inference_mode():
            q, k, v, g, beta = tensors
            return function(q, k, v, g=g, beta=beta, initial_state=own, output_final_state=True,
                            use_qk_l2norm_in_kernel=True)[0].numpy()  # fmt: skip

    return run


def onnxruntime_rule(arrays, state):
    """Return onnxruntime's GatedDeltaNet on packed sequences of these arrays; None in a build without it."""
    if not installed("onnx", "onnxruntime"):
        return None
    import onnxruntime
    from onnx import TensorProto, helper

    front = arrays["q"].ndim - 2
    rows = int(np.prod(arrays["q"].shape[:front]))
    flat = {name: each.reshape(rows, *each.shape[front:]) for name, each in arrays.items()}
    feed = {name: flat[name] for name in "qkv"}
    feed |= {
        "cu": np.arange(len(state) + 1, dtype=np.int32) * (rows // len(state)),
        "g": flat["g"],
        "beta": flat["beta"],
    }
    feed["s"] = np.ascontiguousarray(state.swapaxes(2, 3))
    types = {name: TensorProto.INT32 if name == "cu" else TensorProto.FLOAT for name in feed}
    node = helper.make_node("GatedDeltaNet", list(feed), ["o", "z"], domain="com.microsoft", qk_l2_norm=1)
    graph = helper.make_graph(
        [node], "states", [helper.make_tensor_value_info(name, kind, None) for name, kind in types.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "oz"],
    )  # fmt: skip
    opsets = [helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("", 21)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = numba.get_num_threads()
    try:
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented:  # builds differ in what they have
        return None
    return lambda i: session.run(None, feed)[0]


def check(own, peers):
    """Raise unless the outputs of peers are kvkit's."""
    wanted = own.ravel()
    for name, run in peers.items():
        if run is not None and not np.allclose(run(0).ravel(), wanted, rtol=2e-2, atol=2e-3):
            raise click.ClickException(f"{name}: outputs are not those of kvkit")


def step():
    """Prepare a token of each sequence, beside a scaling of the same states in place."""
    arrays = inputs("gdn", SEQUENCES, 0)
    state = np.random.default_rng(1).standard_normal((SEQUENCES, HEADS, DIM, DIM), np.float32)
    out = np.empty((SEQUENCES, HEADS, DIM), np.float32)
    own, scaled = state.copy(), state.copy()
    peers = {"onnxruntime": onnxruntime_rule(arrays, state),
             "transformers": transformers_rule("gdn", arrays, state, prompt=False)}  # fmt: skip

    def run(i):
        return kvkit.gated_delta_step(**arrays, state=own, norm=True, out=out)

    check(run(0), peers)
    return Work(
        run,
        moved=2 * state.nbytes,
        beside={"plain": lambda i: scale_states(scaled, np.float32(0.999))} | peers,
    )


def prompt(kind):
    """Prepare a prompt from an empty state, beside a product of matrices of float32."""

    def prepare():
        arrays = inputs(kind, 1, PROMPT)
        state = np.zeros((1, HEADS, DIM, DIM), np.float32)
        operations = PROMPT * HEADS * (6 * DIM * DIM + CHUNK * 8 * DIM)
        some = {name: each[:, : PROMPT // SHARE] for name, each in arrays.items()}
        peers = {
            "onnxruntime": onnxruntime_rule(some, state),
            "transformers": transformers_rule(kind, some, state, prompt=True),
        }
        out = np.empty((1, PROMPT, HEADS, DIM), np.float32)

        def run(i):
            return kvkit.gated_delta_rule(**arrays, norm=True, chunk=CHUNK, out=out)[0]

        check(run(0)[:, : PROMPT // SHARE], peers)
        shares = {"matmul": operations / (2 * SIDE**3)} | dict.fromkeys(peers, SHARE)
        return Work(run, operations=operations, beside={"matmul": product()} | peers, shares=shares)

    return prepare


@functools.cache
def product():
    """Return a product of square matrices by torch, or by numpy without it."""
    a, b = np.random.default_rng(2).standard_normal((2, SIDE, SIDE), np.float32)
    if not installed("torch"):
        return lambda i: a @ b
    import torch

    torch.set_num_threads(numba.get_num_threads())
    first, second = torch.from_numpy(a), torch.from_numpy(b)
    return lambda i: (first @ second).numpy()


CASES = [
    Case(f"a step of {SEQUENCES} sequences, {HEADS} heads of {DIM} x {DIM}", step, {"plain": 0.85}),
    *(
        Case(f"a prompt of {PROMPT:,}, {kind.upper()}", prompt(kind), {"matmul": 0.4}, limit=60)
        for kind in RULES
    ),
]
