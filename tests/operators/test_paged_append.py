"""`kvkit.paged_append` and `swap_blocks` over every engine's pools: every byte of their memory."""

import ml_dtypes
import numpy as np
import pool_scenes
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_calls import bytes_of, scene

import kvkit
from kvkit import formats
from kvkit.formats.elements import BY_NAME
from kvkit.reference import paged as oracle
from kvkit.tools.vectors.draws import any_bytes

pytestmark = pytest.mark.cpu
E4M3 = BY_NAME["e4m3"].dtype
seeds = st.integers(0, 2**32 - 1).map(np.random.default_rng)


def check(pools, new, slots, sides=(0, 1)):
    """Check that an append writes the oracle's bytes and no other; then restore the pools."""
    before = [memory.copy() for memory in pools.memory]
    for side in sides:
        oracle.store_in_pages(new[side], (pools.keys, pools.values)[side], slots)
    expected = bytes_of(pools)
    for memory, old in zip(pools.memory, before, strict=True):
        memory[...] = old
    given = [tokens if side in sides else None for side, tokens in enumerate(new)]
    assert kvkit.paged_append(*given, *pools.given, slots, layout=pools.layout) == pools.given
    assert bytes_of(pools) == expected


@settings(max_examples=120, deadline=None)
@given(seeds, st.sampled_from(list(pool_scenes.ENGINES)), st.sampled_from(["fp32", "bf16", "int8"]))
def test_random(rng, engine, dtype):
    sizes = {"rows": int(rng.choice([1, 3, 16])), "heads": int(rng.integers(1, 4)), "blocks": 7}
    dims = {"dim": int(rng.choice([1, 5, 16, 32])), "value_dim": int(rng.choice([1, 5, 16, 32]))}
    sides = [(0, 1), (0, 1), (0,), (1,)][rng.integers(4)]
    check(*scene(rng, engine, dtype, int(rng.integers(0, 7)), **sizes, **dims), sides)


def codes_of(x, name, scale, found):
    """Return (codes, scales) of tokens [tokens, heads, dim] by the formats."""
    if not found:
        by_channel = np.repeat(scale[:, None], x.shape[2], 1) if np.ndim(scale) else scale
        return (
            formats.encode(x, "ort_int8", scale=by_channel)
            if name == "int8"
            else formats.encode(x, name, scale=scale)
        )["codes"], None
    group = {"group": x.shape[2]}
    how = {"cell": formats.FLOAT32} if name == "int8" else {}
    arrays = formats.encode(x, name, scale=None if name == "int8" else "group", **group, **how)
    return arrays["codes"], arrays["scale"]


@pytest.mark.parametrize("dtype", ["fp16", pytest.param("fp32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["none", "float", "head", "found"])
@pytest.mark.parametrize("name", ["e4m3", pytest.param("e5m2", marks=pytest.mark.slow), "int8"])
@pytest.mark.parametrize(
    "engine", ["flash-attn", "content apart", pytest.param("FlashInfer HND", marks=pytest.mark.slow)]
)
def test_codes(engine, name, kind, dtype, rng):
    """Floats become codes on their way; all else keeps its bytes, scales of other slots too."""
    if (kind, name) == ("none", "int8") or (kind, engine) == ("found", "content apart"):
        return
    _, new, slots = scene(rng, engine, dtype, dim=48)
    pools = pool_scenes.made(engine, 5, 4, 2, 48, 48, BY_NAME[name].dtype)
    new = [(rng.standard_normal(x.shape) * [[[0.1], [300]]]).astype(x.dtype) for x in new]
    scale = {"none": None, "float": 0.5, "head": np.array([0.125, 3], np.float32)}.get(kind)
    beside = pool_scenes.made(engine, 5, 4, 2, 1, 1, np.float32)
    scales = [x[..., 0] for x in beside.given] if kind == "found" else [scale, scale]
    if kind == "found" and "kv" in pools.layout:
        scales = beside.given
    how = dict(zip(("key_scale", "value_scale"), scales, strict=True))
    kvkit.paged_append(*new, *pools.given, slots, layout=pools.layout, **how)
    for side, pool in enumerate((pools.keys, pools.values)):
        expected = np.full(pool.shape, 0xFF, np.uint8)
        codes, cells = codes_of(new[side], name, scale, kind == "found")
        oracle.store_in_pages(codes.view(np.uint8), expected, slots)
        np.testing.assert_array_equal(pool.copy().view(np.uint8), expected)
        if cells is not None:
            expected = np.full((*pool.shape[:3], 1), np.nan, np.float32)
            oracle.store_in_pages(cells, expected, slots)
            np.testing.assert_array_equal((beside.keys, beside.values)[side], expected)


def test_attention_reads_what_was_appended(rng):
    """Slots and pages are two names of one place."""
    pools, new, _ = scene(rng, "FlashInfer HND", tokens=6)
    key, value = (np.ones_like(x) * np.arange(6, dtype=x.dtype)[:, None, None] for x in new)
    kvkit.paged_append(key, value, *pools.given, np.array([8, 9, 10, 11, 4, 5]), layout=pools.layout)
    query = np.zeros((1, 2, 16), np.float16)
    got = kvkit.paged_attention(query, *pools.given, [[2, 1]], [6], layout=pools.layout)
    assert (got == 2.5).all()


ROPES = [kvkit.Rope(16), kvkit.Rope(12, interleaved=True, begin=4)]
ROPES += [kvkit.Rope(8, 1e6, scaling={"rope_type": "yarn", "factor": 4, "max_position_embeddings": 64})]


def rotated(key, rope, positions):
    return np.ascontiguousarray(rope.rotate(key.swapaxes(0, 1), positions).swapaxes(0, 1))


@pytest.mark.parametrize("rope", ROPES, ids=["halves", "neighbours", "scaled"])
@pytest.mark.parametrize("kind", ["copies", "e4m3", "int8"])
@pytest.mark.parametrize(
    ("engine", "dtype"), [("FlashInfer HND", "fp16"), ("content apart", "bf16"), ("flash-attn", "fp32")]
)
def test_keys_are_rotated_on_their_way(engine, dtype, kind, rope, rng):
    """The bytes of two calls; tokens without a slot, several runs, scales that are found."""
    found = kind == "int8" and engine != "content apart"
    positions = rng.integers(0, 5000, 40)
    written = []
    for turn in (True, False):
        draw = np.random.default_rng(1)
        pools, _, slots = scene(draw, engine, dtype, tokens=40, blocks=12)
        key, value = (draw.standard_normal((40, 2, 16)).astype(pools.keys.dtype) for _ in range(2))
        how, beside = {"layout": pools.layout}, pool_scenes.made(engine, 12, 4, 2, 1, 1, np.float32)
        if kind != "copies":
            pools = pool_scenes.made(engine, 12, 4, 2, 16, 16, BY_NAME[kind].dtype)
            scales = beside.given if "kv" in pools.layout else [x[..., 0] for x in beside.given]
            how |= dict(zip(("key_scale", "value_scale"), scales if found else [0.02, 0.5], strict=True))
        if turn:
            kvkit.paged_append(key, value, *pools.given, slots, **how, positions=positions, rope=rope)
        else:
            kvkit.paged_append(rotated(key, rope, positions), value, *pools.given, slots, **how)
        written.append(bytes_of(pools) + bytes_of(beside))
    assert written[0] == written[1]


def test_rotated_keys_of_the_reference(rng):
    key, positions = rng.standard_normal((3, 2, 8), np.float32), [7, 0, 3000]
    how = {"rotary_dim": 4, "theta": 100.0, "begin": 2}
    pools = [np.zeros((2, 1, 4, 2, 8), np.float32) for _ in range(2)]
    oracle.paged_append(key, key, *pools[0], [2, 0, 3], positions=positions, rope=how)
    kvkit.paged_append(key, key, *pools[1], [2, 0, 3], positions=positions, rope=how)
    np.testing.assert_allclose(*pools, atol=2e-4)
    assert not np.array_equal(pools[0][0], pools[0][1])
    keys, _ = kvkit.paged_append(key, key, *pools[1], [2, 0, 3], rope="none")
    assert keys[0, 2].tolist() == key[0].tolist()


@pytest.mark.parametrize("shape", [(6, 3), (6, 5, 70_001), (6,)])
def test_blocks_from_cache_to_cache(shape, rng):
    """Of any strides, and larger than what is copied at once."""
    source, target = any_bytes(rng, shape, np.float32), any_bytes(rng, (4, *shape[1:]), np.float32)
    memory = np.repeat(target, 2, 0)
    around, between = memory[::2], memory[1::2].tobytes()
    pairs = np.array([[5, 0], [2, 3], [5, 1]])
    target[pairs[:, 1]] = source[pairs[:, 0]]
    assert kvkit.swap_blocks(source, around, pairs) is around
    assert around.tobytes() == target.tobytes()
    assert memory[1::2].tobytes() == between


@pytest.mark.parametrize("dtype", ["u1", "?", "i8", "c8", "V3", "float8_e5m2", "float8_e8m0fnu", "f4,u1"])
def test_blocks_of_any_type(dtype, rng):
    """Bytes move, whatever they mean: scales, indices, codes of any engine."""
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    source, target = (rng.integers(0, 2, (4, 3 * dtype.itemsize), np.uint8).view(dtype) for _ in range(2))
    kvkit.swap_blocks(source, target, [[2, 0], [3, 1]])
    assert target[:2].tobytes() == source[2:].tobytes()


def test_blocks_within_a_cache(rng):
    cache = any_bytes(rng, (6, 3), np.int8)
    expected = cache.copy()
    expected[[0, 1]] = expected[[4, 4]]
    assert kvkit.swap_blocks(cache, cache, [[4, 0], [4, 1]]).tobytes() == expected.tobytes()
