"""`kvkit.paged_attention` over every engine's pools, against plain loops in float64; unused rows are NaN."""

import functools
import tracemalloc

import ml_dtypes
import numpy as np
import pool_scenes
import pytest
from attention_scenes import TOLERANCE, assert_near
from borders import BEGIN, END, at_border, needs_borders
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_calls import EXTRAS, Scene, mask_of
from scenes import DTYPES

import kvkit
from kvkit import KvkitError
from kvkit.checks import pools
from kvkit.checks.contexts import Contexts
from kvkit.formats import decode, encode
from kvkit.formats.elements import BY_NAME
from kvkit.reference.formats import TABLES

pytestmark = pytest.mark.cpu
seeds = st.integers(0, 2**32 - 1).map(np.random.default_rng)
FLOATS = ("fp32", "fp16", "bf16")
every_engine = pytest.mark.parametrize("engine", pool_scenes.ENGINES)


@every_engine
def test_a_query_a_sequence(engine, rng):
    """A step of decoding over long contexts, in parts; the same bits whatever lies between the rows."""
    lengths = (3, 700, 0, 1030)
    scene = Scene(rng, engine, "fp16", lengths, (1,) * 4, dim=64, rows=16)
    assert scene.check().tobytes() == scene.run(query_starts=None).tobytes()


@pytest.mark.parametrize(("dim", "value_dim"), [(72, 64), (64, 72), (40, 200)])
def test_a_latent_row(dim, value_dim, rng):
    """MLA: 128 query heads on one key head, whose first elements are the value; or the other way round."""
    lengths, rows = (40, 3), 8
    scene = Scene(rng, "flash-attn", "bf16", lengths, (1, 2), 1, 128, dim, value_dim, rows=rows)
    pool = scene.pools.keys if dim > value_dim else scene.pools.values
    scene.pools.keys, scene.pools.values = pool[..., :dim], pool[..., :value_dim]
    scene.pools.given, scene.pools.layout = (pool[:, :, 0, :dim], pool[:, :, 0, :value_dim]), "b n c"
    scene.check()


def test_values_at_the_address_of_keys_with_other_strides(rng):
    """Heads 0 and 1 are the keys, 0 and 2 the values."""
    pool, query = (
        rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((4, 8, 3, 64), (2, 32, 64))
    )
    keys, values = pool[:, :, :2], pool[:, :, ::2]
    how = [[0, 1], [3, 2]], [16, 9]
    expected = kvkit.paged_attention(query, keys.copy(), values.copy(), *how)
    np.testing.assert_array_equal(kvkit.paged_attention(query, keys, values, *how), expected)


def test_pages_of_one_token(rng):
    scene = Scene(rng, rows=1)
    scene.pools.given, scene.pools.layout = [pool[:, 0] for pool in scene.pools.given], "b h c"
    scene.check()


def test_lists_of_pages(rng):
    """A table, or indptr and indices, of either type of integer; more pages than a context needs."""
    scene = Scene(rng)
    expected = scene.run()
    starts, ids = pool_scenes.as_lists([[*own, 10**6] for own in scene.pages])
    for integer in (np.int64, np.int32):
        assert (
            scene.run(block_tables=(starts.astype(integer), ids.astype(integer))).tobytes()
            == expected.tobytes()
        )
    assert scene.run(block_tables=(starts.tolist(), ids.tolist())).tobytes() == expected.tobytes()


@pytest.mark.parametrize("pair", [("fp16", "fp32"), ("fp32", "bf16"), ("bf16", "fp16")], ids="-".join)
@pytest.mark.parametrize("queries", [(1, 1), (20, 7)], ids=["decode", "prefill"])
def test_queries_of_another_type(pair, queries, rng):
    """The result has theirs; keys and values are read as they are, of a type each."""
    scene = Scene(rng, "flash-attn", pair[1], (50, 30), queries, query_dtype=pair[0])
    scene.check()
    values = scene.pools.given[1].astype(DTYPES[pair[0]])
    scene.pools.given, scene.pools.values = (scene.pools.given[0], values), values
    scene.check()


def inline_scales(rng, blocks, rows, heads, dim):
    """Return pools of vLLM's int8_per_token_head: codes of keys, their scale, codes of values, theirs."""
    row = rng.integers(0, 256, (blocks, heads, rows, 2 * (dim + 4)), np.uint8)
    keys, values = row[..., : dim + 4], row[..., dim + 4 :]
    codes = [side[..., :dim].view(np.int8) for side in (keys, values)]
    return "b h n c", codes, [side[..., dim:].view(np.float32)[..., 0] for side in (keys, values)]


def scales_beside(rng, blocks, rows, heads, dim):
    """Return a pool of codes, and one of scales for groups of 16."""
    codes = rng.integers(-128, 128, (blocks, 2, rows, heads, dim), np.int8)
    scales = np.full((blocks, 2, rows, heads, dim // 16), np.nan, np.float16)
    return "b kv n h c", [codes, codes], [scales, scales]


@pytest.mark.parametrize("queries", [(1, 1), (3, 40)], ids=["decode", "prefill"])
@pytest.mark.parametrize("form", [inline_scales, scales_beside], ids=lambda form: form.__name__)
def test_codes_with_their_scales(form, queries, rng):
    """Products of codes and scales are not rounded; scales of rows that hold nothing are NaN."""
    scene = Scene(rng, "flash-attn", "fp32", (50, 70), queries, dim=32)
    blocks, rows, heads, dim = scene.pools.keys.shape
    layout, codes, scales = form(rng, blocks, rows, heads, dim)
    kinds = [0, 1] if "kv" in layout else [slice(None)] * 2
    views = []
    for side, (code, scale) in enumerate(zip(codes, scales, strict=True)):
        axes = [axis for axis in layout.split() if axis != "kv"]
        code, scale = (x[:, kinds[side]] if "kv" in layout else x for x in (code, scale))
        scale = scale if scale.ndim == 4 else scale[..., None]
        code, scale = (x.transpose([axes.index(axis) for axis in "bnhc"]) for x in (code, scale))
        scale[...] = np.nan
        for own, length in zip(scene.pages, scene.lengths, strict=True):
            for j in range(length):
                scale[own[j // rows], j % rows] = rng.uniform(0.001, 0.02, scale.shape[2:])
        views.append(code * np.repeat(scale.astype(np.float64), dim // scale.shape[3], 3))
    scene.pools.keys, scene.pools.values = views
    output, lse = scene.expected()
    more = {"key_cache": codes[0], "value_cache": codes[1], "layout": layout, "return_lse": True}
    got = scene.run(**more, key_scale=scales[0], value_scale=scales[1])
    assert_near(got[0], output, 2e-5)
    assert_near(got[1], lse, 2e-5)
    for name, wrong in (
        ("key_scale", {"key_scale": None, "value_scale": None}),
        ("key_scale", {"key_scale": 0.5}),
        ("key_scale", {"key_scale": np.ones(heads + 1, np.float32)}),
        ("value_scale", {"value_scale": np.full(heads, np.nan, np.float32)}),
        ("value_scale", {"key_scale": 0.5, "value_scale": np.ones((1,) * 7, np.float32)}),
        ("value_scale", {"key_scale": 0.5, "value_scale": scales[1][..., :1][:-1]}),
    ):
        with pytest.raises(KvkitError, match=f"^{name}: expected "):
            scene.run(**more | {"key_scale": scales[0], "value_scale": scales[1]} | wrong)


@pytest.mark.parametrize(("groups", "value_dim"), [(3, 32), (1, 32), (1, 64)])
def test_latent_codes_with_scales_of_their_rows(groups, value_dim, rng):
    """The axis of one head, which "b n c" leaves out, has any stride; heads of two sizes share one scale."""
    scene = Scene(rng, "flash-attn", "fp32", (40, 70), (1, 30), 1, 4, 48, value_dim)
    shape, length = scene.pools.keys.shape[:2], max(48, value_dim)
    codes = rng.integers(-127, 128, (*shape, length), np.int8)
    scales = rng.uniform(0.001, 0.02, (*shape, groups * length // 48)).astype(np.float32)
    given = [codes[..., :dim] for dim in (48, value_dim)]
    each = [scales[..., : max(groups * dim // 48, 1)] for dim in (48, value_dim)]
    scene.pools.keys, scene.pools.values = (
        (code * np.repeat(scale.astype(np.float64), code.shape[-1] // scale.shape[-1], -1))[:, :, None]
        for code, scale in zip(given, each, strict=True)
    )
    scales_given = dict(zip(("key_scale", "value_scale"), each, strict=True))
    got = scene.run(key_cache=given[0], value_cache=given[1], layout="b n c", **scales_given)
    assert_near(got, scene.expected()[0], 2e-5)


@pytest.mark.parametrize("name", ["q8_0", "q4_0/q8_0"])
def test_blocks_of_ggml(name, rng):
    """llama.cpp's buffers of cells [n, heads, bytes], a page each; and pages of them, with heads apart."""
    scene = Scene(rng, "flash-attn", "fp16", (50, 70), (1, 40), dim=64, value_dim=96, rows=1)
    formats = [name.partition("/")[0], name.rpartition("/")[2]]
    buffers = []
    for side, format in zip(("keys", "values"), formats, strict=True):
        rows = np.nan_to_num(getattr(scene.pools, side)[:, 0].astype(np.float32))
        buffers.append(encode(rows, format)["codes"])
        setattr(scene.pools, side, decode({"codes": buffers[-1]}, format)[:, None])
    expected = scene.expected()[0]
    buffer = {"key_cache": buffers[0], "value_cache": buffers[1], "quant_format": name}
    got = scene.run(**buffer, layout="b h c")
    assert_near(got, expected, TOLERANCE["float16"])
    apart = {side: x[:, :, None] for side, x in buffer.items() if side != "quant_format"}
    assert scene.run(**buffer | apart, layout="b h n c").tobytes() == got.tobytes()
    for wrong, more in (
        ("quant_format", {"quant_format": "q5_0"}),
        ("quant_format", {"quant_format": "q8_0/"}),
        ("key_cache", {"key_cache": buffers[0][..., :33]}),
        ("key_cache", {"key_cache": np.concatenate([buffers[0]] * 2, 2)}),
        ("value_cache", {"value_cache": buffers[1].view(np.int8)}),
        ("value_scale", {"value_scale": 0.5}),
    ):
        with pytest.raises(KvkitError, match=f"^{wrong}: expected "):
            scene.run(**buffer | {"layout": "b h c"} | more)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_queries_of_float8(dtype, rng):
    scene = Scene(rng)
    query = scene.query.astype(dtype)
    got = scene.run(query=query)
    assert got.tobytes() == scene.run(query=query.astype(np.float32)).tobytes()
    assert got.dtype == np.float32
    plan = kvkit.paged_plan([[1, 0]], [20], page_size=16)
    planned = plan.paged_attention(
        *(np.ones(shape, dtype) for shape in ((1, 2, 8), (2, 16, 1, 8), (2, 16, 1, 8)))
    )
    np.testing.assert_array_equal(planned, np.ones((1, 2, 8), np.float32))


CODES = [
    ("e4m3", "flash-attn"), ("e5m2", "FlashInfer HND"), ("int8", "vLLM LBNHC"), ("e4m3", "content apart"),
]  # fmt: skip
MULTIPLIED = "float", "heads", "sequences"
SHAPES = {"float": (), "heads": (2,), "sequences": (2, 2), "tokens": None}


@pytest.mark.parametrize("queries", [(1, 1), (3, 40)], ids=["decode", "prefill"])
@pytest.mark.parametrize("kind", [None, *SHAPES])
@pytest.mark.parametrize(("name", "engine"), CODES)
def test_codes_of_8_bits(name, engine, kind, queries, rng):
    """Codes times their scales, given or of tokens and heads; rows and scales of nothing are NaN."""
    if (kind, name) == (None, "int8") or (kind, engine) == ("tokens", "content apart"):
        return
    scene = Scene(rng, engine, "fp16", (50, 70), queries, dim=32)
    table = np.array(TABLES.get(name, [*range(128), *range(-128, 0)]))
    usual = np.flatnonzero(np.abs(table) <= (127 if name == "int8" else 2))
    numbers = rng.uniform(0.001, 0.02, 8) if name == "int8" else rng.uniform(0.3, 1.3, 8)
    blocks, rows, heads, dim = scene.pools.keys.shape
    pools = pool_scenes.made(engine, blocks, rows, heads, dim, dim, BY_NAME[name].dtype)
    cells = pool_scenes.made(engine, blocks, rows, heads, 1, 1, np.float32)
    views, scales = [], []
    for pool, cell in zip((pools.keys, pools.values), (cells.keys, cells.values), strict=True):
        view = np.full(pool.shape, np.nan)
        for own, length in zip(scene.pages, scene.lengths, strict=True):
            for at in ((own[j // rows], j % rows) for j in range(length)):
                code = rng.choice(usual, (heads, dim))
                pool[at] = code.astype(np.uint8).view(pool.dtype)
                cell[at] = rng.choice(numbers, (heads, 1))
                view[at] = table[code] * (cell[at].astype(np.float64) if kind == "tokens" else 1)
        views.append(view)
        scales.append(rng.choice(numbers.astype(np.float32), SHAPES.get(kind) or ()))
    scene.pools.given, (scene.pools.keys, scene.pools.values) = pools.given, views
    given = [float(scale) if kind == "float" else scale for scale in scales]
    scene.more |= dict(zip(("key_scale", "value_scale"), given, strict=True)) if kind in MULTIPLIED else {}
    output, lse = scene.expected()
    if kind == "tokens":
        scene.more |= dict(zip(("key_scale", "value_scale"), cells.given, strict=True))
    got = scene.run(return_lse=True)
    assert_near(got[0], output, TOLERANCE["float16"])
    assert_near(got[1], lse, 2e-4)


@settings(max_examples=120, deadline=None)
@given(seeds, st.sampled_from(list(pool_scenes.ENGINES)), st.sampled_from(FLOATS))
def test_random(rng, engine, dtype):
    batch = int(rng.integers(0, 5))
    lengths, queries = rng.choice([0, 1, 3, 17, 90], batch), rng.choice([0, 1, 1, 2, 7, 40], batch)
    extras = [name for name in EXTRAS if rng.random() < 0.15 and name not in ("all", "sinks")]
    more = {key: value for name in extras for key, value in EXTRAS[name].items()}
    group = int(rng.choice([1, 2, 5, 16]))
    for name in ("alibi_slopes", "key_scale", "value_scale"):
        if name in more:
            heads = 2 * group if name == "alibi_slopes" else 2
            more[name] = rng.uniform(0, 2, (batch, heads) if rng.random() < 0.5 else heads).astype(np.float32)
    dim, value_dim = (int(rng.choice([1, 3, 16, 40, 64])) for _ in range(2))
    scene = Scene(
        rng, engine, dtype, lengths, queries, 2, group, dim, value_dim, int(rng.choice([1, 2, 7, 16])), **more
    )  # fmt: skip
    if rng.random() < 0.2:
        scene.more["sinks"] = rng.uniform(-2, 4, 2 * group).astype(np.float32)
    if rng.random() < 0.3:
        heads = [None, 1, 2 * group][rng.integers(3)]
        kinds = [bool, np.float32, scene.query.dtype]
        scene.more["attn_mask"] = mask_of(rng, scene, kinds[rng.integers(3)], heads)
    scene.check()


@needs_borders
@pytest.mark.parametrize("where", [BEGIN, END])
@pytest.mark.parametrize("engine", ["FlashInfer HND", "vLLM LBNHC"])
def test_nothing_outside_is_touched(engine, where, rng):
    scene = Scene(rng, engine, "fp16", dim=32)
    expected = scene.run(return_lse=True)
    pool = at_border(scene.pools.memory[0], where)
    more = {
        name: at_border(scene.arguments[name], where) for name in ("query", "block_tables", "context_lens")
    }
    out = tuple(at_border(np.full_like(array, 7), where) for array in expected)
    results = scene.run(key_cache=pool, value_cache=None, return_lse=True, out=out, **more)
    for got, right in zip(results, expected, strict=True):
        assert got.tobytes() == right.tobytes()


def test_torch_says_the_same(rng):
    torch = pytest.importorskip("torch")
    scene = Scene(rng, "vLLM LBNHC", "fp16", (40, 75), (1, 12), 2, 4, 64)
    got = scene.run(**{
        name: torch.from_numpy(scene.arguments[name]) for name in ("query", "key_cache", "value_cache")
    })  # fmt: skip
    assert isinstance(got, torch.Tensor)
    for b, length in enumerate(scene.lengths):
        key, value = (
            torch.from_numpy(pool[scene.pages[b]].reshape(-1, *pool.shape[2:])[:length].astype(np.float64))
            for pool in (scene.pools.keys, scene.pools.values)
        )
        tokens = slice(scene.starts[b], scene.starts[b + 1])
        query = torch.from_numpy(scene.query[tokens].astype(np.float64))
        rows, columns = torch.arange(len(query))[:, None], torch.arange(length)
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (query, key, value)),
            attn_mask=columns <= length - len(query) + rows, enable_gqa=True,
        )  # fmt: skip
        assert_near(got[tokens].numpy(), expected[0].transpose(0, 1).numpy(), 2e-3)


def test_what_holds_for_all_positions_may_be_one_number(rng):
    """A scale in an array, a mask with one column, a pool without pages for contexts without tokens."""
    query = rng.standard_normal((2, 4, 16)).astype(np.float32)
    codes = rng.integers(-9, 9, (4, 8, 2, 16), np.int8)
    mask = rng.choice([0.0, -np.inf], (4, 2, 1)).astype(np.float32)
    pages = {"context_lens": [13, 0], "block_tables": [[3, 1], [-1, -1]]}
    call = functools.partial(kvkit.paged_attention, query, **pages)
    wanted = call(codes, codes, key_scale=0.5, value_scale=2.0, attn_mask=np.repeat(mask, 13, 2))
    for one in (np.float32, np.float64, lambda x: np.array(x, np.float16), lambda x: np.float32([x])):
        got = call(codes, codes, key_scale=one(0.5), value_scale=one(2.0), attn_mask=mask)
        np.testing.assert_array_equal(got, wanted)
    heads = {"num_heads": 4, "head_dim": 16, "num_kv_heads": 2, "is_causal": False}
    static = functools.partial(
        kvkit.multi_head_attention, query[None], *[rng.random((1, 5, 2, 16), np.float32)] * 2
    )
    np.testing.assert_array_equal(
        static(attn_mask=mask, **heads), static(attn_mask=np.repeat(mask, 5, 2), **heads)
    )
    empty = call(codes[:0], codes[:0], key_scale=0.5, value_scale=2.0, context_lens=[0, 0])
    np.testing.assert_array_equal(empty, np.zeros_like(query))
    with pytest.raises(KvkitError, match=r"block_tables\[0, 0\]: expected a block"):
        call(codes[:0], codes[:0], key_scale=0.5, value_scale=2.0)


def test_float8_of_torch(rng):
    """Pools of torch's types, and tokens of its that become codes."""
    torch = pytest.importorskip("torch")
    pool = torch.zeros((2, 4, 1, 16), dtype=torch.float8_e4m3fn)
    key = torch.from_numpy(rng.standard_normal((4, 1, 16)).astype(np.float32))
    kvkit.paged_append(key, None, pool, None, [4, 5, 6, 7], key_scale=2.0)
    assert torch.equal(pool[1].float(), (key / 2).to(torch.float8_e4m3fn).float())
    got = kvkit.paged_attention(torch.zeros(1, 1, 16), pool, pool, [[1]], [4], value_scale=2.0)
    torch.testing.assert_close(got[0], 2 * pool[1].float().mean(0))


@pytest.mark.parametrize("form", [np.int64, np.int32], ids=lambda form: form.__name__)
def test_lists_of_pages_of_which_one_is_long(form):
    """512 sequences, one of 131,072 tokens: memory as the list, not as a table of the longest."""
    lengths = np.full(512, 256)
    lengths[100] = 131_072
    starts, ids = np.cumsum([0, *lengths]), np.random.default_rng(0).permutation(lengths.sum())
    pool = np.zeros((len(ids), 1, 1, 8), np.float16)
    pool[ids, 0, 0] = np.repeat(np.arange(512) % 7, lengths)[:, None]
    query = np.ones((512, 1, 8), np.float16)
    pages = starts.astype(form), ids.astype(form)
    kvkit.paged_attention(query, pool, pool, pages, lengths)
    tracemalloc.start()
    try:
        outputs = kvkit.paged_attention(query, pool, pool, pages, lengths)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(outputs[:, 0, 0], np.arange(512) % 7)
    assert peak < 1.5 * pages[1].nbytes


def test_lists_of_int32_are_widened_where_rows_are_far_apart():
    pool = np.lib.stride_tricks.as_strided(np.zeros(1, np.int8), (3, 2, 1, 1), (2**40, 1, 1, 1))
    context, listed = pools.context_of(BY_NAME["int8"], pool, pool), np.array([2, 1], np.int32)
    starts, kvstarts = np.array([0, 2]), np.array([0, 4])
    contexts = Contexts(listed, starts, np.array([4]), np.array([0, 1]), 2, blocks=3, kvstarts=kvstarts)
    steps = contexts.steps(context.pages, 0)
    assert steps.table.tolist() == [2**41, 2**40]
