"""Score positions of contexts for the indexer, and choose those with the highest scores."""

from __future__ import annotations

import numpy as np

from kvkit.calls.latent import gather_rows
from kvkit.checks.indexer import ChoiceCall, IndexerCall
from kvkit.typed import Array

# Keys that are scored at a time: at least KEYS, more if a sequence has few queries, up to so many products.
KEYS, PRODUCTS = 512, 2**21


def score_positions(call: IndexerCall, out: Array | None) -> Array:
    """Score every position of each context, block after block of keys."""
    (scores,) = call.results.arrays(out)
    scores[...] = -np.inf
    lengths, starts = call.contexts.lengths, call.contexts.starts
    (_, heads, dim), pool = call.query.shape, call.pool
    queries = np.ascontiguousarray(call.query, np.float32) * np.float32(call.softmax_scale)  # [tokens, H, D]
    weights = call.weights.astype(np.float32)  # [tokens, H]
    most_rows = int(np.diff(starts).max(initial=0)) * heads  # query rows of a sequence
    step = max(KEYS, PRODUCTS // max(most_rows, 1))  # few keys would not occupy all threads
    memory = np.empty(most_rows * min(step, int(lengths.max(initial=0))), np.float32)
    for sequence, length in enumerate(lengths.tolist()):
        begin, end = starts[sequence], starts[sequence + 1]
        for first in range(0, length, step):
            last = min(first + step, length)
            rows = gather_rows(pool, call.contexts.slots(sequence, np.arange(first, last)))
            key = rows[:, :dim].astype(np.float32, copy=False)
            query = queries[begin:end].reshape(-1, dim)
            products = memory[: len(query) * len(key)].reshape(len(query), len(key))  # [queries * H, keys]
            np.matmul(query, key.T, out=products)
            if call.scaled:  # a key's scale follows its codes
                products *= rows[:, dim]
            for token, by_head in enumerate(products.reshape(end - begin, heads, last - first), begin):
                np.maximum(by_head, 0, out=by_head)  # [H, keys], which stays in the L1 cache
                scores[token, first:last] = weights[token] @ by_head
        positions = np.arange(length - (end - begin), length)  # of the queries
        hidden = np.arange(scores.shape[1]) > positions[:, None]
        scores[begin:end][hidden] = -np.inf
    return scores


def choose_rows(call: ChoiceCall, out: Array | None) -> Array:
    """Write the slots of each query's k positions with the highest scores, [tokens, k], then -1."""
    (chosen,) = call.results.arrays(out)
    chosen[...] = -1
    starts = call.contexts.starts
    for sequence, length in enumerate(call.contexts.lengths.tolist()):
        slots = call.contexts.slots(sequence, np.arange(length))
        for token in range(starts[sequence], starts[sequence + 1]):
            best = best_positions(call.scores[token, :length], call.k)
            chosen[token, : len(best)] = slots[best]
    return chosen


def best_positions(scores: Array, k: int) -> Array:
    """Return the positions of the k largest scores above -inf, ascending; of equal scores the first ones."""
    count = min(k, len(scores))
    if not count:
        return np.zeros(0, np.int64)
    least = np.partition(scores, len(scores) - count)[len(scores) - count]
    chosen = scores > least
    equal = np.flatnonzero(scores == least) if least > -np.inf else np.zeros(0, np.int64)
    chosen[equal[: count - np.count_nonzero(chosen)]] = True
    return np.flatnonzero(chosen)
