"""A `QuantizedCache` of a mix: each layer is the one made by hand, and what has no layer is refused."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkit.cache import Cache, QuantizedCache, QuantizedLayer, QuantSpec, load
from kvkit.errors import KvkitError
from kvkit.formats.mixes import mix_text

pytestmark = pytest.mark.cpu

FORMATS = st.sampled_from(("int8:g16", "uint4:g16", "int2:g32:channel", "kivi4", "fp8", "int4:g32+hadamard"))
NO_WINDOW = {"residual_length": 3, "sink": 1, "read_back": True}


def filled(cache, rng):
    """Fill layers with two steps; return their attention."""
    found = []
    for i in range(len(cache)):
        for count in (70, 1):
            keys, values = rng.standard_normal((2, 1, 2, count, 32)).astype(np.float16)
            cache.update(keys, values, i)
        found.append(cache.attend(rng.standard_normal((1, 4, 1, 32)).astype(np.float16), i))
    return found


@pytest.mark.slow
@given(st.lists(st.tuples(FORMATS, FORMATS), min_size=1, max_size=4), st.booleans())
def test_a_mix_is_its_layers_made_by_hand(pairs, by_sides):
    if by_sides:
        keys, values = (mix_text([(format, format) for format in side]) for side in zip(*pairs, strict=True))
        mixed = QuantizedCache(key=keys, value=values, num_layers=len(pairs), **NO_WINDOW)
    else:
        mixed = QuantizedCache(mix_text(pairs), num_layers=len(pairs), **NO_WINDOW)
    own = Cache(QuantizedLayer(key=key, value=value, **NO_WINDOW) for key, value in pairs)
    for got, want in zip(*(filled(each, np.random.default_rng(7)) for each in (mixed, own)), strict=True):
        assert got.tobytes() == want.tobytes()
    for got, want in zip(mixed.layers, own.layers, strict=True):
        assert got._describe() == want._describe()
        stored, expected = got._arrays(), want._arrays()
        assert stored.keys() == expected.keys()
        assert all(stored[name].tobytes() == expected[name].tobytes() for name in stored)


def test_a_mixed_cache_is_saved_with_the_formats_of_its_layers(rng, tmp_path):
    cache = QuantizedCache("K=int8:g16@0/kivi4,V=int4:g16", num_layers=3, **NO_WINDOW)
    filled(cache, rng)
    cache.save(tmp_path / "cache.safetensors")
    loaded = load(tmp_path / "cache.safetensors")
    assert [each._describe() for each in loaded.layers] == [each._describe() for each in cache.layers]


def test_a_mix_comes_from_a_file(rng, tmp_path):
    path = tmp_path / "mix.json"
    path.write_text(json.dumps({"kvkit_mix": "int8:g16@-1/kivi4", "num_layers": 3}))
    caches = (
        QuantizedCache.from_file(path, **NO_WINDOW),
        QuantizedCache(str(path), **NO_WINDOW),
        QuantizedCache("int8:g16@2/kivi4", num_layers=3, **NO_WINDOW),
    )
    assert len({json.dumps([layer._describe() for layer in each.layers]) for each in caches}) == 1
    with pytest.raises(KvkitError, match="num_layers: expected 3, as in the file of int8:g16@-1/kivi4"):
        QuantizedCache.from_file(path, num_layers=4)


def test_a_spec_stands_for_one_side_of_a_mix():
    cache = QuantizedCache("int8@0/int4", value=QuantSpec("fp8", scale=2.0), num_layers=2)
    assert [(each.specs[0].bits, each.specs[1].scale) for each in cache.layers] == [(8, 2.0), (4, 2.0)]


def test_formats_of_keys_and_values_need_no_number_of_layers():
    cache = QuantizedCache("K=int8:g16,V=int4:g16")
    cache.update(*np.ones((2, 1, 1, 9, 16), np.float16), 0)
    assert [spec.bits for spec in cache.layers[0].specs] == [8, 4]
    assert QuantSpec("K=int8:g16,V=int4:g16").bytes_per_token(16) == (18 + 10) / 2


def test_layers_that_are_not_quantized_have_no_format():
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    cache = QuantizedCache("int8@0/int4", layer_types=kinds, window=4)
    assert [type(each).__name__ for each in cache.layers] == [
        "QuantizedLayer", "SlidingWindowLayer", "QuantizedLayer"
    ]  # fmt: skip
    with pytest.raises(KvkitError, match="a layer with full attention for int8, got layer 1"):
        QuantizedCache("int8@1/int4", layer_types=kinds, window=4)
