"""Calls of `reshape_and_cache` that are refused; each argument alone is broken in `test_refusals.py`."""

import backends
import ml_dtypes
import numpy as np
import pytest
from ascend_scenes import compressed_call, plain_call, seeds
from calls import MODES, reshape
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from scenes import INT64_MAX, INT64_MIN

from kvkit import KvkitError
from kvkit.reference.ascend import KVHEAD, KVHEAD_ROPE, OMNI

reshape_and_cache = backends.operators.ascend.reshape_and_cache
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ROWS = {"kvhead": [2, 4, 1, 3], "rope": [3, 1, 3, 1], "omni": [2, 0, 3, 0]}  # that each slot's run stores
runs_only = pytest.mark.parametrize("kind", ROWS)


def changed(call, name, at, value):
    array = call[name].copy()
    array[at] = value
    return call.but(**{name: array})


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32], ids=str)
def test_int8_keys_with_16_bit_values_are_for_nz(dtype):
    for cache_format, others in (("NZ", " or float16 or bfloat16"), ("ND", "")):
        other = reshape(0, cache_format, dtype)
        call = reshape(0, cache_format, np.int8).but(value=other["value"], value_cache=other["value_cache"])
        if cache_format == "NZ" and dtype != np.float32:
            call.run()
        else:
            assert f"expected the dtype of key, int8{others}, got" in refused(call, "value")


@pytest.mark.parametrize("kind", MODES)
@pytest.mark.parametrize(
    ("name", "other"),
    [("key_cache", "key"), ("key_cache", "value"), ("value_cache", "key"), ("value_cache", "value"),
     ("key_cache", "value_cache")],
)  # fmt: skip
def test_a_cache_over_another_array(kind, name, other):
    """One element in common is too much; none is fine, however near."""
    call = reshape(*MODES[kind])
    for shared in (1, 0):
        first, second = call[name], call[other]
        memory = np.zeros(first.size + second.size - shared, first.dtype)
        moved = {name: memory[: first.size].reshape(first.shape)}
        moved[other] = memory[first.size - shared :].reshape(second.shape)
        if shared:
            refused(call.but(**moved), name)
        else:
            call.but(**moved).run()


def test_int8_has_no_mean():
    refused(reshape(KVHEAD_ROPE, "ND", np.int8), "key")
    for mode in (KVHEAD, OMNI):
        reshape(mode, "ND", np.int8).run()


# Slots, windows and lengths, and the ones at the limit


@pytest.mark.parametrize("kind", ["nd", "nz"])
@pytest.mark.parametrize(
    "slots", [[4, 3, -1, 19, 0, 1, 4], [5, 6, 7, 8, 0, 8, -1], [7, 5, 6, 7, -1, -1, 0]], ids=str
)
def test_slots_twice(kind, slots):
    """The message says which slot, and of which tokens."""
    twice = next(s for s in slots if slots.count(s) == 2 and s >= 0)
    first, second = (t for t, s in enumerate(slots) if s == twice)
    message = refused(reshape(*MODES[kind]).but(slot_mapping=np.array(slots)), "slot_mapping")
    assert message.endswith(f"got slot {twice} for entries {first} and {second}")


@runs_only
def test_runs_behind_the_cache(kind):
    """Runs of 4, 2, .. rows: up to the last slot, and one row more."""
    call, slots = reshape(*MODES[kind]), np.full(4, -1)
    for i, rows in enumerate(ROWS[kind]):
        slots[i] = 20 - rows
        call.but(slot_mapping=slots).run()
        for slot in (21 - rows, 20 + (rows == 0), 2**31, INT64_MAX - 1, INT64_MAX):
            refused(changed(call.but(slot_mapping=slots), "slot_mapping", i, slot), f"slot_mapping[{i}]")
        slots[i] = -1


@runs_only
def test_runs_that_overlap(kind):
    call, rows = reshape(*MODES[kind]), ROWS[kind]
    for first, second in ((0, 1), (0, 2), (2, 0), (0, 3), (2, 1)):
        slots = np.full(4, -1)
        slots[first] = 7
        for slot in range(12):
            slots[second] = slot
            if slot < 7 + rows[first] and slot + rows[second] > 7 and min(rows[first], rows[second]):
                message = refused(call.but(slot_mapping=slots), "slot_mapping")
                entries = f"{min(first, second)} and {max(first, second)}"
                assert message.endswith(f"got slot {max(7, slot)} for entries {entries}")
            else:
                call.but(slot_mapping=slots).run()


@runs_only
@pytest.mark.parametrize("window", [-1, 4, 5, INT64_MAX, INT64_MIN])
def test_windows(kind, window):
    """Of sequence 1, which has 3 tokens; of a slot that stores nothing they do not matter."""
    call = reshape(*MODES[kind])
    for entry in (2, 3):
        broken = changed(call, "wins", entry, window)
        if "offset_index" in call.inputs:
            broken = changed(broken, "offset_index", entry, 0)
            changed(broken, "offset_index", entry, -1).run()
        refused(broken, f"wins[{entry}]")
        changed(broken, "slot_mapping", entry, -1).run()


@pytest.mark.parametrize("kind", ["rope", "omni"])
@pytest.mark.parametrize("offset", [-2, 2, 3, INT64_MAX, INT64_MIN])
def test_offsets(kind, offset):
    """Of sequence 1, whose 3 tokens have a window of 2; with an empty one the offset has a limit, too."""
    call = changed(reshape(*MODES[kind]), "wins", 3, 2)
    broken = changed(call, "offset_index", 3, offset)
    refused(broken, "offset_index[3]")
    changed(broken, "slot_mapping", 3, -1).run()
    empty = changed(call, "wins", 3, 0)
    changed(empty, "offset_index", 3, 3).run()
    refused(changed(empty, "offset_index", 3, 4), "offset_index[3]")


@runs_only
def test_windows_at_the_limit(kind):
    """Whole sequences, and none of them, are legal."""
    call = reshape(*MODES[kind])
    more = {"offset_index": np.zeros(4, int)} if "offset_index" in call.inputs else {}
    for wins in ([4, 4, 3, 3], [0, 0, 0, 0]):
        call.but(wins=np.array(wins), **more).run()


BROKEN = [-1, -2, 1, 2**31, 2**33, INT64_MAX, INT64_MIN]


@given(seeds, st.sampled_from([0, KVHEAD, KVHEAD_ROPE, OMNI]), st.data())
def test_whatever_the_index_arrays_are(rng, mode, data):
    """A call with odd numbers in it runs, or raises KvkitError and leaves every byte."""
    if mode:
        arrays, keywords = compressed_call(rng, np.dtype(np.float16), mode)
    else:
        arrays, keywords = plain_call(rng, [np.dtype(np.float16)] * 2), {}
    *arrays, slots = arrays
    indices = [slots, *(x for x in keywords.values() if isinstance(x, np.ndarray))]
    for _ in range(data.draw(st.integers(1, 2))):
        array = data.draw(st.sampled_from(indices))
        if len(array):
            array[data.draw(st.integers(0, len(array) - 1))] = data.draw(st.sampled_from(BROKEN))
    before = [cache.tobytes() for cache in arrays[2:]]
    try:
        reshape_and_cache(*arrays, slots, **keywords)
    except KvkitError:
        assert [cache.tobytes() for cache in arrays[2:]] == before
