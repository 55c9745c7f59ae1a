"""`paged_cache_load`, `block_copy`, `nd_to_nz` and `nz_to_nd` against plain loops, and what they refuse."""

import backends
import numpy as np
from ascend_block_scenes import caches_of
from ascend_scenes import DTYPES, Memory, dtypes_of, seeds
from hypothesis import given
from refusals import refuses

from kvkit.reference import ascend as oracle
from kvkit.tools.vectors.draws import any_bytes

block_copy = backends.operators.ascend.block_copy
nd_to_nz = backends.operators.ascend.nd_to_nz
nz_to_nd = backends.operators.ascend.nz_to_nd
paged_cache_load = backends.operators.ascend.paged_cache_load


# paged_cache_load


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
    refuses(lambda: paged_cache_load(*nd, np.array([[2, 0]]), np.array([7])), "value_cache")


# block_copy


# Matrices


@given(seeds, dtypes_of)
def test_matrices_there_and_back(rng, dtype):
    shape = (int(rng.integers(0, 4)), int(rng.choice([0, 1, 2, 15, 16, 17, 40])), int(rng.integers(0, 40)))
    x = any_bytes(rng, shape, dtype)
    expected = oracle.nd_to_nz(x)
    y = nd_to_nz(Memory(rng, x).view)
    assert y.dtype == dtype
    assert y.shape == expected.shape
    assert y.tobytes() == expected.tobytes()
    padded = any_bytes(rng, y.shape, dtype)
    inside = oracle.nd_to_nz(np.ones(shape, dtype)) == 1
    padded[inside] = y[inside]
    back = nz_to_nd(Memory(rng, padded).view, *shape[1:])  # what pads a matrix is not looked at
    assert back.shape == shape
    assert back.tobytes() == x.tobytes()


def test_the_sizes_of_the_specification():
    assert nd_to_nz(np.zeros((8, 100, 30), np.float16)).shape == (8, 2, 112, 16)
    assert nz_to_nd(np.zeros((8, 2, 112, 16), np.float16), 100, 30).shape == (8, 100, 30)
