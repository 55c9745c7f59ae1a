"""What a paged cache refuses, and that nothing has changed then."""

import numpy as np
from paged_scenes import DIM, HEADS, LAYERS, paged, refused
from scenes import assert_same

from kvkit.cache import PagedCache
from kvkit.tools.vectors.draws import normal


def test_wrong_tokens_change_nothing(rng):
    cache = paged("int8")
    seq = cache.blocks.add()
    step = cache.begin_step([(seq, 3)])
    key = normal(rng, (3, HEADS, DIM), np.float32)
    query = np.zeros((3, 4, DIM), np.float32)
    for wrong in (
        key[:2],
        key[:, :1],
        key[..., :8],
        key.astype(np.float16),
        key.astype(np.int8),
        key.tolist(),
    ):
        assert refused(step.update, wrong, wrong, 0).startswith("current_key: expected ")
        assert refused(step.update, key, wrong, 0).startswith("current_value: expected ")
        refused(step.update, wrong, key, 0)
        refused(step.multi_head_cache_attention, query, wrong, key, 0)
        refused(step.multi_head_cache_attention, query, key, wrong, 0)
    for wrong in (query[:2], query[:, :3], query[..., :8], query.astype(np.float16), None):
        refused(step.multi_head_cache_attention, wrong, key, key, 0)
    for layer in (-1, LAYERS, 0.0, None):
        assert refused(step.update, key, key, layer).startswith("layer_idx: expected ")
    inner = cache.cache.view(np.float32).reshape(-1)[: query.size].reshape(query.shape)
    for options in ({"softcap": -1.0}, {"window": 3}, {"sinks": query}, {"out": inner}, {"out": key}):
        refused(step.multi_head_cache_attention, query, key, key, 0, **options)
    refused(step.multi_head_cache_attention, query, key, key, 0, np.zeros((3, 2), np.float32))
    inside = cache.cache.view(np.float32).reshape(-1)[: key.size].reshape(key.shape)
    assert "overlap" in refused(step.update, inside, key, 0)
    assert not cache.cache.any()
    assert not cache.scale.any()
    assert step.written == set()
    for layer in range(LAYERS):
        step.update(key, key, layer)
    step.commit()
    assert seq.length == 3


def test_layers_are_written_once_and_before_they_are_read(rng):
    cache = paged()
    seq = cache.blocks.add()
    key, query = np.zeros((3, HEADS, DIM), np.float32), np.zeros((3, 4, DIM), np.float32)
    step = cache.begin_step([(seq, 3)])
    assert refused(step.attend, query, 0) == "layer_idx: expected a layer that the step has written, got 0"
    refused(step.gather, 0)
    step.update(key, key, 0)
    step.attend(query, 0)
    for action in (step.update, lambda *a: step.multi_head_cache_attention(query, *a)):
        assert "has not written" in refused(action, key, key, 0)
    assert refused(step.commit) == "step: expected every layer to be written, got layers [1] that are not"
    assert step.index.is_open
    step.update(key, key, 1)
    step.commit()
    for action in (step.commit, step.abandon):
        assert refused(action).startswith("step: expected ")
    assert seq.length == 3
    ended, before = cache.begin_step([(seq, 3)]), cache.cache.copy()
    ended.abandon()
    for action in (ended.update, lambda *a: ended.multi_head_cache_attention(query, *a)):
        assert "ended" in refused(action, key + 1, key + 1, 0)
    assert_same(cache.cache, before)


def test_with_all_layers_or_as_if_it_had_not_begun(rng):
    cache = paged()
    seq = cache.blocks.add(range(4))
    key = np.zeros((4, HEADS, DIM), np.float32)

    def run(layers):
        with cache.begin_step([(seq, 4)]) as step:
            for layer in layers:
                step.update(key, key, layer)

    assert refused(run, [0]).startswith("step: expected every layer")
    assert refused(run, [0, 1, 2]).startswith("layer_idx: ")
    assert (seq.length, seq.blocks, cache.blocks.available) == (0, [], 24)
    assert cache.blocks.add(range(5)).length == 0


def test_what_decides_the_first_hash():
    """Geometry, type, quantization, page size and salt."""
    usual = {
        "num_blocks": 4, "page_size": 4, "num_layers": 1, "num_kv_heads": 2, "head_dim": 16,
        "dtype": np.float16, "quant_bit": 8,
    }  # fmt: skip
    changes = [
        {}, {"page_size": 2}, {"num_layers": 2}, {"num_kv_heads": 1}, {"head_dim": 8}, {"quant_bit": 4},
        {"quant_bit": 0}, {"quant_group": 4}, {"scale_dtype": np.float32}, {"dtype": np.float32},
        {"salt": b"model"}, {"quant_bit": 0, "quant_format": "e4m3"},
        {"quant_bit": 0, "quant_format": "e4m3", "scale": 2.0},
    ]  # fmt: skip
    chains = [PagedCache(**{**usual, **change}).blocks.add()._chain[0] for change in changes]
    assert len(set(chains)) == len(changes)
    for same in ({"num_blocks": 9}, {"cache_layout": 0}):
        assert PagedCache(**{**usual, **same}).blocks.add()._chain[0] == chains[0]


def test_layers_without_rows_refuse_an_empty_batch():
    """Else other layers would wait for as many tokens of a batch that the cache does not have."""
    cache = PagedCache(8, 4, LAYERS, HEADS, DIM, np.float32)
    for shape in ((0, HEADS, 3, DIM), (1, 0, 3, DIM), (1, HEADS, 3, 0)):
        states = np.zeros(shape, np.float32)
        assert refused(cache.update, states, states, 0).startswith("key_states: expected [batch, heads, ")
    states = np.zeros((2, HEADS, 3, DIM), np.float32)
    for layer in range(LAYERS):
        cache.update(states, states, layer)
    assert cache.batch_size == 2
    assert cache.get_seq_length() == 3
