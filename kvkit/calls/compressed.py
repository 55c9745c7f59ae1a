"""Run checked calls on compressed caches."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvkit import cpu
from kvkit.checks.compressed import CompressCall
from kvkit.typed import Array


def compress(call: CompressCall, out: Any = None) -> tuple[Array, Array]:
    """Pool tokens and move the states on; return the finished rows, and the row of each token or -1."""
    rows, row_of_token = call.results.arrays(out)
    row_of_token[...] = call.row_of_token
    pooled = np.ascontiguousarray(rows)  # a copy of an `out` with gaps
    if len(call.kv):
        cpu.launches.start(cpu.recurrent.pooling.prepare_pooling(call, pooled))
    if call.rope is not None:
        pooled = call.rope.rotate(pooled, call.windows * call.ratio)
    if pooled is not rows:
        rows[...] = pooled
    return rows, row_of_token
