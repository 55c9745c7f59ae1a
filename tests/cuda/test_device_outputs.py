"""What is wrong with `out` is said by the twins of all operators in the same words."""

import copy
import functools

import numpy as np
import pytest
from device_arrays import Array

import kvkit
import kvkit_cuda
from kvkit import KvkitError

TOKENS, PACKED = np.ones((1, 3, 2, 4), np.float32), np.ones((3, 2, 4), np.float32)
STARTS, FIRST = np.array([0, 3]), np.array([0])
BLOCKS, TABLE, LENGTHS = np.ones((2, 4, 2, 4), np.float32), np.array([[1]]), np.array([3])
STATIC, DYNAMIC = np.zeros((1, 1, 2, 8, 2, 4), np.float32), np.zeros((8, 1, 2, 2, 4), np.float32)
STEP = STARTS, STARTS, FIRST, FIRST, None, None
HEADS = {"num_heads": 2, "head_dim": 4}
CALLS = {  # an operator of each kind: module, name, arguments, attributes
    "static append": ("", "key_value_cache", (TOKENS, TOKENS, 0, STATIC), {}),
    "append": ("dynamic_batching", "key_value_cache", (PACKED, PACKED, *STEP, DYNAMIC), {}),
    "attention": ("", "multi_head_attention", (TOKENS, TOKENS, TOKENS), HEADS),
    "attention and lse": ("", "multi_head_attention", (TOKENS, TOKENS, TOKENS), HEADS | {"return_lse": True}),
    "attention over a cache": (
        "", "multi_head_cache_attention", (TOKENS, TOKENS, TOKENS, 0, STATIC), HEADS | {"return_lse": True},
    ),
    "packed attention": (
        "dynamic_batching", "multi_head_attention",
        (PACKED, PACKED, PACKED, STARTS, STARTS, 0, None, None), HEADS,
    ),
    "merge": ("", "merge_attention_states", ([PACKED], [PACKED[..., 0]]), {}),
    "rotary": ("", "rotary_position_embedding", (TOKENS, TOKENS, 0), {}),
    "alibi": ("", "alibi_mask", (2, 3), {"num_heads": 2}),
    "slope": ("", "alibi_slope", (), {"num_heads": 2}),
    "positions": ("dynamic_batching", "position_index", (np.arange(3), STARTS, FIRST), {}),
    "blocks": ("ascend", "paged_cache_load", (BLOCKS, BLOCKS, TABLE, LENGTHS), {}),
    "keys in blocks": ("ascend", "paged_cache_load", (BLOCKS, None, TABLE, LENGTHS), {}),
    "paged attention": ("ascend", "paged_attention", (PACKED[:1], BLOCKS, BLOCKS, TABLE, LENGTHS), {}),
    "matrices": ("ascend", "nd_to_nz", (np.ones((1, 5, 6), np.float32),), {}),
}  # fmt: skip


def by(twin, name, **changes):
    """A call of one of the twins; its arrays are its own."""
    module, operator, arguments, attributes = copy.deepcopy(CALLS[name])
    arguments = changes.get("arguments", arguments)
    function = getattr(getattr(twin, module) if module else twin, operator)
    return functools.partial(function, *arguments, **attributes)


def arrays_of(results):
    return [results] if isinstance(results, np.ndarray) else [each for each in results if each is not None]


def like(results, arrays):
    """One array, or several, as results are."""
    return arrays[0] if isinstance(results, np.ndarray) else arrays


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


def each(array):
    """What an array of results may not be."""
    yield from (7, "x", array.tolist(), array.astype(np.complex64), array[None].copy(), array[..., :-1])
    yield read_only(array)
    yield np.broadcast_to(array.ravel()[:1], array.shape)
    yield np.repeat(array, 2, axis=-1)[..., ::2]


def wrongs(results):
    """What may be wrong with all of `out`."""
    there = arrays_of(results)
    for i, result in enumerate(there):
        for wrong in each(result):
            yield like(results, [*there[:i], wrong, *there[i + 1 :]])
    if isinstance(results, np.ndarray):
        yield from ((results,), [results, results], ())
    else:
        yield from (7, "x", there[0], (), there[:-1], (*there, None), [*there, there[0]], {"out": there[0]})
        yield [there[0]] * len(there)


def said(call, **more):
    """The message of the error; None if there is none."""
    try:
        call(**more)
    except KvkitError as error:
        return str(error)


@pytest.mark.parametrize("name", CALLS)
def test_wrong_outputs_are_refused_in_the_same_words(name):
    messages = []
    for out in wrongs(by(kvkit, name)()):
        messages.append(said(by(kvkit, name), out=out))
        assert said(by(kvkit_cuda, name), out=out) == messages[-1]
    assert len(set(messages)) > 8


@pytest.mark.parametrize("name", ["static append", "append"])
def test_what_is_wrong_first_is_said_first(name):
    """Outputs, before that the cache overlaps its tokens; or the size of results that nobody gives."""
    messages = []
    for twin in (kvkit, kvkit_cuda):
        arguments = list(copy.deepcopy(CALLS[name][2]))
        arguments[0] = arguments[-1].reshape(-1)[: TOKENS.size].reshape(arguments[0].shape)
        call = by(twin, name, arguments=arguments)
        messages.append([said(call, out=7), said(call), said(call, num_repeat=2**61)])
    assert messages[0] == messages[1]
    assert [message.partition(":")[0] for message in messages[0]] == ["out", "cache", "num_repeat"]


@pytest.mark.parametrize("name", CALLS)
def test_arrays_of_the_device_have_the_same_names(name):
    """Also where only they can be wrong."""
    results, labels = by(kvkit, name)(), []
    there = arrays_of(results)
    for i, result in enumerate(there):

        def among(wrong, i=i):
            return like(results, [*there[:i], wrong, *there[i + 1 :]])

        expected = said(by(kvkit, name), out=among(result[..., None])).partition(": ")[0]
        masked = among(Array(result, mask=Array(result)))
        message = f"{expected}: expected an array without a mask, got one with a mask"
        assert said(by(kvkit_cuda, name), out=masked) == message
        labels.append(expected)
    assert len(set(labels)) == len(there)
