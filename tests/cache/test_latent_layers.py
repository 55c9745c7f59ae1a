"""Layers of latent rows: attention against float64 over rows, which move, are saved and are chosen."""

import copy

import ml_dtypes
import numpy as np
import pytest

import kvkit
from kvkit import KvkitError
from kvkit.cache import Cache, IndexedLayer, LatentLayer, load
from kvkit.cache.layers import kinds

LATENT, ROPE, INDEX, SCALE = 32, 8, 16, 0.3
rng = np.random.default_rng(0)
KINDS = {
    "latent": (lambda: LatentLayer(LATENT, ROPE), 0),
    "indexed": (lambda: IndexedLayer(LatentLayer(LATENT, ROPE), INDEX), 0),
    "ds_mla": (lambda: LatentLayer(512, 64, "ds_mla"), 0.2),
}


def states(*shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


def filled(cache, steps, dtype=np.float32):
    """Give tokens to a cache of one layer; return their rows."""
    layer, rows = cache.layers[0], []
    for tokens in steps:
        latent, kpe = (states(2, 1, tokens, dim, dtype=dtype) for dim in (layer.latent_dim, layer.rope_dim))
        rows.append(np.concatenate((latent, kpe), axis=3))
        keys, values = cache.update(latent, kpe, 0)
        if layer.index_dim:
            layer.update_index(states(2, tokens, INDEX, dtype=dtype))
    assert (np.asarray(keys).shape[3], np.asarray(values).shape[3]) == (
        layer.latent_dim + layer.rope_dim, layer.latent_dim
    )  # fmt: skip
    return np.concatenate(rows, axis=2)


def attended(rows, query, dim, visible=True):
    """Attend in float64; queries are the last tokens."""
    new, count = query.shape[2], rows.shape[2]
    causal = np.arange(count) <= count - new + np.arange(new)[:, None]
    scores = np.einsum("bhqd,btd->bhqt", query.astype(np.float64), rows[:, 0].astype(np.float64)) * SCALE
    scores = np.where(causal & visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=3, keepdims=True))
    weights /= weights.sum(axis=3, keepdims=True)
    return np.einsum("bhqt,btd->bhqd", weights, rows[:, 0, :, :dim].astype(np.float64))


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


def test_rows_are_attended_to_move_and_are_saved(kind, tmp_path):
    make, error = kind
    cache = Cache([make()])
    layer, rows = cache.layers[0], filled(cache, (9, 1, 3))
    stored = np.array(layer.keys)
    np.testing.assert_allclose(stored, rows, atol=error)
    assert np.shares_memory(layer.keys, layer.values) == (error == 0)
    assert layer.nbytes <= rows.nbytes + 4 * INDEX * rows[..., 0].size * bool(layer.index_dim)
    query = states(2, 4, 2, layer.latent_dim + layer.rope_dim)
    parts = query[..., : layer.latent_dim], query[..., layer.latent_dim :]
    padding = np.arange(13) >= np.array([[3], [0]])
    wanted = attended(stored, query, layer.latent_dim, padding[:, None, None])
    np.testing.assert_allclose(cache.attend(parts, 0, padding, softmax_scale=SCALE), wanted, atol=1e-5)
    sinks = np.full(4, 0.5, np.float32)
    output, lse = layer.attend(*parts, softmax_scale=SCALE, sinks=sinks, return_lse=True)
    share = 1 - np.exp(0.5 - lse.astype(np.float64))
    plain = attended(stored, query, layer.latent_dim)
    np.testing.assert_allclose(output, plain * share[..., None], atol=1e-5)

    cache.remove(2, 5)
    cache.reorder([1, 0])
    cache.crop(-1)
    left = np.delete(stored, [2, 3, 4, 12], axis=2)[::-1]
    np.testing.assert_array_equal(layer.keys, left)
    cache.save(tmp_path / "cache.npz")
    for other in (load(tmp_path / "cache.npz"), copy.deepcopy(cache)):
        assert other.layers[0].positions.tolist() == [0, 1, 5, 6, 7, 8, 9, 10, 11]
        np.testing.assert_array_equal(other.layers[0].keys, left)
        more = filled(other, (2,))
        np.testing.assert_allclose(other.layers[0].keys[:, :, 9:], more, atol=error)
        other.crop(-2)
        wanted = attended(left[[0, 0, 1, 1]], query[[0, 0, 1, 1]], layer.latent_dim)
        other.repeat(2)
        found = other.attend(tuple(part[[0, 0, 1, 1]] for part in parts), 0, softmax_scale=SCALE)
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_many_rows_of_codes_are_decoded_in_pieces(monkeypatch):
    layer = LatentLayer(512, 64, "ds_mla")
    cache = Cache([layer])
    filled(cache, (50, 1))
    query = np.float32(0.2) * states(2, 4, 3, 512 + 64)  # scores as those of small heads
    monkeypatch.setattr("kvkit.cache.layers.latent.ROWS", 16)
    found = layer.attend(query, softmax_scale=SCALE)
    np.testing.assert_allclose(found, attended(layer.keys, query, 512), atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_shifted_rows_are_rotated_behind_their_latent_part(dtype):
    """The rope of the rotated part is placed behind the latent one."""
    cache = Cache([LatentLayer(LATENT, ROPE)], rope=kvkit.Rope(ROPE, interleaved=True))
    rows = filled(cache, (8, 1, 1), dtype)
    cache.remove(2, 5, close=True)
    left = np.delete(rows, [2, 3, 4], axis=2).astype(np.float64)
    left[:, :, 2:, LATENT:] = kvkit.Rope(ROPE, interleaved=True).shift(left[:, :, 2:, LATENT:], -3)
    query = states(2, 4, 1, LATENT + ROPE, dtype=dtype)
    wanted = attended(left, query, LATENT)
    atol = {2: 0.02, 4: 1e-5}[np.dtype(dtype).itemsize]
    found = cache.attend((query,), 0, softmax_scale=SCALE).astype(np.float64)
    np.testing.assert_allclose(found, wanted, atol=atol)
    cache.flatten()
    np.testing.assert_allclose(cache.layers[0].keys.astype(np.float64), left, atol=atol)
    assert cache.layers[0].rope_shifts.tolist() == [[0, 7, 0]]


def test_chosen_rows_are_those_of_the_indexer():
    cache = Cache([IndexedLayer(LatentLayer(LATENT, ROPE), INDEX)])
    layer, rows = cache.layers[0], filled(cache, (12, 1, 2))
    query, weights = states(2, 2, 3, INDEX), states(2, 2, 3)
    chosen = layer.best_rows(query, weights, k=4)
    keys = layer.index_keys.copy()
    scores = np.einsum("bqh,bqht->bqt", weights, np.maximum(np.einsum("bqhd,btd->bqht", query, keys), 0))
    scores[:, 0, 14] = -np.inf
    best = np.sort(np.argsort(-scores, axis=2, kind="stable")[..., :4], axis=2)
    np.testing.assert_array_equal(chosen, best)
    heads = states(2, 5, 2, LATENT + ROPE)
    seen = (np.arange(15) == chosen[..., None]).any(axis=2)  # [B, q, rows]
    found, lse = layer.attend(heads, softmax_scale=SCALE, indices=chosen, return_lse=True)
    np.testing.assert_allclose(found, attended(rows, heads, LATENT, seen[:, None]), atol=1e-5)
    assert lse.shape == (2, 5, 2)
    none = layer.attend(heads, softmax_scale=SCALE, indices=np.full((2, 2, 3), -1))
    assert not none.any()
    assert (layer.best_rows(query, weights, k=20) >= 0).sum(axis=2).tolist() == [[14, 15]] * 2
    cache.remove(0, 3)
    np.testing.assert_array_equal(layer.index_keys, keys[:, 3:])


def test_what_is_refused():
    layer = LatentLayer(LATENT, ROPE)
    latent, kpe = states(1, 1, 2, LATENT), states(1, 1, 2, ROPE)
    for call, message in (
        (lambda: layer.update(latent[..., 1:], kpe), r"latent: expected shape .* = \[any, 1, any, 32\]"),
        (lambda: layer.update(latent, kpe[:, :, 1:]), r"kpe: expected \(1, 1, 2, 8\) of float32"),
        (lambda: layer.attend(latent, kpe, softmax_scale=0), "softmax_scale"),
        (
            lambda: layer.attend(latent[..., 1:], states(1, 1, 2, ROPE + 1), softmax_scale=1),
            r"q_pe: expected .* 2, 8\)",
        ),
        (lambda: layer.attend(latent, kpe, softmax_scale=1), "stored tokens"),
    ):
        with pytest.raises(KvkitError, match=message):
            call()
    assert layer.get_seq_length() == 0
    indexed = Cache([IndexedLayer(LatentLayer(LATENT, ROPE), INDEX)])
    with pytest.raises(KvkitError, match="stored tokens"):
        indexed.layers[0].best_rows(states(1, 1, 2, INDEX), states(1, 1, 2))
    with pytest.raises(KvkitError, match="stored tokens"):
        indexed.layers[0].update_index(states(1, 1, INDEX))
    filled(indexed, (4,))
    with pytest.raises(KvkitError, match=r"index_weights: expected \(2, 2, 2\)"):
        indexed.layers[0].best_rows(states(2, 2, 2, INDEX), states(2, 3, 2))
    with pytest.raises(KvkitError, match="the last queries of 2 sequences"):
        indexed.layers[0].best_rows(states(2, 0, 2, INDEX), states(2, 0, 2))
    with pytest.raises(KvkitError, match=r"\[batch, new tokens, dim\] = \[2, 4, "):
        indexed.layers[0].update_index(states(2, 3, INDEX))
    beyond = np.full((2, 1, 1), 4)
    with pytest.raises(KvkitError, match="numbers below 4"):
        indexed.layers[0].attend(states(2, 1, 1, LATENT + ROPE), softmax_scale=1, indices=beyond)
    assert "index keys are rotated" in indexed.can("shift", 0, None, 3, rope=kvkit.Rope(ROPE))
    assert indexed.can("shift", 0, None, 3, rope="none") is None
    coded = Cache([LatentLayer(512, 64, "ds_mla")])
    filled(coded, (4,))
    assert "codes cannot be rotated" in coded.can("shift", 0, None, 3, rope=kvkit.Rope(64))


def test_files_of_the_version_before_name_the_dtype_of_the_rotated_part():
    about = {"latent_dim": 512, "rope_dim": 64, "format": "ds_mla", "rope_dtype": "bfloat16"}
    layer = kinds.make_layer({"kind": "LatentLayer", "arguments": about})
    assert layer._describe() == {"latent_dim": 512, "rope_dim": 64, "format": "ds_mla"}


def test_coded_rows_may_be_none():
    layer = LatentLayer(512, 64, "ds_mla")
    layer.update(states(1, 1, 3, 512), states(1, 1, 3, 64))
    layer.update(states(1, 1, 0, 512), states(1, 1, 0, 64))
    assert layer.get_seq_length() == 3
    layer.crop(-3)
    assert layer._stored()[0].shape == (1, 1, 0, 576)
