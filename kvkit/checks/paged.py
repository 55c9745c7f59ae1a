"""The checked calls of attention over pools of pages, and of what fills and moves such pages."""

from typing import NamedTuple

import numpy as np

from kvkit.checks import attention, masks, pools
from kvkit.checks.index_tensors import index
from kvkit.checks.outputs import one_place
from kvkit.checks.pools import CONTENT
from kvkit.checks.tensors import DATA, FORMATS, POOLED, apart, filled, named, one_piece, tensor, written
from kvkit.checks.values import number
from kvkit.errors import argument_error, describe
from kvkit.formats import FLOATS, INT8

SCALES = "key_scale", "value_scale"


def checked(
    query,
    key_cache,
    value_cache,
    block_tables,
    context_lens,
    query_starts,
    attn_mask,
    *,
    layout,
    key_scale,
    value_scale,
    alibi_slopes,
    sinks,
    return_lse,
    **attributes,
):
    """The checked call of `kvkit.paged_attention`."""
    fmt = tensor("query", query, FLOATS, 3)
    filled("query", query)
    tokens, heads, dim = query.shape
    key, value = pools.pools(key_cache, value_cache, layout, POOLED)
    for name, pool in zip(pools.NAMES, (key, value), strict=True):
        if pool is None:
            raise argument_error(name, "a numpy array", "None")
    blocks, page_size, kv_heads, _ = key.shape
    if key.shape[CONTENT] != dim:
        raise argument_error("key_cache", f"the head size of query, {dim}", key.shape[CONTENT])
    if heads % kv_heads:
        raise argument_error("query", f"a multiple of the {kv_heads} heads of key_cache", f"{heads} heads")
    lengths = index("context_lens", context_lens)
    table = pools.table_of(block_tables, lengths, blocks, page_size)
    starts = starts_of(query_starts, len(lengths), tokens)
    query = one_piece(query)
    mask = masks.own_mask(fmt, attn_mask, heads, tokens, int(lengths.max(initial=0)))
    how = attention.weights(query, mask, sinks=sinks, **attributes)
    slopes = of_sequences("alibi_slopes", alibi_slopes, len(lengths), heads, "query heads")
    given, cells = (key_scale, value_scale), None
    coded = not {FORMATS[pool.dtype] for pool in (key, value)} <= set(FLOATS)
    if coded and any(pools.of_tokens(scale, len(lengths), kv_heads) for scale in given):
        if value.dtype != key.dtype:
            wanted = f"the dtype of key_cache, {key.dtype}, with scales for tokens"
            raise argument_error("value_cache", wanted, value.dtype)
        whole = is_whole(key_cache, value_cache, layout)
        scales, cells = None, pools.scales(*given, (key, value), whole, layout)
        pools.alike(cells, (key, value))
    else:
        for name, scale, pool_name, pool in zip(SCALES, given, pools.NAMES, (key, value), strict=True):
            asks_for_scale(name, scale, pool_name, pool)
        scales = scales_of(*given, len(lengths), kv_heads, how.scale)
    how = how._replace(slopes=slopes, scales=scales)
    inputs = named(
        query=query,
        key_cache=key,
        value_cache=value,
        attn_mask=attn_mask,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        key_scale=key_scale,
        value_scale=value_scale,
    )
    shape = (tokens, heads, value.shape[CONTENT])
    results = attention.results(shape, fmt, return_lse, inputs)
    context, steps = (
        pools.context_of(fmt, key, value, cells),
        pools.steps_of(key, value, table, lengths, starts),
    )
    return attention.Call(fmt, shape, query, context, steps, 0, how, inputs, results)


def is_whole(key_cache, value_cache, layout):
    """Whether one pool holds keys and values."""
    given = key_cache if key_cache is not None else value_cache
    return given.ndim == len(layout.split())


def asks_for_scale(name, scale, pool_name, pool):
    if scale is None and FORMATS[pool.dtype] is INT8:
        raise argument_error(name, f"a number or an array, for codes in {pool_name}", "None")


def starts_of(query_starts, batch, tokens):
    """Where the queries of each sequence begin; without them a sequence has one."""
    if query_starts is None:
        if tokens != batch:
            raise argument_error(
                "query", f"{batch} tokens, one for each of context_lens (or query_starts)", tokens
            )
        return np.arange(batch + 1)
    starts = index("query_starts", query_starts, length=batch + 1)
    if starts[0] != 0:
        raise argument_error("query_starts", "to begin with 0", starts[0])
    falls = np.flatnonzero(starts[1:] < starts[:-1])
    if len(falls):
        raise argument_error(
            "query_starts", f"never to decrease (entry {falls[0] + 1})", starts[falls[0] + 1]
        )
    if starts[-1] != tokens:
        raise argument_error("query_starts", f"to end with the {tokens} tokens of query", starts[-1])
    return starts


def of_sequences(name, values, batch, heads, what):
    """Numbers of heads, [heads] or [B, heads], as float32 [B or 1, heads]; None stays None."""
    if values is None:
        return None
    tensor(name, values, FLOATS, 2 if getattr(values, "ndim", 1) == 2 else 1)
    if values.shape not in ((heads,), (batch, heads)):
        raise argument_error(
            name, f"shape ({heads},) or ({batch}, {heads}), a number for each of the {what}", values.shape
        )
    return np.ascontiguousarray(np.atleast_2d(values), np.float32)


def scales_of(key_scale, value_scale, batch, heads, factor):
    """What keys (times the factor of the scores) and values are multiplied by; None without scales."""
    if key_scale is None and value_scale is None:
        return None
    both = [
        np.ones((1, 1), np.float32) if scale is None else scale_of(name, scale, batch, heads)
        for name, scale in zip(SCALES, (key_scale, value_scale), strict=True)
    ]
    scales = np.stack(np.broadcast_arrays(*both))
    scales[0] *= np.float32(factor)
    return scales


def scale_of(name, scale, batch, heads):
    if isinstance(scale, np.ndarray):
        cells = of_sequences(name, scale, batch, heads, "heads of a cache")
        if not np.isfinite(cells).all():
            raise argument_error(name, "finite numbers", "NaN" if np.isnan(cells).any() else "infinity")
        return cells
    return np.full((1, 1), number(name, scale), np.float32)


class Side(NamedTuple):
    """Keys or values to append to a pool."""

    tokens: np.ndarray
    pool: np.ndarray  # view [pages, rows, heads, content]
    packed: str
    stored: str
    cell: str | None = None  # the format of scales, if tokens become codes with one
    group: int = 0  # of elements that share a scale that is found; 0 where scales are given
    cells: np.ndarray | None = None  # [pages, rows, heads, groups], or given ones [heads or 1]


class Append(NamedTuple):
    """A checked call of `paged_append`."""

    sides: list[Side]
    pieces: np.ndarray  # see `checks.slots`


def checked_append(key, value, key_cache, value_cache, slot_mapping, *, layout, key_scale, value_scale):
    """The checked call."""
    views = pools.pools(key_cache, value_cache, layout, POOLED)
    sides, taken, first = [], [], None
    scales = dict(zip(SCALES, (key_scale, value_scale), strict=True))
    for name, array, cache_name, pool in zip(("key", "value"), (key, value), pools.NAMES, views, strict=True):
        if array is None:
            continue
        fmt = tensor(name, array, POOLED, 3)
        filled(name, array)
        first = array if first is None else first
        if array.shape[:2] != first.shape[:2]:
            raise argument_error(
                name, f"{first.shape[0]} tokens and {first.shape[1]} heads, as key", array.shape
            )
        if pool is None:
            raise argument_error(cache_name, f"a pool for {name}", "None")
        stored = FORMATS[pool.dtype]
        if stored is not fmt and (stored in FLOATS or fmt not in FLOATS):
            raise argument_error(
                cache_name, f"the dtype of {name}, {fmt}, or of codes for floats", pool.dtype
            )
        if pool.shape[2:] != array.shape[1:]:
            sizes = "{} heads of {} elements".format(*array.shape[1:])
            raise argument_error(cache_name, sizes, "{} of {}".format(*pool.shape[2:]))
        written(cache_name, pool)
        whole = is_whole(key_cache, value_cache, layout)
        side = Side(array, pool, fmt.name, stored.name)
        side = with_scale(side, f"{name}_scale", scales, cache_name, whole, layout)
        sides.append(side)
        taken += [(cache_name, pool)]
        taken += [(f"{name}_scale", side.cells)] if side.group else []
    if first is None:
        raise argument_error("key", "an array of tokens, or one as value", "None")
    blocks, rows = sides[0].pool.shape[:2]
    pieces = pools.plain_pieces(len(first), blocks * rows, slot_mapping)
    inputs = named(key=key, value=value)
    for i, (name, array) in enumerate(taken):
        apart(name, array, [*taken[i + 1 :], *inputs])
    return Append(sides, pieces)


def with_scale(side, name, scales, pool_name, whole, layout):
    """A side with its scales: given ones, or arrays that those which are found go to."""
    scale, pool = scales[name], side.pool
    if side.packed == side.stored:
        if scale is not None:
            raise argument_error(name, f"None: {side.packed} is stored as it is", describe(scale))
        return side
    asks_for_scale(name, scale, pool_name, pool)
    if scale is None:
        return side
    heads, dim = pool.shape[2:]
    if pools.of_tokens(scale, 0, heads):
        views = [pool if own == name else None for own in SCALES]
        given = [scale if own == name else None for own in SCALES]
        cells = next(
            cell for cell in pools.scales(given[0], given[1], views, whole, layout) if cell is not None
        )
        written(name, cells)
        return side._replace(
            tokens=one_piece(side.tokens), cell=FORMATS[cells.dtype].name, group=dim // cells.shape[CONTENT],
            cells=cells,
        )  # fmt: skip
    cells = scale_of(name, scale, 0, heads)[0]
    bad = cells[~(np.isfinite(cells) & (cells > 0))]
    if bad.size:
        raise argument_error(name, "finite numbers above 0", f"{bad[0]}".replace("nan", "NaN"))
    return side._replace(tokens=one_piece(side.tokens), cell="float32", cells=cells)


def checked_swap(source, target, pairs):
    """(blocks of the source, those of the target) of a copy of blocks."""
    for name, array in (("source", source), ("target", target)):
        tensor(name, array, DATA, max(getattr(array, "ndim", 1), 1))
    if target.dtype != source.dtype:
        raise argument_error("target", f"the dtype of source, {source.dtype}", target.dtype)
    if target.shape[1:] != source.shape[1:]:
        raise argument_error("target", f"shape [num_blocks, {str(source.shape[1:])[1:]}", target.shape)
    written("target", target)
    pairs = index("pairs", pairs, 2)
    if pairs.shape[1] != 2:
        raise argument_error("pairs", "shape [N, 2]", pairs.shape)
    src, dst = np.ascontiguousarray(pairs.T)
    pools.blocks_within("pairs", src, len(source))
    pools.blocks_within("pairs", dst, len(target))
    within = one_place(source, target) and len(source) == len(target)
    pools.copied_once("pairs", src, dst, within)
    if not within:
        apart("target", target, [("source", source)])
    return src, dst
