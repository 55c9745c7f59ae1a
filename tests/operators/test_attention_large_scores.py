"""Attention over codes where scores are large: calls of few rows and of many make the same of the same codes.

Both see codes times scales in float32. A load rounds that to the type of the data, which moves a score as
rounding the key does: by no more than that type's precision.
"""

import attention_scenes as scenes
import ml_dtypes
import numpy as np
import pytest
from attention_scenes import TOLERANCE, assert_near
from scenes import ODD_GROUPS, QUANTIZED, Formats

from kvkit.reference import attention as oracle
from kvkit.reference import cache as reference

SAME_TYPES = [
    Formats(t1, "int8", t1, bit, group) for t1 in ("fp16", "bf16") for bit, group in ((8, 32), (4, 16))
]
OTHER_TYPES = [Formats("bf16", "int8", "fp16", 4, 32)]
FORMATS = SAME_TYPES + OTHER_TYPES + [f for f in QUANTIZED if f.group == 8] + ODD_GROUPS
PAST, NEW = 130, 12  # tokens in the cache, enough for products of integers, and in the call of many rows
NEW_NAMES = "query", "current_key", "current_value"


def eps(dtype):
    return float(ml_dtypes.finfo(dtype).eps)


def codes_times_scales(call, monkeypatch):
    """Make the oracle round keys and values only to a type of scales that is coarser than the data's."""
    t1, store = call["query"].dtype, reference.store_heads

    def products(codes, cell, group, t1_of_outputs):
        product = codes.reshape(*cell.shape, group).astype(np.float32) * cell.astype(np.float32)[..., None]
        return product.astype(cell.dtype if eps(cell.dtype) > eps(t1) else np.float32).reshape(codes.shape)

    monkeypatch.setattr(reference, "dequantize_heads", products)
    monkeypatch.setattr(reference, "store_heads", lambda x, *rest: store(x.astype(t1), *rest))
    given, after = [call[name].astype(np.float32) for name in NEW_NAMES[1:]], call.copy()
    options, _ = oracle.split_attributes(call.attributes)
    return reference.key_value_cache(*given, PAST, after["cache"], after["scale"], **options)


LARGEST = 3, 10
SLOW = dict.fromkeys([*ODD_GROUPS[1:], *(f for f in QUANTIZED if f.group == 8)], pytest.mark.slow)


@pytest.mark.parametrize(
    ("formats", "deviation", "factor"),
    [pytest.param(f, *LARGEST, marks=SLOW.get(f, ())) for f in FORMATS]
    + [(f, *pair) for f in SAME_TYPES for pair in ((3, 1), (1, 10))],
    ids=str,
)
def test_large_scores(formats, deviation, factor, rng, monkeypatch):
    dim = formats.dims[0] if formats in ODD_GROUPS else 64
    call = scenes.static_cache(rng, formats, PAST, NEW, batch=1, dim=dim, softmax_scale=factor / dim**0.5)
    t1 = call["query"].dtype
    for name in NEW_NAMES[:2]:
        call.inputs[name] = (deviation * call[name].astype(np.float32)).astype(t1)
    key, value = codes_times_scales(call, monkeypatch)
    query = call["query"].astype(np.float32).reshape(NEW, 2, 2, dim)
    scores = np.einsum("ikgd,jkd->ikgj", query, key[0]) * call.attributes["softmax_scale"]
    largest = np.abs(scores).max(-1).reshape(1, NEW, 4)
    assert largest.max() > 16 or dim < 64
    _, options = oracle.split_attributes(call.attributes)
    output, lse = oracle.multi_head_attention(call["query"], key, value, None, **options)
    rounded = [side.astype(t1) for side in (key, value)]
    _, rounded_lse = oracle.multi_head_attention(call["query"], *rounded, None, **options)

    many, many_lse = call.run(return_lse=True)  # from now on the cache has all
    last = call.but(**{name: call[name][:, -1:].copy() for name in NEW_NAMES}, start_pos=PAST + NEW - 1)
    few, few_lse = last.run(return_lse=True)
    noise = 2e-5 * max(1, largest.max() / 8)  # of sums in float32
    for got, got_lse, rows in ((many, many_lse, slice(None)), (few, few_lse, slice(-1, None))):
        assert_near(got, output[:, rows], min(TOLERANCE[str(t1)], eps(t1)) + noise)
        assert_near(got_lse, lse[:, rows], noise, "lse")
        moved = np.abs(got_lse - rounded_lse[:, rows])
        assert (moved <= eps(t1) * largest[:, rows] + noise).all()
    assert_near(few[:, 0], many[:, -1], eps(t1) + noise, "few rows beside many")
    assert_near(few_lse[:, 0], many_lse[:, -1], noise, "few rows beside many, lse")
