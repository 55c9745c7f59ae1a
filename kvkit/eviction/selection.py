"""Select the tokens that stay: those with the best scores, under a budget for heads, layers or chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from kvkit.checks.values import finite_number, integer, text
from kvkit.errors import argument_error, describe
from kvkit.eviction.inputs import refuse_first, scores_array
from kvkit.eviction.padding import checked_padding, stays_whole
from kvkit.interop import returns_input_kind
from kvkit.typed import Array

BUDGET_RULES: dict[str, Callable[..., Array]] = {}
LARGEST_SCORE = np.finfo(np.float64).max  # the most that other tokens score where protected tokens score inf


class Kept(NamedTuple):
    """Lists the rows that stay, if heads keep different numbers of tokens.

    Attributes
    ----------
    rows : ndarray of int64
        The rows of all heads, head after head: first those of row 0 of the batch. They ascend in each head.
    starts : ndarray of int64, shape [B * Hkv + 1]
        Where the rows of each head begin.
    """

    rows: Array
    starts: Array


def kept_count(tokens: int, keep: float | None, count: SupportsIndex | None) -> int:
    """Return how many tokens stay: a count, or a share rounded down, at least 1."""
    if (keep is None) == (count is None):
        given = "neither" if keep is None else "both"
        raise argument_error("keep", "a share of the tokens, or else a count", given)
    if keep is None:
        return integer("count", count, 1, tokens)
    share = finite_number("keep", keep)
    if not 0 < share <= 1:
        raise argument_error("keep", "a share above 0 and at most 1", share)
    return max(1, math.floor(tokens * share + 1e-9))


def best(scores: Array, count: int) -> Array:
    """Return the ascending indices of the `count` largest scores; among equal scores the earlier ones."""
    tokens, scores = scores.shape[-1], np.where(np.isnan(scores), -np.inf, scores)
    if not 0 < count < tokens:
        return np.tile(np.arange(min(count, tokens)), (*scores.shape[:-1], 1))
    least = -np.partition(-scores, count - 1, axis=-1)[..., count - 1 : count]
    chosen, equal = scores > least, scores == least
    chosen |= equal & (np.cumsum(equal, -1) <= count - chosen.sum(-1, keepdims=True))
    return np.nonzero(chosen)[-1].reshape(*scores.shape[:-1], count)


@returns_input_kind
def select(
    scores: Array,
    *,
    keep: float | None = None,
    count: SupportsIndex | None = None,
    budget: str | ArrayLike = "uniform",
    threshold: ArrayLike | None = None,
    first: int = 0,
    last: int = 0,
    attn_mask: Array | None = None,
) -> Array | Kept:
    """Select the rows with the best scores; among equal scores the earlier rows.

    Parameters
    ----------
    scores : ndarray, shape [B, Hkv, S]
    keep : float, optional
        The share of tokens that stay: ``max(1, floor(S * keep))`` for each head.
    count : int, optional
        How many tokens stay, in place of a share.
    budget : str or array_like of int
        ``"uniform"``: the same count for every head. ``"ada"``: the same count on average, divided among the
        heads of a row of the batch by their scores. Or a count for each head, [Hkv] or [B, Hkv], in place of
        `keep`.
    threshold : float or array_like, optional
        Keep every token whose score is at least this, in place of a count; a number, [Hkv] or [B, Hkv].
    first, last : int
        How many of the first and of the last tokens stay whatever their scores.
    attn_mask : ndarray of bool, shape [B, S], optional
        False for padding, which never stays. Shares and counts are of the other tokens of each row of the
        batch. A row whose tokens all score inf, as `scores` does for a row that is too short, stays whole.

    Returns
    -------
    ndarray of int64, shape [B, Hkv, count], or Kept
        Ascending rows of each head; `Kept` if heads may keep different numbers.

    Raises
    ------
    KvkitError
        If an argument is wrong, or a score is NaN.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit import eviction
    >>> eviction.select(np.array([[[1., 0, 1, 1, 0]]]), count=2)
    array([[[0, 2]]])
    """
    scores = scores_array("scores", scores)
    first, last, tokens = integer("first", first, 0), integer("last", last, 0), scores.shape[2]
    if attn_mask is not None:
        limits = {"keep": keep, "count": count, "budget": budget, "threshold": threshold}
        mask = checked_padding(attn_mask, (len(scores), tokens))
        return join_rows([select_row(scores, mask, b, first, last, limits) for b in range(len(scores))])
    scores = with_protected(scores, np.ones(scores.shape, bool), first, last)
    if threshold is not None:
        bound = per_head("threshold", threshold, scores.shape[:2], "fiu")
        staying = scores >= np.minimum(bound, LARGEST_SCORE)[..., None]
        starts = np.append(0, np.cumsum(staying.sum(-1)))
        return Kept(np.nonzero(staying)[2], starts)
    if isinstance(budget, str):
        number = kept_count(tokens, keep, count)
        if first + last > number:
            raise argument_error("keep", f"room for the {first + last} first and last tokens", number)
        if text("budget", budget, ("uniform", "ada")) == "uniform":
            return best(scores, number)
        return take(scores, ada_counts(scores, number))
    if keep is not None or count is not None:
        raise argument_error("budget", "a count for each head, or else keep", "both")
    counts = per_head("budget", budget, scores.shape[:2], "iu").astype(np.int64)
    refuse_first("budget", counts, (counts < 0) | (counts > tokens), f"counts of 0 to {tokens}")
    return take(scores, counts)


def select_row(
    scores: Array, mask: Array, b: int, first: int, last: int, limits: dict[str, Any]
) -> list[Array]:
    """Return the numbers of the tokens that each head of row b keeps, without its padding."""
    real, heads = np.flatnonzero(mask[b]), scores.shape[1]
    own = scores[b : b + 1, :, real]
    if not len(real) or stays_whole(own[0]) or first + last >= len(real):
        return [real] * heads
    of_row = dict(limits)
    for name, kinds in ("budget", "iu"), ("threshold", "fiu"):
        if limits[name] is not None and not isinstance(limits[name], str):
            of_row[name] = per_head(name, limits[name], scores.shape[:2], kinds)[b : b + 1]
    if not isinstance(of_row["budget"], str):
        of_row["budget"] = np.minimum(of_row["budget"], len(real))
    if limits["count"] is not None:
        of_row["count"] = min(integer("count", limits["count"], 1, scores.shape[2]), len(real))
    kept = select(own, first=first, last=last, **of_row)
    rows = np.split(kept.rows, kept.starts[1:-1]) if isinstance(kept, Kept) else list(kept[0])
    return [real[of_head] for of_head in rows]


def join_rows(of_rows: list[list[Array]]) -> Array | Kept:
    """Join what the heads of each row of a batch keep: an array, or `Kept` if they differ in number."""
    heads = [of_head for of_row in of_rows for of_head in of_row]
    counts = [len(of_head) for of_head in heads]
    if len(set(counts)) == 1:
        return np.stack(heads).reshape(len(of_rows), -1, counts[0])
    return Kept(np.concatenate(heads), np.append(0, np.cumsum(counts)))


def with_protected(scores: Array, real: Array, first: int, last: int) -> Array:
    """Rank the first and the last of the `real` tokens above all others: only they score inf.

    `real` is bool [B, Hkv, S], or of a shape that broadcasts; the scores of other tokens stay as they are.
    """
    if not first and not last:
        return scores
    place, count = np.cumsum(real, -1) - 1, real.sum(-1, keepdims=True)
    own = real & ((place < first) | (place >= count - last))
    return np.where(own, np.inf, np.minimum(scores.astype(np.float64), LARGEST_SCORE))


def per_head(name: str, numbers: ArrayLike, shape: tuple[int, ...], kinds: str) -> Array:
    """Return an array [B, Hkv] from one, from [Hkv], or from one number for all heads."""
    array = np.asarray(numbers)
    if array.dtype.kind not in kinds or array.shape not in ((), shape[1:], shape):
        raise argument_error(name, f"numbers of shape {shape[1:]} or {shape}", describe(array))
    if array.dtype.kind == "f":
        refuse_first(name, array, np.isnan(array), "numbers")
    return np.broadcast_to(array, shape)


def take(scores: Array, counts: Array) -> Kept:
    """Return the rows with the best scores of each head; `counts` [B, Hkv] says how many."""
    rows = [best(scores[index], int(counts[index])) for index in np.ndindex(counts.shape)]
    return Kept(np.concatenate(rows), np.append(0, np.cumsum(counts)))


def ada_counts(scores: Array, count: int, safe: float = 0.2) -> Array:
    """Return how many tokens each head keeps if heads keep `count` on average, int64 [B, Hkv].

    Each head keeps its int(count * safe) best tokens; the other tokens are the best of all heads together.
    """
    return shared_counts([scores], count * scores.shape[1], int(count * safe))[0]


def shared_counts(layers: Sequence[Array], total: int, safe: int) -> Array:
    """Return how many tokens each head keeps if the heads of a batch row keep `total` in all, [L, B, Hkv].

    Each head keeps its `safe` best tokens; the other tokens are the best of all heads together.
    """
    batch, heads, _ = layers[0].shape
    counts = np.zeros((len(layers), batch, heads), np.int64)
    lengths = np.repeat([scores.shape[2] for scores in layers], heads)  # of the heads of all layers
    owners = np.repeat(np.arange(len(layers) * heads), lengths)  # the head of each score
    for b in range(batch):
        of_row = [np.array(scores[b], np.float64) for scores in layers]  # copies
        for scores in of_row:
            np.put_along_axis(scores, best(scores, safe), np.inf, -1)
        chosen = best(np.concatenate([scores.ravel() for scores in of_row]), total)
        counts[:, b] = np.bincount(owners[chosen], minlength=len(layers) * heads).reshape(len(layers), heads)
    return counts


def budget_rule(rule: Callable[..., Array]) -> Callable[..., Array]:
    """Decorate a rule of the function `budgets`, NAME_budget."""
    BUDGET_RULES[rule.__name__.removesuffix("_budget")] = rule
    return rule


@budget_rule
def uniform_budget(*, layers: int, tokens: int, keep: float) -> Array:
    """Return the same count for every layer."""
    count = kept_count(integer("tokens", tokens, 1), keep, None)
    return np.full(integer("layers", layers, 1), count, np.int64)


@budget_rule
def pyramid_budget(*, layers: int, tokens: int, keep: float, window: int = 64, beta: float = 20.0) -> Array:
    """Return counts that fall from the first layer to the last, with an unchanged sum (arXiv 2406.02069).

    With total = tokens * keep they fall from 2 total - low to low = total / beta. If low is less than
    `window`, all layers keep `total`.
    """
    layers, window = integer("layers", layers, 1), integer("window", window, 0)
    kept_count(integer("tokens", tokens, 1), keep, None)
    total = tokens * keep
    low = total / finite_number("beta", beta)
    high = 2 * total - low
    if high >= tokens - window:
        high = tokens - window
        low = 2 * total - high
    if not tokens >= high >= low >= window:
        return np.full(layers, max(1, round(total)), np.int64)
    step = (high - low) / max(layers - 1, 1)
    return np.array([round(high - i * step) for i in range(layers)], np.int64)


@budget_rule
def ada_budget(*, scores: Array, keep: float, safe: float = 0.2, attn_mask: Array | None = None) -> Array:
    """Return the counts of the heads of one layer, int64 [B, Hkv] (arXiv 2407.11550)."""
    scores, safe = scores_array("scores", scores), finite_number("safe", safe)
    counts = [
        ada_counts(row, kept_count(row.shape[2], keep, None), safe)
        for (row,) in rows_of_layers([scores], attn_mask)
    ]
    return np.concatenate(counts)


@budget_rule
def global_budget(*, scores: Sequence[Array], keep: float, attn_mask: Array | None = None) -> Array:
    """Return the counts of heads if all layers have one threshold, [L, B, Hkv] (arXiv 2505.23416)."""
    layers = [scores_array(f"scores[{i}]", each) for i, each in enumerate(scores)]
    if len({layer.shape[:2] for layer in layers}) != 1:
        shapes = [layer.shape[:2] for layer in layers]
        raise argument_error("scores", "layers of one batch size and one number of heads", shapes)
    counts = []
    for row in rows_of_layers(layers, attn_mask):
        total = sum(layer.shape[1] * kept_count(layer.shape[2], keep, None) for layer in row)
        counts.append(shared_counts(row, total, 0))
    return np.concatenate(counts, 1)


def rows_of_layers(layers: Sequence[Array], attn_mask: Array | None) -> list[list[Array]]:
    """Return the scores of each row of the batch in all layers, [1, Hkv, tokens] each, without padding."""
    masks = [np.ones((len(layer), layer.shape[2]), bool) for layer in layers]
    if attn_mask is not None:
        masks = [checked_padding(attn_mask, mask.shape) for mask in masks]
    return [
        [layer[b : b + 1, :, mask[b]] for layer, mask in zip(layers, masks, strict=True)]
        for b in range(len(layers[0]))
    ]


@budget_rule
def duo_budget(*, table: ArrayLike, tokens: int, first: int = 128, last: int = 256) -> Array:
    """Return the counts of heads [L, Hkv]: all tokens where `table` is True, first + last elsewhere.

    Call `select` with the same `first` and `last` (arXiv 2410.10819).
    """
    retrieves, tokens = np.asarray(table), integer("tokens", tokens, 1)
    if retrieves.dtype != np.bool_ or retrieves.ndim != 2:
        raise argument_error("table", "bool [layers, Hkv], True for retrieval heads", describe(retrieves))
    return np.where(retrieves, tokens, min(tokens, integer("first", first, 0) + integer("last", last, 0)))


def budgets(kind: str, **options: Any) -> Array:
    """Return how many tokens each layer, or each head, keeps.

    Parameters
    ----------
    kind : str
        ``"uniform"`` and ``"pyramid"`` divide the tokens among layers; ``"ada"`` among the heads of a layer
        and ``"global"`` among the heads of all layers, by scores; ``"duo"`` by a table of heads.
    **options
        ``uniform``: layers, tokens, keep. ``pyramid``: these, window (64) and beta (20). ``ada``: scores
        [B, Hkv, S], keep, safe (0.2), attn_mask. ``global``: scores, one array for each layer, keep,
        attn_mask. ``duo``: table, bool [L, Hkv], tokens, first (128), last (256). With a padding mask,
        bool [B, S], shares are of the tokens of each row of the batch that are no padding.

        The last layer of a pyramid keeps `window` tokens or more. Where it cannot, all layers keep the same
        number, as in kvpress: by default if `keep` is below one half and ``tokens * keep`` below 1,280.

    Returns
    -------
    ndarray of int64
        [L], [B, Hkv], [L, B, Hkv] or [L, Hkv]. `select` takes the part of a layer.

    Examples
    --------
    >>> from kvkit import eviction
    >>> eviction.budgets("pyramid", layers=4, tokens=1000, keep=0.5, window=64)
    array([936, 645, 355,  64])
    """
    function = BUDGET_RULES[text("kind", kind, BUDGET_RULES)]
    try:
        return function(**options)
    except TypeError as error:
        found = str(error).partition("() ")[2].removeprefix("got ") or error
        raise argument_error(f"budgets({kind!r})", "the options of this kind", found) from None


def chunks(scores: Array, length: int = 20, *, keep: float, attn_mask: Array | None = None) -> Array | Kept:
    """Select whole chunks of neighbouring tokens, the same for all heads (arXiv 2502.00299).

    Parameters
    ----------
    scores : ndarray, shape [B, Hkv, S]
    length : int
        The number of tokens in a chunk; the last chunk may be shorter.
    keep : float
        The share of chunks that stay, at least one chunk: those with the best mean scores.
    attn_mask : ndarray of bool, shape [B, S], optional
        False for padding, which never stays. The chunks of a row begin at its first token.

    Returns
    -------
    ndarray of int64, shape [B, Hkv, count], or Kept
        As `select`; `Kept` if some rows of the batch keep a shorter last chunk and others do not.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit import eviction
    >>> eviction.chunks(np.array([[[1., 0, 0, 3, 0, 1]]]), 2, keep=0.4)
    array([[[2, 3]]])
    """
    scores, length = scores_array("scores", scores), integer("length", length, 1)
    batch, heads, tokens = scores.shape
    kept_count(tokens, keep, None)
    mask = np.ones((batch, tokens), bool)
    if attn_mask is not None:
        mask = checked_padding(attn_mask, mask.shape)
    means = scores.sum(1, dtype=np.float64)
    rows = []
    for row, real in zip(means, mask, strict=True):
        own = np.flatnonzero(real)
        if len(own):
            starts = np.arange(0, len(own), length)
            sizes = np.minimum(starts + length, len(own)) - starts
            of_chunks = np.add.reduceat(row[own], starts) / sizes
            chosen = best(of_chunks, max(1, int(len(starts) * keep)))
            own = own[np.isin(np.arange(len(own)) // length, chosen)]
        rows.append([own] * heads)
    return join_rows(rows)
