"""View a cache's keys and values as arrays with named axes, without copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvkit.errors import argument_error, describe
from kvkit.interop import as_numpy, in_kind_of
from kvkit.layouts.grammar import Axis, Layout
from kvkit.layouts.named import parse
from kvkit.layouts.shapes import Groups, check_sizes, strided_view
from kvkit.typed import Array

LAYER_AXES = ("l", "b", "n", "h", "c")
Where = tuple[tuple[str, int], ...]  # (axis, index) for each level of lists


@dataclass(frozen=True, slots=True)
class KV:
    """Holds the keys and values of a cache as views.

    Attributes
    ----------
    keys, values : ndarray or tuple, axes l b n h c
        ``keys[layer][block]`` is [tokens, heads, content]. The whole is one array
        [layers, blocks, tokens, heads, content] if possible; a tuple of arrays if layers are separate arrays,
        and a tuple of tuples if blocks are. An axis that a layout lacks has length 1.
    """

    keys: Any
    values: Any

    def __iter__(self) -> Iterator[Any]:
        """Yield keys, then values."""
        yield from (self.keys, self.values)


@dataclass(frozen=True, slots=True)
class Leaf:
    """Names the axes of one of the cache's arrays, as far as it holds keys, or values; axes may be split."""

    name: str  # as in errors: "arrays[0]"
    array: np.ndarray
    axes: tuple[Axis, ...]
    sizes: Mapping[str, int]


def view(arrays: Any, layout: str | Layout, *, sizes: Mapping[str, int] | None = None) -> KV:
    """View the keys and values of any engine's cache, without a copy.

    Parameters
    ----------
    arrays : array, or nested lists of arrays
        The cache in the form of the layout: an array, or nested lists with a level for each axis left of the
        bar. An array may stand for the list of its items. Arrays are numpy's, or torch's on the CPU.
    layout : str or Layout
        A line, or a name of `NAMED`. Nothing is guessed from shapes.
    sizes : dict, optional
        Lengths of ``l b n h c`` that shapes do not show; others are compared with the shapes. ``v`` is the
        content of values if it differs from the content of keys: the first elements of a latent row.

    Returns
    -------
    KV
        ``keys`` and ``values`` with axes l b n h c. Writing to them writes to `arrays`. Tensors of torch give
        tensors.

    Raises
    ------
    KvkitError
        If shapes, strides, sizes and layout contradict each other, if a size is missing, or if an axis is
        split, as in ``c1 .. c0[8]``: no view can show such a cache, but `convert` can copy it.

    Notes
    -----
    A layout without ``kv`` has one row for key and value: keys are the whole row, values its first ``v``
    elements, or the whole row. An array whose strides are not in the order of the line's axes is refused:
    transpose it first.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit import layouts
    >>> pool = np.zeros((10, 16, 2, 128), np.float16)  # 10 blocks of 16 tokens, 2 heads, K and V of 64
    >>> kv = layouts.view([pool], "vllm-lbnhc")
    >>> kv.keys[0].shape, kv.values[0].strides == kv.keys[0].strides
    ((10, 16, 2, 64), True)
    >>> kv.values[0][3, 5, 1] = 7
    >>> pool[3, 5, 1, 63:66]
    array([0., 7., 7.], dtype=float16)
    """
    line = parse(layout)
    check_one_kind(line)
    if name := line.split:
        got = f"'{line}', where {name} is split into {name}1 and {name}0 (kvkit.layouts.convert copies it)"
        raise argument_error("layout", "whole axes, for a view", got)
    kv = arrange(iterate_leaves(arrays, line, check_sizes("sizes", sizes)), line, order_axes)
    return KV(in_kind_of(arrays, kv.keys), in_kind_of(arrays, kv.values))


def check_one_kind(line: Layout) -> None:
    """Check that a layout has no codes and scales in one block."""
    if line.has_scales:
        raise argument_error("layout", "elements of one kind", f"'{line}', where two kinds share a block")


def order_axes(leaf: Leaf, inner: int) -> np.ndarray:
    """Return a view of a leaf whose axes are the last `inner` axes of l b n h c."""
    names, array = ["c" if axis.name == "s" else axis.name for axis in leaf.axes], leaf.array
    wanted = LAYER_AXES[-inner:]
    array = array[tuple(slice(None) if name in wanted else 0 for name in names)]  # others have length 1
    names = [name for name in names if name in wanted]
    array = array.transpose([names.index(name) for name in wanted if name in names])
    return array[tuple(slice(None) if name in names else None for name in wanted)]


def arrange(
    found: Iterable[tuple[dict[str, int], tuple[Leaf, Leaf]]],
    line: Layout,
    order: Callable[[Leaf, int], Array],
) -> KV:
    """Build a `KV` from (index in lists, (keys, values)) of leaves; `order` transposes each leaf."""
    pairs = list(found)
    if "b" in line.lists:  # a tuple of blocks for each layer; layers are a level of lists, or an axis
        layers = max(pairs[0][1][0].sizes.get("l", 1), 1 + max(where.get("l", 0) for where, _ in pairs))
        sides: list[Any] = []
        for side in (0, 1):
            blocks: list[Any] = [[] for _ in range(layers)]
            for where, pair in pairs:
                array = order(pair[side], 5)[:, 0]  # [l, n, h, c]
                for layer in range(len(array)):
                    blocks[where.get("l", layer)].append(array[layer])
            sides.append(tuple(map(tuple, blocks)))
        return KV(*sides)
    if "l" in line.lists:
        return KV(*(tuple(order(pair[side], 4) for _, pair in pairs) for side in (0, 1)))
    [(_, pair)] = pairs
    return KV(*(order(side, 5) for side in pair))


def iterate_leaves(
    arrays: Any, line: Layout, known: Mapping[str, int], name: str = "arrays"
) -> Iterator[tuple[dict[str, int], tuple[Leaf, Leaf]]]:
    """Yield (index in lists, (keys, values)) for each array or pair of arrays, ordered by l, then b."""
    for axis, size in known.items():
        if axis in "lbnh" and axis not in line.names and size > 1:
            raise argument_error(name, f"an axis {axis} in '{line}', for a size of {size}", "none")
    found: dict[Any, Any] = dict(iterate_arrays(name, arrays, line.lists, {}))
    for axis in line.lists:
        if axis != "kv" and known.get(axis, list_length(found, axis)) != list_length(found, axis):
            wanted = f"{known[axis]} arrays along {axis} of '{line}'"
            raise argument_error(name, wanted, list_length(found, axis))
    outer = [axis for axis in ("l", "b") if axis in line.lists]
    for numbers in sorted({tuple(dict(where)[axis] for axis in outer) for where in found}):
        index = dict(zip(outer, numbers, strict=True))
        if "kv" in line.lists:
            keys, values = (found[list_index({**index, "kv": side}, line)] for side in (0, 1))
            pair = side_leaf(keys, line, 0, known), side_leaf(values, line, 1, known)
        else:
            pair = both_leaves(found[list_index(index, line)], line, known)
        for axis in "bnh":
            sizes = [leaf.sizes.get(axis, 1) for leaf in pair]
            if sizes[0] != sizes[1]:
                raise argument_error(pair[1].name, f"a size {axis} of {sizes[0]}, as keys have", sizes[1])
        yield index, pair


def list_index(index: Mapping[str, int], line: Layout) -> Where:
    """Return an index as pairs (axis, index), in the order of a line's lists."""
    return tuple((axis, index[axis]) for axis in line.lists)


def list_length(found: Iterable[Where], axis: str) -> int:
    """Return the number of arrays along one level of lists."""
    return 1 + max(dict(where)[axis] for where in found)


def iterate_arrays(
    name: str, arrays: Any, levels: Sequence[str], where: Mapping[str, int]
) -> Iterator[tuple[Where, tuple[str, Array]]]:
    """Yield (index in lists, (name, array)) for each array in nested lists."""
    if not levels:
        array = as_numpy(arrays, name)
        if not isinstance(array, np.ndarray):
            try:
                array = np.asarray(array)
            except ValueError:
                raise argument_error(name, "an array", describe(arrays)) from None
            if array.dtype == object or not hasattr(arrays, "__array__"):
                raise argument_error(name, "an array", describe(arrays))
        if array.size == 0:
            raise argument_error(name, "no axis of length 0", f"shape {array.shape}")
        yield tuple(where.items()), (name, array)
        return
    level, *rest = levels
    try:
        several = list(arrays)
    except TypeError:
        raise argument_error(name, f"a list, of arrays along {level}", describe(arrays)) from None
    if not several or (level == "kv" and len(several) != 2):
        pair = "two arrays, keys and values (in one array, kv stands right of the bar)"
        expected = pair if several else f"a list along {level}"
        raise argument_error(name, expected, describe(arrays))
    lengths = set()
    for i, member in enumerate(several):
        found = list(iterate_arrays(f"{name}[{i}]", member, rest, {**where, level: i}))
        lengths.add(len(found))
        if len(lengths) > 1:
            raise argument_error(f"{name}[{i}]", "as many arrays as before it", len(found))
        yield from found


def side_leaf(named: tuple[str, Array], line: Layout, side: int, known: Mapping[str, int]) -> Leaf:
    """Return the leaf of keys (side 0) or values (side 1) in an array of their own."""
    name, array = named
    groups: Groups = (line.groups, line.value_groups)[side]
    if side and "v" in known:
        known = {**known, "c": known["v"]}
    known = {axis: size for axis, size in known.items() if axis in line.names and axis not in line.lists}
    view, sizes = strided_view(name, array, line, groups, known)
    return Leaf(name, view, tuple(axis for group in groups for axis in group), sizes)


def both_leaves(named: tuple[str, Array], line: Layout, known: Mapping[str, int]) -> tuple[Leaf, Leaf]:
    """Return the leaves of keys and values that share one array."""
    name, _ = named
    if "kv" not in line.names:  # one row for key and value
        keys = side_leaf(named, line, 0, known)
        row, last = keys.array.shape[-1], keys.axes[-1]
        size = known.get("v", row)
        if size == row:
            return keys, keys
        if last.name not in "cs" or last.part:
            raise argument_error("sizes['v']", "no size of values, as content is not the last axis", size)
        if size > row:
            raise argument_error("sizes['v']", f"at most the {row} elements of a row", size)
        return keys, Leaf(name, keys.array[..., :size], keys.axes, {**keys.sizes, last.name: size})
    if "c" in known and known.get("v", known["c"]) != known["c"]:
        wanted = f"the size {known['c']} of keys, beside values in one array"
        raise argument_error("sizes['v']", wanted, known["v"])
    if "v" in known:
        known = {**known, "c": known["v"]}
    sides = []
    for side in (0, 1):  # sizes that keys have shown are known of values
        known = {axis: size for axis, size in known.items() if axis != "v"}
        leaf = side_leaf(named, line, side, known)
        at = [axis.name for axis in leaf.axes].index("kv")
        chosen = leaf.array[(slice(None),) * at + (side,)]
        sides.append(Leaf(name, chosen, (*leaf.axes[:at], *leaf.axes[at + 1 :]), leaf.sizes))
        known = {**known, **leaf.sizes}
    return sides[0], sides[1]
