"""Drawings of layouts and of rows: every element has its place, as an array of numpy's has it."""

import math
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from kvkit.layouts import NAMED, convert, parse, tables
from kvkit.tools import draw
from kvkit.tools.boxes import boxes, drawn_sizes, strides
from kvkit.tools.svg import CHARACTER, MARGIN

SVG = "{http://www.w3.org/2000/svg}"
MOVED = [name for name, named in NAMED.items() if not named.layout.has_scales and "kv" in named.layout.names]


@pytest.mark.parametrize("name", NAMED)
def test_every_layout_is_drawn(name):
    line = parse(name)
    sizes = drawn_sizes(line, None)
    for side in (0, 1):
        rows = strides(line, side, sizes)
        found = boxes(line, side, sizes)
        half = 2 if line.value_axes != line.axes and "kv" not in line.lists else 1
        assert sum(box.last - box.first + 1 for box in found) * half == math.prod(size for _, size, _ in rows)
    picture = ElementTree.fromstring(draw.layout(name, kind="svg"))
    assert picture.tag.endswith("svg")
    drawn = [
        (float(each.get("x")), float(each.get("width"))) for each in picture.iterfind(f"{SVG}g/{SVG}rect")
    ]
    labels = [each.text or "" for each in picture.iterfind(f"{SVG}text") if each.get("class") != "note"]
    assert min(x for x, _ in drawn) > MARGIN + CHARACTER * max(map(len, labels))
    assert max(x + width for x, width in drawn) < float(picture.get("width"))
    assert str(line) in draw.layout(name)


@pytest.mark.parametrize("name", MOVED)
def test_boxes_lie_where_conversion_puts_elements(name):
    """Numbers in a plain cache, moved to a layout, are read off in the order of its memory."""
    line = parse(name)
    sizes = drawn_sizes(line, None)
    shape = tuple(sizes[axis] if axis in line.names else 1 for axis in "lbnhc")
    plain = np.arange(2 * math.prod(shape), dtype=np.int16).reshape(2, *shape)  # [kv, l, b, n, h, c]
    moved = convert(
        plain, "| kv l b n h c", line, to_sizes={axis: sizes[axis] for axis in "bn" if axis in line.names}
    )
    sides = (0, 1) if line.value_axes != line.axes and "kv" in line.lists else (0,)
    for side in sides:
        array, where = moved, {}
        for axis in line.lists:
            array, where = array[side if axis == "kv" else 0], where | {axis: side if axis == "kv" else 0}
        read = []
        for box in boxes(line, side, sizes):
            at = {"l": 0, "b": 0, "n": 0, "h": 0, "c": 0} | where | dict(box.at)
            for i in range(box.first, box.last + 1):
                at[box.along] = i
                read.append(plain["KV".index(box.kind), *(at[axis] for axis in "lbnhc")])
        if line.value_axes == line.axes or "kv" in line.lists:
            assert np.asarray(array).ravel().tolist() == read


def test_rows_of_every_sequence():
    pages = tables.from_blocks([[2, 0], [2, 1]], [6, 7], 4)
    filled = np.zeros(16, bool)
    filled[[7, 13]] = True
    text = draw.cells(pages, 16, filled=filled)
    assert text.splitlines()[:4] == ["0  aa..", "1  bbb~", "2  ####", "3  .~.."]
    published = np.arange(16) // 4 >= 2  # the rows of page 2 have sequences
    text = draw.cells(pages, 16, filled=filled, published=published)
    assert text.splitlines()[2:4] == ["2  ####", "3  ===="]
    picture = ElementTree.fromstring(draw.cells(pages, 16, filled=filled, kind="svg"))
    classes = [rect.get("class") for rect in picture.iter(f"{SVG}rect")]
    assert {name: classes.count(name) for name in ("s0", "s1", "shared", "stale", "free")} == {
        "s0": 2, "s1": 3, "shared": 4, "stale": 2, "free": 5,
    }  # fmt: skip
    assert draw.cells(tables.from_slots([[40, 3]], [2])).splitlines()[1] == "1  ........a"


def test_draw_is_no_function():
    with pytest.raises(TypeError, match=r"draw: expected draw.layout\(NAME\) or draw.cells\(TABLE\), got"):
        draw("hf")
