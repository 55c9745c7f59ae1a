"""Rows of one length in a paged cache: what other caches do, in blocks."""

import copy

import numpy as np
import pytest
from paged_scenes import P, numbered, refused

from kvkit import formats
from kvkit.cache import KVView, PagedCache, load
from kvkit.reference import attention as attention_reference
from kvkit.reference import key_value_cache as reference


def normal(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


# Updates


@pytest.mark.parametrize("layout", range(4))
@pytest.mark.parametrize("bit", [0, 8])
def test_updates_give_all_tokens_back(layout, bit, rng):
    """Through as many layers as there are; lengths and mask sizes are those of each layer."""
    cache = PagedCache(16, P, 3, 2, 8, np.float32, quant_bit=bit, cache_layout=layout)
    whole = [[np.zeros((2, 2, 0, 8), np.float32)] * 2 for _ in range(3)]
    length = 0
    for new in (5, 1, 0, 1, 9):
        for i in range(3):
            states = [normal(rng, 2, 2, new, 8) for _ in range(2)]
            assert cache.get_mask_sizes(new, i) == (length + new, 0)
            views = cache.update(*states, i, None if i else np.arange(length, length + new))
            assert [cache.get_seq_length(j) for j in range(4)] == [
                length + new if j <= i else length if j < 3 else 0 for j in range(4)
            ]
            for side in (0, 1):
                whole[i][side] = np.concatenate([whole[i][side], states[side]], axis=2)
                view, want = views[side], whole[i][side]
                if bit:
                    want = np.array([stored(head) for head in want.reshape(-1, 8)]).reshape(want.shape)
                assert isinstance(view, KVView)
                assert (view.shape, view.dtype) == (want.shape, np.float32)
                np.testing.assert_array_equal(np.asarray(view), want)
                np.testing.assert_array_equal((cache.layers[i].keys, cache.layers[i].values)[side], want)
        length += new
    assert cache.get_max_length() == cache.layers[0].get_max_length() == -1
    assert len(cache) == len(cache.to_legacy_cache()) == 3
    np.testing.assert_array_equal(cache.to_legacy_cache()[2][1], cache.layers[2].values)


def stored(head):
    codes, scales = reference.quantize_head(head, 8, 8)
    return reference.dequantize_head(codes, scales.astype(np.float16), 8, np.dtype(np.float32))


SCALES = {"sides": [0.01, 0.02], "heads": [[[0.01, 0.02], [0.03, 0.04]]]}


@pytest.mark.parametrize("name", ["e4m3", "q8_0", "sides", "heads", "found"])
def test_formats(name, rng, tmp_path):
    """What comes back is what numpy makes of the format; files, copies and forks keep it."""
    how = {"scale": SCALES.get(name, name), "quant_group": 32, "scale_dtype": np.float32}
    shared, name, how = (None, name, {}) if name in ("e4m3", "q8_0") else (name, "e4m3", how)
    cache = PagedCache(16, P, 1, 2, 32, np.float16, quant_format=name, **how)
    states = [normal(rng, 2, 2, 7, 32, dtype=np.float16) for _ in range(2)]
    wanted = []
    for i, side in enumerate(states):  # [B, H, tokens, D]: scales of a token's head
        scale = {None: None, "found": "token"}.get(shared, SCALES.get(shared))
        if shared in SCALES:
            of_side = np.float32(scale).reshape(2, -1)[i]
            scale = np.ascontiguousarray(np.broadcast_to(of_side[:, None], (2, 2, 7)))
        arrays = formats.encode(side.astype(np.float32), name, scale=scale)
        wanted.append(formats.decode(arrays, name).astype(np.float16))
    for view, want in zip(cache.update(*states, 0), wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(view), want)
    cache.save(tmp_path / "cache.npz")
    query = normal(rng, 2, 4, 1, 32, dtype=np.float16)
    output = cache.attend(query, 0)
    for again in (load(tmp_path / "cache.npz"), copy.deepcopy(cache)):
        np.testing.assert_array_equal(again.attend(query, 0), output)
    cache.select([1, 0])
    np.testing.assert_array_equal(cache.layers[0].keys, wanted[0][[1, 0]])


def test_views_become_arrays(rng):
    cache = PagedCache(4, P, 1, 1, 4, np.float16)
    key = normal(rng, 1, 1, 3, 4, dtype=np.float16)
    keys, values = cache.update(key, 2 * key, 0)
    assert np.asarray(keys).flags.c_contiguous
    np.testing.assert_array_equal(np.asarray(values, np.float32), 2 * key.astype(np.float32))
    np.testing.assert_array_equal(np.concatenate([keys, values], axis=2)[:, :, :3], key)
    with pytest.raises(ValueError, match="copy"):
        np.asarray(keys, copy=False)


def test_views_are_valid_until_their_layer_changes():
    cache = PagedCache(8, 2, 2, 1, 1, np.float32)
    views = [cache.update(numbered(1, 2, 3), numbered(1, 2, 3), i)[0] for i in (0, 1)]
    cache.update(numbered(4), numbered(4), 0)
    assert np.asarray(views[1]).ravel().tolist() == [1, 2, 3]
    assert "an older one" in refused(np.asarray, views[0])
    view = cache.update(numbered(4), numbered(4), 1)[0]
    assert "an older one" in refused(np.asarray, views[1])
    assert np.asarray(view).ravel().tolist() == [1, 2, 3, 4]
    cache.crop(-1)
    assert "an older one" in refused(np.asarray, view)


def test_states_of_any_strides(rng):
    cache, other = (PagedCache(8, P, 1, 2, 8, np.float32) for _ in range(2))
    fused = normal(rng, 2, 5, 3, 2, 8)  # [B, q, (query, key, value), heads, dim]
    key, value = fused[:, :, 1].swapaxes(1, 2), fused[:, :, 2].swapaxes(1, 2)
    cache.update(key, value, 0)
    other.update(np.ascontiguousarray(key), np.asfortranarray(value), 0)
    np.testing.assert_array_equal(cache.cache, other.cache)
    np.testing.assert_array_equal(cache.layers[0].keys, key)


# Attention


@pytest.mark.parametrize(
    "options",
    [{}, {"window": (2, 0)}, {"softmax_scale": 0.4, "softcap": 3.0}, {"sinks": True}, {"padding": True}],
    ids=lambda options: "-".join(options),
)
def test_attend(options, rng):
    """Against loops in float64."""
    options = dict(options)
    cache = PagedCache(16, P, 2, 2, 8, np.float32)
    if "sinks" in options:
        options["sinks"] = rng.standard_normal(4).astype(np.float32)
    padded = options.pop("padding", False)
    length = 0
    for new in (6, 1, 3):
        length += new
        mask = np.ones((2, length), bool)
        mask[0, :2] = not padded
        for i in range(2):
            keys, values = cache.update(normal(rng, 2, 2, new, 8), normal(rng, 2, 2, new, 8), i)
            for last in {1, new}:  # an update's last queries alone are as good
                query = normal(rng, 2, 4, last, 8)
                given = mask if padded else None
                output, lse = cache.attend(query, i, given, return_lse=True, **options)
                assert output.shape == query.shape
                for b in range(2):
                    sides = [np.asarray(side)[b].swapaxes(0, 1) for side in (keys, values)]
                    grid = np.broadcast_to(mask[b], (4, last, length)) if padded else None
                    want, want_lse = attention_reference.attend_sequence(
                        query[b].swapaxes(0, 1),
                        *sides,
                        grid,
                        causal=True,
                        **options,
                    )
                    seen = np.isfinite(want_lse)
                    np.testing.assert_allclose(output[b].swapaxes(0, 1), want, atol=2e-6)
                    np.testing.assert_allclose(lse[b].T[seen], want_lse[seen], atol=2e-6)
                if padded:
                    wide = np.broadcast_to(mask[:, None, None], (2, 4, last, length))
                    np.testing.assert_array_equal(cache.attend(query, i, wide, **options), output)


def test_attend_refuses(rng):
    cache = PagedCache(16, P, 2, 2, 8, np.float32)
    layer, key = cache.layers[0], normal(rng, 2, 2, 3, 8)
    query = normal(rng, 2, 4, 3, 8)
    assert refused(layer.attend, query).startswith("layer: expected keys and values")
    layer.update(key, key)
    wrong = [query[:1], query[:, :3], query[..., :4], query[0], query.astype(np.float16), query.tolist()]
    for array in [*wrong, np.zeros((2, 4, 4, 8), np.float32)]:
        assert refused(layer.attend, array).startswith("query: expected ")
    for mask in (np.ones((2, 2), bool), np.ones((3, 3), bool), np.zeros((2, 3), np.float32), [1]):
        assert "mask: expected " in refused(layer.attend, query, mask)
    assert "at most 0 tokens" in refused(cache.attend, query, 1)
    assert refused(cache.attend, query, 2).startswith("layer_idx: ")
    cache.reset()
    assert refused(layer.attend, query).startswith("layer: ")


def test_attend_after_anything(rng):
    """The last tokens of each layer may attend whenever there are some."""
    cache, other = (PagedCache(16, P, 2, 2, 8, np.float32) for _ in range(2))
    key, query = normal(rng, 2, 2, 7, 8), normal(rng, 2, 4, 2, 8)
    for i in (0, 1):
        cache.update(key, key, i)
        other.update(key[:, :, :5], key[:, :, :5], i)
    whole, short = cache.attend(query, 0), other.attend(query, 0)
    cache.reserve(9)
    np.testing.assert_array_equal(cache.attend(query, 1), whole)
    cache.update(key, key, 0)
    np.testing.assert_array_equal(cache.attend(query, 1), whole)
    cache.crop(5)
    np.testing.assert_array_equal(cache.attend(query, 0), short)
    cache.reorder([1, 0, 0])
    np.testing.assert_array_equal(cache.attend(query[[1, 0, 0]], 1), short[[1, 0, 0]])
