"""`slots`, `compressed_slots` and `razor_windows`: what they promise, on caches that follow them."""

import math

import numpy as np
import pytest
from ascend_scenes import seeds
from attention_scenes import TOLERANCE, assert_near
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses

from kvkit.ascend import (
    CompressType,
    compressed_slots,
    paged_attention,
    paged_cache_load,
    razor_windows,
    reshape_and_cache,
    slots,
)
from kvkit.reference import ascend as oracle
from kvkit.reference.ascend import KVHEAD, KVHEAD_ROPE, OMNI
from kvkit.tools.vectors.draws import any_bytes, normal

INT64_MAX, INT64_MIN = np.iinfo(np.int64).max, np.iinfo(np.int64).min
sizes_of, rooms_of, firsts_of = st.integers(1, 9), st.integers(0, 12), st.integers(0, 3)
lengths_of = st.lists(st.integers(1, 30), max_size=5)


def check_tables(where, rows, size, headroom, first_block):
    """Check that each entry has its own blocks for its rows and headroom, and no more than needed."""
    assert where.context_lens.tolist() == list(rows)
    assert where.block_size == size
    assert where.block_tables.dtype == where.context_lens.dtype == where.slot_mapping.dtype == np.int32
    need = [math.ceil((n + headroom) / size) for n in rows]
    used = []
    for table, count in zip(where.block_tables.tolist(), need, strict=True):
        assert all(block >= first_block for block in table[:count])
        assert all(block == -1 for block in table[count:])
        used += table[:count]
    assert len(set(used)) == len(used)
    assert where.num_blocks == max(used, default=first_block - 1) + 1
    assert where.block_tables.shape == (len(rows), max(need, default=0))


def steps_of(where, headroom):
    """Check that next_slots gives the slot of the position after the context, for each decoded token."""
    size = where.block_size
    for step in range(headroom):
        for i, slot in enumerate(where.next_slots(step)):
            position = int(where.context_lens[i]) + step
            assert slot == where.block_tables[i, position // size] * size + position % size


@settings(max_examples=60)
@given(seeds, lengths_of, sizes_of, rooms_of, firsts_of)
def test_slots(rng, lengths, size, headroom, first_block):
    where = slots(lengths, block_size=size, headroom=headroom, first_block=first_block)
    check_tables(where, lengths, size, headroom, first_block)
    steps_of(where, headroom)
    assert (where.mean_slots == -1).all()
    assert not where.mean_counts.any()
    assert where.mean_slots.shape == where.mean_counts.shape == (len(lengths),)
    key = any_bytes(rng, (sum(lengths), 2, 8), np.float16)
    before = any_bytes(rng, (where.num_blocks + 1, size, 2, 8), np.float16)
    cache = before.copy()
    reshape_and_cache(key, None, cache, None, where.slot_mapping)
    loaded, _ = paged_cache_load(cache, None, where.block_tables, where.context_lens)
    assert loaded.tobytes() == key.tobytes()
    assert cache[:first_block].tobytes() == before[:first_block].tobytes()


def windows(rng, lengths, mode):
    wins = rng.integers(0, lengths + 1)
    offsets = np.where(rng.random(len(wins)) < 0.3, -1, rng.integers(0, lengths - wins + 1))
    return wins, None if mode == KVHEAD else offsets


@settings(max_examples=80)
@given(seeds, lengths_of, st.integers(1, 3), sizes_of, rooms_of, firsts_of, st.sampled_from([1, 2, 3]))
def test_compressed_slots(rng, lengths, heads, size, headroom, first_block, mode):
    """A load through the tables gives the rows that the loops keep of each head."""
    wins, offsets = windows(rng, np.repeat(lengths, heads).astype(int), mode)
    empty = rng.choice(["copy", "skip"])
    key = np.round(rng.standard_normal((sum(lengths), heads, 32)), 2).astype(np.float32)
    runs, first, counts = [], 0, []
    for b, n in enumerate(lengths):
        for h in range(heads):
            i = b * heads + h
            offset = -1 if offsets is None else offsets[i]
            runs.append(oracle.compress_run(key[first : first + n, h], mode, wins[i], offset, empty))
            counts.append(wins[i] if mode == KVHEAD_ROPE and offset >= 0 and wins[i] else 0)
        first += n
    where = compressed_slots(
        lengths, heads, wins, offsets, compress_type=mode, block_size=size, headroom=headroom,
        first_block=first_block, empty_window=empty,
    )  # fmt: skip
    check_tables(where, [len(run) for run in runs], size, headroom, first_block)
    steps_of(where, headroom)
    for run, slot, table in zip(runs, where.slot_mapping, where.block_tables, strict=True):
        assert not run or slot == table[0] * size
    begins = where.slot_mapping.tolist()
    expected = [
        s + o if n else -1
        for s, o, n in zip(begins, [0] * len(wins) if offsets is None else offsets, counts, strict=True)
    ]
    assert where.mean_slots.tolist() == expected
    assert where.mean_counts.tolist() == counts
    cache = np.zeros((max(where.num_blocks, 1), size, 1, 32), np.float32)
    reshape_and_cache(
        key, None, cache, None, where.slot_mapping, compress_type=mode, wins=wins, seq_lens=lengths,
        offset_index=offsets, empty_window=empty,
    )  # fmt: skip
    loaded, _ = paged_cache_load(cache, None, where.block_tables, where.context_lens)
    rows = [row for run in runs for row in run]
    assert loaded[:, 0].tobytes() == np.array(rows, np.float32).reshape(-1, 32).tobytes()


def test_room_has_an_end():
    where = slots([4, 1], block_size=4, headroom=2)
    assert where.next_slots().tolist() == [4, 9]
    assert where.next_slots(1).tolist() == [5, 10]
    for step in (3, 4, -5):
        refuses(lambda step=step: where.next_slots(step), "step")
    refuses(lambda: slots([4], block_size=4).next_slots(), "step")
    refuses(lambda: slots([4, 1], block_size=4).next_slots(), "step")


def test_large_caches_have_int64_slots():
    where = slots([2], block_size=2**20, first_block=2**12)
    assert where.slot_mapping.dtype == np.int64
    assert where.slot_mapping.tolist() == [2**32, 2**32 + 1]
    assert where.next_slots().tolist() == [2**32 + 2]


# A mean weighs as much as what it is the mean of


@pytest.mark.parametrize("scale", [None, 0.25, 1.0, -0.5])
@pytest.mark.parametrize("heads", [3, 6])
def test_means_of_equal_tokens_lose_nothing(scale, heads):
    """Prefill, compress, decode: attention is that over all tokens, where those averaged are identical."""
    rng = np.random.default_rng(1)
    lengths, kv_heads, dim, steps = [50, 23], 3, 32, 5
    tokens = sum(lengths)
    wins, offsets = razor_windows(lengths, kv_heads, [1], sinks=3, recent=9, fraction=4)
    key, value = normal(rng, (2, tokens, kv_heads, dim), np.float32)
    for b, first in enumerate([0, 50]):
        for h in range(kv_heads):
            i = b * kv_heads + h
            middle = slice(first + offsets[i], first + offsets[i] + wins[i])
            key[middle, h], value[middle, h] = key[first, h], value[first, h]
    whole = slots(lengths, block_size=8, headroom=steps)
    less = compressed_slots(
        lengths, kv_heads, wins, offsets, compress_type=KVHEAD_ROPE, block_size=8, headroom=steps
    )
    assert less.context_lens.sum() < 0.8 * kv_heads * tokens
    all_rows = np.zeros((2, whole.num_blocks, 8, kv_heads, dim), np.float32)
    kept = np.zeros((2, less.num_blocks + 1, 8, 1, dim), np.float32)
    reshape_and_cache(key, value, *all_rows, whole.slot_mapping)
    more = {"wins": wins, "seq_lens": lengths, "offset_index": offsets}
    reshape_and_cache(key, value, *kept, less.slot_mapping, compress_type=KVHEAD_ROPE, **more)
    razor = less.razor_offset(1 / math.sqrt(dim) if scale is None else scale, less.num_blocks + 1)
    assert (razor != 0).sum() == 4
    for step in range(steps):
        new = normal(rng, (2, 2, kv_heads, dim), np.float32)
        reshape_and_cache(*new, *all_rows, whole.next_slots(step))
        more = {"wins": [0] * 6, "seq_lens": [1, 1], "offset_index": [-1] * 6}
        reshape_and_cache(*new, *kept, less.next_slots(step), compress_type=KVHEAD_ROPE, **more)
        query = normal(rng, (2, heads, dim), np.float32)
        lens = whole.context_lens + step + 1, less.context_lens + step + 1
        keywords = {"softmax_scale": scale, "return_lse": True}
        output, lse = paged_attention(query, *all_rows, whole.block_tables, lens[0], **keywords)
        near, near_lse = paged_attention(
            query, *kept, less.block_tables, lens[1], razor_offset=razor, **keywords
        )
        assert_near(near, output, TOLERANCE["float32"])
        assert_near(near_lse, lse, TOLERANCE["float32"])
        without = paged_attention(query, *kept, less.block_tables, lens[1], softmax_scale=scale)
        assert abs(without - output).max() > 1e-3


def test_razor_offsets():
    where = compressed_slots([10, 4], 2, [5, 0, 1, 4], [3, 2, 0, 0], compress_type=KVHEAD_ROPE, block_size=4)
    razor = where.razor_offset(0.5)
    assert razor.dtype == np.float32
    assert razor.shape == (where.num_blocks, 4)
    flat, slot = np.zeros(razor.size, np.float32), where.slot_mapping
    flat[slot[0] + 3], flat[slot[3]] = math.log(5) / 0.5, math.log(4) / 0.5
    assert np.array_equal(razor.ravel(), flat)
    assert where.razor_offset(0.5, 20).shape == (20, 4)
    refuses(lambda: where.razor_offset(0.5, where.num_blocks - 1), "num_blocks")
    for scale in (0, math.nan, math.inf, None, "1"):
        refuses(lambda scale=scale: where.razor_offset(scale), "softmax_scale")


# Windows


@given(lengths_of, st.integers(1, 4), st.integers(0, 6), st.integers(0, 12), st.integers(1, 9), seeds)
def test_razor_windows(lengths, heads, sinks, recent, fraction, rng):
    retrieval = rng.permutation(heads)[: rng.integers(0, heads + 1)].tolist()
    wins, offsets = razor_windows(lengths, heads, retrieval, sinks=sinks, recent=recent, fraction=fraction)
    assert wins.dtype == offsets.dtype == np.int32
    assert wins.shape == offsets.shape == (len(lengths) * heads,)
    for b, n in enumerate(lengths):
        for h in range(heads):
            middle = n - sinks - max(recent, n // fraction)
            expected = (0, -1) if h in retrieval or middle < 2 else (middle, sinks)
            assert (wins[b * heads + h], offsets[b * heads + h]) == expected


def test_the_published_windows():
    """A fifth of the context, and no fewer than 4,000 tokens."""
    wins, offsets = razor_windows([3000, 10_000, 100_000], 2, [0])
    assert wins.tolist() == [0, 0, 0, 10_000 - 4 - 4000, 0, 100_000 - 4 - 20_000]
    assert offsets.tolist() == [-1, -1, -1, 4, -1, 4]


# Errors


def test_refused():
    for lengths in ([3, 0], [-1], [2.0], [[3]], 3, [INT64_MIN], "3"):
        refuses(lambda x=lengths: slots(x), "seq_lens")
        refuses(lambda x=lengths: razor_windows(x, 1, []), "seq_lens")
        refuses(lambda x=lengths: compressed_slots(x, 1, [0], compress_type=KVHEAD), "seq_lens")
    for name, least in (("block_size", 1), ("headroom", 0), ("first_block", 0)):
        for number in (least - 1, 1.5, None, True):
            more = {name: number}
            refuses(lambda more=more: slots([3], **more), name)
            refuses(lambda more=more: compressed_slots([3], 1, [0], compress_type=KVHEAD, **more), name)
    for heads in (0, -1, 2.0, None):
        refuses(lambda x=heads: compressed_slots([3], x, [0], compress_type=KVHEAD), "num_head")
        refuses(lambda x=heads: razor_windows([3], x, []), "num_head")
    for name in ("sinks", "recent"):
        refuses(lambda name=name: razor_windows([3], 1, [], **{name: -1}), name)
    refuses(lambda: razor_windows([3], 1, [], fraction=0), "fraction")
    for head in (-1, 2, 1.5):
        refuses(lambda x=head: razor_windows([3], 2, [0, x]), "retrieval_heads")


@pytest.mark.parametrize("mode", [KVHEAD, KVHEAD_ROPE, OMNI])
def test_windows_refused(mode):
    """As `reshape_and_cache` does."""
    offsets = None if mode == KVHEAD else [0, 0]

    def of(wins=(1, 1), offset_index=offsets, **more):
        return lambda: compressed_slots([3], 2, wins, offset_index, **({"compress_type": mode} | more))

    of()()
    for wins in (
        (1,),
        (1, 1, 1),
        (1, -1),
        (1, 4),
        (1, INT64_MAX),
        (1, INT64_MIN),
        (1.0, 1.0),
        ((1, 1),),
        None,
    ):
        refuses(of(wins=wins), "wins")
    refuses(of(offset_index=None if offsets else [0, 0]), "offset_index")
    refuses(of(empty_window="none"), "empty_window")
    for kind in (CompressType.UNDEFINED, 4, -1, None, "kvhead", "UNDEFINED"):
        refuses(of(compress_type=kind), "compress_type")
    if offsets:
        for index in ([0], [0, 3], [0, -2], [0, INT64_MAX], [0, INT64_MIN], [0.0, 0.0]):
            refuses(of(offset_index=index), "offset_index")
        of(wins=(1, -7), offset_index=[0, -1])()
