"""Attention over chunks of dask arrays, beside the same on one machine."""

import numpy as np
import pytest

import kvkit
from kvkit.errors import KvkitError

da = pytest.importorskip("dask.array")
distributed = pytest.importorskip("distributed")

from kvkit.integrations.dask import attend, partial_attention  # noqa: E402

pytestmark = pytest.mark.cpu

BATCH, HEADS, GROUP, DIM = 2, 3, 2, 16


@pytest.fixture(scope="module")
def client():
    """Yield a client of three workers in threads of this process."""
    with distributed.Client(
        processes=False, n_workers=3, threads_per_worker=1, dashboard_address=":0"
    ) as client:
        yield client


def states(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


CALLS = {
    "causal": {}, "all": {"is_causal": False}, "window": {"window": (5, 0)},
    "both sides": {"is_causal": False, "window": (3, 2)}, "alibi": {"is_alibi": True},
    "alibi in a window": {"is_alibi": True, "window": (6, -1)},
    "softcap and scale": {"softcap": 2.0, "softmax_scale": 0.7},
}  # fmt: skip
CHUNKS = {
    "tokens": (2, (10, 0, 1, 30), 3, 16),
    "all": (1, 7, 1, 16),
    "heads": (2, 41, (1, 2), 16),
    "none at first": (2, (0, 41), 3, 8),
}


@pytest.mark.parametrize(
    ("options", "chunks"),
    [
        *((name, "tokens") for name in CALLS),
        *(("alibi in a window", name) for name in CHUNKS if name != "tokens"),
    ],
)
def test_attention_over_chunks(rng, options, chunks):
    options, chunks = CALLS[options], CHUNKS[chunks]
    query = states(rng, BATCH, 7, HEADS * GROUP, DIM)
    key, value = (states(rng, BATCH, 41, HEADS, dim) for dim in (DIM, 24))
    sinks = states(rng, HEADS * GROUP)
    mask = rng.random((BATCH, 1, 7, 41)) > 0.2
    sizes = {"num_heads": HEADS * GROUP, "head_dim": DIM, "num_kv_heads": HEADS}
    expected = kvkit.multi_head_attention(
        query, key, value, mask, sinks=sinks, return_lse=True, **sizes, **options
    )
    chunked = da.from_array(query, chunks=(1, 3, -1, -1)), da.from_array(key, chunks=chunks)
    lazy = attend(*chunked, value, mask, sinks=sinks, return_lse=True, **options)
    found = [array.compute(scheduler="sync") for array in lazy]
    for one, other in zip(found, expected, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_allclose(one, other, atol=2e-6)


def test_queries_before_a_chunk_see_nothing_of_it(rng):
    """And are no NaN, which (-inf) - (-inf) would be."""
    query, key = states(rng, 1, 4, 1, 8), states(rng, 1, 3, 1, 8)
    out, lse = partial_attention.attend_part(query, key, key, query_start=0, key_start=9)
    assert not out.any()
    assert np.isneginf(lse).all()
    lonely = attend(query, da.from_array(key[:, :2], chunks=1), key[:, :2], return_lse=True)
    out, lse = (array.compute(scheduler="sync") for array in lonely)
    assert not out[:, :2].any()
    assert np.isneginf(lse[:, :2]).all()
    assert np.isfinite(lse[:, 2:]).all()


def test_chunks_give_the_same_bits_on_any_workers(rng, client):
    query, key = states(rng, 1, 5, 4, DIM), da.from_array(states(rng, 1, 300, 2, DIM), chunks=(1, 17, 2, DIM))
    lazy = attend(query, key, key)
    alone = lazy.compute(scheduler="sync")
    for _ in range(3):
        np.testing.assert_array_equal(lazy.compute(scheduler=client), alone)


UNFIT = [
    ("query", np.zeros((1, 1, 3, 8), np.float32)), ("query", np.zeros((1, 1, 4, 8))),
    ("value", np.zeros((1, 4, 2, 8), np.float32)), ("key", np.zeros((1, 5, 2, 8), np.float32)),
    ("attn_mask", np.zeros((1, 4), bool)), ("attn_mask", np.zeros((1, 5), np.int32)), ("window", 5),
    ("window", (-5, 0)), ("softcap", -1.0), ("sinks", np.zeros(3, np.float32)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change"), UNFIT)
def test_arrays_that_do_not_fit(name, change):
    key = da.zeros((1, 5, 2, 8), dtype=np.float32)
    given = {"query": np.zeros((1, 1, 4, 8), np.float32), "key": key, "value": key}
    with pytest.raises(KvkitError, match=f"^{name}: expected "):
        attend(**given | {name: change})


def test_chunks_of_unknown_sizes():
    key = da.zeros((1, 5, 2, 8), dtype=np.float32)
    some = key[:, key[0, :, 0, 0] > 0]
    with pytest.raises(KvkitError, match=r"^key: expected chunks of known sizes"):
        attend(np.zeros((1, 1, 4, 8), np.float32), some, some)
