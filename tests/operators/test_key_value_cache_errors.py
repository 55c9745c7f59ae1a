"""Caches and index tensors that do not fit each other; `test_wrong_calls.py` has the rest."""

import numpy as np
import pytest
import scenes
from refusals import FLOAT, LEGAL_ROWS, TENSORS, changed, kinds, legal, refused
from scenes import INT64_MAX, INT64_MIN

import kvkit
from kvkit.calls.prepared import forget_all
from kvkit.cpu.copy import transfer


@pytest.mark.parametrize("case", LEGAL_ROWS)
def test_rows_that_look_wrong_but_are_legal(case):
    scenes.check(changed("cachestarts", LEGAL_ROWS[case]))


def test_stored_twice_by_one_sequence():
    """Six new tokens in two pages: the same page twice, then pages that share one row."""
    scene = scenes.dynamic(np.random.default_rng(1), scenes.MOVED[0], 0, 1, lengths=[(0, 6)], page_size=3)
    for second in (1, 2, 3):
        refused(scene.but(cachestarts=np.array([[1, second]])), "cachestarts")
    refused(scene.but(cachestarts=np.array([[2, 0]])), "cachestarts")
    scenes.check(scene.but(cachestarts=np.array([[0, 3]])))


def offset_scene(starts):
    scene = scenes.dynamic(np.random.default_rng(2), scenes.MOVED[1], 1, 0, lengths=[(3, 2)])
    one = scene.but(cachestarts=np.array([0]))
    rows = one["cache"].shape[1]
    return one.but(cachestarts=np.array([starts(rows)]))


OFFSETS = {
    "negative": lambda rows: -1,
    "int64_min": lambda rows: INT64_MIN,
    "one_too_far": lambda rows: rows - 4,
    "past_the_end": lambda rows: rows,
    "wraps_at_int64_max": lambda rows: INT64_MAX,
    "wraps_in_position": lambda rows: INT64_MAX - 3,
}


@pytest.mark.parametrize("case", OFFSETS)
def test_offsets(case):
    refused(offset_scene(OFFSETS[case]), "cachestarts[0]")


def test_the_last_legal_offset():
    scenes.check(offset_scene(lambda rows: rows - 5))


def test_offset_runs_that_meet():
    """(0 past, 3 new) at row 4; a reader of two tokens slides past it."""
    for start, fine in ((2, True), (3, False), (4, False), (6, False), (7, True)):
        scene = scenes.dynamic(
            np.random.default_rng(2), scenes.MOVED[0], 2, 0, lengths=[(0, 3), (2, 0), (9, 0)]
        )
        row = {0: 4, 2: start, 9: 7}
        step = scene.but(cachestarts=np.array([row[past] for past in scene["start_pos"].tolist()]))
        step.inputs["cache"] = np.resize(scene["cache"], (3, 2, 16, *scene["cache"].shape[3:]))
        if fine:
            scenes.check(step)
        else:
            refused(step, "cachestarts")


def test_empty_lists_are_index_tensors():
    """numpy takes [] for floats; an empty batch is legal all the same."""
    tokens = np.zeros((0, 2, 8), np.float32)
    cache = np.zeros((4, 1, 2, 2, 8), np.float32)
    call = kvkit.dynamic_batching.key_value_cache
    key, value = call(tokens, tokens, [0], [0], [], [], None, None, cache)
    assert key.shape == value.shape == (0, 2, 8)


@pytest.mark.cpu
def test_nothing_is_stored_if_the_load_cannot_be_prepared(monkeypatch):
    """A Ctrl-C or a full memory while the second kernel compiles leaves the cache as it was."""
    scene = legal("dynamic")
    rows = transfer.rows

    def interrupted(direction, *rest):
        if direction == "load":
            raise KeyboardInterrupt
        return rows(direction, *rest)

    forget_all()  # a call of this form is prepared no second time
    monkeypatch.setattr(transfer, "rows", interrupted)
    before = scene["cache"].tobytes()
    with pytest.raises(KeyboardInterrupt):
        scene.results()
    assert scene["cache"].tobytes() == before


# Memory


@kinds
@pytest.mark.parametrize("name", ["cache", "scale"])
def test_rows_that_overlap_each_other(kind, name):
    scene = legal(kind)
    array = scene[name]
    for axis in range(array.ndim - 1):
        for stride in (0, array.itemsize):
            strides = [stride if i == axis else s for i, s in enumerate(array.strides)]
            folded = np.lib.stride_tricks.as_strided(array, array.shape, strides, writeable=True)
            refused(scene.but(**{name: folded}), name)


@kinds
def test_unrelated_views_of_one_buffer_are_legal(kind):
    """Outputs between the rows of new tokens: disjoint, though their bounds overlap."""
    scene = legal(kind, FLOAT, dim=24)
    expected = scene.oracle()
    wide = np.zeros((*expected[0].shape[:-1], 3 * 24), np.float32)
    out = wide[..., :24], wide[..., 48:]
    key = wide[tuple(slice(size) for size in scene["current_key"].shape[:-1])][..., 24:48]
    key[...] = scene["current_key"]
    scenes.assert_all_same(scene.but(current_key=key).results(out=out), expected)


def test_refusal_leaves_surroundings_alone(poison):
    scene = legal("dynamic")
    views = {name: poison.around(scene[name], 1) for name in TENSORS}
    refused(scene.but(**views, max_kvlen=1), "max_kvlen")
