"""Find what lies beside a cache: queries under any of their names, the factor of scores, a padding mask."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvkit import layouts
from kvkit.checks.values import positive_number
from kvkit.errors import argument_error, brief, describe
from kvkit.files.contents import nested
from kvkit.tools.names import LayerNames, by_layer, patterns_beside
from kvkit.typed import Array

QUERY_NAMES = "query", "queries", "current_query", "query_states", "q"
MASK_NAMES = "attn_mask", "attention_mask", "padding_mask"
FORM = "[layers, sequences, last tokens, heads, dim]"
SCALE = "softmax_scale"
EXCHANGE = "exchange axes 2 and 3 of"  # in notes on queries that are, or may be, in transformers' order


class FoundQueries(NamedTuple):
    """Holds the queries of a file, if it has any that fit its cache."""

    layers: list[list[Array]] | None = None  # [layer][sequence] of the last tokens, [tokens, heads, dim]
    notes: tuple[str, ...] = ()  # how they were read, or why not
    names: tuple[str, ...] = ()  # of the arrays that were read


def find_queries(
    arrays: Mapping[str, Any], named: LayerNames | None, layout: Any, layers: int, starts: Array,
    open_keys: Callable[[], Any],
) -> FoundQueries:  # fmt: skip
    """Find the queries of the last tokens of each sequence; `open_keys` returns a `SideReader` of keys.

    They are one array, a list of layers, or arrays of layers whose names are those of the keys with "query"
    for "key". A layer is [sequences, tokens, heads, dim], or [tokens, heads, dim] for one sequence or for all
    packed tokens; or it has the axes of the keys' layout in their order, or rows of all heads.
    """
    name = next((name for name in QUERY_NAMES if nested(arrays, name) is not None), None)
    beside = patterns_beside(named.patterns[0]) if named else None
    of_layers = by_layer(arrays, beside[1]) if beside else {}
    if name is not None:
        given = nested(arrays, name)
        names = tuple(each for each in arrays if each == name or each.startswith(f"{name}."))
    elif named is not None and of_layers and of_layers.keys() >= set(named.numbers):
        names = tuple(of_layers[number] for number in named.numbers)
        given, name = [arrays[each] for each in names], names[0]
    else:
        return FoundQueries()
    keys, axes = open_keys(), () if layout is None else layouts.parse(layout).axes
    heads, dim = keys.heads, keys.dim
    orders = [
        [split_queries(each, heads, dim, starts) for each in layers_in_order]
        for layers_in_order in zip(*(orders_of_axes(each, dim, axes) for each in given), strict=False)
    ]
    fitting = [found for found in orders if len(found) == layers and not any(each is None for each in found)]
    if not fitting:
        shape = describe(given if isinstance(given, np.ndarray) else given[0])
        turned = [each.swapaxes(-3, -2) for each in given] if np.ndim(given[0]) > 2 else []
        fits = [split_queries(each, heads, dim, starts) is not None for each in turned]
        why = (
            f", but as transformers orders them: {EXCHANGE} {name}"
            if len(fits) == layers and all(fits)
            else ""
        )
        return FoundQueries(None, (f"{name} is not {FORM}{why}: {shape}",))
    found = fitting[0]
    tokens, count = found[0][0].shape[:2]
    note = f"queries: the last {tokens:,} tokens, {count:,} heads"
    if len(fitting) > 1 or (
        len(orders) == 1 and tokens < count <= min(np.diff(starts)) and not tokens % heads
    ):
        note += f"; if they are {count:,} tokens and {tokens:,} heads, {EXCHANGE} {name}"
    return FoundQueries(found, (note,), names)


def orders_of_axes(query: Any, dim: int, axes: Sequence[str]) -> list[Any]:
    """Return the queries of a layer as [.., tokens, heads, dim], in the order of the `axes` of keys.

    If heads come before tokens in these, the plain order follows.
    """
    if query.ndim == 2:
        return [query.reshape(len(query), -1, dim)] if dim and not query.shape[1] % dim else []
    if query.ndim < 2:
        return []
    if "h" in axes and "c" in axes and axes.index("c") < axes.index("h"):
        query = query.swapaxes(-1, -2)
    heads_first = {"h", "n"} <= set(axes) and axes.index("h") < axes.index("n")
    return [query.swapaxes(-3, -2), query] if heads_first and query.ndim > 2 else [query]


def split_queries(query: Any, heads: int, dim: int, starts: Array) -> Any:
    """Return the queries of a layer by sequence; None if their shape does not fit the cache."""
    lengths = np.diff(starts)
    if query.ndim == 3:
        query = query[None] if len(lengths) == 1 else np.split(query, starts[1:-1])
        if not isinstance(query, np.ndarray) and [len(each) for each in query] != lengths.tolist():
            return None
    fits = all(
        each.ndim == 3 and each.shape[2] == dim and not each.shape[1] % heads and 0 < len(each) <= length
        for each, length in zip(query, lengths, strict=False)
    )
    return list(query) if fits and len(query) == len(lengths) and query[0].shape[1] else None


def scale_of_scores(arrays: Mapping[str, Any], needed: bool) -> float | None:
    """Return the factor of scores; raise if it is `needed`, as over latent rows, and there is none."""
    given = arrays.get(SCALE)
    if given is None and needed:
        wanted = "a number with query, for latent rows (192 ** -0.5 for DeepSeek)"
        raise argument_error(SCALE, wanted, "None")
    return None if given is None else positive_number(SCALE, given.item())


def find_mask(arrays: Mapping[str, Any], starts: Array, packed: bool) -> Array | None:
    """Return which tokens of the sequences are no padding, bool [tokens]; None if there is no mask.

    Raises
    ------
    KvkitError
        If it is no padding mask [sequences, tokens] of this cache, or if page tables lie beside it.
    """
    name = next((name for name in MASK_NAMES if name in arrays), None)
    if name is None:
        return None
    mask, count, tokens = arrays[name], len(starts) - 1, int(starts[-1])
    if packed:
        wanted = "none beside page tables or seqstarts, which name the tokens"
        raise argument_error(name, wanted, describe(mask))
    integers = mask.dtype.kind == "b" or (mask.dtype.kind in "iu" and np.isin(mask, (0, 1)).all())
    if not integers or mask.size != tokens or mask.ndim > 2 or (mask.ndim == 2 and len(mask) != count):
        shape = f"[{count}, {tokens // max(count, 1)}]"
        wanted = f"a padding mask {shape} of 0 and 1, one for each token"
        raise argument_error(name, wanted, describe(mask))
    mask = mask.reshape(-1).astype(bool)
    if not all(part.any() for part in np.split(mask, starts[1:-1])):
        raise argument_error(name, "a token or more in each sequence", brief("a sequence of padding"))
    return mask


def only_rows(read: Callable[[slice], Array], rows: Array) -> Callable[[slice], Array]:
    """Return a reader of only the ascending rows `rows` of another reader."""

    def read_rows(part: slice) -> Array:
        own = rows[part]
        if not len(own):
            return read(slice(0, 0))
        return read(slice(int(own[0]), int(own[-1]) + 1))[own - own[0]]

    return read_rows


def queries_of_tokens(queries: Sequence[Array], mask: Array, starts: Array) -> list[Array]:
    """Return the queries of real tokens; raise if the last tokens of a sequence are padding."""
    found = []
    for query, own in zip(queries, np.split(mask, starts[1:-1]), strict=True):
        if not own[-1]:
            wanted = "padding before the tokens, as query has the last tokens of each sequence"
            raise argument_error("attn_mask", wanted, "padding after them")
        found.append(query[own[-len(query) :]])
    return found
