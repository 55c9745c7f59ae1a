"""Divide the memory of a layout into boxes to draw: runs of elements of one key, value or scale."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from kvkit.errors import argument_error
from kvkit.layouts import Layout
from kvkit.layouts.grammar import Axis

SMALL = {"l": 2, "b": 2, "n": 3, "h": 2, "c": 4, "s": 1}  # the sizes of axes in a drawing
MOST_BOXES = 2**15  # the most elements in a drawing
SIDE_LETTERS = "KV"
AxisGroup = tuple[Axis, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """Describes a run of neighbouring elements along one axis."""

    kind: str  # K for keys, V for values, KV for both, s for scales
    at: Mapping[str, int]  # the index on every other axis
    along: str  # the axis of the run
    first: int  # the first index on that axis
    last: int
    whole: bool  # whether the run is the whole axis

    def label(self, outer: tuple[str, ...]) -> str:
        """Return the text of a box, such as ``K n0 h1``, without the axes in `outer`."""
        axes = [f"{axis}{self.at[axis]}" for axis in "lbnhc" if axis in self.at and axis not in outer]
        words = [self.kind, *axes]
        span = f"{self.first}-{self.last}" if self.last > self.first else f"{self.first}"
        return " ".join(words if self.whole and self.along == "c" else [*words, f"{self.along}{span}"])


def drawn_sizes(layout: Layout, sizes: Mapping[str, int] | None) -> dict[str, int]:
    """Return {axis: size}: the given sizes, and small ones for other axes; inner parts must divide them."""
    divided = [axis for group in (*layout.groups, *layout.value_groups) for axis in group if axis.inner]
    found = dict(SMALL)
    for axis in divided:
        found[axis.name] = math.lcm(*(2 * inner(each) for each in divided if each.name == axis.name))
    for name, size in (sizes or {}).items():
        if name not in found or isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise argument_error("sizes", f"positive integers for {', '.join(found)}", f"{name}={size!r}")
        found[name] = size
    for axis in divided:
        if found[axis.name] % inner(axis):
            wanted = f"a size of {axis.name} that {inner(axis)} divides"
            raise argument_error("sizes", wanted, str(found[axis.name]))
    return found


def inner(axis: Axis) -> int:
    """Return the number of elements of an inner part; bytes count as 16-bit elements."""
    return axis.inner // 2 if axis.in_bytes else axis.inner


def entries(axes: AxisGroup, sizes: Mapping[str, int], parts: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield {axis: index} for each index along an array's axis that joins `axes`."""
    lengths = [length(axis, sizes, parts) for axis in axes]
    for index in product(*map(range, lengths)):
        found: dict[str, int] = {}
        for axis, i in zip(axes, index, strict=True):
            if axis.name != "1":
                found[axis.name] = found.get(axis.name, 0) + i * (parts[axis.name] if axis.part == "1" else 1)
        yield found


def length(axis: Axis, sizes: Mapping[str, int], parts: Mapping[str, int]) -> int:
    """Return the length of an axis, or of the outer ("1") or inner part ("0") of one that is split."""
    if axis.name in ("1", "kv"):
        return 2 if axis.name == "kv" else 1
    if axis.part:
        return parts[axis.name] if axis.part == "0" else sizes[axis.name] // parts[axis.name]
    return sizes[axis.name]


def array_axes(layout: Layout, side: int) -> list[tuple[str, AxisGroup]]:
    """Return (text, joined axes) for each axis of the array of keys (side 0) or values (side 1)."""
    groups, names = (layout.value_groups, layout.value_axes) if side else (layout.groups, layout.axes)
    return list(zip(names, groups, strict=True))


def outer_axes(layout: Layout, side: int) -> tuple[str, ...]:
    """Return the axes l and b as far as they come before all other axes."""
    found: list[str] = []
    for _, group in array_axes(layout, side):
        if any(axis.name not in ("l", "b", "kv", "1") for axis in group):
            break
        found += [axis.name for axis in group if axis.name in "lb"]
    return tuple(found)


def strides(layout: Layout, side: int, sizes: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Return (axis, length, stride in elements) for each axis; joined axes are listed separately."""
    found, parts = [], parts_of(layout, side)
    for name, group in array_axes(layout, side):
        if "+" in name:
            sums = (math.prod(length(a, sizes, parts) for a in each) for each in segments(name, group))
            found.append((name, sum(sums)))
        else:
            found += [(str(axis), length(axis, sizes, parts)) for axis in group]
    lengths = [size for _, size in found]
    return [(name, size, math.prod(lengths[i + 1 :])) for i, (name, size) in enumerate(found)]


def parts_of(layout: Layout, side: int) -> dict[str, int]:
    """Return {axis: elements of its inner part}."""
    return {axis.name: inner(axis) for _, group in array_axes(layout, side) for axis in group if axis.inner}


def segments(name: str, group: AxisGroup) -> list[AxisGroup]:
    """Split one axis of an array into axes that follow each other: ``(n c + n s)`` has two."""
    found, rest = [], list(group)
    for words in name.strip("()").split("+"):
        count = len(words.split())
        found.append(tuple(rest[:count]))
        rest = rest[count:]
    return found


def boxes(layout: Layout, side: int, sizes: Mapping[str, int]) -> list[Box]:
    """Return the boxes of the array of keys (side 0) or values (side 1), which may share it."""
    axes, parts = array_axes(layout, side), parts_of(layout, side)
    total = math.prod(size for _, size, _ in strides(layout, side, sizes))
    if total > MOST_BOXES:
        raise argument_error("sizes", f"arrays of at most {MOST_BOXES} elements, to draw them", str(total))
    along = [  # for each axis of the array: {axis of the layout: index} of each of its indices
        [entry for segment in segments(name, group) for entry in entries(segment, sizes, parts)]
        for name, group in axes
    ]
    last = [axis for axis in axes[-1][1] if axis.name != "1"][-1].name
    found: list[Box] = []
    for indices in product(*along):
        at: dict[str, int] = {}
        for entry in indices:
            at.update({axis: at.get(axis, 0) + i for axis, i in entry.items()})
        if layout.axes != layout.value_axes and at.get("kv", side) != side:
            continue  # keys and values share the array in different orders: this element is the other side's
        kind = SIDE_LETTERS[at.get("kv", side)] if "kv" in layout.names else SIDE_LETTERS
        kind = "s" if "s" in at else kind
        axis = next(name for name in (last, "c", "s") if name in at)
        value = at.pop(axis)
        before = found[-1] if found else None
        if before and (before.kind, before.at, before.along, before.last) == (kind, at, axis, value - 1):
            found[-1] = Box(kind, at, axis, before.first, value, value - before.first + 1 == sizes[axis])
        else:
            found.append(Box(kind, at, axis, value, value, sizes[axis] == 1))
    return found
