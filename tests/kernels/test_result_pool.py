"""Memory of results that nobody holds: it comes back with the last view, is bounded, and is never in two."""

import gc

import numpy as np
import pytest
from surroundings import in_threads

import kvkit
from kvkit.runtime import arrays as result_pool

pytestmark = pytest.mark.cpu
MB = 2**20


def place(array):
    return array.__array_interface__["data"][0]


def test_memory_comes_back_with_the_last_view():
    pool = result_pool.ResultPool(64 * MB)
    first = pool.empty((2, MB), np.float32)
    assert (first.shape, first.dtype, place(first) % result_pool.ALIGNED) == ((2, MB), np.float32, 0)
    at, view = place(first), first[1, 5:].view(np.int32)
    del first
    assert pool.free_bytes() == 0
    assert place(pool.empty((2, MB), np.float32)) != at
    view[:] = 7
    del view
    gc.collect()
    assert pool.free_bytes() >= 16 * MB
    again = {place(pool.empty((2, MB), np.float16 if i else np.float32)) for i in range(2)}
    assert at in again


def test_a_result_that_has_grown_a_little_gets_it_and_a_small_one_does_not():
    pool = result_pool.ResultPool(64 * MB)
    at = place(pool.empty((10 * MB,), np.uint8))
    assert place(pool.empty((10 * MB + 4096,), np.uint8)) == at
    assert place(pool.empty((5 * MB,), np.uint8)) != at


def test_it_is_bounded_and_may_be_none():
    pool = result_pool.ResultPool(8 * MB)
    for _ in range(2):
        results = [pool.empty((3 * MB,), np.uint8) for _ in range(5)]
        del results
        assert pool.free_bytes() <= 8 * MB
    assert pool.empty((9 * MB,), np.uint8).flags.owndata
    assert result_pool.ResultPool(0).empty((3 * MB,), np.uint8).flags.owndata
    assert pool.empty((100,), np.uint8).flags.owndata


def test_no_memory_is_given_back_before_all_is_refused(monkeypatch):
    pool, empty = result_pool.ResultPool(64 * MB), np.empty
    del [pool.empty((4 * MB,), np.uint8)][:]
    waiting = pool.free_bytes()

    def refused(*given):
        if pool.free_bytes():
            raise MemoryError
        return empty(*given)

    monkeypatch.setattr(result_pool.np, "empty", refused)
    assert waiting
    assert pool.empty((40 * MB,), np.uint8).size == 40 * MB


def test_threads_never_share_a_result():
    pool = result_pool.ResultPool(64 * MB)

    def work(number):
        for _ in range(200):
            mine = pool.empty((MB,), np.uint8)
            mine[:: MB // 64] = number
            assert (mine[:: MB // 64] == number).all()

    in_threads(work, 4)
    assert pool.free_bytes() <= 64 * MB


def test_results_of_operators(rng):
    """A load takes the memory of the last one, and leaves one that is held alone."""
    cache = np.zeros((1, 1, 2, 2048, 8, 64), np.float16)
    new = rng.standard_normal((1, 2000, 8, 64), np.float32).astype(np.float16)
    held, _ = kvkit.key_value_cache(new, new, 0, cache)
    first = kvkit.key_value_cache(2 * new, new, 0, cache)[0]
    at, wanted = place(first), first.copy()
    del first
    third, other = kvkit.key_value_cache(2 * new, new, 0, cache)
    assert at in (place(third), place(other))
    np.testing.assert_array_equal(third, wanted)
    np.testing.assert_array_equal(held, new)


@pytest.mark.parametrize("variable", result_pool.VARIABLES)
def test_the_environment_says_how_much_is_kept(variable, monkeypatch):
    for name in result_pool.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert result_pool.pool_bytes() == 2**29
    monkeypatch.setenv(variable, "0")
    assert result_pool.pool_bytes() == 0
