"""Compare layouts with each other, and with arrays that they may describe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvkit.errors import KvkitError, argument_error, describe
from kvkit.interop import as_numpy
from kvkit.layouts.grammar import Layout
from kvkit.layouts.named import NAMED, parse
from kvkit.layouts.shapes import (
    FIXED,
    SIZED_AXES,
    Groups,
    Unsolved,
    axis_length,
    axis_offsets,
    check_sizes,
    inner_sizes,
    solve_sizes,
    usual_groupings,
)
from kvkit.layouts.views import view
from kvkit.typed import Array

# Sizes for which no other order of axes has equal strides.
PRIMES = {"l": 3, "b": 5, "n": 7, "h": 11, "c": 13, "s": 13}
SAMPLED_BLOCKS = 64  # that `fits` looks into


def same_bytes(one: str | Layout, other: str | Layout, /, *, itemsize: int = 2, **sizes: int) -> bool:
    """Return whether each element lies at the same place of the same array in two layouts.

    Parameters
    ----------
    one, other : str or Layout
        Lines, or names of `NAMED`.
    itemsize : int
        Bytes of an element, for inner parts whose size is in bytes.
    **sizes : int
        Lengths of ``l b n h c``. Lengths that are left out are arbitrary, but 1 for an axis that only one
        of the layouts has.

    Examples
    --------
    >>> from kvkit.layouts import same_bytes
    >>> same_bytes("vllm-lbnhc", "jax")
    True
    >>> same_bytes("flashinfer-nhd", "flashinfer-hnd"), same_bytes("flashinfer-nhd", "flashinfer-hnd", h=1)
    (False, True)
    """
    lines = parse(one), parse(other)
    known = check_sizes("sizes", sizes)
    if any(line.has_scales for line in lines):
        return lines[0] == lines[1]
    inner = [inner_sizes((*line.groups, *line.value_groups), itemsize) for line in lines]
    names = lines[0].names | lines[1].names
    for name in names - {"kv", "1"}:
        if name not in known:
            in_both = name in lines[0].names and name in lines[1].names
            parts = np.lcm.reduce([max(sizes.get(name, 1), 1) for sizes in inner])  # divides the size
            known[name] = int(PRIMES[name] * parts) if in_both else 1
    return bool(element_places(lines[0], inner[0], known) == element_places(lines[1], inner[1], known))


def element_places(line: Layout, inner: Mapping[str, int], known: Mapping[str, int]) -> list[Any]:
    """Return the lists of a layout, and the offset of each index along each axis, for keys and for values."""
    sizes = {name: FIXED.get(name, known.get(name, 1)) for name in PRIMES | {"kv": 2}}
    places: list[Any] = [frozenset(axis for axis in line.lists if sizes[axis] > 1), "kv" in line.names]
    for groups in (line.groups, line.value_groups):
        axes = tuple(axis for group in groups for axis in group)
        lengths = [axis_length(axis, sizes, inner) for axis in axes]
        strides = [int(np.prod(lengths[i + 1 :])) for i in range(len(axes))]
        places.append([axis_offsets(axes, strides, *item, inner).tolist() for item in sizes.items()])
    return places


def fits(arrays: Any, contents: bool = False) -> list[str]:
    """Return the names of layouts that arrays may have. They are guesses, for a person to confirm.

    Parameters
    ----------
    arrays : array, or nested lists of arrays
        A cache. The axes of each array are taken in the order in which they lie in memory.
    contents : bool
        Rank layouts by the elements, the likeliest first. Keys of neighbouring tokens are alike, and some
        channels of keys have a mean far from 0; values show neither. Unused tokens are 0 in all heads.

    Returns
    -------
    list of str
        Names of `NAMED`. Several layouts have equal shapes, and some have equal bytes (see `same_bytes`).

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit import layouts
    >>> layers = [np.zeros((10, 16, 2, 128), np.float16) for _ in range(4)]
    >>> found = layouts.fits(layers)
    >>> "vllm-lbnhc" in found, "vllm-flash-attention" in found
    (True, False)
    """
    arrays = in_memory_order(arrays)
    sizes = {name: possible_sizes(arrays, named.layout) for name, named in NAMED.items()}
    if not contents:
        return [name for name in sizes if sizes[name]]
    scores = {
        name: max(score_layout(arrays, name, x) for x in found) for name, found in sizes.items() if found
    }
    best = max(scores.values(), default=0.0)
    likely = [name for name, score in scores.items() if score > best / 2 > 0]
    return sorted(likely, key=lambda name: -scores[name])


def in_memory_order(arrays: Any) -> Any:
    """Transpose each array so that its axes go from the outermost in memory to the innermost."""
    if isinstance(arrays, (list, tuple)):
        return [in_memory_order(each) for each in arrays]
    array = as_numpy(arrays)
    if not isinstance(array, np.ndarray) or not array.size:
        raise argument_error("arrays", "arrays that are not empty, or lists of them", describe(arrays))
    return array.transpose(sorted(range(array.ndim), key=lambda axis: -array.strides[axis]))


def possible_sizes(arrays: Any, line: Layout) -> list[dict[str, int]]:
    """Return all {axis: size} that make arrays fit a layout; {} stands for sizes that shapes do not show."""
    if line.has_scales:
        return []
    members = [(arrays, 0)]  # of a level of lists: (list or array, 0 for keys or 1 for values)
    for axis in line.lists:
        if not all(isinstance(x, list) and x and (axis != "kv" or len(x) == 2) for x, _ in members):
            return []
        members = [(y, i if axis == "kv" else side) for x, side in members for i, y in enumerate(x)]
    if not all(isinstance(array, np.ndarray) for array, _ in members):
        return []
    # The first array gives candidates, which the others must fit.
    found = sizes_that_fit(members[0][0], line.groups, {})
    for array, side in members[1:]:
        groups = (line.groups, line.value_groups)[side]
        shared = "lbnh" if side else SIZED_AXES  # keys and values in separate arrays may differ in content
        found = [
            sizes
            for sizes in found
            if sizes_that_fit(array, groups, {axis: size for axis, size in sizes.items() if axis in shared})
        ]
    return found


def sizes_that_fit(array: Array, groups: Groups, known: dict[str, int]) -> list[dict[str, int]]:
    """Return all {axis: size} that make one array fit; [{}] if its shape does not show all sizes."""
    found, missing = [], False
    for grouping in usual_groupings(groups, array.ndim):
        sizes = solve_sizes(array.shape, grouping, known, array.dtype.itemsize)
        if isinstance(sizes, Unsolved):
            missing |= sizes.missing
        elif sizes not in found:
            found.append(sizes)
    return found or [{}] * missing


def score_layout(arrays: Any, name: str, sizes: dict[str, int]) -> float:
    """Score how well contents fit a layout; 0 if they cannot tell."""
    try:
        kv = view(arrays, name, sizes=sizes or {"h": 1})  # all heads as one, if the shape does not show them
    except KvkitError:  # an axis is split, or sizes are missing
        return 0.0
    layers = [
        (np.asarray(keys), np.asarray(values))
        for keys, values in zip(*kv, strict=True)
        if not isinstance(keys, tuple)
    ]
    if not layers or layers[0][0].dtype.kind in "iub" or "kv" not in NAMED[name].layout.names:
        return 0.0
    scores = []
    for keys, values in (layers[0], layers[len(layers) // 2]):
        key_score, used = key_traits(keys)
        value_score, used_values = key_traits(values)
        # The share of tokens that are used, or unused, in all heads of keys and of values.
        agree = ((used == used_values).all(-1) & (used.all(-1) == used.any(-1))).mean()
        scores.append((key_score - value_score) * agree)
    return float(np.mean(scores))


def key_traits(array: Array) -> tuple[float, Array]:
    """Return (a score of how much [b, n, h, c] look like keys, which rows are used as bool [b, n, h])."""
    x = array[:SAMPLED_BLOCKS].astype(np.float32)
    used = (x != 0).any(-1)
    rows = x[used.all(-1)]  # [tokens, h, c]
    if len(rows) < 2:
        return 0.0, used
    with np.errstate(all="ignore"):
        means = np.minimum(np.abs(rows.mean(0)) / rows.std(0), 8)  # of channels, in standard deviations
        norms = np.sqrt((x * x).sum(-1))
        cosines = (x[:, 1:] * x[:, :-1]).sum(-1) / (norms[:, 1:] * norms[:, :-1])  # of neighbouring tokens
        score = np.nanmean(means) + (np.nanmean(cosines) if np.isfinite(cosines).any() else 0)
    return float(np.nan_to_num(score)), used
