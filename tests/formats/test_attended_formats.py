"""Attention over every format: what its bytes stand for, attended to in float64 and by kvkit."""

import numpy as np
import pytest

import kvkit
from kvkit.formats import NAMED, decode, encode

TOKENS, HEADS = 32, 2


@pytest.mark.cpu
@pytest.mark.parametrize("name", NAMED)
def test_attention_over(rng, name):
    dim = 576 if name == "ds_mla" else 64
    scale = {"ort_int8": 0.03, "ort_int4": 0.4}.get(name)
    sides = rng.standard_normal((2, TOKENS, HEADS, dim)).astype(np.float32)
    keys, values = (decode(encode(side, name, scale=scale), name) for side in sides)
    query = rng.standard_normal((1, 1, HEADS, dim)).astype(np.float32)
    got = kvkit.multi_head_attention(query, keys[None], values[None], num_heads=HEADS, head_dim=dim)[0, 0]
    for h in range(HEADS):
        scores = keys[:, h].astype(np.float64) @ query[0, 0, h] / np.sqrt(dim)
        weights = np.exp(scores - scores.max())
        np.testing.assert_allclose(got[h], weights @ values[:, h] / weights.sum(), atol=2e-5)
        assert np.abs(keys[:, h] - sides[0][:, h]).max() < 2  # it is what was encoded
