"""Compressed caches of DeepSeek V4: the specification's vectors, the reference, states in rings, refusals.

Scenarios have the names of vLLM's tests: decode_boundary, prefill, tails, chunked, multi, padded.
"""

import itertools

import ml_dtypes
import numpy as np
import pytest
import v4_scenes

import kvkit
from kvkit import reference
from kvkit.errors import KvkitError
from kvkit.rope import Rope

ROPE = Rope(2, 16e4, interleaved=True)
KINDS = {"csa": (4, True), "hca": (128, False), "odd": (3, True)}


def f32(*rows):
    return np.array(rows, np.float32)


# A: compressors by hand


def by_hand(overlap):
    """Return the specification's inputs of 11 tokens, and its rows."""
    t, c = np.arange(11)[:, None], np.arange(8 if overlap else 4)
    inputs = {"kv": ((3 * t + 2 * c) % 7) - 3.0, "gate": ((2 * t + c) % 5) - 2.0}
    inputs["ape"] = (np.arange(4)[:, None] - c) / 4
    rows = (
        [(-1.44854, -.310481, -1.315942, -.271345), (1.681172, .393947, -.206068, .987926)] if overlap else
        [(1.623042, .882071, -.399546, -.654253), (-1.504807, -.539042, .380395, 1.140301)]
    )  # fmt: skip
    return {name: x.astype(np.float32) for name, x in inputs.items()}, np.array(rows)


@pytest.mark.parametrize("package", [kvkit, reference])
@pytest.mark.parametrize("overlap", [False, True])
def test_compressors_by_hand(overlap, package):
    inputs, rows = by_hand(overlap)
    options = {"ratio": 4, "overlap": overlap, "norm_weight": np.ones(4, np.float32), "rope": ROPE}
    state = np.full((1, 8 if overlap else 4, 2, 8 if overlap else 4), np.nan, np.float32)
    got, slots = package.compress_tokens(**inputs, state=state.copy(), **options)
    np.testing.assert_allclose(got, rows, atol=2e-6)
    assert slots.tolist() == [-1, -1, -1, 0, -1, -1, -1, 1, -1, -1, -1]
    # row 1 from tokens 4..7 alone, at position 0: another rotation, and no window before
    cut = {name: x[4:8] if name != "ape" else x for name, x in inputs.items()}
    alone, _ = package.compress_tokens(**cut, state=state.copy(), **options)
    if overlap:
        np.testing.assert_allclose(alone, [(-1.593773, -0.809266, -0.315638, 0.839845)], atol=2e-6)
    else:
        np.testing.assert_allclose(alone[0, 2:], (-1.111626, -0.457467), atol=2e-6)
        np.testing.assert_allclose(alone[0, :2], rows[1, :2], atol=2e-6)


# B: slots


def test_slots_by_hand():
    slots = kvkit.compressed_slots(np.arange(12), [[7, 3, 9]], 2, ratio=4)
    assert slots.tolist() == [-1, -1, -1, 14, -1, -1, -1, 15, -1, -1, -1, 6]
    tables = np.array([[4, 5], [0, 2]])
    owner, positions = np.array([1, 1, 0, 0, 1]), np.array([254, 255, 127, -1, 128])
    slots = kvkit.compressed_slots(positions, tables, 1, ratio=128, sequence_of_token=owner)
    assert slots.tolist() == [-1, 2, 4, -1, -1]


# C: whole layers


@pytest.mark.parametrize("kind", v4_scenes.RATIOS)
def test_layers_of_the_reference(kind):
    layer = v4_scenes.Layer(kind)
    inputs, rows, keys = layer.inputs(), np.zeros((0, v4_scenes.DIM)), None
    more = {"sinks": layer.sinks, "ratio": layer.ratio, "window": v4_scenes.WINDOW}
    if kind != "window":
        rows = pooled(reference, layer, inputs.compressor, layer.ape, layer.c_norm)
    if kind == "csa":
        keys = pooled(reference, layer, inputs.indexer, layer.iape, layer.i_norm)
        more |= {"index": inputs.index, "index_keys": keys, "index_topk": v4_scenes.TOP}
    p = np.arange(v4_scenes.TOKENS)
    out, lse = reference.compressed_attention(inputs.q, inputs.row, rows, p, **more)
    back = reference.REFERENCE["rope_back"](out, p, layer.rope)
    v4_scenes.check_sums(kind, back, lse, rows if kind != "window" else None, keys, 1e-5)
    if kind == "csa":
        np.testing.assert_allclose(back[20], v4_scenes.CSA_20, atol=1e-5)
        np.testing.assert_allclose(lse[20], (2.841773, 2.713178), atol=1e-5)


def pooled(package, layer, tokens, ape, norm):
    """Return the rows of a prompt; states of float64 in the reference, so that sums have its digits."""
    overlap, width = layer.overlap, tokens[0].shape[1]
    dtype = np.float64 if package is reference else np.float32
    state = np.zeros((1, layer.ratio * (1 + overlap), 2, width), dtype)
    kv, gate, ape, norm = (x.astype(dtype) for x in (*tokens, ape, norm))
    options = {"ratio": layer.ratio, "overlap": overlap, "norm_weight": norm, "rope": layer.rope}
    return package.compress_tokens(kv, gate, ape, state, **options)[0]


@pytest.mark.parametrize("kind", v4_scenes.RATIOS)
def test_layers_of_operators(kind):
    """compress_tokens, indexer_scores, topk_rows, mla_attention over two pools, rope_back; in float32."""
    layer = v4_scenes.Layer(kind)
    inputs = layer.inputs().part(0, 21, np.float32)
    p, keys, rows = np.arange(21), None, np.zeros((1, v4_scenes.DIM), np.float32)
    near = p[:, None] - np.arange(v4_scenes.WINDOW)[::-1]
    chosen = np.full((21, 1), -1)
    if kind != "window":
        rows = pooled(kvkit, layer, inputs.compressor, layer.ape, layer.c_norm)
        ready = (p + 1) // layer.ratio
        chosen = np.where(np.arange(len(rows)) < ready[:, None], np.arange(len(rows)), -1)
    if kind == "csa":
        keys = pooled(kvkit, layer, inputs.indexer, layer.iape, layer.i_norm)
        scores = kvkit.indexer_scores(
            inputs.index[0], keys[None], inputs.index[1], np.zeros((21, 1), int), ready, np.arange(22)
        )
        chosen = kvkit.topk_rows(scores, v4_scenes.TOP, np.zeros((21, 1), int), len(keys), np.arange(22))
        seen = ["".join(map(str, row[row >= 0])) or "-" for row in chosen]
        assert seen == v4_scenes.CHOSEN
    out, lse = kvkit.mla_attention(
        inputs.q, inputs.row[None], softmax_scale=v4_scenes.DIM**-0.5, value_dim=v4_scenes.DIM,
        indices=np.maximum(near, -1), extra=(rows[None], chosen, None), sinks=layer.sinks.astype(np.float32),
        return_lse=True,
    )  # fmt: skip
    back = kvkit.rope_back(out, p, layer.rope)
    v4_scenes.check_sums(kind, back, lse, None if kind == "window" else rows, keys, 2e-5)


# Against the reference


def scene(kind, lengths, pasts=None, dtype=np.float32, drafts=0, dim=24, seed=0):
    """Return a call's arguments for packed sequences whose states hold random earlier tokens."""
    rng, (ratio, overlap) = np.random.default_rng(seed), KINDS[kind]
    width, count = dim * (1 + overlap), len(lengths)
    state = rng.standard_normal((count + 2, ratio * (1 + overlap) + drafts, 2, width), np.float32)
    call = {name: rng.standard_normal((sum(lengths), width)).astype(dtype) for name in ("kv", "gate")}
    pasts = pasts or [0] * count
    positions = [past + np.arange(n) for past, n in zip(pasts, lengths, strict=True)]
    return call | {
        "ape": rng.standard_normal((ratio, width)).astype(np.float32), "state": state, "ratio": ratio,
        "overlap": overlap, "norm_weight": 1 + rng.standard_normal(dim).astype(np.float32) / 4,
        "positions": np.concatenate(positions), "starts": np.cumsum([0, *lengths]),
        "state_indices": rng.permutation(count + 2)[:count], "rope": Rope(6, 16e4, interleaved=True),
    }  # fmt: skip


def compare(call, tolerance=3e-6):
    """Run a call and the reference; compare rows within a tolerance, the rest exactly; return rows."""
    wanted = call | {"state": call["state"].copy()}
    rows, numbers = kvkit.compress_tokens(**call)
    expected, expected_numbers = reference.compress_tokens(**wanted)
    assert rows.shape == expected.shape
    assert np.abs(rows - expected).max(initial=0) <= tolerance * max(1, np.abs(expected).max(initial=0))
    assert numbers.tolist() == expected_numbers.tolist()
    np.testing.assert_array_equal(call["state"], wanted["state"])
    return rows


SCENARIOS = {
    "decode_boundary": ([1, 1, 1, 1], [127, 255, 383, 511]),
    "decode_inside": ([1, 1, 1], [128, 254, 1]),
    "prefill": ([128, 512], None),
    "tails": ([257, 1025], None),
    "chunked_100": ([100, 100], [100, 300]),
    "multi": ([3, 0, 130, 1], [5, 9, 126, 0]),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenarios(name, kind, dtype):
    lengths, pasts = SCENARIOS[name]
    compare(scene(kind, lengths, pasts, dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_padded(kind):
    """A sequence without a slot finishes nothing, and no state changes for it."""
    call = scene(kind, [300, 5, 140])
    call["state_indices"][1] = -1
    before = call["state"].copy()
    compare(call)
    unused = np.setdiff1d(np.arange(5), call["state_indices"])
    np.testing.assert_array_equal(call["state"][unused], before[unused])


def test_arrays_of_any_strides():
    call = scene("csa", [40])
    wide = np.repeat(call["kv"], 3, axis=1)
    compare(call | {"kv": wide[:, ::3], "gate": np.repeat(call["gate"], 2, axis=0)[::2]})
    pool = np.full((3, 9, 2, 2, 48), np.nan, np.float32)[:, 1]
    compare(call | {"state": np.zeros((6, 8, 2, 48), np.float32)[::2]})
    with pytest.raises(KvkitError, match="state: "):
        kvkit.compress_tokens(**call | {"state": pool})


@pytest.mark.parametrize("cuts", [(), (100, 100), (4, 8, 128), (1, 2, 3, 5, 127, 129), range(1, 300)])
@pytest.mark.parametrize("kind", KINDS)
def test_one_prompt_is_chunks_is_tokens(kind, cuts):
    """Rows of any division are equal bit for bit, and so is the state."""
    call = scene(kind, [300], drafts=2) | {"state_indices": [1]}
    rows, state = kvkit.compress_tokens(**call | {"state": (whole := call["state"].copy())})[0], call["state"]
    parts = []
    for begin, end in itertools.pairwise((0, *cuts, 300)):
        part = {name: call[name][begin:end] for name in ("kv", "gate", "positions")}
        got, _ = kvkit.compress_tokens(**call | part | {"state": state, "starts": None})
        parts.append(got)
    np.testing.assert_array_equal(np.concatenate(parts), rows)
    np.testing.assert_array_equal(state, whole)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_that_are_taken_back(kind):
    """A ring of r more tokens gives right rows after any r of them were written and taken back."""
    (ratio, _), drafts = KINDS[kind], 3
    call = scene(kind, [3 * ratio], drafts=drafts) | {"state_indices": [0], "starts": None}
    rows, _ = kvkit.compress_tokens(**call | {"state": call["state"].copy()})
    found = {}
    for p in range(3 * ratio):
        for begin, end in ((p, min(p + 1 + drafts, 3 * ratio)), (p, p + 1)):
            part = {name: call[name][begin:end] for name in ("kv", "gate", "positions")}
            if end > p + 1:
                part["kv"] = part["kv"] * 7 + 1  # drafts that were wrong
            got, numbers = kvkit.compress_tokens(**call | part)
        found |= dict(zip(numbers[numbers >= 0].tolist(), got, strict=True))
    np.testing.assert_array_equal(np.array([found[i] for i in range(3)]), rows)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_back(interleaved):
    rng, rope = np.random.default_rng(0), Rope(64, 16e4, interleaved, v4_scenes.YARN)
    x = rng.standard_normal((5, 3, 512), np.float32)
    positions = np.array([0, 1, 127, 70_000, 2**20])
    placed = Rope(64, 16e4, interleaved, v4_scenes.YARN, begin=448)
    back = kvkit.rope_back(placed.rotate(x, positions[:, None]), positions, rope)
    np.testing.assert_allclose(back, x, atol=2e-6)
    wanted = reference.REFERENCE["rope_back"](x, positions, rope)
    np.testing.assert_allclose(kvkit.rope_back(x, positions, placed), wanted, atol=2e-6)
