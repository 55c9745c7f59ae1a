"""Choose some layers of a cache, because layers with windows or without attention differ in length."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kvkit import layouts
from kvkit.errors import argument_error, brief
from kvkit.files import Contents
from kvkit.files.contents import BESIDE, CACHE, name_arrays, nested
from kvkit.formats.mixes import parse_layers
from kvkit.layouts import Layout
from kvkit.tools.names import LAYER, SIDES
from kvkit.tools.source import SLIDING, CacheSource, in_file, leaves, name_in_second


def choose_layers(source: CacheSource, text: str) -> Contents:
    """Return the contents of a source with only some of its layers; layers keep their numbers."""
    if source.saved and source.contents.cache is None:
        raise argument_error("layers", "a cache whose layers are floats", "a saved cache of codes or pages")
    numbers = {name: layer_numbers(each) for name, each in source.caches.items()}
    if len(numbers) > 1 and source.layer_numbers is None:  # the second cache's layers follow
        numbers[SLIDING] = [number + len(numbers[CACHE]) for number in numbers[SLIDING]]
    known = sorted(set().union(*numbers.values()))
    chosen = parse_layers(text, known, None)
    for number in chosen:
        if number not in known:
            raise argument_error("layers", f"numbers among {brief(known)}", number)
    if not chosen:
        raise argument_error("layers", f"some of {brief(known)}", brief(text))
    parts = [
        with_layers(each, [i for i in numbers[name] if i in chosen], numbers[name])
        for name, each in source.caches.items()
        if set(numbers[name]) & set(chosen)
    ]
    first, *others = parts
    for other in others:
        metadata = first.metadata | {SLIDING: other.description.to_dict()}
        first = replace(first, arrays=first.arrays | in_file(SLIDING, other.arrays), metadata=metadata)
    return first


def layer_numbers(source: CacheSource) -> list[int]:
    """Return the numbers of a cache's layers; they count from 0 if the source does not number them."""
    source.require_cache()
    if source.layer_numbers is not None:
        return source.layer_numbers
    line, cache = layouts.parse(source.layout or ""), source.cache
    if "l" in line.lists:
        members = cache if line.lists[0] == "l" else cache[0]
        return list(range(len(members)))
    at = axis_of_layers(line)
    return [0] if at is None else list(range(leaves(cache)[0].shape[at]))


def axis_of_layers(line: Layout) -> int | None:
    """Return the index of the axis of layers in an array; None without one."""
    names = [[axis.name for axis in group] for group in line.groups]
    return names.index(["l"]) if ["l"] in names else None


def with_layers(source: CacheSource, chosen: list[int], numbers: list[int]) -> Contents:
    """Return the contents of one cache with the `chosen` ones of its layers."""
    second = source.sliding is not None
    arrays = {name: x for name, x in source.arrays.items() if not (second and name_in_second(name))}
    if source.layer_names is not None:
        dropped = [pattern.replace(LAYER, str(i)) for pattern in source.layer_names.patterns
                   for i in set(numbers) - set(chosen)]  # fmt: skip
        arrays = {name: array for name, array in arrays.items() if name not in dropped}
    else:
        places = [numbers.index(number) for number in chosen]
        line = layouts.parse(source.layout or "")
        for root, part in parts_of(source).items():
            arrays = {name: x for name, x in arrays.items() if not f"{name}.".startswith(f"{root}.")}
            arrays |= name_arrays(take_layers(part, line, places, root != CACHE), root)
        arrays = {name: array for name, array in arrays.items() if not name.startswith("layers.")}
        arrays["layers"] = np.array(chosen)
    old, metadata = source.contents.description, dict(source.contents.metadata)
    for name in (SLIDING, "cache"):
        metadata.pop(name, None)
    described = replace(old, sizes={axis: count for axis, count in old.sizes.items() if axis not in "ln"})
    return replace(source.contents, arrays=arrays, metadata=metadata, description=described)


def parts_of(source: CacheSource) -> dict[str, Any]:
    """Return {name without numbers: array or nested lists} of the arrays of a cache that have layers."""
    names = [*BESIDE]
    for side in source.side_names or ():
        names += [side, *(f"{side}_{part}" for part in BESIDE)]
    names += [f"{side}_{part}" for side in SIDES for part in BESIDE]
    found = {name: part for name in names if (part := nested(source.arrays, name)) is not None}
    return found | ({} if source.contents.cache is None else {CACHE: source.contents.cache})


def take_layers(part: Any, line: Layout, places: list[int], one_side: bool) -> Any:
    """Return some layers of an array or of nested lists, which hold one side or both."""
    lists = [axis for axis in line.lists if axis != "kv" or not one_side]
    if isinstance(part, list):
        if "l" not in lists:
            wanted = "layers as separate arrays, or along one axis"
            raise argument_error("layers", wanted, str(line))
        if lists[0] == "l":
            return [part[i] for i in places]
        return [[one[i] for i in places] for one in part]
    at = axis_of_layers(line)
    if at is None or at >= part.ndim:
        return part
    return np.take(part, places, at)
