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
from kvkit.eviction.scorers import SCORERS, Scorer
from kvkit.tools.studies.policies import Policy, entry_of
from kvkit.typed import Array

FORM = "'SCORER@SHARE' as 'snapkv@0.5', arguments of `compress` by name, or `kvkit.eviction.decoding(...)`"
WEIGHT_SCORERS = "observed", "h2o"  # scorers that need the weights of all queries
WINDOWS = {"tova": 1}  # how many of the last queries a scorer without an option `window` reads
FUNCTION_WINDOW = 64  # how many of the last queries a scorer that is a function gets
COMPRESS_ARGUMENTS = {*inspect.signature(Cache.compress).parameters}
NOT_PROVIDED = {  # {scorer: the input that attention does not provide}
    "kvzip": "weights of a pass that repeats the context",
    "expected": "queries before rotation",
    "triattention": "queries before rotation",
}


class Eviction:
    """Holds the rule that evicts tokens, and the queries or weights that its scorer needs.

    Parameters
    ----------
    evict : str, mapping or Decoding
        To evict once, after the prompt: a scorer with the share that it keeps, ``"snapkv@0.5"`` or
        ``"snapkv(window=32)@0.5"``, or arguments of `kvkit.cache.Cache.compress` by name. To evict at
        intervals: a result of `kvkit.eviction.decoding`.
    """

    def __init__(self, evict: Any) -> None:
        self.decoding = evict if isinstance(evict, Decoding) else None
        self.arguments = {} if self.decoding else compress_arguments(evict)
        scorer = self.decoding.scorer if self.decoding else self.arguments["scorer"]
        options = self.decoding.options if self.decoding else self.arguments
        rule = checked_scorer(scorer, options)
        self.wants_weights = scorer in WEIGHT_SCORERS
        if self.wants_weights and self.decoding:
            wanted = "a scorer of keys or of the last queries, while tokens are generated"
            raise argument_error("evict", wanted, f"{scorer!r}, of the weights of all queries")
        self.window = 0 if self.wants_weights else queries_read(rule, options)
        self._inputs: dict[int, Array] = {}  # queries, or weights of keys, of each layer
        self.done = False  # whether a single eviction has run

    def record(self, layer_idx: int, queries: Array, weights: Array | None) -> None:
        """Record the queries or weights of a layer's attention."""
        if weights is not None:
            self._inputs[layer_idx] = weights
        elif self.window != 0:
            before = self._inputs.get(layer_idx)
            recorded = queries if before is None else np.concatenate((before, queries), 2)
            self._inputs[layer_idx] = recorded[:, :, -(self.window or recorded.shape[2]) :].copy()

    def run(self, cache: Any, padding: Array | None) -> Any:
        """Compress a cache if it is time; return the report. `padding` is a mask of positions, or None.

        All tokens stay, and None is returned, if it is not time, or if the scorer always keeps more tokens
        than there are or than may stay.
        """
        inputs: list[Array] | None = None
        if self._inputs:
            inputs = [self._input(i, layer) for i, layer in enumerate(cache.layers)]
        with contextlib.suppress(TooFewTokensError):
            if self.decoding is not None:
                return self.decoding(cache, inputs, padding)
            self.done, self._inputs = True, {}
            arrays = {"weights" if self.wants_weights else "queries": inputs} if inputs else {}
            return cache.compress(**arrays | {"attn_mask": padding} | self.arguments)
        return None

    def _input(self, layer_idx: int, layer: Any) -> Any:
        """Return the scorer's input for the stored tokens of a layer; None for a layer without rows."""
        recorded = self._inputs.get(layer_idx)
        return recorded if recorded is None or self.wants_weights else recorded[:, :, -layer.stored_tokens :]

    def change_batch(self, rows: Array) -> None:
        """Replace row b of the batch by a copy of row ``rows[b]``."""
        self._inputs = {i: array[rows] for i, array in self._inputs.items()}

    def drop(self, tokens: int) -> None:
        """Drop the queries of the last `tokens` tokens, which were removed."""
        if tokens and not self.wants_weights:
            left = {i: array[:, :, : max(array.shape[2] - tokens, 0)] for i, array in self._inputs.items()}
            self._inputs = {i: array for i, array in left.items() if array.shape[2]}


def compress_arguments(evict: Any) -> dict[str, Any]:
    """Return the arguments of `Cache.compress` that a text such as "snapkv@0.5", or a mapping, stands for."""
    if isinstance(evict, Mapping) and "scorer" in evict:
        return dict(evict)
    if not isinstance(evict, str):
        raise argument_error("evict", FORM, describe(evict))
    policy = entry_of(evict) if "@" in evict else None
    if not isinstance(policy, Policy) or "+" in evict or policy.scorer == "oracle":
        raise argument_error("evict", FORM, brief(repr(evict)))
    return {"scorer": policy.scorer, "keep": policy.keep, **policy.options}


def checked_scorer(scorer: Any, options: Mapping[str, Any]) -> Scorer | None:
    """Return the scorer of a name, None for a function; raise unless attention provides its inputs."""
    if not isinstance(scorer, str):
        return None
    rule = SCORERS.get(scorer)
    if rule is None or scorer in NOT_PROVIDED:
        wanted = "a scorer that reads keys, values, or the queries and weights of attention"
        found = f"{scorer!r}, of {NOT_PROVIDED.get(scorer, 'no known name')}"
        raise argument_error("evict", wanted, found)
    provided = {name: True for name in CONTEXT if name in rule.options}  # by the cache, later
    own = {name: value for name, value in options.items() if name not in COMPRESS_ARGUMENTS}
    rule.check(dict.fromkeys(("values", "queries", "weights"), True), provided | own)
    return rule


def queries_read(rule: Scorer | None, options: Mapping[str, Any]) -> int | None:
    """Return how many of the last queries a scorer reads, None for all; `rule` is None for a function."""
    if rule is None:
        return options.get("window", FUNCTION_WINDOW)
    if not any("queries" in need for need in rule.needs):
        return 0
    option = rule.options.get("window")
    return options.get("window", WINDOWS.get(rule.name) if option is None else option.default)
