"""Append tokens to pools of pages, and copy their blocks."""

from __future__ import annotations

from kvkit import cpu
from kvkit.checks.paged import PoolAppend
from kvkit.typed import Array

COPIED_BYTES = 2**20


def append_to_pools(call: PoolAppend) -> None:
    """Store tokens in pools of pages: as copies of their bits, in one launch, or as codes."""
    if not len(call.pieces):
        return
    moved = [side for side in call.sides if side.data_dtype == side.cache_format]
    launches = [
        cpu.copy.pieces.encode(side, call.pieces)
        for side in call.sides
        if side.data_dtype != side.cache_format
    ]
    if moved:
        arrays = [side.tokens for side in moved], [side.pool for side in moved]
        launches.append(cpu.copy.pieces.prepare_pieces("store", *arrays, call.pieces, moved[0].pool.shape[1]))
    cpu.launches.start(*launches)


def copy_blocks(source: Array, target: Array, src: Array, dst: Array) -> None:
    """Copy checked blocks, some at a time, so that numpy's temporary copy stays near the core."""
    some = max(1, COPIED_BYTES * len(source) // max(source.nbytes, 1))
    for i in range(0, len(src), some):
        target[dst[i : i + some]] = source[src[i : i + some]]
