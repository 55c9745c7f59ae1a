"""The gated delta rule and the short convolution: vectors worked by hand, the reference, and identities.

Every rule, layout, kind of gate, form (token by token, in chunks) and size is compared with plain loops.
"""

import itertools
import time

import ml_dtypes
import numpy as np
import pytest

import kvkit
from kvkit.checks import index_tensors
from kvkit.reference import recurrent as plain
from kvkit.tools.vectors import recurrent

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

LAYOUTS = "KV", "VK"
# Heads of q, of k and of v, dk and dv: shared keys, shared states, sizes that fill no vector.
SIZES = (2, 2, 4, 32, 48), (4, 2, 2, 5, 7), (1, 1, 1, 16, 16), (2, 2, 4, 128, 128), (3, 3, 3, 20, 16)


def f32(*rows):
    return np.array(rows, np.float32)


def assert_near(got, expected, tolerance=2e-5):
    got, expected = (np.asarray(each, np.float64) for each in (got, expected))
    assert got.shape == expected.shape
    error = np.abs(got - expected) / np.maximum(1, np.abs(expected))
    assert error.max(initial=0) <= tolerance


def tokens_of(rng, sizes, tokens, by_channel=False):
    """Return q, k, v, g and beta; tokens of a head forget nearly all, and one all."""
    arrays = recurrent.tokens_of(rng, sizes, tokens, by_channel)
    if sizes[2] > 1:
        arrays["g"][tokens // 3 : tokens // 2, 1] = -60
        arrays["g"][2 * tokens // 3 :, -1][:1] = -np.inf
    return arrays


def pool_of(rng, sizes, slots, layout):
    *_, heads, dk, dv = sizes
    inner = (dk, dv) if layout == "KV" else (dv, dk)
    return rng.standard_normal((slots, heads, *inner), np.float32)


def of_rule(tokens, rule):
    return {
        name: array for name, array in tokens.items() if name in ("q", "k", "v", *recurrent.RULE_INPUTS[rule])
    }


# Vectors

KEYS, QUERIES = f32([[1, 0]], [[0.6, 0.8]], [[0, 1]]), f32([[1, 1]], [[0, 1]], [[1, 0]])
VALUES = f32([[2, 4], [2, 4]], [[1, 0], [1, 0]], [[-1, 2], [-1, 2]])
BY_HAND = {
    "g": np.full((3, 2), np.log(0.5), np.float32), "beta": np.tile(f32(1, 0.5), (3, 1)), "scale": 1.0,
}  # fmt: skip
STATES = f32(
    [[[2, 4], [0, 0]], [[1, 2], [0, 0]]],
    [[[1.24, 1.28], [0.32, -0.96]], [[0.71, 0.82], [0.28, -0.24]]],
    [[[0.62, 0.64], [-1, 2]], [[0.355, 0.41], [-0.43, 0.94]]],
)
OUTPUTS = f32([[2, 4], [1, 2]], [[0.32, -0.96], [0.28, -0.24]], [[0.62, 0.64], [0.355, 0.41]])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_tokens_by_hand(layout):
    states = STATES if layout == "KV" else np.swapaxes(STATES, 2, 3)
    for chunk, package in itertools.product((1, 64), (kvkit, plain)):
        options = BY_HAND | {"state_layout": layout, "chunk": chunk}
        out, last = package.gated_delta_rule(QUERIES, KEYS, VALUES, **options)
        assert_near(out, OUTPUTS, 1e-6)
        assert_near(last[0], states[2], 1e-6)
    *_, after = kvkit.gated_delta_rule(
        QUERIES, KEYS, VALUES, **BY_HAND, state_layout=layout, return_states=True
    )
    assert_near(after, states, 1e-6)


def example(tokens, keys, heads, by_channel=False):
    """Return small integers of the indices t (token), h (head) and c (channel), as the specification has."""
    t, h, c = np.ix_(np.arange(tokens), np.arange(max(keys, heads)), np.arange(4))
    q = (((2 * t + 3 * h + c + t * c) % 5) - 2.0)[:, :keys]
    k = (((3 * t + 5 * h + 2 * c + t * c) % 7) - 3.0)[:, :keys]
    v = (((t + 2 * h + 3 * c + t * c * c) % 5) - 2.0)[:, :heads, :3]
    a, b = (((t + 2 * h) % 5) - 2.0)[:, :heads, 0], (((2 * t + h) % 5) - 2.0)[:, :heads, 0]
    f = (((t + h + 2 * c) % 5) - 2.0)[:, :heads]
    a_log, dt_bias = np.log(1 + np.arange(heads) / 2), 0.5 - np.arange(heads) / 4
    if by_channel:
        a, dt_bias = f, np.zeros((heads, 4))
    return [np.asarray(x, np.float32) for x in (q, k, v, a, b, a_log, dt_bias)]


def digest(array):
    """Return the sum, the sum of magnitudes, and the sum of each number times its index."""
    flat = np.asarray(array, np.float64).ravel()
    return flat.sum(), np.abs(flat).sum(), (flat * np.arange(flat.size)).sum()


@pytest.mark.parametrize(("by_channel", "digests"), [
    (False, [(-1.318024, 11.959564, -49.834585), (-1.167398, 18.000037, -32.089300)]),
    (True, [(-0.680516, 6.112645, 9.208718), (-0.426953, 6.581741, -17.245752)]),
])  # fmt: skip
def test_vectors_of_gdn_and_kda(by_channel, digests):
    q, k, v, a, b, *gates = example(*((6, 2, 2, True) if by_channel else (7, 2, 4)))
    kind = "kda" if by_channel else "gdn"
    g, beta = kvkit.delta_gates(a, b, *gates, kind=kind)
    for chunk in (1, 16):
        for more in ({"g": g, "beta": beta}, {"g": a, "beta": b, "gates": gates}):
            padded = [np.concatenate([x, np.zeros((20, *x.shape[1:]), np.float32)]) for x in (q, k, v)]
            more |= {name: np.concatenate([x, np.zeros((20, *x.shape[1:]), np.float32)])
                     for name, x in more.items() if name != "gates"}  # fmt: skip
            starts = [0, len(q), len(q) + 20]
            out, state = kvkit.gated_delta_rule(*padded, **more, norm=True, chunk=chunk, starts=starts)
            found = [digest(out[: len(q)]), digest(state[0])]
            np.testing.assert_allclose(found, digests, atol=3e-4)


def test_vectors_of_the_bounded_gate():
    f, zero = f32([[-2, 0, 3]]), f32([0, 0, 0])
    g, _ = kvkit.delta_gates(f, f32([0]), f32(0.5), zero, kind="kda", lower_bound=-5.0)
    assert_near(g[0, 0], [-0.178295, -2.5, -4.964698], 1e-6)


@pytest.mark.parametrize(("rule", "first", "total"), [
    ("linear", (-0.267385, -1.972058, -0.035955), -9.542310),
    ("gated", (0.405907, -0.035524, 0.184), -4.773904),
    ("delta", (-0.071878, -0.570697, -0.154772), -2.217270),
    ("gated_delta", (0.143239, 0.023399, 0.025314), -1.318024),
])  # fmt: skip
def test_vectors_of_the_four_rules(rule, first, total):
    q, k, v, a, b, *gates = example(7, 2, 4)
    g, beta = kvkit.delta_gates(a, b, *gates)
    more = {name: array for name, array in (("g", g), ("beta", beta)) if name in recurrent.RULE_INPUTS[rule]}
    out, _ = kvkit.gated_delta_rule(q, k, v, **more, norm=True, rule=rule)
    assert_near(out[6, 0], first, 1e-5)
    assert_near(out.sum(), total, 1e-5)


def test_vectors_of_the_convolution():
    x = (((3 * np.arange(5)[:, None] + 2 * np.arange(3)) % 7) - 3).astype(np.float32)
    w = (((2 * np.arange(3)[:, None] + 3 * np.arange(4)) % 5) - 2).astype(np.float32)
    bias, silu = f32(0, 0.5, -0.5), lambda y: y / (1 + np.exp(-y))
    expected = f32((-6, 1.5, 0.5), (3, -2.5, -5.5), (3, 6.5, 5.5), (1, -6.5, 4.5), (8, 8.5, -13.5))
    for activation, wanted in ((None, expected), ("silu", silu(expected)), ("swish", silu(expected))):
        out, state = kvkit.causal_conv(x, w, bias, activation=activation)
        assert_near(out, wanted, 1e-6)
        assert state[0].tolist() == [[3, -1, 2], [-2, 1, -3], [0, 3, -1]]
    _, state = kvkit.causal_conv(x[:2], w, bias)
    assert state[0].tolist() == [[0, -3, 0], [0, -1, 2], [0, 1, -3]]


# The reference


@pytest.mark.parametrize("by_channel", [False, True], ids=["heads", "channels"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_steps(sizes, layout, by_channel):
    rng = np.random.default_rng(0)
    tokens, pool = tokens_of(rng, sizes, 4, by_channel), pool_of(rng, sizes, 7, layout)
    for rule, moves in itertools.product(recurrent.RULE_INPUTS, (False, True)):
        given = of_rule(tokens, rule)
        more = {"state_indices": [5, -1, 0, 3], "norm": True, "state_layout": layout, "rule": rule}
        more |= {"out_state_indices": np.int32([6, -1, 0, 2])} if moves else {}
        found, expected = pool.copy(), pool.astype(np.float64)
        out = kvkit.gated_delta_step(**given, state=found, **more)
        del more["rule"]
        assert_near(out, plain.gated_delta_step(**given, state=expected, **more))
        assert_near(found, expected)
        untouched = [1, 4, 5, 3] if moves else [1, 2, 4, 6]
        assert np.array_equal(found[untouched], pool[untouched])
        assert not out[1].any()


STARTS = [0, 3, 3, 20, 100, 165]  # sequences of 3, 0, 17, 80 and 65 tokens


@pytest.mark.parametrize("by_channel", [False, True], ids=["heads", "channels"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", SIZES[:3], ids=str)
def test_prompts(sizes, layout, by_channel):
    """Packed sequences, one without a state, from states, token by token and in chunks."""
    rng = np.random.default_rng(0)
    tokens, pool = tokens_of(rng, sizes, STARTS[-1], by_channel), pool_of(rng, sizes, 7, layout)
    more = {"starts": STARTS, "state_indices": [3, 1, -1, 0, 6], "norm": True, "state_layout": layout}
    for rule in recurrent.RULE_INPUTS if sizes == SIZES[0] else ("gated_delta",):
        given, after = of_rule(tokens, rule), pool.astype(np.float64)
        expected, _ = plain.gated_delta_rule(**given, state=after, **more)
        for chunk in (1, 16, 50, 64, 256):
            found = pool.copy()
            out, state = kvkit.gated_delta_rule(**given, state=found, chunk=chunk, **more)
            assert state is found
            assert_near(out, expected)
            assert_near(found, after)
            assert np.array_equal(found[[1, 2, 4, 5]], pool[[1, 2, 4, 5]])


@pytest.mark.parametrize("by_channel", [False, True], ids=["heads", "channels"])
def test_sequences_side_by_side_equal_packed_ones(by_channel):
    rng = np.random.default_rng(0)
    sizes, lengths = SIZES[0], [5, 0, 33]
    tokens = tokens_of(rng, sizes, 3 * 33, by_channel)
    apart = {name: array.reshape(3, 33, *array.shape[1:]) for name, array in tokens.items()}
    packed = {name: np.concatenate([array[n, :count] for n, count in enumerate(lengths)])
              for name, array in apart.items()}  # fmt: skip
    expected, last = kvkit.gated_delta_rule(**packed, norm=True, starts=[0, 5, 5, 38])
    for more in ({}, {"return_states": True}):
        out, state, *states = kvkit.gated_delta_rule(**apart, norm=True, lengths=lengths, **more)
        assert_near(np.concatenate([out[n, :count] for n, count in enumerate(lengths)]), expected)
        assert_near(state, last)
        assert not out[0, 5:].any()
        assert not out[1].any()
        for after in states:
            assert_near(after[2, 32], last[2])
            assert not after[0, 5:].any()


@pytest.mark.parametrize("element", ["float16", "bfloat16"])
def test_16_bit_tokens_are_computed_in_float32_and_rounded_once(element):
    rng, dtype = np.random.default_rng(0), np.dtype(getattr(ml_dtypes, element, element))
    tokens = tokens_of(rng, SIZES[0], 40)
    narrow = {name: array if name == "g" else array.astype(dtype) for name, array in tokens.items()}
    wide = {name: array.astype(np.float32) for name, array in narrow.items()}
    for chunk in (1, 64):
        expected, last = kvkit.gated_delta_rule(**wide, norm=True, chunk=chunk)
        out, state = kvkit.gated_delta_rule(**narrow, norm=True, chunk=chunk)
        assert out.tobytes() == expected.astype(dtype).tobytes()
        assert np.array_equal(state, last)
        given = np.empty(out.shape, np.float32)
        found, _ = kvkit.gated_delta_rule(**narrow, norm=True, chunk=chunk, out=given)
        assert found is given
        assert np.array_equal(given, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_states_of_bfloat16_are_rounded_once_a_call(layout):
    rng, sizes = np.random.default_rng(0), SIZES[0]
    tokens = tokens_of(rng, sizes, 4)
    narrow = pool_of(rng, sizes, 4, layout).astype(BFLOAT16)
    wide = narrow.astype(np.float32)
    expected = kvkit.gated_delta_step(**tokens, state=wide, state_layout=layout)
    found = kvkit.gated_delta_step(**tokens, state=narrow, state_layout=layout)
    assert np.array_equal(found, expected)
    assert narrow.tobytes() == wide.astype(BFLOAT16).tobytes()


def test_pools_with_any_distance_between_slots():
    rng, sizes = np.random.default_rng(0), SIZES[0]
    tokens, memory = tokens_of(rng, sizes, 2), np.zeros((3, 2 * 4 * 32 * 48 + 5), np.float32)
    pool = memory[:, 3 : 3 + 4 * 32 * 48].reshape(3, 4, 32, 48)
    assert np.shares_memory(pool, memory)
    dense = np.zeros((3, 4, 32, 48), np.float32)
    expected = kvkit.gated_delta_step(**tokens, state=dense, state_indices=[2, 0])
    assert np.array_equal(kvkit.gated_delta_step(**tokens, state=pool, state_indices=[2, 0]), expected)
    assert np.array_equal(pool, dense)
    assert not memory[:, :3].any()
    assert not memory[:, 3 + 4 * 32 * 48 :].any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("by_channel", [False, True], ids=["heads", "channels"])
@pytest.mark.parametrize("sizes", SIZES[:3], ids=str)
def test_drafts_taken_back_three_ways(sizes, by_channel, layout):
    """By the states after each token, by a capsule, and by running the accepted tokens again."""
    rng, starts = np.random.default_rng(0), [0, 4, 4, 5, 9]
    tokens, pool = tokens_of(rng, sizes, 9, by_channel), pool_of(rng, sizes, 6, layout)
    more = {"starts": starts, "state_indices": [5, 1, -1, 0], "norm": True, "state_layout": layout}
    held = pool.copy()
    out, _, capsule = kvkit.gated_delta_rule(**tokens, state=held, return_capsule=5, **more)
    assert np.array_equal(held, pool)  # it waits for what is accepted
    expected, _, records = plain.gated_delta_rule(**tokens, state=pool.copy(), return_capsule=5, **more)
    assert_near(out, expected)
    assert_near(capsule, records)
    after = pool.copy()
    *_, states = kvkit.gated_delta_rule(**tokens, state=after, return_states=True, **more)
    for accepted in ([0, 0, 0, 0], [4, 0, 1, 2], [1, 0, 0, 4]):
        found, again = pool.copy(), pool.copy()
        options = {"state_indices": more["state_indices"], "state_layout": layout}
        assert kvkit.gated_delta_replay(found, capsule, accepted, **options) is found
        wide = pool.astype(np.float64)
        plain.gated_delta_replay(wide, records, accepted, **options)
        assert_near(found, wide)
        for n, slot in ((0, 5), (3, 0)):
            if accepted[n]:
                assert_near(found[slot], states[starts[n] + accepted[n] - 1])
            part = {name: array[starts[n] : starts[n] + accepted[n]] for name, array in tokens.items()}
            kvkit.gated_delta_rule(**part, state=again[slot][None], norm=True, state_layout=layout)
        assert_near(found, again)
    assert capsule.nbytes < states.nbytes or sizes[-1] < 16


# Identities


def test_an_empty_sequence_keeps_every_byte_of_its_state():
    rng, sizes = np.random.default_rng(0), SIZES[1]
    given, state = tokens_of(rng, sizes, 0), pool_of(rng, sizes, 2, "KV")
    state[0, 0, 0] = np.nan
    before = state.tobytes()
    out, _ = kvkit.gated_delta_rule(**given, state=state, starts=[0, 0, 0])
    assert out.shape == (0, 4, 7)
    assert state.tobytes() == before
    fresh = kvkit.gated_delta_rule(**given, starts=[0, 0, 0])[1]
    assert fresh.shape == (2, 2, 5, 7)
    assert not fresh.any()


def test_a_state_without_a_token_moves_to_the_slot_that_is_written():
    """A step has a token for each sequence, but chunks of a prompt may have none."""
    rng, sizes = np.random.default_rng(0), SIZES[0]
    given, pool = tokens_of(rng, sizes, 2), pool_of(rng, sizes, 5, "KV")
    before = pool.copy()
    kvkit.gated_delta_step(**given, state=pool, state_indices=[0, 1], out_state_indices=[3, 4])
    assert np.array_equal(pool[:3], before[:3])


def test_a_decay_beyond_every_float_forgets_and_is_no_nan():
    """e^(c_i) e^(-c_j) would be 0 times infinity; sums of g lose nothing behind it."""
    rng, sizes = np.random.default_rng(0), (1, 1, 1, 16, 16)
    given, state = tokens_of(rng, sizes, 70), pool_of(rng, sizes, 1, "KV")
    given["g"][:] = -0.25
    for low in (-200.0, -1e30, -np.inf):
        given["g"][20] = low
        expected, after = state.astype(np.float64), None
        out, _ = plain.gated_delta_rule(**given, norm=True, state=expected)
        for chunk in (1, 64):
            after = state.copy()
            assert_near(kvkit.gated_delta_rule(**given, norm=True, state=after, chunk=chunk)[0], out)
            assert_near(after, expected)


@pytest.mark.parametrize("strength", [0.01, 1, 4.9, 5.1, 20, 100, 1000])
@pytest.mark.parametrize("some", [1, 0.05], ids=["all", "few"])
def test_channels_that_decay_at_any_rate(strength, some):
    """Blocks whose channels fall too far are summed pair by pair, beside blocks that are products."""
    rng, sizes = np.random.default_rng(0), (4, 2, 2, 20, 17)
    given, pool = tokens_of(rng, sizes, 150, True), pool_of(rng, sizes, 1, "KV")
    falls = rng.random(given["g"].shape) < some
    given["g"] = np.where(falls, -strength * rng.random(given["g"].shape), 0).astype(np.float32)
    given["g"][40:90] = np.maximum(given["g"][40:90], -5)
    expected = pool.astype(np.float64)
    out, _ = plain.gated_delta_rule(**given, norm=True, state=expected)
    for chunk in (1, 16, 64, 200):
        found = pool.copy()
        assert_near(kvkit.gated_delta_rule(**given, norm=True, state=found, chunk=chunk)[0], out)
        assert_near(found, expected)


def test_threads_know_subnormal_numbers_again():
    """Kernels of states take them as 0, as strong decays make many."""
    rng, sizes, tiny = np.random.default_rng(0), SIZES[3], np.full(32, 1e-39, np.float32)
    state = np.full((1, 4, 128, 128), 1e-39, np.float32)
    given = tokens_of(rng, sizes, 33) | {"state": state}
    kvkit.gated_delta_rule(**given)
    _, _, capsule = kvkit.gated_delta_rule(**given, return_capsule=33)
    kvkit.gated_delta_replay(state, capsule, [33])
    assert (tiny * np.float32(0.5)).all()


@pytest.mark.perf
@pytest.mark.parametrize("by_channel", [False, True], ids=["heads", "channels"])
def test_strong_decays_cost_no_more_than_weak_ones(by_channel):
    """Products of small decays are subnormal, with which processors compute a hundred times slower."""
    given, times = tokens_of(np.random.default_rng(0), SIZES[3], 512, by_channel), {0.1: [], 5: []}
    draws = np.random.default_rng(1).random(given["g"].shape, np.float32)
    for strength in (0.1, 5) * 20:
        given["g"] = np.float32(-strength) * draws
        begin = time.perf_counter()
        kvkit.gated_delta_rule(**given, norm=True)
        times[strength].append(time.perf_counter() - begin)
    assert min(times[5]) < 1.5 * min(times[0.1])


def test_growing_states_run_token_by_token():
    """g above 0 is legal, but quotients of decays in a chunk would overflow."""
    rng, sizes = np.random.default_rng(0), SIZES[0]
    given = tokens_of(rng, sizes, 40)
    given["k"] /= np.linalg.norm(given["k"], axis=-1, keepdims=True)
    given["g"] = np.abs(np.maximum(given["g"], -0.05))
    expected = plain.gated_delta_rule(**given, norm=True)
    for got, wanted in zip(kvkit.gated_delta_rule(**given, norm=True), expected, strict=True):
        assert_near(got, wanted, 1e-4)


def test_not_finite_numbers_stay_in_their_head():
    rng, sizes = np.random.default_rng(0), SIZES[0]
    given = tokens_of(rng, sizes, 40)
    clean, _ = kvkit.gated_delta_rule(**given, norm=True)
    for name in ("v", "beta", "g"):
        dirty = {key: array.copy() for key, array in given.items()}
        dirty[name][20, 2] = np.nan
        for chunk in (1, 64):
            out, state = kvkit.gated_delta_rule(**dirty, norm=True, chunk=chunk)
            assert np.isnan(out[-1, 2]).any()
            assert np.isnan(state[0, 2]).any()
            others = [0, 1, 3]
            assert_near(out[:, others], clean[:, others])


# The convolution


@pytest.mark.parametrize("element", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("channels", [3, 16, 300])
def test_convolutions(channels, width, element):
    rng, dtype = np.random.default_rng(0), np.dtype(getattr(ml_dtypes, element, element))
    starts, slots = [0, 3, 3, 4, 80, 81], [3, 1, -1, 0, 6]
    x, weight, bias, pool = (
        rng.standard_normal(shape).astype(dtype)
        for shape in ((81, channels), (channels, width), (channels,), (7, channels, width - 1))
    )
    for activation in ("silu", None):
        more = {"starts": starts, "state_indices": slots, "activation": activation}
        found, expected = pool.copy(), pool.copy()
        out, _ = kvkit.causal_conv(x, weight, bias, state=found, **more)
        wide = [array.astype(np.float64) for array in (x, weight, bias)]
        wanted, _ = plain.causal_conv(*wide, state=pool.astype(np.float64), **more)
        assert_near(out, wanted, {"float32": 2e-6, "float16": 2**-10}.get(element, 2**-8))
        plain.causal_conv(x, weight, bias, state=expected, **more)
        assert found.tobytes() == expected.tobytes()
        one, other = pool.copy(), pool.copy()
        step = kvkit.causal_conv_update(x[:5], weight, state=one, state_indices=slots, activation=activation)
        wanted, _ = kvkit.causal_conv(
            x[:5], weight, state=other, state_indices=slots, activation=activation, starts=range(6)
        )
        assert np.array_equal(step, wanted)
        assert one.tobytes() == other.tobytes()


# Gates


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("heads", [3, 32])
def test_gates(kind, heads):
    rng = np.random.default_rng(0)
    inner = (heads, 5) if kind == "kda" else (heads,)
    a, b = (
        30 * rng.standard_normal((2, 9, *inner), np.float32),
        9 * rng.standard_normal((2, 9, heads), np.float32),
    )
    a[0, 0, 0], b[0, 0, 0] = 1000, -1000
    a_log, dt_bias = rng.standard_normal(heads, np.float32), rng.standard_normal(inner, np.float32)
    for bound, double in ((None, False), (-5.0, True)):
        more = {"kind": kind, "lower_bound": bound, "double_beta": double}
        found = kvkit.delta_gates(a, b, a_log, dt_bias, **more)
        for got, expected in zip(found, plain.delta_gates(a, b, a_log, dt_bias, **more), strict=True):
            assert got.dtype == np.float32
            np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-30)
    found = kvkit.delta_gates(a.astype(BFLOAT16), b.astype(BFLOAT16), a_log, dt_bias, kind=kind)
    wide = kvkit.delta_gates(
        *(x.astype(BFLOAT16).astype(np.float32) for x in (a, b)), a_log, dt_bias, kind=kind
    )
    assert all(np.array_equal(x, y) for x, y in zip(found, wide, strict=True))


def test_the_vector_form_of_gates_is_the_scalar_one():
    """A row of 32 heads is vectors, one of 31 ends in scalar code."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 4, 32), np.float32) * 20
    zeros = np.zeros(32, np.float32)
    for bound in (None, -5.0):
        for whole, part in zip(
            kvkit.delta_gates(a, b, zeros, zeros, lower_bound=bound),
            kvkit.delta_gates(a[:, :31], b[:, :31], zeros[:31], zeros[:31], lower_bound=bound), strict=True,
        ):  # fmt: skip
            np.testing.assert_allclose(whole[:, :31], part, rtol=1e-6, atol=1e-37)


# What is refused


def test_a_g_that_is_no_logarithm_is_refused_with_checks_of_values(monkeypatch, rng):
    call = tokens_of(rng, SIZES[0], 4) | {"state": pool_of(rng, SIZES[0], 4, "KV")}
    monkeypatch.setattr(index_tensors, "VALIDATES", True)
    for g, message in ((np.exp(call["g"]), "logarithms of decays"), (call["g"] * np.nan, "numbers, got NaN")):
        with pytest.raises(kvkit.KvkitError, match=f"^g: expected {message}"):
            kvkit.gated_delta_step(**call | {"g": g})
