"""Latent rows in blocks: a batch beside `LatentLayer`, packed sequences beside `mla_attention`."""

import numpy as np
import pytest

import kvkit
from kvkit import KvkitError
from kvkit.cache import PagedCache

LATENT, ROPE, SCALE, LAYERS = 32, 8, 0.3, 2
DIM = LATENT + ROPE


@pytest.fixture
def states():
    return np.random.default_rng(0).standard_normal


def paged(dtype=np.float32, **options):
    return PagedCache(32, 4, LAYERS, 1, DIM, dtype, latent_dim=LATENT, **options)


def update(caches, latent, kpe):
    """Give one step to every layer of every cache."""
    for i in range(LAYERS):
        found = [cache.update(latent + i, kpe, i) for cache in caches]
    return found


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_packed_sequences_are_attended_to_as_pages_of_a_pool(states, dtype):
    cache = paged(dtype)
    first, second = (cache.blocks.add() for _ in range(2))
    lengths = np.zeros(2, np.int64)
    for new in ([7, 5], [1, 2]):
        lengths += new
        with cache.begin_step(zip((first, second), new, strict=True)) as step:
            for i in range(LAYERS):
                latent, kpe = (states((sum(new), 1, dim)).astype(dtype) for dim in (LATENT, ROPE))
                query = states((sum(new), 4, DIM)).astype(dtype)
                step.update(latent, kpe, i)
                found = step.attend(query, i, softmax_scale=SCALE)
                wanted = kvkit.mla_attention(
                    query, cache.layers[i].key_cache, [seq.blocks for seq in (first, second)], lengths,
                    [0, new[0], sum(new)], softmax_scale=SCALE, value_dim=LATENT,
                )  # fmt: skip
                np.testing.assert_array_equal(found, wanted)
                keys, values = step.gather(i)
                np.testing.assert_array_equal(keys[..., :LATENT], values)
                np.testing.assert_array_equal(keys[-1, 0], np.concatenate((latent, kpe), 2)[-1, 0])
    branch = cache.blocks.fork(first)
    assert branch.blocks[0] == first.blocks[0]


def test_what_is_refused(states):
    cache = paged()
    with cache.begin_step([(cache.blocks.add(), 3)]) as step:
        latent, kpe = (states((3, 1, dim), np.float32) for dim in (LATENT, ROPE))
        with pytest.raises(KvkitError, match=r"current_value: expected shape \(3, 1, 8\)"):
            step.update(latent, latent, 0)
        for i in range(LAYERS):
            step.update(latent, kpe, i)
        with pytest.raises(KvkitError, match="softmax_scale: expected 1"):
            step.attend(states((3, 4, DIM), np.float32), 0)
