"""Append tokens to pools of pages, attend to them, and copy their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvkit import cpu
from kvkit.calls.prepared import (
    PreparedCall,
    PreparedCalls,
    attend,
    attention_launches,
    form_of,
    is_pair,
    one_or_all,
    store_of_operators,
)
from kvkit.checks import index_tensors
from kvkit.checks.arguments import PoolAttention, PoolTransfer
from kvkit.checks.contexts import Contexts
from kvkit.checks.paged import PoolAppend, checked_append, checked_paged_attention
from kvkit.checks.pools import BlockCopy
from kvkit.formats import elements
from kvkit.runtime import repeats
from kvkit.runtime.arrays import address, empty_result
from kvkit.typed import Array, Arrays, Attended

COPIED_BYTES = 2**20  # bytes of blocks that are copied at a time
MOST_STEPS, MOST_BYTES = 4, 2**20  # steps whose index tensors are remembered, and bytes of a step's
FLOATS8 = frozenset(one.dtype for one in elements.FLOATS8)
POOLS = "key_cache", "value_cache"
SCALES = "key_scale", "value_scale"
RESULTS = "out", "lse"
TOKEN_SCALE_AXES = len(("pages", "tokens", "heads"))
ScalePair = Sequence[Any]
NO_SCALES = None, None
ResultForms = list[tuple[tuple[int, ...], np.dtype[Any]]]  # of results


def with_floats(call: PoolAttention) -> PoolAttention:
    """Return a call whose queries of 8-bit floats are widened to float32."""
    query = call.query
    if isinstance(query, np.ndarray) and query.dtype in FLOATS8:
        return call._replace(query=query.astype(np.float32))
    return call


def append_to_pools(call: PoolAppend) -> None:
    """Store the tokens of a checked append in pools of pages."""
    cpu.launches.start(*append_launches(call))


def append_launches(call: PoolAppend, angles: Array | None = None) -> list[Any]:
    """Return launches that store tokens in pools: as copies of their bits, or as codes.

    Keys and values that need the same machine code share a launch. `angles` of the call's positions are
    computed if they are not given.
    """
    if not len(call.pieces):
        return []
    copied = [side for side in call.sides if side.data_dtype == side.cache_format]
    coded = [side for side in call.sides if side.data_dtype != side.cache_format]
    rotation = None
    if call.rope is not None:
        angles = call.rope.angles(call.positions) if angles is None else angles
        rotation = cpu.copy.pieces.KeyRotation(angles, call.rope.begin, not call.rope.interleaved)
    launches: list[Any] = cpu.copy.pieces.prepare_encoding(coded, call.pieces, rotation)
    if copied:
        arrays = [side.tokens for side in copied], [side.pool for side in copied]
        size, names = copied[0].pool.shape[1], [side.name for side in copied]
        rotation = rotation if names[0] == "key" else None
        launches.append(
            cpu.copy.pieces.prepare_pieces(
                "store", *arrays, call.pieces, size, names=names, rotation=rotation
            )
        )
    return launches


class PlannedPages:
    """Contexts in pages. Calls that differ only in the addresses of their arrays are checked once.

    `sequences` are the contexts of a plan. Without them each call brings its own, which must all be equal.
    """

    __slots__ = ("_angles", "_appended", "_attended", "sequences")

    def __init__(self, sequences: Contexts | None = None) -> None:
        self.sequences = sequences
        self._attended: PreparedCalls[tuple[PreparedCall, ResultForms]] = PreparedCalls()
        self._appended: PreparedCalls[PreparedCall] = PreparedCalls()
        self._angles: tuple[object, Array | None] = None, None  # of the latest rope

    def attend(self, call: PoolAttention, out: Array | Arrays | None) -> Attended:
        """Run `paged_attention`. Calls with a mask, slopes, sinks or scales of heads are always checked."""
        call = with_floats(call)
        scoring, (scales, numbers, are_read) = call.scoring, scales_of(call)
        results: Any = tuple(out) if is_pair(out) else (out,)  # type: ignore[arg-type]
        pools, form = (call.key_cache, call.value_cache), None
        plain = scoring.attn_mask is scoring.sinks is call.alibi_slopes is None
        if plain and not are_read and call.return_key_weights is False and type(scoring.window) is tuple:
            attributes = *scoring, *scoring.window, *numbers, call.layout, call.quant_format
            form = form_of(
                (call.query, *pools, *scales, *results),
                (*attributes, call.return_lse, *pool_placement(*pools)),
            )
        known = self._attended.find(form)
        arrays = call.query, *in_both(*pools), *in_both(*scales)
        if known:
            prepared, forms = known
            results = results if out is not None else tuple([empty_result(*each) for each in forms])
            if prepared.run((*arrays, *results)):
                return one_or_all(results)
        checked = checked_paged_attention(call, self.sequences)
        results = checked.results.arrays(out)
        launches = attention_launches(checked, results)
        cpu.launches.start(*launches)
        if form and checked.query is call.query:
            launches[0].owners = cpu.attention.params.POOL_OWNERS
            named = dict(zip(("query", *POOLS, *SCALES, *RESULTS), (*arrays, *results), strict=False))
            forms = list(checked.results.forms.values())
            self._attended.keep(form, (PreparedCall(launches, named, len(results)), forms))
        return one_or_all(results)

    def append(self, call: PoolTransfer) -> None:
        """Run `paged_append` for the last tokens of the contexts."""
        pools, form, (scales, numbers, are_read) = (call.key_cache, call.value_cache), None, scales_of(call)
        if not are_read:
            attributes = call.layout, call.rope, *pool_placement(*pools), *numbers
            form = form_of((call.key, call.value, *scales, *pools), attributes)
        arrays = call.key, call.value, *in_both(*scales), *in_both(*pools)
        prepared = self._appended.find(form)
        if prepared and prepared.run(arrays):
            return
        checked = checked_append(call, self.sequences)
        launches = append_launches(checked, self._angles_of(checked))
        cpu.launches.start(*launches)
        if all(side.tokens is call.key or side.tokens is call.value for side in checked.sides):
            named = dict(zip(("key", "value", *SCALES, *POOLS), arrays, strict=True))
            self._appended.keep(form, PreparedCall(launches, named, len(SCALES + POOLS)))

    def _angles_of(self, call: PoolAppend) -> Array | None:
        """Return the angles of the new tokens' keys; successive calls with one rope share them."""
        if call.rope is None:
            return None
        rope, angles = self._angles
        if rope is not call.rope:
            angles = call.rope.angles(call.positions)
            self._angles = call.rope, angles
        return angles


latest: PreparedCalls[tuple[list[Any], PlannedPages]] = store_of_operators(MOST_STEPS)


def attend_to_pages(call: PoolAttention, out: Array | Arrays | None) -> Attended:
    """Run `paged_attention`. Calls with equal index tensors (the layers of a step) are checked once."""
    tables = call.block_tables if isinstance(call.block_tables, tuple) else (call.block_tables,)
    tensors: list[Any] = [*tables, call.context_lens, call.query_starts]
    form = None if index_tensors.VALIDATES else form_of(tensors, ())
    known, pages = latest.take(form) or ([], None)
    if pages is None or any(
        one is not None and one.tobytes() != each.tobytes() for one, each in zip(known, tensors, strict=True)
    ):
        if form is None or sum(each.nbytes for each in tensors if each is not None) > MOST_BYTES:
            return attend(checked_paged_attention(with_floats(call)), out)
        known, pages = [None if each is None else each.copy() for each in tensors], PlannedPages()
    count = len(tensors) - (call.query_starts is None)
    repeats.note_tensors(tensors[:count], known[:count])
    results = pages.attend(call, out)
    latest.keep(form, (known, pages))  # `take` has removed it, so that no other thread used it meanwhile
    return results


def scales_of(call: PoolAttention | PoolTransfer) -> tuple[ScalePair, ScalePair, bool]:
    """Return the scales that are arrays, those that are numbers, and whether a preparation reads the arrays.

    It reads scales of heads, and not those of tokens.
    """
    scales = call.key_scale, call.value_scale
    if scales[0] is None and scales[1] is None:
        return NO_SCALES, NO_SCALES, False
    arrays: Any = [scale if isinstance(scale, np.ndarray) else None for scale in scales]
    numbers: Any = [scale if array is None else None for scale, array in zip(scales, arrays, strict=True)]
    return arrays, numbers, any(array is not None and array.ndim < TOKEN_SCALE_AXES for array in arrays)


def pool_placement(key_cache: Any, value_cache: Any) -> tuple[bool, bool]:
    """Return whether keys and values have one pool, and whether non-temporal stores can write the pools."""
    key = address(key_cache) if isinstance(key_cache, np.ndarray) else 0
    value = address(value_cache) if isinstance(value_cache, np.ndarray) else key
    return value == (key or value), (key | value) % 16 == 0


def in_both(one: Array | None, other: Array | None) -> tuple[Array | None, Array | None]:
    """Return an array for keys and one for values; if one is None, the other one twice."""
    return (other if one is None else one), (one if other is None else other)


def copy_blocks(call: BlockCopy) -> None:
    """Copy checked blocks, some at a time, so that numpy's temporary copy stays in a core's cache."""
    for source, target in call.arrays:
        step = max(1, COPIED_BYTES * len(source) // max(source.nbytes, 1))
        for i in range(0, len(call.src), step):
            target[call.dst[i : i + step]] = source[call.src[i : i + step]]
