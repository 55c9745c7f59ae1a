"""Score tokens, pages or channels by the attention of the last queries."""

import numpy as np

from kvkit.checks.values import finite_number, integer, text
from kvkit.eviction.arithmetic import checked_window, mean_of_groups, norms, pooled, protected, window_sums
from kvkit.eviction.inputs import Inputs, softmax_in_place
from kvkit.eviction.products import product
from kvkit.eviction.scorers import scorer
from kvkit.typed import Array

SEARCHED = 1024  # keys that are searched for at once, among 1/16 as many, and then among up to half as many


@scorer("queries or weights")
def snapkv(
    inputs: Inputs, *, window: int = 64, kernel: int = 5, pool: str = "avg", reduce: str = "mean"
) -> Array:
    """score = mean over the group of pool(mean of the window's weights); the window stays (arXiv 2404.14469).

    The window is the last `window` tokens. The paper's code has `reduce` "sum", a window of 32 and `pool`
    "avg" or "max".
    """
    window, kernel = checked_window(inputs, window), integer("kernel", kernel, 1)
    text("pool", pool, ("avg", "max")), text("reduce", reduce, ("mean", "sum"))
    sums = window_sums(inputs, window)[..., :-window]
    sums = sums / window if reduce == "mean" else sums
    return protected(mean_of_groups(pooled(sums, kernel, pool), inputs.heads), last=window)


@scorer("queries or weights")
def tova(inputs: Inputs) -> Array:
    """score = weight of the last query, mean over all heads; the last token stays (arXiv 2401.06104)."""
    checked_window(inputs, 1)
    means = window_sums(inputs, 1)[..., :-1].mean(1, keepdims=True)
    return protected(np.repeat(means, inputs.heads, 1), last=1)


@scorer("queries")
def finch(inputs: Inputs, *, window: int) -> Array:
    """score = mean of weight * (number of keys before the query); the window stays (arXiv 2408.00167)."""
    window = checked_window(inputs, window)
    before = inputs.tokens - window + np.arange(window)
    sums = window_sums(inputs, window, before)[..., :-window] / window
    return protected(mean_of_groups(sums, inputs.heads), last=window)


@scorer("queries")
def rkv(
    inputs: Inputs, *, window: int = 8, kernel: int = 7, mix: float = 0.07, threshold: float = 0.5
) -> Array:
    """score = mix * attention - (1 - mix) * redundancy; the window stays (arXiv 2505.24133).

    attention = maximum over `kernel` neighbours of mean over the window of softmax(max over the group of
    q k / sqrt(D)), over earlier keys only. redundancy = softmax of the mean cosine with all keys; the last
    key whose cosine is above `threshold` counts as 0.
    """
    window, kernel = checked_window(inputs, window), integer("kernel", kernel, 1)
    mix, threshold = finite_number("mix", mix), finite_number("threshold", threshold)
    queries, earlier = inputs.last_queries(window), inputs.tokens - window
    result = np.empty((*inputs.keys.shape[:2], earlier))
    for b, h in np.ndindex(inputs.keys.shape[:2]):
        products = np.full((window, earlier), -np.inf, np.float32)
        for query in queries[b, h]:
            np.maximum(products, product(query, inputs.keys[b, h, :earlier].T), out=products)
        weights = softmax_in_place(products * np.float32(queries.shape[-1] ** -0.5)).mean(0, dtype=np.float64)
        redundancy = softmax_in_place(mean_cosines(inputs.keys[b, h], threshold))[:earlier]
        result[b, h] = mix * pooled(weights, kernel, "max") - (1 - mix) * redundancy
    return protected(result, last=window)


def mean_cosines(keys: Array, threshold: float) -> Array:
    """Return the mean cosine of each key [S, D] with all keys as `rkv` defines it, float32 [S].

    With u = k / |k|, the cosines of key i sum to u_i (sum of u). Without are u_i u_i, and u_i u_j for every
    key j whose last alike key is i.
    """
    units = keys / (norms(keys) + 1e-8)[:, None].astype(np.float32)
    last = last_alike(units, threshold)
    sums = np.einsum("sd,d->s", units, units.sum(0, dtype=np.float64))
    sums -= np.square(units).sum(1, dtype=np.float64)
    removed = np.einsum("sd,sd->s", units, units[last]) * (last != np.arange(len(keys)))
    return ((sums - np.bincount(last, removed, len(keys))) / len(keys)).astype(np.float32)


def last_alike(units: Array, threshold: float) -> Array:
    """Return for each unit vector [S, D] the last one whose product with it is above a threshold, or 0.

    They are searched from the end, where most have one, in blocks that grow.
    """
    tokens, size = len(units), SEARCHED // 16
    last, rows, end = np.zeros(tokens, np.int64), np.arange(tokens), tokens
    while end > 0 and len(rows):
        begin, open_rows = max(end - size, 0), []
        block = np.ascontiguousarray(units[begin:end][::-1].T)
        for first in range(0, len(rows), SEARCHED):
            own = rows[first : first + SEARCHED]
            alike = product(units[own], block) > threshold  # [rows, keys], from the last key on
            inside = np.flatnonzero((own >= begin) & (own < end))
            alike[inside, end - 1 - own[inside]] = threshold < 0  # with itself: its cosine counts as 0
            column = alike.argmax(1)
            found = alike[np.arange(len(own)), column]
            last[own[found]] = end - 1 - column[found]
            open_rows.append(own[~found])
        rows, end, size = np.concatenate(open_rows), begin, min(2 * size, SEARCHED // 2)
    return last


@scorer("queries", scored="pages")
def quest(inputs: Inputs, *, page: int = 16) -> Array:
    """score of a page = sum over channels of max(q max k, q min k) >= q k, q the last query.

    It evicts nothing: attention reads the pages with the largest bounds [B, Hq, pages] (arXiv 2406.10774).
    """
    page = integer("page", page, 1)
    starts = np.arange(0, inputs.tokens, page)
    query = inputs.last_queries(1)  # [B, Hkv, G, 1, D]
    keys = (
        inputs.keys if inputs.real is None else np.where(inputs.real[:, None, :, None], inputs.keys, np.nan)
    )
    high, low = (rule.reduceat(keys, starts, axis=2)[:, :, None] for rule in (np.fmax, np.fmin))
    bounds = np.maximum(query * high, query * low).sum(-1, dtype=np.float64)  # [B, Hkv, G, pages]
    bounds = np.where(np.isnan(bounds), -np.inf, bounds)  # of pages with padding alone
    return bounds.reshape(len(bounds), -1, len(starts))


@scorer("queries", scored="channels")
def think(inputs: Inputs, *, window: int = 32) -> Array:
    """score of a channel = mean of q^2 over the window * mean of k^2, [B, Hkv, D] (arXiv 2407.21018).

    It evicts no tokens: a format may leave out the channels with the smallest scores.
    """
    queries = inputs.last_queries(integer("window", window, 1))
    keys = np.square(inputs.keys).mean(2, dtype=np.float64)  # [B, Hkv, D]
    return np.square(queries).mean((2, 3), dtype=np.float64) * keys
