"""Write tables and sizes as text."""

from __future__ import annotations

from collections.abc import Sequence

from kvkit.errors import printable


def columns(heads: Sequence[str], rows: Sequence[Sequence[str]], most: int) -> str:
    """Return a table of rows under headings; of more than `most` rows, the first ones and the last."""
    shown = list(rows) if len(rows) <= most else [*rows[: most - 2], ("...",), rows[-1]]
    shown = [tuple(map(printable, row)) for row in shown]
    wide = [max(len(row[i]) for row in (heads, *shown) if i < len(row)) for i in range(len(heads))]
    return "\n".join(
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, wide, strict=False)).rstrip()
        for row in (heads, *shown)
    )


def size(count: int) -> str:
    """Return a number of bytes as a text with a unit."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
