"""Find the pages of sequences that `PagedCache` saved, and the cells of llama.cpp's tokens."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvkit.checks.index_tensors import index
from kvkit.checks.values import integer
from kvkit.errors import argument_error, brief
from kvkit.layouts import tables
from kvkit.layouts.tables import BlockTable


def pages_of_saved(arrays: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> BlockTable:
    """Return the block tables of a saved `PagedCache`; blocks are numbered by their places in the file."""
    size, sequences = about["arguments"]["page_size"], about["sequences"]
    saved = [saved_table(arrays, i, each["length"], size) for i, each in enumerate(sequences)]
    if any("intact" in each for each in sequences):  # tokens were removed or moved
        return tokens_of_saved(saved, size)
    numbers = np.full((len(saved), max((len(row) for row, _ in saved), default=0)), -1)
    for places, (row, _) in zip(numbers, saved, strict=True):
        places[: len(row)] = row
    return tables.from_blocks(numbers, np.array([ends[-1] for _, ends in saved], np.int64), size)


def saved_table(
    arrays: Mapping[str, np.ndarray], i: int, length: int, size: int
) -> tuple[np.ndarray, list[int]]:
    """Check a saved sequence; return (places of its blocks in the file, ends of its segments)."""
    name = f"sequences.{i}.block_table"
    blocks, table = index("blocks", arrays["blocks"], 1), index(name, arrays[name], 1)
    if (np.diff(blocks) <= 0).any():
        raise argument_error("blocks", "ascending ids of blocks", brief(blocks.tolist()))
    missing = table[~np.isin(table, blocks)]
    if len(missing):
        raise argument_error(name, "ids of blocks that the file has", int(missing[0]))
    ends = [0, *index("segments", arrays.get(f"sequences.{i}.segments", np.arange(0)), 1).tolist()]
    ends.append(integer("length", length, 0))
    if ends != sorted(ends):
        raise argument_error(f"sequences.{i}.segments", f"ascending ends among {length} tokens", ends[1:-1])
    pages = sum(-(-(end - begin) // size) for begin, end in itertools.pairwise(ends))
    if pages != len(table):
        raise argument_error(name, f"{pages} blocks for {length} tokens", len(table))
    return np.searchsorted(blocks, table), ends


def tokens_of_saved(saved: list[tuple[np.ndarray, list[int]]], size: int) -> BlockTable:
    """Return block tables with pages of one token, because segments may begin within a page."""
    places, lengths = [np.empty(0, np.int64)], [ends[-1] for _, ends in saved]
    for table, ends in saved:
        page = 0
        for begin, end in itertools.pairwise(ends):
            rows = np.arange(end - begin)
            places.append(table[page + rows // size] * size + rows % size)
            page += -(-(end - begin) // size)
    owners = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.concatenate([np.arange(0), *map(np.arange, lengths)])
    return tables.from_tokens(np.concatenate(places), owners, positions, len(lengths))


def published_rows(arrays: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> np.ndarray:
    """Return which rows of a saved `PagedCache` are in blocks that a new sequence may share."""
    blocks, published = (arrays.get(name, ()) for name in ("blocks", "published.blocks"))
    return np.repeat(np.isin(blocks, published), about["arguments"]["page_size"])


def order_cells(arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return (cells, sequences) of llama.cpp in the order of positions, and of rows and columns of images."""
    cells = np.repeat(np.arange(len(arrays["cache_cells.positions"])),
                      np.diff(arrays["cache_cells.sequence_starts"]))  # fmt: skip
    _, numbers = np.unique(arrays["cache_cells.sequences"], return_inverse=True)
    places = [arrays[name][cells] for name in ("cache_cells.x", "cache_cells.y") if name in arrays]
    order = np.lexsort((*places, arrays["cache_cells.positions"][cells], numbers))
    return cells[order], numbers[order]


def pages_of_cells(arrays: Mapping[str, np.ndarray]) -> BlockTable:
    """Return block tables of llama.cpp's cells. Sequences are numbered anew, in ascending order."""
    cells, numbers = order_cells(arrays)
    return tables.from_tokens(cells, numbers, arrays["cache_cells.positions"][cells], gaps=True)
