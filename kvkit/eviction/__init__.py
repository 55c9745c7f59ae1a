"""Choose which tokens a cache can lose: published scorers, budgets, selection."""

from kvkit.eviction import (  # noqa: F401  (they register their scorers)
    by_keys,
    by_outliers,
    by_position,
    by_queries,
    by_statistics,
    by_weights,
)
from kvkit.eviction.generation import H2O, decoding
from kvkit.eviction.scorers import SCORERS, scores
from kvkit.eviction.selection import Kept, budgets, chunks, select

__all__ = ["H2O", "SCORERS", "Kept", "budgets", "chunks", "decoding", "scores", "select"]
