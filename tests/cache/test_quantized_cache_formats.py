"""Quantized layers of floats of 8 bits and ggml's blocks, and rotated ones."""

import numpy as np
import pytest

from kvkit import KvkitError, formats
from kvkit.cache import QuantizedLayer, QuantSpec
from kvkit.reference.attention import attend_sequence

D, SINK, RESIDUAL = 64, 2, 8
E4M3 = QuantSpec("e4m3:g64:float32")
SPECS = {
    "e4m3": E4M3,
    "q8_0": QuantSpec("q8_0"),
    "rotated": QuantSpec("e4m3:g64:float32+hadamard"),
    "vllm": QuantSpec("q8_0+vllm"),
    "scale of 1": QuantSpec("e5m2", scale=1),
    "scales of heads": QuantSpec("e4m3", scale=(0.5, 2.0)),
}


def tokens(rng, count=40):
    keys = rng.standard_normal((1, 2, count, D))
    keys[..., 5] *= 10
    return keys.astype(np.float32), rng.standard_normal((1, 2, count, D)).astype(np.float32)


def filled(spec, states, sink=SINK, residual=RESIDUAL):
    layer = QuantizedLayer(key=spec, value=spec, residual_length=residual, sink=sink)
    layer.update(*(side[:, :, :33] for side in states))
    return layer, layer.update(*(side[:, :, 33:] for side in states))


def read(x, spec, value):
    """Return tokens after they were coded and decoded."""
    scale, spec = spec.scale, spec.of_side(value)
    turned = formats.rotate(x, spec.rotation, value=value)
    how = {"scale": "group", "group": 64} if spec.format == "e4m3" else {}
    if scale is not None:  # [B, H, tokens, D]: scales of a token's head
        how = {"scale": np.ones(x.shape[:-1], np.float32) * np.float32(scale).reshape(-1, 1)}
    arrays = formats.encode(turned, spec.format, **how)
    return formats.rotate(formats.decode(arrays, spec.format), spec.rotation, what="output", value=value)


@pytest.mark.parametrize("name", SPECS)
def test_what_comes_back(rng, name):
    states, spec = tokens(rng), SPECS[name]
    layer, views = filled(spec, states)
    for value, (view, stored, given) in enumerate(zip(views, layer._stored(), states, strict=True)):
        seen, held = np.asarray(view), np.asarray(stored)
        exact = {"atol": 2e-5 if "+" in spec.format else 0}
        np.testing.assert_allclose(seen[:, :, 25:], given[:, :, 25:], **exact)  # the window before the update
        np.testing.assert_allclose(held[:, :, :SINK], given[:, :, :SINK], **exact)
        coded = read(given[:, :, SINK:-RESIDUAL], spec, bool(value))
        np.testing.assert_allclose(held[:, :, SINK:-RESIDUAL], coded, **exact)


@pytest.mark.parametrize("queries", [1, 12])
@pytest.mark.parametrize("name", SPECS)
def test_attention(rng, name, queries):
    """Against float64 over the arrays that the update returns."""
    states = tokens(rng)
    layer, views = filled(SPECS[name], states)
    query = rng.standard_normal((1, 4, queries, D)).astype(np.float32) if queries == 1 else None
    if query is None:
        layer = QuantizedLayer(key=SPECS[name], value=SPECS[name], residual_length=RESIDUAL, sink=SINK)
        layer.update(*(side[:, :, :28] for side in states))
        views = layer.update(*(side[:, :, 28:] for side in states))
        query = rng.standard_normal((1, 4, queries, D)).astype(np.float32)
    got = layer.attend(query)
    expected, _ = attend_sequence(*(np.asarray(x)[0].swapaxes(0, 1) for x in (query, *views)))
    np.testing.assert_allclose(got[0].swapaxes(0, 1), expected, atol=3e-5)


@pytest.mark.parametrize("rotation", ["hadamard", "hadamard:16", "llama.cpp", "vllm"])
def test_attention_does_not_see_a_rotation(rng, rotation):
    """Before anything is coded a layer attends as one without it, within rounding."""
    states, query = tokens(rng), rng.standard_normal((1, 4, 1, D)).astype(np.float32)
    outs = []
    for turned in (None, rotation):
        layer, _ = filled(QuantSpec("q8_0" if turned is None else f"q8_0+{turned}"), states, residual=100)
        outs.append(layer.attend(query))
    np.testing.assert_allclose(outs[1], outs[0], atol=1e-5)


def test_bytes_per_token():
    assert QuantSpec("uint8").bytes_per_token(80) == 80 + 80 / 16 * 4  # a default group adapts
    assert E4M3.bytes_per_token(D) == D + 4
    assert QuantSpec("fp8:g32").of_side(False) == QuantSpec("e4m3:g32").of_side(True)
    assert SPECS["q8_0"].bytes_per_token(D) == 68


@pytest.mark.parametrize(
    ("how", "message"),
    [
        *(
            ({"format": name}, r"format: expected int8, .*, got .*")
            for name in ("mxfp4", "int4:g32:head", "nvfp4", "e4m3:token", "int8:bfloat16")
        ),
        *(
            ({"format": name}, "format: expected a format that `kvkit list formats` prints, got")
            for name in ("nowhere.py:Mine", "", "int5")
        ),
        ({"format": 8}, "format: expected a format such as"),
        ({"format": "q8_0", "scale": 1.0}, "scale: expected None, because codes have computed scales"),
        ({"format": "e4m3", "scale": (1.0, 0.0)}, "scale: expected numbers above 0, got .1.0, 0.0."),
        ({"format": "e4m3", "scale": ()}, "scale: expected numbers above 0, got .."),
        ({"scale": 1.0}, "scale: expected None, because codes have computed scales"),
    ],
)
def test_what_no_kernel_reads_in_place_is_refused(how, message):
    with pytest.raises(KvkitError, match=message) as caught:
        QuantSpec(**how)
    assert ("`kvkit study`" in str(caught.value)) == message.startswith("format: expected int8")
