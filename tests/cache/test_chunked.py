"""Layers that attend within chunks, against float64 in which each query sees its own chunk alone."""

import numpy as np
import pytest

from kvkit import KvkitError
from kvkit.cache import (
    Cache,
    ChunkedLayer,
    DynamicCache,
    DynamicLayer,
    QuantizedCache,
    StaticCache,
    StaticChunkedLayer,
    from_config,
)

N, TOKENS, HEADS, DIM = 8, 29, 2, 16
LLAMA4 = {
    "model_type": "llama4_text", "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": DIM, "hidden_size": 64, "rope_theta": 5e5, "attention_chunk_size": N,
    "no_rope_layers": [],
}  # fmt: skip


def states(rng, batch=2):
    q = rng.standard_normal((batch, 2 * HEADS, TOKENS, DIM)).astype(np.float32)
    return q, *rng.standard_normal((2, batch, HEADS, TOKENS, DIM)).astype(np.float32)


def exact(q, k, v, padding=(0, 0)):
    """Return (outputs, weights summed over queries) in float64."""
    i, j, heads = np.arange(TOKENS)[:, None], np.arange(TOKENS), np.arange(q.shape[1]) // 2
    outputs, sums = [], []
    for b, begin in enumerate(padding):
        seen = (j <= i) & ((j - begin) // N == (i - begin) // N) & (j >= begin)
        scores = q[b].astype(float) @ k[b, heads].swapaxes(1, 2) * DIM**-0.5
        weights = np.where(seen, np.exp(scores), 0)
        weights /= np.maximum(weights.sum(2, keepdims=True), 1e-300)
        outputs.append(weights @ v[b, heads])
        sums.append(weights.sum(1))
    return np.array(outputs), np.array(sums)


@pytest.mark.parametrize("split", [[TOKENS], [1] * TOKENS, [3, 5, 1, 12, 8], [N, N, N, 5], [20, 9]])
@pytest.mark.parametrize("make", [lambda: ChunkedLayer(N), lambda: StaticChunkedLayer(40, N)])
@pytest.mark.parametrize("padding", [None, (0, 0), (8, 8), (3, 3), (3, 14)])
def test_each_query_sees_its_own_chunk(rng, split, make, padding):
    q, k, v = states(rng)
    wanted, _ = exact(q, k, v, padding or (0, 0))
    layer, at = make(), 0
    for count in split:
        end = at + count
        layer.update(k[:, :, at:end], v[:, :, at:end])
        mask = None if padding is None else np.arange(end) >= np.array(padding)[:, None]
        found = layer.attend(q[:, :, at:end], mask)
        assert found.swapaxes(1, 2).flags.c_contiguous
        np.testing.assert_allclose(found, wanted[:, :, at:end], atol=3e-6)
        assert layer.stored_tokens <= N
        at = end


def test_weights_of_keys_and_lse(rng):
    q, k, v = states(rng)
    layer = ChunkedLayer(N)
    layer.update(k, v)
    output, lse, weights = layer.attend(q, return_lse=True, return_key_weights=True)
    wanted, sums = exact(q, k, v)
    np.testing.assert_allclose(output, wanted, atol=3e-6)
    np.testing.assert_allclose(weights, sums, atol=1e-5)
    assert lse.shape == q.shape[:3]
    assert layer.attend(q[:, :, :0]).shape == (2, 2 * HEADS, 0, DIM)


def test_caches_of_chunks_and_the_layers_of_a_configuration():
    types = ["chunked_attention", "full_attention"]
    made = {
        "dynamic": DynamicCache(layer_types=types, window=N),
        "static": StaticCache(40, 2, types, N),
        "quantized": QuantizedCache(layer_types=types, window=N),
    }
    assert [type(cache.layers[0]) for cache in made.values()] == [
        ChunkedLayer, StaticChunkedLayer, ChunkedLayer,
    ]  # fmt: skip
    with pytest.raises(KvkitError, match=r"^window: expected .* the size of chunks"):
        DynamicCache(layer_types=types)
    layers = from_config(LLAMA4).layers
    assert [type(layer) for layer in layers] == ([ChunkedLayer] * 3 + [DynamicLayer]) * 2
    assert layers[0].chunk_size == N
    assert layers[3].rope == "none"


def test_a_static_layer_with_less_room_than_a_chunk_has(rng):
    q, k, v = states(rng)
    with pytest.warns(UserWarning, match="narrows"):
        layer = StaticChunkedLayer(4, N)
    layer.update(k[:, :, :4], v[:, :, :4])
    layer.attend(q[:, :, :4])
    layer.update(k[:, :, 4:6], v[:, :, 4:6])
    with pytest.raises(KvkitError, match="whose chunks StaticChunkedLayer still stores"):
        layer.attend(q[:, :, 4:6])


def test_chunks_count_from_the_positions_that_tokens_have_now(rng):
    q, k, v = states(rng)
    cache = Cache([ChunkedLayer(N)], rope="none")
    cache.update(k[:, :, :27], v[:, :, :27], 0)
    cache.remove(0, 2, close=True)  # tokens that no query sees any more
    assert cache.get_seq_length() == 25
    found = cache.attend(q[:, :, :1], 0)  # of position 24, which begins a chunk
    np.testing.assert_allclose(found[:, :, 0], v[:, [0, 0, 1, 1], 26], atol=1e-6)
    assert cache.can("remove", 20, 22).startswith("layers[0]: expected no hole in its window")
