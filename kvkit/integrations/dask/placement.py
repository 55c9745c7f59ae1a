"""Place the tokens and heads of a cache on shards."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvkit.errors import argument_error
from kvkit.integrations.dask.checks import AttendCall
from kvkit.typed import Array


class Placement:
    """Places tokens on ``count`` shards in turn, ``interleave`` at a time; with 0 places heads instead.

    13 tokens on 3 shards, if ``interleave`` is 2::

        position    0  1 | 2  3 | 4  5 | 6  7 | 8  9 | 10 11 | 12
        shard         0  |   1  |   2  |   0  |   1  |   2   |  0       token_counts(13) = [5, 4, 4]
    """

    def __init__(self, count: int, interleave: int, heads: int) -> None:
        self.count, self.interleave, self._num_kv_heads = count, interleave, heads
        if interleave:
            self.heads = [slice(0, heads)] * count  # the key heads of each shard
            return
        if heads < count:
            raise argument_error("num_kv_heads", f"at least {count}, one a shard", heads)
        self.heads = [slice(heads * i // count, heads * (i + 1) // count) for i in range(count)]

    def token_counts(self, length: int) -> list[int]:
        """Return how many of the first ``length`` tokens each shard has."""
        interleave = self.interleave
        if not interleave:
            return [length] * self.count
        rounds, rest = divmod(length, interleave * self.count)  # in each full round, `interleave` a shard
        rests = (min(max(rest - i * interleave, 0), interleave) for i in range(self.count))
        return [rounds * interleave + own for own in rests]

    def token_indices(self, start: int, stop: int) -> list[Any]:
        """Return for each shard the indices of its tokens in [start, stop), or None if it has none there."""
        if not self.interleave:
            return [slice(None)] * self.count
        if start // self.interleave == (stop - 1) // self.interleave:  # one shard has them all
            owner = start // self.interleave % self.count
            return [slice(None) if i == owner else None for i in range(self.count)]
        positions = (shard_positions(start, stop, i, self.count, self.interleave) for i in range(self.count))
        return [own - start if own.size else None for own in positions]

    def shard_call(self, shard: int, length: int, call: AttendCall) -> AttendCall:
        """Return the part of a call of attention over ``length`` tokens that a shard computes."""
        mask = call.mask
        if self.interleave:
            if mask is not None:
                mask = mask[..., shard_positions(0, length, shard, self.count, self.interleave)]
            return call._replace(mask=mask, sinks=None if shard else call.sinks)  # sinks count once
        heads, group = self.heads[shard], call.query.shape[1] // self._num_kv_heads
        query_heads = slice(heads.start * group, heads.stop * group)
        if mask is not None and mask.ndim == 4 and mask.shape[1] > 1:
            mask = mask[:, query_heads]
        slopes, sinks = (None if array is None else array[query_heads] for array in (call.slopes, call.sinks))
        return call._replace(query=call.query[:, query_heads], mask=mask, slopes=slopes, sinks=sinks)


def shard_positions(start: int, stop: int, shard: int, shards: int, interleave: int) -> Array:
    """Return the positions in [start, stop) that a shard has; if ``interleave`` is 0 it has all."""
    positions = np.arange(start, stop)
    return positions[positions // interleave % shards == shard] if interleave else positions
