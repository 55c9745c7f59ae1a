"""Attention over what a layer has stored, against loops in float64 over all tokens it has seen."""

import ml_dtypes
import numpy as np
import pytest
from attention_scenes import TOLERANCE, assert_near
from cache_model import KINDS, WINDOWS, Model, tokens_of

import kvkit
from kvkit.cache import (
    Cache,
    ChunkedLayer,
    DynamicLayer,
    SlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from kvkit.cache.layers.chunked import StaticChunkedLayer

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = np.dtype(np.float32), np.dtype(np.float16), BF16
WINDOW, MAX = 7, 40
any_kind = pytest.mark.parametrize("kind", KINDS)


class Pair:
    """Holds a layer and its model: batch 2, 2 key heads of 16, values of 24, 3 query heads for each."""

    def __init__(self, kind, dtype=np.float32, seed=0):
        self.layer = {
            "dynamic": DynamicLayer,
            "sliding": lambda: SlidingWindowLayer(WINDOW),
            "chunked": lambda: ChunkedLayer(WINDOW),
            "static": lambda: StaticLayer(MAX),
            "static sliding": lambda: StaticSlidingWindowLayer(MAX, WINDOW),
            "static chunked": lambda: StaticChunkedLayer(MAX, WINDOW),
        }[kind]()
        self.model = Model(kind, WINDOW if kind in WINDOWS else None, MAX)
        self.dtype, self.rng = np.dtype(dtype), np.random.default_rng(seed)

    def random(self, *shape):
        return self.rng.standard_normal(shape).astype(self.dtype)

    def update(self, count):
        keys, values = self.random(2, 2, count, 16), self.random(2, 2, count, 24)
        self.model.update(tokens_of(keys, values))
        return self.layer.update(keys, values)

    def check(self, query, mask=None, expected_mask=None, **options):
        """`expected_mask` [2, 6, q, n] if it is not the mask itself."""
        got, lse = self.layer.attend(query, mask, return_lse=True, **options)
        seen = mask if expected_mask is None else expected_mask
        expected, expected_lse = self.model.attend(query, seen, **options)
        assert got.dtype == query.dtype
        assert lse.dtype == np.float32
        assert_near(got, expected, TOLERANCE[str(query.dtype)])
        assert_near(lse, expected_lse, TOLERANCE["float32"], "lse")
        alone = self.layer.attend(query, mask, **options)
        assert alone.tobytes() == got.tobytes()
        return got


@any_kind
@pytest.mark.parametrize("q", [1, 5])
def test_padding_mask(kind, q):
    """[B, n], left padding and holes; a static layer also takes the columns that hold no token."""
    pair = Pair(kind)
    for _ in range(4):
        pair.update(q)
        n = len(pair.model)
        mask = pair.rng.random((2, n)) < 0.7
        mask[1, : n // 2] = False
        mask[:, -1] = True
        expected = np.broadcast_to(mask[:, None, None], (2, 6, q, n))
        query = pair.random(2, 6, q, 16)
        got = pair.check(query, mask, expected)
        pair.check(query, np.asfortranarray(mask), expected)
        if kind == "static":
            longer = np.pad(mask, ((0, 0), (0, MAX - n)), constant_values=True)
            assert pair.layer.attend(query, longer).tobytes() == got.tobytes()


def test_a_query_that_sees_nothing():
    pair = Pair("dynamic")
    pair.update(3)
    got, lse = pair.layer.attend(pair.random(2, 6, 3, 16), np.zeros((2, 3), bool), return_lse=True)
    assert not got.any()
    assert (lse == -np.inf).all()


@any_kind
@pytest.mark.parametrize("form", ["bool", "additive", "one head", "one row", "one of all"])
def test_mask_of_four_axes(kind, form):
    """Its columns are the keys that the update returned, as get_mask_sizes has said."""
    pair = Pair(kind)
    pair.model.padding = False
    for q in (5, 1, 9, 1, 3):
        length, offset = pair.layer.get_mask_sizes(q)
        pair.update(q)
        n = len(pair.model)
        sizes = {"one head": (2, 1, q), "one row": (1, 6, 1), "one of all": (1, 1, 1)}.get(form, (2, 6, q))
        mask = pair.rng.random((*sizes, length)) < 0.8
        if form == "additive":
            mask = np.where(mask, pair.random(*mask.shape), np.float32(-np.inf))
        whole = np.zeros((*sizes, n), mask.dtype)
        whole[..., offset:] = mask[..., : n - offset]
        pair.check(pair.random(2, 6, q, 16), mask, np.broadcast_to(whole, (2, 6, q, n)))


@any_kind
@pytest.mark.parametrize("stored", DTYPES, ids=str)
@pytest.mark.parametrize("asked", DTYPES, ids=str)
def test_queries_of_another_type(kind, stored, asked):
    pair = Pair(kind, stored)
    for count in (9, 1):
        pair.update(count)
        pair.check(pair.random(2, 6, count, 16).astype(asked))


@any_kind
def test_queries_of_any_strides(kind):
    pair = Pair(kind)
    for count in (9, 1, 1):
        pair.update(count)
        fused = pair.random(2, count, 3, 6, 32)
        for query in (
            fused[:, :, 1, :, :16].swapaxes(1, 2),
            fused[::-1, :, 2, ::-1, 16:].swapaxes(1, 2),
            fused[:, :, 0, :, ::2].swapaxes(1, 2),
            np.broadcast_to(pair.random(1, 1, 1, 16), (2, 6, count, 16)),
        ):
            got = pair.check(query)
            assert got.tobytes() == pair.layer.attend(query.copy()).tobytes()


@any_kind
def test_the_next_projection_copies_nothing(kind):
    pair = Pair(kind)
    pair.update(9)
    joined = pair.layer.attend(pair.random(2, 6, 9, 16)).swapaxes(1, 2).reshape(2, 9, 6 * 24)
    assert joined.base is not None


def test_prepared_calls_are_as_good_as_fresh_ones():
    """Token by token through 1,400 positions, where work comes to be shared out anew: the same bytes."""
    one, rng = DynamicLayer(), np.random.default_rng(0)
    tokens = rng.standard_normal((2, 1, 4, 1400, 32)).astype(np.float16)
    queries = rng.standard_normal((1, 8, 1400, 32)).astype(np.float16)
    for i in range(1400):
        one.update(*tokens[:, :, :, i : i + 1])
        got = one.attend(queries[:, :, i : i + 1])
        if i % 50 == 0 or i in (510, 511, 512, 513, 1023, 1024, 1025):
            fresh = DynamicLayer()
            fresh.update(*tokens[:, :, :, : i + 1])
            assert fresh.attend(queries[:, :, i : i + 1]).tobytes() == got.tobytes()


OPTIONS = (
    {},
    {"softmax_scale": 0.7},
    {"softcap": 2.0},
    {"sinks": np.linspace(-1, 2, 6).astype(np.float32)},
    {},
)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "chunked" not in kind])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_the_operator(kind, dtype):
    """Bit for bit what it gives for the keys and values that were returned; options change between calls.

    Operators have no chunks.
    """
    pair = Pair(kind, dtype)
    window = (WINDOW - 1, -1) if "sliding" in kind else (-1, -1)
    for count in (3, 1, 1, 1, 4, 1, 11, 2, 1):
        keys, values = pair.update(count)
        filled = min(keys.shape[2], len(pair.model))
        sides = [side[:, :, :filled].swapaxes(1, 2) for side in (keys, values)]
        for options in OPTIONS:
            query = pair.random(2, 6, count, 16)
            whole = pair.check(query, **options)
            expected = kvkit.multi_head_attention(
                query.swapaxes(1, 2), *sides, num_heads=6, head_dim=16, num_kv_heads=2, window=window,
                **options,
            )  # fmt: skip
            assert whole.swapaxes(1, 2).tobytes() == expected.tobytes()
            assert_near(
                pair.check(query[:, :, -1:], **options), whole[:, :, -1:], TOLERANCE[str(query.dtype)]
            )


# What is no longer there


@pytest.mark.parametrize("kind", ["sliding", "static sliding"])
def test_a_window_that_has_left_the_layer(kind):
    """Another layer's update takes back what only the first queries of a long call could see."""
    cache = Cache([Pair(kind).layer, Pair(kind).layer])
    pair = Pair(kind)
    pair.layer = cache.layers[0]
    keys, values = pair.random(2, 2, 200, 16), pair.random(2, 2, 200, 24)
    pair.model.update(tokens_of(keys, values))
    cache.update(keys, values, 0)
    query = pair.random(2, 6, 200, 16)
    pair.check(query)
    cache.update(pair.random(2, 2, 1, 16), pair.random(2, 2, 1, 24), 1)
    pair.check(query[:, :, -1:])
    with pytest.raises(
        kvkit.KvkitError, match=r"query: expected queries of the last tokens, whose windows layers\[0\]"
    ):
        pair.layer.attend(query)
    pair.update(1)
    pair.check(query[:, :, -1:])
