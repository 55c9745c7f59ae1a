"""The distances at which attention prefetches rows of a cache, by processor and by query rows.

They decide speed only, never a bit of a result. A processor is known by its vendor, family and instructions:
LLVM's name of it is wrong behind hypervisors.
"""

import functools
from typing import NamedTuple

from llvmlite import binding

from kvkit.runtime.processor import this_processor

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
    long_run: int = (
        NEVER  # runs of so many bytes are read faster by one query row with few prefetches or none
    )
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


FAR = Distance(
    16 * KB
)  # with blocks of 64 tokens, rows must be prefetched a block ahead: they are read twice
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


@functools.cache
def distances() -> Distances:
    """Return the distances of this processor."""
    return line_of(this_processor(), binding.get_host_cpu_features()).distances


def line_of(processor, features) -> Line:
    """Return the line of the table for a processor with these features, {LLVM's word: whether it has it}."""
    return next(
        line
        for line in TABLE
        if line.vendor in ("", processor.vendor)
        and line.family in (0, processor.family)
        and (not line.needs or features.get(line.needs))
    )
