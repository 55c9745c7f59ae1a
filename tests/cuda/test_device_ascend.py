"""`kvkit_cuda.ascend`: arrays of the device, chunks of every size, outputs, doctests."""

import numpy as np
import pytest
from ascend_scenes import DTYPES, FLOATS, finite, plain_call
from device_arrays import Array, contents, moved

import kvkit
from kvkit.reference import ascend as oracle
from kvkit.reference.ascend import KVHEAD_ROPE
from kvkit.tools.vectors.draws import any_bytes
from kvkit_cuda import ascend
from kvkit_cuda.copy import means, pieces


@pytest.fixture
def sizes(monkeypatch):
    """Return a list that gets the chunk sizes of the kernels in use."""
    found, compiled = [], pieces.compiled

    def watched(variant):
        found.append(*variant)
        return compiled(variant)

    monkeypatch.setattr(pieces, "compiled", watched)
    return found


def stored(call, **keywords):
    """Return the bytes of both caches after a call, by the oracle."""
    *tokens, key_cache, value_cache, slots = call
    caches = [None if cache is None else cache.copy() for cache in (key_cache, value_cache)]
    oracle.reshape_and_cache(*tokens, *caches, slots, **keywords)
    return caches


def same(got, expected):
    for array, wanted in zip(got, expected, strict=True):
        assert (array is None) == (wanted is None)
        if wanted is not None:
            assert contents(array).dtype == wanted.dtype
            assert contents(array).shape == wanted.shape
            assert contents(array).tobytes() == wanted.tobytes()


# reshape_and_cache


@pytest.mark.parametrize(
    ("dtype", "dim", "elements", "size"),
    [
        ("float16", 8, 0, 16), ("float16", 12, 0, 8), ("float16", 8, 4, 8), ("float16", 6, 0, 4),
        ("float16", 5, 0, 2), ("float16", 8, 3, 2), ("float32", 4, 0, 16), ("float32", 3, 0, 4),
        ("int8", 16, 0, 16), ("int8", 7, 0, 1), ("int8", 16, 8, 8), ("int8", 16, 15, 1),
    ],
)  # fmt: skip
def test_accesses_are_aligned(dtype, dim, elements, size, rng, sizes):
    """A device refuses an access that does not begin at a multiple of its size."""
    key, cache = any_bytes(rng, (5, 1, dim), DTYPES[dtype]), any_bytes(rng, (2, 3, 1, dim), DTYPES[dtype])
    (expected, _) = stored((key, None, cache, None, [4, 0, -1, 5, 2]))
    given = moved(key), moved(cache, elements)
    ascend.reshape_and_cache(given[0], None, given[1], None, [4, 0, -1, 5, 2])
    same(given[1:], [expected])
    assert sizes == [size]


def test_keys_and_values_in_chunks_of_their_own(rng, sizes):
    call = plain_call(rng, [FLOATS["float16"]] * 2)
    key, value = any_bytes(rng, (6, 2, 8), np.float16), any_bytes(rng, (6, 2, 3), np.float16)
    caches = any_bytes(rng, (2, 4, 2, 8), np.float16), any_bytes(rng, (2, 4, 2, 3), np.float16)
    call = key, value, *caches, [3, 4, 5, -1, 0, 7]
    expected = stored(call)
    ascend.reshape_and_cache(*map(moved, call[:4]), call[4])
    ascend.reshape_and_cache(*call)
    same(caches, expected)
    assert sorted(sizes) == [4, 4, 16, 16]


def test_offsets_of_more_than_32_bits(rng):
    """A slot whose bytes lie 4 GiB and more into a cache of which little is ever touched."""
    cache = np.zeros((2**17 + 1, 16, 8, 128), np.int16).view(np.float16)
    key = any_bytes(rng, (2, 8, 128), np.float16)
    last = 16 * (2**17 + 1) - 1
    ascend.reshape_and_cache(Array(key), None, Array(cache), None, [last, 5])
    assert cache[-1, -1].tobytes() == key[0].tobytes()
    assert cache[0, 5].tobytes() == key[1].tobytes()
    assert not cache[0, :5].any()


@pytest.mark.parametrize("count", [1, means.AHEAD - 1, means.AHEAD, 2 * means.AHEAD + 3])
@pytest.mark.parametrize("element", FLOATS)
def test_means_of_more_tokens_than_are_read_ahead(count, element, rng):
    key, cache = finite(rng, (40, 2, 32), FLOATS[element]), any_bytes(rng, (20, 5, 1, 32), FLOATS[element])
    keywords = {"compress_type": KVHEAD_ROPE, "wins": [count, 0], "seq_lens": [40], "offset_index": [3, -1]}
    call = key, None, cache, None, [0, 45]
    expected = stored(call, **keywords)
    ascend.reshape_and_cache(Array(key), None, Array(cache), None, call[4], **keywords)
    same([cache], expected[:1])


def test_what_an_array_of_the_device_may_not_be(rng):
    call = plain_call(rng, [FLOATS["float16"]] * 2)
    place = call[2].__array_interface__["data"][0]
    frozen, slots = Array(call[2], data=(place, True)), call[4]
    with pytest.raises(kvkit.KvkitError, match=r"^key_cache: expected a writeable array"):
        ascend.reshape_and_cache(*call[:2], frozen, call[3], slots)
    with pytest.raises(kvkit.KvkitError, match=r"^value: expected .*float16"):
        ascend.reshape_and_cache(call[0], Array(call[1].view(np.int16)), *call[2:])
    with pytest.raises(kvkit.KvkitError, match=r"^stream: expected"):
        ascend.reshape_and_cache(*call, stream="0")
