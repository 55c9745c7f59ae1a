"""Every change of a quantized layer, on what is packed: the same as of plain lists."""

import numpy as np
import quantized_cache_reference as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_cache_scenes import KEY, VALUE, coded, states

from kvkit.cache.layers.quantized import QuantizedLayer


class Model:
    """Both sides of the reference, driven like a layer."""

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
        """Stored tokens, codes and parameters are the layer's, bit for bit."""
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
    kinds = st.sampled_from(["update", "update", "update", "crop", "take", "repeat", "record", "reset"])
    return [(draw(kinds), draw(st.integers(0, 14)), draw(st.integers(0, 99))) for _ in range(10)]


@settings(max_examples=100)
@given(actions(), st.sampled_from([(0, 0), (5, 2), (1, 4)]), st.booleans())
def test_any_history_is_that_of_plain_lists(history, window, read_back):
    arguments = (KEY, VALUE, *window, read_back)
    layer, model, batch = QuantizedLayer(*arguments), Model(*arguments), 2
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
            layer.select(index) if kind == "take" else layer.repeat(2)
            model.all("take", index)
            batch = len(index)
            if batch > 4:
                layer.select([0])
                model.all("take", [0])
                batch = 1
        elif kind == "record":
            layer.activate_past_recording()
            for side in model.sides:
                side.recording = True
        elif kind == "reset":
            layer.reset()
            model = Model(*arguments)
        model.check(layer)
