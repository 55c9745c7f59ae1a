"""Numbers near the end of int64 in all that becomes an index: refused by name, or beyond every block."""

import numpy as np
import pytest
from refusals import refuses

from kvkit.ascend import block_copy, compressed_slots, paged_cache_load, razor_windows, slots

INT64_MAX, INT64_MIN = np.iinfo(np.int64).max, np.iinfo(np.int64).min
HUGE = [2**31, 2**62, INT64_MAX - 1, INT64_MAX, 2**63, 2**70]
ROOMY = {"block_size", "headroom", "first_block"}


@pytest.mark.parametrize("start", [2**31, 2**62, INT64_MAX - 7, INT64_MAX - 1, INT64_MAX])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_tokens_far_beyond_the_table_are_zeros(start, rows):
    """Other sequences begin where they did, and their tables are not read from."""
    cache = np.arange(1, 1 + 4 * rows, dtype=np.float32).reshape(4, rows, 1, 1)
    store = np.array([[0, 1], [2, 3], [3, 3], [1, 0]])
    for order in (slice(None), slice(None, None, -1)):
        starts = np.array([0, start])[order]
        key, _ = paged_cache_load(cache, None, store[1:3], np.array([2, 2 + 4 * rows])[order], starts)
        there = key[:2] if starts[0] == 0 else key[-2:]
        table = store[1] if starts[0] == 0 else store[2]
        assert there.ravel().tolist() == [cache[table[j // rows], j % rows].item() for j in range(2)]
        assert np.count_nonzero(key) == 2


@pytest.mark.parametrize(
    "ends", [[INT64_MAX, -2, 2], [INT64_MAX, INT64_MIN, 2], [INT64_MIN, INT64_MAX, 2], [3, 2, 2]], ids=str
)
def test_ends_of_destinations_that_wrap(ends):
    cache = np.arange(8, dtype=np.float32).reshape(8, 1, 1, 1)
    given = np.array([0, 1, 2]), np.array([5, 6]), np.array(ends)
    refuses(lambda: block_copy(cache, None, *given), "cum_sum", cache)


@pytest.mark.parametrize("number", HUGE)
@pytest.mark.parametrize("name", sorted(ROOMY))
def test_no_slot_wraps(name, number):
    refuses(lambda: slots([2], **{name: number}), name)
    refuses(lambda: compressed_slots([2], 1, [1], compress_type=1, **{name: number}), name)
    refuses(lambda: slots([], **{name: number}), name)


@pytest.mark.parametrize("number", HUGE)
def test_lengths_and_steps(number):
    where = slots([2], headroom=3, block_size=4)
    refuses(lambda: where.next_slots(number), "step")
    refuses(lambda: where.razor_offset(1.0, number), "num_blocks")
    if number <= INT64_MAX:
        refuses(lambda: slots([1, number]), "seq_lens")
        refuses(lambda: compressed_slots([number], 1, [1], compress_type=1), "seq_lens")
        refuses(lambda: razor_windows([number], 1, []), "seq_lens")


@pytest.mark.parametrize("number", HUGE)
@pytest.mark.parametrize("name", ["num_head", "sinks", "recent", "fraction"])
def test_razor_windows(name, number):
    given = {"seq_lens": [100], "num_head": 2, "retrieval_heads": [], name: number}
    refuses(lambda: razor_windows(**given), name)
    if name == "num_head":
        refuses(lambda: compressed_slots([2], number, [1], compress_type=1), name)


def test_the_largest_numbers():
    """What is taken is right: slots that int64 holds."""
    most = 2**31 - 1
    where = slots([2], block_size=most, first_block=most)
    assert where.slot_mapping.tolist() == [most * most, most * most + 1]
    assert where.next_slots(most - 3).tolist() == [most * most + most - 1]
    refuses(lambda: where.next_slots(most - 2), "step")
    wins, offsets = razor_windows([most], 1, [], sinks=most, recent=0)
    assert (wins.tolist(), offsets.tolist()) == ([0], [-1])
    wins, _ = razor_windows([most], 1, [], sinks=0, recent=0, fraction=most)
    assert wins.tolist() == [most - 1]
