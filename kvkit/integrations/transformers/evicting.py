"""Evict tokens from the cache of a generating model: once after the prompt, or at intervals."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvkit.cache import Cache
from kvkit.cache.compression import CONTEXT
from kvkit.errors import TooFewTokensError, argument_error, brief, describe
from kvkit.eviction.generation import Decoding
from kvkit.eviction.scorers import SCORERS
from kvkit.tools.studies.policies import Policy, entry_of
from kvkit.typed import Array

FORM = "'SCORER@SHARE' as 'snapkv@0.5', arguments of `compress` by name, or `kvkit.eviction.decoding(...)`"
NOT_SEEN = {  # {scorer: the input that attention does not provide}
    "kvzip": "weights of a pass that repeats the context",
    "expected": "queries before rotation",
    "triattention": "queries before rotation",
}
OF_WEIGHTS = "observed", "h2o"  # scorers that need the weights of all queries
ARGUMENTS = {*inspect.signature(Cache.compress).parameters}
WINDOW = 64  # queries kept for a user's function


class Eviction:
    """Holds the rule that evicts tokens, and the queries or weights that its scorer needs.

    Parameters
    ----------
    evict : str, mapping or Decoding
        A scorer with the share that it keeps, ``"snapkv@0.5"`` or ``"snapkv(window=32)@0.5"``; or arguments
        of `kvkit.cache.Cache.compress` by name: once, after the prompt. Or a result of
        `kvkit.eviction.decoding`: at its intervals.
    """

    def __init__(self, evict: Any) -> None:
        self.decoding = evict if isinstance(evict, Decoding) else None
        self.arguments: dict[str, Any] = {}
        if isinstance(evict, str):
            policy = entry_of(evict) if "@" in evict else None
            if not isinstance(policy, Policy) or "+" in evict or policy.scorer == "oracle":
                raise argument_error("evict", FORM, brief(repr(evict)))
            self.arguments = {"scorer": policy.scorer, "keep": policy.keep, **policy.options}
        elif isinstance(evict, Mapping) and "scorer" in evict:
            self.arguments = dict(evict)
        elif self.decoding is None:
            raise argument_error("evict", FORM, describe(evict))
        scorer = self.decoding.scorer if self.decoding else self.arguments["scorer"]
        options = self.decoding.options if self.decoding else self.arguments
        found = SCORERS.get(scorer) if isinstance(scorer, str) else None
        if isinstance(scorer, str) and (found is None or scorer in NOT_SEEN):
            wanted = "a scorer that reads keys, values, or the queries and weights of attention"
            raise argument_error("evict", wanted, f"{scorer!r}, of {NOT_SEEN.get(scorer, 'no known name')}")
        needs = " ".join(found.needs) if found else "queries"
        self.wants_weights = scorer in OF_WEIGHTS
        if found is not None:
            known = {name: True for name in CONTEXT if name in found.options}
            own = {name: each for name, each in options.items() if name not in ARGUMENTS}
            found.check(dict.fromkeys(("values", "queries", "weights"), True), known | own)
        if self.wants_weights and self.decoding:
            wanted = "a scorer of keys or of the last queries, while tokens are generated"
            raise argument_error("evict", wanted, f"{scorer!r}, of the weights of all queries")
        self.window: int | None = 0  # how many of the last queries are kept; None for all
        if "queries" in needs and not self.wants_weights:
            held = found.options.get("window") if found else None
            default = held.default if held is not None else {"tova": 1}.get(scorer)
            self.window = options.get("window", default if found else WINDOW)
        self._inputs: dict[int, Array] = {}  # queries, or weights of keys, of each layer
        self.done = False

    def see(self, layer_idx: int, queries: Array, weights: Array | None) -> None:
        """Keep the queries or weights of a layer's attention."""
        if weights is not None:
            self._inputs[layer_idx] = weights
        elif self.window != 0:
            before = self._inputs.get(layer_idx)
            known = queries if before is None else np.concatenate((before, queries), 2)
            self._inputs[layer_idx] = known[:, :, -(self.window or known.shape[2]) :].copy()

    def run(self, cache: Any) -> Any:
        """Compress a cache if it is time; return the report.

        None if it is not, or if the scorer keeps more tokens than there are or may stay: then all stay.
        """
        inputs: list[Array] | None = None
        if self._inputs:
            inputs = [self._input(i, layer) for i, layer in enumerate(cache.layers)]
        with contextlib.suppress(TooFewTokensError):
            if self.decoding is not None:
                return self.decoding(cache, inputs)
            self.done, self._inputs = True, {}
            given = {"weights" if self.wants_weights else "queries": inputs} if inputs else {}
            return cache.compress(**given | self.arguments)
        return None

    def _input(self, layer_idx: int, layer: Any) -> Any:
        """Return the scorer's input for the stored tokens of a layer; None for layers without rows."""
        held = self._inputs.get(layer_idx)
        return held if held is None or self.wants_weights else held[:, :, -layer.stored_tokens :]

    def change_batch(self, rows: Array) -> None:
        """Replace row b of the batch by a copy of row ``rows[b]``."""
        self._inputs = {i: held[rows] for i, held in self._inputs.items()}

    def drop(self, tokens: int) -> None:
        """Drop the last queries, whose tokens were removed."""
        if tokens and not self.wants_weights:
            cut = {i: held[:, :, : max(held.shape[2] - tokens, 0)] for i, held in self._inputs.items()}
            self._inputs = {i: held for i, held in cut.items() if held.shape[2]}
