"""Calls of a paged step that are prepared once for all layers: the same bits, and the same errors."""

import numpy as np
import pytest
from paged_scenes import DIM, HEADS, KINDS, refused
from scenes import assert_same

from kvkit import cpu
from kvkit.cache import PagedCache
from kvkit.tools.vectors.draws import normal

LAYERS, ROWS, HEADS_OF_QUERY = 4, 3, 2 * HEADS
OPTIONS = [
    {}, {"window": (3, 0)}, {"softmax_scale": 0.3, "softcap": 2.0}, {"return_lse": True},
    {"return_lse": True, "sinks": np.arange(HEADS_OF_QUERY, dtype=np.float32)},
]  # fmt: skip


@pytest.fixture
def prepared(monkeypatch):
    """Return a list that gets the launches that are prepared."""
    made = []

    def count(module, name):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, **named: made.append(name) or real(*given, **named))

    count(cpu.attention.prepare, "prepare_attention")
    count(cpu.copy.transfer, "prepare_transfer")
    return made


def cache_of(kind, layout=3):
    dtype, options = KINDS[kind]
    return PagedCache(32, 4, LAYERS, HEADS, DIM, dtype, cache_layout=layout, **options), np.dtype(dtype)


def tokens(rng, dtype, heads, *outer):
    return normal(rng, (*outer, heads, DIM), dtype)


def both(results):
    return results if isinstance(results, tuple) else (results, None)


@pytest.mark.parametrize(("kind", "layout"), [(kind, 3 * (i % 2)) for i, kind in enumerate(KINDS)])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_rows(rng, prepared, kind, layout, options):
    """Layers one after the other, and each one with tables of its own."""
    cache, dtype = cache_of(kind, layout)
    for new in (9, 1, 1, 2):
        states = [[tokens(rng, dtype, HEADS, ROWS, new).swapaxes(1, 2) for _ in "kv"] for _ in range(LAYERS)]
        queries = [tokens(rng, dtype, HEADS_OF_QUERY, ROWS, new).swapaxes(1, 2) for _ in range(LAYERS)]
        prepared.clear()
        got = []
        for i in range(LAYERS):
            cache.update(*states[i], i)
            got.append(cache.attend(queries[i], i, **options))
        if "sinks" not in options:
            assert prepared == ["prepare_transfer", "prepare_attention"]
        for i in range(LAYERS):
            cache.rows.step = None
            for a, b in zip(both(got[i]), both(cache.attend(queries[i], i, **options)), strict=True):
                assert_same(a, b, i)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_tokens(rng, prepared, kind):
    """With an append in the same call, and without; calls with `out` are prepared each time."""
    (one, dtype), (other, _) = cache_of(kind), cache_of(kind)
    sequences = [[(cache.blocks.add(), 3), (cache.blocks.add(), 1)] for cache in (one, other)]
    for counts in ((3, 1), (1, 1), (1, 1)):
        steps = [
            cache.begin_step([(seq, count) for (seq, _), count in zip(pairs, counts, strict=True)])
            for cache, pairs in zip((one, other), sequences, strict=True)
        ]
        prepared.clear()
        with steps[0] as step, steps[1] as plain:
            for i in range(LAYERS):
                query = tokens(rng, dtype, HEADS_OF_QUERY, sum(counts))
                new = [tokens(rng, dtype, HEADS, sum(counts)) for _ in "kv"]
                expected = np.empty_like(query)
                plain.multi_head_cache_attention(query, *new, i, out=expected)
                made = len(prepared)
                assert_same(step.multi_head_cache_attention(query, *new, i), expected)
                assert_same(step.attend(query, i), expected)
                assert_same(step.attend(np.asfortranarray(query), i), expected)
                assert prepared[made:] == (
                    [] if i else ["prepare_attention", "prepare_transfer", "prepare_attention"]
                )
        assert_same(one.cache, other.cache)


def test_what_is_wrong_is_said_to_later_calls_too(rng):
    """Arguments that equal those of an earlier call, and are of other types or shapes."""
    cache, dtype = cache_of("float32")
    new, query = [tokens(rng, dtype, heads, ROWS, 5).swapaxes(1, 2) for heads in (HEADS, HEADS_OF_QUERY)]
    for i in range(LAYERS):
        cache.update(new, new, i)
        cache.attend(query, i, window=(1, 1), softcap=1.0)
    wrong = [
        ({"window": (1.0, 1)}, "window: expected a pair of integers"),
        ({"window": (1, 1), "softcap": True}, "softcap: expected a finite number"),
        ({"window": (1, 1), "softcap": 1.0, "return_lse": 0.0}, "return_lse: expected an integer"),
        ({"window": (1, 1), "softcap": 1.0, "sinks": 1}, "sinks: expected a numpy array"),
        ({"window": (1, 1), "softcap": 1.0, "attn_mask": 1}, "attn_mask: expected"),
    ]
    for options, message in wrong:
        assert refused(cache.attend, query, 1, **options).startswith(message)
    assert refused(cache.attend, query[:2], 1).startswith("query: expected")
    assert refused(cache.attend, query.astype(np.float16), 1).startswith("query: expected")
    assert refused(cache.attend, None, 1).startswith("query: expected")
    with cache.begin_step([(cache.blocks.add(), 2)]) as step:
        packed = tokens(rng, dtype, HEADS, 2)
        for i in range(LAYERS):
            if i:
                assert refused(step.attend, packed, i) == (
                    f"layer_idx: expected a layer that the step has written, got {i}"
                )
            step.update(packed, packed, i)
            step.attend(packed, i)
            assert "that the step has not written" in refused(step.update, packed, packed, i)
        assert refused(step.attend, packed, 1, window=(1.0, 1)).startswith("window: expected")
        assert refused(step.attend, packed, LAYERS).startswith("layer_idx: expected")


@pytest.mark.parametrize("how", ["abandon", "commit"])
def test_a_step_that_its_block_has_ended_ends_once(how):
    cache, new = cache_of("float32")[0], np.ones((3, HEADS, DIM), np.float32)
    seq, other = cache.blocks.add(), cache.blocks.add()
    free = cache.blocks.available
    with cache.begin_step([(seq, 3)]) as step:
        for layer in range(LAYERS):
            step.update(new, new, layer)
        getattr(step, how)()
    with cache.blocks.begin_step([(other, 3)]) as index:
        getattr(index, how)()
    stored = 3 * (how == "commit")
    assert (seq.length, other.length) == (stored, stored)
    assert cache.blocks.available == free - (2 if stored else 0)
    index = cache.blocks.begin_step([(other, 3)])
    index.abandon()
    index.__exit__(ValueError, ValueError(), None)  # the error of the block goes on
    assert cache.blocks.open_step is None
