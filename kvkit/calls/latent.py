"""Read rows of latent caches, and write them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvkit.checks.latent import LatentPool
from kvkit.formats import BFLOAT16, FLOAT32
from kvkit.formats.coding import decode, encode
from kvkit.typed import Array

ROWS = 2**14  # rows that are read at a time, some 20 MB


def gather_rows(pool: LatentPool, slots: Array, dtype: np.dtype) -> Array:
    """Return the rows of some slots, floats [slots, dim]; codes become floats of `dtype`."""
    places = np.divmod(slots, pool.page_size)
    parts = [part[places] for part in pool.parts]
    rows = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    if pool.format is None:
        return rows
    return decode(rows, pool.format).astype(dtype, copy=False)


def scatter_rows(pool: LatentPool, slots: Array, rows: Array) -> None:
    """Write rows [slots, dim] to some slots, encoded if the pool has a format."""
    places = np.divmod(slots, pool.page_size)
    stored = rows if pool.format is None else encode(rows, pool.format)["codes"]
    begin = 0
    for part in pool.parts:
        width = part.shape[2]
        part[places] = stored[:, begin : begin + width]
        begin += width


def widened_dtype(query: Array) -> np.dtype:
    """Return the dtype that codes are decoded to: bfloat16 for queries of 16 bits, as FlashMLA has them."""
    return FLOAT32.dtype if query.dtype == FLOAT32.dtype else BFLOAT16.dtype


def pieces_of_contexts(lengths: Array, queries: Array) -> Iterator[list[tuple[int, int, int]]]:
    """Yield pieces (sequence, begin, end) of contexts, in lists of some `ROWS` rows.

    A context that is longer comes alone, piece after piece; its last piece has the rows of all its queries.
    """
    batch: list[tuple[int, int, int]] = []
    held = 0
    for sequence, (length, count) in enumerate(zip(lengths.tolist(), queries.tolist(), strict=True)):
        last = max(0, length - max(count, 1)) // ROWS * ROWS  # where the last piece begins
        yield from ([(sequence, begin, begin + ROWS)] for begin in range(0, last, ROWS))
        if held and held + length - last > ROWS:
            yield batch
            batch, held = [], 0
        batch.append((sequence, last, length))
        held += length - last
    if batch:
        yield batch
