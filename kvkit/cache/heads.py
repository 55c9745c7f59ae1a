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
    BUDGETS,
    Compression,
    Report,
    ScoreOf,
    layer_counts,
    layer_scores,
    reason_to_skip,
    score_function,
    stored_states,
)
from kvkit.cache.layers.dynamic import DynamicLayer
from kvkit.cache.paged.ragged import HeadStates, RaggedLayer
from kvkit.checks.values import flag, integer
from kvkit.errors import argument_error, describe
from kvkit.eviction.inputs import refuse_first
from kvkit.eviction.selection import LARGEST, ada_counts, per_head, shared_counts, take, with_protected
from kvkit.typed import Array

SAME_SHAPES = "layers with the same batch and number of heads, for 'global'"


def compress_by_head(layers: Sequence[Any], request: Compression) -> tuple[list[Any], Report]:
    """Compress layers head by head; return (layers, report). A `RaggedLayer` replaces each changed layer."""
    skipped = {i: reason for i, layer in enumerate(layers) if (reason := reason_to_skip(layer))}
    chosen = [i for i in range(len(layers)) if i not in skipped]
    if flag("renumber", request.renumber):
        raise argument_error("renumber", "False where heads keep tokens of their own", True)
    for i in chosen:
        if type(layers[i]) not in (DynamicLayer, RaggedLayer):
            wanted = "a DynamicLayer or RaggedLayer, to keep tokens head by head"
            raise argument_error("budget", wanted, f"layer {i}, a {type(layers[i]).__name__}")
    tokens = {i: head_lengths(layers[i]) for i in chosen}
    means = mean_counts(tokens, len(layers), request)
    function = score_function(layers, request)
    first, last = integer("first", request.first, 0), integer("last", request.last, 0)
    scored = {
        i: with_protected(scores_of_heads(function, layers[i], i, means[i], request), tokens[i], first, last)
        for i in chosen
    }
    staying = rows_that_stay(scored, tokens, means, len(layers), request)
    changed = {i: ragged_layer(layers[i], rows, request.rope[i]) for i, rows in staying.items()}
    new = [changed.get(i, layer) for i, layer in enumerate(layers)]
    before, after = (sum(layer.nbytes for layer in some) for some in (layers, new))
    tokens_before, tokens_after = ([count_tokens(layer) for layer in some] for some in (layers, new))
    return new, Report(tokens_before, tokens_after, before, after, skipped)


def count_tokens(layer: Any) -> Any:
    """Return how many tokens a layer stores; for a ragged layer a number for each head, [B][Hkv]."""
    return layer.lengths.tolist() if isinstance(layer, RaggedLayer) else layer.stored_tokens


def head_lengths(layer: Any) -> Array:
    """Return how many tokens each head of a layer stores, int64 [B, Hkv]."""
    if isinstance(layer, RaggedLayer):
        return layer.lengths
    batch, heads, tokens, _ = layer.keys.shape
    return np.full((batch, heads), tokens)


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
        return {i: max(1, int(count.mean())) for i, count in counts.items()}
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


def scores_of_heads(function: ScoreOf, layer: Any, number: int, count: int, request: Compression) -> Array:
    """Return the scores of a layer, float [B, Hkv, longest]; -inf after the last token of a head.

    Heads of a ragged layer are scored one by one.
    """
    if not isinstance(layer, RaggedLayer):
        return layer_scores(function, layer.stored_tokens, number, count)
    batch, heads = layer.lengths.shape
    scores = np.full((batch, heads, layer.stored_tokens), -np.inf)
    flat = scores.reshape(-1, scores.shape[2])  # a row for each head
    for i, (own, states) in enumerate(zip(flat, layer.heads_states(), strict=True)):
        head, stored = HeadLayer(states, layer), len(states.positions)
        if stored:
            of_head = request_for_head(request, number, divmod(i, heads), heads, stored)
            own[:stored] = layer_scores(score_function([head], of_head), stored, 0, min(count, stored))
    return scores


class HeadLayer:
    """Gives scorers the tokens of a ragged layer that one key head of one row of the batch stores."""

    window = None

    def __init__(self, states: HeadStates, layer: RaggedLayer) -> None:
        self.positions, self.stored_tokens = states.positions, len(states.positions)
        self.rope, self.rope_shifts = layer.rope, np.empty((0, 3), np.int64)
        self._states, self._layer = states, layer

    def get_seq_length(self) -> int:
        """Return the position of the next token."""
        return self._layer.get_seq_length()

    def stored(self) -> tuple[Array, Array]:
        """Return keys and values, [1, 1, tokens, D]."""
        return self._states.keys[None, None], self._states.values[None, None]


def request_for_head(
    request: Compression, number: int, head: tuple[int, int], heads: int, tokens: int
) -> Compression:
    """Return the arguments of `compress` for one head of a layer; `head` is (row of the batch, key head)."""
    b, h = head

    def of_head(arrays: Any) -> Any:
        """Return a list with the part of one layer that belongs to the query heads of the head."""
        if arrays is None:
            return None
        group = arrays[number].shape[1] // heads
        return [arrays[number][b : b + 1, h * group : (h + 1) * group]]

    scorer: Any = request.scorer
    if callable(scorer):
        function = scorer

        def scorer(_: int, *states: Any) -> Array:
            return function(number, *states)

    elif not isinstance(scorer, str):
        scorer = [np.asarray(scorer[number])[b : b + 1, h : h + 1, :tokens]]
    weights = of_head(request.weights)
    weights = weights and [weights[0][..., :tokens]]  # without the padding to the longest head
    return replace(request, scorer=scorer, queries=of_head(request.queries), weights=weights)


def rows_that_stay(
    scored: dict[int, Array],
    tokens: dict[int, Array],
    means: dict[int, int],
    num_layers: int,
    request: Compression,
) -> dict[int, list[Array]]:
    """Return the numbers of the rows that each head of each layer keeps, ascending."""
    if request.threshold is not None:
        bounds, rows = numbers_by_head("threshold", request.threshold, tokens, num_layers, "fiu"), {}
        for i, scores in scored.items():
            stored = np.arange(scores.shape[2]) < tokens[i][..., None]
            staying = stored & (scores >= np.minimum(bounds[i], LARGEST)[..., None])
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
            refuse_first("budget", own, (own < 0) | (own > tokens[i]), f"counts of 0 to {tokens[i].max()}")
        return counts
    if name == "ada":
        counts = {i: ada_counts(scores, means[i]) for i, scores in scored.items()}
    elif name == "global":
        if len({lengths.shape for lengths in tokens.values()}) > 1:
            raise argument_error("budget", SAME_SHAPES, [lengths.shape for lengths in tokens.values()])
        total = sum(means[i] * lengths.shape[1] for i, lengths in tokens.items())
        shared = shared_counts(list(scored.values()), total, 0) if scored else ()
        counts = dict(zip(scored, shared, strict=True))
    elif name not in ("uniform", "pyramid", None):
        raise argument_error("budget", BUDGETS, repr(name))
    else:
        counts = {i: np.full(lengths.shape, means[i]) for i, lengths in tokens.items()}
    return {i: np.minimum(count, tokens[i]) for i, count in counts.items()}


def ragged_layer(layer: Any, rows: list[Array], rope: Any) -> RaggedLayer:
    """Return a ragged layer with the rows of a layer that each head keeps."""
    if isinstance(layer, RaggedLayer):
        geometry, states = layer.geometry, layer.heads_states()
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
    ragged.fill_heads(geometry, kept, layer.get_seq_length())
    return ragged
