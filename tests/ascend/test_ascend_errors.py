"""Calls of `reshape_and_cache` that are refused; each argument alone is broken in `test_refusals.py`."""

import ml_dtypes
import numpy as np
import pytest
import refusals
from calls import MODES as CALLS
from calls import Call, reshape

from kvkit.reference.ascend import KVHEAD, OMNI, ROPE

ARRAYS = ("key", "value", "key_cache", "value_cache")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def call_of(*how):
    return reshape(*how).inputs


def run(call):
    return Call("ascend.reshape_and_cache", call).run()


def refused(call, name):
    refusals.refused(Call("ascend.reshape_and_cache", call), name)


every_call = pytest.mark.parametrize("kind", CALLS)
runs_only = pytest.mark.parametrize("kind", list(CALLS)[2:])


@every_call
def test_the_calls_are_legal(kind):
    """Otherwise the others would prove nothing."""
    call = call_of(*CALLS[kind])
    before = [call[name].tobytes() for name in ARRAYS[2:]]
    run(call)
    assert all(call[name].tobytes() != old for name, old in zip(ARRAYS[2:], before, strict=True))


# Arrays


@every_call
def test_mixed_types(kind):
    call = call_of(*CALLS[kind])
    for name in ARRAYS:
        for dtype in (np.float32, BFLOAT16, np.int8):
            refused(call | {name: np.zeros(call[name].shape, dtype)}, "")


@pytest.mark.parametrize("cache_format", ["ND", "NZ"])
@pytest.mark.parametrize(
    ("first", "second"),
    [("int8", "float32"), ("float16", "bfloat16"), ("float16", "int8"), ("float32", "float16")],
)
def test_pairs_of_types(cache_format, first, second):
    """NZ takes int8 keys with 16-bit values, and nothing else mixes."""
    types = {"bfloat16": BFLOAT16}
    call = call_of(0, cache_format, types.get(first, first))
    other = call_of(0, cache_format, types.get(second, second))
    refused(call | {name: other[name] for name in ("value", "value_cache")}, "value")


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16], ids=str)
def test_int8_keys_with_other_values_are_for_nz(dtype):
    for cache_format in ("NZ", "ND"):
        call, other = call_of(0, cache_format, np.int8), call_of(0, cache_format, dtype)
        call |= {name: other[name] for name in ("value", "value_cache")}
        if cache_format == "NZ":
            run(call)
        else:
            refused(call, "value")


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


@every_call
@pytest.mark.parametrize("name", ARRAYS)
def test_sizes_that_differ(kind, name):
    """More, less, or none along each axis."""
    call = call_of(*CALLS[kind])
    for axis in range(call[name].ndim):
        array = np.moveaxis(call[name], axis, 0)
        for changed in (np.concatenate([array, array[:1]]), array[1:], array[:0]):
            if len(array) > 1 or len(changed) != 0:
                refused(call | {name: np.moveaxis(changed, 0, axis)}, "")


@every_call
def test_sizes_of_zero(kind):
    for name in ("key", "value"):
        for shape in ((7, 0, 32), (7, 2, 0)):
            refused(call_of(*CALLS[kind]) | {name: np.zeros(shape, np.float16)}, name)


@every_call
def test_one_of_value_and_value_cache(kind):
    for name in ("value", "value_cache"):
        refused(call_of(*CALLS[kind]) | {name: None}, name)


@every_call
def test_missing_and_surplus_arguments(kind):
    call = call_of(*CALLS[kind])
    for name, array in (("wins", [2, 2, 2, 2]), ("seq_lens", [4, 3]), ("offset_index", [-1] * 4)):
        changed = {k: v for k, v in call.items() if k != name}
        if name not in call:
            changed[name] = np.array(array)
        refused(changed, name)


@runs_only
def test_nz_is_not_compressed(kind):
    refused(call_of(*CALLS[kind]) | {"cache_format": "NZ"}, "cache_format")


@pytest.mark.parametrize(
    ("dtype", "heads", "dim"), [(np.float16, 1, 24), (np.int8, 3, 16), (np.float32, 2, 5)]
)
def test_nz_rows_of_no_whole_groups(dtype, heads, dim):
    n0 = 32 // np.dtype(dtype).itemsize
    tokens, cache = np.zeros((1, heads, dim), dtype), np.zeros((1, -(-heads * dim // n0), 2, n0), dtype)
    refused(
        dict(zip(ARRAYS, (tokens, None, cache, None), strict=True))
        | {"slot_mapping": [0], "cache_format": "NZ"},
        "key",
    )


def test_nz_groups_of_another_size():
    call = call_of(0, "NZ")
    refused(call | {"key_cache": call["key_cache"].reshape(4, 8, 5, 8)}, "key_cache")


@runs_only
def test_head_sizes_of_runs(kind):
    """Multiples of 32, the same for keys and values; caches of one head."""
    call = call_of(*CALLS[kind])
    for dim in (16, 33, 48):
        arrays = [np.zeros((7, 2, dim), np.float16)] * 2 + [
            np.zeros((4, 5, 1, dim), np.float16) for _ in "kv"
        ]
        refused(call | dict(zip(ARRAYS, arrays, strict=True)), "key")
    refused(
        call
        | {"value": np.zeros((7, 2, 64), np.float16), "value_cache": np.zeros((4, 5, 1, 64), np.float16)},
        "value",
    )
    refused(call | {"key_cache": np.zeros((4, 5, 2, 32), np.float16)}, "key_cache")


def test_int8_has_no_mean():
    refused(call_of(ROPE, "ND", np.int8), "key")
    for mode in (KVHEAD, OMNI):
        run(call_of(mode, "ND", np.int8))
