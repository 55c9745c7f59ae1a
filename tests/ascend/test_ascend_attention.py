"""`paged_attention` against loops in float64, and against attention over the gathered rows."""

import backends
import numpy as np
import pytest
from ascend_attention_scenes import EXTRAS, FIRST, apart_or_not, call_of, run
from ascend_scenes import FLOATS, Memory, index_array, needs_two, seeds, with_threads
from attention_scenes import TOLERANCE, assert_near
from hypothesis import given, settings
from hypothesis import strategies as st

import kvkit
from kvkit.reference import ascend as oracle

paged_cache_load = backends.operators.ascend.paged_cache_load

every_float = pytest.mark.parametrize("dtype", FLOATS)


def check(call, expected=None):
    """Within the tolerance of attention; inputs keep their bytes."""
    output, lse = run(expected or call, oracle.attend_blocks)
    before = {name: x.tobytes() for name, x in call.items() if isinstance(x, np.ndarray)}
    got, got_lse = run(call, return_lse=True)
    dtype = call["query"].dtype
    assert got.dtype == dtype
    assert got_lse.dtype == np.float32
    assert_near(got, output, TOLERANCE[str(dtype)])
    assert_near(got_lse, lse, 2e-5, "lse")
    assert run(call).tobytes() == got.tobytes()
    for name, old in before.items():
        assert call[name].tobytes() == old, name
    return got, got_lse


@every_float
@apart_or_not
@pytest.mark.parametrize("extra", EXTRAS)
def test_extras(dtype, apart, extra):
    check(call_of(np.random.default_rng(1), dtype, apart, **EXTRAS[extra]))


@pytest.mark.cpu
@settings(max_examples=60)
@given(seeds, st.sampled_from(list(FLOATS)), st.booleans())
def test_random(rng, dtype, apart):
    """Any heads, sizes, block sizes and strides."""
    extras = [name for name in EXTRAS if rng.random() < 0.25]
    more = {key: value for name in extras for key, value in EXTRAS[name].items()}
    call = call_of(
        rng, dtype, apart, rng.choice([0, 1, 5, 30, 70], int(rng.integers(0, 4))),
        int(rng.integers(1, 5)), int(rng.integers(1, 10)), int(rng.choice([1, 2, 7, 16, 40, 64])),
        int(rng.choice([1, 3, 16, 48])), int(rng.choice([1, 2, 3, 16, 33])), **more,
    )  # fmt: skip
    strided = dict(call)
    for name, array in call.items():
        if name in ("block_tables", "context_lens"):
            strided[name] = index_array(rng, array)
        elif isinstance(array, np.ndarray) and rng.random() < 0.7:
            strided[name] = Memory(rng, array).view
    if call["query"].shape[0]:
        check(strided, call)
    else:
        output, lse = run(strided, return_lse=True)
        assert output.shape == (0, call["query"].shape[1], call["value_cache"].shape[3])
        assert lse.shape == output.shape[:2]


@every_float
@apart_or_not
@pytest.mark.parametrize("view", ["interleaved", "nhsd", "both"])
def test_views(dtype, apart, view):
    """Where keys and values lie changes nothing, not even a bit."""
    call = call_of(np.random.default_rng(2), dtype, apart)
    caches = call["key_cache"], call["value_cache"]
    if view == "interleaved":
        store = np.stack(caches, 1)
        views = store[:, 0], store[:, 1]
    elif view == "nhsd":
        views = (cache.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3) for cache in caches)
    else:
        store = np.stack([cache.transpose(0, 2, 1, 3) for cache in caches], 1)
        views = store[:, 0].transpose(0, 2, 1, 3), store[:, 1].transpose(0, 2, 1, 3)
    moved = call | dict(zip(("key_cache", "value_cache"), views, strict=True))
    got, _ = check(moved, call)
    if apart or view == "interleaved":
        assert got.tobytes() == run(call).tobytes()


@apart_or_not
def test_views_with_odd_strides(apart):
    """Blocks that are not a whole number of rows apart, negative steps, one block, one row, one of each."""
    rng = np.random.default_rng(3)
    call = call_of(rng, "float16", apart, rows=3, lengths=[7, 4])
    cache = call["key_cache"]
    bytes_ = np.full((len(cache), cache[0].nbytes + 2), 0xFF, np.uint8)
    odd = np.lib.stride_tricks.as_strided(
        bytes_.reshape(-1)[: len(cache) * cache[0].nbytes].view(np.float16),
        cache.shape, (cache[0].nbytes + 2, *cache.strides[1:]),
    )  # fmt: skip
    odd[...] = cache
    check(call | {"key_cache": odd}, call)
    check(call | {"value_cache": call["value_cache"][::-1].copy()[::-1]}, call)
    check(call | {"key_cache": cache[:, ::-1].copy()[:, ::-1]}, call)
    check(
        call
        | {
            "key_cache": np.repeat(cache, 2, 0)[::2],
            "value_cache": np.repeat(call["value_cache"], 3, 1)[:, ::3],
        },
        call,
    )
    for lengths, rows in (([3], 5), ([2, 3], 1), ([1], 1)):
        call = call_of(rng, "float16", apart, lengths, rows=rows)
        check(call | {"value_cache": np.repeat(call["value_cache"], 2, 0)[::2]}, call)


@pytest.mark.parametrize("integer", [np.int32, np.int64])
@apart_or_not
def test_index_types(integer, apart):
    call = call_of(np.random.default_rng(4), apart=apart)
    tables = np.clip(call["block_tables"], -(2**31), 2**31 - 1).astype(integer)
    narrow = call | {"block_tables": tables, "context_lens": call["context_lens"].astype(integer)}
    check(narrow, call)


@every_float
@apart_or_not
@pytest.mark.parametrize("how", [{}, {"flip": 0}, {"flip": 1}, {"offset": 4}], ids=str)
def test_into_a_part_of_other_memory(dtype, apart, how, poison):
    """`out` and the LSE of any strides but along a row."""
    call = call_of(np.random.default_rng(5), dtype, apart, razor=True)
    output, lse = run(call, return_lse=True)
    made = poison.around(np.full_like(output, 7), **how)
    made_lse = poison.around(np.full_like(lse, 7), **({} if "flip" in how else how))
    results = run(call, return_lse=True, out=(made, made_lse))
    assert results[0] is made
    assert results[1] is made_lse
    assert made.tobytes() == output.tobytes()
    assert made_lse.tobytes() == lse.tobytes()
    transposed = np.full(output.transpose(1, 0, 2).shape, 7, output.dtype).transpose(1, 0, 2)
    assert run(call, out=transposed) is transposed
    assert transposed.tobytes() == output.tobytes()


@apart_or_not
def test_empty_contexts_give_zeros(apart):
    call = call_of(np.random.default_rng(6), apart=apart, lengths=[0, 0], razor=True)
    output, lse = check(call)
    assert not output.any()
    assert (lse == -np.inf).all()
    no_columns = call | {"block_tables": call["block_tables"][:, :0]}
    assert not run(no_columns).any()


@apart_or_not
def test_nan_that_a_window_hides(apart):
    """Keys, values and offsets of rows before the window are not there."""
    call = call_of(np.random.default_rng(10), apart=apart, lengths=[9, 40], razor=True, window=(2, -1))
    expected = run(call)
    for table, length in zip(call["block_tables"], call["context_lens"], strict=True):
        for j in range(length - 3):
            for name in ("key_cache", "value_cache", "razor_offset"):
                call[name][table[j // 4], j % 4] = np.nan
    assert np.isfinite(expected).all()
    assert_near(run(call), expected, 2e-6)


@pytest.mark.cpu
@every_float
@pytest.mark.parametrize("group", [1, 4, 12])
def test_agrees_with_attention_over_gathered_rows(dtype, group):
    """The operator over packed keys, which has tests of its own."""
    rng = np.random.default_rng(7)
    call = call_of(rng, dtype, lengths=[300, 1, 0, 77], group=group, dim=64, rows=16)
    key, value = paged_cache_load(*(call[name] for name in FIRST[1:]))
    starts = np.cumsum([0, *call["context_lens"]])
    gathered = kvkit.dynamic_batching.multi_head_attention(
        call["query"], key, value, np.arange(5), starts, 4, None, None, num_heads=2 * group, head_dim=64,
        num_kv_heads=2, return_lse=True,
    )  # fmt: skip
    for got, expected in zip(run(call, return_lse=True), gathered, strict=True):
        assert_near(got, expected, TOLERANCE[dtype] / 10)


@apart_or_not
def test_heads_apart_are_sequences_of_one_head(apart):
    """A cache whose heads keep the same rows, per head and side by side."""
    rng = np.random.default_rng(8)
    call = call_of(rng, lengths=[11, 30], kv_heads=3, sinks=True)
    tables, blocks = call["block_tables"], len(call["key_cache"])
    there = (tables >= 0) & (tables < blocks)
    split = call | {
        "key_cache": call["key_cache"].transpose(2, 0, 1, 3).reshape(3 * blocks, 4, 1, 16),
        "value_cache": call["value_cache"].transpose(2, 0, 1, 3).reshape(3 * blocks, 4, 1, 16),
        "block_tables": np.concatenate(
            [np.where(there, tables + h * blocks, -1)[:, None] for h in range(3)], 1
        ).reshape(6, -1),
        "context_lens": np.repeat(call["context_lens"], 3),
    }
    whole, parts = run(call, return_lse=True), run(split, return_lse=True)
    for got, expected in zip(parts, whole, strict=True):
        assert_near(got, expected, 2e-6)


@pytest.mark.cpu
@needs_two
@apart_or_not
def test_threads_attend_the_same(apart):
    call = call_of(np.random.default_rng(9), "float16", apart, [3000, 700, 5], dim=64, rows=16, razor=True)
    one, two = (with_threads(n, lambda: run(call, return_lse=True)) for n in (1, 2))
    assert one[0].tobytes() == two[0].tobytes()
    assert one[1].tobytes() == two[1].tobytes()
    check(call)
