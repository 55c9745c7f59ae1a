"""Compress layers head by head: each key head keeps its own tokens, in a `RaggedLayer`.

Keys of dicts are numbers of layers. `tokens` has how many tokens each head stores, [B, Hkv]; `scored` their
scores, [B, Hkv, longest]; `means` how many tokens the heads of a layer keep on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvkit.cache.compression import (
    BUDGETS_WANTED,
    Compression,
    CompressionReport,
    layer_counts,
    reason_to_skip,
    score_function,
    scores_of,
    scores_of_row,
    stored_states,
)
from kvkit.cache.layers.dynamic import DynamicLayer
from kvkit.cache.padding import UnpaddedRow, checked_mask, real_tokens, request_for_row
from kvkit.cache.paged.ragged import HeadStates, RaggedLayer
from kvkit.checks.values import flag, integer
from kvkit.errors import argument_error, describe
from kvkit.eviction.inputs import refuse_first
from kvkit.eviction.padding import score_rows, single_rows, stays_whole
from kvkit.eviction.selection import LARGEST_SCORE, ada_counts, per_head, shared_counts, take, with_protected
from kvkit.typed import Array

SAME_SHAPES = "layers with the same batch and number of heads, for 'global'"


def compress_by_head(layers: Sequence[Any], request: Compression) -> tuple[list[Any], CompressionReport]:
    """Compress layers head by head; return (layers, report). A `RaggedLayer` replaces each changed layer."""
    skipped = {i: reason for i, layer in enumerate(layers) if (reason := reason_to_skip(layer))}
    chosen = [i for i in range(len(layers)) if i not in skipped]
    if flag("renumber", request.renumber):
        raise argument_error("renumber", "False where heads keep tokens of their own", True)
    for i in chosen:
        if type(layers[i]) not in (DynamicLayer, RaggedLayer):
            wanted = "a DynamicLayer or RaggedLayer, to keep tokens head by head"
            raise argument_error("budget", wanted, f"layer {i}, a {type(layers[i]).__name__}")
    mask = checked_mask(request.attn_mask, [layers[i] for i in chosen])
    request = replace(request, attn_mask=mask)
    real = {i: heads_tokens(layers[i], mask) for i in chosen}
    if mask is None:
        of_rows = [mean_counts({i: own.sum(-1) for i, own in real.items()}, len(layers), request)]
    else:  # each row of the batch, as beside padding
        of_rows = [
            mean_counts(
                {i: own[b : b + 1].sum(-1) for i, own in real.items()},
                len(layers),
                request_of_row(request, b),
            )
            for b in range(len(mask))
        ]
    score_function(layers, request)  # raises if an input is missing
    first, last = integer("first", request.first, 0), integer("last", request.last, 0)
    scored = {}
    for i in chosen:
        scores = scores_of_heads(layers, i, [means[i] for means in of_rows], request)
        scored[i] = with_protected(scores, real[i], first, last)
    staying = rows_of_batch(scored, real, of_rows, len(layers), request)
    changed = {i: ragged_layer(layers[i], rows, request.rope[i]) for i, rows in staying.items()}
    new = [changed.get(i, layer) for i, layer in enumerate(layers)]
    before, after = (sum(layer.nbytes for layer in some) for some in (layers, new))
    tokens_before, tokens_after = (  # of a layer, or of each head of a ragged one, [B][Hkv]
        [each.lengths.tolist() if isinstance(each, RaggedLayer) else each.stored_tokens for each in some]
        for some in (layers, new)
    )
    return new, CompressionReport(tokens_before, tokens_after, before, after, skipped)


def heads_tokens(layer: Any, mask: Array | None) -> Array:
    """Return which tokens each head of a layer stores that are no padding, bool [B, Hkv, longest]."""
    real = real_tokens(layer, mask)
    heads = real.shape[1] if isinstance(layer, RaggedLayer) else layer.keys.shape[1]
    return np.broadcast_to(real, (len(real), heads, real.shape[2]))


def mean_counts(tokens: dict[int, Array], num_layers: int, request: Compression) -> dict[int, int]:
    """Return how many tokens heads keep on average, layer by layer; with a threshold, how many they hold."""
    if request.threshold is not None and (request.keep, request.count) != (None, None):
        raise argument_error("keep", "None beside a threshold", "both")
    stored = {i: max(1, int(lengths.mean())) for i, lengths in tokens.items()}
    if request.threshold is not None:
        return stored
    if not isinstance(request.budget, str) and np.ndim(request.budget) > 1:
        if (request.keep, request.count) != (None, None):
            raise argument_error("budget", "a count for each head, or else keep", "both")
        counts = numbers_by_head("budget", request.budget, tokens, num_layers, "iu")
        return {i: max(1, int(np.minimum(count, tokens[i]).mean())) for i, count in counts.items()}
    if isinstance(request.budget, str) and request.budget in ("ada", "global"):
        request = replace(request, budget="uniform")  # the same mean in each layer, divided among heads later
    return layer_counts(stored, num_layers, request)


def numbers_by_head(
    name: str, numbers: Any, tokens: dict[int, Array], num_layers: int, kinds: str
) -> dict[int, Array]:
    """Return an array [B, Hkv] for each layer, from one number for all, [L, Hkv] or [L, B, Hkv]."""
    wanted = f"a number, or numbers [{num_layers}, Hkv] or [{num_layers}, B, Hkv]"
    try:
        array = np.asarray(numbers)
    except ValueError:
        raise argument_error(name, wanted, "lists of unequal length") from None
    if array.dtype.kind not in kinds or array.ndim > 3 or (array.ndim and len(array) != num_layers):
        raise argument_error(name, wanted, describe(array))
    own = {i: array[i] if array.ndim else array for i in tokens}
    return {i: per_head(name, own[i], lengths.shape, kinds) for i, lengths in tokens.items()}


def scores_of_heads(layers: Sequence[Any], number: int, counts: Sequence[int], request: Compression) -> Array:
    """Return the scores of a layer, float [B, Hkv, longest]; -inf for padding and after a head's last token.

    Heads of a ragged layer are scored one by one. `counts` are as in `scores_of`.
    """
    layer, mask = layers[number], request.attn_mask
    if not isinstance(layer, RaggedLayer):
        return scores_of(layers, number, counts, request)
    states, heads, length = layer._heads_states(), layer.lengths.shape[1], layer.get_seq_length()
    real = heads_tokens(layer, mask).reshape(-1, layer.stored_tokens)  # a row for each head

    def score(head: Array, columns: Array) -> Array:
        b, h = divmod(int(head[0]), heads)
        keys, values, positions = (part[columns] for part in states[head[0]])
        own = UnpaddedRow(
            layer, (keys[None, None], values[None, None]), positions, mask if mask is None else mask[b]
        )
        visible = np.ones(length, bool) if mask is None else mask[b]
        of_head = request_for_row(request, number, b, columns, visible, (h, heads))
        return scores_of_row(own, number, counts[0 if mask is None else b], of_head)

    scores = score_rows(single_rows(real), (len(real), 1, real.shape[1]), score, spares=mask is not None)
    return scores.reshape(-1, heads, real.shape[1])


def rows_of_batch(
    scored: dict[int, Array],
    real: dict[int, Array],
    means: list[dict[int, int]],
    num_layers: int,
    request: Compression,
) -> dict[int, list[Array]]:
    """Return the numbers of the rows that each head of each layer keeps, ascending.

    Beside padding, budgets are shares of the tokens of each row of the batch.
    """
    if request.attn_mask is None:
        return rows_that_stay(scored, real, means[0], num_layers, request)
    rows: dict[int, list[Array]] = {i: [] for i in scored}
    for b, means_of_row in enumerate(means):
        scored_row, real_row = ({i: own[b : b + 1] for i, own in each.items()} for each in (scored, real))
        staying = rows_that_stay(scored_row, real_row, means_of_row, num_layers, request_of_row(request, b))
        for i, of_heads in staying.items():
            whole = stays_whole(scored_row[i][real_row[i]])  # too few tokens for the scorer
            rows[i] += [np.flatnonzero(tokens) for tokens in real_row[i][0]] if whole else of_heads
    return rows


def request_of_row(request: Compression, b: int) -> Compression:
    """Return the arguments of `compress` with the budget and the threshold of one row of the batch."""
    numbers: dict[str, Any] = {"budget": request.budget, "threshold": request.threshold}
    of_row: dict[str, Any] = {
        name: np.asarray(array)[:, b : b + 1] if np.ndim(array) == 3 else array
        for name, array in numbers.items()
    }
    return replace(request, **of_row)


def rows_that_stay(
    scored: dict[int, Array],
    real: dict[int, Array],
    means: dict[int, int],
    num_layers: int,
    request: Compression,
) -> dict[int, list[Array]]:
    """Return the numbers of the rows that each head of each layer keeps, ascending."""
    tokens = {i: own.sum(-1) for i, own in real.items()}
    if request.threshold is not None:
        bounds, rows = numbers_by_head("threshold", request.threshold, tokens, num_layers, "fiu"), {}
        for i, scores in scored.items():
            staying = real[i] & (scores >= np.minimum(bounds[i], LARGEST_SCORE)[..., None])
            rows[i] = [np.flatnonzero(head) for head in staying.reshape(-1, staying.shape[2])]
        return rows
    counts = counts_of_heads(scored, tokens, means, num_layers, request)
    best = {i: take(scores, counts[i]) for i, scores in scored.items()}
    return {i: np.split(kept.rows, kept.starts[1:-1]) for i, kept in best.items()}


def counts_of_heads(
    scored: dict[int, Array],
    tokens: dict[int, Array],
    means: dict[int, int],
    num_layers: int,
    request: Compression,
) -> dict[int, Array]:
    """Return how many tokens each head keeps, int64 [B, Hkv] for each layer."""
    budget, name = request.budget, request.budget if isinstance(request.budget, str) else None
    if name is None and np.ndim(budget) > 1:
        counts = numbers_by_head("budget", budget, tokens, num_layers, "iu")
        for i, own in counts.items():
            most = tokens[i] if request.attn_mask is None else scored[i].shape[2]  # padding never stays
            refuse_first("budget", own, (own < 0) | (own > most), f"counts of 0 to {np.max(most)}")
        return {i: np.minimum(own, tokens[i]) for i, own in counts.items()}
    if name == "ada":
        counts = {i: ada_counts(scores, means[i]) for i, scores in scored.items()}
    elif name == "global":
        if len({lengths.shape for lengths in tokens.values()}) > 1:
            raise argument_error("budget", SAME_SHAPES, [lengths.shape for lengths in tokens.values()])
        total = sum(means[i] * lengths.shape[1] for i, lengths in tokens.items())
        shared = shared_counts(list(scored.values()), total, 0) if scored else ()
        counts = dict(zip(scored, shared, strict=True))
    elif name not in ("uniform", "pyramid", None):
        raise argument_error("budget", BUDGETS_WANTED, repr(name))
    else:
        counts = {i: np.full(lengths.shape, means[i]) for i, lengths in tokens.items()}
    return {i: np.minimum(count, tokens[i]) for i, count in counts.items()}


def ragged_layer(layer: Any, rows: list[Array], rope: Any) -> RaggedLayer:
    """Return a ragged layer with the rows of a layer that each head keeps."""
    if isinstance(layer, RaggedLayer):
        geometry, states = layer.geometry, layer._heads_states()
    else:
        keys, values = stored_states(layer)
        geometry, positions = layer.store.geometry, layer.positions
        keys = keys.astype(values.dtype, copy=False)
        states = [HeadStates(keys[at], values[at], positions) for at in np.ndindex(keys.shape[:2])]
    ragged = RaggedLayer()
    ragged.allocate = layer.allocate
    ragged.name, ragged.rope = layer.name, layer.rope if rope is None else rope
    kept = [HeadStates(*(part[own] for part in head)) for head, own in zip(states, rows, strict=True)]
    assert geometry is not None
    if geometry.key_dim != geometry.value_dim:
        sizes = f"keys of {geometry.key_dim} and values of {geometry.value_dim} elements"
        raise argument_error("budget", f"'uniform' or 'pyramid' for {sizes}", "a budget for each head")
    ragged._fill_heads(geometry, kept, layer.get_seq_length())
    return ragged
