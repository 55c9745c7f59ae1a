"""`kvkit bench`: operators in bytes per second, beside a plain copy of the same bytes in the same run."""

import json
import platform
import statistics
import sys
import time
from pathlib import Path

import click
import numba
import numpy as np
from llvmlite import binding, ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from kvkit.version import __version__
from kvkit_cli import show
from kvkit_cli.bench_cases import CASES


@click.command()
@click.option(
    "--json", "path", type=click.Path(path_type=Path), help="Write the figures and the machine to a file."
)
@click.option("--only", default="", metavar="TEXT", help="Only cases whose name contains TEXT.")
@click.option("--rounds", default=11, show_default=True, help="Runs of each case; medians are shown.")
def bench(path, only, rounds):
    """Measure each operator beside a plain parallel copy of the same bytes.

    Operator and copy alternate; the bytes are those an operator must read and write, and the copy reads and
    writes as many. Sets of data rotate so that they come from memory, not from a cache. Outputs that are
    given are compared with a copy into memory that is there, outputs that are made with one into new memory.
    """
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
    table = show.table(
        f"{numba.get_num_threads()} threads of {binding.get_host_cpu_name()}; medians of {rounds}",
        "case", "µs", "GB/s", "copy", "of it", "goal",
    )  # fmt: skip
    results = []
    for case in CASES:
        if only in case.name:
            results.append(measure(case, rounds))
            table.add_row(*row(results[-1]))
    show.console(width=None if sys.stdout.isatty() else 100).print(table)
    if path:
        report = {"kvkit": __version__, "machine": machine(), "rounds": rounds, "results": results}
        path.write_text(json.dumps(report, indent=1) + "\n")


def measure(case, rounds):
    """Seconds of a case and of the copy beside it, alternating, after a warm-up of each."""
    run, moved = case.prepare()
    copy = plain_copy(moved, case.fresh) if moved else None
    times, copies = [], []
    for i in range(rounds + 2):
        begin = time.perf_counter()
        for j in range(case.calls):
            run(i * case.calls + j)
        middle = time.perf_counter()
        if copy:
            copy(i)
        times.append((middle - begin) / case.calls)
        copies.append(time.perf_counter() - middle)
    result = {"case": case.name, "seconds": statistics.median(times[2:]), "goal": case.goal}
    if copy:
        result |= {"bytes": moved, "copy_seconds": statistics.median(copies[2:])}
    return result


def row(result):
    goal = result["goal"]
    if "bytes" not in result:
        return result["case"], f"{result['seconds'] * 1e6:,.0f}", "", "", "", ""
    speeds = [result["bytes"] / result[key] / 1e9 for key in ("seconds", "copy_seconds")]
    share = f"{speeds[0] / speeds[1]:.0%}"
    cells = f"{result['seconds'] * 1e6:,.0f}", *(f"{speed:.1f}" for speed in speeds), share
    return result["case"], *cells, f"{goal:.0%}" if goal else ""


def plain_copy(moved, fresh):
    """A function of the round that copies half of `moved` bytes, so that it reads and writes as many."""
    size = moved // 2
    sets = max(1, -(-(256 * 2**20) // size))
    source = np.ones(sets * size, np.uint8)
    target = np.ones(1 if fresh else sets * size, np.uint8)

    def copy(i):
        at = i % sets * size
        into = np.empty(size, np.uint8) if fresh else target[at : at + size]
        parallel_copy(into.ctypes.data, source.ctypes.data + at, size, numba.get_num_threads())

    return copy


@intrinsic
def memcpy(typingctx, target, source, size):
    def codegen(context, builder, signature, values):
        pointer = ir.IntType(8).as_pointer()
        function = ir.FunctionType(ir.VoidType(), [pointer, pointer, ir.IntType(64), ir.IntType(1)])
        name = "llvm.memcpy.p0.p0.i64"
        addresses = [builder.inttoptr(value, pointer) for value in values[:2]]
        called = cgutils.get_or_insert_function(builder.module, function, name)
        builder.call(called, [*addresses, values[2], ir.IntType(1)(0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@numba.njit(parallel=True)
def parallel_copy(target, source, size, parts):
    for part in prange(parts):
        begin, end = part * size // parts, (part + 1) * size // parts
        memcpy(target + begin, source + begin, end - begin)


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
