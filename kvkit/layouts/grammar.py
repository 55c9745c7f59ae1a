"""Lines that say how a cache lies in memory: ``l | b kv n h c``."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from functools import cached_property

from kvkit.errors import argument_error

MEANING = {
    "l": "layer", "kv": "keys 0, values 1", "b": "block, or sequence where caches are contiguous",
    "n": "token in the block", "h": "key head", "c": "content, the elements of a head",
    "s": "scale groups of a head",
}  # fmt: skip
AXES = "axes among l, kv, b, n, h, c, s, their parts such as c1 c0[8], or 1"
AXIS = re.compile(r"(kv|[lbnhcs])(?:([01])(?:\[([1-9]\d*)(B?)\])?)?|1")
LEXEME = re.compile(r"[()|;+]|[^\s()|;+]+")


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis, or the outer or inner part of one.

    `inner` is the size of the inner part, which the line has in brackets; in bytes if `in_bytes`.
    """

    name: str
    part: str = ""
    inner: int = 0
    in_bytes: bool = False

    def __str__(self) -> str:
        size = f"[{self.inner}{'B' * self.in_bytes}]" if self.inner else ""
        return f"{self.name}{self.part}{size}"


@dataclass(frozen=True)
class Layout:
    """The layout of a cache in memory. `parse` makes it from a line, and ``str(layout)`` is the line.

    Attributes
    ----------
    lists : tuple of str
        Levels that are separate arrays, outermost first.
    axes : tuple of str
        The axes of one array, outermost first, row-major. ``(h c)`` is one axis of the array that joins two
        axes of the layout; ``c0[8]`` is the inner part of the content, 8 elements; ``c0[32B]`` has 32 bytes.
    value_axes : tuple of str
        The axes of an array of values; equal to `axes` unless the line has a ``;``.

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
        """Return the layout's axes in each axis of an array of keys."""
        return tuple(map(parse_group, self.axes))

    @cached_property
    def value_groups(self) -> tuple[tuple[Axis, ...], ...]:
        """Return the layout's axes in each axis of an array of values."""
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
        """Return whether blocks have codes, then scales: ``(n c + n s)``."""
        return any("+" in axis for axis in self.axes)


def parse_group(token: str) -> tuple[Axis, ...]:
    """Return the axes in one axis of an array."""
    return tuple(parse_axis(word) for word in token.strip("()").replace("+", " ").split())


def parse_axis(word: str) -> Axis:
    """Parse one axis."""
    found = AXIS.fullmatch(word)
    if not found:
        raise argument_error("layout", AXES, repr(word))
    if word == "1":
        return Axis("1")
    name, part, inner, in_bytes = found.groups()
    if (part == "0") != bool(inner):
        wanted = f"{name}1 for an outer part, {name}0[SIZE] for an inner one"
        raise argument_error("layout", wanted, repr(word))
    return Axis(name, part or "", int(inner or 0), bool(in_bytes))


def parse_line(text: str) -> Layout:
    """Parse a line."""
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
            wanted = "an axis kv, as keys and values have axes of their own"
            raise argument_error("layout", wanted, repr(text))
    return layout


def split_axes(text: str) -> tuple[str, ...]:
    """Return the axes of an array as texts, with one space between words."""
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
    """Check that an array has content or scales, and names each axis once, in each term of a sum."""
    names = layout.names - set(layout.lists)
    if not names & {"c", "s"}:
        raise argument_error("layout", "an axis of content, c (or of scale groups, s)", repr(text))
    if layout.has_scales and not {"c", "s"} <= names:
        raise argument_error("layout", "content (c) and scale groups (s) in parts joined by +", repr(text))
    if {"c", "s"} <= names and not layout.has_scales:
        raise argument_error("layout", "content (c) or scale groups (s), not both", repr(text))
    for terms in itertools.product(*(axis.strip("()").split("+") for axis in axes)):
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
