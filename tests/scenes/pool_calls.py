"""Make calls over pools of pages of every engine."""

import numpy as np
import pool_scenes
from attention_scenes import TOLERANCE, assert_near
from scenes import DTYPES

import kvkit
from kvkit.reference import paged as oracle
from kvkit.tools.vectors.draws import any_bytes, block_table, normal


def scene(rng, engine, dtype="fp16", tokens=9, blocks=5, rows=4, heads=2, dim=16, value_dim=None):
    """Return (pools of random bits, packed keys and values, slots, some negative)."""
    dtype, value_dim = DTYPES[dtype], value_dim or dim
    pools = pool_scenes.made(engine, blocks, rows, heads, dim, value_dim, dtype)
    for memory in pools.memory:
        memory.view(np.uint8)[...] = rng.integers(0, 256, memory.view(np.uint8).shape)
    new = [any_bytes(rng, (tokens, heads, size), dtype) for size in (dim, value_dim)]
    slots = rng.permutation(blocks * rows)[:tokens]
    return pools, new, np.where(rng.random(tokens) < 0.2, -rng.integers(1, 9, tokens), slots)


def bytes_of(pools):
    return [memory.tobytes() for memory in pools.memory]


LENGTHS, QUERIES = (9, 0, 1, 70, 5), (3, 1, 1, 6, 9)


class Scene:
    """Holds a legal call, and the arguments for an oracle."""

    def __init__(
        self,
        rng,
        engine="flash-attn",
        dtype="fp32",
        lengths=LENGTHS,
        queries=QUERIES,
        kv_heads=2,
        group=2,
        dim=16,
        value_dim=None,
        rows=4,
        query_dtype=None,
        **more,
    ):
        dtype, query_dtype = DTYPES[dtype], DTYPES[query_dtype or dtype]
        self.table, used = block_table(rng, lengths, rows)
        self.pages = [row[: -(-n // rows)].copy() for row, n in zip(self.table, lengths, strict=True)]
        self.pools = pool_scenes.made(engine, len(used), rows, kv_heads, dim, value_dim or dim, dtype)
        for view in (self.pools.keys, self.pools.values):
            view[used] = normal(rng, view[used].shape, dtype)
        self.lengths, self.starts = np.array(lengths), np.cumsum([0, *queries])
        self.query = normal(rng, (self.starts[-1], kv_heads * group, dim), query_dtype)
        self.heads, self.more = kv_heads, more

    @property
    def arguments(self):
        return {
            "query": self.query, "key_cache": self.pools.given[0], "value_cache": self.pools.given[1],
            "block_tables": self.table, "context_lens": self.lengths, "query_starts": self.starts,
            "layout": self.pools.layout, **self.more,
        }  # fmt: skip

    def run(self, **more):
        return kvkit.paged_attention(**self.arguments | more)

    def expected(self):
        batch, more = len(self.lengths), dict(self.more)

        def of_all(values, heads):
            return np.broadcast_to(np.asarray(1.0 if values is None else values, float), (batch, heads))

        slopes = more.pop("alibi_slopes", None)
        return oracle.attend_pages(
            self.query, self.pools.keys, self.pools.values, self.pages, self.lengths, self.starts,
            more.pop("attn_mask", None), causal=more.pop("is_causal", True),
            key_scale=of_all(more.pop("key_scale", None), self.heads),
            value_scale=of_all(more.pop("value_scale", None), self.heads),
            alibi_slopes=None if slopes is None else of_all(slopes, self.query.shape[1]), **more,
        )  # fmt: skip

    def check(self):
        """Check results within the tolerance, and that no argument changes."""
        before = [memory.tobytes() for memory in self.pools.memory]
        got, lse = self.run(return_lse=True)
        output, sums = self.expected()
        assert got.dtype == self.query.dtype
        assert_near(got, output, TOLERANCE[str(got.dtype)])
        assert_near(lse, sums, 2e-5 * max(1, abs(self.more.get("softmax_scale", 1))), "lse")
        assert self.run().tobytes() == got.tobytes()
        assert [memory.tobytes() for memory in self.pools.memory] == before
        return got


def mask_of(rng, scene, dtype, heads=None):
    tokens, longest = len(scene.query), int(scene.lengths.max(initial=0)) + 3
    shape = (tokens, longest) if heads is None else (heads, tokens, longest)
    if dtype is bool:
        return rng.random(shape) < 0.7
    mask = rng.standard_normal(shape).astype(dtype)
    mask[rng.random(shape) < 0.2] = -np.inf
    return mask


EXTRAS = {
    "not causal": {"is_causal": False},
    "scale": {"softmax_scale": -0.3},
    "left": {"window": (3, -1)},
    "both sides": {"window": (5, 2), "is_causal": False},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": np.linspace(-2, 4, 4, dtype=np.float32)},
    "slopes": {"alibi_slopes": np.array([0.5, 0.1, 0, -0.2], np.float32)},
    "slopes to both sides": {"alibi_slopes": np.ones((5, 4), np.float16) / 3, "is_causal": False},
    "scales": {"key_scale": 1.5, "value_scale": np.array([0.25, 3], np.float32)},
    "scales of sequences": {"key_scale": np.linspace(0.5, 2, 10, dtype=np.float32).reshape(5, 2)},
    "all": {
        "window": (20, -1), "softcap": 2.0, "sinks": np.ones(4, np.float32), "softmax_scale": 0.5,
        "alibi_slopes": np.array([0.5, 0.1, 0, -0.2], np.float32), "key_scale": 0.7, "value_scale": 2.0,
    },
}  # fmt: skip
