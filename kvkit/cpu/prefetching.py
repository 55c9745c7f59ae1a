"""The distances at which attention prefetches rows of a cache, by processor and by query rows.

They decide speed only, never a bit of a result. A processor is known by its vendor, family and instructions:
LLVM's name of it is wrong behind hypervisors. `kvkit warm` measures distances on the machine itself, and they
are kept beside the compiled code. KVKIT_TUNE=off takes those of the table.
"""

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from llvmlite import binding

from kvkit.errors import argument_error
from kvkit.runtime import disk_cache, jit, source_digest
from kvkit.runtime.processor import this_processor
from kvkit.version import __version__

KB = 1024
NEVER = ALWAYS = 2**62  # bytes of no run: as the least never, as the most always


class Distance(NamedTuple):
    """The distance at which rows are prefetched, where the rows of a head follow each other."""

    bytes: int
    near: bool = False  # whether into L1, else into L2
    tokens: int = 64  # the most tokens ahead


class Distances(NamedTuple):
    """The distances for tiles of 1, of 2 or 4, and of 8 query rows, and what else a processor prefers."""

    one_row: Distance
    four_rows: Distance
    eight_rows: Distance
    long_run: int = NEVER  # one query row reads runs of so many bytes faster with few prefetches or none
    scaled_run: int = 0  # the most bytes of a run of codes whose scales are prefetched too
    short_run: int = 0  # the most bytes of a run whose rows are prefetched again where their block begins
    touched_run: int = 0  # the most bytes of a run whose first line is prefetched a block before the others

    def of_rows(self, rows: int) -> Distance:
        """Return the distance for a tile of so many query rows."""
        return self.one_row if rows == 1 else self.four_rows if rows <= 4 else self.eight_rows


class Line(NamedTuple):
    """A line of the table: it holds for processors of a vendor and family that have an instruction set."""

    vendor: str
    family: int  # 0: any
    needs: str  # an instruction set, by LLVM's word for it
    distances: Distances
    measured: str  # where


FAR = Distance(16 * KB)  # several query rows read a block of 64 tokens twice: rows must come a block earlier
NEAR = Distance(5 * KB, near=True)
EARLIER = Distance(5 * KB, near=True, tokens=40)

# The first line that fits a processor holds, the last one for all others.
TABLE = (
    Line("AuthenticAMD", 25, "avx512f", Distances(FAR, FAR, FAR, 128 * KB, ALWAYS, 4 * KB), "Zen 4, 4 cores"),
    Line("AuthenticAMD", 26, "avx512f", Distances(NEAR, FAR, FAR), "Zen 5, 2 cores"),
    Line("AuthenticAMD", 0, "", Distances(FAR, FAR, FAR), "not measured: as Zen 5 with several query rows"),
    Line(
        "GenuineIntel", 6, "avx512bf16",
        Distances(Distance(4 * KB), FAR, FAR, scaled_run=8 * KB, touched_run=8 * KB),
        "Emerald Rapids and another Xeon with AMX, 2 cores each",
    ),
    Line("", 0, "", Distances(EARLIER, EARLIER, EARLIER), "Cascade Lake"),
)  # fmt: skip


TUNE = "KVKIT_TUNE"
measured: list[Distances] = []  # in use while they are measured; the last one holds


def distances() -> Distances:
    """Return the distances of this processor."""
    return measured[-1] if measured else of_this_machine()[0]


@contextlib.contextmanager
def using(distances: Distances) -> Iterator[None]:
    """Use these distances for calls that are prepared meanwhile."""
    measured.append(distances)
    try:
        yield
    finally:
        measured.pop()


@functools.cache
def of_this_machine() -> tuple[Distances, str]:
    """Return the distances of this processor, and where they are from."""
    line = line_of(this_processor(), binding.get_host_cpu_features())
    tuned = load(line.distances) if is_tuning() else None
    return (line.distances, f"table, {line.measured}") if tuned is None else (tuned, "measured here")


def is_tuning() -> bool:
    """Return whether distances that were measured on this machine are used."""
    setting = os.environ.get(TUNE, "")
    if setting not in ("", "on", "off"):
        raise argument_error(TUNE, "on or off", repr(setting))
    return setting != "off"


def tuned_file() -> Path | None:
    """Return the path of this machine's distances, beside the compiled code; None if no code is kept."""
    folder, sources = jit.cache_folder(), source_digest.digest(__name__)
    if folder is None or sources is None:
        return None
    key = hashlib.sha256(repr((this_processor(), __version__)).encode()).hexdigest()[:20]
    return folder / f"{__name__.replace('.', '-')}-distances-{sources[: jit.SOURCE_LETTERS]}-{key}.bin"


def load(default: Distances) -> Distances | None:
    """Return the distances that were measured on this machine; None if none are kept."""
    file = tuned_file()
    payload = disk_cache.load(file) if file else None
    if payload is None:
        return None
    fields: dict[str, Any] = json.loads(payload)
    for name, value in fields.items():
        fields[name] = Distance(*value) if isinstance(value, list) else value
    return default._replace(**fields)


def save(distances: Distances) -> None:
    """Keep the distances that were measured on this machine."""
    if file := tuned_file():
        disk_cache.save(file, json.dumps(distances._asdict()).encode())
    of_this_machine.cache_clear()


def line_of(processor, features) -> Line:
    """Return the line of the table for a processor with these features, {LLVM's word: whether it has it}."""
    return next(
        line
        for line in TABLE
        if line.vendor in ("", processor.vendor)
        and line.family in (0, processor.family)
        and (not line.needs or features.get(line.needs))
    )
