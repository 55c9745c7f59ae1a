"""Compute a layer's attention over its stored tokens, which are read in place."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvkit import cpu, merge
from kvkit.cache.layers.positions import Piece
from kvkit.calls.prepared import PreparedCall, PreparedCalls, Refit, form_of
from kvkit.checks import attention, index_tensors, masks
from kvkit.checks.arguments import Scoring
from kvkit.checks.records import ENDLESS, NO_MASK, MaskPlace, Side, StepIndex
from kvkit.checks.values import checked_format, flag, one_piece
from kvkit.errors import CACHE_AXES, argument_error, check_shape, describe, multiples
from kvkit.formats import FLOATS, Element
from kvkit.formats.elements import FLOAT32
from kvkit.runtime.arrays import address
from kvkit.runtime.repeats import Repeats
from kvkit.typed import Array, Attended, Pair

MOST_QUERY_BYTES = 2**18  # of queries for `prepare_pieces`, which keeps a copy of them for each piece
NOT_ROTATED = "False, because keys were moved and not rotated yet (call `flatten` first)"


class LayerAttention:
    """Computes a layer's attention. It keeps the last prepared call, to repeat it for calls of equal form.

    `again` runs it without Python while the layer grows: the `_words` are the version of its rows, and 0.
    """

    def __init__(self) -> None:
        self._repeats, self._words = Repeats(), np.zeros(2, np.int64)
        self._counter = self._words.data
        # What `again` runs: the call, the id of its layer (or of a view of one), its store, tokens of a query
        self._repeated: tuple[PreparedCall, int, Any, int] | None = None
        self._latest: tuple[Any, ...] = None, None, None  # store, span and positions that it reads
        self._calls: PreparedCalls[PreparedCall] = PreparedCalls(1)
        self._by_piece: list[PreparedCalls[PreparedCall]] = []  # one launch for each piece
        self._all_pieces: PreparedCalls[PreparedCall] = PreparedCalls(1)  # one launch for all pieces

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return LayerAttention, ()  # a copy has other addresses, so it gets no prepared calls

    def forget(self) -> None:
        """Drop all prepared calls, because the layer's arrays have changed."""
        self._calls.clear()
        self._all_pieces.clear()
        self._by_piece = []
        self._forget_repeated()

    def _forget_repeated(self) -> None:
        """Forget what `again` runs."""
        if self._repeated:
            self._repeats.forget()
            self._repeated = None

    def again(self, layer: Any, query: Array, softmax_scale: float | None, softcap: float) -> Array | None:
        """Repeat the last call with another query of its form, without mask; None if more is different."""
        store, span, row_positions = self._latest
        same = layer.span is span and layer.store is store and layer._row_positions is row_positions
        if not same and not (self._repeated and self._follow(layer, *self._repeated)):
            return None
        out = self._repeats.again((query, softmax_scale, softcap), {})
        return None if out is None else out.swapaxes(1, 2)

    def _follow(self, layer: Any, prepared: PreparedCall, own: int, store: Any, new: int) -> bool:
        """Make the repeated call read the rows that the layer has now; return False if it cannot."""
        span, positions = layer.span, layer._row_positions
        if id(layer) != own or layer.store is not store or (positions is not None and positions.shifted):
            return False
        if prepared.has_mask or not can_attend(layer, new):
            return False
        row = span.begin - span.origin
        prepared.move(span.length - span.begin, row)
        self._counter[0] += 1
        self._latest = store, span, positions
        return True

    def __call__(
        self,
        layer: Any,
        query: Array,
        attn_mask: Array | None,
        scoring: Scoring,
        return_lse: bool,
        wants_weights: bool = False,
    ) -> Attended:
        """Attend to a layer; see `Layer.attend`. Return outputs, then lse and key weights if requested."""
        given, self._latest = query, (None, None, None)  # the prepared call may change below
        fmt, query = checked_query(layer, query)
        if layer._row_positions is not None and layer._row_positions.shifted:
            if wants_weights:
                raise argument_error("return_key_weights", NOT_ROTATED, True)
            return self._attend_pieces(layer, query, attn_mask, scoring, return_lse)
        query = layer.store.query(query)
        batch, new, query_heads, _ = query.shape
        out = np.empty((batch, new, query_heads, layer.store.geometry.value_dim), query.dtype)
        wants_lse = flag("return_lse", return_lse)
        lse = np.empty((batch, new, query_heads), np.float32) if wants_lse else None
        place = NO_MASK
        if attn_mask is not None:
            mask = checked_mask(layer, fmt, attn_mask, (batch, query_heads, new))
            place = masks.static_mask(fmt, mask, batch, query_heads, new, mask.shape[3])
        arrays = {"query": query, "out": out, "lse": lse}
        rows, form = layer.span.rows_from(layer.span.begin), None  # a call without a form is not prepared
        shape = batch, query_heads, rows[1] - rows[0]
        key_weights = np.empty(shape, np.float32) if wants_weights else None
        if scoring.sinks is None and key_weights is None:
            form = form_of((query,), (id(layer.store), wants_lse, scoring.softmax_scale, scoring.softcap))
        prepared, refit = self._calls.find(form), rows_refit(rows, place)
        if not prepared or not prepared.run([*arrays.values()], refit):
            if form:
                self._calls.clear()
            left = -1 if layer.window is None else layer.window - 1
            weights = attention.checked_weights(query, place, scoring._replace(window=(left, -1)))
            self._forget_repeated()
            self._calls.keep(form, prepare_rows(layer, refit, fmt, arrays, weights, key_weights))
        elif layer.store.rows_adjoin and lse is None and not (place.address or self._repeated):
            self._remember(layer, prepared, given, query, out, scoring)
        results = [layer.store.output(out).swapaxes(1, 2)]
        results += [] if lse is None else [lse.swapaxes(1, 2)]
        results += [] if key_weights is None else [key_weights]
        return results[0] if len(results) == 1 else tuple(results)

    def _remember(
        self, layer: Any, prepared: PreparedCall, given: Array, query: Array, out: Array, scoring: Scoring
    ) -> None:
        """Let `again` run a prepared call, if its kernels read the queries where the caller has them."""
        if query.strides != given.swapaxes(1, 2).strides or address(query) != address(given):
            return
        program = prepared.program()
        if program is None:
            return
        program = program._replace(step=self._words, version=int(self._words[0]))
        arguments = {"query": given, "softmax_scale": scoring.softmax_scale, "softcap": scoring.softcap}
        self._repeats.forget()
        self._repeats.remember(program, (given, out, None), arguments, [], out)
        self._repeated = prepared, id(layer), layer.store, query.shape[1]

    def _attend_pieces(
        self, layer: Any, query: Array, attn_mask: Array | None, scoring: Scoring, return_lse: bool
    ) -> Attended:
        """Attend to rows of several rope shifts: to each piece with rotated queries, then merge by lse.

        A key of position p' and rope shift d is stored rotated for p' - d. A query of position p that is
        rotated for p - d gives the same score, because <R(p) q, R(p') k> depends on p - p' alone. Queries and
        outputs stay float32 until the merge.
        """
        wants_lse, (batch, new, heads, _) = flag("return_lse", return_lse), query.shape
        mask = None
        if attn_mask is not None:
            fmt = checked_format("query", query, FLOATS, 4)
            mask = checked_mask(layer, fmt, attn_mask, (batch, heads, new))
            mask = mask if mask.dtype == np.bool_ else mask.astype(np.float32)
        wide = query.astype(np.float32, copy=False)  # [B, q, Hq, D]
        pieces = layer._pieces(layer.span.begin)
        last_has_all_queries = pieces[-1].end - pieces[-1].begin >= new
        if layer.store.rows_adjoin and layer.window is None and last_has_all_queries:
            output, lse = self._attend_in_one_launch(layer, pieces, wide, mask, scoring)
        else:
            output, lse = self._attend_by_piece(layer, pieces, wide, mask, scoring)
        attn_output = layer.store.output(output).astype(query.dtype, copy=False).swapaxes(1, 2)
        return (attn_output, lse.swapaxes(1, 2)) if wants_lse else attn_output

    def _attend_in_one_launch(
        self, layer: Any, pieces: list[Piece], query: Array, mask: Array | None, scoring: Scoring
    ) -> Pair:
        """Attend to all pieces in one launch. The kernels see each piece as a sequence of its own."""
        (batch, new, heads, _), place, last = query.shape, NO_MASK, pieces[-1]
        if mask is not None:
            longest = max(end - begin for begin, end, _ in pieces)
            shape = len(pieces), batch, *mask.shape[1:3], longest
            of_pieces = np.zeros(shape, mask.dtype)
            for own, (begin, end, _) in zip(of_pieces, pieces, strict=True):
                own[..., : end - begin] = mask[..., begin:end]
            mask = of_pieces.reshape(-1, *shape[2:])
            place = masks.static_mask(FLOAT32, mask, len(mask), heads, new, longest)
        out = np.empty((batch, new, heads, layer.store.geometry.value_dim), np.float32)
        lse = np.empty((batch, new, heads), np.float32)
        fixed = id(layer.rope), *pieces[:-1], last.begin, last.shift  # only the end of the last may grow
        form = None
        if scoring.sinks is None and query.nbytes <= MOST_QUERY_BYTES:
            form = form_of((query,), (scoring.softmax_scale, scoring.softcap, fixed))
        prepared = self._all_pieces.find(form)
        refit = Refit(last.end, last.end - last.begin, query=query, mask=place)
        if not prepared or not prepared.run((out, lse), refit):
            self._all_pieces.clear()
            weights = attention.checked_weights(query, place, scoring)
            self._all_pieces.keep(form, prepare_pieces(layer, pieces, refit, query, (out, lse), weights))
        return out, lse

    def _attend_by_piece(
        self, layer: Any, pieces: list[Piece], query: Array, mask: Array | None, scoring: Scoring
    ) -> Pair:
        """Attend to each piece in a launch of its own, then merge the outputs."""
        results = []  # (output, lse) of each piece
        while len(self._by_piece) < len(pieces):
            self._by_piece.append(PreparedCalls(1))
        for calls, (begin, end, shift) in zip(self._by_piece, pieces, strict=False):
            is_last = end == pieces[-1].end  # attention sinks enter the softmax once, with the last piece
            own = scoring if is_last else scoring._replace(sinks=None)
            rotated = layer.store.query(layer.rope.shift(query, -shift) if shift else query)
            results.append(attend_piece(calls, layer, (begin, end), rotated, mask, own))
        outputs, lses = zip(*results, strict=True)
        return merge.merge_checked(FLOAT32, outputs, lses)


def attend_piece(
    calls: PreparedCalls[PreparedCall],
    layer: Any,
    rows: tuple[int, int],
    query: Array,
    mask: Array | None,
    scoring: Scoring,
) -> tuple[Array, Array]:
    """Attend with float32 queries [B, q, Hq, D] to the rows [begin, end) of the layer's view.

    Return (output, lse). Rows are counted from the first row that the last update returned.
    """
    (begin, end), (batch, new, heads, _), span = rows, query.shape, layer.span
    stored, first = span.length - span.begin, span.begin - span.origin
    causal = end == stored and end - begin >= new  # the piece ends with the tokens of the queries
    mask = None if mask is None else mask[..., begin:end]
    left = stored if layer.window is None else layer.window - 1
    # Some key comes after the first query, or before the window of the last one.
    needs_mask = end > stored - new + 1 or begin < stored - 1 - left
    if not causal and needs_mask:
        ages = np.arange(stored - new, stored)[:, None] - np.arange(begin, end)  # [q, rows]
        visible = (ages >= 0) & (ages <= left)
        mask = visible[None, None] if mask is None else hidden_from(mask, visible)
    place = NO_MASK if mask is None else masks.static_mask(FLOAT32, mask, batch, heads, new, end - begin)
    out = np.empty((batch, new, heads, layer.store.geometry.value_dim), np.float32)
    lse = np.empty((batch, new, heads), np.float32)
    arrays: dict[str, Array | None] = {"query": query, "out": out, "lse": lse}
    form = form_of((query,), (id(layer.store), causal, scoring.softmax_scale, scoring.softcap))
    form = form if scoring.sinks is None else None
    prepared, refit = calls.find(form), rows_refit((begin + first, end + first), place)
    if not prepared or not prepared.run([*arrays.values()], refit):
        calls.clear()
        window = (left, -1) if causal and layer.window is not None else (-1, -1)
        weights = attention.checked_weights(query, place, scoring._replace(is_causal=causal, window=window))
        calls.keep(form, prepare_rows(layer, refit, FLOAT32, arrays, weights))
    return out, lse


def hidden_from(mask: Array, visible: Array) -> Array:
    """Return a mask, bool or float32, that also hides what is not `visible`."""
    if mask.dtype == np.bool_:
        return mask & visible
    return np.where(visible, mask.astype(np.float32, copy=False), np.float32(-np.inf))


def checked_query(layer: Any, query: Array) -> tuple[Element, Array]:
    """Check queries, and that what they attend to is stored; return (format, queries [B, q, Hq, D])."""
    if layer.store is None:
        raise argument_error(layer.name, "stored tokens (call update before attend)", "none")
    batch, heads, dim, *_ = layer.store.geometry
    fmt = checked_format("query", query, FLOATS, 4, CACHE_AXES)
    check_shape("query", query, (batch, multiples(heads), None, dim))
    new = query.shape[2]
    if not can_attend(layer, new):
        length = layer.span.length
        wanted = f"queries of at most the last {length} tokens"
        if new <= length:
            wanted = f"queries of the last tokens, whose windows {layer.name} still stores"
        raise argument_error("query", wanted, f"{new} queries after {length} tokens")
    return fmt, one_piece(query.swapaxes(1, 2))


def can_attend(layer: Any, new: int) -> bool:
    """Return whether a layer stores what the queries of its last `new` tokens attend to."""
    span = layer.span
    return span.begin <= max(0, span.length - new - (layer.window or 0) + 1) and new <= span.length


def checked_mask(layer: Any, fmt: Element, mask: Array, sizes: tuple[int, int, int]) -> Array:
    """Check a mask for queries of `fmt`; return it with 4 axes and a column for each row of the view."""
    masks.check_mask_type(fmt, mask, "attn_mask")
    span, length, (batch, _, _) = layer.span, layer.get_seq_length(), sizes
    count = span.length - span.begin
    kv_length, kv_offset = layer.get_mask_sizes(0)
    end = kv_offset + kv_length - length + span.length  # the row where the keys of the last update end
    if mask.ndim != 2:
        check_mask_axes(mask, sizes, length, (count, max(end - span.begin, count)))
        return mask[..., :count]
    if layer._row_positions is not None and layer.window is None:
        mask = mask_of_stored(layer, mask, batch)
    if mask.dtype != np.bool_ or mask.shape not in {(batch, span.length), (batch, max(end, span.length))}:
        wanted = f"bool [{batch}, {length}], a padding mask, or 4 axes"
        raise argument_error("attn_mask", wanted, describe(mask))
    return mask[:, None, None, span.begin : span.begin + count]  # a padding mask counts positions from 0


def check_mask_axes(mask: Array, sizes: tuple[int, int, int], length: int, counts: tuple[int, ...]) -> None:
    """Raise unless a mask has 4 axes: three of `sizes` or of 1, and a number of columns among `counts`."""
    fits = mask.ndim == 4 and mask.shape[3] in counts
    if not fits or any(have not in (1, size) for have, size in zip(mask.shape, sizes, strict=False)):
        axes = ", ".join("1" if size == 1 else f"{size} or 1" for size in sizes)
        wanted = f"bool [{sizes[0]}, {length}], or [{axes}, {counts[0]}]"
        raise argument_error("attn_mask", wanted, f"shape {mask.shape}")


def mask_of_stored(layer: Any, mask: Array, batch: int) -> Array:
    """Return a padding mask of the stored tokens, from one with a column for each position."""
    length = layer.get_seq_length()
    if mask.dtype != np.bool_ or mask.shape != (batch, length):
        raise argument_error("attn_mask", f"bool [{batch}, {length}], a padding mask", describe(mask))
    return mask[:, layer.positions]


def prepare_rows(
    layer: Any,
    first: Refit,
    fmt: Element,
    arrays: dict[str, Any],
    weights: attention.Weights,
    key_weights: Array | None = None,
) -> PreparedCall:
    """Attend to the stored rows of a layer from `first.row` on; return the call, to repeat it."""
    context, begin_at = layer.store.context(fmt.name, first.row, first.row + first.lengths)
    query, out, lse = arrays.values()
    batch, new = query.shape[:2]
    step = index_tensors.static_step(batch, new, first.lengths)
    launch = cpu.attention.prepare.prepare_attention(
        query, out, lse, context, step, 0, weights, key_weights=key_weights
    )
    cpu.launches.start(launch)
    return PreparedCall(
        [launch], arrays, attention=launch, first=first, steps=step, growing=batch, begin_at=begin_at
    )


def rows_refit(rows: tuple[int, int], mask: MaskPlace) -> Refit:
    """Return the refit of a call that attends to the rows [begin, end) of a store."""
    begin, end = rows
    return Refit(end - begin, end - begin, row=begin, mask=mask)


def prepare_pieces(
    layer: Any, pieces: list[Piece], first: Refit, query: Array, results: Pair, weights: attention.Weights
) -> PreparedCall:
    """Attend to pieces of rows and merge their outputs; return the call, whose last piece may grow."""
    (batch, new, heads, _), count, (out, lse) = query.shape, len(pieces), results
    rope, deltas = layer.rope, -np.array([shift for _, _, shift in pieces])[:, None, None, None]
    rotations = rope.cos_sin(deltas, np.float32)  # cosines, sines [pieces, 1, 1, 1, pairs]
    rotated = np.empty((count, *query.shape), np.float32)  # [pieces, B, q, Hq, D], written by each run
    outs, lses = np.empty((count, *out.shape), np.float32), np.empty((count, *lse.shape), np.float32)
    queries, flat_outs, flat_lses = (
        states.reshape(-1, *states.shape[2:]) for states in (rotated, outs, lses)
    )
    context, _ = layer.store.context(FLOAT32.name, 0, pieces[-1].end)
    step = pieces_step(context.sides[0], pieces, batch, new)
    context = context._replace(sides=tuple(side._replace(sequence=0) for side in context.sides))
    earlier = (count - 1) * batch  # sequences without a causal rule: their rows are before all queries
    if weights.sinks is not None:
        sinks = np.full((earlier + batch, heads), -np.inf, np.float32)
        sinks[earlier:] = weights.sinks  # they enter the softmax once, with the last piece
        weights = weights._replace(sinks=sinks, sink_sequences=len(sinks))
    attend = cpu.attention.prepare.prepare_attention(
        queries, flat_outs, flat_lses, context, step, earlier, weights
    )
    attend.owners = {}  # no address changes from run to run; `join` keeps the arrays alive
    join = cpu.attention.merge.prepare_merge(FLOAT32.name, list(outs), list(lses), out, lse)
    join.alive = *join.alive, outs, lses
    call = PreparedCall(
        [attend, join], {"out": out, "lse": lse}, attention=attend, first=first, steps=step, growing=batch,
        load_query=lambda query: rope.write_rotated(query, *rotations, rotated),
    )  # fmt: skip
    call.run(results, first)
    return call


def pieces_step(side: Side, pieces: list[Piece], batch: int, new: int) -> StepIndex:
    """Return a step with one sequence for each piece of each row of the batch, all of a piece together.

    Row 0 of batch row b in the store has the row id ``b * side.sequence / side.row``.
    """
    begins, ends, _ = np.array(pieces).T
    rows = begins[:, None] + np.arange(batch) * (side.sequence // side.row)  # [pieces, B]
    lengths = np.repeat(ends - begins, batch)
    kvstarts = np.concatenate(([0], np.cumsum(lengths)))
    counts = np.arange(len(lengths) + 1)
    return StepIndex(
        counts * new, kvstarts, lengths - new, np.zeros_like(lengths), rows.reshape(-1, 1), ENDLESS,
        tokens=len(lengths) * new, context=int(kvstarts[-1]), rows=int(ends[-1]),
    )  # fmt: skip
