"""Caches whose old tokens go through schemes in numpy: registered classes, and formats without kernels."""

import copy

import numpy as np
import pytest

from kvkit import KvkitError, formats, tools
from kvkit.cache import QuantizedCache, QuantizedLayer, QuantSpec

D, SINK, RESIDUAL, GROUP = 64, 2, 6, 8


class Thirds:
    """Thirds of the largest of the tokens that come together, so that it matters which do."""

    def encode(self, x):
        assert x.dtype == np.float32
        assert x.ndim == 3
        scale = np.abs(x).max((0, 2))
        return {"codes": np.rint(3 * x / scale[:, None]).astype(np.int8), "scale": scale}

    def decode(self, arrays):
        return arrays.pop("codes") * (arrays.pop("scale")[:, None] / np.float32(3))


@pytest.fixture(autouse=True)
def thirds():
    formats.scheme("thirds")(Thirds)


def spec(name="thirds"):
    return QuantSpec(format=name, group=GROUP)


def cache_of(name="thirds", **options):
    return QuantizedCache(1, spec(name), spec(name), RESIDUAL, SINK, **options)


def tokens(rng, count, batch=2, dtype=np.float32):
    return [rng.standard_normal((batch, 2, count, D)).astype(dtype) for _ in range(2)]


def read(states, coded):
    """Return tokens of which `coded` after the first ones have been coded by thirds."""
    out = states.astype(np.float64)
    for row in out:
        for head in row:
            for begin in range(SINK, SINK + coded, GROUP):
                group = head[begin : begin + GROUP]
                largest = np.float32(abs(group).max())
                group[:] = np.rint(np.float32(3) * group.astype(np.float32) / largest) * (largest / 3)
    return out


def attended(query, keys, values):
    """Attend with the last tokens in float64; two query heads share a key head."""
    keys, values = (np.repeat(side, 2, 1) for side in (keys, values))
    scores = query.astype(np.float64) @ keys.swapaxes(2, 3) / np.sqrt(D)
    new, length = scores.shape[2:]
    scores[:, :, np.arange(new)[:, None] + length - new < np.arange(length)] = -np.inf
    weights = np.exp(scores - scores.max(3, keepdims=True))
    return weights / weights.sum(3, keepdims=True) @ values


def coded_of(length):
    return max(0, length - SINK - RESIDUAL) // GROUP * GROUP


@pytest.mark.parametrize("read_back", [False, True])
def test_growth(rng, read_back):
    """Codes are of whole groups beyond the window; a step sees those of before it, or those after it."""
    states, cache, length = tokens(rng, 40), cache_of(read_back=read_back), 0
    layer = cache.layers[0]
    for new in (1, 20, 3, 1, 0, 15):
        before, length = length, length + new
        views = cache.update(*(side[:, :, before:length] for side in states), 0)
        seen = [read(side[:, :, :length], coded_of(length if read_back else before)) for side in states]
        stored = [read(side[:, :, :length], coded_of(length)) for side in states]
        for view, held, one, other in zip(views, layer.stored(), seen, stored, strict=True):
            assert view.shape == one.shape
            np.testing.assert_allclose(view, one, atol=1e-6)
            np.testing.assert_allclose(held, other, atol=1e-6)
        if new:
            query = rng.standard_normal((2, 4, new, D)).astype(np.float32)
            np.testing.assert_allclose(cache.attend(query, 0), attended(query, *seen), atol=1e-6)
    layer.release_undo()
    query = query[:, :, -1:]
    np.testing.assert_allclose(cache.attend(query, 0), attended(query, *stored), atol=1e-6)
    rows = coded_of(40) // GROUP
    assert layer.nbytes == 2 * 2 * 2 * (rows * (GROUP * D + 4) + (40 - rows * GROUP) * D * 4)


def test_crop_and_drafts(rng):
    states, cache = tokens(rng, 40), cache_of()
    cache.update(*states, 0)
    exact = [read(side, coded_of(40)) for side in states]
    for length in (
        39,
        29,
        21,
        18,
        9,
        1,
    ):  # in the tail, at the end of a group, in one, in the first one, in sinks
        cache.crop(length)
        for held, side in zip(cache.layers[0].stored(), exact, strict=True):
            np.testing.assert_allclose(held, side[:, :, :length], atol=1e-6)
    drafted = cache_of()
    drafted.activate_past_recording()
    drafted.update(*states, 0)
    assert drafted.layers[0].nbytes == sum(side.nbytes for side in states)
    drafted.crop(38)
    for held, side in zip(drafted.layers[0].stored(), states, strict=True):
        np.testing.assert_allclose(held, read(side[:, :, :38], coded_of(38)), atol=1e-6)


def test_after_a_crop(rng):
    """What is left of a group that is cut is read, and the next tokens begin another one."""
    states, cache = tokens(rng, 40), cache_of()
    cache.update(*(side[:, :, :26] for side in states), 0)
    cache.crop(13)
    cache.update(*(side[:, :, 13:33] for side in states), 0)
    for held, side in zip(cache.layers[0].stored(), states, strict=True):
        first = read(side[:, :, :26], 16)[:, :, :13]
        rest = read(np.concatenate((side[:, :, :SINK], side[:, :, 13:33]), 2), 8)[:, :, SINK:]
        np.testing.assert_allclose(held, np.concatenate((first, rest), 2), atol=1e-6)


def test_batch(rng):
    states, cache = tokens(rng, 30), cache_of()
    cache.update(*states, 0)
    other = copy.deepcopy(cache)
    cache.reorder([1, 0, 1])
    other.repeat(2)
    exact = [read(side, coded_of(30)) for side in states]
    for made, rows in (cache, [1, 0, 1]), (other, [0, 0, 1, 1]):
        for held, side in zip(made.layers[0].stored(), exact, strict=True):
            np.testing.assert_allclose(held, side[rows], atol=1e-6)
    assert cache.layers[0].batch_size == 3


@pytest.mark.parametrize("name", ["mxfp4", "int4:g32:channel+hadamard", "kivi2", "nvfp4"])
def test_formats(rng, name):
    """As `formats` has them, which is tested there; in float16."""
    states = tokens(rng, 40, batch=1, dtype=np.float16)
    how = QuantSpec(format=name, group=32, scale=0.002 if name == "nvfp4" else None)
    cache = QuantizedCache(1, how, how, 0, 0)
    cache.update(*states, 0)
    assert cache.layers[0].nbytes < 0.5 * sum(side.nbytes for side in states)
    for side, held in enumerate(cache.layers[0].stored()):
        scheme = how.schemes()[side]
        exact = scheme.decode(scheme.encode(states[side][0, :, :32].swapaxes(0, 1).astype(np.float32)))
        assert held.dtype == np.float16
        np.testing.assert_array_equal(held[0, :, :32].swapaxes(0, 1), exact.astype(np.float16))
        np.testing.assert_array_equal(held[:, :, 32:], states[side][:, :, 32:])


def test_no_files(rng, tmp_path):
    states, cache = tokens(rng, 30), cache_of()
    cache.update(*states, 0)
    message = "expected a layer that can be saved, got one with schemes 'thirds' and 'thirds', which cannot"
    with pytest.raises(KvkitError, match=rf"layers\[0\]: {message}"):
        cache.save(tmp_path / "cache.npz")
    with pytest.raises(KvkitError, match=rf"layers\[0\]: {message}"):
        cache.offload(tmp_path / "folder")
    with pytest.raises(KvkitError, match=message):
        QuantizedCache(None, spec(), spec(), offload=tmp_path / "folder")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"format": "whole"}, "format: expected a scheme that encodes some tokens at a time, got 'whole'"),
        ({"format": "kivi4", "group": 16}, "group: expected a multiple of 32, .* got 16"),
        ({"format": "thirds", "rotation": "hadamard"}, "rotation: expected None, for 'thirds'"),
        ({"format": "nowhere.py:Mine"}, "format: expected"),
        ({"format": "nvfp4"}, "scale: expected a number, for 'nvfp4', got None"),
        ({"format": "nvfp4", "scale": (0.5, 0.25)}, "scale: expected a number, for 'nvfp4', got .0.5, 0.25"),
        ({"format": "ort_int8"}, "scale: expected a number, for 'ort_int8', got None"),
        ({"format": "int4", "scale": 1.0}, "scale: expected None, for int4, got float 1.0"),
        ({"format": "q8_0", "scale": 1.0}, "scale: expected None, because codes have computed scales"),
        ({"format": "e4m3", "scale": (1.0, 0.0)}, "scale: expected numbers above 0, got .1.0, 0.0."),
        ({"format": "e4m3", "scale": ()}, "scale: expected numbers above 0, got .."),
    ],
)
def test_refused(how, message):
    formats.scheme("whole")(type("Whole", (Thirds,), {"whole": True}))
    with pytest.raises(KvkitError, match=message):
        QuantSpec(**how)


def test_one_side_alone():
    with pytest.raises(KvkitError, match="value: expected a format of the kernels"):
        QuantizedCache(value=spec())
    with pytest.raises(KvkitError, match="key: expected a format of the kernels"):
        QuantizedLayer(key=spec())


def broken(method, result):
    formats.scheme("broken")(type("Broken", (Thirds,), {method: lambda self, given: result}))
    return cache_of("broken")


def test_encode_that_is_wrong(rng):
    states, cache = tokens(rng, 30), broken("encode", [1])
    cache.update(*(side[:, :, :5] for side in states), 0)
    with pytest.raises(KvkitError, match=r"broken\.encode: expected a dict of arrays, got"):
        cache.update(*(side[:, :, 5:] for side in states), 0)
    assert cache.get_seq_length() == cache.layers[0].keys.shape[2] == 5


def test_decode_that_is_wrong(rng):
    cache = broken("decode", np.zeros((GROUP, 2, 3), np.float32))
    cache.update(*tokens(rng, 30), 0)
    with pytest.raises(KvkitError, match=r"broken\.decode: expected shape \(8, 2, 64\), got \(8, 2, 3\)"):
        cache.layers[0].stored()


def test_the_same_decorator():
    assert tools.scheme is formats.scheme
    assert QuantSpec(format="thirds", group=GROUP).bytes_per_token(D) == D + 4 / GROUP
