"""Index tensors on the device: refused in the CPU twin's words, and read only then."""

import numpy as np
import pytest
import scenes
from device_arrays import KINDS, Array, contents
from refusals import LEGAL_ROWS, ROWS, STARTS, changed, legal
from scenes import assert_all_same

import kvkit
import kvkit_cuda
from kvkit_cuda.calls import scan
from kvkit_cuda.device_runtime import host

INDEX = ("seqstarts", "kvstarts", "cachestarts", "start_pos")
VERDICT_BYTES = 24
plan = kvkit_cuda.dynamic_batching.plan


@pytest.fixture
def reads(monkeypatch):
    """Return a list that gets the size of each read from the device."""
    sizes, read = [], host.read

    def watched(place, size, stream):
        sizes.append(size)
        return read(place, size, stream)

    monkeypatch.setattr(host, "read", watched)
    return sizes


def on_device(scene, names=INDEX, kind=Array):
    return scene.but(**{name: kind(scene[name]) for name in names})


def by_twin(scene):
    """Return the CPU's error for a call, or None."""
    try:
        scene.copy().run(kvkit)
    except kvkit.KvkitError as error:
        return str(error)


def said(scene, **more):
    """Return the device's error for a call, after a check that nothing has been written."""
    before = [scene[name].tobytes() for name in ("cache", "scale")]
    try:
        scene.run(**more)
    except kvkit.KvkitError as error:
        assert [scene[name].tobytes() for name in ("cache", "scale")] == before
        return str(error)


BROKEN = {
    **{name: (lambda case=case: changed("cachestarts", case)) for name, case in ROWS.items()},
    **{
        name: (lambda case=case: changed(*(case if len(case) == 2 else case[1:])))
        for name, case in STARTS.items()
    },
    "max_seqlen": lambda: legal("dynamic").but(max_seqlen=2),
    "max_kvlen": lambda: legal("dynamic").but(max_kvlen=4),
    "too_few_pages": lambda: legal("dynamic").but(cachestarts=legal("dynamic")["cachestarts"][:, :1].copy()),
    "no_pages": lambda: legal("dynamic").but(cachestarts=legal("dynamic")["cachestarts"][:, :0].copy()),
    "two_rules": lambda: changed("cachestarts", ((2, 1), 34), ((3, 0), -1)),
    "a_row_and_a_length": lambda: changed("cachestarts", ((0, 0), -1)).but(max_seqlen=2),
    "another_mode": lambda: legal("dynamic").but(cache_mode=0),
    "another_dtype": lambda: legal("dynamic").but(cachestarts=np.zeros((4, 3))),
    "another_length": lambda: legal("dynamic").but(cachestarts=np.zeros((5, 3), np.int64)),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_the_twin_refuses(case):
    scene = BROKEN[case]()
    expected = by_twin(scene)
    assert ": expected " in expected
    assert said(on_device(scene)) == expected
    assert said(on_device(scene, ["cachestarts"])) == expected


@pytest.mark.parametrize("case", LEGAL_ROWS)
def test_rows_that_look_wrong_but_are_legal(case, reads):
    scene = changed("cachestarts", LEGAL_ROWS[case])
    expected = scene.oracle()
    assert plan(**steps(on_device(scene, ["cachestarts"])))
    assert reads == [VERDICT_BYTES]
    key, value = on_device(scene).run()
    assert_all_same((key, value, scene["cache"], scene["scale"]), expected)


def steps(scene):
    names = (*INDEX, "max_seqlen", "max_kvlen")
    return {name: scene[name] for name in names} | {
        "cache_mode": 1,
        "page_size": scene.attributes["page_size"],
    }


@pytest.mark.parametrize("threads", [4, pytest.param(32, marks=pytest.mark.slow)])
def test_random_tables(threads, monkeypatch):
    """Many of them are broken, in every way; the twin decides, and no right one is read."""
    monkeypatch.setattr(scan, "SCAN_THREADS", threads)
    read = []
    monkeypatch.setattr(scan.PageTable, "__array__", count_calls(scan.PageTable.__array__, read))
    rng = np.random.default_rng(threads)
    rules = {"fine": 0}
    for _ in range(60):
        batch, page_size = int(rng.integers(1, 7)), int(rng.integers(1, 5))
        start_pos, seqlens = rng.integers(0, 9, batch), rng.integers(0, 6, batch)
        pages = int(-(-(start_pos + seqlens).max() // page_size)) or 1
        table = rng.integers(0, rng.choice([60, 300, 3000]), (batch, pages))
        if rng.random() < 0.25:
            table[rng.integers(batch), rng.integers(pages)] = rng.choice([-1, scenes.INT64_MAX])
        seqstarts, kvstarts = (np.r_[0, np.cumsum(lengths)] for lengths in (seqlens, start_pos + seqlens))
        attributes = {"cache_mode": 1, "page_size": page_size}
        expected, got = (
            refusal(make, seqstarts, kvstarts, given, start_pos, **attributes)
            for make, given in ((kvkit.dynamic_batching.plan, table), (plan, Array(table)))
        )
        assert got == expected
        assert bool(read) == (expected is not None)
        read.clear()
        words = ("rows from 0 on", "rows stored once", "hold no other token")
        rule = next((word for word in words if expected and word in expected), "fine")
        rules[rule] = rules.get(rule, 0) + 1
    assert len(rules) == 4
    assert min(rules.values()) >= 3


def refusal(make, *arguments, **attributes):
    try:
        make(*arguments, **attributes)
    except kvkit.KvkitError as error:
        return str(error)


def count_calls(function, calls):
    def counted(*arguments, **more):
        calls.append(function)
        return function(*arguments, **more)

    return counted


def test_a_right_table_is_not_read(reads):
    """Of a call whose arrays are all on the device, but for the lengths, the verdict alone is read."""
    scene = legal("dynamic")
    expected = scene.oracle()
    names = ("current_key", "current_value", "cache", "scale", "cachestarts")
    key, value = on_device(scene, names).run()
    assert reads == [VERDICT_BYTES]
    assert_all_same((contents(key), contents(value), scene["cache"], scene["scale"]), expected)


def test_only_kernels_see_the_table(monkeypatch):
    """It is right while a kernel runs, and wrong whenever the host could look."""
    scene = legal("dynamic")
    expected = scene.oracle()
    right, table = scene["cachestarts"], np.full_like(scene["cachestarts"], -5)
    launch = host.launch

    def shown(*arguments):
        table[...] = right
        launch(*arguments)
        table[...] = -5

    monkeypatch.setattr(host, "launch", shown)
    got = scene.but(cachestarts=Array(table)).run()
    assert_all_same((*got, scene["cache"], scene["scale"]), expected)


@pytest.mark.parametrize("check", [True, False])
def test_a_plan(check, reads):
    """One that is not checked reads nothing; what happens to the table later changes neither."""
    scene = legal("dynamic")
    expected = scene.oracle()
    table = scene["cachestarts"].copy()
    step = plan(**steps(scene) | {"cachestarts": Array(table)}, check=check)
    assert reads == [VERDICT_BYTES] * check
    table[:] = -1
    names = ("current_key", "current_value", "cache", "scale")
    attributes = {
        name: scene.attributes[name] for name in scene.attributes if name not in ("cache_mode", "page_size")
    }
    key, value = step.key_value_cache(*(Array(scene[name]) for name in names), **attributes)
    assert reads == [VERDICT_BYTES] * check
    assert_all_same((contents(key), contents(value), scene["cache"], scene["scale"]), expected)


def test_a_small_cache():
    """The verdict says how many rows a cache must have; the table is read for the error."""
    scene = legal("dynamic")
    small = scene.but(cache=scene["cache"][:32].copy(), scale=scene["scale"][:32].copy())
    expected = by_twin(small)
    assert "rows within the 32 of the cache" in expected
    assert said(on_device(small)) == expected


@pytest.mark.parametrize("where", ["host", "device"])
def test_what_is_not_checked(where):
    """A broken table is refused, and taken unseen where no check is wanted."""
    scene = changed("cachestarts", ((0, 0), -1))
    given = steps(on_device(scene) if where == "device" else scene)
    with pytest.raises(kvkit.KvkitError, match=r"cachestarts\[0, 0\]: expected rows from 0 on"):
        plan(**given)
    assert plan(**given, check=False)
    with pytest.raises(kvkit.KvkitError, match=r"^check: expected"):
        plan(**given, check=2)


def turned(table):
    """Return a table on the device with rows in descending order, and gaps."""
    rows = np.zeros((9, 7), table.dtype)[::-2, 1::2][1:]
    rows[...] = table
    return Array(rows)


@pytest.mark.parametrize("make", [*KINDS.values(), turned], ids=[*KINDS, "turned"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_tables_of_every_kind(make, dtype, reads):
    scene = legal("dynamic")
    expected = scene.oracle()
    table = np.clip(scene["cachestarts"], -1, 2**31 - 1).astype(dtype)
    scene = scene.but(cachestarts=make(table))
    assert plan(**steps(scene))
    assert reads == [VERDICT_BYTES]
    got = scene.run()
    assert_all_same((*got, scene["cache"], scene["scale"]), expected)
