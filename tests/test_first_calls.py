"""What a stranger writes first: each call works, or is refused with the line that works, which is run too."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvkit
from kvkit import KvkitError

FOLDER = Path(__file__).parent
STATES = np.ones((1, 8, 7, 64), np.float16)  # [batch, heads, tokens, dim], as models have states
PACKED = np.ones((1, 7, 8, 64), np.float32)  # [batch, tokens, heads, dim], as operators take them
LLAMA = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 512,
         "rope_theta": 1e4, "model_type": "llama"}  # fmt: skip


def stepped(cache):
    """Append to a cache and attend; return the output's shape."""
    cache.update(STATES, STATES, 0)
    return cache.attend(STATES, 0).shape


WORKS = {
    "cache": lambda: stepped(kvkit.DynamicCache()),
    "static cache": lambda: stepped(kvkit.StaticCache(4096)),
    "quantized cache": lambda: stepped(kvkit.QuantizedCache()),
    "format": lambda: stepped(kvkit.QuantizedCache("int4:g32")),
    "format of 8 bits": lambda: stepped(kvkit.QuantizedCache("int8")),
    "fp8": lambda: stepped(kvkit.QuantizedCache("fp8")),
    "formats of sides": lambda: stepped(kvkit.QuantizedCache(key="int8", value="int4:g32")),
    "rotated": lambda: stepped(kvkit.QuantizedCache("int4:g32+hadamard")),
    "attention": lambda: kvkit.multi_head_attention(PACKED, PACKED, PACKED).shape,
    "grouped attention": lambda: kvkit.multi_head_attention(PACKED, PACKED[:, :, :2], PACKED[:, :, :2]).shape,
    "no mask": lambda: kvkit.multi_head_attention(PACKED, PACKED, PACKED, is_causal=False).shape,
    "window": lambda: stepped(kvkit.DynamicCache(window=4)),
    "size by name": lambda: len(kvkit.size("llama-3.1-8b", formats="fp8,int4:g32").caches),
    "study": lambda: len(kvkit.study(filled(), "fp8,int4:g32").summary),
    "rope": lambda: kvkit.Rope.from_config(LLAMA)[0].rotate(PACKED, 0).shape,
    "cache of a model": lambda: len(kvkit.cache.from_config(LLAMA)),
}


@pytest.mark.parametrize("name", WORKS)
def test_works(name):
    assert WORKS[name]()


# {name: (the call, what the error says, the line that works)}
REFUSED = {
    "layers in front": (
        lambda: kvkit.QuantizedCache(2), "num_layers=2", "kvkit.QuantizedCache(num_layers=2)",
    ),
    "unknown format": (
        lambda: kvkit.QuantizedCache("int4g32"), "kvkit list formats", 'kvkit.QuantizedCache("int4:g32")',
    ),
    "float format": (
        lambda: kvkit.QuantizedCache("float16"), "a DynamicCache stores floats", "kvkit.DynamicCache()",
    ),
    "heads before tokens": (
        lambda: kvkit.multi_head_attention(STATES, STATES[:, :2], STATES[:, :2]), "swapaxes(1, 2)",
        "kvkit.multi_head_attention(*(x.swapaxes(1, 2) for x in (STATES, STATES[:, :2], STATES[:, :2])))",
    ),
    "tokens before heads": (
        lambda: filled().update(PACKED.astype(np.float16), PACKED.astype(np.float16), 0), "swapaxes(1, 2)",
        "filled().update(*[PACKED.astype(np.float16).swapaxes(1, 2)] * 2, 0)",
    ),
    "another name": (lambda: kvkit.DynamicCach, "DynamicCache", "kvkit.DynamicCache()"),
}  # fmt: skip


def filled():
    """Return a cache with tokens."""
    cache = kvkit.DynamicCache()
    cache.update(STATES, STATES, 0)
    return cache


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_line_that_works(name):
    call, hint, line = REFUSED[name]
    with pytest.raises((KvkitError, AttributeError), match=re.escape(hint)):
        call()
    eval(line)  # the line that works


def test_what_dir_shows_is_stored():
    """A name that appears or goes is meant: `python tests/public_names.py` prints the list."""
    done = subprocess.run(
        [sys.executable, FOLDER / "public_names.py"], capture_output=True, text=True, check=True
    )
    assert done.stdout == (FOLDER / "public_names.txt").read_text()


def test_names_of_transformers():
    cache = filled()
    keys, values = next(iter(cache))
    assert keys.shape == values.shape == STATES.shape
    assert (len(list(cache)), cache.is_initialized, cache.layers[0].is_initialized) == (1, True, True)
    assert cache.get_max_cache_shape() == cache.get_max_length()
    assert not kvkit.DynamicCache().is_initialized
