"""Evict tokens during a generation: heavy hitters, and compression at intervals."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvkit.checks.values import integer
from kvkit.errors import argument_error, describe
from kvkit.eviction.arithmetic import mean_of_groups
from kvkit.eviction.inputs import finite_floats
from kvkit.eviction.padding import checked_padding
from kvkit.eviction.selection import best
from kvkit.typed import Array


class H2O:
    """Keeps heavy hitters, the tokens with the largest sums of weights, and recent tokens (arXiv 2306.14048).

    Each key head keeps tokens of its own.

    Parameters
    ----------
    heavy, recent : int
        How many tokens stay because of their weights, and how many of the last tokens stay.
    num_kv_heads : int
        The number of key heads, a divisor of the query heads; 0: as many as query heads.

    Attributes
    ----------
    positions : ndarray of int64, shape [B, Hkv, stored]
        The tokens that stay; None before the first call.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.eviction import H2O
    >>> h2o = H2O(heavy=1, recent=1)
    >>> for weights in ([1.], [.8, .2], [.7, .1, .2]):
    ...     dropped = h2o.add(np.array([[weights]], np.float32))
    >>> dropped, h2o.positions
    (array([[[1]]]), array([[[0, 2]]]))
    """

    positions: Any = None

    def __init__(self, heavy: int = 4, recent: int = 512, num_kv_heads: int = 0) -> None:
        self.heavy, self.recent = integer("heavy", heavy, 0), integer("recent", recent, 1)
        self.num_kv_heads = integer("num_kv_heads", num_kv_heads, 0)
        self._sums: Any = None  # of the weights of each stored token, float64 [B, Hkv, stored]
        self._next = 0  # the next token's position

    def add(self, weights: Array, attn_mask: Array | None = None) -> Array:
        """Add the weights of new queries; return which tokens to drop.

        Parameters
        ----------
        weights : ndarray, shape [B, Hq, stored] or [B, Hq, q, stored]
            The weights of each query, or their sums over queries. The stored tokens are those that the last
            call kept, in order, then the new ones.
        attn_mask : ndarray of bool, shape [B, n], optional
            False for padding, with a column for each position so far. Padding is no heavy hitter while there
            are other tokens.

        Returns
        -------
        ndarray of int64, shape [B, Hkv, dropped]
            The positions to drop, ascending; none while there is room.
        """
        weights = finite_floats("weights", weights, 3 if np.ndim(weights) == 3 else 4)
        added = weights if weights.ndim == 3 else weights.sum(2, dtype=np.float64)
        batch, query_heads, stored = added.shape
        heads = self.num_kv_heads or query_heads
        old = np.empty((batch, heads, 0), np.int64) if self.positions is None else self.positions
        fits = query_heads and not query_heads % heads and old.shape[:2] == (batch, heads)
        if not fits or stored < old.shape[2]:
            wanted = f"[{len(old)}, a multiple of {heads}, {old.shape[2]} stored tokens and new ones]"
            raise argument_error("weights", wanted, describe(weights))
        new = np.arange(self._next, self._next + stored - old.shape[2])
        positions = np.concatenate((old, np.broadcast_to(new, (batch, heads, len(new)))), -1)
        sums = mean_of_groups(added, heads)
        if self._sums is not None:
            sums[..., : old.shape[2]] += self._sums
        dropped = max(0, stored - self.heavy - self.recent)
        rows = np.broadcast_to(np.arange(stored), positions.shape)  # those that stay
        if dropped:
            ranked = sums
            if attn_mask is not None:
                mask = checked_padding(attn_mask, (batch, self._next + len(new)), "all positions")
                ranked = np.where(mask[np.arange(batch)[:, None, None], positions], sums, -np.inf)
            heavy = best(ranked[..., : -self.recent], self.heavy)
            rows = np.concatenate((heavy, rows[..., -self.recent :]), -1)
        self._next += len(new)
        leaves = np.ones(positions.shape, bool)
        np.put_along_axis(leaves, rows, False, -1)
        self.positions = np.take_along_axis(positions, rows, -1)
        self._sums = np.take_along_axis(sums, rows, -1)
        return positions[leaves].reshape(batch, heads, dropped)


class Decoding:
    """Compresses a cache every `interval` steps of a generation."""

    def __init__(self, scorer: Any, interval: int = 512, target: int = 2048, **options: Any) -> None:
        self.scorer, self.options = scorer, options
        self.interval, self.target = integer("interval", interval, 1), integer("target", target, 1)
        self.steps = 0

    def __call__(self, cache: Any, queries: Any = None, attn_mask: Array | None = None) -> Any:
        """Count a step. Every `interval` steps compress the cache to `target` tokens; return the report.

        `attn_mask` is that of ``cache.compress``: False for padding, by position.
        """
        self.steps += 1
        if self.steps % self.interval or max(layer.stored_tokens for layer in cache.layers) <= self.target:
            return None
        arguments = {"count": self.target, "queries": queries, "attn_mask": attn_mask}
        return cache.compress(self.scorer, **arguments | self.options)


def decoding(scorer: Any, interval: int = 512, target: int = 2048, **options: Any) -> Decoding:
    """Return a function that compresses a cache when it is called after each step.

    Parameters
    ----------
    scorer : str or callable
        As in ``cache.compress``.
    interval : int
        The number of steps between compressions.
    target : int
        How many tokens a compression keeps.
    **options
        Other arguments of ``cache.compress``.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit import eviction
    >>> from kvkit.cache import DynamicCache
    >>> cache, token = DynamicCache(), np.ones((1, 1, 1, 4), np.float32)
    >>> evict = eviction.decoding("knorm", interval=4, target=2)
    >>> for _ in range(8):
    ...     keys, values = cache.update(token, token, 0)
    ...     report = evict(cache)
    >>> report.tokens
    [2]
    """
    return Decoding(scorer, interval, target, **options)
