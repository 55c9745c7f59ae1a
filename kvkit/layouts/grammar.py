"""Parse lines that say how a cache lies in memory, such as ``l | b kv n h c``."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from functools import cached_property

from kvkit.errors import argument_error

MEANING = {
    "l": "layer", "kv": "keys 0, values 1", "b": "block, or sequence if caches are contiguous",
    "n": "token in the block", "h": "key head", "c": "content, the elements of a head",
    "s": "scale groups of a head",
}  # fmt: skip
AXES_WANTED = "axes among l, kv, b, n, h, c, s, their parts such as c1 c0[8], or 1"
AXIS = re.compile(r"(kv|[lbnhcs])(?:([01])(?:\[([1-9]\d*)(B?)\])?)?|1")
LEXEME = re.compile(r"[()|;+]|[^\s()|;+]+")  # a sign, or a word between signs and spaces


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a layout, or the outer or inner part of an axis."""

    name: str
    part: str = ""  # "1": the outer part, "0": the inner part, "": the whole axis
    inner: int = 0  # the size of an inner part, which the line has in brackets
    in_bytes: bool = False  # whether `inner` counts bytes

    def __str__(self) -> str:
        size = f"[{self.inner}{'B' * self.in_bytes}]" if self.inner else ""
        return f"{self.name}{self.part}{size}"


@dataclass(frozen=True)
class Layout:
    """The layout of a cache in memory. `parse` reads it from a line, and ``str(layout)`` is the line.

    Attributes
    ----------
    lists : tuple of str
        Axes along which there are lists of arrays, outermost first.
    axes : tuple of str
        The axes of each array, outermost first, in row-major order, as in the line: see `parse`.
    value_axes : tuple of str
        The axes of arrays of values; equal to `axes` unless the line has a ``;``.

    Examples
    --------
    >>> from kvkit.layouts import parse
    >>> layout = parse("l kv | b (h c1) n c0[32B]")
    >>> layout.lists, layout.axes
    (('l', 'kv'), ('b', '(h c1)', 'n', 'c0[32B]'))
    >>> print(layout)
    l kv | b (h c1) n c0[32B]
    """

    lists: tuple[str, ...]
    axes: tuple[str, ...]
    value_axes: tuple[str, ...]

    def __str__(self) -> str:
        line = " ".join((*self.lists, "|", *self.axes))
        return line if self.value_axes == self.axes else " ".join((line, ";", *self.value_axes))

    @cached_property
    def groups(self) -> tuple[tuple[Axis, ...], ...]:
        """Return for each axis of an array of keys the layout's axes that it joins."""
        return tuple(map(parse_group, self.axes))

    @cached_property
    def value_groups(self) -> tuple[tuple[Axis, ...], ...]:
        """Return for each axis of an array of values the layout's axes that it joins."""
        return tuple(map(parse_group, self.value_axes))

    @cached_property
    def names(self) -> frozenset[str]:
        """Return the names of all axes, in lists and in arrays."""
        return frozenset(self.lists) | {axis.name for group in self.groups for axis in group}

    @cached_property
    def at(self) -> dict[str, int]:
        """Return {axis: index in the array} of axes that are neither split nor joined."""
        return {axis: i for i, axis in enumerate(self.axes) if axis in MEANING}

    @property
    def split(self) -> str:
        """Return the axis that is split into an outer and an inner part, or ''."""
        parts = [axis.name for group in (*self.groups, *self.value_groups) for axis in group if axis.part]
        return parts[0] if parts else ""

    @property
    def has_scales(self) -> bool:
        """Return whether a block holds codes, then scales: ``(n c + n s)``."""
        return any("+" in axis for axis in self.axes)


def parse_group(token: str) -> tuple[Axis, ...]:
    """Parse one axis of an array, which may join several axes of the layout."""
    return tuple(parse_axis(word) for word in token.strip("()").replace("+", " ").split())


def parse_axis(word: str) -> Axis:
    """Parse an axis of the layout, or a part of one."""
    found = AXIS.fullmatch(word)
    if not found:
        raise argument_error("layout", AXES_WANTED, repr(word))
    if word == "1":
        return Axis("1")
    name, part, inner, in_bytes = found.groups()
    if (part == "0") != bool(inner):
        wanted = f"{name}1 for an outer part, {name}0[SIZE] for an inner one"
        raise argument_error("layout", wanted, repr(word))
    return Axis(name, part or "", int(inner or 0), bool(in_bytes))


def parse_line(text: str) -> Layout:
    """Parse a line of lists and axes."""
    if text.count("|") > 1:
        raise argument_error("layout", "one bar between lists and axes", repr(text))
    lists, _, rest = text.rpartition("|")
    keys, semicolon, values = rest.partition(";")
    levels = tuple(lists.split())
    for level in levels:
        if parse_axis(level).part or level == "1":
            raise argument_error("layout", "whole axes left of the bar", repr(level))
    axes = split_axes(keys)
    layout = Layout(levels, axes, split_axes(values) if semicolon else axes)
    check_axes(layout, layout.axes, text)
    if semicolon:
        check_axes(layout, layout.value_axes, text)
        if layout.value_axes == layout.axes:
            raise argument_error("layout", "other axes of values after ';'", repr(text))
        if {axis.name for group in layout.value_groups for axis in group} | set(levels) != layout.names:
            raise argument_error("layout", "the same axes for keys and values", repr(text))
        if "kv" not in layout.names:
            wanted = "an axis kv, as keys and values have different axes"
            raise argument_error("layout", wanted, repr(text))
    return layout


def split_axes(text: str) -> tuple[str, ...]:
    """Split the text of an array's axes, each normalized to one space between words."""
    found: list[str] = []
    group: list[str] | None = None
    for lexeme in LEXEME.findall(text):
        if lexeme == "(" and group is None:
            group = []
        elif lexeme == ")" and group and group[-1] != "+":
            found.append(f"({' '.join(group)})" if len(group) > 1 else group[0])
            group = None
        elif lexeme == "+" and group and group[-1] != "+":
            group.append(lexeme)
        elif lexeme not in "()+|;":
            (found if group is None else group).append(lexeme)
        else:
            wanted = "axes, those that share an array's axis in parentheses"
            raise argument_error("layout", wanted, repr(text.strip()))
    if group is not None:
        raise argument_error("layout", "a parenthesis that closes", repr(text.strip()))
    return tuple(found)


def check_axes(layout: Layout, axes: tuple[str, ...], text: str) -> None:
    """Check that the axes of an array include content or scales, and name each axis once."""
    names = layout.names - set(layout.lists)
    if not names & {"c", "s"}:
        raise argument_error("layout", "an axis of content, c (or of scale groups, s)", repr(text))
    if layout.has_scales and not {"c", "s"} <= names:
        raise argument_error("layout", "content (c) and scale groups (s) in parts joined by +", repr(text))
    if {"c", "s"} <= names and not layout.has_scales:
        raise argument_error("layout", "content (c) or scale groups (s), not both", repr(text))
    for terms in itertools.product(*(axis.strip("()").split("+") for axis in axes)):  # one term of each sum
        check_once(layout.lists, [axis for term in terms for axis in parse_group(term)], text)


def check_once(lists: tuple[str, ...], axes: list[Axis], text: str) -> None:
    """Check that each axis is named once, whole or in both parts."""
    parts: dict[str, list[str]] = {level: [] for level in lists}
    if len(parts) < len(lists):
        raise argument_error("layout", "each axis once", repr(text))
    for axis in axes:
        if axis.name != "1":
            parts.setdefault(axis.name, []).append(axis.part)
    for level in lists:
        if parts.pop(level):
            raise argument_error("layout", f"the axis {level} in lists or in the array", repr(text))
    for name, found in parts.items():
        if sorted(found) not in ([""], ["0", "1"]):
            wanted = f"the axis {name} once, whole or as {name}1 and {name}0[SIZE]"
            raise argument_error("layout", wanted, repr(text))
        if name in ("l", "kv") and found != [""]:
            raise argument_error("layout", f"a whole axis {name}", repr(text))
