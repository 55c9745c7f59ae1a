"""Make caches of every kind, append tokens to them, and attend."""

import functools

import numpy as np

from kvkit.cache import (
    Cache,
    ChunkedLayer,
    CompressedLayer,
    DynamicCache,
    DynamicLayer,
    GatedDeltaLayer,
    IndexedLayer,
    LatentLayer,
    PagedCache,
    QuantizedLayer,
    SharedLayer,
    SlidingWindowLayer,
    StateLayer,
    StaticChunkedLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

HEADS, DIM = 2, 16
CODES = "uint8:g4:channel/uint4:g8"
BY_CHANNEL = "uint4:g4:channel/uint4:g8"
TURNED = "e4m3:g8+hadamard"


@functools.cache
def numbers(count, seed, heads, dim, batch):
    return np.random.default_rng(seed).standard_normal((batch, heads, count, dim)).astype(np.float32)


def tokens(count, seed=0, heads=HEADS, dim=DIM, batch=2):
    return numbers(count, seed, heads, dim, batch).copy()


def ragged():
    cache = DynamicCache(1, rope="none")
    cache.update(tokens(40), tokens(40, 1), 0)
    cache.compress("knorm", budget=[[9, 30]])
    return cache


def paged(**options):
    return PagedCache(90, 4, 1, HEADS, DIM, np.float32, rope="none", **options)


def pooling(dim, rope_dim, ratio, **more):
    """Return a layer of compressed rows with index keys, with its weights."""
    layer = CompressedLayer(dim, rope_dim, 6, ratio, 4, 2, **more)
    layer.set_weights(
        *[
            (tokens(ratio, i, 1, 2 * width, 1)[0, 0], np.ones(width, np.float32))
            for i, width in enumerate((dim, 4))
        ],
        rope="none",
    )
    return layer


def projected(layer, count, seed, batch):
    """Return what `CompressedLayer.update` takes, and more by name."""
    row, *parts = (
        tokens(count, seed + i, 1, width, batch)
        for i, width in enumerate(
            (layer.dim, 2 * layer.dim, 2 * layer.dim, 2 * layer.index_dim, 2 * layer.index_dim)
        )
    )
    kv, gate, *indexer = (part[:, 0] for part in parts)
    return (row, (kv, gate)), {"indexer": tuple(indexer)}


KINDS = {
    "dynamic": lambda: DynamicCache(1, rope="none"),
    "sliding": lambda: Cache([SlidingWindowLayer(6)], rope="none"),
    "chunked": lambda: Cache([ChunkedLayer(6)], rope="none"),
    "static": lambda: Cache([StaticLayer(80)], rope="none"),
    "static sliding": lambda: Cache([StaticSlidingWindowLayer(80, 6)], rope="none"),
    "static chunked": lambda: Cache([StaticChunkedLayer(80, 6)], rope="none"),
    "quantized": lambda: Cache([QuantizedLayer(CODES, residual_length=4, sink=2)], rope="none"),
    "by channel": lambda: Cache([QuantizedLayer(BY_CHANNEL, residual_length=4, sink=2)], rope="none"),
    "rotated": lambda: Cache([QuantizedLayer(TURNED, residual_length=4, sink=2)], rope="none"),
    "shared": lambda: Cache([DynamicLayer(), SharedLayer(0)], rope="none"),
    "ragged": ragged,
    "paged": paged,
    "paged int8": lambda: paged(quant_bit=8),
    "paged e4m3": lambda: paged(quant_format="e4m3", scale="found", quant_group=16),
    "paged layout 1": lambda: paged(cache_layout=1),
    "paged latent": lambda: PagedCache(90, 4, 1, 1, 24, np.float32, rope="none", latent_dim=16),
    "latent": lambda: Cache([LatentLayer(16, 8)], rope="none"),
    "latent codes": lambda: Cache([LatentLayer(512, 64, "ds_mla")], rope="none"),
    "indexed": lambda: Cache([IndexedLayer(LatentLayer(16, 8), 4)], rope="none"),
    "compressed": lambda: Cache([pooling(16, 8, 2, drafts=1)]),
    "compressed codes": lambda: Cache([pooling(512, 64, 2, format="ds_v4", drafts=1)]),
    "state": lambda: Cache([StateLayer(checkpoint_every=2)], rope="none"),
    "delta": lambda: Cache([delta()], rope="none"),
    "delta by channel": lambda: Cache([delta("kda", checkpoint_every=2)], rope="none"),
}


def delta(kind="gdn", **options):
    return GatedDeltaLayer(2, 4, 3, 14, 3, kind=kind, **options)


def step(layer, count, seed, batch=2):
    """Let tokens update the state of a layer of the delta rule; return its outputs."""
    rng, inner = np.random.default_rng(seed), (2, 4) if layer.kind == "kda" else (2,)
    qkv = rng.standard_normal((layer.batch_size or batch, count, 14)).astype(np.float32)
    a, b = (rng.standard_normal((*qkv.shape[:2], *shape), np.float32) for shape in (inner, (2,)))
    weights = np.random.default_rng(0)
    gates = weights.standard_normal(2, np.float32), weights.standard_normal(inner, np.float32)
    return layer.step(qkv, a, b, weights.standard_normal((14, 3), np.float32), gates=gates)


def append(cache, count, seed, indexes=True):
    """Append new tokens to layer 0; return what attention of the last one makes of all."""
    layer = cache.layers[0]
    batch = layer.batch_size or 2
    if isinstance(layer, GatedDeltaLayer):
        return [step(layer, count, seed), *attend(cache)]
    if isinstance(layer, StateLayer):
        return [*cache.update({"sum": tokens(3, seed, batch=batch)}, count, 0).values()]
    if isinstance(layer, CompressedLayer):
        arguments, more = projected(layer, count, seed, batch)
        return [np.array(side) for side in cache.update(*arguments, 0, **more)] + attend(cache)
    latent = layer.latent_dim
    sizes = (latent, layer.rope_dim) if latent else (DIM, DIM)
    parts = [tokens(count, seed + i, 1 if latent else HEADS, dim, batch) for i, dim in enumerate(sizes)]
    seen = [np.array(side) for side in cache.update(*parts, 0)]
    if isinstance(layer, IndexedLayer) and indexes:
        seen.append(layer.update_index(tokens(count, seed, batch=batch, dim=4)[:, 0]).copy())
    return seen + attend(cache)


def attend(cache):
    """Return the outputs of two different queries."""
    layer, outputs = cache.layers[-1], []
    for seed in (7, 8):
        if isinstance(layer, StateLayer):
            outputs += [array.copy() for array in layer.states.values()]
            continue
        if isinstance(layer, CompressedLayer):
            queries = tokens(1, seed, 3, 4, layer.batch_size).swapaxes(1, 2)
            index = queries, queries[..., 0].copy()
            query = tokens(1, seed, 2 * HEADS, layer.dim, layer.batch_size)
            outputs += cache.attend(query, len(cache) - 1, return_lse=True, index=index)
            continue
        latent = layer.latent_dim
        width, scale = (latent + layer.rope_dim, {"softmax_scale": 0.1}) if latent else (DIM, {})
        query = tokens(1, seed, 2 * HEADS, width, layer.batch_size)
        outputs += cache.attend(query, len(cache) - 1, return_lse=True, **scale)
    return outputs


def bits(arrays):
    return [(array.dtype, array.shape, array.tobytes()) for array in arrays]
