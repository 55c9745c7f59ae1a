"""Waiting is told: before a compilation of more than a second, a line on a terminal, once.

``KVKIT_QUIET=1`` keeps it quiet.
"""

import os
import sys

SECONDS = {  # by function: (what is compiled, seconds for it and what follows on a core of 2024)
    "kvkit.cpu.attention.scheduler.schedule": ("attention", 7),
    "kvkit.cpu.attention.scheduler.work": ("attention", 6),
    "kvkit.cpu.copy.rows.quantized_panels.<locals>.transfer": ("a store of codes", 2),
    "kvkit.checks.scan.scan_rows": ("checks of index tensors", 2),
    "kvkit.checks.slots.plain_pass": ("checks of slots", 2),
    "kvkit.checks.slots.compressed_pass": ("checks of slots", 2),
}
SHOWN: set[str] = set()


def compiling(function, cpu):
    """Say that `function`, a name, is about to be compiled for a CPU, if that takes long."""
    what, seconds = SECONDS.get(function, ("", 0))
    if what and what not in SHOWN and is_wanted():
        SHOWN.add(what)
        print(f"kvkit: compiling {what} for {cpu}, once, about {seconds} s", file=sys.stderr, flush=True)


def is_wanted():
    """Whether somebody is there to be told."""
    return os.environ.get("KVKIT_QUIET") != "1" and sys.stderr is not None and sys.stderr.isatty()
