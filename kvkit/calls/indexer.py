"""Score positions of contexts for the indexer, and choose those with the highest scores."""

from __future__ import annotations

from kvkit import cpu
from kvkit.checks.indexer import ChoiceCall, IndexerCall
from kvkit.typed import Array


def score_positions(call: IndexerCall, out: Array | None) -> Array:
    """Score every position of each context, block after block of keys."""
    (scores,) = call.results.arrays(out)
    if scores.size:
        cpu.launches.start(cpu.attention.index_scores.prepare_scores(call, scores))
    return scores


def choose_rows(call: ChoiceCall, out: Array | None) -> Array:
    """Write the slots of each query's k positions with the highest scores, [tokens, k], then -1."""
    (chosen,) = call.results.arrays(out)
    cpu.launches.start(cpu.attention.top_rows.prepare_choice(call, chosen))
    return chosen
