"""The position operators: the specification's vectors, the oracle, and independent formulations."""

import functools
import math
import time
import tracemalloc

import backends
import ml_dtypes
import numba
import numpy as np
import pytest
from calls import CALLS
from position_scenes import INF, random_mask
from refusals import refused
from scenes import DTYPES, FLOATS, assert_same, raw

import kvkit
from kvkit import cpu
from kvkit.formulas import numeric
from kvkit.reference import alibi, positions

formats = pytest.mark.parametrize("t1", FLOATS)
kinds = pytest.mark.parametrize("kind", ["static", "dynamic"])


# PositionIndex


def test_position_index_of_the_specification(backend):
    tokens = np.full(9, 7)
    starts, first = np.array([0, 1, 3, 9]), np.array([0, 10, 100])
    expected = np.array([0, 10, 11, 100, 101, 102, 103, 104, 105])
    for longest in (None, 6, 100):
        assert_same(backend.dynamic_batching.position_index(tokens, starts, first, longest), expected)
    out = np.full(9, -1)
    assert backend.dynamic_batching.position_index(tokens, starts, first, out=out) is out
    assert_same(out, expected)
    assert (tokens == 7).all()
    assert_same(
        backend.dynamic_batching.position_index(*(a.astype(np.int32) for a in (tokens, starts, first))),
        expected,
    )


# ALiBi


def test_slopes_of_the_specification(backend):
    powers = [2.0**-i for i in range(1, 9)]
    wanted = {
        1: [0.00390625],
        6: [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125],
        8: powers,
        12: [*powers, 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5],
    }
    for num_heads, slopes in wanted.items():
        assert_same(backend.alibi_slope(num_heads=num_heads), np.array(slopes, np.float32))


def test_bias_of_the_specification(backend):
    mask = backend.alibi_mask(2, 4, num_heads=6)
    assert mask.shape == (6, 2, 16)
    assert mask[0, :, :4].tolist() == [[-0.5, -0.25, 0, -INF], [-0.75, -0.5, -0.25, 0]]
    assert (mask[:, :, 4:] == -INF).all()


@pytest.mark.cpu
def test_alibi_masks_of_all_threads(rng, backend):
    n, m, heads = 150, 333, 4
    mask = random_mask(rng, (2, heads, n, m), np.float32)
    got = backend.alibi_mask(n, m, mask, num_heads=heads)
    ramp = np.arange(m) - (m - n + np.arange(n)[:, None])
    slopes = np.array([np.float32(alibi.slope(h, heads)) for h in range(heads)])[:, None, None]
    expected = np.where(ramp <= 0, slopes * ramp.astype(np.float32), -INF) + mask
    assert_same(got[..., :m], expected.astype(np.float32))
    assert (got[..., m:] == -INF).all()


# Rotary position embedding


def assert_turned(got, expected, x, t1):
    """Check rotated pairs within the roundings of float32 products and of the output."""
    eps = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}[t1]
    smallest = {"fp32": 1e-44, "fp16": 2.0**-25, "bf16": 1e-40}[t1]
    largest = np.maximum(1e-30, np.abs(x.astype(np.float64)).max(axis=-1, keepdims=True))
    limit = 4 * 2.0**-24 * largest + eps * np.abs(expected) + smallest
    assert got.dtype == DTYPES[t1]
    assert got.shape == expected.shape
    error = np.abs(got.astype(np.float64) - expected)
    assert (error <= limit).all(), float((error / limit).max())


def call(kind, rng, t1, lengths, heads=(3, 2), dim=24, start_pos=None, pads=False):
    """Return (operator, oracle, arguments) for random tokens; `lengths` are (start_pos, tokens)."""
    dtype = DTYPES[t1]
    if kind == "static":
        first, seqlen = lengths[0]
        shape = len(lengths), seqlen
        steps = [first]
        if pads:
            steps.append(rng.integers(0, first + seqlen + 3, len(lengths)))
        rotate = functools.partial(backends.operators.rotary_position_embedding, interleaved=True)
        pair = rotate, positions.rotary_position_embedding
    else:
        starts = np.cumsum([0, *(n for _, n in lengths)])
        shape = (int(starts[-1]),)
        steps = [starts, np.array([first for first, _ in lengths], np.int64), None]
        pair = (
            backends.operators.dynamic_batching.rotary_position_embedding,
            positions.dynamic_rotary_position_embedding,
        )
    arrays = [rng.standard_normal((*shape, h, dim)).astype(dtype) for h in heads]
    return *pair, arrays, steps


@kinds
@pytest.mark.parametrize("interleaved", [True, False])
def test_given_cosines_and_sines(kind, interleaved, rng):
    """Any tables; those of theta, computed elsewhere, are as good."""
    run, oracle, arrays, steps = call(kind, rng, "fp16", [(7, 1), (3, 0), (100, 9)])
    tables = {"cos": rng.standard_normal((110, 12), np.float32), "sin": rng.standard_normal((110, 12))}
    tables["sin"] = tables["sin"].astype(np.float16)
    attrs = tables | {"interleaved": interleaved}
    for result, expected, x in zip(
        run(*arrays, *steps, **attrs), oracle(*arrays, *steps, **attrs), arrays, strict=True
    ):
        assert_turned(result, expected, 4 * x, "fp16")
    angles = np.arange(110)[:, None] * 1e4 ** (-np.arange(12) / 12)
    tables = {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    for result, other in zip(run(*arrays, *steps, **tables), run(*arrays, *steps), strict=True):
        np.testing.assert_allclose(result.astype(float), other.astype(float), atol=4e-3)
    for name, wrong in (
        ("cos", {"cos": None}),
        ("sin", {"sin": None}),
        ("cos", {"cos": tables["cos"][:, 1:]}),
        ("sin", {"sin": tables["sin"][1:]}),
        ("cos", {"cos": tables["cos"].astype(float)}),
        ("cos", {name: table[:5] for name, table in tables.items()}),
    ):
        with pytest.raises(kvkit.KvkitError, match=f"^{name}: expected "):
            run(*arrays, *steps, **tables | wrong)


@pytest.mark.parametrize("given", [{}, {"interleaved": None}], ids=str)
def test_pairs_have_no_default_outside_of_pmx(given, backend):
    """A loop that leaves out the pairs would be silently wrong for Llama; PMX's own namespace has PMX's."""
    x = np.ones((1, 1, 1, 4), np.float32)
    with pytest.raises(kvkit.KvkitError, match=r"interleaved: expected False for Llama.*Rope\.from_config"):
        backend.rotary_position_embedding(x, x, 1, **given)
    dynamic = backend.dynamic_batching.rotary_position_embedding(x[0], x[0], [0, 1], [1], None)
    static = backend.rotary_position_embedding(x, x, 1, interleaved=True)
    assert_same(dynamic[0].ravel(), static[0].ravel())


def one_token(x, t, **attrs):
    """Return a head at a position, after a check that both operators agree."""
    x = np.array(x, np.float32)
    static, packed = backends.operators, backends.operators.dynamic_batching
    how = {"interleaved": True} | attrs
    query, key = static.rotary_position_embedding(x[None, None, None], x[None, None, None], t, **how)
    packed = packed.rotary_position_embedding(x[None, None], x[None, None], [0, 1], [t], 1, **attrs)
    for other in (key, *packed):
        assert_same(other.ravel(), query.ravel())
    return query.ravel()


def test_vectors_of_the_specification():
    close = {"rtol": 3e-7, "atol": 5e-9}
    for x, t, attrs, expected in (
        ((1, 0, 1, 0), 1, {}, (0.54030231, 0.84147098, 0.99995, 0.00999983)),
        ((1, 2, 3, 4), 3, {}, (-1.27223251, -1.83886499, 2.8786681, 4.08818664)),
        (
            (1, 0, 1, 0),
            1,
            {"scaling_type": "linear", "scaling_factor": 2.0},
            (0.87758256, 0.47942554, 0.9999875, 0.00499998),
        ),
        (
            (1, 0, 1, 0),
            7,
            {"scaling_type": "dynamic", "scaling_factor": 2.0, "max_position_embeddings": 4},
            (math.cos(7), math.sin(7), math.cos(7 / 300), math.sin(7 / 300)),
        ),
    ):
        np.testing.assert_allclose(one_token(x, t, **attrs), expected, **close)


def test_dynamic_scaling_begins_beyond_the_limit(backend):
    """The end is exclusive, and it is the sequence's own: neighbours and paddings keep their theta."""
    x = np.zeros((4, 1, 8), np.float32)
    x[..., ::2] = 1
    attrs = {"scaling_type": "dynamic", "max_position_embeddings": 12, "scaling_factor": 4.0}
    plain, _ = backend.dynamic_batching.rotary_position_embedding(x, x, [0, 2, 3, 4], [10, 12, 11], None)
    got, _ = backend.dynamic_batching.rotary_position_embedding(
        x, x, [0, 2, 3, 4], [10, 12, 11], None, **attrs
    )
    assert (got == plain).all(axis=(1, 2)).tolist() == [True, True, False, True]
    x = x.reshape(2, 2, 1, 8)
    plain, _ = backend.rotary_position_embedding(x, x, 11, [0, 1], interleaved=True)
    got, _ = backend.rotary_position_embedding(x, x, 11, [0, 1], interleaved=True, **attrs)
    assert (got == plain).all(axis=(1, 2, 3)).tolist() == [False, True]


@pytest.mark.cpu
def test_a_call_of_the_same_form_may_have_other_sequences():
    x, run = np.ones((3, 1, 8), np.float32), kvkit.dynamic_batching.rotary_position_embedding
    two, three = ([run(x, x, *steps, None)[0] for _ in range(2)] for steps in (
        ([0, 1, 3], [4, 9]), ([0, 1, 2, 3], [4, 9, 2])))  # fmt: skip
    assert_same(two[0], two[1])
    assert_same(three[0], three[1])
    assert_same(two[0][:2], three[0][:2])
    assert (two[0][2] != three[0][2]).any()


@kinds
@formats
@pytest.mark.parametrize(
    "attrs", [{}, {"rotary_dim": 10}, {"interleaved": False}, {"bypass_key": True}], ids=str
)
def test_in_place(kind, t1, attrs, rng):
    """Also where queries and keys are neighbours in one array."""
    run, _, arrays, steps = call(kind, rng, t1, [(4, 5), (9, 5)], dim=40)
    fused = np.concatenate(arrays, axis=-2)
    query, key = fused[..., :3, :], fused[..., 3:, :]
    expected = run(query, key, *steps, **attrs)
    got = run(query, key, *steps, out=(query, key), **attrs)
    assert got[0] is query
    assert got[1] is key
    assert_same(query, expected[0])
    assert_same(key, expected[1])


@pytest.mark.cpu
@kinds
@formats
def test_rotary_of_all_threads(kind, t1, rng):
    """Shares of many tokens, large outputs that are written around the caches: the same bits as alone."""
    lengths = [(11, 3), (0, 1), (5, 0), (70, 600), (9, 150), (2, 77)]
    if kind == "static":
        lengths = [(6, 150)] * 5
    run, _, arrays, steps = call(kind, rng, t1, lengths, (9, 4), 96)
    assert arrays[0].nbytes > cpu.copy.transfer.SMALL_BYTES
    attrs = {"scaling_type": "dynamic", "max_position_embeddings": 150, "rotary_dim": 80}
    got = run(*arrays, *steps, **attrs)
    threads = numba.get_num_threads()
    numba.set_num_threads(1)
    try:
        alone = run(*arrays, *steps, **attrs)
    finally:
        numba.set_num_threads(threads)
    outs = tuple(np.empty_like(array) for array in arrays)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu.positions.rotary, "STREAM_BYTES", 0)
        run(*arrays, *steps, **attrs, out=outs)
    for result, other, streamed in zip(got, alone, outs, strict=True):
        assert_same(result, other)
        assert_same(result, streamed)
    few = [array[:, :9] if kind == "static" else array[:3] for array in arrays]
    if kind == "static":
        attrs.pop("scaling_type")
        got = run(*arrays, *steps, **attrs)
        alone = run(*few, *steps, **attrs)
        assert_same(alone[0], got[0][:, :9])


def test_special_elements_stay_with_their_pair(backend):
    x = np.ones((1, 1, 1, 40), np.float32)
    x[..., 4], x[..., 20], x[..., 38] = np.nan, INF, -INF
    rotate = functools.partial(backend.rotary_position_embedding, rotary_dim=36, interleaved=True)
    query, _ = rotate(x, x, 1)
    expected, _ = rotate(np.ones_like(x), x, 1)
    ordinary = np.isfinite(query.ravel())
    assert np.flatnonzero(~ordinary).tolist() == [4, 5, 20, 21, 38]
    assert_same(query.ravel()[ordinary], expected.ravel()[ordinary])
    bits = np.arange(2**16, dtype=np.uint16).reshape(-1, 1, 32).view(ml_dtypes.bfloat16)
    copied, _ = backend.dynamic_batching.rotary_position_embedding(
        bits, bits, [0, len(bits)], [0], None, rotary_dim=2
    )
    assert np.array_equal(raw(copied[..., 2:]), raw(bits[..., 2:]))


def test_the_last_positions(backend):
    got = backend.dynamic_batching.position_index([0, 0], [0, 2], [2**63 - 3])
    assert got.tolist() == [2**63 - 3, 2**63 - 2]


@pytest.mark.parametrize("operator", ["static rotary", "rotary"])
def test_outputs_over_inputs(operator):
    """An output may be its own input, exactly; it may not overlap it otherwise, nor the other one."""
    rotary = CALLS[operator]()
    shape = rotary["query"].shape
    room = np.ones(2 * int(np.prod(shape)) + 8, np.float32)
    count = int(np.prod(shape))
    query, shifted = room[:count].reshape(shape), room[8 : count + 8].reshape(shape)
    key, other = room[count + 8 :].reshape(shape)[..., :1, :], np.ones(shape, np.float32)
    for outputs, name in (
        ((shifted, key), "out (query)"),
        ((query[::-1], key), "out (query)"),
        ((key.base[:count].reshape(shape)[::-1], other[..., :1, :]), "out (query)"),
        ((other, query[..., :1, :]), "out (key)"),
        ((other, key[::-1]), "out (key)"),
    ):
        refused(rotary.but(query=query, key=key), name, out=outputs)
    said = refused(rotary.but(query=query, key=query), "out", out=(query, other))
    assert said.endswith("got arrays that overlap")
    refused(rotary.but(query=query, key=query), "out", out=(query, query))
    rotary.but(query=query, key=key).run(out=(query, key))


# The scalar formulas


@pytest.mark.cpu
def test_cosines_and_sines(rng):
    """To the nearest float32, up to MAX_ANGLE."""

    @numba.njit
    def loop(angles, cosines, sines):
        for i in range(len(angles)):
            cosines[i], sines[i] = numeric.cos_sin(angles[i])

    limit = numeric.MAX_ANGLE
    quarters = np.arange(1, 10**6) * (math.pi / 2)
    angles = [
        rng.uniform(-limit, limit, 200_000), 10.0 ** rng.uniform(-30, 7, 200_000), quarters, -quarters * 10,
        [0.0, -0.0, limit - 1],
    ]  # fmt: skip
    angles = np.concatenate(angles).astype(np.float32)
    got = np.empty_like(angles), np.empty_like(angles)
    loop(angles, *got)
    for result, function in zip(got, (np.cos, np.sin), strict=True):
        exact = function(angles.astype(np.float64))
        steps = np.abs(result - exact) / np.spacing(np.abs(exact.astype(np.float32)))
        assert steps.max() < 0.51


# Cost


@pytest.mark.perf
@pytest.mark.cpu
@kinds
def test_a_decode_step_costs_microseconds(kind, rng, microsecond):
    run, _, arrays, steps = call(kind, rng, "fp16", [(9, 1)], (32, 8), 128)
    outs = tuple(np.empty_like(array) for array in arrays)
    times = []
    for _ in range(300):
        begin = time.perf_counter()
        run(*arrays, *steps, out=outs)
        times.append(time.perf_counter() - begin)
    assert min(times) < 60 * microsecond


@pytest.mark.cpu
@kinds
def test_nothing_large_is_made(kind, rng):
    run, _, arrays, steps = call(kind, rng, "fp16", [(9, 1)], (32, 8), 128)
    large = tuple(np.zeros((*a.shape[:-2], 3000, 128), np.float16) for a in arrays)
    run(*large, *steps, out=large)  # what starts threads is loaded
    tracemalloc.start()
    try:
        run(*large, *steps, out=large)
        assert tracemalloc.get_traced_memory()[1] < 20_000
    finally:
        tracemalloc.stop()
