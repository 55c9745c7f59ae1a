"""Queries under any of their names, factors of scores, and masks of padding: used, or refused by name."""

import numpy as np
import pytest

from kvkit import files, formats, tools
from kvkit.tools.queries import MASK_NAMES, QUERY_NAMES

pytestmark = pytest.mark.cpu

LAYERS, SEQUENCES, TOKENS, HEADS, DIM, LAST = 2, 2, 48, 2, 32, 8
SCHEMES = "int4:g32,int8:head"


@pytest.fixture
def arrays(rng):
    """Return two layers of two sequences of equal length, one after the other, with their last queries."""
    key, value = rng.standard_normal((2, LAYERS, SEQUENCES * TOKENS, HEADS, DIM)).astype(np.float16)
    query = 2 * rng.standard_normal((LAYERS, SEQUENCES, LAST, 2 * HEADS, DIM)).astype(np.float16)
    return {"key": key, "value": value, "query": query, "seqstarts": np.array([0, TOKENS, 2 * TOKENS])}


def numbers(found):
    """Return what was measured."""
    return [vars(one) for one in found.summary], found.rows


@pytest.mark.parametrize("name", QUERY_NAMES)
@pytest.mark.parametrize("as_list", [False, True])
def test_any_name(arrays, name, as_list):
    expected = tools.study(arrays, SCHEMES)
    assert expected.by_attention
    query = arrays.pop("query")
    named = {f"{name}.{i}": each for i, each in enumerate(query)} if as_list else {name: query}
    found = tools.study(arrays | named, SCHEMES)
    assert numbers(found) == numbers(expected)
    assert not any("not read" in note for note in found.notes)


def test_names_of_layers(arrays):
    """Arrays of each layer with heads first; queries lie beside them under the names of keys."""
    expected = tools.study(arrays, SCHEMES)
    named = {}
    for i in range(LAYERS):
        for side in ("key", "value"):
            by_sequence = arrays[side][i].reshape(SEQUENCES, TOKENS, HEADS, DIM)
            named[f"past_key_values.{i}.{side}"] = by_sequence.swapaxes(1, 2)
        named[f"past_key_values.{i}.query"] = arrays["query"][i].swapaxes(1, 2)
    assert numbers(tools.study(named, SCHEMES)) == numbers(expected)
    tokens_first = {
        f"{name}_cache_{i}": arrays[side][i].reshape(SEQUENCES, -1, *arrays[side].shape[-2:])
        for i in range(LAYERS)
        for name, side in (("k", "key"), ("v", "value"), ("q", "query"))
    }
    assert numbers(tools.study(tokens_first, SCHEMES)) == numbers(expected)


def test_queries_of_all_tokens_are_packed_like_keys(rng, arrays):
    full = rng.standard_normal((LAYERS, SEQUENCES * TOKENS, 2 * HEADS, DIM)).astype(np.float16)
    arrays["query"] = full.reshape(LAYERS, SEQUENCES, TOKENS, 2 * HEADS, DIM)
    assert numbers(tools.study(arrays | {"query": full}, SCHEMES)) == numbers(tools.study(arrays, SCHEMES))


def test_fused_keys_and_values_have_queries_too(arrays):
    expected = tools.study(arrays, SCHEMES)
    cache = np.stack((arrays.pop("key"), arrays.pop("value"))).reshape(
        2, LAYERS, SEQUENCES, TOKENS, HEADS, DIM
    )
    del arrays["seqstarts"]
    assert numbers(tools.study({"cache": cache} | arrays, SCHEMES, layout="| kv l b n h c")) == numbers(
        expected
    )


def test_other_arrays_are_noted(arrays, tmp_path):
    beside = {"queries": arrays["query"], "softmax_scale": np.array(0.1), "extra": np.zeros(3)}
    assert "not read: queries (did you mean query?), extra" in tools.study(arrays | beside, "fp8").notes
    without = {name: array for name, array in arrays.items() if name != "query"}
    alone = tools.study(without | {"softmax_scale": np.array(0.1)}, "fp8")
    assert "not read: softmax_scale" in alone.notes
    from kvkit.cache import QuantizedCache

    cache = QuantizedCache("uint8")
    states = np.ones((1, HEADS, 40, DIM), np.float32)
    cache.update(states, states, 0)
    cache.save(tmp_path / "cache.safetensors")
    contents = files.read(tmp_path / "cache.safetensors")
    files.write(
        tmp_path / "more.safetensors", contents.arrays | {"extra": np.zeros(3)}, metadata=contents.metadata
    )
    assert "not read: extra" in tools.study(tmp_path / "more.safetensors", "fp8").notes


def test_the_factor_of_scores_is_used(arrays):
    """A factor of scores is one of queries."""
    scale, old = np.array(0.5), 1 / np.sqrt(DIM)
    scaled = arrays | {"query": arrays["query"].astype(np.float32) * np.float32(0.5 / old)}
    for options in ({"schemes": SCHEMES}, {"evict": "snapkv(window=4)@0.5,knorm@0.5+int4:g32", "judge": 2}):
        both = (tools.study(each, **options) for each in (scaled, arrays | {"softmax_scale": scale}))
        for one, other in zip(*(each.rows for each in both), strict=True):
            for name, number in one.items():
                is_float = isinstance(number, (float, list))
                assert other[name] == (pytest.approx(number, rel=1e-4, abs=1e-6) if is_float else number)


@pytest.mark.parametrize("name", MASK_NAMES)
@pytest.mark.parametrize("dtype", [bool, np.int64])
@pytest.mark.parametrize(
    "options",
    [{"schemes": "int4:g32,int8:head,kivi2,fp8"}, {"evict": "knorm@0.5,snapkv(window=4)@0.5+int4:g32"}],
)
def test_padding_counts_nowhere(rng, arrays, name, dtype, options):
    """A file with left padding gives the numbers of the file without it; what padding holds is nothing."""
    pads = [7, 0]
    expected, padded = {}, {}
    for side in ("key", "value"):
        rows = arrays[side].reshape(LAYERS, SEQUENCES, TOKENS, HEADS, DIM)
        rows[:, 0, :7] = 1000
        padded[side] = rows
        expected[side] = np.concatenate([rows[:, s, pad:] for s, pad in enumerate(pads)], 1)
    starts = np.array([0, TOKENS - 7, 2 * TOKENS - 7])
    mask = np.arange(TOKENS) >= np.array(pads)[:, None]
    cache = np.stack((padded["key"], padded["value"]))
    found = tools.study(
        {"cache": cache, "query": arrays["query"], name: mask.astype(dtype)},
        layout="| kv l b n h c",
        **options,
    )
    exact = tools.study(expected | {"query": arrays["query"], "seqstarts": starts}, **options)
    assert numbers(found) == numbers(exact)
    assert found.tokens == 2 * TOKENS - 7
    assert "a mask hides 7 of 96 tokens: padding is not counted" in found.notes


def test_queries_beside_codes(arrays):
    """Quantized keys and values are decoded, and have attention of their own."""
    sides = [formats.encode(arrays[side].astype(np.float32), "q8_0")["codes"] for side in ("key", "value")]
    described = files.Description("l kv | b n h c", format="q8_0")
    cache = [[side[i].reshape(SEQUENCES, TOKENS, HEADS, -1) for side in sides] for i in range(LAYERS)]
    coded = {f"cache.{i}.{j}": side for i, pair in enumerate(cache) for j, side in enumerate(pair)}
    contents = files.Contents(coded | {"query": arrays["query"]}, {}, description=described)
    [found] = tools.study(contents, "int4:g32").summary
    [plain] = tools.study(arrays, "int4:g32").summary
    assert found.output_error == pytest.approx(plain.output_error, rel=0.05)
