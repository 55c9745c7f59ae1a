"""The pictures of README and of the pages, as SVG, in light and in dark: python docs/pictures.py

Layouts and rows are drawn by the package's own code, formats from its table; examples/study_smollm2.py makes
those of a study.
"""

from pathlib import Path
from xml.sax.saxutils import escape

from kvkit import formats
from kvkit.layouts import tables
from kvkit.tools import draw

FOLDER = Path(__file__).parent / "pictures"
THEMES = {  # ink, faint lines, and fills: of one sequence, of another, of keys, of values, of nothing
    "light": {
        "ink": "#1f2933", "line": "#9aa5b1", "a": "#a8d1ff", "b": "#ffd08a",
        "key": "#bfe3c0", "value": "#e3c6ee", "none": "#f5f7fa",
    },
    "dark": {
        "ink": "#e4e7eb", "line": "#7b8794", "a": "#1f5f99", "b": "#8a5a12",
        "key": "#2f6b3a", "value": "#6a4479", "none": "#2b3138",
    },
}  # fmt: skip
CELL = 26


class Drawing:
    """Boxes and words; it grows to what it holds."""

    def __init__(self, title):
        self.title, self.parts, self.width, self.height = title, [], 0, 0

    def reach(self, x, y):
        self.width, self.height = max(self.width, x), max(self.height, y)

    def box(self, x, y, width, height, fill, text="", size=11):
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{{{fill}}}" stroke="{{line}}"/>'
        )
        if text:
            self.text(x + width / 2, y + height / 2 + size * 0.36, text, size, "middle")
        self.reach(x + width, y + height)

    def text(self, x, y, text, size=12, anchor="start", bold=False):
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
        )
        self.reach(x + (len(text) * size * 0.56 if anchor == "start" else 0), y + 4)

    def arrow(self, x, y, to_x, to_y):
        self.parts.append(
            f'<path d="M{x} {y} L{to_x} {to_y}" stroke="{{ink}}" fill="none" marker-end="url(#head)"/>'
        )

    def svg(self, theme):
        colours, width, height = THEMES[theme], self.width + 12, self.height + 12
        body = "".join(self.parts)
        for name, colour in colours.items():
            body = body.replace("{" + name + "}", colour)
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{colours["ink"]}"/></marker>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
            f'width="{width:.0f}" height="{height:.0f}" role="img" font-family="system-ui, sans-serif" '
            f'fill="{colours["ink"]}"><title>{escape(self.title)}</title><defs>{head}</defs>{body}</svg>\n'
        )


def cache():
    """What a KV cache is: one new token, all of those before it."""
    drawing = Drawing("A KV cache: a new token is appended, and attends to every token before it")
    words = ["The", "Nile", "is", "the", "longest"]
    for i, word in enumerate([*words, "river"]):
        new = i == len(words)
        drawing.text(120 + i * 72, 24, word, 13, "middle", bold=new)
        drawing.box(92 + i * 72, 40, 56, 26, "a" if new else "key", "key")
        drawing.box(92 + i * 72, 70, 56, 26, "a" if new else "value", "value")
    drawing.text(12, 57, "KV cache", 13, bold=True)
    drawing.text(12, 75, "a row for", 11)
    drawing.text(12, 89, "each token", 11)
    last = 120 + len(words) * 72
    drawing.text(last + 36, 57, "1. append what the", 12)
    drawing.text(last + 36, 73, "new token made", 12)
    drawing.box(last - 28, 132, 56, 26, "a", "query")
    for i in range(len(words) + 1):
        drawing.arrow(last, 132, 120 + i * 72, 98)
    drawing.text(last + 36, 143, "2. its query meets every key;", 12)
    drawing.text(last + 36, 159, "their values, weighted, are", 12)
    drawing.text(last + 36, 175, "the attention's output", 12)
    return drawing


def of_rows(pages):
    """Two sequences, of 5 tokens and of 3, in 16 rows."""
    return draw.cells(pages, 16, page_size=4, kind="svg")


def offsets():
    return of_rows(
        tables.from_tokens([1, 2, 3, 4, 5, 9, 10, 11], [0] * 5 + [1] * 3, [0, 1, 2, 3, 4, 0, 1, 2])
    )


def pages():
    return of_rows(tables.from_blocks([[2, 1], [0, -1]], [5, 3], page_size=4))


def pmx():
    return draw.layout("pmx-dynamic-3", sizes={"l": 1, "n": 2}, kind="svg")


def vllm():
    return draw.layout("vllm-lbnhc", sizes={"b": 1, "n": 2}, kind="svg")


def codes():
    """A head of a token in each format, to scale."""
    drawing = Drawing("Formats: the bytes of a head of 64 elements, to scale")
    for i, (name, group) in enumerate(
        (("float32", 0), ("float16", 0), ("int8", 8), ("int8", 64), ("int4", 32))
    ):
        y, form = 12 + i * 38, formats.BY_NAME[name]
        size = form.bits * 64 // 8
        words = (
            f"{name}: {size} bytes"
            if not group
            else f"{name}, a scale for {group}: {size} + {64 // group * 2}"
        )
        drawing.text(12, y + 17, words, 12)
        drawing.box(214, y, size * 2, 26, "a", "codes" if group else "floats")
        if group:
            drawing.box(214 + size * 2, y, 64 // group * 2 * 2, 26, "b")
    drawing.box(214, 12 + 5 * 38, 12, 12, "b")
    drawing.text(232, 12 + 5 * 38 + 11, "scales, float16: what a code of 1 stands for in its group", 11)
    return drawing


def plans():
    """One step of a model: index tensors once, a call for each layer."""
    drawing = Drawing("A plan: index tensors are checked once, then each layer is a call")
    drawing.box(12, 20, 168, 96, "none")
    index = (
        "seqstarts   [0, 1, 2]",
        "kvstarts    [0, 6, 9]",
        "cachestarts [[8, 4], [0, -1]]",
        "start_pos   [5, 2]",
    )
    for i, line in enumerate(index):
        drawing.text(20, 42 + i * 20, line, 11)
    drawing.text(12, 12, "a step", 12, bold=True)
    drawing.arrow(180, 68, 232, 68)
    drawing.box(234, 46, 108, 44, "a", "plan(...)", 12)
    drawing.text(234, 108, "checked once", 11)
    for i in range(3):
        y = 20 + i * 36
        drawing.arrow(342, 68, 398, y + 14)
        drawing.box(400, y, 214, 28, "b", f"layer {i}: multi_head_cache_attention", 11)
    return drawing


def tokens(drawing, x, y, words, fills):
    """A row of tokens; the places of those that are gone are empty."""
    for i, (word, fill) in enumerate(zip(words, fills, strict=True)):
        drawing.box(x + i * CELL, y, CELL, CELL, fill, word)


def removal():
    """Tokens that are removed, with a hole and without one."""
    drawing = Drawing("Tokens 2 to 4 are removed: a hole stays, or later tokens move up")
    kept, later = ["key"] * 2, ["b"] * 3
    rows = (
        ("8 tokens", "01234567", [*kept, *["none"] * 3, *later], "the next token has position 8"),
        ("remove(2, 5)", "01567", [*kept, *later], "positions stay, rows close up; the next one has 8"),
        (
            "remove(2, 5, close=True)",
            "01234",
            [*kept, *later],
            "the next one has 5; these keys lie rotated for 5, 6, 7: rope shift -3",
        ),
    )
    for i, (call, positions, fills, words) in enumerate(rows):
        y = 14 + i * 54
        drawing.text(12, y + 17, call, 12, bold=True)
        tokens(drawing, 190, y, positions, fills)
        drawing.text(190 + 8 * CELL + 14, y + 17, words, 12)
    drawing.text(190, 14 + 3 * 54 - 10, "a box is a row of keys and values, with its position", 11)
    return drawing


def pieces():
    """Pieces of rows after a removal, and the query that is rotated for each."""
    drawing = Drawing("Pieces of rows: the query is rotated for each, and the outputs are merged")
    drawing.text(12, 92, "the query of", 12)
    drawing.text(12, 108, "position 5", 12)
    for i, (words, fill, positions, lie) in enumerate((
        ("rotated for 5", "key", "01", "lie as rotated for 0, 1"),
        ("rotated for 8 = 5 + 3", "b", "234", "lie as rotated for 5, 6, 7: rope shift -3"),
        ("rotated for 5", "a", "5", "the new token's own key"),
    )):  # fmt: skip
        y = 14 + i * 58
        drawing.arrow(92, 98, 130, y + 13)
        drawing.box(132, y, 140, 26, "a", words)
        drawing.arrow(272, y + 13, 308, y + 13)
        tokens(drawing, 310, y, positions, [fill] * len(positions))
        drawing.text(310, y + 40, lie, 11)
        drawing.text(400, y + 17, "output, lse", 11)
        drawing.arrow(466, y + 13, 568, 98)
    drawing.box(570, 85, 70, 26, "value", "merge")
    return drawing


def fork():
    """Two sequences that share pages, one of which removes tokens."""
    drawing = Drawing("A fork shares pages; what one sequence removes stays in the other")
    places = 212, 330, 448, 566
    for page, first in enumerate((0, 4, 8)):
        tokens(drawing, places[page], 84, map(str, range(first, first + 4)), ["key"] * 4)
        drawing.text(places[page] + 2 * CELL, 128, f"page {page}", 11, "middle")
    tokens(drawing, places[3], 84, ["5", "6", "7", ""], [*["b"] * 3, "none"])
    drawing.text(places[3] + 2 * CELL, 128, "page 3, of copies", 11, "middle")
    drawing.text(12, 26, "branch", 13, bold=True)
    drawing.text(12, 42, "fork(chat)", 12)
    drawing.text(12, 176, "chat", 13, bold=True)
    drawing.text(12, 192, "then remove(chat, 2, 5)", 12)
    for page in (0, 1, 2):
        x = places[page]
        drawing.box(x, 16, 4 * CELL, 26, "a", "all 4 rows")
        drawing.arrow(x + 2 * CELL, 42, x + 2 * CELL, 82)
    for page, words in ((0, "rows 0, 1"), (3, "3 rows"), (2, "all 4 rows")):
        x = places[page]
        drawing.box(x, 166, 4 * CELL, 26, "a", words)
        drawing.arrow(x + 2 * CELL, 166, x + 2 * CELL, 134)
    drawing.text(
        212, 214, "chat reads page 0, then 3, then 2; a box of a page is a row, with its first position", 11
    )
    return drawing


BY_HAND = cache, codes, plans, removal, pieces, fork
BY_THE_PACKAGE = offsets, pages, pmx, vllm


def of_theme(text, theme):
    """A drawing of the package's follows its reader's light or dark mode: here it is always in one."""
    return text.replace("(prefers-color-scheme:dark)", "all" if theme == "dark" else "not all")


def drawn():
    """Every picture, by its path."""
    made = {}
    for theme in THEMES:
        made |= {(one.__name__, theme): one().svg(theme) for one in BY_HAND}
        made |= {(one.__name__, theme): of_theme(one(), theme) for one in BY_THE_PACKAGE}
    return {FOLDER / f"{name}-{theme}.svg": text for (name, theme), text in made.items()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, text in drawn().items():
        path.write_text(text)
