"""Attention over codes, against float64 over the same numbers; its memory; what the axis of groups is for."""

import copy

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numba
import numpy as np
import pytest
from footprint import needs_status, sizes_by
from quantized_cache_scenes import OPTIONS, feed, states
from scenes import first_quick

from kvkit.cache import QuantizedCache
from kvkit.cache.layers import attention
from kvkit.cache.layers.quant_spec import QuantSpec
from kvkit.cache.layers.quantized import QuantizedLayer
from kvkit.reference.attention import attend_sequence

# float32 sums of some hundred products, then one rounding to the format
CLOSE = {"float32": 5e-6, "float16": 1e-3, "bfloat16": 8e-3}

# An array of a view is rounded to its format, which attention does not do for few rows of queries: a score is
# off by no more than its terms are, and the logarithm by no more than a score
ROUNDING = {"float32": 0, "float16": 2**-11, "bfloat16": 2**-8}


def attended(query, keys, values, mask=None, **options):
    """Return attention [B, Hq, q, Dv] and lse by the reference, in float64."""
    query, keys, values = (x.swapaxes(1, 2).astype(np.float64) for x in (query, keys, values))
    sizes = len(query), query.shape[2], query.shape[1], keys.shape[1]
    pairs = [
        attend_sequence(
            query[b], keys[b], values[b],
            None if mask is None else np.broadcast_to(mask, sizes)[b],
             **options,
        )
        for b in range(len(query))
    ]  # fmt: skip
    outputs, lses = zip(*pairs, strict=True)
    return np.stack(outputs).swapaxes(1, 2), np.stack(lses).swapaxes(1, 2)


def check(layer, views, query, mask=None, **options):
    given = None if mask is None else mask
    output, lse = layer.attend(query, given, return_lse=True, **options)
    if mask is not None and mask.ndim == 2:
        mask = mask[:, None, None]
    truth, truth_lse = attended(query, *map(np.asarray, views), mask, **options)
    close, rounding = CLOSE[query.dtype.name], ROUNDING[query.dtype.name]
    largest, keys = np.abs(query.astype(np.float64)).max(), np.abs(np.asarray(views[0]).astype(np.float64))
    terms = largest * keys.sum(-1).max() * options.get("softmax_scale", query.shape[3] ** -0.5)
    assert output.dtype == query.dtype
    assert np.abs(output.astype(np.float64) - truth).max() < close * max(1, np.abs(truth).max())
    bound = 1e-5 * max(1, np.abs(truth_lse).max()) + rounding * terms
    assert np.abs(lse - truth_lse).max() < bound
    assert np.array_equal(layer.attend(query, given, **options), output)


def queries(heads, tokens, dim, dtype, seed=9):
    return np.random.default_rng(seed).standard_normal((2, heads, tokens, dim)).astype(dtype)


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize(
    ("dtype", "dims"), first_quick([("float32", (16, 24)), ("float16", (32, 16)), ("bfloat16", (48, 8))])
)
def test_parts_of_every_length(dtype, dims, tokens):
    """Sinks alone, a tail, some codes, many blocks, each with new tokens; 1 and 6 query heads a key head."""
    layer, given = QuantizedLayer(**OPTIONS), states(700, dims=dims, dtype=dtype)
    for end in (tokens, tokens + 3, 60, 60 + tokens, 700):
        views = feed(layer, given, end)
        for heads in (2, 12):
            check(layer, views, queries(heads, min(tokens, end), dims[0], dtype))


IN_PLACE = {  # of float32, with head sizes of whole vectors: codes are read where they lie
    "4 asym channel, 2 asym token": (OPTIONS["key"], OPTIONS["value"]),
    "8 sym channel, 8 asym token": (QuantSpec("int8:g32:channel"), QuantSpec("uint8:g8")),
    "2 asym token, 4 sym token": (
        QuantSpec("uint2:g32:float32"),
        QuantSpec("int4:g16:float32"),
    ),
    "2 sym token, 4 asym channel": (QuantSpec("int2:g1"), QuantSpec("uint4:g5:channel")),
}


@pytest.mark.parametrize("case", first_quick(IN_PLACE))
def test_every_code_read_in_place(case):
    """1, 2, 4, 8 and more rows of queries; blocks cut short, sequences taken anew."""
    key, value = IN_PLACE[case]
    layer, given = QuantizedLayer(key=key, value=value, residual_length=7, sink=3), states(333, dims=(96, 32))
    for end in (2, 9, 150, 151, 333):
        views = feed(layer, given, end)
        for heads in (2, 4, 8, 16, 20) if end > 9 else (4,):
            check(layer, views, queries(heads, 1, 96, "float32"))
        check(layer, views, queries(2, min(end, 3), 96, "float32"))
        if end == 150:
            layer.crop(101)
            layer.reorder([1, 0])
            check(layer, (layer.keys, layer.values), queries(8, 1, 96, "float32"))
            given = [x[[1, 0]] for x in given]


@pytest.mark.parametrize(
    ("text", "dims"), [("fp8:g24", (96, 48)), ("int8:g24", (96, 48)), ("e5m2:g40", (80, 80))]
)
def test_groups_that_no_vectors_fill(text, dims):
    layer, given = QuantizedLayer(text, residual_length=4), states(20, dims=dims)
    views = feed(layer, given, 20)
    for heads in (2, 8):
        check(layer, views, queries(heads, 1, dims[0], "float32"))


def unrounded(side):
    """Return a side's tokens in float32, coded ones as their codes say."""
    bits, dim, sink, coded = side.spec.bits, side.shape[3], min(side.sink, side.length), side.codes_read
    places = np.tile(np.arange(0, 8, bits), dim * bits // 8).astype(np.uint8)
    codes = side.codes[:, :, :coded].repeat(8 // bits, axis=-1) >> places
    codes = (codes & (2**bits - 1)).astype(np.float32)
    cells = side.cells[:, :, side.block_of[:coded]].astype(np.float32)
    scales, minima = (half.repeat(2 * dim // cells.shape[3], axis=-1) for half in np.split(cells, 2, axis=-1))
    numbers = side.read().astype(np.float32)
    numbers[:, :, sink : sink + coded] = codes * scales + minima
    return numbers


@pytest.mark.parametrize("dtype", first_quick(["float16", "float32", "bfloat16"]))
@pytest.mark.parametrize(("heads", "tokens"), [(2, 1), (16, 1), (18, 1), (2, 9)])
def test_which_numbers_attention_sees(dtype, heads, tokens):
    """Few rows of queries and many see what codes stand for, not rounded as arrays of views are."""
    layer, given = QuantizedLayer(**OPTIONS), states(333, dims=(32, 32), dtype=dtype)
    feed(layer, given, 320)
    views = feed(layer, given, 333)
    exact, rounded = (
        [unrounded(side) for side in layer.store.sides],
        [np.asarray(view).astype(np.float32) for view in views],
    )
    assert all(
        np.array_equal(a.astype(dtype).astype(np.float32), b) for a, b in zip(exact, rounded, strict=True)
    )
    query = 8 * queries(heads, tokens, 32, "float32").astype(dtype)
    lse = layer.attend(query, return_lse=True)[1]
    errors = [np.abs(lse - attended(query, *seen)[1]).max() for seen in (exact, rounded)]
    assert errors[0] < 2e-5
    assert dtype == "float32" or errors[1] > 2e-4


@pytest.mark.parametrize("tokens", [1, 20])
def test_masks_and_weights(tokens):
    layer, given = QuantizedLayer(**OPTIONS), states(90)
    views, query = feed(layer, given, 90), queries(4, tokens, 16, "float32")
    rng = np.random.default_rng(0)
    padding = np.arange(90) >= np.array([[7], [0]])
    check(layer, views, query, padding)
    check(layer, views, query, rng.random((2, 1, tokens, 90)) < 0.7)
    check(layer, views, query, rng.standard_normal((1, 4, tokens, 90)).astype(np.float32))
    sinks = rng.standard_normal(4).astype(np.float32)
    check(layer, views, query, softmax_scale=0.4, softcap=3.0, sinks=sinks)


def test_prepared_calls_are_as_good_as_fresh_ones(monkeypatch):
    """Token by token, while tokens become codes and a draft goes back: the same bytes, few preparations."""
    made, prepare = [], attention.prepare_rows
    layer, given = QuantizedLayer(**OPTIONS), states(600, dims=(32, 32))
    query = queries(4, 600, 32, "float32")
    feed(layer, given, 20)
    monkeypatch.setattr(attention, "prepare_rows", lambda *given: made.append(1) or prepare(*given))
    for i in range(20, 600):
        feed(layer, given, i + 1)
        got = layer.attend(query[:, :, i : i + 1])
        if i % 37 == 0 or i > 595:
            fresh = copy.deepcopy(layer)  # which has no prepared call
            assert fresh.attend(query[:, :, i : i + 1]).tobytes() == got.tobytes()
            made.pop()
        if i == 300:
            layer.crop(-30)
            feed(layer, given, i + 1)
    assert len(made) < 10


@pytest.mark.parametrize("tokens", [1, 64])
def test_threads_give_the_same_bytes(tokens):
    layer, given, results = QuantizedLayer(**OPTIONS), states(3000, dims=(32, 32)), []
    feed(layer, given, 3000)
    for threads in (1, 2):
        numba.set_num_threads(threads)
        other = QuantizedLayer(**OPTIONS)
        feed(other, given, 3000)
        results.append((layer.attend(queries(4, tokens, 32, "float32")).tobytes(), other.keys.tobytes()))
    assert results[0] == results[1]


# What it is for


@pytest.mark.parametrize("read_back", [False, True])
def test_what_a_step_sees_of_its_own_tokens(read_back):
    """Measured the obvious way codes seem to lose nothing, unless they are read back."""
    rng, spec = np.random.default_rng(3), QuantSpec("kivi2")
    cache = QuantizedCache(num_layers=2, key=spec, value=spec, residual_length=16, read_back=read_back)
    keys, values, query = rng.standard_normal((3, 1, 2, 256, 64)).astype(np.float32)
    exact = attended(query, keys, values)[0]
    for i in range(2):
        cache.update(keys, values, i)
        error = np.linalg.norm(cache.attend(query, i) - exact) / np.linalg.norm(exact)
        assert error > 0.1 if read_back else error < 1e-5


MEMORY = """
import numpy as np
from kvkit.cache.layers.quant_spec import QuantSpec
from kvkit.cache.layers.quantized import QuantizedLayer
from footprint import extra


def layer(tokens):
    made, x = QuantizedLayer(key="kivi4:g4", value="kivi2:g8"), np.ones((1, 4, 1024, 64), "f2")
    for _ in range(tokens // 1024):
        made.update(x, x)
    made.update(x[:, :, :1], x[:, :, :1])
    return made


small, large = layer(2**15), layer(2**16)
found = {}
for tokens in (1, 40):
    query = np.ones((1, 8, tokens, 64), np.float16)
    small.attend(query)
    found[f"{tokens} queries"] = extra(lambda: large.attend(query))
found["array"] = extra(lambda: large.keys)
"""


@pytest.mark.slow
@needs_status
def test_no_array_of_the_contexts_size():
    """Keys of 65,536 tokens would be 32 MB in float16; scratch is that of half as many."""
    found = sizes_by(MEMORY)
    assert found.pop("array") >= 32  # such an array is seen
    assert len(found) == 2
    assert max(found.values()) < 4, found
