"""List a legal call of every operator, with all arguments that it may have."""

import copy

import attention_scenes
import numpy as np
import pytest
import refusals
from scenes import Call

from kvkit.reference.ascend import KVHEAD, KVHEAD_ROPE, OMNI
from kvkit.tools.vectors import latent as latent_calls
from kvkit.tools.vectors.compressed import compression
from kvkit.tools.vectors.draws import Sizes
from kvkit.tools.vectors.pools import block_attention
from kvkit.tools.vectors.recurrent import tokens_of

X = np.ones((2, 3, 2, 8), np.float32)
STARTS = {"seqstarts": np.array([0, 2, 3]), "start_pos": np.array([0, 4]), "max_seqlen": 2}
BLOCKS = np.arange(4 * 5 * 2 * 32, dtype=np.float16).reshape(4, 5, 2, 32)
MODES = {
    "nd": (0, "ND"), "nz": (0, "NZ"), "kvhead": (KVHEAD, "ND"), "rope": (KVHEAD_ROPE, "ND"),
    "omni": (OMNI, "ND"),
}  # fmt: skip


def by_name(call, **more):
    """Return a call with its attributes among its inputs."""
    return Call(call.name, call.inputs | call.attributes | more)


def of_scene(kind, **choices):
    return by_name(refusals.legal(kind, **choices))


def attention(kind, formats=attention_scenes.FP32):
    """Return a call of attention: 2 sequences, 4 heads over 2, 3 queries, 5 keys; dynamic: 3 sequences."""
    call = refusals.legal_attention(kind, formats, dim=16)
    shape = (4, 3, 16) if kind.startswith("static") else (4, 10)
    more = {"attn_mask": np.zeros(shape, call["query"].dtype), "sinks": np.zeros(4, np.float32)}
    return by_name(call, **more)


def reshape(mode=0, cache_format="ND", dtype=np.float16):
    """Return a store of 7 tokens of 2 heads; if compressed, of sequences of 4 and 3."""
    key, n0 = np.arange(7 * 2 * 32).reshape(7, 2, 32).astype(dtype), 32 // np.dtype(dtype).itemsize
    shape = (4, 64 // n0, 5, n0) if cache_format == "NZ" else (4, 5, 1 if mode else 2, 32)
    caches = np.full((2, *shape), -1, dtype)
    inputs = {"key": key, "value": -key, "key_cache": caches[0], "value_cache": caches[1]}
    inputs |= {"slot_mapping": np.array([0, 5, 10, 15] if mode else [4, 3, -1, 19, 0, 1, 2])}
    if mode:
        inputs |= {"compress_type": mode, "wins": np.array([2, 4, 1, 3]), "seq_lens": np.array([4, 3])}
    if mode > KVHEAD:
        inputs["offset_index"] = np.array([1, 0, -1, 0])
    return Call("ascend.reshape_and_cache", inputs | {"cache_format": cache_format})


def paged_attention(per_head):
    """Return attention of 2 sequences, 4 query and 2 key heads, over blocks of 4 rows."""
    rng = np.random.default_rng(1)
    return by_name(block_attention(rng, "fp32", per_head, (9, 6), razor=True, sinks=True))


def pools():
    """Return the arrays of 4 tokens of 2 sequences, 4 query and 2 key heads, and of 5 pages of 4 rows."""
    rng = np.random.default_rng(1)
    caches = rng.random((2, 5, 4, 2, 16), np.float32)
    inputs = {"query": rng.random((4, 4, 16), np.float32), "key_cache": caches[0], "value_cache": caches[1]}
    inputs |= {"block_tables": np.array([[0, 1, 2], [3, 4, -1]]), "context_lens": np.array([9, 6])}
    inputs |= {"query_starts": np.array([0, 3, 4]), "attn_mask": np.zeros((4, 4, 9), np.float32)}
    more = {"alibi_slopes": np.ones(4, np.float32), "sinks": np.zeros(4, np.float32)}
    return Call("paged_attention", inputs | more)


def drawn(make, *how, page=4, **more):
    """Return a call of three sequences as `kvkit vectors` draws it."""
    call = by_name(make(np.random.default_rng(1), Sizes(page=page, batch=3), *how, **more))
    call.inputs.pop("return_lse", None)
    return call


def latent(**more):
    return lambda: drawn(latent_calls.dense_attention, 2, 2, "fp32", sinks=True, **more)


def latent_append(**more):
    return lambda: drawn(latent_calls.append_rows, "fp32", page=3, **more)


def delta(name, by_channel=False, **more):
    """Return a call of the gated delta rule over 5 tokens, 2 key heads and 4 value heads, in a pool of 7."""
    rng = np.random.default_rng(1)
    inputs = tokens_of(rng, (2, 2, 4, 6, 5), 5, by_channel)
    inputs |= {"state": rng.random((7, 4, 6, 5), np.float32), "norm": True}
    return Call(name, inputs | {key: value for key, value in more.items() if value is not None})


def convolution(name, **more):
    """Return a call of the causal convolution over 5 tokens, 6 channels and 4 taps, in a pool of 7."""
    shapes = {"x": (5, 6), "weight": (6, 4), "bias": (6,), "state": (7, 6, 3)}
    rng = np.random.default_rng(1)
    return Call(name, {each: rng.random(shape, np.float32) for each, shape in shapes.items()} | more)


def of(name, **inputs):
    return lambda: Call(name, copy.deepcopy(inputs))


CALLS = {
    "static cache": lambda: of_scene("static"),
    "static cache of floats": lambda: of_scene("static", formats=refusals.FLOAT, dim=24),
    "cache": lambda: of_scene("dynamic"),
    "cache of floats": lambda: of_scene("dynamic", formats=refusals.FLOAT, dim=24),
    **{
        kind.replace("_", " ") + " attention": lambda kind=kind: attention(kind)
        for kind in attention_scenes.KINDS
    },
    "static attention over codes": lambda: attention("static_cache", attention_scenes.INT8),
    "attention over codes": lambda: attention("dynamic_cache", attention_scenes.INT8),
    "merge": of("merge_attention_states", outputs=X, lses=X[..., 0]),
    "static rotary": of(
        "rotary_position_embedding", query=X, key=X[:, :, :1], start_pos=4, pad_len=np.array([0, 1]),
        interleaved=True,
    ),
    "rotary": of("dynamic_batching.rotary_position_embedding", query=X[0], key=X[0, :, :1], **STARTS),
    "positions": of("dynamic_batching.position_index", sequences=np.zeros(3, np.int64), **STARTS),
    "slopes": of("alibi_slope", num_heads=4),
    "static alibi": of(
        "alibi_mask", seqlen_q=3, seqlen_kv=5, attn_mask=np.zeros((4, 3, 16), np.float32), num_heads=4
    ),
    "alibi": of(
        "dynamic_batching.alibi_mask", seqstarts=np.array([0, 1, 4]), kvstarts=np.array([0, 4, 9]),
        attn_mask=np.zeros((4, 16), np.float32), num_heads=2,
    ),
    **{f"blocks {name}": lambda mode=mode: reshape(*mode) for name, mode in MODES.items()},
    "contexts": of(
        "ascend.paged_cache_load", key_cache=BLOCKS, value_cache=-BLOCKS,
        block_tables=np.array([[2, 0], [3, -1]]), seq_lens=np.array([7, 4]), seq_starts=np.array([0, 0]),
    ),
    "copies": of(
        "ascend.block_copy", key_cache=BLOCKS, value_cache=-BLOCKS, src=np.array([0, 1]),
        dst=np.array([3, 2]), cum_sum=np.array([1, 2]),
    ),
    "paged attention": lambda: paged_attention(False),
    "paged attention per head": lambda: paged_attention(True),
    "pools": pools,
    "slots": of(
        "paged_append", key=np.ones((3, 2, 32), np.float16), value=np.ones((3, 2, 32), np.float16),
        key_cache=BLOCKS, value_cache=-BLOCKS, slot_mapping=np.array([3, -1, 19]),
    ),
    "rotated slots": of(
        "paged_append", key=np.ones((3, 2, 32), np.float16), value=np.ones((3, 2, 32), np.float16),
        key_cache=BLOCKS, value_cache=-BLOCKS, slot_mapping=np.array([3, -1, 19]),
        positions=np.array([9, 0, 4]), rope={"rotary_dim": 16},
    ),
    "swaps": of("swap_blocks", source=BLOCKS, target=-BLOCKS[:3], pairs=np.array([[3, 0], [1, 2]])),
    "latent rows": latent(),
    "latent rows of two pools": latent(two_pools=True),
    "latent rows of bytes": latent(format="ds_mla"),
    "latent rows in blocks of bytes": latent(format="ds_v4"),
    "chosen latent rows": lambda: drawn(
        latent_calls.sparse_attention, 2, 1, "fp32", page=5, sinks=True, lens=True
    ),
    "latent append": latent_append(),
    "latent append to two pools": latent_append(two_pools=True),
    "latent append of bytes": latent_append(format="ds_mla"),
    "absorb": of("mla_absorb", query=X[:, 0], w_uk=np.ones((2, 8, 12), np.float32)),
    "expand": of("mla_expand", latent_output=X[:, 0], w_uv=np.ones((2, 5, 8), np.float32)),
    "indexer": lambda: drawn(latent_calls.index_scores, "fp32", 2),
    "indexer of codes": lambda: drawn(latent_calls.index_scores, "e4m3", 2),
    "choice": lambda: drawn(latent_calls.top_rows, 2),
    "compression": lambda: drawn(
        compression, "csa", pasts=(6, 0, 0), new=(3, 2, 4), dim=16, padding=True
    ),
    "compressed slots": of(
        "compressed_slots", positions=np.array([2, 3, 4, 7, -1]), block_tables=np.array([[3, 0], [2, 1]]),
        page_size=2, ratio=4, sequence_of_token=np.array([0, 0, 1, 1, 0]),
    ),
    "rotation back": of(
        "rope_back", output=X[0], positions=np.array([5, 0, 2]), rope={"rotary_dim": 4, "interleaved": True}
    ),
    "delta step": lambda: delta(
        "gated_delta_step", state_indices=np.array([3, -1, 0, 6, 1]),
        out_state_indices=np.array([3, -1, 2, 6, 5]),
    ),
    "delta step of channels": lambda: delta(
        "gated_delta_step", by_channel=True, state_indices=np.array([3, -1, 0, 6, 1])
    ),
    "delta rule": lambda: delta(
        "gated_delta_rule", starts=np.array([0, 2, 2, 5]), state_indices=np.array([3, 1, 5])
    ),
    "replay": of(
        "gated_delta_replay", state=np.ones((7, 4, 6, 5), np.float32),
        capsule=np.ones((3, 2, 56), np.float32), accepted=np.array([2, 0, 1]),
        state_indices=np.array([3, -1, 5]),
    ),
    "delta gates": of(
        "delta_gates", a=np.ones((5, 4), np.float32), b=np.ones((5, 4), np.float32),
        a_log=np.ones(4, np.float32), dt_bias=np.ones(4, np.float32),
    ),
    "convolution": lambda: convolution(
        "causal_conv", starts=np.array([0, 2, 2, 5]), state_indices=np.array([3, -1, 5])
    ),
    "convolution of one token": lambda: convolution(
        "causal_conv_update", state_indices=np.array([3, -1, 0, 6, 1])
    ),
    "matrices": of("ascend.nd_to_nz", x=np.ones((2, 20, 10), np.float32)),
    "matrices back": of("ascend.nz_to_nd", y=np.ones((2, 2, 32, 8), np.float32), m=20, n=10),
}  # fmt: skip


def arrays_of(results):
    return list(results) if isinstance(results, (tuple, list)) else [results]


def like(results, arrays):
    """Return one array or a tuple of several, as `results` are."""
    return arrays[0] if isinstance(results, np.ndarray) else tuple(arrays)


def outputs():
    """Return every call that has output arrays, with the attributes that add outputs."""
    for label, make in CALLS.items():
        operator = make().operator
        whole = not any(each.inout and each.name in operator.returned({}) for each in operator.inputs)
        if operator.outputs and whole:  # others return arguments too
            yield pytest.param(make, {}, id=label)
            if "attention" in label:
                yield pytest.param(make, {"return_lse": True}, id=f"{label}-lse")


with_outputs = pytest.mark.parametrize(("make", "more"), [*outputs()])
