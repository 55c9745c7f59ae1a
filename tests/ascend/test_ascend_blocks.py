"""`paged_cache_load`, `block_copy`, `nd_to_nz` and `nz_to_nd` against plain loops, and what they refuse."""

import backends
import numpy as np
import pytest
from ascend_block_scenes import INT64_MAX, INT64_MIN, NO_BLOCK, caches_of, refused
from ascend_scenes import DTYPES, Memory, any_bits, dtypes_of, every_dtype, index_array, seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkit.reference import ascend as oracle

block_copy = backends.operators.ascend.block_copy
nd_to_nz = backends.operators.ascend.nd_to_nz
nz_to_nd = backends.operators.ascend.nz_to_nd
paged_cache_load = backends.operators.ascend.paged_cache_load

formats_of = st.sampled_from(["ND", "NZ"])


# paged_cache_load


@settings(max_examples=120)
@given(seeds, dtypes_of, formats_of, st.sampled_from([1, 2]))
def test_load(rng, dtype, cache_format, count):
    """Blocks of several sequences, shared, in any order, not there; from any block of a table on."""
    blocks, rows, batch = int(rng.integers(1, 6)), int(rng.choice([1, 2, 3, 16, 37])), int(rng.integers(0, 4))
    caches = caches_of(rng, [dtype] * count, cache_format, blocks, rows)
    table = rng.integers(0, blocks, (batch, int(rng.integers(0, 5))))
    gone = rng.random(table.shape) < 0.2
    table[gone] = rng.choice(NO_BLOCK, gone.sum())
    lengths = rng.integers(0, 3 * rows + 1, batch)
    starts = rng.integers(0, 3 * rows, batch) if rng.random() < 0.5 else None
    expected = [oracle.load_contexts(cache, table, lengths, starts, cache_format == "NZ") for cache in caches]
    memories = [Memory(rng, cache) for cache in caches]
    views = [memory.view for memory in memories] + [None] * (2 - count)
    sums = np.cumsum([0, *lengths])
    starts = None if starts is None else index_array(rng, starts)
    for seq_lens in (index_array(rng, lengths), index_array(rng, sums)):
        out = tuple(np.full(array.shape, -1, dtype) for array in expected) if rng.random() < 0.5 else None
        arguments = (*views, index_array(rng, table), seq_lens, starts)
        results = paged_cache_load(*arguments, cache_format=cache_format, out=out)
        for i, array in enumerate(expected):
            assert results[i].dtype == dtype
            assert results[i].shape == array.shape
            assert results[i].tobytes() == array.tobytes()
            assert out is None or results[i] is out[i]
        assert count == 2 or results[1] is None


@every_dtype
@pytest.mark.parametrize("cache_format", ["ND", "NZ"])
def test_load_into_a_part_of_other_memory(dtype, cache_format, poison):
    """Nothing around the rows of `out` changes, and rows without a block become zeros."""
    rng = np.random.default_rng(1)
    caches = caches_of(rng, [dtype] * 2, cache_format, 3, 5)
    table, lengths = np.array([[2, -1, 0], [1, 1, 1]]), np.array([14, 3])
    expected = [oracle.load_contexts(cache, table, lengths, None, cache_format == "NZ") for cache in caches]
    out = tuple(poison.around(any_bits(rng, array.shape, dtype)) for array in expected)
    paged_cache_load(*caches, table, lengths, cache_format=cache_format, out=out)
    for view, array in zip(out, expected, strict=True):
        assert view.tobytes() == array.tobytes()


def test_load_of_no_tokens_into_any_strides():
    """numpy gives arrays without elements odd ones."""
    cache, out = np.ones((3, 4, 2, 8), np.float16), np.zeros((0, 2, 8), np.float16)
    out = np.lib.stride_tricks.as_strided(out, out.shape, (0, 0, 0))
    assert paged_cache_load(cache, None, np.array([[2]]), np.array([0]), out=(out,))[0] is out


def test_load_of_nz_pairs():
    rng = np.random.default_rng(2)
    caches = caches_of(rng, [DTYPES["int8"], DTYPES["float16"]], "NZ", 3, 4)
    results = paged_cache_load(*caches, np.array([[2, 0]]), np.array([7]), cache_format="NZ")
    for got, cache in zip(results, caches, strict=True):
        assert got.tobytes() == oracle.load_contexts(cache, [[2, 0]], [7], None, True).tobytes()
    nd = [cache.transpose(0, 2, 1, 3) for cache in caches]
    refused(lambda: paged_cache_load(*nd, np.array([[2, 0]]), np.array([7])), "value")


def test_load_refuses():
    cache, table, lengths = np.ones((3, 4, 2, 8), np.float16), np.array([[2, 0], [1, -1]]), np.array([5, 3])

    def load(key=cache, value=cache, tables=table, lens=lengths, starts=None, **more):
        return lambda: paged_cache_load(key, value, tables, lens, starts, **more)

    load()()
    for array in (None, cache.tolist(), cache[0], cache.astype(np.float64), cache[:0], cache[..., :0]):
        refused(load(key=array), "key_cache")
        if array is not None:
            refused(load(value=array), "value_cache")
    for array in (cache[1:], cache[:, 1:], cache.astype(np.float32), cache.astype(np.int8)):
        refused(load(value=array), "value")
    for array in (table[0], table.astype(np.int16), table.astype(float), [[1], [2, 3]], "no"):
        refused(load(tables=array), "block_tables")
    for array in ([5], [1, 5, 8], [0, 5, 3], [0, 5, 8, 9], [5, -1], [[5, 3]], [5.0, 3.0], [2**62, 2**62], []):
        refused(load(lens=np.array(array)), "seq_lens")
    for array in ([0], [0, -1], [0, 4, 4], [0.0, 4.0], [[0, 4]]):
        refused(load(starts=np.array(array)), "seq_starts")
    for text in ("nd", None, 1):
        refused(load(cache_format=text), "cache_format")
    refused(load(cache_format="NZ"), "key_cache")
    out = np.full((2, 8, 2, 8), 7, np.float16)
    load(out=tuple(out))()
    frozen = out[1].copy()
    frozen.flags.writeable = False
    wrong = (
        out[1][:-1], out[1].astype(np.float32), frozen, out[1][..., ::-1], cache.reshape(12, 2, 8)[:8],
        out[0], out[1].tolist(), np.broadcast_to(out[1][:1], (8, 2, 8)),
    )  # fmt: skip
    for second in wrong:
        refused(load(out=(out[0], second)), "out", out, cache)
    for bad in (out[0], out[0].tolist(), [out[0]], 5):
        refused(load(out=bad), "out", out)


# block_copy


@settings(max_examples=60)
@given(seeds, dtypes_of, st.sampled_from([1, 2]))
def test_block_copy(rng, dtype, count):
    blocks = int(rng.integers(1, 12))
    sizes = [rng.integers(1, 5, rng.choice([0, 1, 2, 3, 3, 4, 5])) for _ in range(count)]
    caches = [Memory(rng, any_bits(rng, (blocks, *size), dtype)) for size in sizes]
    ids = rng.permutation(blocks)
    cut, end = np.sort(rng.integers(0, blocks + 1, 2))
    src, dst = ids[:cut], ids[cut:end]
    if cut and rng.random() < 0.5:
        src = rng.choice(src, cut + 1)  # a source may come twice
    cum_sum = np.sort(rng.integers(0, len(dst) + 1, len(src)))
    if len(src):
        cum_sum[-1] = len(dst)
    else:
        dst = dst[:0]
    after = [cache.copy() for cache in caches]
    for cache in after:
        oracle.block_copy(cache.view, None, src, dst, cum_sum)
    views = [cache.view for cache in caches] + [None] * (2 - count)
    results = block_copy(*views, *(index_array(rng, x) for x in (src, dst, cum_sum)))
    assert results[0] is views[0]
    assert results[1] is views[1]
    for cache, expected in zip(caches, after, strict=True):
        assert np.array_equal(cache.bytes, expected.bytes)


def test_block_copy_refuses():
    caches = np.arange(2 * 5 * 6, dtype=np.float32).reshape(2, 5, 2, 1, 3)
    key, value = caches

    def copy(a=key, b=value, src=(4, 0), dst=(1, 3, 2), cum_sum=(2, 3)):
        return lambda: block_copy(a, b, *map(np.array, (src, dst, cum_sum)))

    copy()()
    for array in (None, key.tolist(), key[0, 0, 0, :1].reshape(()), key.astype(np.float64)):
        refused(copy(a=array), "key_cache", caches)
    for array in (value[1:], value.tolist(), value[0]):
        refused(copy(b=array), "value_cache", caches)
    for array in (key, key[::-1], caches.reshape(10, 2, 1, 3)[4:9]):
        refused(copy(a=array, b=key), "key_cache", caches)
    frozen = key.copy()
    frozen.flags.writeable = False
    refused(copy(b=frozen), "value_cache", caches)
    same = np.broadcast_to(key[:1], key.shape)
    same.flags.writeable = True
    refused(copy(a=same), "key_cache", caches)
    for block in (-1, 5, INT64_MAX, INT64_MIN):
        refused(copy(src=(4, block)), "src[1]", caches)
        refused(copy(dst=(1, 3, block)), "dst[2]", caches)
    refused(copy(dst=(1, 3, 1)), "dst", caches)
    refused(copy(dst=(1, 3, 4)), "dst", caches)
    for ends in ((2,), (2, 3, 3), (3, 2), (2, 4), (2, 2), (-1, 3), (2.0, 3.0), ((2, 3),), (INT64_MIN, 3)):
        refused(copy(cum_sum=ends), "cum_sum", caches)
    refused(copy(src=((4, 0),)), "src", caches)
    refused(copy(dst=(1.0, 3.0, 2.0)), "dst", caches)


# Matrices


@given(seeds, dtypes_of)
def test_matrices_there_and_back(rng, dtype):
    shape = (int(rng.integers(0, 4)), int(rng.choice([0, 1, 2, 15, 16, 17, 40])), int(rng.integers(0, 40)))
    x = any_bits(rng, shape, dtype)
    expected = oracle.nd_to_nz(x)
    y = nd_to_nz(Memory(rng, x).view)
    assert y.dtype == dtype
    assert y.shape == expected.shape
    assert y.tobytes() == expected.tobytes()
    padded = any_bits(rng, y.shape, dtype)
    inside = oracle.nd_to_nz(np.ones(shape, dtype)) == 1
    padded[inside] = y[inside]
    back = nz_to_nd(Memory(rng, padded).view, *shape[1:])  # what pads a matrix is not looked at
    assert back.shape == shape
    assert back.tobytes() == x.tobytes()


@every_dtype
def test_matrices_into_given_arrays(dtype, poison):
    rng = np.random.default_rng(3)
    x = any_bits(rng, (2, 19, 45), dtype)
    expected = oracle.nd_to_nz(x)
    out = poison.around(any_bits(rng, expected.shape, dtype))
    assert nd_to_nz(x, out=out) is out
    assert out.tobytes() == expected.tobytes()
    back = poison.around(any_bits(rng, x.shape, dtype))
    assert nz_to_nd(out, 19, 45, out=back) is back
    assert back.tobytes() == x.tobytes()
    assert nd_to_nz(x[0]).tobytes() == expected[:1].tobytes()


def test_the_sizes_of_the_specification():
    assert nd_to_nz(np.zeros((8, 100, 30), np.float16)).shape == (8, 2, 112, 16)
    assert nz_to_nd(np.zeros((8, 2, 112, 16), np.float16), 100, 30).shape == (8, 100, 30)


def test_matrices_refused():
    x, y = np.ones((2, 20, 10), np.float32), np.ones((2, 2, 32, 8), np.float32)
    for array in (None, x.tolist(), x[0, 0], x[None], x.astype(np.float64), x.astype(np.int32)):
        refused(lambda array=array: nd_to_nz(array), "x")
    for array in (None, y[0], y.astype(np.float64), y[:, 1:], y[:, :, 1:], y[..., 1:], y.astype(np.float16)):
        refused(lambda array=array: nz_to_nd(array, 20, 10), "y")
    for m, n in ((16, 10), (33, 10), (20, 8), (20, 17), (0, 10), (20, 0)):
        refused(lambda m=m, n=n: nz_to_nd(y, m, n), "y")
    for size in (-1, 2.0, None, "20", True):
        refused(lambda size=size: nz_to_nd(y, size, 10), "m")
        refused(lambda size=size: nz_to_nd(y, 20, size), "n")
    for out in (y[:1], y.astype(np.float16), y.tolist(), np.broadcast_to(y[:1], y.shape)):
        refused(lambda out=out: nd_to_nz(x, out=out), "out")
    memory = np.zeros(4000, np.float32)
    source, target = memory[:400].reshape(2, 20, 10), memory[100:1124].reshape(2, 2, 32, 8)
    refused(lambda: nd_to_nz(source, out=target), "out", memory)
    refused(lambda: nz_to_nd(target, 20, 10, out=source), "out", memory)
