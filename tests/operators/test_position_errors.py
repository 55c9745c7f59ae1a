"""Every error of the position operators: named, said in one form, and nothing written."""

import numpy as np
import pytest
from refusals import NO_ARRAYS, swapped
from scenes import INT64_MAX, INT64_MIN
from test_errors import NOT_INTEGERS

import kvkit
from kvkit import KvkitError

dynamic = kvkit.dynamic_batching
NOT_NUMBERS = [0.0, -1.0, np.nan, np.inf, True, None, "1", [1.0], 1j, 1e39]
X = np.ones((2, 3, 2, 8), np.float32)
STATIC = {"query": X, "key": X[:, :, :1], "start_pos": 4}
DYNAMIC = {
    "query": X[0],
    "key": X[0, :, :1],
    "seqstarts": np.array([0, 2, 3]),
    "start_pos": np.array([0, 4]),
    "max_seqlen": 2,
}
INDEX = {
    "sequences": np.zeros(3, np.int64),
    "seqstarts": np.array([0, 2, 3]),
    "start_pos": np.array([0, 4]),
    "max_seqlen": 2,
}
MASK = {"seqlen_q": 3, "seqlen_kv": 5, "num_heads": 4}
PACKED_MASK = {"seqstarts": np.array([0, 1, 4]), "kvstarts": np.array([0, 4, 9]), "num_heads": 2}
OPERATORS = {
    "rotary": (kvkit.rotary_position_embedding, STATIC),
    "dynamic_rotary": (dynamic.rotary_position_embedding, DYNAMIC),
    "position_index": (dynamic.position_index, INDEX),
    "alibi_slope": (kvkit.alibi_slope, {"num_heads": 4}),
    "alibi_mask": (kvkit.alibi_mask, MASK),
    "dynamic_alibi_mask": (dynamic.alibi_mask, PACKED_MASK),
}


def refused(operator, name, **changes):
    """The call raises an error about `name` that says what was expected and got; no output changes."""
    function, legal = OPERATORS[operator]
    out = changes.get("out")
    outputs = [a for a in (out if isinstance(out, tuple) else (out,)) if isinstance(a, np.ndarray)]
    before = [array.tobytes() for array in outputs]
    with pytest.raises(KvkitError) as error:
        function(**{**legal, **changes})
    message = str(error.value)
    assert message.startswith(name), message
    assert ": expected " in message
    assert ", got " in message
    assert [array.tobytes() for array in outputs] == before


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_calls_to_be_broken_are_legal(operator):
    function, legal = OPERATORS[operator]
    function(**legal)


# Plain values

INTEGERS = [
    ("rotary", "start_pos"),
    ("rotary", "rotary_dim"),
    ("dynamic_rotary", "rotary_dim"),
    ("rotary", "max_position_embeddings"),
    ("dynamic_rotary", "max_position_embeddings"),
    ("alibi_slope", "num_heads"),
    ("alibi_mask", "num_heads"),
    ("dynamic_alibi_mask", "num_heads"),
    ("alibi_mask", "seqlen_q"),
    ("alibi_mask", "seqlen_kv"),
]


@pytest.mark.parametrize(("operator", "name"), INTEGERS)
@pytest.mark.parametrize("value", [*NOT_INTEGERS, -1], ids=repr)
def test_integers(operator, name, value):
    refused(operator, name, **{name: value})


@pytest.mark.parametrize("operator", ["rotary", "dynamic_rotary"])
@pytest.mark.parametrize("name", ["theta", "scaling_factor"])
@pytest.mark.parametrize("value", NOT_NUMBERS, ids=repr)
def test_numbers(operator, name, value):
    for kind in ("", "linear", "dynamic"):
        refused(operator, name, **{name: value, "scaling_type": kind})


ATTRIBUTES = {
    "rotary_dim_odd": {"rotary_dim": 3},
    "rotary_dim_beyond_the_head": {"rotary_dim": 10},
    "max_position_embeddings_0": {"max_position_embeddings": 0},
    "bypass_key_2": {"bypass_key": 2},
    "bypass_key_none": {"bypass_key": None},
    "scaling_type_unknown": {"scaling_type": "yarn"},
    "scaling_type_none": {"scaling_type": None},
    "scaling_type_bytes": {"scaling_type": b"linear"},
}


@pytest.mark.parametrize("operator", ["rotary", "dynamic_rotary"])
@pytest.mark.parametrize("case", ATTRIBUTES)
def test_attributes(operator, case):
    change = ATTRIBUTES[case]
    refused(operator, next(iter(change)), **change)


@pytest.mark.parametrize("operator", ["alibi_mask", "dynamic_alibi_mask"])
@pytest.mark.parametrize("value", ["float64", "int8", "int4", "fp16", "", None, np.float32, 16], ids=repr)
def test_data_type(operator, value):
    refused(operator, "data_type", data_type=value)


@pytest.mark.parametrize("operator", ["alibi_slope", "alibi_mask", "dynamic_alibi_mask"])
def test_no_heads(operator):
    refused(operator, "num_heads", num_heads=0)


def test_a_mask_larger_than_an_array():
    refused("alibi_mask", "seqlen_q", seqlen_q=2**70)
    refused("alibi_mask", "seqlen_kv", seqlen_q=2**40, seqlen_kv=2**40)
    huge = np.array([0, 2**61])
    refused("dynamic_alibi_mask", "kvstarts", seqstarts=huge, kvstarts=huge)


# Queries and keys


@pytest.mark.parametrize("operator", ["rotary", "dynamic_rotary"])
@pytest.mark.parametrize("name", ["query", "key"])
@pytest.mark.parametrize("make", NO_ARRAYS.values(), ids=NO_ARRAYS)
def test_no_arrays(operator, name, make):
    refused(operator, name, **{name: make(X)})


@pytest.mark.parametrize("operator", ["rotary", "dynamic_rotary"])
@pytest.mark.parametrize("name", ["query", "key"])
def test_arrays_of_other_types_or_shapes(operator, name):
    array = OPERATORS[operator][1][name]
    for wrong in (array.astype(np.float64), array.astype(np.int8), swapped(array), array[0], array[None]):
        refused(operator, name, **{name: wrong})
    empty = {other: OPERATORS[operator][1][other][..., :0, :] for other in ("query", "key")}
    refused(operator, name, **{name: empty[name]})
    refused(operator, "query", **{other: array[..., :0] for other, array in empty.items()})


@pytest.mark.parametrize("operator", ["rotary", "dynamic_rotary"])
def test_key_unlike_query(operator):
    key = OPERATORS[operator][1]["key"]
    for wrong in (key.astype(np.float16), key[..., :6], key[:1], np.concatenate([key, key])):
        refused(operator, "key", key=wrong)


@pytest.mark.parametrize("operator", ["rotary", "dynamic_rotary"])
def test_odd_heads(operator):
    odd = {name: OPERATORS[operator][1][name][..., :7] for name in ("query", "key")}
    refused(operator, "rotary_dim", **odd)
    OPERATORS[operator][0](**{**OPERATORS[operator][1], **odd}, rotary_dim=6)


# Index tensors

PACKED = {
    "seqstarts_not_from_0": ("seqstarts", {"seqstarts": [1, 2, 3]}),
    "seqstarts_decrease": ("seqstarts", {"seqstarts": [0, 4, 3], "max_seqlen": None}),
    "seqstarts_wrap": (
        "seqstarts",
        {"seqstarts": [0, INT64_MAX, INT64_MIN, 3], "start_pos": [0, 0, 0], "max_seqlen": None},
    ),
    "seqstarts_too_short": ("seqstarts", {"seqstarts": [0, 1, 2]}),
    "seqstarts_too_long": ("seqstarts", {"seqstarts": [0, 2, 4]}),
    "seqstarts_empty": ("seqstarts", {"seqstarts": [], "start_pos": []}),
    "seqstarts_of_two_axes": ("seqstarts", {"seqstarts": [[0, 2, 3]]}),
    "seqstarts_of_floats": ("seqstarts", {"seqstarts": np.array([0.0, 2.0, 3.0])}),
    "seqstarts_none": ("seqstarts", {"seqstarts": None}),
    "start_pos_negative": ("start_pos", {"start_pos": [0, -1]}),
    "start_pos_smallest": ("start_pos", {"start_pos": [INT64_MIN, 0]}),
    "start_pos_of_too_many": ("start_pos", {"start_pos": [0, 0, 0]}),
    "start_pos_of_too_few": ("start_pos", {"start_pos": [0]}),
    "start_pos_a_number": ("start_pos", {"start_pos": np.array(0)}),
    "start_pos_of_floats": ("start_pos", {"start_pos": np.array([0.0, 1.0])}),
    "start_pos_too_far": ("start_pos", {"start_pos": [INT64_MAX - 1, 0]}),
    "max_seqlen_too_small": ("max_seqlen", {"max_seqlen": 1}),
    "max_seqlen_negative": ("max_seqlen", {"max_seqlen": -(2**80)}),
    "max_seqlen_a_float": ("max_seqlen", {"max_seqlen": 2.0}),
}


@pytest.mark.parametrize("operator", ["dynamic_rotary", "position_index"])
@pytest.mark.parametrize("case", PACKED)
def test_packed_sequences(operator, case):
    name, changes = PACKED[case]
    refused(operator, name, **changes)


@pytest.mark.parametrize("longest", [None, 2, 3, 2**80, np.int32(2), np.array([2])], ids=repr)
def test_legal_hints(longest):
    for operator in ("dynamic_rotary", "position_index"):
        function, legal = OPERATORS[operator]
        function(**{**legal, "max_seqlen": longest})


def test_the_last_positions():
    got = dynamic.position_index([0, 0], [0, 2], [INT64_MAX - 2])
    assert got.tolist() == [INT64_MAX - 2, INT64_MAX - 1]
    refused("rotary", "start_pos", start_pos=INT64_MAX - 2)
    kvkit.rotary_position_embedding(X, X, INT64_MAX - 3)


def test_sequences():
    for wrong in (np.zeros(3), np.zeros((3, 1), np.int64), None, np.zeros(3, bool)):
        refused("position_index", "sequences", sequences=wrong)
    refused("position_index", "seqstarts", sequences=np.zeros(4, np.int64))


@pytest.mark.parametrize(
    "value", [[0], [0, 0, 0], [0, -1], [[0, 0]], 0, [0.0, 1.0], [INT64_MIN, 0]], ids=repr
)
def test_pad_len(value):
    refused("rotary", "pad_len", pad_len=np.array(value))


MASK_STARTS = {
    "seqstarts_not_from_0": ("seqstarts", {"seqstarts": [1, 1, 4]}),
    "seqstarts_decrease": ("seqstarts", {"seqstarts": [0, 4, 1]}),
    "kvstarts_decrease": ("kvstarts", {"kvstarts": [0, 4, 1]}),
    "kvstarts_of_other_sequences": ("kvstarts", {"kvstarts": [0, 4]}),
    "seqstarts_empty": ("seqstarts", {"seqstarts": []}),
    "kvstarts_none": ("kvstarts", {"kvstarts": None}),
}


@pytest.mark.parametrize("case", MASK_STARTS)
def test_sequences_of_a_mask(case):
    name, changes = MASK_STARTS[case]
    refused("dynamic_alibi_mask", name, **changes)


# Masks


@pytest.mark.parametrize("shape", [(5,), (3, 4), (3, 1), (2, 5), (2, 3, 5), (2, 3, 3, 5), (1, 2, 4, 3, 5)])
def test_masks_that_do_not_fit(shape):
    refused("alibi_mask", "attn_mask", attn_mask=np.zeros(shape, np.float32))


@pytest.mark.parametrize(
    "shape", [(3, 5), (3, 16), (1, 5), (4, 3, 5), (1, 3, 5), (2, 4, 3, 5), (2, 1, 3, 8), (1, 1, 1, 5)]
)
def test_masks_that_fit(shape):
    kvkit.alibi_mask(**MASK, attn_mask=np.zeros(shape, np.float32))


@pytest.mark.parametrize("shape", [(4,), (4, 8), (3, 9), (1, 9), (3, 4, 9), (1, 2, 4, 9)])
def test_dynamic_masks_that_do_not_fit(shape):
    refused("dynamic_alibi_mask", "attn_mask", attn_mask=np.zeros(shape, np.float32))


@pytest.mark.parametrize("operator", ["alibi_mask", "dynamic_alibi_mask"])
def test_masks_of_other_types(operator):
    mask = np.zeros((4, 16), np.float32)
    for wrong in (mask.astype(np.float64), mask.astype(np.int8), swapped(mask), mask.tolist(), 0.0):
        refused(operator, "attn_mask", attn_mask=wrong)


# Outputs

SHAPES = {
    "alibi_slope": ((4,), np.float32),
    "alibi_mask": ((4, 3, 16), np.float32),
    "dynamic_alibi_mask": ((2, 4, 16), np.float32),
    "position_index": ((3,), np.int64),
}


@pytest.mark.parametrize("operator", SHAPES)
def test_outputs(operator):
    shape, dtype = SHAPES[operator]
    function, legal = OPERATORS[operator]
    out = np.zeros(shape, dtype)
    assert function(**legal, out=out) is out
    fixed = np.zeros(shape, dtype)
    fixed.flags.writeable = False
    apart = np.zeros((*shape, 2), dtype)[..., 0]
    for wrong in (fixed, apart, out[1:], out[None], out.astype(np.float16), swapped(out), (out,), 1):
        refused(operator, "out", out=wrong)


def test_an_output_over_the_mask():
    mask = np.zeros((4, 3, 16), np.float32)
    refused("alibi_mask", "out", attn_mask=mask, out=mask)
    mask = np.zeros((2, 4, 16), np.float32)
    refused("dynamic_alibi_mask", "out", attn_mask=mask[1], out=mask)


@pytest.mark.parametrize("operator", ["rotary", "dynamic_rotary"])
def test_rotary_outputs(operator):
    legal = OPERATORS[operator][1]
    query, key = (np.zeros(legal[name].shape, np.float32) for name in ("query", "key"))
    fixed = query.copy()
    fixed.flags.writeable = False
    apart = np.zeros((*query.shape, 2), np.float32)[..., 0]
    for wrong in (query, (query,), (query, key, key), 1):
        refused(operator, "out", out=wrong)
    for wrong in (fixed, apart, query[:1], query[None], query.astype(np.float16), swapped(query), None, 1):
        refused(operator, "out (query)", out=(wrong, key))
    for wrong in (query, key.astype(np.float16), None):
        refused(operator, "out (key)", out=(query, wrong))
    refused(operator, "out (query)", out=(query, query[..., :1, :]))


@pytest.mark.parametrize("operator", ["rotary", "dynamic_rotary"])
def test_outputs_over_inputs(operator):
    """An output may be its own input, exactly; it may not overlap it otherwise, nor the other one."""
    shape = OPERATORS[operator][1]["query"].shape
    room = np.ones(2 * int(np.prod(shape)) + 8, np.float32)
    count = int(np.prod(shape))
    query, shifted = room[:count].reshape(shape), room[8 : count + 8].reshape(shape)
    key, other = room[count + 8 :].reshape(shape)[..., :1, :], np.ones(shape, np.float32)
    run, legal = OPERATORS[operator]
    legal = {**legal, "query": query, "key": key}
    for outputs, name in (
        ((shifted, key), "out (query)"),
        ((query[::-1], key), "out (query)"),
        ((key.base[:count].reshape(shape)[::-1], other[..., :1, :]), "out (query)"),
        ((other, query[..., :1, :]), "out (key)"),
        ((other, key[::-1]), "out (key)"),
    ):
        refused(operator, name, query=query, key=key, out=outputs)
    refused(operator, "out", query=query, key=query, out=(query, other))
    refused(operator, "out", query=query, key=query, out=(query, query))
    run(**legal, out=(query, key))
