"""Measure what attention loses if heads keep only some tokens, perhaps as codes: by policy and head.

Policies differ in the tokens that they keep, not in the keys and values. So for each head the scores of all
tokens are computed once, and sums over the tokens that each policy keeps are products with a table of ones
and zeros [policies, tokens].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvkit.eviction.products import long_product, product
from kvkit.tools.readers import SideReader
from kvkit.tools.studies.measures import SideErrors, TokenErrors, code_parts
from kvkit.typed import Array

LEAST = 1e-20  # a smaller sum of exp(score - largest score) is computed again, from its own largest score


class ExactAttention(NamedTuple):
    """Holds the attention of R judging queries for each of H key heads."""

    queries: Array  # divided by sqrt(D) [H, R, D]
    last: Array  # the last token that each query sees [R]
    weights: Array  # [H, n, R]
    log_sums: Array  # [H, R]
    top: Array  # the token of the largest weight [H, R]
    output: Array  # [H, R, Dv]

    @property
    def judging(self) -> int:
        """Return how many tokens have judging queries."""
        return int(self.last[-1] - self.last[0]) + 1


class HeadTokens(NamedTuple):
    """Holds m tokens of a head, and their weights with keys and values as they are stored."""

    tokens: Array  # ascending [m]
    weights: Array  # exact P [m, R]
    change: Array | None  # stored scores - exact scores, S' - S [m, R]; None for keys that are not coded
    scores: Array  # S' - top, and then their exponentials [m, R]; P if keys are not coded
    top: Array  # the largest S' [R]
    values: Array  # stored [m, Dv]


def attend_exactly(keys: Array, values: Array, query: Array) -> ExactAttention:
    """Compute the attention of the judging queries [count, Hq, D] over a sequence."""
    heads, tokens, dim = keys.shape
    count = len(query)
    rows = query.reshape(count, heads, -1, dim).transpose(1, 2, 0, 3).reshape(heads, -1, dim)
    rows = rows / np.float32(np.sqrt(dim))
    last = np.tile(np.arange(tokens - count, tokens), rows.shape[1] // count)
    weights = product(keys, rows.swapaxes(1, 2))
    hide(weights, np.arange(tokens), last)
    most = weights.max(1)
    np.exp(np.subtract(weights, most[:, None], out=weights), out=weights)
    sums = weights.sum(1, dtype=np.float64)
    weights /= sums[:, None].astype(np.float32)
    output = long_product(weights.swapaxes(1, 2), values)
    top = np.ascontiguousarray(weights.swapaxes(1, 2)).argmax(-1)  # along an inner axis argmax is slow
    return ExactAttention(rows, last, weights, most + np.log(sums), top, output)


def hide(scores: Array, tokens: Array, last: Array, value: float = -np.inf) -> None:
    """Overwrite the scores [..., m, R] of ascending tokens [m] after the last one that each query sees."""
    first = int(np.searchsorted(tokens, last.min(initial=0) + 1))  # some query does not see this token
    scores[..., first:, :][..., tokens[first:, None] > last] = value


def head_tokens(exact: ExactAttention, h: int, sides: Sequence[Array], coded: Sequence[Array] | None,
                tokens: Array | None = None) -> HeadTokens:  # fmt: skip
    """Return the tokens of a head, from keys and values [n, D] and their decoded numbers.

    With `tokens`, `coded` has only these tokens.
    """
    weights, values = exact.weights[h], sides[1]
    everything = np.arange(len(weights))
    if coded is None:
        return HeadTokens(everything, weights, None, weights, np.zeros(weights.shape[1]), values)
    tokens = everything if tokens is None else tokens
    keys = sides[0] if len(tokens) == len(everything) else sides[0][tokens]
    rows = np.ascontiguousarray(exact.queries[h].T)
    scores, stored = product(keys[None], rows[None])[0], product(coded[0][None], rows[None])[0]
    change = np.subtract(stored, scores, out=scores)
    hide(change, tokens, exact.last, 0)
    hide(stored, tokens, exact.last)
    top = stored.max(0)
    np.exp(np.subtract(stored, top, out=stored), out=stored)
    weights = weights if len(tokens) == len(everything) else weights[tokens]
    return HeadTokens(tokens, weights, change, stored, top, coded[1])


def compare_kept(
    exact: ExactAttention, h: int, sides: Sequence[Array], coded: Sequence[Array] | None,
    of_policies: Sequence[Array], tokens: Array | None = None,
) -> Iterator[dict[str, Array]]:  # fmt: skip
    """Yield {measure: [1, R]} of what a head's attention loses, for the tokens that each policy keeps.

    `sides` has keys and values [n, D], `coded` their decoded numbers, or those of `tokens` only.

    With exact scores S and weights P, and S' and P' from decoded keys of the kept tokens, the divergence is

        kept = sum of P over kept tokens          L, L' = log-sum-exp of S, S' over kept tokens
        kl   = -log(kept) + KL(P / kept, P')      KL(P / kept, P') = -(sum of P / kept (S' - S)) - L + L'

    Without a scheme P' is P / kept, and only the first term remains.
    """
    head = head_tokens(exact, h, sides, coded, tokens)
    # Among the tokens of `head`: all of the sequence, or those that one policy keeps.
    places = of_policies if tokens is None else [np.arange(len(tokens))]
    masks = np.zeros((len(places), len(head.tokens)), np.float32)
    for mask, at in zip(masks, places, strict=True):
        mask[at] = 1
    output, tiny = exact.output[h], np.finfo(np.float64).tiny
    kept = long_product(masks, head.weights, np.float64)  # [policies, R]
    lost = -np.log(np.clip(kept, tiny, 1))
    sums, divergence, logit = kept, lost, np.zeros_like(kept)
    if head.change is not None:
        sums = long_product(masks, head.scores, np.float64)
        within = -long_product(masks, head.weights * head.change, np.float64) / np.maximum(kept, tiny)
        within += lost - exact.log_sums[h] + np.log(np.maximum(sums, tiny)) + head.top
        divergence = lost + np.maximum(within, 0)
        visible = np.ones_like(head.change)
        hide(visible, head.tokens, exact.last, 0)
        logit = long_product(masks, np.abs(head.change), np.float64)
        logit /= long_product(masks, visible, np.float64)
    top = np.minimum(np.searchsorted(head.tokens, exact.top[h]), len(head.tokens) - 1)
    evicted = head.tokens[top] != exact.top[h]
    for i, at in enumerate(places):
        everything = len(at) == len(head.tokens)
        if not everything and sums[i].min() < LEAST:
            again = [side[at] for side in (sides if coded is None else coded)]
            yield from compare_kept(exact, h, sides, again, [of_policies[i]], of_policies[i])
            continue
        scores = head.scores if everything else np.take(head.scores, at, axis=0)
        values = head.values if everything else np.take(head.values, at, axis=0)
        found = long_product(scores.T, values) / np.maximum(sums[i], tiny)[:, None]
        changed = evicted | (masks[i, top] == 0)
        if head.change is not None:
            changed = changed | (head.scores[top, np.arange(len(top))] < scores.max(0))
        yield {
            "logit": logit[i : i + 1], "kl": divergence[i : i + 1],
            "output": ((found - output) ** 2).sum(-1)[None], "norm": (output**2).sum(-1)[None],
            "top_changed": changed[None], "weight": kept[i : i + 1],
        }  # fmt: skip


def code_tokens(
    scheme: Any, x: Array, side: SideReader, errors: SideErrors | TokenErrors | None = None
) -> Array:
    """Encode the tokens of heads [H, m, D] as a new prompt, add their errors, and return them decoded."""
    tokens = x.swapaxes(0, 1)
    if not len(tokens):
        return x
    reader = SideReader(tokens.__getitem__, len(tokens), tokens.shape[1], tokens.shape[2], side.bits)
    parts = list(code_parts(scheme, reader, errors))
    return np.ascontiguousarray(np.concatenate(parts).swapaxes(0, 1))
