"""Cases of attention over engines' pools: a step of decoding, with the sizes of `attention`.

Each case is compared with the same keys and values in the same pages of a PMX layout.
"""

import numpy as np

import kvkit
from benchmarks.suites.attention import PAST, B, from_cache, token_bytes, tokens_first, work
from benchmarks.suites.cache_operators import DTYPES, index_tensors
from benchmarks.suites.measuring import Case
from benchmarks.suites.memory import sets
from benchmarks.suites.problem import DIM, problem

POOLS = {  # (layout of the pool, its axis of keys and values; None for separate pools)
    "FlashInfer": ("b kv n h c", 1),
    "vLLM LBNHC": ("b n h kv c", 3),
    "separate HND": ("b h n c", None),
}


def decode(kind, engine, number, page):
    """Prepare attention over rotating pools, beside the same bytes in a layout of PMX."""

    def prepare():
        task = problem(B, 1, PAST, 8)
        same, beside = from_cache(task, kind, "pages", number, page)
        run = from_pools(task, kind, engine, page)
        return work(task, run, kind, beside | {f"layout {number}": same}, {})

    return prepare


def from_pools(task, kind, engine, page):
    """Return a checked function of the round."""
    table = index_tensors(1, task.past, task.new, task.batch, page)["cachestarts"] // page
    turns = [filled(task, kind, engine, table, page)]
    size = task.batch * task.length * token_bytes(task, kind)
    turns += [tuple(pool.copy() for pool in turns[0]) for _ in range(1, sets(size))]
    query = task.query.astype(DTYPES[kind]).reshape(-1, task.num_heads, DIM)
    lengths, out, (layout, _) = np.full(task.batch, task.length), np.empty_like(query), POOLS[engine]

    def run(i):
        pools = turns[i % len(turns)]
        kvkit.paged_attention(query, pools[0], pools[-1], table, lengths, layout=layout, out=out)

    run(0)
    task.check("kvkit", out.reshape(task.query.shape), kind)
    return run


def filled(task, kind, engine, table, page):
    """Return one or two pools with the contexts of a problem."""
    layout, kv = POOLS[engine]
    sizes = {"b": table.size, "n": page, "h": task.num_kv_heads, "c": DIM, "kv": 2}
    axes = layout.split()
    pools = [np.zeros([sizes[axis] for axis in axes], DTYPES[kind]) for _ in range(2 if kv is None else 1)]
    views = pools if kv is None else np.moveaxis(pools[0], kv, 0)
    order = [[axis for axis in axes if axis != "kv"].index(axis) for axis in "bnhc"]
    position = np.arange(task.length)
    for side, view in enumerate(views):
        rows = view.transpose(order)
        for b in range(task.batch):
            rows[table[b, position // page], position % page] = tokens_first(task.stored[side, b])
    return tuple(pools)


CASES = [
    Case(
        f"pool {engine}, {kind}, pages of {page}",
        decode(kind, engine, number, page),
        {f"layout {number}": 0.9},
    )
    for engine, number in (("FlashInfer", 2), ("vLLM LBNHC", 2), ("separate HND", 3))
    for kind, page in (("float16", 16), ("float16", 64), ("bfloat16", 64))
]
