"""Measure cases: medians of calls that alternate in one process, written with the machine's description."""

import importlib.metadata
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numba
import numpy as np
from llvmlite import binding

from kvkit.version import __version__

PEERS = "libggml-python", "onnxruntime", "torch"
PAUSE = 0.1  # seconds; threads of peers go on waiting, at full speed, for tens of milliseconds
# What speeds are shares of.
BOUNDS = "copy", "read", "contiguous", "matmul", "float16", "at 0", "the fewest", "the largest", "4 fourths"


@dataclass(frozen=True)
class Case:
    """Name a case. `prepare` returns its work; a goal is how many times as fast as a peer it should be.

    `limit` are seconds that it shall stay below; `rounds` are fewer than others get, without warm-ups.
    """

    name: str
    prepare: Callable
    goals: dict = field(default_factory=dict)
    calls: int = 1
    limit: float = 0
    rounds: int = 0


@dataclass(frozen=True)
class Work:
    """Hold the functions of a round: the measured one, and by name those beside it.

    `moved` counts the bytes that must be read and written once, `operations` those of the two products of
    attention; 0 where they say nothing. A peer that is not installed is None; `forms` tells how peers ran.
    Of something larger beside it a share of the time counts: `shares`, by name. What is `timed` returns
    the seconds of its one call.
    """

    run: Callable
    moved: int = 0
    operations: int = 0
    beside: dict = field(default_factory=dict)
    forms: dict = field(default_factory=dict)
    shares: dict = field(default_factory=dict)
    timed: bool = False


def measure(case, rounds):
    """Return the median seconds of a case and of what is beside it, in turn, after two warm-ups of each.

    `pairs` are quartiles of how many times as long that took in the same round: a machine that is slower for
    some rounds is so for both.
    """
    work = case.prepare()
    turns = {"": work.run} | {name: function for name, function in work.beside.items() if function}
    pause = PAUSE if set(turns) - {"", "copy"} else 0
    times = {name: [] for name in turns}
    warm = 0 if case.rounds else 2
    for i in range(warm + (min(case.rounds, rounds) or rounds)):
        for name, function in turns.items():
            time.sleep(pause)
            begin = time.perf_counter()
            for j in range(case.calls):
                said = function(i * case.calls + j)
            seconds = said if work.timed else time.perf_counter() - begin
            times[name].append(seconds * work.shares.get(name, 1) / case.calls)
    times = {name: each[warm:] for name, each in times.items()}
    medians = {name: statistics.median(each) for name, each in times.items()}
    runs = times.pop("")
    result = {"case": case.name, "seconds": medians.pop("")}
    if work.moved:
        result["bytes"] = work.moved
    if work.operations:
        result["operations"] = work.operations
    if work.beside:
        result["beside"] = {name: medians.get(name) for name in work.beside}
        result["pairs"] = {
            name: quartiles([other / run for other, run in zip(each, runs, strict=True)])
            for name, each in times.items()
        }
    if work.forms:
        result["forms"] = work.forms
    if case.limit:
        result["limit"] = case.limit
    return result | ({"goals": case.goals} if case.goals else {})


def quartiles(numbers):
    return statistics.quantiles(numbers, n=4, method="inclusive") if len(numbers) > 1 else 3 * numbers


def table_row(result):
    """Return the cells of a result in a table."""
    seconds, goals = result["seconds"], result.get("goals", {})
    speeds = [
        f"{result[key] / seconds / 1e9:.1f}" if key in result else "" for key in ("bytes", "operations")
    ]
    beside, missed = [], [f"{result['limit']} s"] if seconds > result.get("limit", seconds) else []
    for name in result.get("beside", {}):
        ratio = speed_ratio(result, name)
        beside.append(f"{name} {ratio_text(name, ratio)}")
        if ratio and ratio < goals.get(name, 0):
            missed.append(f"{name} {ratio_text(name, goals[name])}")
    return result["case"], f"{seconds * 1e6:,.0f}", *speeds, ", ".join(beside), ", ".join(missed)


def write_figures(path, results, rounds, names):
    """Write figures into a file, in the order of `names`, among those it holds of the same machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {"kvkit": __version__, "machine": machine(), "rounds": rounds}
    if any("forms" in result for result in results):
        report["peers"] = peers()
    older = json.loads(path.read_text()) if path.exists() else {}
    known = older["results"] if older.get("machine") == report["machine"] else []
    figures = {result["case"]: result for result in (*known, *results)}
    report["results"] = [figures[name] for name in names if name in figures]
    path.write_text(json.dumps(report, indent=1) + "\n")


def machine():
    """Return what the figures were measured on."""
    features = binding.get_host_cpu_features()
    return {
        "cpu": binding.get_host_cpu_name(),
        "threads": numba.get_num_threads(),
        "vectors": next((name for name in ("avx512f", "avx2", "neon") if features.get(name)), "none"),
        "system": platform.system(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
    }


def peers():
    """Return the versions of the peers that are installed."""
    found = {}
    for name in PEERS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def speed_ratio(result, name):
    """Return how many times as long what is beside a result took, or None if it is not installed."""
    if name in result.get("pairs", {}):
        return result["pairs"][name][1]
    other = result["beside"][name]
    return other and other / result["seconds"]


def ratio_text(name, ratio):
    """Return a share of what bounds a case, or how many times a peer's speed it has, as text."""
    if ratio is None:
        return "not installed"
    return f"{ratio:.0%}" if name in BOUNDS else f"{ratio:.1f}x"
