"""The pictures of README and of the pages, as SVG, in light and in dark: python docs/pictures.py

Axes of layouts and sizes of formats come from the tables of the package.
"""

from pathlib import Path
from xml.sax.saxutils import escape

from kvkit import formats
from kvkit.operators import OPERATORS

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


def rows(x, y, drawing, filled, count):
    """Rows of a cache, one below the other: {row: (fill, text)}."""
    for row in range(count):
        fill, text = filled.get(row, ("none", ""))
        drawing.text(x - 6, y + row * 20 + 14, str(row), 10, "end")
        drawing.box(x, y + row * 20, 120, 20, fill, text, 10)


def modes():
    """The same two sequences in both modes."""
    drawing = Drawing("Two modes: offsets, where a sequence lies in one piece, and pages anywhere")
    lengths, fills, count = (5, 3), ("a", "b"), 16
    starts, table, page = (1, 9), ((8, 4), (0, -1)), 4
    drawing.text(24, 20, "offsets: cachestarts = [1, 9]", 12, bold=True)
    filled = {
        starts[s] + t: (fills[s], f"sequence {s}, token {t}") for s in (0, 1) for t in range(lengths[s])
    }
    rows(44, 34, drawing, filled, count)
    drawing.text(262, 20, "pages of 4: cachestarts = [[8, 4], [0, -1]]", 12, bold=True)
    filled = {}
    for s in (0, 1):
        for t in range(lengths[s]):
            filled[table[s][t // page] + t % page] = fills[s], f"sequence {s}, token {t}"
    rows(282, 34, drawing, filled, count)
    drawing.text(424, 62, "The row of token t of sequence b:", 12)
    drawing.text(424, 84, "offsets:  cachestarts[b] + t", 12)
    drawing.text(424, 104, "pages:  cachestarts[b][t // 4] + t % 4", 12)
    drawing.text(424, 150, "An entry is the row where a page begins.", 11)
    drawing.text(424, 166, "Pages lie in any order, and sequences that", 11)
    drawing.text(424, 182, "begin alike may share them. What lies behind", 11)
    drawing.text(424, 198, "the pages in use (-1 here) is never read.", 11)
    return drawing


def layouts():
    """The same two tokens in memory, in every layout of packed sequences."""
    drawing = Drawing("Four layouts: the order in which keys, values, heads and tokens lie in memory")
    sizes = {"MaxT": 2, "L": 1, "2": 2, "H": 2}
    caches = next(
        array for array in OPERATORS["dynamic_batching.key_value_cache"].inputs if array.name == "cache"
    )
    for number, shape in enumerate(caches.shapes):
        names = shape.partition("(")[2].rstrip(")").split(", ")
        y = 24 + number * 74
        drawing.text(12, y, f"layout {shape}", 12, bold=True)
        places = [{}]
        for name in names[:-1]:
            places = [place | {name: i} for place in places for i in range(sizes[name])]
        for i, place in enumerate(places):
            kind = "key" if place["2"] == 0 else "value"
            drawing.box(12 + i * 92, y + 10, 92, 34, kind)
            drawing.text(58 + i * 92, y + 25, f"{kind}, token {place['MaxT']}", 10, "middle")
            drawing.text(58 + i * 92, y + 38, f"head {place['H']}", 10, "middle")
    return drawing


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


PICTURES = {function.__name__: function for function in (cache, modes, layouts, codes, plans)}


def drawn():
    """Every picture, by its path."""
    return {
        FOLDER / f"{name}-{theme}.svg": function().svg(theme)
        for name, function in PICTURES.items()
        for theme in THEMES
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, text in drawn().items():
        path.write_text(text)
