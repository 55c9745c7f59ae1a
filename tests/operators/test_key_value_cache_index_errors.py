"""Every error of the index tensors of the dynamic operator."""

import numpy as np
import pytest
import scenes
from refusals import LEGAL_ROWS, ROWS, STARTS, changed, legal, refused
from scenes import INT64_MAX, INT64_MIN

import kvkit
from kvkit.cpu.copy import transfer


def test_an_array_for_the_other_mode():
    scene = legal("dynamic")
    refused(scene.but(cache_mode=0), "cachestarts")
    refused(scene.but(cachestarts=scene["cachestarts"][:, 0].copy()), "cachestarts")


@pytest.mark.parametrize("case", STARTS)
def test_starts_and_lengths(case):
    name, *change = STARTS[case]
    scene = changed(*change) if len(change) == 2 else changed(name, *change)
    refused(scene, name)


@pytest.mark.parametrize("case", ROWS)
def test_rows(case):
    refused(changed("cachestarts", ROWS[case]), "cachestarts")


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


def test_too_few_pages():
    scene = legal("dynamic")
    refused(scene.but(cachestarts=scene["cachestarts"][:, :1].copy()), "cachestarts")
    refused(scene.but(cachestarts=scene["cachestarts"][:, :0].copy()), "cachestarts")
    scenes.check(scene.but(cachestarts=scene["cachestarts"][:, :2].copy()))


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


def test_decreasing_starts_may_not_hide_in_the_sum():
    """Lengths 2 and -2 and 2: every total is right."""
    scene = changed("seqstarts", (1, 2), (2, 0), (3, 2))
    refused(scene, "seqstarts")


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

    monkeypatch.setattr(transfer, "rows", interrupted)
    before = scene["cache"].tobytes()
    with pytest.raises(KeyboardInterrupt):
        scene.results()
    assert scene["cache"].tobytes() == before
