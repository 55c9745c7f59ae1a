"""What holds between calls of `reshape_and_cache`, whatever an oracle says."""

import backends
import numpy as np
import pytest
from ascend_scenes import FLOATS, any_bits, compressed_call, dtypes_of, finite, needs_two, seeds, with_threads
from hypothesis import given
from hypothesis import strategies as st

from kvkit.reference.ascend import KVHEAD, OMNI, ROPE

nd_to_nz = backends.operators.ascend.nd_to_nz
paged_cache_load = backends.operators.ascend.paged_cache_load
reshape_and_cache = backends.operators.ascend.reshape_and_cache


floats_of = st.sampled_from(list(FLOATS.values()))


def runs(rng, dtype, data=any_bits):
    """A function (mode, wins, offsets, ..) -> bytes of both caches, for tokens of 2 sequences in 2 heads."""
    lengths = [7, 4]
    key, value = data(rng, (2, 11, 2, 32), dtype)
    before = any_bits(rng, (2, 6, 5, 1, 32), dtype)

    def stored(mode, wins, offsets=None, slots=(1, 9, 16, 23), **more):
        caches = before.copy()
        more |= {} if offsets is None else {"offset_index": offsets}
        reshape_and_cache(key, value, *caches, slots, compress_type=mode, wins=wins, seq_lens=lengths, **more)
        return caches

    return stored, before


@given(seeds, dtypes_of)
def test_negative_slots_leave_every_byte(rng, dtype):
    stored, before = runs(rng, dtype, finite)
    slots = -rng.integers(1, 100, 4)
    for mode in (KVHEAD, OMNI, ROPE)[: 2 if dtype == np.int8 else 3]:
        offsets = None if mode == KVHEAD else [0, 1, 2, 0]
        assert stored(mode, [2, 3, 1, 4], offsets, slots).tobytes() == before.tobytes()
    key, caches = any_bits(rng, (4, 1, 32), dtype), before.copy()
    reshape_and_cache(key, key, *caches, slots)
    assert caches.tobytes() == before.tobytes()


@given(seeds, floats_of)
def test_nothing_left_out_is_a_copy(rng, dtype):
    stored, before = runs(rng, dtype)
    whole = stored(KVHEAD, [7, 7, 4, 4]).tobytes()
    assert whole != before.tobytes()
    assert whole == stored(KVHEAD, [0] * 4).tobytes()
    for mode in (ROPE, OMNI):
        assert whole == stored(mode, [3, 0, 9, -2], [-1] * 4).tobytes()
        assert whole == stored(mode, [0] * 4, [2, 0, -1, 4]).tobytes()


@given(seeds, dtypes_of)
def test_a_copy_by_slots_of_tokens(rng, dtype):
    """Each head of a sequence is a sequence of one head, stored token by token."""
    lengths, heads = [7, 4], 2
    key, caches = (
        any_bits(rng, (11, heads, 32), dtype),
        np.tile(any_bits(rng, (6, 5, 1, 32), dtype), (2, 1, 1, 1, 1)),
    )
    begins = [1, 9, 16, 23]
    reshape_and_cache(
        key, None, caches[0], None, begins, compress_type=KVHEAD, wins=[0] * 4, seq_lens=lengths
    )
    first = np.cumsum([0, *lengths])
    for i, begin in enumerate(begins):
        b, h = divmod(i, heads)
        tokens = key[first[b] : first[b + 1], h : h + 1]
        reshape_and_cache(tokens, None, caches[1], None, begin + np.arange(lengths[b]))
    assert caches[0].tobytes() == caches[1].tobytes()


@given(seeds, floats_of)
def test_a_mean_of_one_token_is_the_token(rng, dtype):
    """But for -0.0, which becomes 0.0."""
    stored, before = runs(rng, dtype, finite)
    whole, offsets = stored(KVHEAD, [0] * 4), [3, 0, 1, 3]
    for begin, offset in zip([1, 9, 16, 23], offsets, strict=True):
        row = whole.reshape(2, 30, 32)[:, begin + offset]
        row[row == 0] = 0
    assert stored(ROPE, [1] * 4, offsets).tobytes() == whole.tobytes()
    assert whole.tobytes() != before.tobytes()


@given(seeds, dtypes_of)
def test_dropping_the_first_keeps_the_last(rng, dtype):
    stored, _ = runs(rng, dtype)
    for first, second in ([2, 3], [1, 4], [7, 1], [5, 4]):
        dropped = stored(OMNI, [first, 6, second, 2], [0] * 4)
        kept = stored(KVHEAD, [7 - first, 1, 4 - second, 2], empty_window="skip")
        assert dropped.tobytes() == kept.tobytes()


@given(seeds, dtypes_of, st.integers(1, 20), st.sampled_from(["ND", "NZ"]))
def test_a_load_after_a_store(rng, dtype, rows, cache_format):
    """Through the same blocks, the tokens come back."""
    lengths = rng.integers(0, 30, 3)
    need = -(-lengths // rows)
    blocks = int(need.sum()) + 1
    table = np.full((3, 40), -1)
    ids = rng.permutation(blocks)
    for b in range(3):
        table[b, : need[b]] = ids[need[:b].sum() :][: need[b]]
    slots = np.concatenate(
        [table[b, np.arange(n) // rows] * rows + np.arange(n) % rows for b, n in enumerate(lengths)]
    )
    key, value = any_bits(rng, (2, len(slots), 4, 24), dtype)
    shape = (blocks, rows, 4, 24)
    if cache_format == "NZ":
        shape = (blocks, 96 * dtype.itemsize // 32, rows, 32 // dtype.itemsize)
    caches = any_bits(rng, (2, *shape), dtype)
    reshape_and_cache(key, value, *caches, slots, cache_format=cache_format)
    loaded = paged_cache_load(*caches, table, lengths, cache_format=cache_format)
    assert loaded[0].tobytes() == key.tobytes()
    assert loaded[1].tobytes() == value.tobytes()


@given(seeds, dtypes_of, st.integers(1, 20))
def test_nz_is_nd_with_groups_before_rows(rng, dtype, rows):
    n0 = 32 // dtype.itemsize
    key, nd = any_bits(rng, (rows, 4, 24), dtype), any_bits(rng, (3, rows, 4, 24), dtype)
    nz = np.ascontiguousarray(nd.reshape(3, rows, 96 // n0, n0).transpose(0, 2, 1, 3))
    slots = rng.permutation(3 * rows)[:rows] - 2
    reshape_and_cache(key, None, nd, None, slots)
    reshape_and_cache(key, None, nz, None, slots, cache_format="NZ")
    assert nz.tobytes() == np.ascontiguousarray(nd.reshape(3, rows, -1, n0).transpose(0, 2, 1, 3)).tobytes()
    if rows % 16 == 0:
        assert nz.tobytes() == nd_to_nz(nd.reshape(3, rows, 96)).tobytes()


@given(seeds, dtypes_of, st.sampled_from([KVHEAD, OMNI]))
def test_int32_is_int64_and_strided_is_contiguous(rng, dtype, mode):
    arrays, keywords = compressed_call(rng, dtype, mode)
    keywords = {
        name: np.clip(x, -9, 2**31 - 1) if isinstance(x, np.ndarray) else x for name, x in keywords.items()
    }
    results = []
    for change in (
        lambda x: x.astype(np.int32),
        lambda x: x.astype(np.int64),
        lambda x: np.repeat(x, 3)[1::3],
    ):
        key, value, *caches, slots = [array.copy() for array in arrays]
        given = {name: change(x) if isinstance(x, np.ndarray) else x for name, x in keywords.items()}
        if len(results) == 2:
            key, value = np.repeat(key, 2, 2)[:, :, ::2], np.repeat(value, 2, 0)[::2]
            caches = [np.repeat(cache, 2, 3)[..., ::2] for cache in caches]
        reshape_and_cache(key, value, *caches, change(np.clip(slots, -9, None)), **given)
        results.append(b"".join(cache.tobytes() for cache in caches))
    assert results[0] == results[1] == results[2]


# Threads


@needs_two
@pytest.mark.parametrize("cache_format", ["ND", "NZ"])
def test_threads_store_and_load_the_same(cache_format):
    """Shares of threads begin anywhere, within runs and blocks."""
    rng = np.random.default_rng(1)
    key, value = any_bits(rng, (2, 1501, 4, 64), np.float16)
    shape = (110, 16, 4, 64) if cache_format == "ND" else (110, 16, 16, 16)
    before = any_bits(rng, (2, *shape), np.float16)
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
    before = any_bits(rng, (2, 520, 16, 1, 64), np.float32)
    offsets = [2000 - wins[0], 500, 1, 0]

    def call():
        caches = before.copy()
        more = {"wins": wins, "offset_index": offsets, "seq_lens": [2000]}
        reshape_and_cache(key, value, *caches, [3, 2010, 4090, 6101], compress_type=ROPE, **more)
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
