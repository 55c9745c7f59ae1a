"""`kvkit_cuda.paged_attention`, `paged_append` and `swap_blocks`: against loops, and the CPU's bytes."""

import itertools

import latent_scenes
import ml_dtypes
import numpy as np
import pool_scenes
import pytest
from attention_scenes import TOLERANCE, assert_near
from device_arrays import Array, contents
from pool_calls import EXTRAS, Scene, bytes_of, mask_of
from pool_calls import scene as append_scene

import kvkit
import kvkit_cuda
from kvkit.formats import encode
from kvkit.formats.elements import BY_NAME
from kvkit.tools.vectors.draws import any_bytes

# Values that have rows of their own; elements apart; what tensor cores would take.
QUICK = "shared pages", "content apart"
ENGINES = [
    engine if engine in QUICK else pytest.param(engine, marks=pytest.mark.slow)
    for engine in pool_scenes.ENGINES
]
SMALL = {"lengths": (5, 0, 9), "queries": (1, 2, 3), "dim": 8}


def check(scene, **more):
    """Check results against the loops, and that pools keep their bytes."""
    before = bytes_of(scene.pools)
    output, lse = scene.expected()
    results = kvkit_cuda.paged_attention(**scene.arguments | more, return_lse=True)
    assert_near(contents(results[0]), output, TOLERANCE[str(scene.query.dtype)])
    assert_near(contents(results[1]), lse, 2e-5, "lse")
    assert bytes_of(scene.pools) == before


@pytest.mark.parametrize("engine", ENGINES)
def test_engines(engine, rng):
    check(Scene(rng, engine, **SMALL, value_dim=4))


@pytest.mark.parametrize(
    "extra", ["scales of sequences", *(pytest.param(each, marks=pytest.mark.slow) for each in EXTRAS)]
)
def test_extras_over_arrays_of_the_device(extra, rng):
    """Index tensors and numbers of heads are read; one pool is given once."""
    more = dict(EXTRAS[extra])
    more |= {name: more[name][[0, 2, 4]] for name in more if np.ndim(more[name]) == 2}
    if "scales" in extra:
        more |= {"alibi_slopes": np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)}
    scene = Scene(rng, "FlashInfer", "fp16", (5, 0, 9), (1, 2, 3), **more)
    if extra == "all":
        scene.more["attn_mask"] = mask_of(rng, scene, np.float32, 4)
    names = "query", "block_tables", "context_lens", "key_scale", "alibi_slopes", "sinks", "attn_mask"
    given = {n: Array(v) for n, v in scene.arguments.items() if n in names and isinstance(v, np.ndarray)}
    check(scene, key_cache=Array(scene.pools.memory[0]), value_cache=None, **given)


def test_heads_in_descending_order(rng):
    """Tensor cores take strides below 0 between heads of arrays on the device."""
    pools = [rng.standard_normal((3, 4, 2, 16)).astype(np.float16)[:, :, ::-1] for _ in range(2)]
    query, tables = rng.standard_normal((2, 4, 16)).astype(np.float16)[:, ::-1], np.array([[2, 0], [1, 0]])
    expected = kvkit.paged_attention(query, *pools, tables, [7, 3])
    found = kvkit_cuda.paged_attention(*map(Array, (query, *pools)), tables, [7, 3])
    assert_near(contents(found), expected, TOLERANCE["float16"])


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("fp16", marks=pytest.mark.slow)])
def test_sums_of_weights(dtype, rng):
    """Each sequence has its own sums, and given arrays receive them whole."""
    sinks = np.arange(4, dtype=np.float32)
    scene = Scene(rng, "FlashInfer", dtype, (13, 0, 9), (3, 2, 1), dim=8, sinks=sinks)
    wanted = kvkit.paged_attention(**scene.arguments, return_key_weights=True)
    out = np.empty_like(wanted[0]), np.full((3, 4, 16), np.nan, np.float32)[..., :13]
    got = kvkit_cuda.paged_attention(**scene.arguments, return_key_weights=True, out=out)
    assert got[1] is out[1]
    assert_near(got[0], wanted[0], TOLERANCE[str(scene.query.dtype)])
    np.testing.assert_allclose(got[1], wanted[1], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("pair", [("fp16", "fp32"), ("fp32", "bf16")], ids="-".join)
def test_queries_of_another_type(pair, rng):
    scene = Scene(rng, "flash-attn", pair[1], (20, 30), (1, 12), query_dtype=pair[0])
    check(scene)
    values = scene.pools.given[1].astype(scene.query.dtype)
    scene.pools.given, scene.pools.values = (scene.pools.given[0], values), values
    check(scene)


@pytest.mark.parametrize("queries", [(1, 2), pytest.param((1, 12), marks=pytest.mark.slow)])
def test_blocks_of_ggml_and_one_scale_for_heads_of_two_sizes(queries, rng):
    x = [rng.standard_normal((6, 2, dim)).astype(np.float32) for dim in (32, 64)]
    given = {"block_tables": [[3, 1, 2], [0, 4, 5]], "context_lens": [2, 3], "layout": "b h c"}
    given |= {"query": rng.standard_normal((sum(queries), 4, 32)).astype(np.float32)}
    given |= {"query_starts": [0, *np.cumsum(queries)], "is_causal": False}
    blocks = {"key_cache": encode(x[0], "q8_0")["codes"], "value_cache": encode(x[1], "q4_0")["codes"]}
    codes = {"key_cache": (20 * x[0]).astype(np.int8), "value_cache": (20 * x[1]).astype(np.int8)}
    scales = rng.uniform(0.01, 0.05, (2, 6, 2)).astype(np.float32)
    for more in (
        blocks | {"quant_format": "q8_0/q4_0"},
        codes | {"key_scale": scales[0], "value_scale": scales[1]},
    ):
        assert_near(
            contents(kvkit_cuda.paged_attention(**given, **more)),
            kvkit.paged_attention(**given, **more),
            2e-5,
        )


@pytest.mark.slow
def test_codes_with_their_scales(rng):
    """Products are not rounded, though tensor cores would."""
    codes = rng.integers(-127, 128, (2, 5, 4, 2, 32), np.int8)
    scales = rng.uniform(0.001, 0.02, (2, 5, 4, 2, 2)).astype(np.float16)
    given = {"key_cache": codes[0], "value_cache": codes[1]}
    given |= {"block_tables": [[3, 1], [0, 4]], "context_lens": [7, 8], "query_starts": [0, 1, 4]}
    given |= {"query": rng.standard_normal((4, 4, 32)).astype(np.float16)}
    given |= {"key_scale": scales[0], "value_scale": scales[1]}
    assert_near(kvkit_cuda.paged_attention(**given), kvkit.paged_attention(**given), 2e-3)


@pytest.mark.parametrize("engine", ["shared pages", "FlashInfer", "content apart"])
def test_appends(engine, rng):
    """The bytes that the CPU writes, and no byte else."""
    pools, new, slots = append_scene(rng, engine)
    before = [memory.copy() for memory in pools.memory]
    kvkit.paged_append(*new, *pools.given, slots, layout=pools.layout)
    expected = bytes_of(pools)
    for memory, old in zip(pools.memory, before, strict=True):
        memory[...] = old
    assert kvkit_cuda.paged_append(*new, *pools.given, slots, layout=pools.layout) == pools.given
    assert bytes_of(pools) == expected


# Each code, each kind of scale and both engines; of two codes each way to find a scale.
CODED = [
    ("flash-attn", "e4m3", "found"), ("flash-attn", "int8", "found"), ("flash-attn", "int8", "head"),
    ("flash-attn", "e5m2", "none"), ("content apart", "e4m3", "head"), ("content apart", "e5m2", "none"),
]  # fmt: skip
MORE_CODED = [
    case
    for case in itertools.product(
        ("flash-attn", "content apart"), ("e4m3", "e5m2", "int8"), ("none", "head", "found")
    )
    if case not in CODED and case[1:] != ("int8", "none") and case[::2] != ("content apart", "found")
]


@pytest.mark.parametrize("dtype", ["fp16", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("engine", "name", "kind"),
    [*CODED, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_CODED)],
)
def test_appends_codes(engine, name, kind, dtype, rng):
    """The bytes that the CPU writes, and no byte else; attention to them is the same, too."""
    _, new, slots = append_scene(rng, engine, dtype, dim=48)
    new = [(rng.standard_normal(x.shape) * [[[0.1], [300]]]).astype(x.dtype) for x in new]
    codes = pool_scenes.made(engine, 5, 4, 2, 48, 48, BY_NAME[name].dtype)
    beside = pool_scenes.made(engine, 5, 4, 2, 3, 3, np.float16)
    for memory in (*codes.memory, *beside.memory):
        memory.view(np.uint8)[...] = 0
    scales = {"none": [None, None], "head": [np.float32([0.125, 3]), 0.5], "found": beside.given}[kind]
    how = {"layout": codes.layout} | dict(zip(("key_scale", "value_scale"), scales, strict=True))
    kvkit.paged_append(*new, *codes.given, slots, **how)
    expected = bytes_of(codes), bytes_of(beside)
    # One token is stored. Small scores: a large one below 0 would leave it a weight that is all rounding.
    query = (rng.standard_normal((1, 4, 48)) / 64).astype(new[0].dtype)
    seen = query, *codes.given, [[2, 1]], [6]
    attended = kvkit.paged_attention(*seen, **how)
    for memory in (*codes.memory, *beside.memory):
        memory.view(np.uint8)[...] = 0
    assert kvkit_cuda.paged_append(*new, *codes.given, slots, **how) == codes.given
    assert (bytes_of(codes), bytes_of(beside)) == expected
    assert_near(contents(kvkit_cuda.paged_attention(*seen, **how)), attended, 2e-2 * abs(attended).max())


# Pairs a chunk holds whole, or apart; elements one by one, in halves and as neighbours; angles of some pairs.
ROPES = {
    "halves": kvkit.Rope(32), "neighbours": kvkit.Rope(16, interleaved=True, begin=16),
    "one by one": kvkit.Rope(20, begin=2), "neighbours one by one": kvkit.Rope(6, interleaved=True, begin=5),
}  # fmt: skip


ROTATED = [
    ("halves", "FlashInfer", None, "none", "bf16"), ("neighbours", "flash-attn", "int8", "found", "fp16"),
    ("one by one", "flash-attn", "int8", "found", "fp16"),
    ("neighbours one by one", "content apart", "e4m3", "head", "fp32"),
]  # fmt: skip
MORE_ROTATED = [(rope, *case[1:]) for rope in ROPES for case in ROTATED if (rope, *case[1:]) not in ROTATED]


@pytest.mark.parametrize(
    ("rope", "engine", "name", "kind", "dtype"),
    [*ROTATED, *(pytest.param(*case, marks=pytest.mark.slow) for case in dict.fromkeys(MORE_ROTATED))],
)
def test_keys_are_rotated_on_their_way(rope, engine, name, kind, dtype, rng):
    """The bytes that the CPU writes, by a call alone and by a plan."""
    plans = [kvkit_cuda.paged_plan([[4, 2], [0, 1], [3, 3]], [6, 8, 1], [0, 2, 5, 6], page_size=4), None]
    slots, positions = np.array([8, 9, 5, 6, 7, 12]), np.array([4, 5, 5, 6, 7, 0])
    _, new, _ = append_scene(rng, engine, dtype, 6, dim=32)
    new = [rng.standard_normal(x.shape).astype(x.dtype) for x in new]
    codes = BY_NAME[name].dtype if name else new[0].dtype
    written = []
    for package, plan in ((kvkit, None), *((kvkit_cuda, plan) for plan in plans)):
        pools = pool_scenes.made(engine, 5, 4, 2, 32, 32, codes)
        beside = pool_scenes.made(engine, 5, 4, 2, 4, 4, np.float32)
        scales = {"none": [None, None], "head": [np.float32([0.125, 3]), 0.5], "found": beside.given}[kind]
        how = {"layout": pools.layout, "key_scale": scales[0], "value_scale": scales[1], "rope": ROPES[rope]}
        if plan:
            plan.paged_append(*new, *pools.given, **how)
        else:
            package.paged_append(*new, *pools.given, slots, **how, positions=positions)
        written.append(bytes_of(pools) + bytes_of(beside))
    assert written[1] == written[0]
    assert written[2] == written[0]


@pytest.mark.parametrize("shape", [(6, 3), (6,), (6, 2, 3, 2, 4)])
def test_blocks_from_cache_to_cache(shape, rng):
    """From the host to the device, into memory with gaps."""
    source, memory = any_bytes(rng, shape, np.float32), any_bytes(rng, (8, *shape[1:]), np.float32)
    expected, pairs, target = memory.copy(), np.array([[5, 0], [2, 3], [5, 1]]), Array(memory[::2])
    expected[::2][pairs[:, 1]] = source[pairs[:, 0]]
    assert kvkit_cuda.swap_blocks(source, target, pairs) is target
    assert memory.tobytes() == expected.tobytes()
    assert kvkit_cuda.swap_blocks(source, source, [[0, 5]]) is source
    assert source[5].tobytes() == source[0].tobytes()
    for dtype in ("u1", "i8", "V3"):
        one = any_bytes(rng, shape, dtype)
        assert kvkit_cuda.swap_blocks(one, one, [[0, 5]])[5].tobytes() == one[0].tobytes()


@pytest.mark.parametrize("kind", ["one pool", "ds_mla"])
def test_latent_rows_of_two_pools_for_pairs_of_queries(rng, kind):
    """`extra` and pairs, which no table of calls has, on the device and on the host; sinks by both rules."""
    rows = rng.standard_normal((3, 4, 576), np.float32)
    pool, _ = latent_scenes.pools(rows, kind)
    query = rng.standard_normal((3, 4, 576), np.float32)
    more = {"softmax_scale": 0.05, "return_lse": True}
    more["indices"] = np.array([[1, -1, 9], [3, 3, 0], [-1, -1, -1]])
    more |= {"format": pool.get("format"), "sinks": np.arange(4, dtype=np.float32)}
    second = np.array([[2], [50], [-1]]), np.array([1, 1, 1])
    for lse_of_sinks in (True, False):
        expected = kvkit.mla_attention(
            query, pool["latent"], **more, lse_of_sinks=lse_of_sinks, extra=(pool["latent"][::-1], *second)
        )
        there = Array(np.ascontiguousarray(pool["latent"][::-1]))
        pair = Array(np.ascontiguousarray(query[..., :512])), np.ascontiguousarray(query[..., 512:])
        found = kvkit_cuda.mla_attention(
            pair, Array(pool["latent"]), **more, lse_of_sinks=lse_of_sinks, extra=(there, *second)
        )
        for got, right in zip(found, expected, strict=True):
            np.testing.assert_allclose(contents(got), right, atol=2e-5)


@pytest.mark.parametrize("chosen", [False, True], ids=["contexts", "chosen rows"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_rows_of_656_bytes_are_decoded_on_the_device(dtype, chosen, rng, monkeypatch):
    """Of blocks with a gap between them, without the host; a sequence has no rows."""
    rows = rng.standard_normal((3, 4, 576), np.float32)
    codes = latent_scenes.pools(rows, "ds_mla")[0]["latent"]
    pool = np.full((3, 5, 656), 255, np.uint8)[:, :4]
    pool[...] = codes
    query = rng.standard_normal((3, 2, 576), np.float32).astype(dtype)
    where = {"block_tables": [[2, 0], [1, -1], [-1, -1]], "context_lens": [7, 3, 0]}
    if chosen:
        where = {"indices": np.array([[11, -1, 0], [3, 3, 5], [-1, -1, -1]]), "index_lens": [3, 2, 3]}
    call = where | {"softmax_scale": 0.05, "format": "ds_mla", "return_lse": True}
    call["sinks"] = np.ones(2, np.float32)
    expected = kvkit.mla_attention(query, pool, **call)
    monkeypatch.setattr("kvkit_cuda.calls.latent.gather_rows", None)
    found = kvkit_cuda.mla_attention(Array(query), Array(pool), **call)
    for got, right in zip(map(contents, found), expected, strict=True):
        tolerance = 2e-5 if dtype == np.float32 else 2**-6
        np.testing.assert_allclose(got.astype(np.float32), right.astype(np.float32), atol=tolerance)


def test_contexts_without_tokens_and_tables_without_pages():
    query, pool = np.ones((2, 4, 64), np.float16), np.ones((3, 16, 2, 64), np.float16)
    outs = [
        library.paged_attention(query, pool, pool, np.zeros((2, 0), np.int64), np.zeros(2, np.int64))
        for library in (kvkit, kvkit_cuda)
    ]
    np.testing.assert_array_equal(contents(outs[1]), outs[0])
