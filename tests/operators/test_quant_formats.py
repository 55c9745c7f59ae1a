"""Caches of floats of 8 bits and of ggml's blocks: what they hold and return, and attention over them."""

import numpy as np
import pytest
from quant_format_scenes import BAD, CASES, HEADS, SLOW, B, D, H, bad_call, empty, normal

import kvkit
from kvkit import KvkitError, formats
from kvkit.dynamic_batching import plan
from kvkit.formats.elements import BY_NAME
from kvkit.reference.attention import attend_sequence

pytestmark = pytest.mark.cpu

cases = pytest.mark.parametrize(("name", "shared"), [*CASES, *SLOW])


def encoded(x, side, name, shared, scale):
    """(codes, numbers) of tokens [.., H, D] of one side."""
    given = {None: None}.get(shared, "group") if not isinstance(shared, str) else scale[side]
    arrays = formats.encode(x, name, scale=given, **({"group": shared} if isinstance(shared, int) else {}))
    return arrays["codes"], formats.decode(arrays, name)


@cases
def test_what_is_stored_and_returned(rng, name, shared):
    cache, scale, how = empty(name, shared, rng)
    new = normal(rng, B, 7, H, D), normal(rng, B, 7, H, D)
    returned = kvkit.key_value_cache(*new, 3, cache, scale, **how)
    for side in (0, 1):
        codes, numbers = encoded(new[side], side, name, shared, scale)
        np.testing.assert_array_equal(cache[:, 0, side, 3:10], codes)
        np.testing.assert_array_equal(returned[side][:, 3:], numbers.astype(np.float16))
    assert not cache[:, :, :, 10:].any()


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_what_is_not_finite_stays_in_its_block(rng, name):
    """An infinity makes the scale of its block infinite; NaN is stored as some number."""
    for bad in (np.nan, np.inf):
        x = normal(rng, 1, 1, H, D)
        expected = formats.encode(x, name)["codes"]
        x[..., 3] = bad
        cache = np.zeros((1, 1, 2, 1, H, BY_NAME[name].bytes(D)), np.uint8)
        kvkit.key_value_cache(x, x, 0, cache, None, quant_format=name)
        own, other = np.split(cache[:, 0, 0], 2, -1)
        np.testing.assert_array_equal(other, np.split(expected, 2, -1)[1])
        assert np.isfinite(own[..., :2].view(np.float16)).all() == np.isnan(bad)
        if name == "q8_0" and np.isnan(bad):
            assert not own[..., 2 + 3].any()


@cases
@pytest.mark.parametrize("tokens", [1, 20])
def test_attention(rng, name, shared, tokens):
    """Over codes x scale in float32: of one query token in place, of many over what is widened."""
    cache, scale, how = empty(name, shared, rng)
    past = normal(rng, B, 17, H, D), normal(rng, B, 17, H, D)
    new = normal(rng, B, tokens, H, D), normal(rng, B, tokens, H, D)
    kvkit.key_value_cache(*past, 0, cache, scale, **how)
    query = normal(rng, B, tokens, HEADS, D)
    sizes = {"num_heads": HEADS, "num_kv_heads": H, "head_dim": D}
    got = kvkit.multi_head_cache_attention(query, *new, 17, cache, scale, **sizes, **how)
    for b in range(B):
        whole = (np.concatenate((past[side][b], new[side][b])) for side in (0, 1))
        keys, values = (encoded(x, side, name, shared, scale)[1] for side, x in enumerate(whole))
        expected, _ = attend_sequence(query[b], keys, values)
        size = np.maximum(1, np.abs(expected))
        assert (np.abs(got[b] - expected) <= 2e-3 * size).all()


def test_a_plan_of_pages_repeats(rng):
    """The same numbers through a page table, made again for the next layer."""
    scale = rng.uniform(0.5, 2, (2, H)).astype(np.float32)
    caches = np.zeros((2, 16, 1, 2, H, D), np.uint8)
    table, starts = np.array([[4, 12, 0, 8]]), np.array([0, 9])
    step = plan(starts, starts, table, np.array([0]), cache_mode=1, page_size=4)
    new = normal(rng, 9, H, D), normal(rng, 9, H, D)
    for cache in caches:
        for _ in range(2):
            key, value = step.key_value_cache(*new, cache, scale, quant_format="e4m3")
        for side, returned in enumerate((key, value)):
            codes, numbers = encoded(new[side], side, "e4m3", "head", scale)
            np.testing.assert_array_equal(returned, numbers.astype(np.float16))
            np.testing.assert_array_equal(cache[[4, 5, 6, 7, 12, 13, 14, 15, 0], 0, side], codes)
    np.testing.assert_array_equal(*caches)


def test_scales_that_change_between_runs(rng):
    """A prepared call reads the scales of its time, wherever they lie then."""
    sizes = {"num_heads": HEADS, "num_kv_heads": H, "head_dim": D, "quant_format": "e4m3"}
    starts, zero = np.array([0, 5]), np.array([0])
    step = plan(starts, starts, np.array([0]), zero)
    new, query = [normal(rng, 5, H, D) for _ in "kv"], normal(rng, 5, HEADS, D)
    scales = [rng.uniform(0.5, 2, (2, H)).astype(np.float32) for _ in range(2)]
    for scale in (*scales, scales[1]):
        cache = np.zeros((5, 1, 2, H, D), np.uint8)
        got = step.multi_head_cache_attention(query, *new, cache, scale, **sizes)
        keys, values = (encoded(x, side, "e4m3", "head", scale)[1] for side, x in enumerate(new))
        assert np.abs(got - attend_sequence(query, keys, values)[0]).max() < 4e-3
        scale *= np.float32(0.7)


@pytest.mark.parametrize("what", BAD)
def test_refused(what, rng):
    given, message = bad_call(what, rng)
    with pytest.raises(KvkitError, match=message):
        kvkit.key_value_cache(**given)
