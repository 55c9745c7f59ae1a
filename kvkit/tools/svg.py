"""Draw boxes with words as SVG; colours follow the reader's light or dark mode."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from kvkit.errors import printable

HEIGHT, CHARACTER, MARGIN = 32, 9.6, 12  # pixels, for letters of 16
STYLE = """
.kvkit text{font:16px ui-monospace,monospace;white-space:pre;fill:#1b1f24}
.kvkit .note{fill:#57606a}
.kvkit rect{stroke:#8b949e;stroke-width:.75}
.kvkit .none{fill:#ffffff;stroke:none}.kvkit .free{fill:#f6f8fa}.kvkit .stale{fill:#d0d7de}
.kvkit .shared{fill:#f2cc60}.kvkit .published{fill:#aceebb}.kvkit .scale{fill:#eac54f}
.kvkit .key{fill:#b6d7ff}.kvkit .value{fill:#bfe8c5}.kvkit .both{fill:#d9c8ff}
@media (prefers-color-scheme:dark){
.kvkit text{fill:#e6edf3}.kvkit .note{fill:#9198a1}.kvkit rect{stroke:#545d68}
.kvkit .none{fill:#0d1117;stroke:none}.kvkit .free{fill:#161b22}.kvkit .stale{fill:#3d444d}
.kvkit .shared{fill:#7d5a00}.kvkit .published{fill:#2f6f3e}.kvkit .scale{fill:#845306}
.kvkit .key{fill:#0f3d73}.kvkit .value{fill:#13532a}.kvkit .both{fill:#4b2e83}
}
"""
LIGHT, DARK = (60, 84), (45, 28)  # saturation, lightness of a sequence's colour, in percent


@dataclass(frozen=True, slots=True)
class Cell:
    """Describes a box with a text."""

    text: str
    kind: str  # the CSS class
    width: float  # in characters
    title: str = ""  # the tooltip


def picture(title: str, rows: Iterable[tuple[str, list[Cell]]], sequences: int = 0) -> str:
    """Draw rows (label, cells) as a picture; a row without cells is a line of text."""
    rows = list(rows)
    indent = max((len(label) for label, cells in rows if cells), default=0) + 1
    widths = [indent + sum(cell.width for cell in cells) if cells else len(label) for label, cells in rows]
    width = max(widths, default=0) * CHARACTER + 2 * MARGIN
    height = len(rows) * HEIGHT + 2 * MARGIN
    # The colours of sequences are as different as possible.
    angles = [round(i * 137.508 + 210) % 360 for i in range(sequences)]  # the golden angle
    light, dark = (
        "".join(f".kvkit .s{i}{{fill:hsl({angle} {mode[0]}% {mode[1]}%)}}" for i, angle in enumerate(angles))
        for mode in (LIGHT, DARK)
    )
    hues = f"{light}\n@media (prefers-color-scheme:dark){{{dark}}}\n"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="kvkit" viewBox="0 0 {width:.0f} {height}" '
        f'width="{width:.0f}" height="{height}" role="img">',
        f"<title>{words(title)}</title>",
        f"<style>{STYLE}{hues}</style>",
        '<rect class="none" width="100%" height="100%"/>',
    ]
    for i, (label, cells) in enumerate(rows):
        y = MARGIN + i * HEIGHT
        note = "" if cells else ' class="note"'
        lines.append(f'<text{note} x="{MARGIN}" y="{y + 21}">{words(label)}</text>')
        x = MARGIN + indent * CHARACTER
        for cell in cells:
            lines.append(box(cell, x, y))
            x += cell.width * CHARACTER
    return "\n".join([*lines, "</svg>", ""])


def words(text: str) -> str:
    """Escape a text for SVG, as one line of printable characters."""
    return escape(printable(text))


def box(cell: Cell, x: float, y: float) -> str:
    """Draw one cell."""
    size = cell.width * CHARACTER
    text = f'<text x="{x + size / 2:.1f}" y="{y + 21}" text-anchor="middle">{words(cell.text)}</text>'
    title = f"<title>{words(cell.title)}</title>" if cell.title else ""
    return (
        f'<g>{title}<rect class="{cell.kind}" x="{x:.1f}" y="{y}" width="{size:.1f}" height="{HEIGHT - 2}"/>'
        f"{text if cell.text else ''}</g>"
    )
