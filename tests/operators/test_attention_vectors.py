"""The attention vectors of the specification, section 9, on the reference.

Random calls compare the package with it (`test_random_calls.py`).
"""

import itertools
import math

import attention_scenes as scenes
import numpy as np
import pytest
from attention_scenes import KINDS, Call, f32, i64, one

INF = math.inf
CACHED = ("static_cache", "dynamic_cache")


def run(call):
    return call.expected()[0]


def answer(*args, **attrs):
    """Return the output of one sequence, [n, H, Dv]."""
    output = run(one(*args, **attrs))
    return output.reshape(output.shape[-3:]) if output.ndim == 4 else output


def weights(kind, n, m, heads=1, **attrs):
    """Return the weights [n, heads, m] of each query for each key, if every score is 0 before the bias."""
    zeros = np.zeros((n, heads, m))
    return answer(kind, zeros, np.zeros((m, heads, m)), one_hot(m, heads), **attrs)


def one_hot(m, heads=1):
    return np.repeat(np.eye(m)[:, None], heads, axis=1)


kinds = pytest.mark.parametrize("kind", KINDS)


# Causal

VISIBLE = {
    (3, 5): ["11100", "11110", "11111"],
    (3, 3): ["100", "110", "111"],
    (1, 4): ["1111"],
    (3, 2): ["00", "10", "11"],
}


@kinds
@pytest.mark.parametrize("lengths", VISIBLE, ids=str)
def test_causal(kind, lengths):
    n, m = lengths
    if kind in CACHED and m < n:
        return
    seen = weights(kind, n, m)[:, 0] > 0
    assert ["".join("01"[int(v)] for v in row) for row in seen] == VISIBLE[lengths]
    everything = weights(kind, n, m, is_causal=False)
    assert everything == pytest.approx(1 / m)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_causal_row_that_sees_nothing_is_zero(kind):
    output = answer(kind, np.ones((3, 1, 2)), np.ones((2, 1, 2)), np.full((2, 1, 2), 7))
    assert output[:, 0].tolist() == [[0, 0], [7, 7], [7, 7]]


def prefix_means(kind, **more):
    value = np.repeat(f32([1, 2, 3, 4, 5])[:, None, None], 4, axis=2)
    output = answer(kind, np.zeros((3, 1, 4)), np.ones((5, 1, 4)), value, **more)
    return output[:, 0, 0]


@kinds
def test_prefix_means(kind):
    assert prefix_means(kind) == pytest.approx([2, 2.5, 3], rel=1e-6)


@kinds
def test_mask_with_log_2_and_a_hidden_row(kind):
    mask = np.zeros((3, 5))
    mask[0, 0], mask[1, :] = math.log(2), -INF
    output = prefix_means(kind, mask=mask)
    assert output[[0, 2]] == pytest.approx([1.75, 3], rel=1e-6)
    assert output[1] == 0


# Scale


@kinds
def test_scale(kind):
    query = [[[2 * math.log(3), 0, 0, 0]]]
    key = [[[1, 0, 0, 0]], [[0, 0, 0, 0]]]
    value = [[[4, 0, 0, 1]], [[8, 0, 1, 0]]]
    assert answer(kind, query, key, value)[0, 0] == pytest.approx([5, 0, 0.25, 0.75], rel=1e-6)


# Grouped queries


@kinds
def test_grouped_queries(kind):
    value = np.zeros((3, 2, 4)) + f32([10, 20])[:, None]
    output = answer(kind, np.zeros((1, 6, 4)), np.zeros((3, 2, 4)), value)
    assert (output[0, :, 0] / 10 - 1).tolist() == [0, 0, 0, 1, 1, 1]


# ALiBi

SLOPES = {
    6: [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125],
    1: [0.00390625],
    8: [2.0**-k for k in range(1, 9)],
    12: [2.0**-k for k in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5],
}


@kinds
@pytest.mark.parametrize("heads", SLOPES)
@pytest.mark.parametrize("causal", [True, False])
def test_slopes(kind, heads, causal):
    """Two keys at distance 1: the slope is the log of what their weights are to each other."""
    seen = weights(kind, 1, 2, heads, is_alibi=True, is_causal=causal)[0]
    assert np.log(seen[:, 1] / seen[:, 0]) == pytest.approx(SLOPES[heads], abs=1e-6)


@kinds
@pytest.mark.parametrize("causal", [True, False])
def test_bias(kind, causal):
    seen = weights(kind, 2, 4, 6, is_alibi=True, is_causal=causal)[:, 0]
    assert seen[0, 3] == 0
    bias = [np.log(seen[0, :3] / seen[0, 2]), np.log(seen[1] / seen[1, 3])]
    assert bias[0] == pytest.approx([-0.5, -0.25, 0], abs=1e-6)
    assert bias[1] == pytest.approx([-0.75, -0.5, -0.25, 0], abs=1e-6)


@kinds
@pytest.mark.parametrize("causal", [True, False])
def test_alibi(kind, causal):
    value = np.zeros((3, 2, 4)) + f32([1, 2, 3])[:, None, None]
    zeros = np.zeros((3, 2, 4))
    last = answer(kind, zeros[:1], zeros, value, is_alibi=True, is_causal=causal)
    assert last[0, :, 0] == pytest.approx([2.04163956, 2.00260416], rel=1e-6)
    two = answer(kind, zeros[:2], zeros, value, is_alibi=True, is_causal=causal)
    assert two[:, 0, 0] == pytest.approx([1.51561992, 2.04163956], rel=1e-6)


# Masks


def dynamic_pair(kind, mask):
    """Return the weights of a call with seqstarts [0, 1, 4], kvstarts [0, 4, 9] and two heads."""
    pasts, seqlens = (3, 2), (1, 3)
    both = [
        one(
            kind, np.zeros((n, 2, 5)), np.zeros((n + past, 2, 5)), np.eye(9, 5)[: n + past, None].repeat(2, 1)
        )
        for past, n in zip(pasts, seqlens, strict=True)
    ]
    inputs = dict(both[0].inputs)
    packed = ("query", "key", "value", "current_key", "current_value", "cache")
    for name in packed:
        if name in inputs:
            inputs[name] = np.concatenate([call[name] for call in both])
    inputs |= {"seqstarts": i64([0, 1, 4]), "kvstarts": i64([0, 4, 9]), "max_seqlen": 3, "max_kvlen": 5}
    if kind == "dynamic_cache":
        inputs |= {"cachestarts": i64([0, 4]), "start_pos": i64(pasts)}
    return Call(both[0].name, inputs | {"attn_mask": mask}, both[0].attributes)


@pytest.mark.parametrize("kind", ["dynamic", "dynamic_cache"])
def test_dynamic_mask_block(kind):
    """Batch 1, i 2, j 3 reads flat element 55; columns 9 to 15 and foreign blocks are never read."""
    mask = np.full((4, 16), np.nan, np.float32)
    mask[0:1, 0:4] = mask[1:4, 4:9] = 0
    plain = run(dynamic_pair(kind, mask.copy()))
    assert np.isfinite(plain).all()
    mask.reshape(-1)[55] = -INF
    marked = run(dynamic_pair(kind, mask))
    assert np.argwhere((marked == 0) & (plain > 0)).tolist() == [[3, 0, 3], [3, 1, 3]]
    assert (marked[:3] == plain[:3]).all()


@pytest.mark.parametrize("kind", ["dynamic", "dynamic_cache"])
def test_dynamic_mask_of_two_heads(kind):
    """Head 1 reads element 119."""
    mask = np.full((2, 4, 16), np.nan, np.float32)
    mask[:, 0:1, 0:4] = mask[:, 1:4, 4:9] = 0
    mask.reshape(-1)[119] = -INF
    marked = run(dynamic_pair(kind, mask))
    plain = run(dynamic_pair(kind, None))
    assert np.argwhere((marked == 0) & (plain > 0)).tolist() == [[3, 1, 3]]


LEGAL_MASKS = [(3, 5), (3, 16), (1, 5), (4, 3, 5), (1, 3, 5), (2, 4, 3, 5), (2, 1, 3, 8), (1, 1, 1, 5)]


def static_call(kind, mask):
    make = getattr(scenes, kind)
    call = make(np.random.default_rng(5), batch=2, heads=4, past=2, seqlen=3, dim=8)
    return call.but(attn_mask=mask)


def mask_of(shape):
    """Return a mask whose legal entries all differ, with random numbers after column 5."""
    mask = np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)
    mask[..., 5:] = np.nan
    return mask


statics = pytest.mark.parametrize("kind", ["static", "static_cache"])


@statics
@pytest.mark.parametrize("shape", LEGAL_MASKS, ids=str)
def test_static_mask_shapes(kind, shape):
    """Each entry of the mask has effect where it should: compared with the mask written out in full."""
    mask = mask_of(shape)
    full = np.zeros((2, 4, 3, 5), np.float32)
    for b, h, i, j in itertools.product(range(2), range(4), range(3), range(5)):
        at = [
            min(index, size - 1) for index, size in zip((b, h, i), (1, 1, 1, *shape[:-1])[-3:], strict=True)
        ]
        full[b, h, i, j] = mask.reshape((1,) * (4 - len(shape)) + shape)[*at, j]
    expected = run(static_call(kind, full))
    assert run(static_call(kind, mask)) == pytest.approx(expected, abs=1e-6)
    assert run(static_call(kind, None)) != pytest.approx(expected, abs=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_as_arrays_of_one(kind):
    """Files hold attributes as arrays."""
    rng = np.random.default_rng(0)
    call = scenes.any_kind(kind, rng, scenes.FP32, 2, 3)
    sizes = {name: np.array([call.attributes[name]]) for name in ("num_heads", "head_dim")}
    scenes.assert_same(call.copy().run(), call.but(**sizes).run())
