"""What a call may cost besides moving its bytes: microseconds of checks, and no memory."""

import time
import tracemalloc

import numpy as np
import pytest

import kvkit
from kvkit.checks import caches
from kvkit.checks.arguments import CacheArguments, StepArguments
from kvkit.checks.index_tensors import packed_in_cache
from kvkit.checks.values import check_apart, check_new_tokens
from kvkit.layouts import pmx

BATCH, HEADS, DIM, PAST, PAGE = 64, 8, 128, 100, 128


@pytest.fixture(params=[0, 1], ids=["offsets", "pages"])
def step(request):
    """Return a decode step: 64 sequences, one new token each, an int8 cache in layout 3."""
    table = np.arange(BATCH) * PAGE
    return {
        "seqstarts": np.arange(BATCH + 1), "kvstarts": np.arange(BATCH + 1) * (PAST + 1),
        "cachestarts": table[:, None] if request.param else table, "start_pos": np.full(BATCH, PAST),
        "max_seqlen": 1, "max_kvlen": PAST + 1, "cache_mode": request.param, "page_size": PAGE,
    }  # fmt: skip


@pytest.mark.perf
def test_checks_of_a_decode_step_take_under_60_microseconds(step, microsecond):
    tokens = np.zeros((BATCH, HEADS, DIM), np.float16)
    cache = np.zeros((1, 2, HEADS, BATCH * PAGE, DIM), np.int8)
    scale = np.zeros((1, 2, HEADS, BATCH * PAGE, DIM // 8), np.float16)

    place = CacheArguments(1, 0, 8, 8, cache_layout=3)

    def checks():
        fmt, key, value = check_new_tokens(tokens, tokens, 3)
        layer = caches.cache_layer(fmt, HEADS, DIM, cache, scale, pmx.DYNAMIC, place)
        packed = packed_in_cache(("current_key", tokens), StepArguments(**step))
        packed.over_cache("current_key", tokens, layer)
        for name, array in (("cache", cache), ("scale", scale)):
            check_apart(name, array, [("current_key", key), ("current_value", value)])

    checks()
    times = []
    for _ in range(300):
        begin = time.perf_counter()
        checks()
        times.append(time.perf_counter() - begin)
    assert min(times) < 60 * microsecond


@pytest.mark.parametrize("number", range(4))
def test_nothing_of_the_size_of_the_cache_is_made(step, number):
    """Not of the context's size either, when outputs are given; strided caches included."""
    order = pmx.DYNAMIC[number]
    sizes = {"l": 1, "kv": 2, "n": BATCH * PAGE, "h": HEADS}
    wide = np.zeros([sizes.get(axis, 2 * DIM) for axis in order.axes], np.float16)
    cache = wide[..., :DIM]
    tokens = np.ones((BATCH, HEADS, DIM), np.float16)
    out = tuple(np.empty((BATCH * (PAST + 1), HEADS, DIM), np.float16) for _ in range(2))
    call = kvkit.dynamic_batching.key_value_cache
    call(tokens, tokens, cache=cache, cache_layout=number, out=out, **step)
    tracemalloc.start()
    try:
        call(tokens, tokens, cache=cache, cache_layout=number, out=out, **step)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000 < out[0].nbytes // 10
