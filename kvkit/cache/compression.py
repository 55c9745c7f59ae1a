"""Compress a cache: score its tokens, choose the tokens that stay, and free the memory of other tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from kvkit.cache.padding import (
    UnpaddedRow,
    best_columns,
    checked_mask,
    column_means,
    real_tokens,
    request_for_row,
)
from kvkit.checks.values import flag, integer
from kvkit.errors import KvkitError, argument_error, describe
from kvkit.eviction.inputs import scores_array
from kvkit.eviction.padding import score_rows, single_rows
from kvkit.eviction.scorers import SCORERS, Scorer, scorer_of, scores
from kvkit.eviction.selection import budgets, kept_count
from kvkit.typed import Array

NO_WINDOW, EMPTY = "a window evicts already", "no tokens"
BUDGETS_WANTED = "'uniform', 'pyramid', 'ada', 'global', or counts of layers [L] or of heads [L, Hkv]"
ScoreFunction = Callable[[int, Array, Array, Any], Array]
ScoreOf = Callable[[int, int], Array]  # (layer, number of tokens to keep) -> scores


@dataclass(frozen=True)
class CompressionReport:
    """Reports what `Cache.compress` has changed.

    Attributes
    ----------
    tokens_before, tokens : list
        The stored tokens of each layer before and after: a number, or a number for each head, [B][Hkv].
    bytes_before, bytes_after : int
        The size of all stored keys and values; of a `PagedCache`, of all blocks that sequences use.
    skipped : dict of int to str
        The layers that did not change, and why.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.cache import DynamicCache
    >>> cache, states = DynamicCache(), np.ones((1, 1, 8, 4), np.float32)
    >>> keys, values = cache.update(states, states, 0)
    >>> cache.compress("knorm", keep=0.5)
    CompressionReport(tokens_before=[8], tokens=[4], bytes_before=256, bytes_after=128, skipped={})
    """

    tokens_before: list[Any]
    tokens: list[Any]
    bytes_before: int
    bytes_after: int
    skipped: dict[int, str]


@dataclass(frozen=True)
class Compression:
    """Holds the arguments of `Cache.compress`."""

    scorer: str | ScoreFunction | Sequence[Array]
    keep: float | None
    count: int | None
    budget: str | ArrayLike
    queries: Sequence[Array] | None
    weights: Sequence[Array] | None
    renumber: bool
    rope: Any  # how keys were rotated in each layer, or None where the cache knows it
    options: dict[str, Any]
    per_head: bool = False
    threshold: ArrayLike | None = None
    first: int = 0
    last: int = 0
    attn_mask: Array | None = None  # bool [B, n]: False for padding, by position


def split_options(scorer: Any, options: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    """Return `arguments` and `options` as keywords for `Compression`; those the scorer takes are options."""
    own = SCORERS[scorer].options if isinstance(scorer, str) and scorer in SCORERS else ()
    keywords = {name: value for name, value in arguments.items() if value is not None}
    return keywords | {"options": options | {name: keywords.pop(name) for name in own if name in keywords}}


def chooses_by_head(layers: Sequence[Any], request: Compression) -> bool:
    """Return whether each head chooses its own tokens."""
    budget = request.budget
    try:
        for_heads = budget in ("ada", "global") if isinstance(budget, str) else np.ndim(budget) > 1
    except ValueError:  # lists of unequal length
        raise argument_error("budget", BUDGETS_WANTED, describe(budget)) from None
    ragged = any(hasattr(layer, "lengths") for layer in layers)
    return flag("per_head", request.per_head) or for_heads or ragged or request.threshold is not None


def plan_layers(layers: Sequence[Any], request: Compression) -> tuple[dict[int, Any], dict[int, str]]:
    """Score layers; return the plans of those that change, and why others do not, by number."""
    skipped = {i: reason for i, layer in enumerate(layers) if (reason := reason_to_skip(layer))}
    chosen = [i for i in range(len(layers)) if i not in skipped]
    if flag("renumber", request.renumber) and skipped:
        wanted = "False beside layers that stay as they are"
        raise argument_error("renumber", wanted, f"True, and layers {sorted(skipped)}")
    mask = checked_mask(request.attn_mask, [layers[i] for i in chosen])
    request = replace(request, attn_mask=mask)
    score_function(layers, request)  # raises if an input is missing
    plans: dict[int, Any] = {}
    stored = {i: count_columns(layers[i], mask) for i in chosen}
    for i, count in layer_counts(stored, len(layers), request).items():
        rows = rows_to_keep([layers[i]], layers, count, request)
        positions, rope = layers[i].positions[rows], request.rope[i]
        plan = layers[i]._plan("retain", positions, renumber=request.renumber, rows=rows, rope=rope)
        plans[i] = plan._replace(frees=True)
    return plans, skipped


def compress(
    layers: Sequence[Any], rearrange: Callable[[list[Any]], None], request: Compression
) -> CompressionReport:
    """Compress layers. All are scored and planned before `rearrange` changes any."""
    plans, skipped = plan_layers(layers, request)
    tokens, before = [layer.stored_tokens for layer in layers], sum(layer.nbytes for layer in layers)
    rearrange([plans.get(i) for i in range(len(layers))])
    for i in plans:
        layers[i]._trim()
    after = [layer.stored_tokens for layer in layers]
    return CompressionReport(tokens, after, before, sum(layer.nbytes for layer in layers), skipped)


def plan_sequences(
    cache: Any, sequences: Sequence[Any], plan: Callable[..., Any], request: Compression
) -> Any:
    """Score sequences of a paged cache that have equal positions; return their plan, None without tokens."""
    plan("remove", 0)  # raises if tokens cannot be removed now
    if not isinstance(request.budget, str) or request.budget != "uniform":
        wanted = "'uniform', because all layers and heads of a sequence share its tokens"
        raise argument_error("budget", wanted, describe(request.budget))
    layers = [SequencesLayer(cache, sequences, i) for i in range(cache.store.num_layers)]
    stored = layers[0].stored_tokens
    if not stored:
        return None
    mask = checked_mask(request.attn_mask, layers[:1])
    request = replace(request, attn_mask=mask)
    columns, count = count_columns(layers[0], mask), request.count
    if mask is not None and count is not None:
        count = min(integer("count", count, 1, stored), columns)
    count = kept_count(columns, request.keep, count)
    rows = rows_to_keep(layers, layers, count, request)
    return plan("retain", layers[0].positions[rows], renumber=request.renumber, rows=rows)


def compress_sequences(
    cache: Any,
    sequences: Sequence[Any],
    plan: Callable[..., Any],
    rearrange: Callable[[Any], None],
    request: Compression,
) -> CompressionReport:
    """Compress sequences of a paged cache that have equal positions, by the mean scores of all layers."""
    planned, layers = plan_sequences(cache, sequences, plan, request), cache.store.num_layers
    before, stored = cache.nbytes, sequences[0].length if sequences else 0
    if planned is None:
        return CompressionReport(
            [0] * layers, [0] * layers, before, before, dict.fromkeys(range(layers), EMPTY)
        )
    rearrange(planned)
    return CompressionReport([stored] * layers, [sequences[0].length] * layers, before, cache.nbytes, {})


class SequencesLayer:
    """Gives scorers the tokens of sequences of equal positions in one layer of a paged cache."""

    def __init__(self, cache: Any, sequences: Sequence[Any], layer_idx: int) -> None:
        self._cache, self._sequences, self._layer_idx = cache, sequences, layer_idx
        self.stored_tokens = sequences[0].length if sequences else 0
        if self.stored_tokens:
            first = sequences[0]
            self.positions, self.rope_shifts = first.positions, first.rope_shifts
            self.rope = (first._ropes or cache._ropes(cache.rope))[layer_idx]

    @property
    def batch_size(self) -> int:
        """Return the number of sequences."""
        return len(self._sequences)

    def get_seq_length(self) -> int:
        """Return the position of the next token."""
        return int(self._sequences[0].next_position)

    def _stored(self) -> tuple[Array, ...]:
        """Return copies of keys and values, [sequences, Hkv, tokens, D]; codes are decoded."""
        sides = self._cache._reading_step(self._sequences).gather(self._layer_idx)
        shape = len(self._sequences), self.stored_tokens
        return tuple(side.reshape(*shape, *side.shape[1:]).swapaxes(1, 2) for side in sides)


def count_columns(layer: Any, mask: Array | None) -> int:
    """Return in how many of a layer's columns some row has a token that is no padding."""
    return int(real_tokens(layer, mask).any((0, 1)).sum())


def rows_to_keep(sharing: Sequence[Any], layers: Sequence[Any], count: int, request: Compression) -> Array:
    """Return the ascending rows that some layers keep together, of all `layers` of the request.

    All heads and rows of the batch share them, by mean scores.
    """
    real = real_tokens(sharing[0], request.attn_mask)[:, 0]  # [B, S]
    numbers = [i for i, layer in enumerate(layers) if any(layer is each for each in sharing)]
    counts = [count] * len(real)
    means = [column_means(scores_of(layers, i, counts, request), real) for i in numbers]
    first, last = integer("first", request.first, 0), integer("last", request.last, 0)
    return best_columns(np.mean(means, 0), real, count, first, last)


def scores_of(layers: Sequence[Any], number: int, counts: Sequence[int], request: Compression) -> Array:
    """Return the scores of a layer's tokens, [B, Hkv, S]; those of padding are -inf.

    `counts` has how many tokens stay in each row of the batch; one number for all without a mask.
    """
    layer, mask = layers[number], request.attn_mask
    if mask is None:
        return layer_scores(score_function(layers, request), layer.stored_tokens, number, counts[0])
    real, states = real_tokens(layer, mask)[:, 0], stored_states(layer)

    def score(rows: Array, columns: Array) -> Array:
        b = int(rows[0])
        keys, values = (side[b : b + 1, :, columns] for side in states)
        row = UnpaddedRow(layer, (keys, values), layer.positions[columns], mask[b])
        return scores_of_row(row, number, counts[b], request_for_row(request, number, b, columns, real[b]))

    return score_rows(single_rows(real), states[0].shape[:3], score)


def scores_of_row(row: UnpaddedRow, number: int, count: int, request: Compression) -> Array:
    """Return the scores of a row of layer `number`, of which `count` tokens stay at most."""
    function, tokens = score_function([row], request), row.stored_tokens
    return layer_scores(lambda _, kept: function(0, kept), tokens, number, min(count, tokens))


def layer_scores(function: ScoreOf, tokens: int, number: int, count: int) -> Array:
    """Return the checked scores of a layer's tokens."""
    try:
        scores: Array = scores_array("scores", np.asarray(function(number, count)))
    except KvkitError as error:
        raise type(error)(f"{error}, in layer {number}") from None
    if scores.shape[2] != tokens:
        raise argument_error("scores", f"[B, Hkv, {tokens}] of layer {number}", describe(scores))
    return scores


def reason_to_skip(layer: Any) -> str | None:
    """Return why a layer cannot lose tokens; None if it can."""
    if layer._why_kept is not None:
        return layer._why_kept
    if layer.window is not None:
        return NO_WINDOW
    return None if layer.stored_tokens else EMPTY


def layer_counts(stored: dict[int, int], num_layers: int, request: Compression) -> dict[int, int]:
    """Return how many tokens each layer of `stored` keeps; the model has `num_layers`."""
    budget = request.budget
    if isinstance(budget, str) and budget == "pyramid":
        tokens = max(stored.values(), default=1)
        share = kept_count(tokens, request.keep, request.count) / tokens
        pyramid = budgets("pyramid", layers=max(len(stored), 1), tokens=tokens, keep=request.keep or share)
        counts = np.minimum(pyramid[: len(stored)], list(stored.values())).tolist()  # none if all are skipped
        return dict(zip(stored, counts, strict=True))
    if isinstance(budget, str):
        if budget != "uniform":
            raise argument_error("budget", BUDGETS_WANTED, repr(budget))
        if request.count is None:
            return {i: kept_count(tokens, request.keep, None) for i, tokens in stored.items()}
        count = integer("count", request.count, 1)  # layers with fewer tokens keep all
        return {i: kept_count(tokens, request.keep, min(count, tokens)) for i, tokens in stored.items()}
    counts = np.asarray(budget)
    if counts.dtype.kind not in "iu" or counts.shape != (num_layers,):
        raise argument_error("budget", BUDGETS_WANTED, describe(counts))
    if request.keep is not None or request.count is not None:
        raise argument_error("budget", "a count for each layer, or else keep", "both")
    if request.attn_mask is not None:  # counts of all columns; padding never stays
        counts = np.array([min(count, stored.get(i, count)) for i, count in enumerate(counts)])
    return {i: kept_count(tokens, None, counts[i]) for i, tokens in stored.items()}


def score_function(layers: Sequence[Any], request: Compression) -> ScoreOf:
    """Return a function (layer, number of tokens to keep) -> scores; raise if an input is missing."""
    for name in ("queries", "weights"):
        arrays = getattr(request, name)
        is_list = arrays is None or isinstance(arrays, (list, tuple, np.ndarray))
        if not is_list or (arrays is not None and len(arrays) != len(layers)):
            raise argument_error(name, f"a list of {len(layers)}, one for each layer", describe(arrays))
    scorer = request.scorer
    if isinstance(scorer, str):
        rule = scorer_of(scorer)
        if rule.scored != "tokens":
            names = ", ".join(name for name, rule in SCORERS.items() if rule.scored == "tokens")
            raise argument_error("scorer", f"a scorer of tokens: {names}", f"{scorer!r}, of {rule.scored}")
        # The values, and the options of `CONTEXT`, are there once a layer is scored.
        arrays = {"values": True, "queries": request.queries, "weights": request.weights}
        rule.check(arrays, {name: True for name in rule.options if name in CONTEXT} | request.options)
        return lambda i, count: scores_of_layer(rule, layers[i], i, count, request)
    if callable(scorer):
        queries = request.queries
        return lambda i, _: scorer(i, *stored_states(layers[i]), None if queries is None else queries[i])
    if not isinstance(scorer, (list, tuple)) or len(scorer) != len(layers):
        wanted = f"a name, a function, or scores of {len(layers)} layers"
        raise argument_error("scorer", wanted, describe(scorer))
    return lambda i, count: scorer[i]


# Options of scorers that the cache knows: functions (layer, number of tokens to keep) -> value.
CONTEXT: dict[str, Callable[[Any, int], Any]] = {
    "budget": lambda layer, count: count,
    "keep": lambda layer, count: count / layer.stored_tokens,
    "blend": lambda layer, count: 1 - count / layer.stored_tokens,
    "rope": lambda layer, count: layer.rope,
    "positions": lambda layer, count: layer.positions,
    "now": lambda layer, count: layer.get_seq_length(),
}


def scores_of_layer(scorer: Scorer, layer: Any, number: int, count: int, request: Compression) -> Array:
    """Return the scores of a layer's tokens by a scorer of `kvkit.eviction`."""
    from_cache = {name: CONTEXT[name](layer, count) for name in scorer.options if name in CONTEXT}
    if "rope" in from_cache and request.rope[number] is not None:
        from_cache["rope"] = request.rope[number]
    arrays = {
        name: of_layers[number]
        for name, of_layers in (("queries", request.queries), ("weights", request.weights))
        if of_layers is not None
    }
    keys, values = stored_states(layer)
    return scores(scorer.name, keys, values, **arrays, **(from_cache | request.options))


def stored_states(layer: Any) -> tuple[Array, Array]:
    """Return a layer's keys, rotated for their present positions, and its values; codes are decoded."""
    keys, values = (np.asarray(side) for side in layer._stored())
    pieces = layer.rope_shifts
    if pieces[:, 2].any() and layer.rope != "none":
        shifts = np.repeat(pieces[:, 2], pieces[:, 1] - pieces[:, 0])
        keys = layer.rope.shift(keys, shifts)
    return keys, values
