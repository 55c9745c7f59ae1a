"""Calls of `reshape_and_cache` that are refused; each argument alone is broken in `test_refusals.py`."""

import backends
import ml_dtypes
import numpy as np
import pytest
import refusals
from ascend_scenes import compressed_call, plain_call, seeds
from calls import MODES as CALLS
from calls import Call, reshape
from hypothesis import given
from hypothesis import strategies as st
from scenes import INT64_MAX, INT64_MIN

from kvkit import KvkitError
from kvkit.reference.ascend import KVHEAD, KVHEAD_ROPE, OMNI

reshape_and_cache = backends.operators.ascend.reshape_and_cache
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def call_of(*how):
    return reshape(*how).inputs


def run(call):
    return Call("ascend.reshape_and_cache", call).run()


def refused(call, name):
    refusals.refused(Call("ascend.reshape_and_cache", call), name)


every_call = pytest.mark.parametrize("kind", CALLS)
runs_only = pytest.mark.parametrize("kind", list(CALLS)[2:])


# Arrays


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32], ids=str)
def test_int8_keys_with_16_bit_values_are_for_nz(dtype):
    for cache_format, others in (("NZ", " or float16 or bfloat16"), ("ND", "")):
        call, other = call_of(0, cache_format, np.int8), call_of(0, cache_format, dtype)
        call |= {name: other[name] for name in ("value", "value_cache")}
        if cache_format == "NZ" and dtype != np.float32:
            run(call)
        else:
            refused(call, "value")
            with pytest.raises(KvkitError, match=f"expected the dtype of key, int8{others}, got"):
                run(call)


@every_call
@pytest.mark.parametrize(
    ("name", "other"),
    [("key_cache", "key"), ("key_cache", "value"), ("value_cache", "key"), ("value_cache", "value"),
     ("key_cache", "value_cache")],
)  # fmt: skip
def test_a_cache_over_another_array(kind, name, other):
    """One element in common is too much; none is fine, however near."""
    call = call_of(*CALLS[kind])
    for shared in (1, 0):
        first, second = call[name], call[other]
        memory = np.zeros(first.size + second.size - shared, first.dtype)
        moved = {name: memory[: first.size].reshape(first.shape)}
        moved[other] = memory[first.size - shared :].reshape(second.shape)
        if shared:
            refused(call | moved, name)
        else:
            run(call | moved)


def test_int8_has_no_mean():
    refused(call_of(KVHEAD_ROPE, "ND", np.int8), "key")
    for mode in (KVHEAD, OMNI):
        run(call_of(mode, "ND", np.int8))


# Slots, windows and lengths, and the ones at the limit


def changed(call, name, at, value):
    array = call[name].copy()
    array[at] = value
    return call | {name: array}


@pytest.mark.parametrize("kind", ["nd", "nz"])
@pytest.mark.parametrize(
    "slots", [[4, 3, -1, 19, 0, 1, 4], [5, 6, 7, 8, 0, 8, -1], [7, 5, 6, 7, -1, -1, 0]], ids=str
)
def test_slots_twice(kind, slots):
    """The message says which slot, and of which tokens."""
    call = call_of(*CALLS[kind]) | {"slot_mapping": np.array(slots)}
    refused(call, "slot_mapping")
    twice = next(s for s in slots if slots.count(s) == 2 and s >= 0)
    first, second = (t for t, s in enumerate(slots) if s == twice)
    with pytest.raises(KvkitError, match=rf"got slot {twice} for entries {first} and {second}$"):
        run(call)


@runs_only
def test_runs_behind_the_cache(kind):
    """Runs of 4, 2, .. rows: up to the last slot, and one row more."""
    call = call_of(*CALLS[kind])
    rows = {KVHEAD: [2, 4, 1, 3], KVHEAD_ROPE: [3, 1, 3, 1], OMNI: [2, 0, 3, 0]}[call["compress_type"]]
    slots = np.full(4, -1)
    for i in range(4):
        slots[i] = 20 - rows[i]
        run(call | {"slot_mapping": slots})
        for slot in (21 - rows[i], 20 + (rows[i] == 0), 2**31, INT64_MAX - 1, INT64_MAX):
            refused(changed(call | {"slot_mapping": slots}, "slot_mapping", i, slot), f"slot_mapping[{i}]")
        slots[i] = -1


@runs_only
def test_runs_that_overlap(kind):
    call = call_of(*CALLS[kind])
    rows = {KVHEAD: [2, 4, 1, 3], KVHEAD_ROPE: [3, 1, 3, 1], OMNI: [2, 0, 3, 0]}[call["compress_type"]]
    for first, second in ((0, 1), (0, 2), (2, 0), (0, 3), (2, 1)):
        slots = np.full(4, -1)
        slots[first] = 7
        for slot in range(12):
            slots[second] = slot
            shared = slot < 7 + rows[first] and slot + rows[second] > 7 and min(rows[first], rows[second])
            if shared:
                refused(call | {"slot_mapping": slots}, "slot_mapping")
                got = f"slot {max(7, slot)} for entries {min(first, second)} and {max(first, second)}$"
                with pytest.raises(KvkitError, match=got):
                    run(call | {"slot_mapping": slots})
            else:
                run(call | {"slot_mapping": slots})


@runs_only
@pytest.mark.parametrize("window", [-1, 4, 5, INT64_MAX, INT64_MIN])
def test_windows(kind, window):
    """Of sequence 1, which has 3 tokens; of a slot that stores nothing they do not matter."""
    call = call_of(*CALLS[kind])
    for entry in (2, 3):
        broken = changed(call, "wins", entry, window)
        if "offset_index" in call:
            broken = changed(broken, "offset_index", entry, 0)
        refused(broken, f"wins[{entry}]")
        run(changed(broken, "slot_mapping", entry, -1))
        if "offset_index" in call:
            run(changed(broken, "offset_index", entry, -1))


@pytest.mark.parametrize("kind", ["rope", "omni"])
@pytest.mark.parametrize("offset", [-2, 2, 3, INT64_MAX, INT64_MIN])
def test_offsets(kind, offset):
    """Of sequence 1, whose 3 tokens have a window of 2; with an empty one the offset has a limit, too."""
    call = changed(call_of(*CALLS[kind]), "wins", 3, 2)
    broken = changed(call, "offset_index", 3, offset)
    refused(broken, "offset_index[3]")
    run(changed(broken, "slot_mapping", 3, -1))
    empty = changed(call, "wins", 3, 0)
    run(changed(empty, "offset_index", 3, 3))
    refused(changed(empty, "offset_index", 3, 4), "offset_index[3]")


@runs_only
def test_windows_at_the_limit(kind):
    """Whole sequences, and none of them, are legal."""
    call = call_of(*CALLS[kind])
    for wins in ([4, 4, 3, 3], [0, 0, 0, 0]):
        more = {"offset_index": np.zeros(4, int)} if "offset_index" in call else {}
        run(call | {"wins": np.array(wins)} | more)


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
