"""Views that runtimes hand over, and limits of Ascend's kernels that `reshape_and_cache` does not have."""

import backends
import numpy as np
import pytest
from ascend_scenes import FLOATS, check, every_dtype, finite

from kvkit.reference import ascend as oracle
from kvkit.reference.ascend import KVHEAD, KVHEAD_ROPE, OMNI
from kvkit.tools.vectors.draws import any_bytes

reshape_and_cache = backends.operators.ascend.reshape_and_cache


@every_dtype
@pytest.mark.parametrize("dim", [1, 5, 64])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_nhsd(dtype, dim, rows):
    """Neighbours are tokens of a head; runs are longer than the walk takes at a time."""
    rng = np.random.default_rng(5)
    key, store = any_bytes(rng, (70, 3, dim), dtype), any_bytes(rng, (-(-80 // rows), 3, rows, dim), dtype)
    after, slots = store.copy(), np.r_[7:77]
    oracle.reshape_and_cache(key, None, after.transpose(0, 2, 1, 3), None, slots)
    reshape_and_cache(key, None, store.transpose(0, 2, 1, 3), None, slots)
    assert store.tobytes() == after.tobytes()


@every_dtype
def test_broadcast_tokens(dtype):
    """A stride of zero is one more stride of an input."""
    rng = np.random.default_rng(6)
    key = np.broadcast_to(any_bytes(rng, (1, 1, 32), dtype), (6, 2, 32))
    cache = any_bytes(rng, (3, 3, 2, 32), dtype)
    after, slots = cache.copy(), [8, 1, 2, 3, -1, 5]
    oracle.reshape_and_cache(key, None, after, None, slots)
    reshape_and_cache(key, None, cache, None, slots)
    assert cache.tobytes() == after.tobytes()


@pytest.mark.cpu
def test_offsets_of_more_than_32_bits():
    """A slot whose bytes lie 4 GiB and more into a cache of which little is ever touched."""
    cache = np.zeros((2**17 + 1, 16, 8, 128), np.int16).view(np.float16)
    key = any_bytes(np.random.default_rng(7), (2, 8, 128), np.float16)
    last = 16 * (2**17 + 1) - 1
    reshape_and_cache(key, None, cache, None, [last, 5])
    assert cache[-1, -1].tobytes() == key[0].tobytes()
    assert cache[0, 5].tobytes() == key[1].tobytes()
    assert not cache[0, :5].any()
    assert not cache[-1, :-1].any()


# Limits that there are not


def test_large_heads():
    """NZ rows of more than 98,304 bytes, and means over more than 16,384 elements."""
    rng = np.random.default_rng(10)
    key, cache = any_bytes(rng, (2, 1, 49_168), np.float16), any_bytes(rng, (1, 3073, 3, 16), np.float16)
    check(rng, key, None, cache, None, [2, 0], cache_format="NZ")
    key, cache = finite(rng, (3, 1, 16_416), np.float16), any_bytes(rng, (2, 2, 1, 16_416), np.float16)
    check(
        rng, key, None, cache, None, [1], compress_type=KVHEAD_ROPE, wins=[2], seq_lens=[3], offset_index=[0]
    )


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=str)
def test_rope_moves_every_bit_that_it_does_not_average(dtype):
    """NaN payloads before and behind the mean stay."""
    rng = np.random.default_rng(2)
    key = any_bytes(rng, (20, 2, 32), dtype)
    key[5:12] = finite(rng, (7, 2, 32), dtype)
    cache, more = any_bytes(rng, (5, 8, 1, 32), dtype), {"wins": [7, 6], "offset_index": [5, 6]}
    check(rng, key, None, cache, None, [3, 19], compress_type=KVHEAD_ROPE, seq_lens=[20], **more)


@pytest.mark.parametrize("mode", [KVHEAD, KVHEAD_ROPE, OMNI], ids=["kvhead", "rope", "omni"])
def test_an_empty_run_may_begin_behind_the_cache(mode):
    """And share its slot with another run."""
    rng = np.random.default_rng(3)
    key, cache = finite(rng, (2, 1, 32), np.float16), any_bytes(rng, (1, 2, 1, 32), np.float16)
    more = {"seq_lens": [1, 1], "compress_type": mode}
    if mode == KVHEAD:
        more |= {"wins": [0, 0], "empty_window": "skip"}
        check(rng, key, None, cache, None, [2, 2], **more)
    elif mode == OMNI:
        check(rng, key, None, cache, None, [1, 2], wins=[1, 1], offset_index=[0, 0], **more)
        check(rng, key, None, cache, None, [1, 1], wins=[1, 1], offset_index=[-1, 0], **more)
    else:
        check(rng, key, None, cache, None, [1, 0], wins=[1, 1], offset_index=[0, 0], **more)
