"""Attention over parts of a context, put together: the whole, whatever the parts and their order."""

import attention_scenes as scenes
import ml_dtypes
import numpy as np
import pytest
from attention_scenes import FP32, assert_near
from scenes import assert_same

import kvkit
from kvkit import merge_attention_states
from kvkit.reference import attention as reference
from kvkit.tools.vectors.calls import static_mask

INF = np.inf
floats = pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])


def parts(rng, count, shape=(3, 4, 8), dtype=np.float32):
    outputs = [rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(count)]
    return outputs, [3 * rng.standard_normal(shape[:-1], np.float32) for _ in range(count)]


def near(got, expected, tolerance=1e-6):
    for label, one, other in zip(("attn_output", "lse"), got, expected, strict=True):
        assert_near(one, np.asarray(other), tolerance, label)


# The whole


def test_masks_sinks_and_prefill(rng):
    """Each part with its columns of the mask; the sinks belong to one of them."""
    sinks = np.array([1, -2, 5, 0], np.float32)
    call = scenes.static(rng, FP32, 50, 20, is_causal=False)
    mask = static_mask(rng, call, (4, 20))
    mask[..., 40:] = np.where(np.arange(30) > np.arange(20)[:, None] + 10, -INF, mask[..., 40:])
    mask[0, 3] = -INF
    whole = call.but(attn_mask=mask, sinks=sinks)
    results = [
        call.but(key=call["key"][:, a:b], value=call["value"][:, a:b], attn_mask=mask[..., a:b].copy()).run(
            return_lse=True, sinks=sinks if a == 40 else None
        )
        for a, b in ((0, 5), (5, 40), (40, 70))
    ]
    near(merge_attention_states(*zip(*results, strict=True)), whole.run(return_lse=True), 1e-5)


@floats
def test_vectors_are_the_plain_form(dtype, rng, monkeypatch):
    outputs, lses = parts(rng, 3, (2, 37), dtype=dtype)
    lses[1][0] = -INF
    found = merge_attention_states(outputs, lses)
    code = kvkit.cpu.attention.merge.merge_code
    monkeypatch.setattr(kvkit.cpu.attention.merge, "merge_code", lambda element: code(element, plain=True))
    kvkit.merge.merges.clear()
    for one, other in zip(merge_attention_states(outputs, lses), found, strict=True):
        assert_same(one, other)
    kvkit.merge.merges.clear()


# Parts that count for nothing


def test_one_part_is_itself(rng):
    outputs, lses = parts(rng, 1)
    for got, expected in zip(merge_attention_states(outputs, lses), (outputs[0], lses[0]), strict=True):
        assert_same(got, expected)


empty = pytest.mark.parametrize("lse_of_none", [-INF, INF], ids=str)


@empty
@floats
@pytest.mark.parametrize("content", [0, np.nan, INF, -INF], ids=str)
def test_an_empty_part_changes_no_bit(dtype, content, lse_of_none, rng):
    """+inf is what FlashAttention 2 says of a query without keys."""
    outputs, lses = parts(rng, 1, dtype=dtype)
    nothing = np.full_like(outputs[0], content)
    none = np.full_like(lses[0], lse_of_none)
    for order in (slice(None), slice(None, None, -1)):
        got = merge_attention_states([*outputs, nothing][order], [*lses, none][order])
        assert_same(got[0], outputs[0])
        assert_same(got[1], lses[0])


@empty
@pytest.mark.parametrize("count", [1, 2, 3])
def test_only_empty_parts(count, lse_of_none, rng):
    outputs, lses = parts(rng, count)
    for output, lse in zip(outputs, lses, strict=True):
        output[...], lse[...] = np.nan, lse_of_none
    lses[0][1] = -INF
    output, lse = merge_attention_states(outputs, lses)
    assert not output.any()
    assert (lse == -INF).all()


def test_rows_are_apart(rng):
    """Some heads of some rows are empty in one part, NaN there; others in the other."""
    outputs, lses = parts(rng, 2)
    outputs[0][1, 2], lses[0][1, 2] = np.nan, -INF
    outputs[1][0, 3], lses[1][0, 3] = np.nan, INF
    got = merge_attention_states(outputs, lses)
    lses[1][0, 3] = -INF
    near(got, reference.merge_attention_states(outputs, lses))
    assert_same(got[0][1, 2], outputs[1][1, 2])
    assert_same(got[0][0, 3], outputs[0][0, 3])


def test_nan_is_not_lost(rng):
    outputs, lses = parts(rng, 2)
    outputs[0][1, 2, 3] = np.nan
    assert np.argwhere(np.isnan(merge_attention_states(outputs, lses)[0])).tolist() == [[1, 2, 3]]


# Numbers


@pytest.mark.parametrize("size", [80, 1e3, 1e30, -80, -1e3, -1e30])
def test_huge_lses(size):
    ones = np.ones((1, 1, 4), np.float32)
    lses = [np.full((1, 1), size, np.float32)] * 2
    output, lse = merge_attention_states((ones, 3 * ones), lses)
    assert (output == 2).all()
    assert lse[0, 0] == pytest.approx(size + np.log(2), rel=1e-6)
    far = [lses[0], lses[0] - np.float32(abs(size))]
    output, lse = merge_attention_states((ones, 3 * ones), far)
    assert (output == 1).all()
    assert lse[0, 0] == np.float32(size)


@floats
def test_many_parts_in_any_type(dtype, rng):
    """Sums in float32, one rounding: no more than half a unit off, and what float32 loses."""
    outputs, lses = parts(rng, 300, dtype=dtype)
    output, lse = merge_attention_states(outputs, lses)
    expected = reference.merge_attention_states(outputs, lses)
    assert output.dtype == dtype
    assert lse.dtype == np.float32
    eps = float(ml_dtypes.finfo(dtype).eps)
    assert (np.abs(output.astype(np.float64) - expected[0]) <= 0.51 * eps * np.abs(expected[0]) + 2e-6).all()
    assert_near(lse, expected[1], 1e-6)


# Errors
