"""Drawings for a terminal or a page: what lies where in a layout's memory, and whose a cache's rows are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from kvkit.checks.words import describe, wrong
from kvkit.layouts import NAMED, Layout, parse
from kvkit.tools import svg
from kvkit.tools.boxes import boxes, drawn_sizes, strides

Kind = Literal["text", "svg"]
ACROSS = 6  # boxes in a line
MOST_LINES = 24
LETTERS = "abcdefghijklmnopqrstuvwxyz"
FREE, STALE, SHARED = ".", "~", "#"
CLASSES = {"K": "key", "V": "value", "KV": "both", "s": "scale"}
WHOSE = {FREE: "free", STALE: "stale, of no sequence", SHARED: "shared by several"}
MOST_ROWS = 1_000_000


def layout(name: str | Layout, *, sizes: Mapping[str, int] | None = None, kind: Kind = "text") -> str:
    """The memory of a layout, box by box, with the stride of every axis.

    Parameters
    ----------
    name : str or Layout
        A line, or a name that `kvkit.layouts.parse` knows.
    sizes : mapping, optional
        Of the axes l, b, n, h, c to draw; small ones if not given.
    kind : {"text", "svg"}
        For a terminal, or a page, light or dark as its reader's.

    Returns
    -------
    str

    Raises
    ------
    KvkitError
        If there is no such layout, or if sizes contradict it.

    Examples
    --------
    >>> from kvkit.tools import draw
    >>> print(draw.layout("| b n h (kv c)", sizes={"b": 1, "n": 2, "h": 1}))
    | b n h (kv c)
    one array
    <BLANKLINE>
    axis  length  stride
    b          1      16
    n          2       8
    h          1       8
    kv         2       4
    c          4       1
    <BLANKLINE>
    b0 | K n0 h0 | V n0 h0 | K n1 h0 | V n1 h0 |
    """
    check_kind(kind)
    line = parse(name)
    found = drawn_sizes(line, sizes)
    title = f"{name}: {line}" if str(name) in NAMED else str(line)
    sides = [0, 1] if line.value_axes != line.axes else [0]
    lines: list[tuple[str, list[svg.Cell]]] = [(title, []), (several(line, found), [])]
    for side in sides:
        heading = ("keys", "values")[side] if len(sides) > 1 else ""
        lines += [("", []), *((text, []) for text in table(line, side, found, heading)), ("", [])]
        lines += memory(line, side, found)
    return drawn(title, lines, kind, 0)


def several(line: Layout, sizes: Mapping[str, int]) -> str:
    """How many arrays there are, in words."""
    if not line.lists:
        return "one array"
    counts = " of ".join(f"{2 if axis == 'kv' else sizes[axis]} ({axis})" for axis in line.lists)
    return f"lists of {counts} arrays; one of them:"


def table(line: Layout, side: int, sizes: Mapping[str, int], heading: str) -> list[str]:
    """Length and stride, in elements, of each axis."""
    rows = strides(line, side, sizes)
    wide = max(4, *(len(axis) for axis, _, _ in rows))
    text = [f"{'axis':{wide}}  length  stride{'  of ' * bool(heading)}{heading}"]
    return text + [f"{axis:{wide}}  {size:6}  {stride:6}" for axis, size, stride in rows]


def memory(line: Layout, side: int, sizes: Mapping[str, int]) -> list[tuple[str, list[svg.Cell]]]:
    """Lines of boxes, cut where an axis begins again."""
    found = boxes(line, side, sizes)
    total = sum(box.last - box.first + 1 for box in found)
    each = total / len(found)
    counts = [stride * size // each for _, size, stride in strides(line, side, sizes)]
    over = min((int(count) for count in counts if count > ACROSS), default=len(found))
    across = max(count for count in range(1, ACROSS + 1) if over % count == 0)
    lines: list[tuple[str, list[svg.Cell]]] = []
    for begin in range(0, len(found), across):
        part = found[begin : begin + across]
        if len(lines) == MOST_LINES:
            lines.append((f"... {len(found) - begin} more", []))
            break
        outer = " ".join(f"{axis}{part[0].at[axis]}" for axis in "lb" if axis in part[0].at)
        cells = [svg.Cell(box.label, CLASSES[box.kind], len(box.label) + 3) for box in part]
        lines.append((outer, cells))
    return lines


def owners(
    block_tables: ArrayLike, context_lens: ArrayLike, num_blocks: int, page_size: int
) -> list[tuple[int, ...]]:
    """The sequences that each row of a paged cache belongs to.

    Parameters
    ----------
    block_tables : ndarray of int, shape [B, M]
        The blocks of each sequence; only those that its length needs are looked at.
    context_lens : ndarray of int, shape [B]
        Tokens of each sequence.
    num_blocks, page_size : int
        Blocks of the cache, and rows of one.

    Returns
    -------
    list of tuple of int
        For each row, block after block, its sequences.

    Raises
    ------
    KvkitError
        If a sequence needs a block that is not there.

    Examples
    --------
    >>> from kvkit.tools import draw
    >>> draw.owners([[1, 0], [1, -1]], [3, 2], num_blocks=2, page_size=2)
    [(0,), (), (0, 1), (0, 1)]
    """
    tables, lengths = np.asarray(block_tables), np.asarray(context_lens)
    if tables.ndim != 2 or tables.dtype.kind not in "iu":
        raise wrong("block_tables", "integers of shape [B, M]", describe(tables))
    if lengths.shape != tables.shape[:1] or lengths.dtype.kind not in "iu":
        raise wrong("context_lens", f"integers of shape ({len(tables)},)", describe(lengths))
    if page_size < 1 or not 0 <= num_blocks <= MOST_ROWS // page_size:
        raise wrong(
            "num_blocks", f"blocks of at most {MOST_ROWS} rows in all", f"{num_blocks} of {page_size}"
        )
    found: list[list[int]] = [[] for _ in range(num_blocks * page_size)]
    for sequence, (row, count) in enumerate(zip(tables.tolist(), lengths.tolist(), strict=True)):
        if not 0 <= count <= len(row) * page_size:
            raise wrong(f"context_lens[{sequence}]", f"0 to {len(row) * page_size}", str(count))
        for token in range(count):
            block = row[token // page_size]
            if not 0 <= block < num_blocks:
                where = f"block_tables[{sequence}, {token // page_size}]"
                raise wrong(where, f"a block of {num_blocks}", str(block))
            found[block * page_size + token % page_size].append(sequence)
    return [tuple(each) for each in found]


def cells(
    rows: Sequence[Sequence[int]],
    page_size: int = 16,
    *,
    stale: Any = None,
    kind: Kind = "text",
) -> str:
    """Whose the rows of a cache are: a letter and a colour for each sequence.

    Parameters
    ----------
    rows : sequence of sequences of int
        For each row the sequences that it belongs to, as `owners` has it, or the cells of llama.cpp.
    page_size : int
        Rows that are drawn in a line.
    stale : ndarray of bool, optional
        Rows that hold something; those of no sequence are drawn as stale, not as free.
    kind : {"text", "svg"}
        For a terminal, or a page, light or dark as its reader's.

    Returns
    -------
    str
        ``.`` is free, ``~`` stale, ``#`` shared by several sequences; sequences are a, b, c and so on, the
        27th is a again.

    Raises
    ------
    KvkitError
        If `stale` has another length.

    Examples
    --------
    >>> from kvkit.tools import draw
    >>> rows = draw.owners([[1, 0], [1, -1]], [3, 2], num_blocks=3, page_size=2)
    >>> print(draw.cells(rows, 2))
    0  a.
    1  ##
    2  ..
    a 3 rows, b 2 rows; . free 3, # shared by several 2
    """
    check_kind(kind)
    if page_size < 1:
        raise wrong("page_size", "a positive integer", str(page_size))
    held = np.zeros(len(rows), bool) if stale is None else np.asarray(stale, bool)
    if held.shape != (len(rows),):
        raise wrong("stale", f"a boolean for each of {len(rows)} rows", describe(held))
    marks = [mark_of(sequences, used) for sequences, used in zip(rows, held.tolist(), strict=True)]
    counts: dict[int, int] = {}
    for sequences in rows:
        for sequence in sequences:
            counts[sequence] = counts.get(sequence, 0) + 1
    lines: list[tuple[str, list[svg.Cell]]] = []
    for page in range(-(-len(rows) // page_size)):
        part = slice(page * page_size, (page + 1) * page_size)
        drawn_cells = [cell_of(mark, who) for mark, who in zip(marks[part], rows[part], strict=True)]
        lines.append((str(page), drawn_cells))
    lines.append((legend(counts, marks), []))
    if kind == "text":
        wide = len(str(max(len(lines) - 2, 0)))
        return "\n".join(
            f"{label:>{wide}}  {''.join(cell.text for cell in row)}" if row else label for label, row in lines
        )
    return drawn("rows of a cache, by sequence", lines, kind, max(counts, default=-1) + 1)


def mark_of(sequences: Sequence[int], used: bool) -> str:
    if len(sequences) > 1:
        return SHARED
    if not sequences:
        return STALE if used else FREE
    return LETTERS[sequences[0] % len(LETTERS)]


def cell_of(mark: str, sequences: Sequence[int]) -> svg.Cell:
    if mark in WHOSE:
        title = f"{WHOSE[mark]} {', '.join(map(str, sequences))}".strip()
        return svg.Cell(mark, WHOSE[mark].partition(",")[0].partition(" ")[0], 2, title)
    return svg.Cell(mark, f"s{sequences[0]}", 2, f"sequence {sequences[0]}")


def legend(counts: Mapping[int, int], marks: list[str]) -> str:
    """What letters and signs stand for, and how many rows each has."""
    shown = [f"{LETTERS[who % len(LETTERS)]} {count} rows" for who, count in sorted(counts.items())[:12]]
    more = [f"{len(counts) - 12} more sequences"] if len(counts) > 12 else []
    others = [f"{mark} {WHOSE[mark]} {marks.count(mark)}" for mark in WHOSE if mark in marks]
    return "; ".join(filter(None, [", ".join(shown + more), ", ".join(others)]))


def check_kind(kind: str) -> None:
    if kind not in ("text", "svg"):
        raise wrong("kind", "'text' or 'svg'", repr(kind))


def drawn(title: str, lines: list[tuple[str, list[svg.Cell]]], kind: Kind, sequences: int) -> str:
    """Lines of cells as text, or as a picture."""
    if kind == "svg":
        return svg.picture(title, lines, sequences)
    indent = max((len(label) for label, cells in lines if cells), default=0)
    return "\n".join(
        f"{label:{indent}} | {' | '.join(cell.text for cell in row)} |" if row else label
        for label, row in lines
    )
