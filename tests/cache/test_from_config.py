"""Caches by the configuration of a model: every published one gets its layers, or is refused by name."""

import json
from pathlib import Path

import numpy as np
import pytest

import kvkit
from kvkit import KvkitError, Rope
from kvkit.cache import GatedDeltaLayer, IndexedLayer, LatentLayer, from_config, load
from kvkit.models.configuration import read_layers

CASES = json.loads((Path(__file__).parents[1] / "models" / "sizes.json").read_text())
NO_LAYER = ["V4, 4 layers", "DeepSeek-V4-Flash", "DeepSeek-V4-Pro"]  # which do not say what indexers choose
NAMES = {
    "full": "DynamicLayer", "window": "SlidingWindowLayer", "latent": "LatentLayer", "state": "StateLayer",
    "chunk": "ChunkedLayer",
    "conv": "StateLayer", "both": "DynamicLayer", "shared": "SharedLayer", "none": "SharedLayer",
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_published_models_get_their_layers(name):
    config = CASES[name]["config"]
    if name in NO_LAYER:
        with pytest.raises(KvkitError, match="index_topk: expected how many rows an indexer chooses"):
            from_config(config)
        return
    shapes, cache = read_layers(config).layers, from_config(config)
    beside = sum(shape.kind == "both" for shape in shapes)
    assert len(cache) == len(shapes) + beside
    for shape, layer in zip(shapes, cache.layers, strict=False):
        wanted = IndexedLayer.__name__ if shape.index_dim else NAMES[shape.kind]
        wanted = GatedDeltaLayer.__name__ if shape.delta else wanted
        assert type(layer).__name__ == wanted
        assert layer.window == shape.window or shape.kind in ("shared", "none")
        if isinstance(layer, LatentLayer):
            assert (layer.latent_dim, layer.rope_dim) == (shape.latent_dim, shape.key_dim - shape.latent_dim)
    assert [type(layer).__name__ for layer in cache.layers[len(shapes) :]] == ["StateLayer"] * beside


@pytest.mark.parametrize("name", ["Qwen3-Next-80B-A3B", "Qwen3.6-27B", "Kimi-Linear-48B"])
def test_layers_of_the_delta_rule_compute_states_of_the_size_that_is_told(name):
    """A cache's bytes are those of `size`: states and inputs of the convolution, in float32."""
    config, rng = CASES[name]["config"], np.random.default_rng(0)
    numbers = sum(shape.state for shape in read_layers(config).layers)
    layers = [layer for layer in from_config(config).layers if isinstance(layer, GatedDeltaLayer)]
    layer = layers[0]
    channels, inner = layer.conv_channels, (layer.num_heads, layer.dk)[: 2 if layer.kind == "kda" else 1]
    qkv, weight = rng.standard_normal((1, 2, channels), np.float32), np.ones((channels, 4), np.float32)
    a, b = rng.standard_normal((1, 2, *inner), np.float32), np.ones((1, 2, layer.num_heads), np.float32)
    gates = np.zeros(layer.num_heads, np.float32), np.zeros(inner, np.float32)
    assert layer.step(qkv, a, b, weight, gates=gates).shape == (1, 2, layer.num_heads, layer.dv)
    assert layer.nbytes * len(layers) == 4 * numbers
    assert layer.kind == ("kda" if name.startswith("Kimi") else "gdn")


def test_heads_of_values_that_do_not_share_those_of_keys_are_refused():
    config = CASES["Qwen3-Next-80B-A3B"]["config"] | {"linear_num_value_heads": 24}
    with pytest.raises(KvkitError, match=r"^linear_num_value_heads: expected a multiple of 16, as .* got 24"):
        from_config(config)


def test_layers_rotate_by_their_own_base():
    """A small model with keys and values, windows, and layers that read others."""
    config = {
        "model_type": "gemma3n_text", "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, "rope_theta": 1e6,
    }  # fmt: skip
    cache, states = from_config(config), np.ones((1, 2, 9, 8), np.float16)
    for i in range(4):
        cache.update(states, states, i)
    assert [layer._of for layer in cache.layers[4:]] == [3, 2]
    assert [layer.rope.theta for layer in cache.layers[:4]] == [1e4, 1e4, 1e6, 1e4]
    assert [layer.rope for layer in cache.layers[4:]] == ["none"] * 2


def test_a_cache_moves_keys_as_the_configuration_says(tmp_path):
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    cache = from_config(sizes | {"model_type": "cohere2", "rope_theta": 500.0, "sliding_window": None})
    assert [layer.rope for layer in cache.layers] == ["none", "none"]
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"model_type": "glm", "rope_theta": 500.0}))
    cache = from_config(tmp_path)
    rope = Rope(8, 500.0, interleaved=True)
    assert [layer.rope for layer in cache.layers] == [rope, rope]
    states = np.random.default_rng(0).standard_normal((1, 1, 5, 8)).astype(np.float32)
    for i in range(2):
        cache.update(states, states, i)
    cache.shift(0, None, 3)
    cache.save(tmp_path / "cache.npz")
    assert load(tmp_path / "cache.npz").layers[0].rope == rope


def test_a_rotation_that_is_not_shown_is_asked_for_when_keys_move():
    cache = from_config({"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8})
    states = np.ones((1, 2, 3, 4), np.float32)
    cache.update(states, states, 0)
    with pytest.raises(KvkitError, match="rope: expected how keys were rotated"):
        cache.shift(0, None, 2)
    cache.shift(0, None, 2, "none")


@pytest.mark.parametrize("with_parts", [True, False])
def test_latent_rows_without_a_rotated_part(with_parts):
    """Attention over rows of 64 + 0 elements, as the formula says, also after tokens moved."""
    rng = np.random.default_rng(5)
    layer, rows = LatentLayer(64, 0), rng.standard_normal((2, 1, 9, 64)).astype(np.float32)
    rotated = rows[..., :0] if with_parts else None
    layer.update(rows[:, :, :5], None if rotated is None else rotated[:, :, :5])
    keys, values = layer.update(rows[:, :, 5:], None if rotated is None else rotated[:, :, 5:])
    assert np.asarray(keys).shape == np.asarray(values).shape == (2, 1, 9, 64)
    stored = np.asarray(keys)[:, 0].astype(np.float64)
    for seed in (0, 1):
        query = np.random.default_rng(seed).standard_normal((2, 3, 2, 64)).astype(np.float32)
        scores = np.einsum("bhqc,bnc->bhqn", query.astype(np.float64), stored) * 0.2
        scores[:, :, 0, 8] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        expected = np.einsum("bhqn,bnc->bhqc", weights / weights.sum(-1, keepdims=True), stored)
        np.testing.assert_allclose(layer.attend(query, softmax_scale=0.2), expected, atol=2e-5)
    layer.remove(2, 4, close=True, rope="none")
    assert layer.stored_tokens == 7
    with pytest.raises(KvkitError, match="kpe: expected"):
        LatentLayer(8, 4).update(rows[..., :8], None)


V4 = {
    "model_type": "deepseek_v4", "num_key_value_heads": 1, "head_dim": 512, "sliding_window": 128,
    "num_attention_heads": 64, "hidden_size": 4096, "qk_rope_head_dim": 64, "index_head_dim": 128,
    "index_topk": 512, "num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4, 0], "rope_theta": 1e4,
    "compress_rope_theta": 16e4, "rope_scaling": {"rope_type": "yarn", "factor": 16, "beta_fast": 32,
    "beta_slow": 1, "original_max_position_embeddings": 65536},
}  # fmt: skip


def test_deepseek_v4():
    """Entries after the last layer are those of drafts; nbytes are those of `size`."""
    cache = from_config(V4)
    assert [(layer.ratio, layer.index_dim, layer.index_topk) for layer in cache.layers] == [
        (0, 0, 0), (4, 128, 512), (128, 0, 0), (4, 128, 512)
    ]  # fmt: skip
    assert [layer.rope.theta for layer in cache.layers] == [1e4, 16e4, 16e4, 16e4]
    assert [layer.rope.attention_factor for layer in cache.layers] == [1.0] * 4
    rng, row = np.random.default_rng(0), np.zeros((1, 1, 256, 512), np.float32)
    for i, layer in enumerate(cache.layers):
        width, more = 512 * (1 + bool(layer.index_dim)), {}
        pairs = [(np.zeros((layer.ratio, width)), np.ones(512))] if layer.ratio else []
        if layer.index_dim:
            pairs.append((np.zeros((4, 256)), np.ones(128)))
            more["indexer"] = tuple(rng.standard_normal((2, 1, 256, 256), np.float32))
        pair = tuple(rng.standard_normal((2, 1, 256, width), np.float32)) if pairs else None
        if pairs:
            layer.set_weights(*[tuple(x.astype(np.float32) for x in each) for each in pairs])
        cache.update(row, pair, i, **more)
    (found,) = kvkit.size(V4, tokens=256, formats="float32").caches
    windows = 4 * 512 * 4  # of a token, which `size` counts and the next token does not need
    assert cache.nbytes == found.key_bytes + found.value_bytes + found.state_bytes - windows
    assert [layer.rows.shape[1] for layer in cache.layers if layer.ratio] == [64, 2, 64]


def test_drafts():
    assert [layer.drafts for layer in from_config(V4, drafts=3).layers] == [3] * 4
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    wanted = "^drafts: expected 0 for a model without compressed rows .crop takes back any., got 2"
    with pytest.raises(KvkitError, match=wanted):
        from_config(sizes, drafts=2)


@pytest.mark.parametrize(("change", "message"), [
    ({"index_topk": None}, "index_topk: expected how many rows an indexer chooses"),
    ({"compress_ratios": [0, 2, 128, 4]}, "compress_ratios"),
    ({"compress_ratios": None}, "compress_ratios|layer_types"),
    ({"compress_rate_csa": 8}, "compress_rate_csa: expected 4"),
])  # fmt: skip
def test_deepseek_v4_that_is_another_model_is_refused(change, message):
    config = {name: value for name, value in (V4 | change).items() if value is not None}
    with pytest.raises(KvkitError, match=message):
        from_config(config)
