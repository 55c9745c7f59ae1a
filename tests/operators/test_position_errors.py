"""What the position operators do not take; each argument alone is broken in `test_refusals.py`."""

import numpy as np
import pytest
import refusals
from calls import CALLS
from scenes import INT64_MAX, INT64_MIN

rotary = pytest.mark.parametrize("operator", ["static rotary", "rotary"])
X = CALLS["static rotary"]()["query"]


def refused(operator, name, **changes):
    more = {"out": changes.pop("out")} if "out" in changes else {}
    refusals.refused(CALLS[operator]().but(**changes), name, **more)


# Plain values


@rotary
def test_numbers_of_every_scaling(operator):
    for kind in ("linear", "dynamic"):
        for name in ("theta", "scaling_factor"):
            for value in (0.0, -1.0, np.nan, np.inf, None, 1e39):
                refused(operator, name, **{name: value, "scaling_type": kind})


def test_a_mask_larger_than_an_array():
    refused("static alibi", "seqlen_q", seqlen_q=2**70)
    refused("static alibi", "seqlen_kv", seqlen_q=2**40, seqlen_kv=2**40, attn_mask=None)
    huge = np.array([0, 2**61])
    refused("alibi", "kvstarts", seqstarts=huge, kvstarts=huge, attn_mask=None)


# Queries and keys


@rotary
def test_key_unlike_query(operator):
    key = CALLS[operator]()["key"]
    for wrong in (key.astype(np.float16), key[..., :6], key[:1], np.concatenate([key, key])):
        refused(operator, "key", key=wrong)


@rotary
def test_odd_heads(operator):
    odd = {name: CALLS[operator]()[name][..., :7] for name in ("query", "key")}
    refused(operator, "rotary_dim", **odd)
    CALLS[operator]().but(**odd, rotary_dim=6).run()


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
    "start_pos_negative": ("start_pos", {"start_pos": [0, -1]}),
    "start_pos_smallest": ("start_pos", {"start_pos": [INT64_MIN, 0]}),
    "start_pos_too_far": ("start_pos", {"start_pos": [INT64_MAX - 1, 0]}),
    "max_seqlen_too_small": ("max_seqlen", {"max_seqlen": 1}),
    "max_seqlen_negative": ("max_seqlen", {"max_seqlen": -(2**80)}),
    "max_seqlen_a_float": ("max_seqlen", {"max_seqlen": 2.0}),
}


@pytest.mark.parametrize("operator", ["rotary", "positions"])
@pytest.mark.parametrize("case", PACKED)
def test_packed_sequences(operator, case):
    name, changes = PACKED[case]
    refused(operator, name, **changes)


@pytest.mark.parametrize("longest", [None, 2, 3, 2**80, np.int32(2), np.array([2])], ids=repr)
def test_legal_hints(longest):
    for operator in ("rotary", "positions"):
        CALLS[operator]().but(max_seqlen=longest).run()


def test_the_last_positions(backend):
    got = backend.dynamic_batching.position_index([0, 0], [0, 2], [INT64_MAX - 2])
    assert got.tolist() == [INT64_MAX - 2, INT64_MAX - 1]
    refused("static rotary", "start_pos", start_pos=INT64_MAX - 2)
    backend.rotary_position_embedding(X, X, INT64_MAX - 3)


@pytest.mark.parametrize("value", [[0, -1], [INT64_MIN, 0]], ids=repr)
def test_pad_len(value):
    refused("static rotary", "pad_len", pad_len=np.array(value))


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
    refused("alibi", name, **changes)


# Masks


@pytest.mark.parametrize("shape", [(5,), (3, 4), (3, 1), (2, 5), (2, 3, 5), (2, 3, 3, 5), (1, 2, 4, 3, 5)])
def test_masks_that_do_not_fit(shape):
    refused("static alibi", "attn_mask", attn_mask=np.zeros(shape, np.float32))


@pytest.mark.parametrize(
    "shape", [(3, 5), (3, 16), (1, 5), (4, 3, 5), (1, 3, 5), (2, 4, 3, 5), (2, 1, 3, 8), (1, 1, 1, 5)]
)
def test_masks_that_fit(shape):
    CALLS["static alibi"]().but(attn_mask=np.zeros(shape, np.float32)).run()


@pytest.mark.parametrize("shape", [(4,), (4, 8), (3, 9), (1, 9), (3, 4, 9), (1, 2, 4, 9)])
def test_dynamic_masks_that_do_not_fit(shape):
    refused("alibi", "attn_mask", attn_mask=np.zeros(shape, np.float32))


# Outputs


@rotary
def test_outputs_over_inputs(operator):
    """An output may be its own input, exactly; it may not overlap it otherwise, nor the other one."""
    shape = CALLS[operator]()["query"].shape
    room = np.ones(2 * int(np.prod(shape)) + 8, np.float32)
    count = int(np.prod(shape))
    query, shifted = room[:count].reshape(shape), room[8 : count + 8].reshape(shape)
    key, other = room[count + 8 :].reshape(shape)[..., :1, :], np.ones(shape, np.float32)
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
    CALLS[operator]().but(query=query, key=key).run(out=(query, key))
