"""`kvkit bench`: run benchmarks/suites, which only a checkout of kvkit has."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import click

import kvkit
from kvkit.errors import KvkitError, argument_error, brief
from kvkit.formats.known import ALIASES
from kvkit_cli import show


def is_chosen(title: str, only: str) -> bool:
    """Return whether a case's title contains a text, in which formats may be written as everywhere."""
    names = re.sub(r"\w+", lambda word: ALIASES.get(word[0], word[0]), only)
    return only in title or re.sub(r":g(\d+)", r" in groups of \1", names) in title


@click.command()
@click.option(
    "--json", "folder", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER",
    help="Write figures and machine to FOLDER, a file for each suite.",
)  # fmt: skip
@click.option(
    "--only", default="", metavar="TEXT",
    help="Run only cases whose 'SUITE CASE' contains TEXT, such as 'decode int8:g32' or fp8.",
)  # fmt: skip
@click.option(
    "--rounds", default=11, type=click.IntRange(1), show_default=True,
    help="Runs of each case; medians are shown.",
)  # fmt: skip
def bench(folder: Path | None, only: str, rounds: int) -> None:
    """Measure operators beside plain copies or reads, and beside other libraries.

    The operator and the copy run alternately. GB/s counts the bytes that the operator must read and write;
    the copy reads and writes as many. Several sets of data take turns, so that data come from memory. An
    operator that writes into a given array is compared with a copy into existing memory, others with a copy
    into new memory. Attention is compared with a read of its cache and with torch, onnxruntime and ggml if
    they are installed; decoding also with its multiplications alone. With --only, figures of other cases
    stay in their file if this machine measured them.

    \b
    Examples:
      kvkit bench --only "decode int8"
      kvkit bench --json benchmarks/results
    """
    checkout = Path(kvkit.__file__).parents[1]
    if not (checkout / "benchmarks" / "suites" / "catalog.py").is_file():
        raise KvkitError("kvkit bench: its suites are not installed: run it in a checkout of kvkit's sources")
    sys.path.insert(0, str(checkout))
    names = "catalog", "measuring"
    catalog, measuring = (importlib.import_module(f"benchmarks.suites.{name}") for name in names)
    machine = measuring.machine()
    title = f"{machine['threads']} threads of {machine['cpu']}; medians of {rounds}"
    suites = {
        suite: [case for case in cases if is_chosen(f"{suite} {case.name}", only)]
        for suite, cases in catalog.SUITES.items()
    }
    if not any(suites.values()):
        raise argument_error("--only", f"text of a case of the suites {', '.join(suites)}", brief(only))
    for suite, chosen in suites.items():
        if not chosen:
            continue
        table = show.table(title, "case", "µs", "GB/s", "Gop/s", "as fast as", "goals missed")
        results = []
        for case in chosen:
            results.append(measuring.measure(case, rounds))
            table.add_row(*measuring.table_row(results[-1]))
        show.console(width=None if sys.stdout.isatty() else 130).print(table)
        if folder:
            names = [case.name for case in catalog.SUITES[suite]]
            measuring.write_figures(folder / f"{suite}.json", results, rounds, names)
