"""List a legal call of every operator, with all arguments that it may have."""

import copy
from dataclasses import dataclass

import attention_scenes
import backends
import latent_scenes
import ml_dtypes
import numpy as np
import pytest
import refusals

from kvkit.operators import OPERATORS
from kvkit.reference.ascend import KVHEAD, KVHEAD_ROPE, OMNI

X = np.ones((2, 3, 2, 8), np.float32)
STARTS = {"seqstarts": np.array([0, 2, 3]), "start_pos": np.array([0, 4]), "max_seqlen": 2}
BLOCKS = np.arange(4 * 5 * 2 * 32, dtype=np.float16).reshape(4, 5, 2, 32)
MODES = {
    "nd": (0, "ND"), "nz": (0, "NZ"), "kvhead": (KVHEAD, "ND"), "rope": (KVHEAD_ROPE, "ND"),
    "omni": (OMNI, "ND"),
}  # fmt: skip


@dataclass
class Call:
    """Holds the arguments of one call of an operator, by name."""

    name: str
    inputs: dict

    def __getitem__(self, name):
        return self.inputs[name]

    @property
    def operator(self):
        return OPERATORS[self.name]

    def copy(self):
        return copy.deepcopy(self)

    def but(self, **changes):
        return Call(self.name, self.inputs | changes)

    def run(self, by=None, **more):
        """Run the call by the backend, or by the package `by`; return its results."""
        named = self.inputs | more
        first = [named.pop(array.name, None) for array in self.operator.inputs if not array.keyword]
        return self.operator.function((by or backends.operators).__name__)(*first, **named)


def of_scene(kind, **choices):
    call = refusals.legal(kind, **choices)
    name = "key_value_cache" if kind == "static" else "dynamic_batching.key_value_cache"
    return Call(name, call.inputs | call.attrs)


def attention(kind, formats=attention_scenes.FP32):
    """Return a call of attention: 2 sequences, 4 heads over 2, 3 queries, 5 keys; dynamic: 3 sequences."""
    call = refusals.legal_attention(kind, formats, dim=16)
    shape = (4, 3, 16) if kind.startswith("static") else (4, 10)
    more = {"attn_mask": np.zeros(shape, call["query"].dtype), "sinks": np.zeros(4, np.float32)}
    return Call(attention_scenes.OPERATORS[kind][0], call.inputs | call.attrs | more)


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
    """Return attention of 2 sequences, 4 query and 2 key heads, over 7 blocks of 4 rows."""
    rng = np.random.default_rng(1)
    query, cache = (
        rng.random((2, 4, 16), np.float32),
        rng.random((7, 4, 1 if per_head else 2, 16), np.float32),
    )
    table, lengths = np.array([[0, 1, 2], [3, 4, -1]]), np.array([9, 6])
    if per_head:
        table, lengths = np.repeat(table, 2, 0), np.repeat(lengths, 2)
    inputs = {"query": query, "key_cache": cache, "value_cache": -cache, "block_tables": table}
    inputs |= {"context_lens": lengths, "razor_offset": np.zeros((7, 4), np.float32)}
    return Call("ascend.paged_attention", inputs | {"sinks": np.zeros(4, np.float32)})


def pools():
    """Return the arrays of 4 tokens of 2 sequences, 4 query and 2 key heads, and of 5 pages of 4 rows."""
    rng = np.random.default_rng(1)
    caches = rng.random((2, 5, 4, 2, 16), np.float32)
    inputs = {"query": rng.random((4, 4, 16), np.float32), "key_cache": caches[0], "value_cache": caches[1]}
    inputs |= {"block_tables": np.array([[0, 1, 2], [3, 4, -1]]), "context_lens": np.array([9, 6])}
    inputs |= {"query_starts": np.array([0, 3, 4]), "attn_mask": np.zeros((4, 4, 9), np.float32)}
    more = {"alibi_slopes": np.ones(4, np.float32), "sinks": np.zeros(4, np.float32)}
    return Call("paged_attention", inputs | more)


def latent(kind, chosen=False):
    """Return attention of 3 queries of 2 sequences over 5 and 3 latent rows, or over chosen rows."""
    rng = np.random.default_rng(1)
    pool, numbers = latent_scenes.pools(rng.random((4, 4, 576), np.float32), kind)
    inputs = {"query": rng.random((3, 2, numbers.shape[1]), np.float32), **pool, "softmax_scale": 0.1}
    if chosen:
        inputs |= {
            "indices": np.array([[5, -1, 3], [0, 15, 99], [7, 7, 2]]),
            "index_lens": np.array([3, 2, 3]),
        }
    else:
        inputs |= {"block_tables": np.array([[1, 3, -1], [2, -1, -1]]), "context_lens": np.array([5, 3])}
        inputs |= {"query_starts": np.array([0, 2, 3])}
    return Call("mla_attention", inputs | {"sinks": np.zeros(2, np.float32)})


def latent_append(kind):
    """Return an append of 4 latent tokens, one without a slot, to 4 blocks of 4 rows."""
    pool, numbers = latent_scenes.pools(np.ones((4, 4, 576), np.float32), kind)
    tokens = np.random.default_rng(1).random((4, numbers.shape[1]), np.float32)
    inputs = {"latent": tokens[:, :-64].copy(), "rope": tokens[:, -64:].copy(), "cache": pool.pop("latent")}
    return Call("mla_append", inputs | pool | {"slot_mapping": np.array([15, -1, 0, 6])})


def indexer(dtype=np.float32, **more):
    """Return a call for the scores of 3 queries of 2 sequences, over the contexts of `latent`."""
    rng = np.random.default_rng(1)
    inputs = {
        "query": rng.random((3, 2, 16), np.float32),
        "keys": rng.random((4, 4, 16), np.float32).astype(dtype),
    }
    inputs |= {"weights": rng.random((3, 2), np.float32), "block_tables": np.array([[1, 3, -1], [2, -1, -1]])}
    inputs |= {"context_lens": np.array([5, 3]), "query_starts": np.array([0, 2, 3])}
    return Call("indexer_scores", inputs | more)


def delta(name, by_channel=False, **more):
    """Return a call of the gated delta rule over 5 tokens, 2 key heads and 4 value heads, in a pool of 7."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.random((5, heads, dim), np.float32) for heads, dim in ((2, 6), (2, 6), (4, 5)))
    inputs = {"q": q, "k": k, "v": v, "state": rng.random((7, 4, 6, 5), np.float32)}
    inputs |= {"g": -rng.random((5, 4, 6) if by_channel else (5, 4), np.float32)}
    inputs |= {"beta": rng.random((5, 4), np.float32), "norm": True}
    return Call(name, inputs | {key: value for key, value in more.items() if value is not None})


def convolution(name, **more):
    """Return a call of the causal convolution over 5 tokens, 6 channels and 4 taps, in a pool of 7."""
    rng = np.random.default_rng(1)
    inputs = {"x": rng.random((5, 6), np.float32), "weight": rng.random((6, 4), np.float32)}
    inputs |= {"bias": rng.random(6, np.float32), "state": rng.random((7, 6, 3), np.float32)}
    return Call(name, inputs | more)


def compression(**more):
    """Return a call that pools 9 tokens of 3 sequences, one of them padding, in a pool of 5 states."""
    rng = np.random.default_rng(1)
    inputs = {name: rng.random((9, 16), np.float32) for name in ("kv", "gate")}
    inputs |= {"ape": rng.random((2, 16), np.float32), "state": rng.random((5, 6, 2, 16), np.float32)}
    inputs |= {"ratio": 2, "overlap": True, "norm_weight": rng.random(8, np.float32)}
    inputs |= {"positions": np.array([6, 7, 8, 0, 1, 0, 1, 2, 3]), "starts": np.array([0, 3, 5, 9])}
    inputs |= {"state_indices": np.array([3, -1, 0]), "rope": {"rotary_dim": 4, "interleaved": True}}
    return Call("compress_tokens", inputs | more)


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
    "latent rows": lambda: latent("one pool"),
    "latent rows of two pools": lambda: latent("two pools"),
    "latent rows of bytes": lambda: latent("ds_mla"),
    "latent rows in blocks of bytes": lambda: latent("ds_v4"),
    "chosen latent rows": lambda: latent("one pool", chosen=True),
    "latent append": lambda: latent_append("one pool"),
    "latent append to two pools": lambda: latent_append("two pools"),
    "latent append of bytes": lambda: latent_append("ds_mla"),
    "absorb": of("mla_absorb", query=X[:, 0], w_uk=np.ones((2, 8, 12), np.float32)),
    "expand": of("mla_expand", latent_output=X[:, 0], w_uv=np.ones((2, 5, 8), np.float32)),
    "indexer": indexer,
    "indexer of codes": lambda: indexer(ml_dtypes.float8_e4m3fn, key_scale=np.ones((4, 4), np.float32)),
    "choice": of(
        "topk_rows", scores=np.arange(18, dtype=np.float32).reshape(3, 6), k=2,
        block_tables=np.array([[1, 3], [2, 0]]), page_size=4, query_starts=np.array([0, 2, 3]),
    ),
    "compression": compression,
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
