"""Layers of files as floats: those that the caches had which were saved, or whose codes these are."""

import numpy as np
import pytest
import safetensors.numpy

from kvkit import formats, tools
from kvkit.cache import DynamicCache, PagedCache, QuantizedCache
from kvkit.tools.readers import open_cache

pytestmark = pytest.mark.cpu

LAYERS, BATCH, HEADS, TOKENS, DIM = 2, 2, 3, 40, 64


def quantized(format):
    return QuantizedCache(format, num_layers=LAYERS, residual_length=8, sink=2)


def paged(**options):
    return PagedCache(16, 16, LAYERS, HEADS, DIM, np.float16, **options)


@pytest.mark.parametrize(
    ("cache", "format"),
    [
        (DynamicCache(), None), (quantized("uint8"), "uint8"), (quantized("q8_0"), "q8_0"),
        (paged(), None), (paged(quant_bit=8), "int8:g8"), (paged(quant_bit=4, quant_group=32), "int4:g32"),
        (paged(quant_format="e4m3", scale=[0.01, 0.02]), "e4m3"), (paged(quant_format="q8_0"), "q8_0"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)  # fmt: skip
def test_a_saved_cache_is_what_it_was(rng, tmp_path, cache, format):
    for i in range(LAYERS):
        cache.update(*rng.standard_normal((2, BATCH, HEADS, TOKENS, DIM)).astype(np.float16), i)
    cache.save(tmp_path / "cache.npz")
    for found in (open_cache(tmp_path / "cache.npz"), open_cache(cache)):
        assert (found.count, found.format) == (LAYERS, format)
        for i, layer in enumerate(cache.layers):
            read = found.layer(i)
            assert read.starts == [0, TOKENS, 2 * TOKENS]
            for side, expected in zip((read.key, read.value), layer._stored(), strict=True):
                part = slice(TOKENS - 5, TOKENS + 7)  # of both sequences
                expected = expected.swapaxes(1, 2).reshape(-1, HEADS, DIM)[part]
                assert (side.tokens, side.heads, side.dim, side.bits) == (2 * TOKENS, HEADS, DIM, 16)
                assert np.array_equal(side.read(part).astype(np.float16), expected)
    notes = tools.study(cache, "fp8").notes
    assert (format is not None) == any(f"the source is quantized ({format})" in note for note in notes)


def test_a_quantized_prompt_cache_of_mlx(rng, tmp_path):
    x = rng.standard_normal((LAYERS, 2, 1, HEADS, TOKENS, DIM)).astype(np.float16)
    coded = formats.encode(x, "mlx4:g64")
    parts = coded["codes"].view(np.uint32), coded["scale"], coded["minimum"]
    tensors = {
        f"{i}.{kv}.{part}": np.ascontiguousarray(array[i, kv])
        for part, array in enumerate(parts)
        for i in range(LAYERS)
        for kv in range(2)
    }
    said = {f"0.{i}.{j}": text for i in range(LAYERS) for j, text in enumerate((str(TOKENS), "64", "4"))}
    said |= {f"2.{i}": "QuantizedKVCache" for i in range(LAYERS)}
    safetensors.numpy.save_file(tensors, tmp_path / "mlx.safetensors", said)
    found = open_cache(tmp_path / "mlx.safetensors")
    assert found.format == "mlx4:g64"
    expected = formats.decode(coded, "mlx4:g64")[1, 0, 0].swapaxes(0, 1)
    assert np.array_equal(found.layer(1).key.read(slice(None)), expected)
