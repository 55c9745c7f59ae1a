"""Make paged caches of every kind, and run the plain operators on the same tokens."""

import ml_dtypes
import numpy as np
import pytest

import kvkit
from kvkit import KvkitError
from kvkit.cache import PagedCache
from kvkit.tools.vectors.draws import normal

LAYERS, HEADS, DIM, P = 2, 2, 16, 4
KINDS = {
    "float32": (np.float32, {}),
    "float16": (np.float16, {}),
    "bfloat16": (ml_dtypes.bfloat16, {}),
    "int8": (np.float32, {"quant_bit": 8, "quant_group": 8}),
    "int4": (np.float16, {"quant_bit": 4, "quant_group": 16, "scale_dtype": np.float32}),
}


def paged(kind="float32", layout=3, num_blocks=24):
    dtype, options = KINDS[kind]
    return PagedCache(num_blocks, P, LAYERS, HEADS, DIM, dtype, cache_layout=layout, **options)


def refused(action, *arguments, **more):
    """Return the message of the error that an action raises."""
    with pytest.raises(KvkitError) as error:
        action(*arguments, **more)
    return str(error.value)


def random_call(rng, seq):
    """Return a call of a sequence: its name, arguments and options. Not all are legal."""
    name = str(rng.choice(["remove", "remove", "retain", "shift", "shift", "divide", "flatten"]))
    begin, end = sorted(rng.integers(0, 2 + seq.next_position, 2).tolist())
    end = None if rng.random() < 0.4 else end
    if name == "remove":
        return name, (begin, end), {"close": bool(end and rng.random() < 0.5)}
    if name == "retain":
        places = np.unique(seq.positions if rng.random() < 0.9 else rng.integers(0, 9, 3))
        return name, (places[rng.random(len(places)) < 0.9],), {}
    if name == "flatten":
        return name, (), {}
    return name, (begin, end, int(rng.integers(1, 4) if name == "divide" else rng.integers(-4, 6))), {}


def numbered(*tokens, rows=1):
    """Return keys of one head and one element; row b has ``10 * b`` added."""
    grid = np.array(tokens) + 10 * np.arange(rows)[:, None]
    return grid.astype(np.float32).reshape(rows, 1, -1, 1)


def holding(*tokens, rows=1, num_blocks=32, page_size=2):
    cache = PagedCache(num_blocks, page_size, 1, 1, 1, np.float32)
    cache.update(numbered(*tokens, rows=rows), numbered(*tokens, rows=rows), 0)
    return cache


def contents(cache):
    """Return the keys of every row, after a check that values are the same."""
    layer = cache.layers[0]
    np.testing.assert_array_equal(layer.keys, layer.values)
    return layer.keys[:, 0, :, 0].tolist()


class Plain:
    """Runs the plain operators on the same tokens: every context in one piece, in offset mode."""

    def __init__(self, kind, layout):
        dtype, options = KINDS[kind]
        self.dtype, self.options = np.dtype(dtype), {**options}
        self.scale_dtype = np.dtype(self.options.pop("scale_dtype", np.float16))
        self.layout = layout

    def contexts(self, contexts, counts, layer):
        """Return index tensors, a cache and scale with the past tokens of contexts, and the new tokens."""
        bit, group = self.options.get("quant_bit", 0), self.options.get("quant_group", 8)
        lengths = [len(keys) for keys, _ in contexts]
        sizes = {"row": sum(lengths), "layer": LAYERS, "kv": 2, "head": HEADS}
        axes = ("row layer kv head", "layer row kv head", "layer kv row head", "layer kv head row")
        shape = [sizes[axis] for axis in axes[self.layout].split()]
        stored = np.int8 if bit else self.dtype
        cache = np.zeros((*shape, DIM // 2 if bit == 4 else DIM), stored)
        scale = np.zeros((*shape, DIM // group), self.scale_dtype) if bit else None
        starts = np.cumsum([0, *lengths])
        attributes = {**self.options, "num_layer": LAYERS, "layer_idx": layer, "cache_layout": self.layout}
        past = [n - q for n, q in zip(lengths, counts, strict=True)]
        before, new = (
            [np.concatenate(parts) for parts in zip(*pairs, strict=True)]
            for pairs in (
                [[side[:n] for side in sides] for sides, n in zip(contexts, past, strict=True)],
                [[side[n:] for side in sides] for sides, n in zip(contexts, past, strict=True)],
            )
        )
        if sum(past):
            ends, zeros = np.cumsum([0, *past]), np.zeros(len(past), np.int64)
            kvkit.dynamic_batching.key_value_cache(
                *before, ends, ends, starts[:-1], zeros, None, None, cache, scale, **attributes
            )
        index = np.cumsum([0, *counts]), starts, starts[:-1], np.array(past)
        return new, index, cache, scale, attributes

    def attend(self, query, contexts, counts, layer, decoding, **options):
        new, index, cache, scale, attributes = self.contexts(contexts, counts, layer)
        return kvkit.dynamic_batching.multi_head_cache_attention(
            query, *new, *index, decoding, None, None, cache, scale,
            num_heads=query.shape[1], head_dim=DIM, num_kv_heads=HEADS, **attributes, **options,
        )  # fmt: skip


IDS = list(range(100, 111))


def run(cache, *pairs, seed=0):
    """Run a step of random tokens through all layers; return the outputs."""
    rng, outputs = np.random.default_rng(seed), []
    with cache.begin_step(pairs) as step:
        tokens = int(step.index.seqstarts[-1])
        for layer in range(LAYERS):
            query, key, value = (
                normal(rng, (tokens, heads, DIM), cache.store.format.dtype) for heads in (4, HEADS, HEADS)
            )
            outputs.append(step.multi_head_cache_attention(query, key, value, layer).tobytes())
    return outputs
