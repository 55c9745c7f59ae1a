"""Cases of calls that are mostly Python: float16, 4 sequences of 3 past tokens and one new, 32 query heads.

The seconds of a call that its machine code takes are measured beside it.
"""

import contextlib
import time

import numpy as np

import kvkit
from benchmarks.suites.measuring import Case, Work
from kvkit.cache import DynamicCache
from kvkit.runtime import jit, repeats

BATCH, PAST, HEADS, QUERY_HEADS, DIM, PAGE = 4, 3, 8, 32, 128, 16
CALLS = 200  # of a round
SIZES = {"num_heads": QUERY_HEADS, "num_kv_heads": HEADS, "head_dim": DIM}
GOALS = {  # the most seconds; 0: none is set
    "key_value_cache, static": 0, "key_value_cache": 0, "multi_head_cache_attention, static": 15e-6,
    "multi_head_cache_attention": 15e-6, "multi_head_cache_attention, planned": 8e-6,
    "multi_head_attention, static": 15e-6, "paged_attention": 15e-6, "paged_attention, planned": 8e-6,
    "paged_append, planned": 8e-6, "rotary_position_embedding": 40e-6, "DynamicCache.attend": 8e-6,
}  # fmt: skip


def floats(*shape):
    return np.random.default_rng(0).standard_normal(shape, np.float32).astype(np.float16)


def small_calls():
    """Return the calls by name."""
    dynamic, rows = kvkit.dynamic_batching, PAST + 1
    query, new, context = (floats(BATCH, n, h, DIM) for n, h in ((1, QUERY_HEADS), (1, HEADS), (rows, HEADS)))
    packed_query, packed = query[:, 0], new[:, 0]
    own, shared = floats(BATCH, 1, 2, rows, HEADS, DIM), floats(1, 2, HEADS, BATCH * rows, DIM)
    names = "seqstarts", "kvstarts", "cachestarts", "start_pos"
    counts = np.arange(BATCH + 1)
    tensors = counts, counts * rows, counts[:-1] * rows, np.full(BATCH, PAST)
    step = dict(zip(names, tensors, strict=True)) | {"max_seqlen": None, "max_kvlen": None}
    plan, place = dynamic.plan(**step), {"cache": shared, "cache_layout": 3}
    pools, tables = (floats(BATCH, PAGE, HEADS, DIM), floats(BATCH, PAGE, HEADS, DIM)), counts[:-1, None]
    pages, lens = kvkit.paged_plan(tables, np.full(BATCH, rows), page_size=PAGE), np.full(BATCH, rows)
    cache, one = DynamicCache(), floats(1, QUERY_HEADS, 1, DIM)
    cache.update(*2 * [floats(1, HEADS, rows, DIM)], 0)
    calls = (
        lambda: kvkit.key_value_cache(new, new, PAST, own),
        lambda: dynamic.key_value_cache(packed, packed, **step, **place),
        lambda: kvkit.multi_head_cache_attention(query, new, new, PAST, own, **SIZES),
        lambda: dynamic.multi_head_cache_attention(
            packed_query, packed, packed, **step, decoding_batches=0, **place, **SIZES
        ),
        lambda: plan.multi_head_cache_attention(packed_query, packed, packed, **place, **SIZES),
        lambda: kvkit.multi_head_attention(query, context, context, **SIZES),
        lambda: kvkit.paged_attention(packed_query, *pools, tables, lens),
        lambda: pages.paged_attention(packed_query, *pools),
        lambda: pages.paged_append(packed, packed, *pools),
        lambda: dynamic.rotary_position_embedding(packed_query, packed, counts, tensors[-1], None),
        lambda: cache.attend(one, 0),
    )
    return dict(zip(GOALS, calls, strict=True))


def small(name):
    """Prepare a call, beside the seconds that its machine code takes."""

    def prepare():
        call = small_calls()[name]

        def whole(i):
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            return (time.perf_counter() - begin) / CALLS

        def machine_code(i):
            with machine_code_timed() as seconds:
                for _ in range(CALLS):
                    call()
            return sum(seconds) / CALLS

        return Work(whole, beside={"machine code": machine_code}, timed=True)

    return prepare


@contextlib.contextmanager
def machine_code_timed():
    """Yield a list that gets the seconds of each call of machine code; meanwhile Python makes them."""
    seconds = []

    def timed(function):
        def run(*numbers):
            begin = time.perf_counter()
            function(*numbers)
            seconds.append(time.perf_counter() - begin)

        return run

    plain = [(code, code.ctypes) for code in jit.LIVE_CODE]
    again, repeats.Repeats.again = repeats.Repeats.again, lambda *_: None
    for code, function in plain:
        code.ctypes = timed(function)
    try:
        yield seconds
    finally:
        repeats.Repeats.again = again
        for code, function in plain:
            code.ctypes = function


CASES = [Case(name, small(name), limit=limit) for name, limit in GOALS.items()]
