"""Register scorers in a table, and call them by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from kvkit.errors import argument_error, describe, unknown_name
from kvkit.eviction.inputs import Inputs, checked_inputs
from kvkit.eviction.padding import equal_rows, score_rows
from kvkit.interop import returns_input_kind
from kvkit.typed import Array

Score = Callable[..., Array]
NEEDED = {
    "values": "values [B, Hkv, S, Dv]",
    "queries": "queries [B, Hq, W, D] of the last tokens",
    "weights": "weights [B, Hq, W, S], or their sums over queries [B, Hq, S]",
}


class Scorer(NamedTuple):
    """Describes a scorer, a published rule that scores tokens.

    Attributes
    ----------
    name : str
    score : callable
        ``score(inputs, **options)`` returns scores, larger ones for tokens to keep.
    needs : tuple of str
        The arguments of `scores` that it needs besides keys; "or" joins alternatives.
    scored : str
        What scores are for: "tokens" [B, Hkv, S]; or, evicting nothing, "pages" [B, Hq, pages] or "channels"
        [B, Hkv, D].
    """

    name: str
    score: Score
    needs: tuple[str, ...]
    scored: str

    @property
    def options(self) -> Mapping[str, inspect.Parameter]:
        """Return the scorer's options by name."""
        parameters = dict(inspect.signature(self.score).parameters)
        return {name: option for name, option in parameters.items() if option.kind is option.KEYWORD_ONLY}

    def check(self, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Raise if an array that the scorer needs is None, or an option is missing or unknown."""
        for need in self.needs:
            names = need.split(" or ")
            if all(arrays.get(name) is None for name in names):
                wanted = " or ".join(NEEDED[name] for name in names)
                raise argument_error(names[0], f"{wanted}, which {self.name} needs", "None")
        for name in options:
            if name not in self.options:
                raise argument_error(self.name, f"options among {', '.join(self.options) or 'none'}", name)
        for name, option in self.options.items():
            if option.default is option.empty and options.get(name) is None:
                raise argument_error(name, f"a value, which {self.name} needs", "None")


SCORERS: dict[str, Scorer] = {}


def scorer(*needs: str, scored: str = "tokens") -> Callable[[Score], Score]:
    """Decorate a function to register it as a scorer of its name; `needs` and `scored` as in `Scorer`."""

    def register(function: Score) -> Score:
        SCORERS[function.__name__] = Scorer(function.__name__, function, needs, scored)
        return function

    return register


def scorer_of(name: object) -> Scorer:
    """Return the scorer of a name."""
    if not isinstance(name, str) or name not in SCORERS:
        raise unknown_name("name", "a scorer", str(name), SCORERS)
    return SCORERS[name]


def scores(
    name: str,
    keys: Array,
    values: Array | None = None,
    *,
    queries: Array | None = None,
    weights: Array | None = None,
    attn_mask: Array | None = None,
    **options: Any,
) -> Array:
    """Score the tokens of a layer by a published rule: larger scores for tokens that should stay.

    Rows of the batch are scored independently. Sums are float64, other arithmetic is float32.

    Parameters
    ----------
    name : str
        One of `SCORERS`. The page "What to keep" says what each computes and needs.
    keys : ndarray, shape [B, Hkv, S, D]
        float32, float16 or bfloat16, as a cache holds them.
    values : ndarray, shape [B, Hkv, S, Dv], optional
    queries : ndarray, shape [B, Hq, W, D], optional
        The rotated queries of the last W tokens; for ``expected`` and ``triattention`` before rotation.
    weights : ndarray, shape [B, Hq, W, S] or [B, Hq, S], optional
        Weights of attention of the last W queries, or their sums over queries, as attention returns with
        ``return_key_weights``.
    attn_mask : ndarray of bool, shape [B, S], optional
        False for padding. Each row is scored as if it were alone, without its padding, which scores -inf. The
        tokens of a row with no more than the scorer always keeps score inf.
    **options
        The options of the scorer.

    Returns
    -------
    ndarray of float32, shape [B, Hkv, S]
        ``quest`` scores pages for each query head [B, Hq, pages], ``think`` channels [B, Hkv, D].

    Raises
    ------
    KvkitError
        If an argument is wrong or missing, or a number is NaN or infinite.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit import eviction
    >>> keys = np.array([3, 1, 2], np.float32).reshape(1, 1, 3, 1)
    >>> eviction.scores("knorm", keys)
    array([[[-3., -1., -2.]]], dtype=float32)
    """
    return scores_by(keys, scorer_of(name), values, queries, weights, attn_mask, options)


@returns_input_kind
def scores_by(
    keys: Array,
    rule: Scorer,
    values: Any,
    queries: Any,
    weights: Any,
    attn_mask: Any,
    options: Mapping[str, Any],
) -> Array:
    """Return the scores by a rule; they are of the kind of the first argument, an array or a tensor."""
    rule.check({"values": values, "queries": queries, "weights": weights}, options)
    inputs = checked_inputs(keys, values, queries, weights, attn_mask)
    scores = rule.score(inputs, **options) if inputs.real is None else scores_of_real(rule, inputs, options)
    return np.ascontiguousarray(scores, np.float32)


def scores_of_real(rule: Scorer, inputs: Inputs, options: Mapping[str, Any]) -> Array:
    """Return the scores by a rule of the tokens that are no padding, each row as if it were alone."""
    if rule.scored == "tokens":

        def score(rows: Array, columns: Array) -> Array:
            own = {name: array[..., columns] for name, array in of_tokens.items()}
            own |= {"scores": own["scores"][rows]} if "scores" in own else {}
            return rule.score(inputs.of_rows(rows, columns), **{**options, **own})

        shapes = {"positions": (inputs.tokens,), "scores": inputs.keys.shape[:3]}
        of_tokens = {name: np.asarray(options[name]) for name in shapes if options.get(name) is not None}
        for name, array in of_tokens.items():
            if array.shape != shapes[name]:
                raise argument_error(name, f"shape {shapes[name]}", describe(array))
        return score_rows(equal_rows(inputs.real), inputs.keys.shape[:3], score)
    parts = []  # (rows, scores of pages or channels)
    for rows, columns in equal_rows(inputs.real):
        own = inputs.of_rows(rows, columns if rule.scored == "channels" else None)
        parts.append((rows, rule.score(own, **options)))
    scores = np.full((len(inputs.keys), *parts[0][1].shape[1:]), -np.inf)  # -inf for rows of padding alone
    for rows, part in parts:
        scores[rows] = part
    return scores
