"""Join caches of tensor-parallel ranks, or of parts of a prompt, to one; cut a cache into those of ranks.

Where a model has fewer key heads than ranks, neighbouring ranks hold the same head.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvkit import files
from kvkit.checks.values import integer
from kvkit.errors import argument_error, brief, describe
from kvkit.files import Contents
from kvkit.files.contents import CACHE
from kvkit.layouts.views import KV
from kvkit.tools.contents import Source
from kvkit.tools.source import LINE, TABLE_PREFIXES, CacheSource, leaves, parse_layout

NOTES_OF_PARTS: tuple[str, ...] = (
    "keys are as they were: right if each part was read behind those before it (else: Cache.append)",
)
QUERY_ARRAY = "query"  # [layers, sequences, last tokens, heads, dim]


def join(
    sources: Iterable[Source] | Mapping[str, Source],
    *,
    axis: str = "h",
    layout: str | None = None,
    sizes: Mapping[str, int] | None = None,
    num_kv_heads: int | None = None,
) -> Contents:
    """Join the caches of tensor-parallel ranks, each of which has some heads of the same tokens.

    Or those of parts of one prompt, in their order, along its tokens: files without positions, whose keys
    stay rotated as they are. `Cache.append` joins caches that were each read from position 0 on.

    Heads that ranks have twice or more are written once, with a note: ranks whose keys and values are equal
    bit for bit, in groups of one size, or as many as `num_kv_heads` says.

    Parameters
    ----------
    sources : iterable of path, mapping of arrays, or Contents
        The caches, in the order of their heads; or {name in errors: cache}.
    axis : "h" or "n"
        The axis that is split: heads or tokens.
    layout, sizes
        The layout and sizes of each cache: see `convert`.
    num_kv_heads : int, optional
        The key heads of the model. Ranks that have more in all hold copies, which must be equal.

    Returns
    -------
    Contents
        The whole cache, for `convert`; tables and all else come from the first source.

    Raises
    ------
    KvkitError
        If the caches differ in more than their heads, or tokens, have separate scales, or contradict
        `num_kv_heads`.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.tools import convert, join
    >>> ranks = [{"cache": [[np.full((1, 2, 5, 8), i, np.float16)] * 2]} for i in range(4)]
    >>> whole = convert(join(ranks, layout="hf"), None, to_layout="vllm-lbnhc")
    >>> whole.arrays["cache"][0].shape, whole.arrays["cache"][0][0, 0, ::2, 0].tolist()
    ((1, 5, 8, 16), [0.0, 1.0, 2.0, 3.0])
    """
    if axis not in ("h", "n"):
        raise argument_error("axis", "'h', the heads, or 'n', the tokens", brief(repr(axis)))
    named = dict(sources) if isinstance(sources, Mapping) else dict(enumerate(sources))
    ranks = [CacheSource(each, layout, sizes, ("from_layout", "from_format")) for each in named.values()]
    for name, rank in zip(named, ranks, strict=True):
        rank.name = name if isinstance(name, str) else rank.name
    if not ranks:
        raise argument_error("sources", "a cache or more", "none")
    for rank in ranks:
        check_divisible(rank, "sources", axis)
    rest = [rank.other_arrays(rank.own_arrays, tables=True) for rank in ranks]
    for rank, others in zip(ranks, rest, strict=True):
        if len(rank.require_view().keys) != (layers := len(ranks[0].require_view().keys)):
            wanted = f"layers as {ranks[0].name} has, {layers}"
            raise argument_error("sources", wanted, f"{len(rank.require_view().keys)} in {rank.name}")
        tables_differ = [name for name in rest[0].keys() | others.keys() if name.startswith(TABLE_PREFIXES)
                         and not np.array_equal(rest[0].get(name, ()), others.get(name, ()))]  # fmt: skip
        if tables_differ:
            raise argument_error("sources", f"equal {tables_differ[0]}", f"others in {rank.name}")
    names, views = [rank.name for rank in ranks], [rank.require_view() for rank in ranks]
    if axis == "n":
        chosen, notes = [*range(len(views))], NOTES_OF_PARTS
    else:
        chosen, notes = ranks_without_copies(names, views, num_kv_heads)
    cache = [
        [join_parts([names[i] for i in chosen], [side[layer] for side in sides], axis)
         for sides in zip(*(views[i] for i in chosen), strict=True)]
        for layer in range(layers)
    ]  # fmt: skip
    arrays = rest[0] | ranks[0].numbers_to_write | files.flat({CACHE: cache})
    queries = [each for others in rest if (each := others.get(QUERY_ARRAY)) is not None and each.ndim == 5]
    if axis == "n":  # the queries of the last tokens
        arrays = {name: array for name, array in arrays.items() if name != QUERY_ARRAY}
        arrays |= {QUERY_ARRAY: rest[-1][QUERY_ARRAY]} if QUERY_ARRAY in rest[-1] else {}
    elif len(queries) == len(ranks):  # all have query heads of their own
        joined = join_parts(names, [each.reshape(-1, *each.shape[2:]) for each in queries])
        arrays[QUERY_ARRAY] = joined.reshape(*queries[0].shape[:3], -1, queries[0].shape[4])
    first = ranks[0].contents
    described = replace(first.description, layout=LINE, sizes={})
    guess = ranks[0].guess if ranks[0].layout is not None else ()
    return replace(first, arrays=arrays, description=described, notes=(*first.notes, *guess, *notes))


def cut(
    source: Source, ranks: int, *, layout: str | None = None, sizes: Mapping[str, int] | None = None
) -> list[Contents]:
    """Cut a cache into those of tensor-parallel ranks, each with its share of the heads, for `join`.

    Parameters
    ----------
    source : path, mapping of arrays, or Contents
        A cache with heads.
    ranks : int
        How many ranks. It divides the key heads, or they divide it: then neighbours get the same head.
    layout, sizes
        The layout and sizes of the cache: see `convert`.

    Returns
    -------
    list of Contents
        The cache of each rank, for `convert`; tables and all else are those of the source.

    Raises
    ------
    KvkitError
        If the heads do not divide among the ranks, or the cache has no heads, or separate scales.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.tools import convert
    >>> from kvkit.tools.ranks import cut
    >>> cache = {"cache": [[np.arange(80, dtype=np.float16).reshape(1, 2, 5, 8)] * 2]}
    >>> parts = [convert(rank, None, to_layout="hf").arrays["cache"] for rank in cut(cache, 4, layout="hf")]
    >>> [part[0][0][0, :, 0, 0].tolist() for part in parts]
    [[0.0], [0.0], [40.0], [40.0]]
    """
    count = integer("ranks", ranks, 1)
    opened = CacheSource(source, layout, sizes, ("from_layout", "from_format"))
    check_divisible(opened, "source")
    kv = opened.require_view()
    heads = {leaf.shape[-2] for side in kv for layer in side for leaf in leaves(layer)}
    if any(each % count and count % each for each in heads):
        wanted = f"a number that divides {' and '.join(map(str, sorted(heads)))} heads, or a multiple of them"
        raise argument_error("ranks", wanted, count)
    others = opened.other_arrays(opened.own_arrays, tables=True) | opened.numbers_to_write
    first = opened.contents
    found = []
    for rank in range(count):
        cache = [[heads_of_rank(side, rank, count, 2) for side in layer] for layer in zip(*kv, strict=True)]
        arrays = others | files.flat({CACHE: cache})
        if (query := arrays.get(QUERY_ARRAY)) is not None and query.ndim == 5 and not query.shape[3] % count:
            arrays[QUERY_ARRAY] = heads_of_rank(query, rank, count, 3)
        described = replace(first.description, layout=LINE, sizes={})
        found.append(replace(first, arrays=arrays, description=described))
    return found


def check_divisible(source: CacheSource, argument: str, axis: str = "h") -> None:
    """Refuse caches that cannot be joined or cut: separate scales, tables, latent rows by heads."""
    if source.sliding is not None:
        raise argument_error(argument, "files of one cache each", f"two caches in {source.name}")
    source.require_view()
    if source.scales or source.scales_inside:
        wanted = "floats, or codes with scales in their rows"
        raise argument_error(argument, wanted, f"scales in {source.name}")
    tables = [name for name in source.contents.arrays if name.startswith((*TABLE_PREFIXES, "positions"))]
    if axis == "n" and tables:
        wanted = "caches without tables or positions (of Cache.save: Cache.append, kvkit edit --append)"
        raise argument_error(argument, wanted, f"{tables[0]} in {source.name}")
    has_heads = source.separate or {"kv", "h"} & parse_layout(source.layout or LINE, "layout").names
    if axis == "h" and not has_heads:
        raise argument_error(argument, "caches with heads: each rank has all latent rows", source.name)


def heads_of_rank(array: Any, rank: int, count: int, axis: int) -> np.ndarray:
    """Return the heads of one of `count` ranks, which share a head if there are fewer."""
    whole = stacked(array)
    heads = whole.shape[axis]
    each = max(heads // count, 1)
    begin = rank * heads // count
    return np.ascontiguousarray(whole.take(range(begin, begin + each), axis))


def stacked(blocks: Any) -> np.ndarray:
    """Return blocks of a layer that may be separate arrays as one array [blocks, tokens, heads, content]."""
    if isinstance(blocks, tuple) and len({block.shape for block in blocks}) > 1:
        raise argument_error(
            "source", "sequences of one length (kvkit convert --page-size makes pages)", "others"
        )
    return np.stack(blocks) if isinstance(blocks, tuple) else np.asarray(blocks)


def ranks_without_copies(
    names: Sequence[str], views: Sequence[KV], num_kv_heads: int | None
) -> tuple[list[int], tuple[str, ...]]:
    """Return (ranks whose heads make the whole cache, notes on those that hold copies)."""
    heads = [leaves(view.keys[0])[0].shape[-2] for view in views]
    everyone, count, total = list(range(len(views))), len(views), sum(heads)
    if num_kv_heads is not None and total == num_kv_heads:
        return everyone, ()
    groups: dict[bytes, list[int]] = {}  # {digest: ranks of equal bytes}
    for rank, digest in enumerate(digests(views)):
        groups.setdefault(digest, []).append(rank)
    copies = {len(group) for group in groups.values()}
    regular = len(copies) == 1 and copies != {1}
    chosen = [group[0] for group in groups.values()] if regular else everyone
    if num_kv_heads is not None and sum(heads[i] for i in chosen) != num_kv_heads:
        wanted = f"ranks with the {num_kv_heads} key heads of the model, or with equal copies of them"
        raise argument_error(
            "sources", wanted, f"{sum(heads[i] for i in chosen)} that differ in {count} ranks"
        )
    if regular:
        each = f"{total} heads of {count} ranks are {total // copies.pop()}"
        return chosen, (f"{each}: ranks with equal bits hold copies, which are written once",)
    twice = next((group for group in groups.values() if len(group) > 1), None)
    if twice is None:
        return everyone, ()
    return everyone, (f"{brief(' and '.join(names[i] for i in twice))} are equal bit for bit, unlike others",)


def digests(views: Sequence[KV]) -> list[bytes]:
    """Return a digest of the keys and values of each rank; of zeros alone one that no other rank has."""
    found = []
    for rank, view in enumerate(views):
        total, is_zero = hashlib.blake2b(), True
        for leaf in (leaf for side in view for layer in side for leaf in leaves(layer)):
            raw = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
            total.update(f"{leaf.shape} {leaf.dtype}".encode() + raw.data)
            is_zero = is_zero and not raw.any()
        found.append(f"zeros of rank {rank}".encode() if is_zero else total.digest())
    return found


def join_parts(names: Sequence[str], parts: Sequence[Any], axis: str = "h") -> np.ndarray:
    """Join the heads or tokens of several caches to one array [blocks, tokens, heads, content]."""
    arrays, number = [stacked(part) for part in parts], 2 if axis == "h" else 1
    forms = [(*array.shape[:number], *array.shape[number + 1 :], array.dtype) for array in arrays]
    for name, array, form in zip(names, arrays, forms, strict=True):
        if form != forms[0]:
            split = "heads" if axis == "h" else "tokens"
            expected = f"{describe(arrays[0])} but for its {split}, as {names[0]}"
            raise argument_error("sources", expected, f"{describe(array)} in {name}")
    return np.ascontiguousarray(np.concatenate(arrays, number))
