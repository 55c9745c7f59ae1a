"""Every cache layout as data: the order of its axes.

A layout says where a row lies. With an array's strides it becomes five numbers, the byte strides between
sequences, rows, heads, and key and value, and the offset of a layer; kernels know nothing else of it.
A static cache has an axis of sequences; the rows of a dynamic cache are shared by all, a stride of 0.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

FRACTAL_BYTES = 32  # of a group of elements in Ascend's NZ
ENDLESS = 2**63 - 1  # the page size of offset mode: one page holds every position of a sequence
AXIS_NAMES = {"sequence": "MaxB", "layer": "L", "kv": "2", "row": "MaxS", "head": "H", "dim": "Dh"}


@dataclass(frozen=True)
class Layout:
    """The axes of a cache (and of its scale), outermost first; the last is always `dim`."""

    number: int
    axes: tuple[str, ...]

    @cached_property
    def at(self):
        """Axis name -> index."""
        return {axis: i for i, axis in enumerate(self.axes)}

    def __str__(self):
        names = dict(AXIS_NAMES) if "sequence" in self.axes else AXIS_NAMES | {"row": "MaxT"}
        return f"({', '.join(names[axis] for axis in self.axes)})"


def _layouts(*orders):
    return tuple(Layout(number, tuple(order.split())) for number, order in enumerate(orders))


STATIC = _layouts(
    "sequence layer kv row head dim",
    "layer sequence kv head row dim",
)
DYNAMIC = _layouts(
    "row layer kv head dim",
    "layer row kv head dim",
    "layer kv row head dim",
    "layer kv head row dim",
)


Documented = TypeVar("Documented", bound=Callable[..., Any])


def listed(layouts: Iterable[Layout]) -> tuple[str, ...]:
    """A line for each layout: its number and its axes."""
    return tuple(f"{layout.number}: {layout}" for layout in layouts)


def documented(layouts: Iterable[Layout]) -> Callable[[Documented], Documented]:
    """Decorate a function whose docstring has a line ``{layouts}``, which these take the place of."""

    def decorate(function: Documented) -> Documented:
        def lines(found: re.Match[str]) -> str:
            return "\n".join(found[1] + line for line in listed(layouts))

        function.__doc__ = re.sub(r"( *){layouts}", lines, function.__doc__ or "")
        return function

    return decorate


@dataclass(frozen=True, slots=True)
class Place:
    """One layer of an array: byte address of its keys, then byte strides."""

    address: int
    kv: int
    sequence: int
    row: int
    head: int


def place(array, layout, layer):
    """Where `layer` of a cache or scale lies."""
    strides, at = array.strides, layout.at
    return Place(
        array.ctypes.data + layer * strides[at["layer"]],
        strides[at["kv"]],
        strides[at["sequence"]] if "sequence" in at else 0,
        strides[at["row"]],
        strides[at["head"]],
    )


def packed_strides(array):
    """(sequence, token, head) of [tokens, heads, dim] or [batch, tokens, heads, dim].

    Tokens are counted through all sequences, so the first is what a batch stride adds to that.
    """
    if array.ndim == 3:
        return 0, array.strides[0], array.strides[1]
    return array.strides[0] - array.shape[1] * array.strides[1], array.strides[1], array.strides[2]
