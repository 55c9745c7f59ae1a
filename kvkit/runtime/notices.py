"""Print a notice on a terminal before a compilation of more than a second, unless ``KVKIT_QUIET=1``."""

import os
import sys

SECONDS = {  # by function: (what the notice names, seconds until the call runs, on a core of 2024)
    "kvkit.cpu.attention.scheduler.schedule": ("attention", 7),
    "kvkit.cpu.attention.scheduler.work": ("attention", 6),
    "kvkit.cpu.copy.rows.quantized_panels.<locals>.transfer": ("a store of codes", 2),
    "kvkit.checks.scan.scan_rows": ("checks of index tensors", 2),
    "kvkit.checks.slots.plain_pass": ("checks of slots", 2),
    "kvkit.checks.slots.compressed_pass": ("checks of slots", 2),
}
SHOWN: set[str] = set()


def compiling(function: str, cpu: str) -> None:
    """Print that a function is about to be compiled for a CPU, if that takes long."""
    subject, seconds = SECONDS.get(function, ("", 0))
    wanted = os.environ.get("KVKIT_QUIET") != "1" and sys.stderr is not None and sys.stderr.isatty()
    if wanted and subject and subject not in SHOWN:
        SHOWN.add(subject)
        print(f"kvkit: compiling {subject} for {cpu}, once, about {seconds} s", file=sys.stderr, flush=True)
