"""The quantized layer on what is packed: the same as of plain lists; what a step sees; sizes."""

import numpy as np
import pytest
import quantized_cache_reference as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_cache_scenes import KEY, OPTIONS, PMX, VALUE, coded, feed, states
from scenes import first_quick

import kvkit
from kvkit.cache import Cache, QuantizedLayer, QuantSpec, load
from kvkit.errors import KvkitError


class Model:
    """Drives both sides of the reference like a layer."""

    def __init__(self, key, value, residual_length, sink, read_back=False):
        rest = sink, residual_length, read_back
        self.sides = [reference.Side(key, "channel", *rest), reference.Side(value, "token", *rest)]

    def update(self, *given):
        for side, x in zip(self.sides, given, strict=True):
            side.update(x)

    def all(self, name, *arguments):
        for side in self.sides:
            getattr(side, name)(*arguments)

    def check(self, layer):
        """Check that stored tokens, codes and parameters are the layer's, bit for bit."""
        assert layer.get_seq_length() == len(self.sides[0].tokens)
        if not self.sides[0].tokens:
            return
        for i, side in enumerate(self.sides):
            assert (layer.keys, layer.values)[i].tobytes() == side.stored().tobytes()
            found, cells = coded(layer, i)
            assert found.shape[2] == len(side.bytes)
            assert cells.shape[2] == len(side.blocks)
            for (positions, wanted), cell in zip(side.blocks, np.moveaxis(cells, 2, 0), strict=True):
                assert cell.tobytes() == wanted.tobytes()
                for p in positions:
                    assert np.array_equal(found[:, :, p - side.sink], side.bytes[p])


@st.composite
def actions(draw):
    kinds = st.sampled_from([*["update"] * 3, "crop", "take", "repeat", "record", "reset", "file"])
    return [(draw(kinds), draw(st.integers(0, 14)), draw(st.integers(0, 99))) for _ in range(10)]


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    return tmp_path_factory.mktemp("layers")


@settings(max_examples=80)
@given(actions(), st.sampled_from([(0, 0), (5, 2), (1, 4)]), st.booleans())
def test_any_history_is_that_of_plain_lists(room, history, window, read_back):
    """Between operations the layer is saved and loaded."""
    arguments = (KEY, VALUE, *window, read_back)
    residual, sink = window
    layer = QuantizedLayer(key=KEY, value=VALUE, residual_length=residual, sink=sink, read_back=read_back)
    cache, model, batch = Cache([layer]), Model(*arguments), 2
    for kind, number, seed in history:
        length = layer.get_seq_length()
        if kind == "update":
            new = states(number, batch, seed=seed)
            turned = [np.ascontiguousarray(x.transpose(2, 0, 3, 1)).transpose(1, 3, 0, 2) for x in new]
            views = layer.update(*(turned if seed % 2 else new))
            model.update(*new)
            if length + number:
                for view, side in zip(views, model.sides, strict=True):
                    assert np.asarray(view).tobytes() == side.view().tobytes()
        elif kind == "crop" and number < length:
            layer.crop(length - number if seed % 2 else -number)
            model.all("crop", length - number)
        elif kind in ("take", "repeat") and length:
            index = [seed % batch, number % batch] if kind == "take" else np.repeat(np.arange(batch), 2)
            layer.reorder(index) if kind == "take" else layer.repeat(2)
            model.all("take", index)
            batch = len(index)
            if batch > 4:
                layer.reorder([0])
                model.all("take", [0])
                batch = 1
        elif kind == "record":
            layer.activate_past_recording()
            for side in model.sides:
                side.recording = True
        elif kind == "reset":
            layer.reset()
            model = Model(*arguments)
        elif kind == "file":
            cache.save(room / "cache.npz")
            cache = load(room / "cache.npz")
            (layer,) = cache.layers
        model.check(layer)


def test_a_view_is_good_until_the_layer_changes():
    layer, tokens = QuantizedLayer(**OPTIONS), states(40)
    keys, _ = feed(layer, tokens, 30)
    with pytest.raises(ValueError, match="copy"):
        np.asarray(keys, copy=False)
    assert np.asarray(keys, np.float64).dtype == np.float64
    layer.reserve(10)
    assert np.array_equal(keys, tokens[0][:, :, :30])
    feed(layer, tokens, 31)
    with pytest.raises(KvkitError, match="KVView: expected"):
        np.asarray(keys)


@pytest.mark.parametrize(("dtype", "param"), first_quick(PMX))
def test_read_back_is_the_pmx_operator(dtype, param):
    spec = QuantSpec(f"int8:g8:{param}")
    layer = QuantizedLayer(key=spec, value=spec, residual_length=0, sink=0, read_back=True)
    tokens = states(20, dims=(16, 16), dtype=dtype)
    cache = np.zeros((2, 1, 2, 32, 2, 16), np.int8)
    scale = np.zeros((2, 1, 2, 32, 2, 2), param)
    for begin, end in ((0, 7), (7, 8), (8, 20)):
        views = feed(layer, tokens, end)
        new = [np.ascontiguousarray(x[:, :, begin:end].swapaxes(1, 2)) for x in tokens]
        pmx = kvkit.key_value_cache(*new, begin, cache, scale, quant_bit=8)
        for view, array in zip(views, pmx, strict=True):
            assert np.asarray(view).tobytes() == np.ascontiguousarray(array.swapaxes(1, 2)).tobytes()
    codes = coded(layer)[0].view(np.int8).swapaxes(1, 2)
    assert np.array_equal(codes, cache[:, 0, 0, :20])


def test_sizes():
    layer, tokens = QuantizedLayer(**OPTIONS), states(20)
    assert layer.get_mask_sizes(3) == (3, 0)
    assert (layer.keys, layer.get_max_length(), layer.nbytes) == (None, -1, 0)
    layer.update(*tokens, cache_position=range(20))
    assert layer.get_mask_sizes(3) == (23, 0)
    assert layer.get_seq_length() == 20
    layer.update(*(x[:, :, :0] for x in tokens))
    assert layer.get_seq_length() == 20
    sides = layer.store.sides
    coded_bytes = [(12, 16 / 2 + 16 * 4 / 4), (13, 24 / 4 + 24 / 8 * 4)]
    exact = [(20 - count) * dim * 4 for (count, _), dim in zip(coded_bytes, (16, 24), strict=True)]
    assert layer.nbytes == 4 * sum(exact) + 4 * sum(count * size for count, size in coded_bytes)
    assert sides[0].tail.shape[2] <= 20 + 5 + 4 + 16


def test_the_tail_stays_small():
    """A long prefill's originals go with the next token; a thousand tokens more make no new memory."""
    layer, tokens = QuantizedLayer(**OPTIONS), states(5000, batch=1)
    feed(layer, tokens, 4000, 4001)
    tails = {id(side.tail) for side in layer.store.sides}
    for n in range(4002, 5001):
        feed(layer, tokens, n)
        assert {id(side.tail) for side in layer.store.sides} == tails
    assert max(side.tail.shape[2] for side in layer.store.sides) < 60
