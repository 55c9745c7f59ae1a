"""Make calls of attention over caches in blocks, for sequences or for each head apart."""

import backends
import numpy as np
import pytest
from ascend_scenes import FLOATS
from attention_scenes import normal, poison

paged_attention = backends.operators.ascend.paged_attention
apart_or_not = pytest.mark.parametrize("apart", [False, True], ids=["plain", "per_head"])


def call_of(
    rng,
    dtype="float32",
    apart=False,
    lengths=(9, 0, 1, 40),
    kv_heads=2,
    group=2,
    dim=16,
    value_dim=None,
    rows=4,
    **more,
):
    """Return a legal call as a dict; rows outside contexts and unused table entries are poison."""
    lengths = np.array(lengths)
    batch = len(lengths)
    if apart:
        lengths = np.array([max(n - 3 * h, min(n, 1)) for n in lengths for h in range(kv_heads)], int)
    heads, value_dim = 1 if apart else kv_heads, value_dim or dim
    need = -(-lengths // rows)
    blocks = int(need.sum()) + 2
    columns = int(need.max(initial=0)) + int(rng.integers(0, 3))
    table = rng.choice([-1, blocks, 2**40, -(2**63), 2**63 - 1], (len(lengths), columns))
    ids = rng.permutation(blocks)
    used = np.zeros(blocks * rows, bool)
    for i, count in enumerate(need):
        table[i, :count] = ids[need[:i].sum() :][:count]
        for j in range(lengths[i]):
            used[table[i, j // rows] * rows + j % rows] = True
    caches = []
    for size in (dim, value_dim):
        cache = poison(rng, (blocks * rows, heads, size), FLOATS[dtype])
        cache[used] = normal(rng, (int(used.sum()), heads, size), FLOATS[dtype])
        caches.append(cache.reshape(blocks, rows, heads, size))
    call = {
        "query": normal(rng, (batch, kv_heads * group, dim), FLOATS[dtype]), "key_cache": caches[0],
        "value_cache": caches[1], "block_tables": table, "context_lens": lengths,
    }  # fmt: skip
    if more.pop("razor", False):
        offset = poison(rng, (blocks * rows,), np.float32)
        offset[used] = rng.uniform(-3, 8, int(used.sum()))
        call["razor_offset"] = offset.reshape(blocks, rows)
    if more.pop("sinks", False):
        call["sinks"] = rng.uniform(-2, 4, kv_heads * group).astype(np.float32)
    return call | more


FIRST = ("query", "key_cache", "value_cache", "block_tables", "context_lens")


def run(call, function=paged_attention, **more):
    return function(
        *(call[name] for name in FIRST), **{k: v for k, v in call.items() if k not in FIRST}, **more
    )


EXTRAS = {
    "razor": {"razor": True}, "scale": {"softmax_scale": 0.7},
    "razor_scale": {"razor": True, "softmax_scale": -0.3}, "window": {"window": (5, -1)},
    "right": {"window": (-1, 0)}, "last": {"window": (0, 3), "razor": True}, "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "all": {"razor": True, "window": (7, 0), "softcap": 2.0, "sinks": True, "softmax_scale": 0.5},
}  # fmt: skip
