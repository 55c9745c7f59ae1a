"""`kvkit bench`: operators beside plain copies and reads of the same bytes, and beside their peers."""

import importlib.metadata
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import click
import numba
import numpy as np
from llvmlite import binding

from kvkit.errors import argument_error, brief
from kvkit.version import __version__
from kvkit_cli import (
    bench_ascend,
    bench_attention,
    bench_caches,
    bench_cases,
    bench_first,
    bench_growth,
    bench_pools,
    show,
)

SUITES = {  # by the file of their figures
    "cpu": [*bench_cases.CASES, *bench_ascend.CASES],
    "attention": [*bench_attention.CASES, *bench_pools.CASES],
    "caches": bench_caches.CASES,
    "growth": bench_growth.CASES,
    "first": bench_first.CASES,
}
PEERS = "libggml-python", "onnxruntime", "torch"
PAUSE = 0.1  # seconds; threads of peers go on waiting, at full speed, for tens of milliseconds


@click.command()
@click.option(
    "--json", "folder", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER",
    help="Write the figures and the machine to a file of each suite in FOLDER.",
)  # fmt: skip
@click.option("--only", default="", metavar="TEXT", help="Only what contains TEXT in 'SUITE CASE'.")
@click.option("--rounds", default=11, show_default=True, help="Runs of each case; medians are shown.")
def bench(folder, only, rounds):
    """Measure operators beside plain parallel copies or reads of the same bytes, and beside their peers.

    What is compared alternates; the bytes are those an operator must read and write, and a copy reads and
    writes as many. Sets of data rotate so that they come from memory, not from a cache. Outputs that are
    given are compared with a copy into memory that is there, outputs that are made with one into new memory.
    Attention is compared with a read of its cache, and with torch and onnxruntime where they are installed.
    Figures of cases left out stay in their file if the same machine measured them.

    \b
    Examples:
      kvkit bench --only "attention decode int8"
      kvkit bench --json benchmarks/results
    """
    title = f"{numba.get_num_threads()} threads of {binding.get_host_cpu_name()}; medians of {rounds}"
    suites = {
        suite: [case for case in cases if only in f"{suite} {case.name}"] for suite, cases in SUITES.items()
    }
    if not any(suites.values()):
        raise argument_error("--only", f"text of a case of the suites {', '.join(SUITES)}", brief(only))
    for suite, chosen in suites.items():
        if not chosen:
            continue
        table = show.table(title, "case", "µs", "GB/s", "Gop/s", "as fast as", "goals missed")
        results = []
        for case in chosen:
            results.append(measure(case, rounds))
            table.add_row(*row(results[-1]))
        show.console(width=None if sys.stdout.isatty() else 130).print(table)
        if folder:
            write(folder / f"{suite}.json", results, rounds, [case.name for case in SUITES[suite]])


def measure(case, rounds):
    """Median seconds of a case and of what is beside it, in turn, after two warm-ups of each.

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


def row(result):
    """A result for the terminal."""
    seconds, goals = result["seconds"], result.get("goals", {})
    speeds = [
        f"{result[key] / seconds / 1e9:.1f}" if key in result else "" for key in ("bytes", "operations")
    ]
    beside, missed = [], [f"{result['limit']} s"] if seconds > result.get("limit", seconds) else []
    for name in result.get("beside", {}):
        ratio = show.beside(result, name)
        beside.append(f"{name} {show.times(name, ratio)}")
        if ratio and ratio < goals.get(name, 0):
            missed.append(f"{name} {show.times(name, goals[name])}")
    return result["case"], f"{seconds * 1e6:,.0f}", *speeds, ", ".join(beside), ", ".join(missed)


def write(path, results, rounds, names):
    """Figures into a file, in the order of `names`, among those it holds of the same machine."""
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
    """What the figures were measured on."""
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
    """Versions of the peers that are installed."""
    found = {}
    for name in PEERS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
