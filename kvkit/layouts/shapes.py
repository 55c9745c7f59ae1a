"""Compute the sizes and strides of a layout's axes from the shape and strides of an array.

An axis of the array may join several axes of the layout: a *group*. A *grouping* has the group of each axis
of the array. For the line ``b n (h c)``, an array [10, 16, 128] has the groups b, n and (h c), and with h = 2
the size of c is 64. An array [10, 16, 2, 64] fits, too: each axis is a group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from kvkit.errors import argument_error, describe
from kvkit.layouts.grammar import Axis, Layout
from kvkit.typed import Array

FIXED = {"kv": 2, "1": 1}  # axes whose length is known
SIZED_AXES = ("l", "b", "n", "h", "c", "v", "s")  # v: content of values, if it is not that of keys
Groups = tuple[tuple[Axis, ...], ...]


class Unsolved(NamedTuple):
    """Says why a shape has no sizes: it does not fit, or (`missing`) too few sizes are known."""

    reason: str  # what would fit; or the axes, one of whose sizes is missing
    missing: bool = False


def check_sizes(name: str, sizes: Mapping[str, Any] | None) -> dict[str, int]:
    """Return {axis: size}; raise unless axes are known and sizes are positive."""
    found = {}
    for axis, size in (sizes or {}).items():
        if axis not in SIZED_AXES:
            raise argument_error(name, f"sizes of {', '.join(SIZED_AXES)}", repr(axis))
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
            raise argument_error(f"{name}[{axis!r}]", "a positive integer", describe(size))
        found[axis] = int(size)
    return found


def inner_size(axis: Axis, itemsize: int) -> int:
    """Return how many elements the inner part of an axis has; 0 if its bytes hold no whole number of them."""
    if not axis.in_bytes:
        return axis.inner
    return 0 if axis.inner % itemsize else axis.inner // itemsize


def inner_sizes(groups: Groups, itemsize: int) -> dict[str, int]:
    """Return {axis: elements of its inner part} for axes that are split."""
    return {axis.name: inner_size(axis, itemsize) for group in groups for axis in group if axis.inner}


def axis_length(axis: Axis, sizes: Mapping[str, int], inner: Mapping[str, int]) -> int:
    """Return the length of one axis."""
    if axis.part == "0":
        return inner[axis.name]
    size = FIXED.get(axis.name) or sizes[axis.name]
    return size // inner[axis.name] if axis.part else size


def solve_sizes(
    shape: tuple[int, ...], groups: Groups, known: Mapping[str, int], itemsize: int
) -> dict[str, int] | Unsolved:
    """Return {axis: size} for a shape and a grouping, or why there is none.

    A group with one unknown size determines it. That may help groups with two, so they are tried again.
    """
    sizes, inner = dict(known), inner_sizes(groups, itemsize)
    for name, size in inner.items():
        if not size:
            return Unsolved(f"elements whose size divides the bytes of {name}0")
        if sizes.get(name, size) % size:
            return Unsolved(f"a size of {name} that {size} divides, not {sizes[name]}")
    unsolved = list(zip(shape, groups, strict=True))
    while unsolved:
        later = []
        for dim, group in unsolved:
            product, unknown = 1, []
            for axis in group:
                if axis.part == "0" or axis.name in FIXED or axis.name in sizes:
                    product *= axis_length(axis, sizes, inner)
                else:
                    unknown.append(axis)
            if len(unknown) > 1:
                later.append((dim, group))
            elif (dim % product if unknown else dim != product) or not dim:
                axes = " ".join(map(str, group))
                return Unsolved(f"{'a multiple of ' if unknown else ''}{product} for {axes}, not {dim}")
            elif unknown:
                sizes[unknown[0].name] = dim // product * (inner[unknown[0].name] if unknown[0].part else 1)
        if len(later) == len(unsolved):
            names = dict.fromkeys(axis.name for _, group in later for axis in group if axis.name not in sizes)
            return Unsolved(" or ".join(name for name in names if name not in FIXED), missing=True)
        unsolved = later
    return sizes


def usual_groupings(groups: Groups, ndim: int) -> list[Groups]:
    """Return groupings for `ndim` axes: as in the line, all axes apart, or only the last two joined."""
    apart = tuple((axis,) for group in groups for axis in group)
    last_two_joined = (*apart[:-2], sum(apart[-2:], ()))
    distinct = dict.fromkeys((groups, apart, last_two_joined))
    return [grouping for grouping in distinct if len(grouping) == ndim]


def groupings(groups: Groups, ndim: int, known: Mapping[str, int]) -> Iterator[Groups]:
    """Yield the usual groupings, then those whose sizes follow from a shape and the known sizes."""
    yield from (usual := usual_groupings(groups, ndim))
    flat = tuple(axis for group in groups for axis in group)
    if ndim in (0, len(groups)):
        return
    for cuts in combinations(range(1, len(flat)), ndim - 1):
        grouping = tuple(flat[start:end] for start, end in pairwise((0, *cuts, len(flat))))
        joined = [group for group in grouping if len(group) > 1]
        if grouping not in usual and all(sizes_determine(group, known) for group in joined):
            yield grouping


def sizes_determine(group: tuple[Axis, ...], known: Mapping[str, int]) -> bool:
    """Return whether the known sizes and the length of the joined axis determine all sizes of a group."""
    names = {axis.name for axis in group} - FIXED.keys()
    unknown = len(names - known.keys())
    return bool(names) and unknown <= 1 and unknown < len(names)  # a group of one unknown axis is no help


def find_sizes(
    name: str, array: Array, line: Layout, groups: Groups, known: Mapping[str, int]
) -> tuple[dict[str, int], Groups]:
    """Return ({axis: size}, grouping); raise unless exactly one grouping fits."""
    found: list[tuple[dict[str, int], Groups]] = []
    missing: list[str] = []
    reasons: list[str] = []
    for grouping in groupings(groups, array.ndim, known):
        sizes = solve_sizes(array.shape, grouping, known, array.dtype.itemsize)
        if isinstance(sizes, dict):
            if sizes not in [each for each, _ in found]:
                found.append((sizes, grouping))
        else:
            (missing if sizes.missing else reasons).append(sizes.reason)
    if len(found) == 1 and (not missing or len(groups) == array.ndim):
        return found[0]
    if not found and not missing:
        why = reasons[0] if len(reasons) == 1 else f"{len(groups)} axes, or some of them as one"
        raise argument_error(name, f"the shape of '{line}': {why}", describe(array))
    if len(found) > 1:
        differing = [axis for axis in found[0][0] if len({sizes.get(axis) for sizes, _ in found}) > 1]
        need = " or ".join(differing)
    else:
        need = missing[0]
    wanted = f"{need} too, as '{line}' can be read in several ways"
    raise argument_error(f"sizes of {name}", wanted, describe(array))


def strided_view(
    name: str, array: Array, line: Layout, groups: Groups, known: Mapping[str, int]
) -> tuple[Array, dict[str, int]]:
    """Return (a view with one axis for each axis of the layout, in the line's order; {axis: size})."""
    sizes, grouping = find_sizes(name, array, line, groups, known)
    inner = inner_sizes(groups, array.dtype.itemsize)
    shape, strides = [], []
    for group, stride in zip(grouping, array.strides, strict=True):
        lengths = [axis_length(axis, sizes, inner) for axis in group]
        shape += lengths
        strides += [stride * math.prod(lengths[i + 1 :]) for i in range(len(lengths))]
    steps = [stride for stride, size in zip(strides, shape, strict=True) if size > 1]
    if any(step <= 0 for step in steps) or steps != sorted(steps, reverse=True):
        order = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
        found = f"strides {array.strides}; in memory its axes lie in the order {tuple(order)}"
        raise argument_error(name, f"axes of '{line}', outermost first", found)
    # `as_strided` finds a dtype by its letter, which float8_e5m2 shares with another dtype: view as bytes.
    raw = array.view(f"V{array.dtype.itemsize}")
    return as_strided(raw, shape, strides, writeable=array.flags.writeable).view(array.dtype), sizes


def axis_offsets(
    axes: tuple[Axis, ...], strides: Iterable[int], name: str, size: int, inner: Mapping[str, int]
) -> Array:
    """Return the offset of each index along the axis `name`; zeros if the layout lacks the axis."""
    offsets, index = np.zeros(size, np.int64), np.arange(size)
    for axis, stride in zip(axes, strides, strict=True):
        if axis.name == name:
            indices = {"": index, "1": index // inner.get(name, 1), "0": index % inner.get(name, 1)}
            offsets += indices[axis.part] * stride
    return offsets
