"""Append tokens to pools of pages, attend to them, and copy their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvkit import cpu
from kvkit.calls.prepared import (
    FollowedStep,
    PreparedCall,
    PreparedCalls,
    Refit,
    attention_launches,
    form_of,
    is_pair,
    one_or_all,
    store_of_operators,
)
from kvkit.checks import index_tensors
from kvkit.checks.arguments import PoolAttention, PoolTransfer
from kvkit.checks.attention import AttentionCall
from kvkit.checks.contexts import Contexts, checked_contexts
from kvkit.checks.paged import PoolAppend, checked_append, checked_paged_attention
from kvkit.checks.pools import BlockCopy
from kvkit.checks.records import StepIndex
from kvkit.errors import KvkitError
from kvkit.formats import elements
from kvkit.runtime import repeats
from kvkit.runtime.arrays import address, empty_result
from kvkit.typed import Array, Arrays, Attended

COPIED_BYTES = 2**20  # bytes of blocks that are copied at a time
MOST_STEPS, MOST_BYTES = 32, 2**20  # forms of calls that are remembered, and bytes of their index tensors
FLOATS8 = frozenset(one.dtype for one in elements.FLOATS8)
POOLS = "key_cache", "value_cache"
SCALES = "key_scale", "value_scale"
OUTPUTS = "out", "lse"
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


class PagesStep(FollowedStep):
    """Contexts in pages that calls of one form bring; they need 0 rows of a cache of operators."""

    __slots__ = ("_blocks", "_context", "_steps")

    def __init__(self, numbers: Sequence[Array], call: AttentionCall) -> None:
        self.words, self.numbers = np.zeros(2, np.int64), numbers
        self._steps, self._context, self._blocks = call.steps, call.context, call.blocks

    def _check_numbers(self, call: PoolAttention) -> bool:
        own, steps, context = with_tensors(call, self.numbers), self._steps, self._context
        try:
            contexts = checked_contexts(
                own.block_tables, own.context_lens, own.query_starts,
                self._blocks, steps.page_size, steps.tokens,
            )  # fmt: skip
        except KvkitError:  # the full checks find what else is wrong
            return False
        same_rows = context.steps[0] == context.steps[1]
        new = contexts.steps(context.pages, steps.rows, same_rows=same_rows, overwrite=True)
        if new.table.dtype != steps.table.dtype:
            return False
        for array, other in zip(read_by_kernels(steps), read_by_kernels(new), strict=True):
            np.copyto(array, other)
        return True


def with_tensors(call: PoolAttention, tensors: Sequence[Array]) -> PoolAttention:
    """Return the call with other index tensors, in the order of `attend_to_pages`."""
    *tables, lengths = tensors if call.query_starts is None else tensors[:-1]
    return call._replace(
        block_tables=tuple(tables) if isinstance(call.block_tables, tuple) else tables[0],
        context_lens=lengths, query_starts=None if call.query_starts is None else tensors[-1],
    )  # fmt: skip


def read_by_kernels(steps: StepIndex) -> list[Array]:
    """Return the arrays of contexts in pages that kernels read."""
    arrays = steps.seqstarts, steps.kvstarts, steps.table, steps.value_table, steps.table_starts
    return [array for array in arrays if array is not None]


PreparedAttention = tuple[PreparedCall, ResultForms, PagesStep | None]


def attend_prepared(
    calls: PreparedCalls[PreparedAttention], call: PoolAttention, out: Array | Arrays | None,
    sequences: Contexts | None, tensors: Sequence[Array] = (),
) -> Attended:  # fmt: skip
    """Run `paged_attention` by a prepared call of its form, else prepare one, for the contexts of a plan.

    Without a plan each call brings its contexts: `tensors`, or () if it is to be checked in full. Calls with
    a mask, slopes, sinks or scales of heads are always checked.
    """
    call = with_floats(call)
    scoring, (scales, numbers, are_read) = call.scoring, scales_of(call)
    results: Any = tuple(out) if is_pair(out) else (out,)  # type: ignore[arg-type]
    pools, form = (call.key_cache, call.value_cache), None
    plain = scoring.attn_mask is scoring.sinks is call.alibi_slopes is None
    plain = plain and not are_read and (bool(tensors) or sequences is not None)
    if plain and call.return_key_weights is False and type(scoring.window) is tuple:
        attributes = *scoring, *scoring.window, *numbers, call.layout, call.quant_format, call.return_lse
        form = form_of(
            (call.query, *pools, *scales, *results, *tensors),
            (*attributes, *pool_placement(*pools), call.query_starts is None),
        )
    # A running call takes its contexts out, so that no other thread changes them.
    known = calls.take(form) if tensors else calls.find(form)
    arrays = call.query, *in_both(*pools), *in_both(*scales)
    if known:
        prepared, forms, step = known
        results = results if out is not None else tuple([empty_result(*each) for each in forms])
        if step is None or step.follow(tensors, call):
            refit = None
            if step is not None:
                refit = Refit(int(step.words[0]))
                repeats.note_tensors(tensors, step.numbers)
            if prepared.run((*arrays, *results), refit):
                calls.keep(form, known)
                return one_or_all(results)
    # What is checked is what later calls are compared with: another thread may change the caller's tensors.
    own = [tensor.copy() for tensor in tensors] if form else []
    checked = checked_paged_attention(with_tensors(call, own) if own else call, sequences)
    results = checked.results.arrays(out)
    launches = attention_launches(checked, results)
    cpu.launches.start(*launches)
    if form and checked.query is call.query:
        step = PagesStep(own, checked) if own else None
        launches[0].owners = cpu.attention.params.POOL_OWNERS
        named = dict(zip(("query", *POOLS, *SCALES, *OUTPUTS), (*arrays, *results), strict=False))
        prepared = PreparedCall(
            launches, named, len(results),
            step=step.words if step else None, attention=launches[0] if step else None,
        )  # fmt: skip
        calls.keep(form, (prepared, list(checked.results.forms.values()), step))
    return one_or_all(results)


class PlannedPages:
    """Checked contexts in pages. Calls that differ only in the addresses of their arrays are checked once."""

    __slots__ = ("_angles", "_appended", "_attended", "sequences")

    def __init__(self, sequences: Contexts) -> None:
        self.sequences = sequences
        self._attended: PreparedCalls[PreparedAttention] = PreparedCalls()
        self._appended: PreparedCalls[PreparedCall] = PreparedCalls()
        self._angles: tuple[object, Array | None] = None, None  # of the latest rope

    def attend(self, call: PoolAttention, out: Array | Arrays | None) -> Attended:
        """Run `paged_attention` for the contexts."""
        return attend_prepared(self._attended, call, out, self.sequences)

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


latest: PreparedCalls[PreparedAttention] = store_of_operators(MOST_STEPS)


def attend_to_pages(call: PoolAttention, out: Array | Arrays | None) -> Attended:
    """Run `paged_attention`. Calls of one form are checked once, index tensors each time that they change."""
    tables: Any = call.block_tables if isinstance(call.block_tables, tuple) else (call.block_tables,)
    given = *tables, call.context_lens, call.query_starts
    tensors = [each for each in given if each is not None]
    known = not index_tensors.VALIDATES and all(type(each) is np.ndarray for each in tensors)
    small = known and sum(each.nbytes for each in tensors) <= MOST_BYTES
    return attend_prepared(latest, call, out, None, tensors if small else ())


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
