"""The compiled pass over positions of packed sequences, which returns the first broken rule as numbers."""

import numpy as np
from numba import types

from kvkit.runtime.jit import INDEX, Integers, address, compiled
from kvkit.typed import Array

INT64_MAX = np.iinfo(np.int64).max
# Broken rules: a start falls; a first position is below 0; a last one is above int64; max_seqlen is too low.
FINE, STARTS, FIRST, LAST, HINT = range(5)


def scan_positions(starts: Array, first: Array, longest: int) -> list[int]:
    """Return (rule, sequence, its length) for the first rule that sequences break, or (FINE, 0, 0)."""
    found = np.empty(3, np.int64)
    positions.code.ctypes(address(found), address(starts), address(first), len(first), longest)
    return found.tolist()


@compiled(types.void(*[INDEX] * 3, types.int64, types.int64))
def positions(found: Integers, starts: Integers, first: Integers, batch: int, longest: int) -> None:
    """Write the result of `scan_positions`."""
    found[0], found[1], found[2] = FINE, 0, 0
    for b in range(batch):
        length = starts[b + 1] - starts[b]
        rule = FINE
        if starts[b + 1] < starts[b]:
            rule, length = STARTS, 0
        elif first[b] < 0:
            rule = FIRST
        elif first[b] > INT64_MAX - length:
            rule = LAST
        elif length > longest:
            rule = HINT
        if rule != FINE:
            found[0], found[1], found[2] = rule, b, length
            return
