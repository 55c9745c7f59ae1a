"""The outputs of every operator: given arrays are used, and one place says what is wrong with them."""

import numpy as np
import pytest

import kvkit
from kvkit import KvkitError
from kvkit.operators import OPERATORS

X4, X3 = np.ones((2, 3, 2, 8), np.float32), np.ones((4, 2, 8), np.float32)
STARTS, PAST = np.array([0, 3, 4]), np.array([0, 0])
BLOCKS = np.ones((3, 4, 2, 8), np.float32)
SIZES, LSE = {"num_heads": 2, "head_dim": 8}, {"num_heads": 2, "head_dim": 8, "return_lse": True}
STATIC = np.zeros((2, 1, 2, 8, 2, 8), np.float32)
POOL = np.zeros((16, 1, 2, 2, 8), np.float32)
IN_POOL = {"seqstarts": STARTS, "kvstarts": STARTS, "cachestarts": np.array([8, 4]), "start_pos": PAST}
IN_POOL |= {"max_seqlen": None, "max_kvlen": None, "cache": POOL}
NEW4, NEW3 = ({"current_key": x, "current_value": 2 * x} for x in (X4, X3))
PACKED = {"query": X3, "key": X3 + 1, "value": X3 + 2, "seqstarts": STARTS, "kvstarts": STARTS}
PACKED |= {"decoding_batches": 0, "max_seqlen": None, "max_kvlen": None}
PARTS = {"outputs": [X3, 2 * X3], "lses": [X3[..., 0], 2 * X3[..., 0]]}
PAGED = {"key_cache": BLOCKS, "value_cache": 2 * BLOCKS, "block_tables": np.array([[0, 1], [2, -1]])}
IN_PAGES = PAGED | {"query": X3, "context_lens": np.array([5, 2]), "query_starts": STARTS}
STATIC_CALL = {"query": X4, **NEW4, "start_pos": 0, "cache": STATIC}
MASK = np.ones((2, 2, 3, 5), np.float32)
CALLS = {
    "key_value_cache": NEW4 | {"start_pos": 0, "cache": STATIC},
    "multi_head_attention": {"query": X4, "key": X4 + 1, "value": X4 + 2, **SIZES},
    "multi_head_attention and lse": {"query": X4, "key": X4 + 1, "value": X4 + 2, **LSE},
    "multi_head_cache_attention": STATIC_CALL | SIZES,
    "multi_head_cache_attention and lse": STATIC_CALL | LSE,
    "merge_attention_states": PARTS,
    "rotary_position_embedding": {"query": X4, "key": X4[:, :, :1] + 1, "start_pos": 0},
    "alibi_slope": {"num_heads": 3},
    "alibi_mask": {"seqlen_q": 3, "seqlen_kv": 5, "attn_mask": MASK, "num_heads": 2},
    "dynamic_batching.key_value_cache": NEW3 | IN_POOL,
    "dynamic_batching.multi_head_attention": PACKED | SIZES,
    "dynamic_batching.multi_head_attention and lse": PACKED | LSE,
    "dynamic_batching.multi_head_cache_attention": {"query": X3, "decoding_batches": 0}
    | NEW3
    | IN_POOL
    | SIZES,
    "dynamic_batching.multi_head_cache_attention and lse": {"query": X3, "decoding_batches": 0}
    | NEW3
    | IN_POOL
    | LSE,
    "dynamic_batching.position_index": {"sequences": np.arange(4), "seqstarts": STARTS, "start_pos": PAST},
    "dynamic_batching.rotary_position_embedding": {"query": X3, "key": X3[:, :1] + 1, "seqstarts": STARTS}
    | {"start_pos": PAST, "max_seqlen": None},
    "dynamic_batching.alibi_mask": {"seqstarts": STARTS, "kvstarts": STARTS, "num_heads": 2}
    | {"attn_mask": np.ones((2, 4, 4), np.float32)},
    "ascend.paged_cache_load": PAGED | {"seq_lens": np.array([5, 2])},
    "ascend.paged_attention": PAGED | {"query": X3[:2], "context_lens": np.array([5, 2])},
    "ascend.paged_attention and lse": PAGED
    | {"query": X3[:2], "context_lens": np.array([5, 2]), "return_lse": True},
    "paged_attention": IN_PAGES,
    "paged_attention and lse": IN_PAGES | {"return_lse": True},
    "ascend.nd_to_nz": {"x": X3},
    "ascend.nz_to_nd": {"y": np.ones((2, 1, 16, 8), np.float32), "m": 3, "n": 8},
}
calls = pytest.mark.parametrize("name", CALLS)


def operator(name):
    """The function, and copies of its arguments."""
    given = {
        key: [array.copy() for array in value] if isinstance(value, list) else np.copy(value)
        for key, value in CALLS[name].items()
        if isinstance(value, (np.ndarray, list))
    }
    return OPERATORS[name.split()[0]].function(), CALLS[name] | given


def made(name):
    """(labels, new arrays) of a call."""
    run, arguments = operator(name)
    results = run(**arguments)
    if not isinstance(results, tuple):
        return ["out"], [results]
    returned = OPERATORS[name.split()[0]].returned({"return_lse": "lse" in name})
    return [f"out ({each})" for each in returned], list(results)


def refused(name, out, arguments=None):
    run, legal = operator(name)
    with pytest.raises(KvkitError) as error:
        run(**legal | (arguments or {}), out=out)
    return str(error.value)


def test_every_operator_with_outputs_is_here():
    assert {name.split()[0] for name in CALLS} == {name for name, op in OPERATORS.items() if op.outputs}
    optional = {name for name, op in OPERATORS.items() if any(output.only_with for output in op.outputs)}
    assert {name.split()[0] for name in CALLS if name.endswith(" and lse")} == optional - {
        "merge_attention_states"
    }


@calls
def test_given_arrays_come_back_with_the_bits_of_new_ones(name):
    _, expected = made(name)
    run, arguments = operator(name)
    given = [np.full_like(array, 77) for array in expected]
    got = run(**arguments, out=given[0] if len(given) == 1 else tuple(given))
    for array, one, other in zip(got if len(given) > 1 else [got], given, expected, strict=True):
        assert array is one
        assert array.tobytes() == other.tobytes()


@calls
def test_what_is_wrong_with_each_output(name):
    labels, arrays = made(name)
    for i, (label, array) in enumerate(zip(labels, arrays, strict=True)):
        fixed = array.copy()
        fixed.flags.writeable = False
        others = {
            f"{label}: expected a numpy array, got str 'no'": "no",
            f"{label}: expected dtype {array.dtype}, got int16": np.zeros(array.shape, np.int16),
            f"{label}: expected {array.ndim} axes, got shape {(1, *array.shape)}": array[None],
            f"{label}: expected shape {array.shape}, got {(9, *array.shape[1:])}": np.zeros(
                (9, *array.shape[1:]), array.dtype
            ),
            f"{label}: expected a writeable array, got a read-only one": fixed,
        }
        for message, wrong in others.items():
            out = [*arrays[:i], wrong, *arrays[i + 1 :]]
            assert refused(name, out[0] if len(out) == 1 else tuple(out)) == message


@calls
def test_another_number_of_outputs(name):
    labels, arrays = made(name)
    if len(labels) == 1:
        return
    names = ", ".join(label[len("out (") : -1] for label in labels)
    wanted = f"out: expected a tuple of {len(labels)} arrays ({names}), got "
    for out in (arrays[0], arrays[:1], (*arrays, arrays[0]), 1):
        assert refused(name, out).startswith(wanted)


@calls
def test_outputs_lie_apart_from_each_other_and_from_inputs(name):
    labels, arrays = made(name)
    if len(labels) > 1:
        room = np.zeros(2 * max(array.size for array in arrays), np.float32)
        out = tuple(room[: array.size].reshape(array.shape) for array in arrays)
        assert (
            refused(name, out)
            == f"{labels[0]}: expected memory apart from {labels[1]}, got arrays that overlap"
        )
    _, arguments = operator(name)
    size = max(array.size for array in arrays)
    for given, value in arguments.items():
        inputs = value if isinstance(value, list) else [value]
        if not isinstance(inputs[0], np.ndarray) or inputs[0].dtype != np.float32:
            continue
        for i, label in enumerate(labels):
            room = np.zeros(inputs[0].size + size, np.float32)
            moved = room[: inputs[0].size].reshape(inputs[0].shape)
            moved[...] = inputs[0]
            begin = inputs[0].size - 1  # one element is in both
            out = [array.copy() for array in arrays]
            out[i] = room[begin : begin + out[i].size].reshape(out[i].shape)
            changed = {given: [moved, *inputs[1:]] if isinstance(value, list) else moved}
            message = refused(name, out[0] if len(out) == 1 else tuple(out), changed)
            known = f"{given}[0]" if isinstance(value, list) else given
            assert message == f"{label}: expected memory apart from {known}, got arrays that overlap"


def test_keys_alone_are_one_of_two_outputs():
    run, arguments = operator("ascend.paged_cache_load")
    arguments |= {"value_cache": None}
    expected, nothing = run(**arguments)
    given = np.empty_like(expected)
    key, value = run(**arguments, out=(given, None))
    assert key is given
    assert nothing is value is None
    assert key.tobytes() == expected.tobytes()
    with pytest.raises(KvkitError, match=r"^out \(key\): expected dtype float32, got float16$"):
        run(**arguments, out=(given.astype(np.float16),))
    with pytest.raises(KvkitError, match=r"^out: expected a tuple of 1 arrays \(key\), got an array"):
        run(**arguments, out=given)


def test_an_output_may_be_its_own_input_where_that_is_said():
    tokens = np.arange(32, dtype=np.float32).reshape(4, 1, 8)
    expected = kvkit.dynamic_batching.rotary_position_embedding(tokens, 2 * tokens, STARTS, PAST, None)
    query, key = tokens.copy(), 2 * tokens
    got = kvkit.dynamic_batching.rotary_position_embedding(query, key, STARTS, PAST, None, out=(query, key))
    assert got[0] is query
    assert got[1] is key
    assert [array.tobytes() for array in got] == [array.tobytes() for array in expected]
