"""`kvkit bench`: it measures what it says, and keeps the figures it did not measure."""

import itertools
import json

import click
import numpy as np
import pytest
from click.testing import CliRunner
from scenes import first_quick

import kvkit
from benchmarks.suites import (
    attention,
    cache_operators,
    caches,
    first_calls,
    ggml,
    growth,
    latent,
    measuring,
    memory,
    other_libraries,
    products,
    shapes,
    states,
)
from benchmarks.suites.measuring import Case, Work
from benchmarks.suites.problem import Problem
from kvkit.cpu import machine
from kvkit.errors import KvkitError
from kvkit_cli import bench

SHAPES = [(2, 1, 37, 2), (2, 1, 37, 8), (1, 5, 20, 4), (1, 9, 0, 2)]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Make benchmarks use one set of data, without pauses between functions."""
    monkeypatch.setattr(memory, "FAR", 1)
    monkeypatch.setattr(measuring, "PAUSE", 0)


def task(shape, quant=0):
    return Problem(*shape, quant, num_heads=8)


@pytest.mark.parametrize("kind", first_quick(["float16", "int8", "q4_0", "int4", "e4m3", "q8_0"]))
def test_every_place_holds_the_same_problem(kind):
    """From each cache comes what float64 numpy makes of the problem: `from_cache` compares."""
    quant = attention.BITS.get(attention.BLOCKS.get(kind, kind), 0)
    places = [*itertools.product(["static"], range(2)), *itertools.product(["offsets", "pages"], range(4))]
    for place, number in places:
        made = Problem(*SHAPES[0], quant, 8, kind == "e4m3", 32 if quant else 0, kind == "q4_0")
        run, beside = attention.from_cache(made, kind, place, number, page=16)
        run(1)
        beside["read"](1)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.slow] * kind.startswith(("int8", "int2")))
        for kind in caches.MAKERS
    ],
)
def test_every_cache_takes_steps(kind, monkeypatch):
    monkeypatch.setattr(caches, "PAST", 200)
    monkeypatch.setattr(caches, "sets", lambda size: 2)
    work = caches.decode(kind)()
    for i in range(4):
        work.run(i)
        work.beside["read"](i)
    whole = 2 * 200 * caches.HEADS * caches.DIM * 2
    assert work.moved < whole if "int" in kind else work.moved == whole


SMALL = {
    latent: {"CONTEXT": 128, "PREFILL": 16, "PROMPT": 40, "CHUNK": 16, "HEADS": 2, "POSITIONS": 256,
             "TOP": 9},
    states: {"SEQUENCES": 2, "PROMPT": 40, "HEADS": 4, "KEY_HEADS": 2, "DIM": 16, "CHUNK": 16, "SIDE": 32},
}  # fmt: skip


@pytest.mark.parametrize(("suite", "cached"), [(latent, "prefill"), (states, "product")])
def test_cases_of_a_suite_check_their_outputs_and_peers(suite, cached, monkeypatch):
    for name, number in SMALL[suite].items():
        monkeypatch.setattr(suite, name, number)
    getattr(suite, cached).cache_clear()
    for case in suite.CASES:
        work = case.prepare()
        assert set(case.goals) <= set(work.beside)
        assert suite is states or set(case.goals) == set(work.beside)
        for run in (work.run, *work.beside.values()):
            assert (run is None and suite is states) or run(0) is None or len(run(1))
    getattr(suite, cached).cache_clear()


def test_concatenation_is_that_of_the_peer():
    pytest.importorskip("torch")
    work = caches.append(5)()
    assert work.forms["torch"] in ("torch.cat", "transformers DynamicCache")
    for i in range(3):
        lengths = [side.shape[2] for side in (*work.run(i), *work.beside["torch"](i))]
        assert lengths == [6 + i] * 4
        assert work.beside["at 0"](i)[0].shape[2] == 1 + i


def test_a_wrong_result_is_not_measured():
    made = task(SHAPES[0])
    right = np.zeros((2, 1, 8, 128))
    for at, expected in made.expected.items():
        right[at] = expected
    made.check("kvkit", right, "float32")
    right[1, 0, 7, 3] += 0.1
    with pytest.raises(click.ClickException, match="kvkit: output is off by"):
        made.check("kvkit", right, "float32")


@pytest.mark.parametrize("shape", SHAPES)
def test_torch_solves_the_same_problem(shape):
    pytest.importorskip("torch")
    made = task(shape)
    shapes = ["enable_gqa", "expanded heads"]
    if made.new == 1:
        shapes.append("folded")
    for kind, form in itertools.product(other_libraries.TYPES, shapes):
        peer = other_libraries.torch_attention(made, kind, form)
        made.check(peer.form, peer.output(), kind)
    assert made.peer(other_libraries.torch_peer) is made.peer(other_libraries.torch_peer)


@pytest.mark.parametrize("kind", ["float32", "float16", "int8", "int4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_onnxruntime_solves_the_same_problem(shape, kind):
    pytest.importorskip("onnxruntime")
    made = task(shape, {"int8": 8, "int4": 4}.get(kind, 0))
    peer = other_libraries.onnxruntime_peer(made, kind)
    made.check("onnxruntime", peer.output(), peer.kind)


@pytest.mark.parametrize("kind", ggml.TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_ggml_solves_the_same_problem(shape, kind):
    pytest.importorskip("libggml")
    made = task(shape, {"int8": 8, "int4": 4}.get(kind, 0))
    peer = ggml.ggml_peer(made, kind)
    made.check(peer.form, peer.output(), peer.kind)


@pytest.mark.parametrize("kind", ["float16", "int8"])
def test_growth_reads_one_memory(kind, monkeypatch):
    """Windows lie behind one another, a step is checked, and a share of the largest is beside it."""
    monkeypatch.setattr(growth, "MOST", 128)
    monkeypatch.setattr(growth, "MANY", 128)
    monkeypatch.setattr(growth, "FLAT_FROM", 64)
    work = growth.decode(kind, 2, 32, (1, 96), 1)()
    assert work.moved == 64 * 2 * 8 * (256 if kind == "float16" else 160)
    assert work.shares == {"": 0.5, "read": 0.5, "the largest": pytest.approx(2 / 3)}
    for function in (work.run, *work.beside.values()):
        function(1)
    work = growth.decode(kind, 1, 32, (1, 96), 1)()
    assert [*work.beside] == ["read"]
    monkeypatch.setattr(memory, "FAR", 2**20)
    starts = [cache.ctypes.data for cache, _ in growth.windows(kind, 32, work.moved)]
    assert len(starts) == 4
    assert set(np.diff(starts)) == {32 * 2 * 8 * 128 * (2 if kind == "float16" else 1)}


def test_shapes_take_cpu_seconds_of_heads_and_of_pages(monkeypatch):
    """`step` raises if an output is wrong."""
    monkeypatch.setattr(growth, "MOST", 128)
    monkeypatch.setattr(growth, "MANY", 128)
    monkeypatch.setattr(shapes, "TOKENS", 64)
    for work, size in (
        (shapes.step("float16", 4)(), 2 * 4 * 128 * 2),
        (shapes.step("int8", page=16)(), 2 * 8 * 160),
    ):
        assert (work.timed, work.moved) == (True, 64 * size)
        assert min(work.run(0), work.beside["read"](0) + 1) > 0


def test_growth_of_appends_and_plans(monkeypatch):
    monkeypatch.setattr(growth, "LENGTHS", (16, 64))
    for prepare in (growth.append(16), growth.append(64), growth.plan(64)):
        work = prepare()
        for function in (work.run, *work.beside.values()):
            function(0)


def test_a_first_call_is_a_process():
    """Which says what it took; a limit that it misses is shown."""
    seconds = first_calls.process(["np.ones(1)"], first_calls.home() / "kept", False)
    assert 0 < first_calls.process(["np.ones(1)"], first_calls.home() / "kept", True) < seconds < 60
    work = Work(lambda i: 2.5, timed=True)
    result = measuring.measure(Case("first", lambda: work, limit=2, rounds=1), 11)
    assert (result["seconds"], result["limit"], measuring.table_row(result)[-1]) == (2.5, 2, "2 s")


def test_peers_that_are_not_installed_say_so(monkeypatch):
    monkeypatch.setattr(other_libraries, "installed", lambda *names: False)
    made = task(SHAPES[0])
    assert made.peer(other_libraries.torch_peer) is None
    work = attention.work(made, lambda i: None, "float16", {}, {"torch": None})
    result = measuring.measure(Case("empty", lambda: work, {"torch": 3}), 1)
    assert result["beside"] == {"torch": None}
    assert "torch not installed" in measuring.table_row(result)[-2]


@pytest.mark.parametrize("form", sorted({case.prepare.__qualname__ for case in cache_operators.CASES}))
def test_every_form_of_case_runs(form, monkeypatch):
    for name in ("H", "SETS"):
        monkeypatch.setattr(cache_operators, name, 1)
    case = next(case for case in cache_operators.CASES if case.prepare.__qualname__ == form)
    assert measuring.measure(case, 1)["seconds"] > 0


def test_no_function_gets_the_data_of_the_one_before():
    rounds = {"run": [], "copy": []}
    work = Work(rounds["run"].append, 100, beside={"copy": rounds["copy"].append})
    result = measuring.measure(Case("rounds", lambda: work, {"copy": 1e9}, calls=2), 3)
    numbers = {name: [i + first for i in range(0, 20, 4) for first in both]
               for name, both in (("run", (0, 1)), ("copy", (2, 3)))}  # fmt: skip
    assert rounds == numbers
    assert set(result) == {"case", "seconds", "bytes", "beside", "pairs", "goals"}
    assert measuring.table_row(result)[-1] == "copy 100000000000%"


def test_pairs_are_of_the_same_round(monkeypatch):
    """On a machine that gets slower and slower, what takes twice as long takes twice as long."""
    now = iter(float(x) for i in range(1, 8) for x in (0, i, 0, 2 * i))
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: next(now))
    work = Work(lambda i: None, beside={"copy": lambda i: None}, shares={"copy": 0.5})
    result = measuring.measure(Case("pairs", lambda: work), 5)
    assert result["pairs"]["copy"] == [1, 1, 1]
    assert (result["seconds"], result["beside"]["copy"]) == (5, 5)


def test_a_file_keeps_what_was_not_measured_again(tmp_path):
    path = tmp_path / "new" / "cpu.json"
    names = ["a", "b", "c"]

    def seconds():
        return {result["case"]: result["seconds"] for result in json.loads(path.read_text())["results"]}

    measuring.write_figures(path, [{"case": "c", "seconds": 1}, {"case": "b", "seconds": 1}], 3, names)
    measuring.write_figures(path, [{"case": "a", "seconds": 2}, {"case": "c", "seconds": 2}], 5, names)
    assert list(seconds().items()) == [("a", 2), ("b", 1), ("c", 2)]
    path.write_text(path.read_text().replace(measuring.machine()["cpu"], "another"))
    measuring.write_figures(path, [{"case": "a", "seconds": 3}], 5, names)
    assert seconds() == {"a": 3}


def test_shares_and_times():
    assert measuring.ratio_text("read", 0.756) == "76%"
    assert measuring.ratio_text("torch", 2.95) == "3.0x"
    assert measuring.ratio_text("torch", None) == "not installed"
    result = {"case": "", "seconds": 2, "beside": {"read": 1, "products": 1.8}, "goals": {"read": 0.9}}
    assert measuring.bound_share(result) == (0.9, "products")
    assert measuring.table_row(result)[-1] == "read 90% (products bind)"
    assert measuring.bound_share(result | {"beside": {"read": 1}}) == (0, "")


def test_multiplications_alone_are_as_many_as_said():
    """12 sums of 16 lanes, each of an equal share of the ones."""
    ones = np.ones((2, 12, 16), np.float32)
    products.multiplier("floats")(ones.ctypes.data, 120, 1)
    assert (ones[1] == 10).all()
    assert products.instructions("float16", 4, 128) == {"floats": 64}
    if machine.has_integers():
        assert products.instructions("int8", 4, 128) == {"bytes": 24, "words": 16}


def test_text_that_no_case_has():
    with pytest.raises(KvkitError, match="--only: expected text of a case of the suites cpu, attention"):
        bench.bench.callback(None, "no such case", 1)


def test_rounds_that_give_no_median():
    result = CliRunner().invoke(bench.bench, ["--rounds", "0"])
    assert (result.exit_code, "0 is not in the range x>=1" in result.output) == (2, True)


def test_suites_that_are_not_installed(monkeypatch, tmp_path):
    monkeypatch.setattr(kvkit, "__file__", str(tmp_path / "kvkit" / "__init__.py"))
    with pytest.raises(KvkitError, match=r"^kvkit bench: its suites are not installed: run it in a checkout"):
        bench.bench.callback(None, "", 1)
