"""Check attention over pools of pages, appends to them, and copies of blocks."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from kvkit.checks import attention, masks, pools
from kvkit.checks.arguments import PoolAttention, PoolTransfer
from kvkit.checks.attention import AttentionCall, Weights
from kvkit.checks.contexts import Contexts, check_planned, checked_contexts
from kvkit.checks.index_tensors import INT64_MAX, index
from kvkit.checks.outputs import Results, same_place
from kvkit.checks.pools import CONTENT
from kvkit.checks.records import NO_MASK, Context
from kvkit.checks.values import (
    FORMATS,
    POOLED,
    check_apart,
    check_not_empty,
    check_writeable,
    checked_format,
    element_step,
    finite_number,
    flag,
    named_arrays,
    one_piece,
)
from kvkit.errors import argument_error, describe
from kvkit.formats import BY_DTYPE, BY_NAME, FLOATS, INT8, Element
from kvkit.formats.elements import BLOCKS
from kvkit.interop import refuse_masked
from kvkit.typed import Array

SCALES = "key_scale", "value_scale"
BLOCK_NAMES = {element.name: element for element in BLOCKS}
Scale = float | Array | None


def checked_paged_attention(call: PoolAttention, planned: Contexts | None = None) -> AttentionCall:
    """Check a call of `kvkit.paged_attention`, or of a plan with the contexts `planned`."""
    has_scales = call.key_scale is not None or call.value_scale is not None
    if has_scales:
        call = call._replace(key_scale=number_of(call.key_scale), value_scale=number_of(call.value_scale))
    query, scoring, slopes = call.query, call.scoring, call.alibi_slopes
    fmt = checked_format("query", query, FLOATS, 3)
    check_not_empty("query", query)
    tokens, heads, _ = query.shape
    stored = formats_of_blocks(call)
    key, value = pools_of_queries(call, stored)
    if planned is None:
        tables, (blocks, rows) = (call.block_tables, call.context_lens, call.query_starts), key.shape[:2]
        contexts = checked_contexts(*tables, blocks, rows, tokens)
    else:
        check_planned(planned, "query", tokens, "key_cache", key)
        contexts = planned
    query, batch, mask, key_weights = one_piece(query), len(contexts.lengths), NO_MASK, None
    if scoring.attn_mask is not None:
        longest = int(contexts.lengths.max(initial=0))
        mask = masks.own_mask(fmt, scoring.attn_mask, heads, tokens, longest)
    weights = attention.checked_weights(query, mask, scoring)
    token_scales = head_scales = None
    if slopes is not None:
        slopes = numbers_of_heads("alibi_slopes", slopes, batch, heads, "query heads")
    if not stored:
        token_scales = scales_of_tokens(call, key, value, batch) if has_scales else None
        if not token_scales:
            head_scales = scales_of_heads(call, key, value, batch, weights.scale)
    if slopes is not None or head_scales is not None:
        weights = weights._replace(slopes=slopes, scales=head_scales)
    inputs = named_arrays(
        query=query, key_cache=key, value_cache=value, attn_mask=scoring.attn_mask,
        alibi_slopes=call.alibi_slopes, sinks=scoring.sinks, key_scale=call.key_scale,
        value_scale=call.value_scale,
    )  # fmt: skip
    context = pools.context_of(fmt, key, value, token_scales, stored)
    if flag("return_key_weights", call.return_key_weights):
        key_weights = batch, heads, int(contexts.lengths.max(initial=0))
    results = attention.attention_results(
        (tokens, heads, context.value_dim), fmt, call.return_lse, inputs, key_weights
    )
    return attention_to_pages(fmt, query, context, key, contexts, weights, results, own=planned is None)


def attention_to_pages(
    fmt: Element, query: Array, context: Context, key: Array, contexts: Contexts, weights: Weights,
    results: Results, own: bool = False,
) -> AttentionCall:  # fmt: skip
    """Return the checked call of attention to contexts in pools; `key` is the view of the keys' pool.

    `own` says that nothing else has the contexts, whose table may be overwritten.
    """
    (blocks, rows, *_), (page, _), (step, value_step) = key.shape, context.pages, context.steps
    # The last row id of keys, and one more; no bound is known if pages descend in memory.
    end = INT64_MAX if page < 0 else (blocks - 1) * page + (rows - 1) * step + 1
    steps = contexts.steps(context.pages, end, same_rows=step == value_step, overwrite=own)
    return AttentionCall(
        fmt, query, context, steps, decoding=0, weights=weights, results=results, blocks=blocks
    )


def formats_of_blocks(call: PoolAttention) -> tuple[Element, Element] | None:
    """Return the formats of keys and values that `quant_format` names; None without it."""
    name = call.quant_format
    if name is None:
        return None
    names = name.split("/") if isinstance(name, str) else []
    blocks = [BLOCK_NAMES[each] for each in names if each in BLOCK_NAMES]
    if len(names) not in (1, 2) or len(blocks) < len(names):
        legal = f"{' or '.join(BLOCK_NAMES)}, two of these as keys/values, or None"
        raise argument_error("quant_format", legal, describe(name))
    for scale_name, scale in zip(SCALES, (call.key_scale, call.value_scale), strict=True):
        if scale is not None:
            wanted = f"None, because blocks of {name} contain scales"
            raise argument_error(scale_name, wanted, describe(scale))
    return blocks[0], blocks[-1]


def pools_of_queries(
    call: PoolAttention, stored: tuple[Element, Element] | None = None
) -> tuple[Array, Array]:
    """Return views [pages, rows, heads, content] of the pools, checked against the sizes of the queries."""
    legal = None if stored else POOLED
    views = pools.pool_views(call.key_cache, call.value_cache, call.layout, legal)
    key, value = (
        pools.present(name, pool, "a numpy array") for name, pool in zip(pools.NAMES, views, strict=True)
    )
    _, heads, dim = call.query.shape
    for name, pool, element in zip(pools.NAMES, (key, value), stored, strict=True) if stored else ():
        if pool.shape[CONTENT] % element.block.bytes or element_step(pool):
            wanted = f"heads of whole blocks of {element}, {element.block.bytes} bytes one after the other"
            raise argument_error(name, wanted, f"{pool.shape[CONTENT]} bytes, strides {pool.strides}")
    size = pools.elements_of(key, stored[0] if stored else FORMATS[key.dtype])
    if size != dim:
        raise argument_error("key_cache", f"the head size of query, {dim}", size)
    if heads % key.shape[pools.HEAD]:
        wanted = f"a multiple of the {key.shape[pools.HEAD]} heads of key_cache, in layout {call.layout!r}"
        raise argument_error("query", wanted, f"{heads} heads")
    return key, value


def scales_of_tokens(call: PoolAttention, key: Array, value: Array, batch: int) -> list[Array] | None:
    """Return views [pages, rows, heads, groups] of scales of tokens; None for scales of heads and without."""
    scales, heads = (call.key_scale, call.value_scale), key.shape[pools.HEAD]
    coded = not {FORMATS[pool.dtype] for pool in (key, value)} <= set(FLOATS)
    if not coded or not any(pools.is_per_token(scale, batch, heads) for scale in scales):
        return None
    one_pool = is_one_pool(call.key_cache, call.value_cache, call.layout)
    axes = len(pools.pool_axes(call.layout)) - (not one_pool and "kv" in call.layout)
    for name, scale in zip(SCALES, scales, strict=True):
        if (
            isinstance(scale, np.ndarray)
            and pools.is_per_token(scale, batch, heads)
            and scale.ndim not in (axes - 1, axes)
        ):
            shapes = f"a number, [{heads}], [{batch}, {heads}], or {axes - 1} or {axes} axes as the pool has"
            raise argument_error(name, shapes, f"shape {scale.shape}")
    if value.dtype != key.dtype:
        wanted = f"the dtype of key_cache, {key.dtype}, with scales for tokens"
        raise argument_error("value_cache", wanted, value.dtype)
    # If one scale alone is an array, its own faults are reported first, then that the other is missing.
    if not isinstance(call.value_scale, np.ndarray):
        pools.scale_views((call.key_scale, None), (key, None), one_pool, call.layout)
    elif not isinstance(call.key_scale, np.ndarray):
        pools.scale_views((None, call.value_scale), (None, value), one_pool, call.layout)
    views = pools.scale_views(scales, (key, value), one_pool, call.layout)
    present = [pools.present(name, view, "an array") for name, view in zip(SCALES, views, strict=True)]
    pools.check_alike(present, (key, value))
    return present


def number_of(scale: Scale) -> Scale:
    """Return a scale; an array of one float, of shape [] or [1], becomes a number."""
    if not isinstance(scale, np.ndarray | np.generic) or scale.shape not in ((), (1,)):
        return scale
    is_float = scale.dtype.kind == "f" or scale.dtype in BY_DTYPE
    return float(scale.reshape(())) if is_float else scale


def is_one_pool(key_cache: Array | None, value_cache: Array | None, layout: str) -> bool:
    """Return whether arrays have every axis of the layout; with an axis kv, one pool then has both."""
    pool = key_cache if key_cache is not None else value_cache
    return pool is not None and pool.ndim == len(layout.split())


def check_scale_given(name: str, scale: Scale, pool_name: str, pool: Array) -> None:
    """Check that a pool of int8 codes has a scale."""
    if scale is None and FORMATS[pool.dtype] is INT8:
        raise argument_error(name, f"a number or an array, for codes in {pool_name}", "None")


def numbers_of_heads(name: str, values: Array, batch: int, heads: int, what: str) -> Array:
    """Return checked numbers [heads] or [B, heads] as float32 [B or 1, heads]; `what` names the heads."""
    checked_format(name, values, FLOATS, 2 if getattr(values, "ndim", 1) == 2 else 1)
    if values.shape not in ((heads,), (batch, heads)):
        shapes = f"shape ({heads},) or ({batch}, {heads}), a number for each of the {what}"
        raise argument_error(name, shapes, values.shape)
    return np.ascontiguousarray(np.atleast_2d(values), np.float32)


def scales_of_heads(call: PoolAttention, key: Array, value: Array, batch: int, factor: float) -> Array | None:
    """Return float32 scales [2, B or 1, heads or 1] of keys (times `factor`) and values; None without."""
    given = call.key_scale, call.value_scale
    for name, scale, pool_name, pool in zip(SCALES, given, pools.NAMES, (key, value), strict=True):
        check_scale_given(name, scale, pool_name, pool)
    if call.key_scale is None and call.value_scale is None:
        return None
    heads = key.shape[pools.HEAD]
    both = [
        np.ones((1, 1), np.float32) if scale is None else scale_of(name, scale, batch, heads)
        for name, scale in zip(SCALES, given, strict=True)
    ]
    scales = np.stack(np.broadcast_arrays(*both))
    scales[0] *= np.float32(factor)
    return scales


def scale_of(name: str, scale: float | Array, batch: int, heads: int) -> Array:
    """Return a checked scale of all heads, or of each head, as float32 [B or 1, heads or 1]."""
    if isinstance(scale, np.ndarray):
        scales = numbers_of_heads(name, scale, batch, heads, "heads of a cache")
        if not np.isfinite(scales).all():
            raise argument_error(name, "finite numbers", "NaN" if np.isnan(scales).any() else "infinity")
        return scales
    if isinstance(scale, list | tuple):
        raise argument_error(name, "a number, or a numpy array", describe(scale))
    return np.full((1, 1), finite_number(name, scale), np.float32)


class PoolSide(NamedTuple):
    """Keys or values to append to a pool."""

    name: str  # "key" or "value"
    tokens: Array
    pool: Array  # view [pages, rows, heads, content]
    data_dtype: str
    cache_format: str
    scale_format: str | None = None  # the format of scales, None without scales
    group: int = 0  # elements that share a computed scale; 0 if the caller gives scales
    scales: Array | None = None  # computed: [pages, rows, heads, groups]; the caller's: [heads or 1]


class PoolAppend(NamedTuple):
    """A checked call of `paged_append`."""

    sides: list[PoolSide]
    pieces: Array  # see `checks/slots.py`
    rope: Any = None  # the `Rope` that rotates keys before they are stored, or None
    positions: Array | None = None  # [tokens], if keys are rotated

    @property
    def blocks(self) -> int:
        """Return the number of pages of the pools."""
        return len(self.sides[0].pool)


def checked_append(call: PoolTransfer, planned: Contexts | None = None) -> PoolAppend:
    """Check a call of `paged_append`, or of a plan, whose contexts end with the new tokens."""
    call = call._replace(key_scale=number_of(call.key_scale), value_scale=number_of(call.value_scale))
    views = pools.pool_views(call.key_cache, call.value_cache, call.layout, POOLED)
    arrays = named_arrays(key=call.key, value=call.value)
    scales = dict(zip(("key", "value"), (call.key_scale, call.value_scale), strict=True))
    sides: list[PoolSide] = []
    written: list[tuple[str, Array]] = []
    for (name, array), cache_name, pool in zip(
        (("key", call.key), ("value", call.value)), pools.NAMES, views, strict=True
    ):
        if array is None:
            continue
        side = pool_side(name, array, sides[0].tokens if sides else array, cache_name, pool)
        side = with_scale(side, f"{name}_scale", scales[name], cache_name, call)
        sides.append(side)
        written.append((cache_name, side.pool))
        if side.scales is not None and side.group:  # computed scales
            written.append((f"{name}_scale", side.scales))
    if not sides:
        raise argument_error("key", "an array of tokens, or one as value", "None")
    positions = positions_of_keys(call, sides[0], planned)
    if positions is not None:
        sides[0] = sides[0]._replace(tokens=one_piece(sides[0].tokens))
    tokens, (blocks, rows) = len(sides[0].tokens), sides[0].pool.shape[:2]
    slots = call.slot_mapping
    if planned is not None:
        check_planned(planned, sides[0].name, tokens, f"{sides[0].name}_cache", sides[0].pool)
        slots = planned.new_slots()
    pieces = pools.plain_pieces(tokens, blocks * rows, slots)
    for i, (name, array) in enumerate(written):
        check_apart(name, array, [*written[i + 1 :], *arrays])
    return PoolAppend(sides, pieces, None if positions is None else call.rope, positions)


def positions_of_keys(call: PoolTransfer, side: PoolSide, planned: Contexts | None) -> Array | None:
    """Check the rotation of keys, the first `side`; return their positions, or None without rotation."""
    rope = call.rope
    if rope is None or isinstance(rope, str):
        return None
    if call.key is None or BY_NAME[side.data_dtype] not in FLOATS:
        got = "None" if call.key is None else side.data_dtype
        raise argument_error("key", "floats, which rope rotates", got)
    if rope.end > side.tokens.shape[2]:
        raise argument_error("rope", f"at most {side.tokens.shape[2]} rotated elements, a key's", rope.end)
    if planned is not None:
        return planned.new_positions()
    if call.positions is None:
        raise argument_error("positions", "the position of each token, for rope", "None")
    return index("positions", call.positions, length=len(side.tokens))


def pool_side(name: str, array: Array, first: Array, cache_name: str, pool: Array | None) -> PoolSide:
    """Check an array of tokens, with the tokens and heads of `first`, and the pool that stores it."""
    fmt = checked_format(name, array, POOLED, 3)
    check_not_empty(name, array)
    if array.shape[:2] != first.shape[:2]:
        raise argument_error(name, f"{first.shape[0]} tokens and {first.shape[1]} heads, as key", array.shape)
    pool = pools.present(cache_name, pool, f"a pool for {name}")
    stored = FORMATS[pool.dtype]
    if stored is not fmt and (stored in FLOATS or fmt not in FLOATS):
        raise argument_error(cache_name, f"the dtype of {name}, {fmt}, or of codes for floats", pool.dtype)
    if pool.shape[2:] != array.shape[1:]:
        sizes = "{} heads of {} elements".format(*array.shape[1:])
        raise argument_error(cache_name, sizes, "{} of {}".format(*pool.shape[2:]))
    check_writeable(cache_name, pool)
    return PoolSide(name, array, pool, fmt.name, stored.name)


def with_scale(side: PoolSide, name: str, scale: Scale, pool_name: str, call: PoolTransfer) -> PoolSide:
    """Return a side with the caller's scales, or with the array that computed scales are written to."""
    pool = side.pool
    if side.data_dtype == side.cache_format:
        if scale is not None:
            raise argument_error(name, f"None, because {side.data_dtype} is stored unscaled", describe(scale))
        return side
    check_scale_given(name, scale, pool_name, pool)
    if scale is None:
        return side
    heads, dim = pool.shape[2:]
    side = side._replace(tokens=one_piece(side.tokens))
    if pools.is_per_token(scale, 0, heads):
        of_keys = name == SCALES[0]
        given, views = ((scale, None), (pool, None)) if of_keys else ((None, scale), (None, pool))
        one_pool = is_one_pool(call.key_cache, call.value_cache, call.layout)
        key_scales, value_scales = pools.scale_views(given, views, one_pool, call.layout)
        scales = pools.present(name, key_scales if of_keys else value_scales, "an array")
        check_writeable(name, scales)
        group = dim // scales.shape[CONTENT]
        return side._replace(scale_format=FORMATS[scales.dtype].name, group=group, scales=scales)
    numbers = scale_of(name, scale, 0, heads)[0]
    bad = numbers[~(np.isfinite(numbers) & (numbers > 0))]
    if bad.size:
        raise argument_error(name, "finite numbers above 0", f"{bad[0]}".replace("nan", "NaN"))
    return side._replace(scale_format="float32", scales=numbers)


def checked_swap(source: Array, target: Array, pairs: ArrayLike) -> pools.BlockCopy:
    """Check a copy of blocks."""
    for name, array in (("source", source), ("target", target)):
        if not isinstance(array, np.ndarray) or not array.ndim or array.dtype.hasobject:
            wanted = "a numpy array of blocks, without Python objects"
            raise argument_error(name, wanted, describe(array))
        refuse_masked(name, array)
    if target.dtype != source.dtype:
        raise argument_error("target", f"the dtype of source, {source.dtype}", target.dtype)
    if target.shape[1:] != source.shape[1:]:
        sizes = ", ".join(map(str, ("num_blocks", *source.shape[1:])))
        raise argument_error("target", f"shape [{sizes}]", target.shape)
    check_writeable("target", target)
    pairs = index("pairs", pairs, 2)
    pairs = pairs if len(pairs) else pairs.reshape(0, 2)
    if pairs.shape[1] != 2:
        raise argument_error("pairs", "shape [N, 2]", pairs.shape)
    src, dst = np.ascontiguousarray(pairs.T)
    pools.blocks_within("pairs", src, len(source))
    pools.blocks_within("pairs", dst, len(target))
    one_cache = same_place(source, target) and len(source) == len(target)
    pools.copied_once("pairs", src, dst, one_cache)
    if not one_cache:
        check_apart("target", target, [("source", source)])
    return pools.BlockCopy([(source, target)], src, dst)
