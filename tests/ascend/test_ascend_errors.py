"""Calls of `reshape_and_cache` that are refused: an error about the argument, and not a byte written."""

import ml_dtypes
import numpy as np
import pytest
from ascend_reference import KVHEAD, OMNI, ROPE
from refusals import NO_ARRAYS, swapped
from test_ascend import any_bits

from kvkit import KvkitError
from kvkit.ascend import reshape_and_cache

ARRAYS = ("key", "value", "key_cache", "value_cache")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def call_of(mode=0, cache_format="ND", dtype=np.float16):
    """Arguments of a legal call by name: 7 tokens of 2 heads; compressed, 2 sequences of 4 and 3."""
    rng = np.random.default_rng(1)
    shape = (4, 5, 2, 32)
    if mode:
        shape = (4, 5, 1, 32)
    if cache_format == "NZ":
        shape = (4, 64 * np.dtype(dtype).itemsize // 32, 5, 32 // np.dtype(dtype).itemsize)
    key, value = any_bits(rng, (2, 7, 2, 32), dtype)
    key_cache, value_cache = any_bits(rng, (2, *shape), dtype)
    call = dict(zip(ARRAYS, (key, value, key_cache, value_cache), strict=True))
    call |= {"slot_mapping": np.array([0, 5, 10, 15] if mode else [4, 3, -1, 19, 0, 1, 2])}
    if mode:
        call |= {"compress_type": mode, "wins": np.array([2, 4, 1, 3]), "seq_lens": np.array([4, 3])}
    if mode > KVHEAD:
        call["offset_index"] = np.array([1, 0, -1, 0])
    return call | ({"cache_format": cache_format} if cache_format == "NZ" else {})


def run(call):
    first = (*ARRAYS, "slot_mapping")
    return reshape_and_cache(*map(call.get, first), **{k: v for k, v in call.items() if k not in first})


def refused(call, name):
    """The error begins with the name, says what was expected and what came; caches keep their bytes."""
    caches = [array for array in map(call.get, ARRAYS[2:]) if isinstance(array, np.ndarray)]
    before = [cache.tobytes() for cache in caches]
    with pytest.raises(KvkitError) as error:
        run(call)
    message = str(error.value)
    assert message.startswith(name), message
    assert ": expected " in message
    assert ", got " in message
    assert [cache.tobytes() for cache in caches] == before


CALLS = {
    "nd": (0, "ND"),
    "nz": (0, "NZ"),
    "kvhead": (KVHEAD, "ND"),
    "rope": (ROPE, "ND"),
    "omni": (OMNI, "ND"),
}
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
@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("kind_of_array", NO_ARRAYS)
def test_not_an_array(kind, name, kind_of_array):
    call = call_of(*CALLS[kind])
    refused(call | {name: NO_ARRAYS[kind_of_array](call[name])}, name.removesuffix("_cache").split("_")[0])


@every_call
@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("dtype", [np.float64, np.uint8, np.int16, np.int32, np.bool_, np.complex64, object])
def test_types_that_are_not_listed(kind, name, dtype):
    call = call_of(*CALLS[kind])
    refused(call | {name: np.zeros(call[name].shape, dtype)}, name)


@every_call
@pytest.mark.parametrize("name", ARRAYS)
def test_other_byte_order(kind, name):
    call = call_of(*CALLS[kind])
    refused(call | {name: swapped(call[name])}, name)


@every_call
@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16, np.int8], ids=str)
def test_mixed_types(kind, name, dtype):
    call = call_of(*CALLS[kind])
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


def wider(array, axis):
    return np.concatenate([array, array.take([0], axis)], axis)


@every_call
@pytest.mark.parametrize("name", ARRAYS)
def test_rank(kind, name):
    call = call_of(*CALLS[kind])
    refused(call | {name: call[name][None]}, name)
    refused(call | {name: call[name][0]}, name)


@every_call
@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("change", ["more", "less", "none"])
def test_sizes_that_differ(kind, name, axis, change):
    call = call_of(*CALLS[kind])
    if axis >= call[name].ndim or (change == "less" and call[name].shape[axis] == 1):
        axis = 0
    first = slice(0, 0) if change == "none" else slice(1, None)
    array = wider(call[name], axis) if change == "more" else call[name][(slice(None),) * axis + (first,)]
    refused(call | {name: array}, "")


@pytest.mark.parametrize("name", ["key", "value"])
@every_call
def test_sizes_of_zero(kind, name):
    call = call_of(*CALLS[kind])
    for shape in ((7, 0, 32), (7, 2, 0)):
        refused(call | {name: np.zeros(shape, np.float16)}, name)


@every_call
@pytest.mark.parametrize("name", ["value", "value_cache"])
def test_one_of_value_and_value_cache(kind, name):
    refused(call_of(*CALLS[kind]) | {name: None}, name)


@every_call
@pytest.mark.parametrize("name", ARRAYS[2:])
def test_caches_that_cannot_be_written(kind, name):
    call = call_of(*CALLS[kind])
    frozen = call[name].copy()
    frozen.flags.writeable = False
    refused(call | {name: frozen}, name)
    for axis in range(4):
        if call[name].shape[axis] > 1:
            same = np.broadcast_to(call[name].take([0], axis), call[name].shape)
            same.flags.writeable = True
            refused(call | {name: same}, name)


# Attributes


@every_call
def test_attributes(kind):
    call = call_of(*CALLS[kind])
    for mode in (-1, 4, 1.0, "KVHEAD", None, True, [1]):
        refused(call | {"compress_type": mode}, "compress_type")
    for text in ("nd", "NHSD", "", None, 0, b"ND", ["ND"]):
        refused(call | {"cache_format": text}, "cache_format")
    for text in ("none", "COPY", None, 0, True):
        refused(call | {"empty_window": text}, "empty_window")


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
