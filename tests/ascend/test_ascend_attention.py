"""`paged_attention` against loops in float64, and against attention over the gathered rows."""

import backends
import numpy as np
import pytest
from ascend_attention_scenes import apart_or_not, call_of, run
from ascend_scenes import needs_two
from attention_scenes import TOLERANCE, assert_near
from refusals import refuses
from surroundings import with_threads

from kvkit.reference import ascend as oracle

paged_cache_load = backends.operators.ascend.paged_cache_load


def check(call, expected=None):
    """Check results within the tolerance of attention, and that inputs keep their bytes."""
    output, lse = run(expected or call, oracle.attend_blocks)
    before = {name: x.tobytes() for name, x in call.items() if isinstance(x, np.ndarray)}
    got, got_lse = run(call, return_lse=True)
    dtype = call["query"].dtype
    assert got.dtype == dtype
    assert got_lse.dtype == np.float32
    assert_near(got, output, TOLERANCE[str(dtype)])
    assert_near(got_lse, lse, 2e-5, "lse")
    assert run(call).tobytes() == got.tobytes()
    for name, old in before.items():
        assert call[name].tobytes() == old, name
    return got, got_lse


@apart_or_not
def test_views_with_odd_strides(apart):
    """Blocks that are not a whole number of rows apart, negative steps, one block, one row, one of each."""
    rng = np.random.default_rng(3)
    call = call_of(rng, "float16", apart, rows=3, lengths=[7, 4])
    cache = call["key_cache"]
    bytes_ = np.full((len(cache), cache[0].nbytes + 2), 0xFF, np.uint8)
    odd = np.lib.stride_tricks.as_strided(
        bytes_.reshape(-1)[: len(cache) * cache[0].nbytes].view(np.float16),
        cache.shape, (cache[0].nbytes + 2, *cache.strides[1:]),
    )  # fmt: skip
    odd[...] = cache
    check(call | {"key_cache": odd}, call)
    check(call | {"value_cache": call["value_cache"][::-1].copy()[::-1]}, call)
    check(call | {"key_cache": cache[:, ::-1].copy()[:, ::-1]}, call)
    check(
        call
        | {
            "key_cache": np.repeat(cache, 2, 0)[::2],
            "value_cache": np.repeat(call["value_cache"], 3, 1)[:, ::3],
        },
        call,
    )
    for lengths, rows in (([3], 5), ([2, 3], 1), ([1], 1)):
        call = call_of(rng, "float16", apart, lengths, rows=rows)
        check(call | {"value_cache": np.repeat(call["value_cache"], 2, 0)[::2]}, call)


@apart_or_not
def test_nan_that_a_window_hides(apart):
    """Keys, values and offsets of rows before the window are not there."""
    call = call_of(np.random.default_rng(10), apart=apart, lengths=[9, 40], razor=True, window=(2, -1))
    expected = run(call)
    seen, hidden = set(), set()
    for table, length in zip(call["block_tables"], call["context_lens"], strict=True):
        rows = [(table[j // 4], j % 4) for j in range(length)]
        seen, hidden = seen | {*rows[-3:]}, hidden | {*rows[:-3]}
    for name in ("key_cache", "value_cache", "razor_offset"):
        for row in hidden - seen:  # of one sequence may be seen by another
            call[name][row] = np.nan
    assert np.isfinite(expected).all()
    assert_near(run(call), expected, 2e-6)


@pytest.mark.cpu
@needs_two
@apart_or_not
def test_threads_attend_the_same(apart):
    call = call_of(np.random.default_rng(9), "float16", apart, [3000, 700, 5], dim=64, rows=16, razor=True)
    one, two = (with_threads(n, lambda: run(call, return_lse=True)) for n in (1, 2))
    assert one[0].tobytes() == two[0].tobytes()
    assert one[1].tobytes() == two[1].tobytes()
    check(call)


def test_entries_of_neither_form():
    """One context for each sequence, or one for each of its key heads, of which there is one in the cache."""
    rng = np.random.default_rng(2)
    query, cache = rng.random((2, 6, 8), np.float32), rng.random((3, 4, 1, 8), np.float32)

    def call_with(entries, caches=cache, queries=query):
        tables, lens = np.zeros((entries, 1), np.int64), np.full(entries, 3)
        first = dict(zip(("query", "key_cache", "value_cache"), (queries, caches, caches), strict=True))
        return lambda: run(first | {"block_tables": tables, "context_lens": lens})

    for entries in (2, 4, 6, 12):
        call_with(entries)()
    for entries in (0, 1, 3, 5, 8, 10, 14, 24):
        refuses(call_with(entries), "context_lens")
    call_with(0, queries=query[:0])()
    refuses(call_with(3, queries=query[:0]), "context_lens")
    two = np.concatenate([cache, cache], 2)
    call_with(2, two)()
    for entries in (0, 1, 4):
        refuses(call_with(entries, two), "context_lens")
    refuses(call_with(2, np.concatenate([two, two], 2)), "query")
