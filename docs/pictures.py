"""The pictures of README and of the pages, as SVG, in light and in dark: python docs/pictures.py

Layouts and rows are drawn by the package's own code, formats from its table; examples/study_smollm2.py makes
those of a study. What matplotlib draws for the gallery, its commands draw.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.sax.saxutils import escape

from kvkit import formats
from kvkit.layouts import tables
from kvkit.tools import draw
from kvkit.tools.studies.plots import INK

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pictures"
sys.path += [str(ROOT / "docs"), str(ROOT / "examples")]

import gallery  # noqa: E402

import examples  # noqa: E402

BY_COMMANDS = {
    "gallery-eviction": "evict/eviction.svg",
    "gallery-heads": "heads/errors.svg",
    "gallery-map": "map.svg",
}  # and what a command wrote
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
ENLARGED = 4 / 3  # letters of 12 are 16 pixels; a picture 366 wide has 12 on a phone


class Drawing:
    """Boxes and words; it grows to what it holds."""

    def __init__(self, title):
        self.title, self.parts, self.width, self.height = title, [], 0, 0

    def reach(self, x, y):
        self.width, self.height = max(self.width, x), max(self.height, y)

    def box(self, x, y, width, height, fill, text="", size=12):
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
            f'width="{width * ENLARGED:.0f}" height="{height * ENLARGED:.0f}" role="img" '
            f'font-family="system-ui, sans-serif" '
            f'fill="{colours["ink"]}"><title>{escape(self.title)}</title><defs>{head}</defs>{body}</svg>\n'
        )


def cache():
    """What a KV cache is: a new token is appended, its query meets all keys, values add up to the output."""
    drawing = Drawing("A KV cache: a new token is appended, and attends to every token before it")
    words, first, wide = ["The", "Nile", "is", "the", "longest", "river"], 36, 58
    last = first + wide * (len(words) - 1)
    drawing.box(last - 26, 30, 52, 26, "a", "query", 12)
    drawing.box(last - 26, 208, 52, 26, "a", "output", 12)
    drawing.text(12, 48, "KV cache: a row for each token", 13, bold=True)
    for i, word in enumerate(words):
        x, new = first + i * wide, word == words[-1]
        drawing.text(x, 20, word, 13, "middle", bold=new)
        drawing.arrow(last, 56, x, 104)
        drawing.box(x - 25, 106, 50, 26, "a" if new else "key", "key", 12)
        drawing.box(x - 25, 136, 50, 26, "a" if new else "value", "value", 12)
        drawing.arrow(x, 162, last, 206)
    for i, line in enumerate((
        "1. The new token's key and value (blue) are added.",
        "2. Its query meets every key: each gets a weight.",
        "3. The values, times their weights, are the output.",
    )):  # fmt: skip
        drawing.text(12, 258 + i * 18, line)
    return drawing


def of_rows(pages):
    """Two sequences, of 5 tokens and of 3, in 16 rows."""
    return draw.cells(pages, 16, page_size=4, kind="svg")


def offsets():
    return of_rows(
        tables.from_tokens([1, 2, 3, 4, 5, 6, 9, 10, 11], [0] * 6 + [1] * 3, [*range(6), *range(3)])
    )


def pages():
    return of_rows(tables.from_blocks([[2, 1], [0, -1]], [6, 3], page_size=4))


def chats():
    """Three sequences of a model in pages of 16 tokens; two share a prompt."""
    made = gallery.chats()
    found = tables.from_blocks(made["block_tables"], made["context_lens"], page_size=gallery.PAGE)
    return draw.cells(found, gallery.BLOCKS * gallery.PAGE, kind="svg")


def pmx():
    return draw.layout("pmx-dynamic-3", sizes={"l": 1, "n": 2}, kind="svg")


def vllm():
    return draw.layout("vllm-lbnhc", sizes={"b": 1, "n": 2}, kind="svg")


def codes():
    """A head of a token in each format, to scale."""
    drawing, scale = Drawing("Formats: the bytes of a head of 64 elements, to scale"), 1.3
    for i, (name, group) in enumerate(
        (("float32", 0), ("float16", 0), ("int8", 8), ("int8", 64), ("int4", 32))
    ):
        y, form = 24 + i * 52, formats.BY_NAME[name]
        size, scales = form.bits * 64 // 8, 64 // group * 2 if group else 0
        words = f"{name}, a scale for {group}: {size} + {scales} bytes" if group else f"{name}: {size} bytes"
        drawing.text(12, y - 5, words, 13)
        drawing.box(12, y, size * scale, 24, "a", "codes" if group else "floats", 12)
        if scales:
            drawing.box(12 + size * scale, y, scales * scale, 24, "b")
    drawing.box(12, 276, 14, 14, "b")
    drawing.text(34, 288, "scales, float16: what a code of 1", 13)
    drawing.text(34, 306, "stands for in its group", 13)
    return drawing


def plans():
    """One step of a model: index tensors once, a call for each layer."""
    drawing = Drawing("A plan: index tensors are checked once, then each layer is a call")
    drawing.text(12, 16, "a step", 13, bold=True)
    drawing.box(12, 24, 218, 92, "none")
    index = (
        "seqstarts   [0, 1, 2]",
        "kvstarts    [0, 6, 9]",
        "cachestarts [[8, 4], [0, -1]]",
        "start_pos   [5, 2]",
    )
    for i, line in enumerate(index):
        drawing.text(22, 46 + i * 20, line, 13)
    drawing.arrow(67, 116, 67, 138)
    drawing.box(12, 140, 110, 32, "a", "plan(...)", 13)
    drawing.text(132, 160, "checked once", 12)
    for i in range(3):
        y = 190 + i * 36
        drawing.arrow(67, 172, 86, y + 14)
        drawing.box(88, y, 262, 28, "b", f"layer {i}: multi_head_cache_attention", 12)
    return drawing


def tokens(drawing, x, y, words, fills, cell=CELL):
    """A row of tokens; the places of those that are gone are empty."""
    for i, (word, fill) in enumerate(zip(words, fills, strict=True)):
        drawing.box(x + i * cell, y, cell, CELL, fill, word)


def removal():
    """Tokens that are removed, with a hole and without one."""
    drawing = Drawing("Tokens 2 to 4 are removed: a hole stays, or later tokens move up")
    kept, later = ["key"] * 2, ["b"] * 3
    rows = (
        ("8 tokens", "01234567", [*kept, *["none"] * 3, *later], ("the next token has position 8",)),
        (
            "remove(2, 5)", "01567", [*kept, *later],
            ("positions stay, rows close up;", "the next one has 8"),
        ),
        (
            "remove(2, 5, close=True)", "01234", [*kept, *later],
            ("the next one has 5; these keys lie", "rotated for 5, 6, 7: rope shift -3"),
        ),
    )  # fmt: skip
    for i, (call, positions, fills, words) in enumerate(rows):
        y = 26 + i * 98 - 18 * (i > 0)
        drawing.text(12, y - 7, call, 13, bold=True)
        tokens(drawing, 12, y, positions, fills)
        for line, each in enumerate(words):
            drawing.text(12, y + 44 + 17 * line, each, 13)
    drawing.text(12, 308, "a box is a row of keys and values, with its position")
    return drawing


def pieces():
    """Pieces of rows after a removal, and the query that is rotated for each."""
    drawing = Drawing("Pieces of rows: the query is rotated for each, and the outputs are merged")
    drawing.text(12, 16, "the query of position 5", 13, bold=True)
    for i, (words, fill, positions, lie) in enumerate((
        ("rotated for 5", "key", "01", "keys rotated for 0, 1"),
        ("rotated for 8 = 5 + 3", "b", "234", "keys rotated for 5, 6, 7: shift -3"),
        ("rotated for 5", "a", "5", "the new token's own key"),
    )):  # fmt: skip
        y = 28 + i * 62
        drawing.box(12, y, 150, 26, "a", words, 13)
        drawing.arrow(162, y + 13, 196, y + 13)
        tokens(drawing, 198, y, positions, [fill] * len(positions))
        drawing.text(12, y + 42, lie, 12)
        drawing.arrow(202 + len(positions) * CELL, y + 13, 306, 95 + 8 * i)
    drawing.box(308, 90, 58, 26, "value", "merge", 13)
    drawing.text(368, 42, "outputs, lse", 12, "end")
    return drawing


def fork():
    """Two sequences that share pages, one of which removes tokens."""
    drawing = Drawing("A fork shares pages; what one sequence removes stays in the other")
    places, cell, wide = (12, 99, 186, 273), 20, 80
    for page, first in enumerate((0, 4, 8)):
        tokens(drawing, places[page], 100, map(str, range(first, first + 4)), ["key"] * 4, cell)
    tokens(drawing, places[3], 100, ["5", "6", "7", ""], [*["b"] * 3, "none"], cell)
    for page, x in enumerate(places):
        drawing.text(x + wide / 2, 144, f"page {page}", 13, "middle")
    drawing.text(12, 18, "branch: fork(chat)", 13, bold=True)
    drawing.text(12, 226, "chat: then remove(chat, 2, 5)", 13, bold=True)
    for x in places[:3]:
        drawing.box(x, 28, wide, 26, "a", "all 4 rows", 12)
        drawing.arrow(x + wide / 2, 54, x + wide / 2, 98)
    for page, words in ((0, "rows 0, 1"), (3, "3 rows"), (2, "all 4 rows")):
        x = places[page]
        drawing.box(x, 182, wide, 26, "a", words, 12)
        drawing.arrow(x + wide / 2, 182, x + wide / 2, 150)
    drawing.text(12, 252, "chat reads page 0, then 3 (of copies), then 2", 13)
    drawing.text(12, 270, "a box of a page is a row, with its first position")
    return drawing


def hybrid():
    """What each kind of layer of a hybrid model stores for nine tokens."""
    drawing, first = (
        Drawing("What lies where: a state, rows of keys and values, shared rows, latent rows"),
        12,
    )
    for y, title, words in (
        (18, "layer 0, StateLayer", "one state of all tokens, copies at checkpoints"),
        (148, "layer 1, DynamicLayer", "a key and a value for each token and head"),
        (260, "layer 2, SharedLayer(of=1)", "no rows: it reads those of layer 1"),
        (352, "layer 3, LatentLayer", "a row for all heads: key and value are c,"),
    ):
        drawing.text(first, y, title, 13, bold=True)
        drawing.text(first, y + 18, words)
    drawing.text(first, 386, "and the rotated r is key alone")
    for token in range(9):
        drawing.text(first + (token + 0.5) * CELL, 58, str(token), 12, "middle")
    drawing.box(first + 7 * CELL, 66, 2 * CELL, 2 * CELL, "a", "state")
    for at in (4, 1):
        drawing.box(first + at * CELL, 66, 2 * CELL, 2 * CELL, "none", f"at {at + 2}")
    tokens(drawing, first, 176, ["k"] * 9, ["key"] * 9)
    tokens(drawing, first, 176 + CELL, ["v"] * 9, ["value"] * 9)
    drawing.box(first + 9.5 * CELL, 294, 80, CELL, "a", "query")
    drawing.arrow(first + 11 * CELL, 294, first + 9 * CELL + 4, 176 + 1.5 * CELL)
    for token in range(9):
        drawing.box(first + token * CELL, 398, CELL, 1.4 * CELL, "b", "c")
        drawing.box(first + token * CELL, 398 + 1.4 * CELL, CELL, 0.8 * CELL, "key", "r")
    return drawing


def latent():
    """A latent row in each form, to scale; and where the scales of a block of 584-byte rows lie."""
    drawing, scale = Drawing("A latent row: its bytes in each form, and what is key and value"), 0.28
    forms = (
        ("bfloat16, 1,152 bytes: one array", [(1024, "b", "c, 512 numbers"), (128, "key", "r")], 0),
        ("two arrays, 1,024 and 128 bytes", [(1024, "b", "c"), (128, "key", "r")], 26),
        ("ds_mla, 656 bytes", [(512, "b", "codes of c"), (16, "value", ""), (128, "key", "r")], 0),
    )
    for i, (words, parts, gap) in enumerate(forms):
        x, y = 12.0, 28 + i * 56
        drawing.text(12, y - 6, words, 13)
        for size, fill, name in parts:
            drawing.box(round(x, 1), y, round(size * scale, 1), 26, fill, name)
            x += size * scale + gap
    drawing.text(12, 194, "ds_v4, 584 bytes: 3 tokens, and a padded end", 13)
    x = 12.0
    pieces = [(448, "b", "codes"), (128, "key", "r")] * 3 + [(8, "value", "")] * 3 + [(552, "none", "")]
    for size, fill, name in pieces:
        width = round(size * 0.146, 1)
        drawing.box(round(x, 1), 200, width, 26, fill, name)
        x += width
    for i, (fill, words) in enumerate((
        ("b", ("c, the latent part: the value,", "and the first elements of the key")),
        ("key", ("r, the rotated part: the last elements", "of the key (in ds_v4 of the value too)")),
        ("value", ("scales: four float32 in a row of ds_mla,", "eight bytes a token in ds_v4")),
    )):  # fmt: skip
        drawing.box(12, 244 + i * 42, 14, 14, fill)
        for line, each in enumerate(words):
            drawing.text(34, 256 + i * 42 + line * 17, each, 13)
    return drawing


def states():
    """One step of the gated delta rule: what a token does to the state of a head."""
    drawing, side, y = Drawing("A step of the gated delta rule: decay, error, write, read"), 58, 74
    steps = ("decay", "compare", "write", "read")
    at = [12 + i * (side + 34) for i in range(4)]
    for i, (x, word) in enumerate(zip(at, steps, strict=True)):
        drawing.text(x, 16, f"{i + 1}. {word}", 12, bold=True)
        fill = "a" if i == 0 else "key" if i == 1 else "b"
        drawing.box(x, y, side, side, fill, "S" if i < 2 else "S + k δ'", 12)
        if i < 3:
            drawing.arrow(x + side + 3, y + side / 2, x + side + 32, y + side / 2)
    drawing.text(at[0] + side + 17, y + side / 2 - 8, "e^g", 12, "middle")
    drawing.box(at[1], 40, side, CELL, "none", "k", 13)
    drawing.arrow(at[1] + side / 2, 66, at[1] + side / 2, 73)
    drawing.box(at[1] - 20, y + side + 34, side + 40, CELL, "value", "δ = β (v - S'k)", 12)
    drawing.arrow(at[1] + side / 2, y + side, at[1] + side / 2, y + side + 32)
    drawing.arrow(at[1] + side + 22, y + side + 46, at[2] + side / 2, y + side + 4)
    drawing.box(at[3], 40, side, CELL, "none", "q", 13)
    drawing.arrow(at[3] + side / 2, 66, at[3] + side / 2, 73)
    drawing.box(at[3] - 20, y + side + 34, side + 40, CELL, "value", "o = scale S'q", 12)
    drawing.arrow(at[3] + side / 2, y + side, at[3] + side / 2, y + side + 32)
    return drawing


BY_HAND = cache, codes, plans, removal, pieces, fork, hybrid, latent, states
BY_THE_PACKAGE = offsets, pages, chats, pmx, vllm


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


def by_commands():
    """Run the commands of the gallery, and keep the pictures that need matplotlib."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        known = os.environ | {"PYTHONPATH": str(ROOT)}
        for program, *words in examples.commands(ROOT / "docs" / "gallery.md"):
            start = [sys.executable, *(["-m", "kvkit"] if program == "kvkit" else [])]
            subprocess.run([*start, *words], cwd=folder, env=known, stdout=subprocess.PIPE)
        for name, made in BY_COMMANDS.items():
            text = (Path(folder) / made).read_text()
            (FOLDER / f"{name}-light.svg").write_text(text)
            (FOLDER / f"{name}-dark.svg").write_text(darkened(text))


def darkened(text):
    """A picture of matplotlib with light ink: letters have no colour of their own, or that of axes."""
    ink = INK["dark"]
    for dark in (INK["light"], "#000000"):
        text = text.replace(dark, ink)
    return text.replace("fill: #ffffff", "fill: none").replace("<svg ", f'<svg fill="{ink}" ', 1)


if __name__ == "__main__":
    for path, text in drawn().items():
        path.write_text(text)
    by_commands()
