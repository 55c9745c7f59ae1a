"""The hand-computed vectors of the specification, on the reference, and what the package must refuse.

Random calls compare the package with the reference by bits (`test_random_calls.py`, `test_ascend_blocks.py`).
"""

import math
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from calls import Call
from refusals import refused
from scenes import assert_same

from kvkit import reference
from kvkit.ascend import CompressType
from kvkit.operators import OPERATORS

ops = SimpleNamespace(
    **{name.removeprefix("ascend."): each for name, each in reference.REFERENCE.items() if "ascend" in name}
)
ops.paged_attention = lambda *inputs, **more: reference.ascend.attend_blocks(*inputs, **more)[0]

KVHEAD, ROPE, OMNI = CompressType.KVHEAD, CompressType.KVHEAD_ROPE, CompressType.OMNI
DIM = 32
EMPTY = [-1, -1, -1, -1]

# What a row of number x is: x everywhere, or x in another multiple in each channel, exact in float16.
CONSTANT = np.ones(DIM)
VARYING = np.where(np.arange(DIM) % 2, -1, 1) * 2.0 ** (np.arange(DIM) % 5 - 2)
channels = pytest.mark.parametrize("channel", [CONSTANT, VARYING], ids=["constant", "varying"])
index_types = pytest.mark.parametrize("integer", [np.int32, np.int64])


def rows(numbers, channel, dtype=np.float16):
    """Return numbers as [..., D]."""
    return (np.array(numbers, float)[..., None] * channel).astype(dtype)


def cache_of(numbers, channel):
    """Return numbers by [block][row] as [blocks, rows, 1, D]."""
    return rows(numbers, channel)[:, :, None]


def keys_of(numbers, channel):
    """Return numbers by [t] or [t][h] as [T, H, D]."""
    numbers = np.array(numbers)
    return rows(numbers.reshape(len(numbers), -1), channel)


V1 = {"key": range(1, 11), "seq_lens": [10], "slots": [1], "cache": [[0] * 4] * 2}
V3 = {
    "key": [[10 * t, 10 * t + 1] for t in range(7)],
    "seq_lens": [4, 3],
    "slots": [0, 4, 8, 12],
    "cache": [EMPTY] * 6,
}
V9 = {"key": [[10 * (t + 1), 10 * (t + 1) + 1] for t in range(9)], "seq_lens": [2, 3, 4]}
V10 = {"key": range(1, 5), "seq_lens": [4], "slots": [1], "cache": [[0] * 4] * 2}
V11 = {"key": [[0, 1], [10, 11], [20, 21]], "seq_lens": [3], "cache": [[0] * 4] * 2}

COMPRESSED = {
    "V1 rope": (ROPE, V1, {"wins": [5], "offset_index": [3]}, [[0, 1, 2, 3], [6, 9, 10, 0]]),
    "V1 omni": (OMNI, V1, {"wins": [5], "offset_index": [3]}, [[0, 1, 2, 3], [9, 10, 0, 0]]),
    "V2 kvhead": (KVHEAD, V1, {"wins": [5]}, [[0, 6, 7, 8], [9, 10, 0, 0]]),
    "V3 kvhead": (
        KVHEAD, V3, {"wins": [2, 4, 1, 3]},
        [[20, 30, -1, -1], [1, 11, 21, 31], [60, -1, -1, -1], [41, 51, 61, -1], EMPTY, EMPTY],
    ),
    "V3 rope": (
        ROPE, V3, {"wins": [2, 3, 2, 0], "offset_index": [1, -1, 0, 2]},
        [[0, 15, 30, -1], [1, 11, 21, 31], [45, 60, -1, -1], [41, 51, 61, -1], EMPTY, EMPTY],
    ),
    "V3 omni": (
        OMNI, V3, {"wins": [2, 3, 2, 0], "offset_index": [1, -1, 0, 2]},
        [[0, 30, -1, -1], [1, 11, 21, 31], [60, -1, -1, -1], [41, 51, 61, -1], EMPTY, EMPTY],
    ),
    "V9 kvhead": (
        KVHEAD, V9 | {"slots": [0, 1, 2, 4, 6, 8], "cache": [[-1, -1]] * 5}, {"wins": [1, 1, 2, 2, 2, 2]},
        [[20, 21], [40, 50], [41, 51], [80, 90], [81, 91]],
    ),
    "V9 rope": (
        ROPE, V9 | {"slots": [0, 2, 4, 6, 9, 11], "cache": [EMPTY] * 3},
        {"wins": [1, 0, 2, 9, 3, 4], "offset_index": [1, 0, 1, -1, 0, 0]},
        [[10, 20, 11, 21], [30, 45, 31, 41], [51, 70, 90, 76]],
    ),
    "V10 copy": (KVHEAD, V10, {"wins": [0]}, [[0, 1, 2, 3], [4, 0, 0, 0]]),
    "V10 whole": (KVHEAD, V10, {"wins": [4]}, [[0, 1, 2, 3], [4, 0, 0, 0]]),
    "V10 skip": (KVHEAD, V10, {"wins": [0], "empty_window": "skip"}, [[0] * 4] * 2),
    "V11 kvhead": (KVHEAD, V11 | {"slots": [3, -1]}, {"wins": [2, 2]}, [[0, 0, 0, 10], [20, 0, 0, 0]]),
    "V11 rope": (
        ROPE, V11 | {"slots": [-7, 2]}, {"wins": [2, 2], "offset_index": [0, 0]},
        [[0, 0, 6, 21], [0, 0, 0, 0]],
    ),
}  # fmt: skip


def given(mode, data, channel, integer=np.int64, **more):
    """Return the arguments of a compressed call; value = -key, so that the two cannot be mixed up."""
    key = keys_of(data["key"], channel)
    cache = cache_of(data["cache"], channel)
    indices = {name: np.array(more.pop(name), integer) for name in ("wins", "offset_index") if name in more}
    lengths = np.array(more.pop("seq_lens", data["seq_lens"]), integer)
    slots = np.array(more.pop("slots", data["slots"]), integer)
    arguments = key, -key, cache, -cache, slots
    return arguments, {"compress_type": mode, "seq_lens": lengths, **indices, **more}


@pytest.mark.parametrize("name", COMPRESSED)
@channels
@index_types
def test_compressed(name, channel, integer):
    mode, data, more, after = COMPRESSED[name]
    arguments, keywords = given(mode, data, channel, integer, **more)
    results = ops.reshape_and_cache(*arguments, **keywords)
    assert results[0] is arguments[2]
    assert results[1] is arguments[3]
    assert np.array_equal(results[0], cache_of(after, channel))
    assert np.array_equal(results[1], -cache_of(after, channel))


@channels
def test_v1_append(channel):
    """A decoded token behind the run."""
    cache = cache_of([[0, 1, 2, 3], [6, 9, 10, 0]], channel)
    more = {"wins": [0], "seq_lens": [1], "offset_index": [-1]}
    ops.reshape_and_cache(keys_of([11], channel), None, cache, None, [7], compress_type=ROPE, **more)
    assert np.array_equal(cache, cache_of([[0, 1, 2, 3], [6, 9, 10, 11]], channel))


MEANS = {
    "even below": (np.float16, [1.0, 1.0009765625], 1.0),
    "even above": (np.float16, [1.0009765625, 1.001953125], 1.001953125),
    "bfloat16 even below": (ml_dtypes.bfloat16, [1.0, 1.0078125], 1.0),
    "bfloat16 even above": (ml_dtypes.bfloat16, [1.0078125, 1.015625], 1.015625),
    "order": (ml_dtypes.bfloat16, [2.0**24, 1, 1, -(2.0**24)], 0.0),
    "other order": (ml_dtypes.bfloat16, [2.0**24, -(2.0**24), 1, 1], 0.5),
    "division": (np.float32, [1, 1, 3], np.array(0x3FD55555, np.uint32).view(np.float32)),
    "no overflow": (np.float16, [40000, 40000], 40000),
    "zero": (np.float16, [-0.0, -0.0], 0.0),
}


@pytest.mark.parametrize("name", MEANS)
def test_v4_means(name):
    dtype, numbers, expected = MEANS[name]
    key = rows(numbers, CONSTANT, dtype)[:, None]
    caches = [np.full((1, 2, 1, DIM), -9, dtype) for _ in range(2)]
    more = {"wins": [len(numbers)], "seq_lens": [len(numbers)], "offset_index": [0]}
    ops.reshape_and_cache(key, key, *caches, [1], compress_type=ROPE, **more)
    after = np.full((1, 2, 1, DIM), -9, dtype)
    after[0, 1] = np.array(expected).astype(dtype)
    for cache in caches:
        assert_same(cache, after)


def test_v5_nz():
    key = np.arange(64, dtype=np.float16).reshape(2, 2, 16)
    cache = np.full((1, 2, 2, 16), -1, np.float16)
    ops.reshape_and_cache(key, None, cache, None, [0, 1], cache_format="NZ")
    for g, r, e in np.ndindex(2, 2, 16):
        assert cache[0, g, r, e] == 32 * r + 16 * g + e
    assert cache.ravel()[::16].tolist() == [0, 32, 16, 48]


def test_v6_negative_slots():
    key = np.array([[10, 11], [20, 21], [30, 31], [40, 41]], np.float16)[:, None]
    value = np.array([1, 2, 3, 4], np.float16)[:, None, None]
    caches = np.full((2, 2, 1, 2), 9, np.float16), np.full((2, 2, 1, 1), 9, np.float16)
    ops.reshape_and_cache(key, value, *caches, [3, -1, 0, -4])
    assert caches[0][:, :, 0].tolist() == [[[30, 31], [9, 9]], [[9, 9], [10, 11]]]
    assert caches[1][:, :, 0, 0].tolist() == [[3, 9], [9, 1]]


def test_v7_strides():
    fused = np.arange(12, dtype=np.float32).reshape(2, 3, 1, 2)
    store = np.full((2, 2, 2, 1, 2), -1, np.float32)
    slots = np.array([9, 2, 9, 1])[1::2]
    ops.reshape_and_cache(fused[:, 1], fused[:, 2], store[:, 0], store[:, 1], slots)
    after = [[[[-1, -1], [8, 9]], [[-1, -1], [10, 11]]], [[[2, 3], [-1, -1]], [[4, 5], [-1, -1]]]]
    assert store[:, :, :, 0].tolist() == after


def test_v8_nz_of_two_types():
    key = np.arange(64, dtype=np.int8).reshape(1, 2, 32)
    value = np.arange(100, 132).astype(ml_dtypes.bfloat16).reshape(1, 2, 16)
    key_cache, value_cache = np.full((2, 2, 3, 32), -1, np.int8), np.full((2, 2, 3, 16), -1, value.dtype)
    ops.reshape_and_cache(key, value, key_cache, value_cache, [4], cache_format="NZ")
    keys, values = np.full((2, 2, 3, 32), -1), np.full((2, 2, 3, 16), -1)
    keys[1, 0, 1], keys[1, 1, 1] = np.arange(32), np.arange(32, 64)
    values[1, 0, 1], values[1, 1, 1] = np.arange(100, 116), np.arange(116, 132)
    assert np.array_equal(key_cache, keys)
    assert np.array_equal(value_cache.astype(int), values)
    assert key_cache.ravel()[[224, 229, 320, 328, 351]].tolist() == [0, 5, 32, 40, 63]
    assert value_cache.ravel()[[112, 127, 160, 175]].astype(int).tolist() == [100, 115, 116, 131]


def call_of(arguments, **keywords):
    names = [array.name for array in OPERATORS["ascend.reshape_and_cache"].inputs]
    return Call("ascend.reshape_and_cache", dict(zip(names, arguments, strict=False)) | keywords)


@pytest.mark.parametrize("slots", [[0, 4], [1, 1], [0]], ids=str)
def test_v12_plain(slots):
    key, caches = np.ones((2, 1, 1), np.float16), np.full((2, 2, 2, 1, 1), 9, np.float16)
    refused(call_of((key, key, *caches, slots)), "slot_mapping")
    call_of((key, key, *caches, [-1, -1])).run()
    assert (caches == 9).all()


V12 = {
    "behind the end": (ROPE, V1, {"wins": [5], "offset_index": [3], "slots": [3]}, "slot_mapping"),
    "overlap": (KVHEAD, V3, {"wins": [2, 4, 1, 3], "slots": [0, 1, 8, 12]}, "slot_mapping"),
    "lengths": (KVHEAD, V3, {"wins": [2, 4, 1, 3], "seq_lens": [4, 2]}, "seq_lens"),
    "window": (KVHEAD, V3, {"wins": [5, 4, 1, 3]}, "wins"),
    "offset": (ROPE, V3, {"wins": [2, 3, 2, 0], "offset_index": [3, -1, 0, 2]}, "offset_index"),
}


@pytest.mark.parametrize("name", V12)
def test_v12_compressed(name):
    mode, data, more, argument = V12[name]
    arguments, keywords = given(mode, data, VARYING, **more)
    refused(call_of(arguments, **keywords), argument)


def test_v12_up_to_the_end():
    arguments, keywords = given(ROPE, V1, CONSTANT, wins=[5], offset_index=[3], slots=[2])
    call_of(arguments, **keywords).run()
    assert arguments[2][..., 0, 0].tolist() == [[0, 0, 1, 2], [3, 6, 9, 10]]


def test_v12_head_size():
    key, caches = np.ones((10, 1, 16), np.float16), np.full((2, 2, 4, 1, 16), 9, np.float16)
    refused(call_of((key, key, *caches, [1]), compress_type=KVHEAD, wins=[5], seq_lens=[10]), "key")


def test_v13_nhsd():
    key = np.array([[[1], [2]], [[3], [4]]], np.float32)
    cache = np.zeros((2, 2, 3, 1), np.float32)
    ops.reshape_and_cache(key, None, cache.transpose(0, 2, 1, 3), None, [4, 0])
    assert cache[..., 0].tolist() == [[[3, 0, 0], [4, 0, 0]], [[0, 1, 0], [0, 2, 0]]]


V14 = {
    "lengths": ([3, 5], None, [5, 6, 1, 7, 8, 0, 0, 3]),
    "sums": ([0, 3, 8], None, [5, 6, 1, 7, 8, 0, 0, 3]),
    "behind the table": ([7, 1], None, [5, 6, 1, 2, 0, 0, 0, 7]),
    "starts": ([2, 3], [2, 3], [1, 2, 0, 0, 3]),
}


@pytest.mark.parametrize("name", V14)
@index_types
def test_v14_load(name, integer):
    lengths, starts, expected = V14[name]
    cache = np.arange(1, 9, dtype=np.float32).reshape(4, 2, 1, 1)
    starts = None if starts is None else np.array(starts, integer)
    table = np.array([[2, 0, 9], [3, -1, 1]], integer)
    key, value = ops.paged_cache_load(cache, -cache, table, np.array(lengths, integer), starts)
    assert key[:, 0, 0].tolist() == expected
    assert (-value[:, 0, 0]).tolist() == expected


@pytest.mark.parametrize(("offset", "expected"), [(0, 2.0), (math.log(3) / 0.5, 1.5), (math.log(3), 3**0.5)])
def test_v15_attention(offset, expected):
    query, keys = np.ones((1, 2, 1), np.float32), np.zeros((2, 2, 1, 1), np.float32)
    values = np.array([[7, 99], [1, 3]], np.float32).reshape(2, 2, 1, 1)
    razor = np.zeros((2, 2), np.float32)
    razor[1, 0] = offset
    output = ops.paged_attention(
        query, keys, values, [[1], [0]], [2, 1], razor_offset=razor, softmax_scale=0.5
    )
    assert output[0, :, 0] == pytest.approx([expected, 7], rel=1e-6)


def test_v16_nz_of_a_matrix():
    y = ops.nd_to_nz(np.arange(1, 21, dtype=np.float32).reshape(1, 2, 10))
    after = np.zeros((1, 2, 16, 8))
    after[0, 0, 0], after[0, 0, 1] = np.arange(1, 9), np.arange(11, 19)
    after[0, 1, 0, :2], after[0, 1, 1, :2] = [9, 10], [19, 20]
    assert np.array_equal(y, after)


def test_v17_block_copy():
    cache = np.arange(10, 15, dtype=np.float32).reshape(5, 1, 1, 1)
    other = -cache
    assert ops.block_copy(cache, other, [4, 0], [1, 3, 2], [2, 3]) == (cache, other)
    assert cache.ravel().tolist() == [10, 14, 10, 14, 14]
    assert (-other).ravel().tolist() == [10, 14, 10, 14, 14]
