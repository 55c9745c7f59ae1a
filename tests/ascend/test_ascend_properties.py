"""Threads that share a store, a load or a mean write the same bytes as one thread."""

import backends
import numpy as np
import pytest
from ascend_scenes import finite, needs_two
from surroundings import with_threads

from kvkit.reference.ascend import KVHEAD_ROPE
from kvkit.tools.vectors.draws import any_bytes

paged_cache_load = backends.operators.ascend.paged_cache_load
reshape_and_cache = backends.operators.ascend.reshape_and_cache


@needs_two
@pytest.mark.parametrize("cache_format", ["ND", "NZ"])
def test_threads_store_and_load_the_same(cache_format):
    """Shares of threads begin anywhere, within runs and blocks."""
    rng = np.random.default_rng(1)
    key, value = any_bytes(rng, (2, 1501, 4, 64), np.float16)
    shape = (110, 16, 4, 64) if cache_format == "ND" else (110, 16, 16, 16)
    before = any_bytes(rng, (2, *shape), np.float16)
    slots = np.r_[40:1000, 1002:1500, 1600:1643]
    slots[::97] = -1

    def call():
        caches = before.copy()
        reshape_and_cache(key, value, *caches, slots, cache_format=cache_format)
        table = np.arange(110)[None, ::-1]
        return caches, *paged_cache_load(*caches, table, [1700], cache_format=cache_format)

    one, two = with_threads(1, call), with_threads(2, call)
    for a, b in zip(one, two, strict=True):
        assert a.tobytes() == b.tobytes()
    by_token = one[0] if cache_format == "ND" else one[0].transpose(0, 1, 3, 2, 4)
    stored = by_token.reshape(2, 1760, -1)
    assert (
        stored[:, slots[slots >= 0]].tobytes()
        == np.array([key, value]).reshape(2, 1501, -1)[:, slots >= 0].tobytes()
    )
    untouched = np.setdiff1d(np.arange(1760), slots)
    old = before if cache_format == "ND" else before.transpose(0, 1, 3, 2, 4)
    assert stored[:, untouched].tobytes() == old.reshape(2, 1760, -1)[:, untouched].tobytes()


@needs_two
@pytest.mark.parametrize("wins", [[1990, 1000, 3, 1], [2, 1, 1998, 2000], [700, 700, 700, 700]], ids=str)
def test_threads_average_the_same(wins):
    """A mean is made by the thread whose share holds its first token, even where it spans several shares."""
    rng = np.random.default_rng(2)
    key, value = finite(rng, (2, 2000, 4, 64), np.float32)
    before = any_bytes(rng, (2, 520, 16, 1, 64), np.float32)
    offsets = [2000 - wins[0], 500, 1, 0]

    def call():
        caches = before.copy()
        more = {"wins": wins, "offset_index": offsets, "seq_lens": [2000]}
        reshape_and_cache(key, value, *caches, [3, 2010, 4090, 6101], compress_type=KVHEAD_ROPE, **more)
        return caches

    one, two = with_threads(1, call), with_threads(2, call)
    assert one.tobytes() == two.tobytes()
    flat = one.reshape(2, -1, 64)
    for h, begin in enumerate([3, 2010, 4090, 6101]):
        for side, tokens in enumerate((key, value)):
            total = np.zeros(64, np.float32)
            with np.errstate(over="ignore"):
                for row in tokens[offsets[h] : offsets[h] + wins[h], h]:
                    total = total + row
            assert flat[side, begin + offsets[h]].tobytes() == (total / np.float32(wins[h])).tobytes()
            rest = tokens[offsets[h] + wins[h] :, h]
            assert flat[side, begin + offsets[h] + 1 :][: len(rest)].tobytes() == rest.tobytes()
