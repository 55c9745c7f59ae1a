"""Typical use of caches, for the type checkers of `make lint`; it also runs."""

import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import kvkit
from kvkit.cache import (
    BlockAllocator,
    Cache,
    DynamicCache,
    PagedCache,
    QuantizedCache,
    QuantSpec,
    SlidingWindowLayer,
    StaticCache,
)

Floats = NDArray[np.float32]


def caches(new: Floats, folder: Path) -> list[int]:
    tokens = new.swapaxes(1, 2)
    spec = QuantSpec("int8:g8")
    lengths: list[int] = []
    for cache in (DynamicCache(), StaticCache(8, num_layers=1), QuantizedCache(key=spec, value=spec)):
        keys, values = cache.update(tokens, tokens, layer_idx=0)
        output = cache.attend(tokens, 0, softcap=30.0)
        lengths += [keys.shape[2], values.shape[2], output.shape[2]]
    cache = DynamicCache.from_legacy_cache([(tokens, tokens)])
    cache.crop(-1)
    cache.reorder([0, 0])
    cache.save(folder / "cache.npz")
    again = kvkit.cache.load(folder / "cache.npz")
    with Cache([SlidingWindowLayer(4)], offload=folder / "offloaded") as offloaded:
        offloaded.update(tokens, tokens, 0)
        length, offset = offloaded.get_mask_sizes(1, 0)
    keys, values = cache.to_legacy_cache()[0]
    return [*lengths, again.get_seq_length(), length, offset, keys.size + values.size]


def paged(new: Floats) -> list[int]:
    cache = PagedCache(8, 4, num_layers=1, num_kv_heads=2, head_dim=8, dtype=np.float32)
    allocator: BlockAllocator = cache.blocks
    first = allocator.add([5, 6, 7])
    with cache.begin_step([(first, 3)]) as step:
        output = step.multi_head_cache_attention(new, new, new, layer_idx=0)
        key, _ = step.gather(0)
    assert output.shape == key.shape
    return first.blocks


if __name__ == "__main__":
    new = np.ones((1, 3, 2, 8), np.float32)
    with tempfile.TemporaryDirectory() as folder:
        print(caches(new, Path(folder)), paged(new[0]))
