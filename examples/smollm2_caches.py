"""Define the kinds of cache that smollm2.py offers, and its model's attention over them."""

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

import kvkit
from kvkit.cache import DynamicCache, PagedCache, QuantizedCache, StaticCache

WINDOW, PAGE_SIZE, RECENT, SINK = 64, 16, 32, 4


@dataclass(frozen=True)
class Kind:
    """Describes a kind of cache: a text, how to make one, and the dtype of keys and values."""

    about: str
    make: Callable  # (model, tokens, folder for files) -> cache
    dtype: type = np.float16


def quantized(bits):
    """Return the kind whose old tokens are codes of so many bits."""

    def make(model, tokens, folder):
        return QuantizedCache(
            f"uint{bits}:channel/uint{bits}", num_layers=model.num_layers, residual_length=RECENT, sink=SINK
        )

    return Kind(f"{bits}-bit codes, keys per channel; {SINK} first and {RECENT} recent tokens float16", make)


def paged(model, tokens, folder):
    shape = model.num_layers, model.num_kv_heads, model.head_dim
    return PagedCache(-(-tokens // PAGE_SIZE), PAGE_SIZE, *shape, np.float16)


KINDS = {
    "fp32": Kind("float32", lambda model, tokens, folder: DynamicCache(), np.float32),
    "fp16": Kind("float16", lambda model, tokens, folder: DynamicCache()),
    "bf16": Kind("bfloat16", lambda model, tokens, folder: DynamicCache(), ml_dtypes.bfloat16),
    "int8": quantized(8),
    "int4": quantized(4),
    "int2": quantized(2),
    "paged": Kind(f"float16, blocks of {PAGE_SIZE} tokens", paged),
    "static": Kind(
        "float16, of fixed size", lambda model, tokens, folder: StaticCache(tokens, model.num_layers)
    ),
    "sliding": Kind(
        f"float16, a window of {WINDOW} tokens",
        lambda model, tokens, folder: DynamicCache(window=WINDOW),
    ),
    "offloaded": Kind("float16, in files", lambda model, tokens, folder: DynamicCache(offload=folder)),
}


def attention(model, cache, dtype):
    """Return the `attend` of `Llama.forward`: it appends new tokens to a layer of the cache, and attends."""
    rope = kvkit.Rope(model.head_dim, model.theta, interleaved=True)  # GGUF files of Llama pair neighbours

    def attend(layer, query, key, value):
        states = (x[None].swapaxes(1, 2) for x in (query, key, value))
        query, key, value = states  # [1, heads, tokens, head_dim]
        positions = cache.get_seq_length(layer) + np.arange(query.shape[2])
        query, key = rope.rotate(query, positions), rope.rotate(key, positions)
        query, key, value = (x.astype(dtype) for x in (query, key, value))
        cache.update(key, value, layer)
        return cache.attend(query, layer).swapaxes(1, 2).astype(np.float32)

    return attend


def nbytes(cache):
    """Return the bytes of the tokens that a cache holds, without room to grow."""
    return sum(layer.nbytes for layer in cache.layers)
