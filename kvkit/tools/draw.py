"""Define the tool `draw`: draw the memory of a layout, or the rows of a cache by sequence."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Literal, NoReturn

import numpy as np
from numpy.typing import ArrayLike

from kvkit.errors import argument_error, describe
from kvkit.layouts import NAMED, Layout, parse
from kvkit.layouts.tables import BlockTable, to_tokens
from kvkit.tools import svg
from kvkit.tools.boxes import boxes, drawn_sizes, outer_axes, strides


class Drawing(ModuleType):
    """Refuses a call of the module, which has the functions."""

    def __call__(self, *arguments: object, **options: object) -> NoReturn:
        raise TypeError("draw: expected draw.layout(NAME) or draw.cells(TABLE), got a call of the module")


sys.modules[__name__].__class__ = Drawing

DrawingKind = Literal["text", "svg"]
ACROSS = 6  # boxes in a line of a drawing
ROWS_ACROSS = 32  # rows in a line if pages are single rows
MOST_NAMES = 12  # the most sequences in a legend
MOST_LINES = 24  # of a drawing of one array
LETTERS = "abcdefghijklmnopqrstuvwxyz"
FREE, STALE, SHARED, PUBLISHED = ".", "~", "#", "="
CLASSES = {"K": "key", "V": "value", "KV": "both", "s": "scale"}
ROW_STATES = {FREE: "free", STALE: "stale", SHARED: "shared", PUBLISHED: "published"}
MOST_ROWS = 1_000_000  # of a cache that is drawn


def layout(name: str | Layout, *, sizes: Mapping[str, int] | None = None, kind: DrawingKind = "text") -> str:
    """Draw the memory of a layout, box by box, with the stride of every axis.

    Parameters
    ----------
    name : str or Layout
        A line, or a name that `kvkit.layouts.parse` knows.
    sizes : mapping, optional
        Lengths of the axes l, b, n, h, c to draw; small ones if not given.
    kind : {"text", "svg"}
        "text" for a terminal; "svg" for a page, which follows the reader's light or dark mode.

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
    drawn = drawn_sizes(line, sizes)
    title = f"{name}: {line}" if str(name) in NAMED else str(line)
    sides = [0, 1] if line.value_axes != line.axes else [0]
    counts = " of ".join(f"{2 if axis == 'kv' else drawn[axis]} ({axis})" for axis in line.lists)
    arrays = f"lists of {counts} arrays; one of them:" if counts else "one array"
    lines: list[tuple[str, list[svg.Cell]]] = [(title, []), (arrays, [])]
    for side in sides:
        heading = ("keys", "values")[side] if len(sides) > 1 else ""
        rows = strides(line, side, drawn)  # in elements
        wide = max(4, *(len(axis) for axis, _, _ in rows))
        text = [f"{'axis':{wide}}  length  stride{'  of ' * bool(heading)}{heading}"]
        text += [f"{axis:{wide}}  {size:6}  {stride:6}" for axis, size, stride in rows]
        lines += [("", []), *((each, []) for each in text), ("", [])]
        lines += memory(line, side, drawn)
    if kind == "svg":
        return svg.picture(title, lines)
    indent = max(len(label) for label, cells in lines if cells)
    return "\n".join(
        f"{label:{indent}} | {' | '.join(cell.text for cell in row)} |".strip() if row else label
        for label, row in lines
    )


def memory(line: Layout, side: int, sizes: Mapping[str, int]) -> list[tuple[str, list[svg.Cell]]]:
    """Return lines of the boxes of one array; if possible, a line begins where an inner axis starts again."""
    found, common = boxes(line, side, sizes), outer_axes(line, side)
    per_box = sum(box.last - box.first + 1 for box in found) / len(found)  # elements
    rows = strides(line, side, sizes)
    page = min((stride // per_box for axis, _, stride in rows if axis in common), default=len(found))
    # After so many boxes an axis starts again. A line has all boxes of the largest axis that fits into it,
    # times a number that divides the next larger axis.
    counts = [count for _, size, stride in rows if (count := stride * size // per_box) <= page]
    whole = max((int(count) for count in counts if count <= ACROSS), default=1)
    larger = min((count for count in counts if count > ACROSS), default=whole)
    across = max(count for count in range(whole, ACROSS + 1, whole) if larger % count == 0)
    lines: list[tuple[str, list[svg.Cell]]] = []
    for begin in range(0, len(found), across):
        part = found[begin : begin + across]
        if len(lines) == MOST_LINES:
            lines.append((f"... {len(found) - begin} more", []))
            break
        labels = [box.label(common) for box in part]
        cells = [svg.Cell(label, CLASSES[box.kind], len(label) + 3)
                 for label, box in zip(labels, part, strict=True)]  # fmt: skip
        lines.append((" ".join(f"{axis}{part[0].at[axis]}" for axis in common), cells))
    return lines


def cells(
    pages: BlockTable,
    num_rows: int | None = None,
    *,
    page_size: int | None = None,
    filled: ArrayLike | None = None,
    published: ArrayLike | None = None,
    kind: DrawingKind = "text",
) -> str:
    """Draw the rows of a cache, each with the letter and colour of the sequence that uses it.

    Parameters
    ----------
    pages : BlockTable
        The rows of each sequence; `kvkit.layouts.tables` converts any engine's tables.
    num_rows : int, optional
        Rows of the cache; by default up to the last row in use.
    page_size : int, optional
        Rows in a line; by default a page, or 32 if pages are single rows.
    filled : ndarray of bool, shape [num_rows], optional
        Rows that hold data. Without a sequence they are drawn as stale, not as free.
    published : ndarray of bool, shape [num_rows], optional
        Rows in blocks that a new sequence may find by a hash of its tokens. Without a sequence they are drawn
        as published, not as stale.
    kind : {"text", "svg"}
        "text" for a terminal; "svg" for a page, which follows the reader's light or dark mode.

    Returns
    -------
    str
        ``.`` is free, ``~`` stale, ``#`` shared by several sequences, ``=`` published. Sequences are a, b, c
        and so on; the 27th is a again.

    Raises
    ------
    KvkitError
        If `num_rows` is less than the rows in use, or too many to draw.

    Examples
    --------
    >>> from kvkit.layouts import tables
    >>> from kvkit.tools import draw
    >>> print(draw.cells(tables.from_blocks([[1, 0], [1, -1]], [3, 2], page_size=2), 6))
    0  a.
    1  ##
    2  ..
    a 3 rows, b 2 rows; . free 3, # shared 2
    """
    check_kind(kind)
    slots, sequences, _ = to_tokens(pages)
    least = int(slots.max(initial=-1)) + 1
    count = least if num_rows is None else num_rows
    if not least <= count <= MOST_ROWS:
        raise argument_error("num_rows", f"{least} to {MOST_ROWS}", str(count))
    unowned = np.full(count, FREE)  # the sign of each row, if no sequence uses it
    for name, sign, rows in ("filled", STALE, filled), ("published", PUBLISHED, published):
        held = np.zeros(count, bool) if rows is None else np.asarray(rows, bool)
        if held.shape != (count,):
            raise argument_error(name, f"a boolean for each of {count} rows", describe(held))
        unowned[held] = sign
    users: list[list[int]] = [[] for _ in range(count)]
    for slot, sequence in zip(slots.tolist(), sequences.tolist(), strict=True):
        users[slot].append(sequence)
    drawn_cells = []
    for owners, sign in zip(users, unowned.tolist(), strict=True):
        if len(owners) == 1:
            letter = LETTERS[owners[0] % len(LETTERS)]
            drawn_cells.append(svg.Cell(letter, f"s{owners[0]}", 2, f"sequence {owners[0]}"))
        else:
            mark = SHARED if owners else sign
            by = f" by sequences {', '.join(map(str, owners))}" if owners else ""
            drawn_cells.append(svg.Cell(mark, ROW_STATES[mark], 2, ROW_STATES[mark] + by))
    across = page_size or (pages.page_size if pages.page_size > 1 else ROWS_ACROSS)
    lines = [(str(at // across), drawn_cells[at : at + across]) for at in range(0, count, across)]
    words = legend(pages.lengths.tolist(), [cell.text for cell in drawn_cells])
    if kind == "svg":
        notes: list[tuple[str, list[svg.Cell]]] = [(words, []) for words in words.split("; ")]
        return svg.picture("rows of a cache, by sequence", [*lines, *notes], len(pages.lengths))
    wide = len(str(len(lines) - 1))
    return "\n".join(
        [*(f"{label:>{wide}}  {''.join(cell.text for cell in row)}" for label, row in lines), words]
    )


def legend(lengths: list[int], marks: list[str]) -> str:
    """Return a line with the meaning of letters and signs, and the rows of each."""
    shown = [f"{LETTERS[who % len(LETTERS)]} {count} rows" for who, count in enumerate(lengths[:MOST_NAMES])]
    more = [f"{len(lengths) - MOST_NAMES} more sequences"] if len(lengths) > MOST_NAMES else []
    others = [f"{mark} {ROW_STATES[mark]} {marks.count(mark)}" for mark in ROW_STATES if mark in marks]
    return "; ".join(filter(None, [", ".join(shown + more), ", ".join(others)]))


def check_kind(kind: str) -> None:
    """Check that a drawing is text or SVG."""
    if kind not in ("text", "svg"):
        raise argument_error("kind", "'text' or 'svg'", repr(kind))
