"""Make legal calls to break, and check that a broken one is refused by name and changes nothing."""

import re

import attention_scenes
import backends
import numpy as np
import plan_scenes
import pytest
import scenes
from scenes import INT64_MAX, INT64_MIN, MOVED, Formats

import kvkit
from kvkit import KvkitError

FLOAT = MOVED[0]
BEGIN = r"[-\w'\"(\[{<>|]"  # of what is expected, and of what is there
INT8 = Formats("fp16", "int8", "fp32", 8, 8, (24,))
INT4 = Formats("fp32", "int8", "fp16", 4, 8, (24,))
KINDS = ("static", "dynamic")
BY_PLAN = "dynamic_batching.multi_head_cache_attention", "dynamic_batching.key_value_cache"
kinds = pytest.mark.parametrize("kind", KINDS)


def legal(kind, formats=INT8, **choices):
    """Return a legal call; dynamic: (3 past, 2 new), (0, 0), (4, 0) and (0, 3) tokens in pages of 3."""
    rng = np.random.default_rng(3)
    if kind == "static":
        return scenes.static(rng, formats, **choices)
    lengths = [(3, 2), (0, 0), (4, 0), (0, 3)]
    scene = scenes.dynamic(rng, formats, 0, 1, lengths=lengths, dim=choices.get("dim"))
    pages = np.array([[30, 3, -1], [-1, -1, -1], [30, 12, INT64_MAX], [20, -1, INT64_MAX]])
    shape = {name: (34, *scene[name].shape[1:]) for name in ("cache", "scale") if scene[name] is not None}
    arrays = {name: np.resize(scene[name], shape[name]) for name in shape}
    order = {"seqstarts": [0, 2, 2, 2, 5], "kvstarts": [0, 5, 5, 9, 12], "start_pos": [3, 0, 4, 0]}
    steps = {name: np.array(values) for name, values in order.items()}
    return scene.but(**arrays, **steps, cachestarts=pages, max_seqlen=3, max_kvlen=5)


def legal_attention(kind, formats=attention_scenes.FP32, **options):
    """Return legal attention: 2 sequences, 4 heads over 2, 3 queries, 5 keys; dynamic: 3 sequences."""
    rng = np.random.default_rng(3)
    options = {"dim": 8, **options}
    if kind.startswith("static"):
        return getattr(attention_scenes, kind)(rng, formats, 2, 3, **options)
    pages = {"page_size": 3} if kind == "dynamic_cache" else {}
    return getattr(attention_scenes, kind)(rng, formats, [(2, 3), (0, 0), (4, 1)], **pages, **options)


def says_by_plan(by_plan, message):
    """A call first compares its tokens with seqstarts. A plan does so last, and first finds other faults."""
    count = re.match(r"seqstarts: expected to end with the (\d+) tokens of ", message)
    shape = re.match(r"current_(?:key: expected|value: expected the) shape .*?\((\d+), ", by_plan)
    if count and shape:
        return count[1] == shape[1]
    return count and by_plan.startswith("kvstarts: expected a length of start_pos + new tokens = ")


def refuses(run, name, *arrays):
    """Check that a function raises an error about `name`, or one of them, and changes no byte of arrays.

    It says what was expected and got.
    """
    before = [array.tobytes() for array in arrays]
    with pytest.raises(KvkitError) as error:
        run()
    message = str(error.value)
    assert message.startswith(name), message
    assert re.search(rf": expected {BEGIN}(.|\n)*, got {BEGIN}", message), message
    assert [array.tobytes() for array in arrays] == before
    return message


def refused(call, name, **more):
    """Check that a call raises an error about `name`, in equal words by all backends and plans."""
    outputs = more.get("out", ())
    given = [*call.inputs.values(), *(outputs if isinstance(outputs, (tuple, list)) else [outputs])]
    given = [array for array in given if isinstance(array, np.ndarray)]
    message = refuses(lambda: call.run(**more), name, *given)
    if call.name in BY_PLAN and backends.name == "cpu":
        by_plan = refuses(lambda: plan_scenes.run_by_plan(call, **more), "", *given)
        # A plan's method asks its own checks whether exchanged axes would pass, which may say more or less.
        by_plan, plain = (re.split(r"; [\w ]+ looks? like \[", text)[0] for text in (by_plan, message))
        assert by_plan == plain or says_by_plan(by_plan, plain), (message, by_plan)
    if backends.name != "cpu":
        by_cpu = refuses(lambda: call.run(kvkit, **more), "", *given)
        assert message == by_cpu, (message, by_cpu)
    return message


TENSORS = ("current_key", "current_value", "cache", "scale")


class Tensor:
    """Stands for a tensor of another library."""

    def __init__(self, array):
        self.array, self.shape, self.dtype, self.ndim = array, array.shape, array.dtype, array.ndim

    def numpy(self):
        return self.array


def swapped(array):
    return array.astype(array.dtype.newbyteorder())


NO_ARRAYS = {
    "list": lambda array: array.tolist(),
    "none": lambda array: None,
    "number": lambda array: 1,
    "other_library": Tensor,
    "bytes": lambda array: array.tobytes(),
    "masked": lambda array: np.ma.masked_array(array, False),
}


def changed(name, *entries):
    """Return the legal scene with some entries (indices, value) of an index tensor changed."""
    scene = legal("dynamic")
    array = scene[name].copy()
    for where, value in entries:
        array[where] = value
    return scene.but(**{name: array})


STARTS = {
    "seqstarts_begins_at_1": ("seqstarts", (0, 1)), "kvstarts_begins_at_1": ("kvstarts", (0, 1)),
    "seqstarts_begins_below_0": ("seqstarts", (0, -1)), "seqstarts_ends_early": ("seqstarts", (-1, 4)),
    "seqstarts_ends_late": ("seqstarts", (-1, 6)),
    "seqstarts_ends_at_int64_max": ("seqstarts", (-1, INT64_MAX)), "seqstarts_falls": ("seqstarts", (2, 1)),
    "seqstarts_falls_below_0": ("seqstarts", (1, INT64_MIN)), "kvstarts_falls": ("kvstarts", (2, 4)),
    "kvstarts_falls_below_0": ("kvstarts", (1, INT64_MIN)), "kvstarts_ends_early": ("kvstarts", (-1, 11)),
    "kvstarts_ends_late": ("kvstarts", (-1, 13)),
    "kvstarts_ends_at_int64_max": ("kvstarts", (-1, INT64_MAX)),
    "kvlen_of_the_first_two": ("kvstarts", (1, 4)), "start_pos_negative": ("start_pos", (0, -1)),
    "start_pos_int64_min": ("start_pos", (0, INT64_MIN)),
    "start_pos_too_large": ("kvstarts", "start_pos", (0, 4)),
    "start_pos_too_small": ("kvstarts", "start_pos", (2, 3)),
    "start_pos_int64_max": ("kvstarts", "start_pos", (3, INT64_MAX)),
}  # fmt: skip


# The legal table: 0 stores rows 3 4 and has 30 31 32 behind; 2 loads 30 31 32 12; 3 stores 20 21 22.
ROWS = {
    "past_page_negative": ((0, 0), -1), "past_page_int64_min": ((0, 0), INT64_MIN),
    "past_page_outside": ((0, 0), 34), "past_page_ends_outside": ((0, 0), 32),
    "past_page_int64_max": ((0, 0), INT64_MAX), "store_page_negative": ((3, 0), -1),
    "store_page_minus_2": ((3, 0), -2), "store_page_ends_outside": ((3, 0), 32),
    "store_page_int64_max": ((3, 0), INT64_MAX), "last_page_outside": ((0, 1), 33),
    "read_page_outside": ((2, 1), 34), "read_page_int64_max": ((2, 1), INT64_MAX),
    "stored_twice_by_two_all": ((3, 0), 3), "stored_twice_by_two_one_row": ((3, 0), 4),
    "stored_twice_by_two_from_below": ((3, 0), 1), "stores_what_it_has_behind": ((0, 1), 31),
    "stores_what_it_and_another_read": ((3, 0), 30), "stores_what_another_reads": ((3, 0), 10),
    "reads_what_another_stores_first_row": ((2, 1), 20), "reads_what_another_stores_last_row": ((2, 1), 22),
    "reads_what_another_stores_in_a_page": ((2, 0), 2),
}  # fmt: skip
LEGAL_ROWS = {
    "first_rows": ((3, 0), 0), "last_rows": ((0, 0), 31), "just_below_a_stored_run": ((2, 1), 19),
    "just_above_a_stored_run": ((2, 1), 23), "next_to_another_stored_run_below": ((3, 0), 5),
    "next_to_another_stored_run_above": ((0, 1), 18), "overhanging_last_page": ((0, 1), 28),
    "same_page_read_twice": ((2, 1), 32),
}  # fmt: skip
