"""Attention over every format as caches take it, in codes or by numpy, against float64 over its numbers.

Operators over codes are in `operators/test_quant_formats.py`.
"""

import numpy as np
import pytest

from kvkit.cache import QuantizedCache, QuantSpec
from kvkit.formats import NAMED, decode, encode
from kvkit.reference.attention import attend_sequence

TOKENS, HEADS = 32, 2
GIVEN = {"e4m3": 1.0, "e5m2": 1.0, "ort_int8": 0.03, "ort_int4": 0.4, "nvfp4": 0.002}
# Relative rms on normal numbers, docs/specifications/formats.md 5; of others by the bits of a code.
RMS = {
    "q8_0": 0.0054, "int8": 0.0040, "e4m3": 0.0264, "e5m2": 0.0529, "q5_1": 0.0379, "q4_1": 0.0782,
    "q4_0": 0.0859, "nvfp4": 0.0952, "int4": 0.0971, "mxfp4": 0.1151, "mlx_mxfp4": 0.1236,
    "mlx_mxfp8": 0.0285,
}  # fmt: skip
LATENT = {"ds_mla": 576, "ds_v4": 512}  # elements of their rows
LESS_THAN = {8: 0.04, 4: 0.13, 2: 0.7}  # int2 has -1, 0 and 1


@pytest.mark.cpu
@pytest.mark.parametrize("name", NAMED)
def test_attention_over(rng, name):
    dim, scale = LATENT.get(name, 64), GIVEN.get(name)
    sides = rng.standard_normal((2, TOKENS, HEADS, dim)).astype(np.float32)
    told = f"{name}:float16" if NAMED[name].find in ("pmx", "span") else name  # as caches have their own
    keys, values = (decode(encode(side, told, scale=scale), name) for side in sides)
    spec = QuantSpec(format=name, group=TOKENS, scale=scale)
    cache = QuantizedCache(1, spec, spec, residual_length=0, sink=0, read_back=True)
    cache.update(*sides.swapaxes(1, 2)[:, None], 0)
    query = rng.standard_normal((1, HEADS, 1, dim)).astype(np.float32)
    got, expected = cache.attend(query, 0)[0, :, 0], attend_sequence(query[0].swapaxes(0, 1), keys, values)[0]
    largest = np.abs(np.einsum("nhd,hd->hn", keys, query[0, :, 0])).max(1) / np.sqrt(dim)  # score of a head
    assert (
        np.abs(got - expected[0]) <= 2e-5 * np.maximum(1, largest / 8)[:, None] + 1e-7 * np.abs(expected[0])
    ).all()
    error = np.linalg.norm(keys - sides[0]) / np.linalg.norm(sides[0])
    if name in RMS:
        assert error == pytest.approx(RMS[name], rel=0.1)
    else:
        assert error < LESS_THAN[NAMED[name].code.bits]
