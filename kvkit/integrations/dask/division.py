"""Who has what of a cache in shards: tokens in turn, or heads."""

import numpy as np

from kvkit.checks.words import wrong


class Division:
    """Of `count` shards, the tokens of each: `interleave` in a row; with 0 all, of heads of its own."""

    def __init__(self, count, interleave, heads):
        self.count, self.interleave = count, interleave
        if interleave:
            self.heads = [slice(0, heads)] * count
            return
        if heads < count:
            raise wrong("num_kv_heads", f"at least {count}, one a shard", heads)
        self.heads = [slice(heads * i // count, heads * (i + 1) // count) for i in range(count)]

    def lengths(self, length):
        """How many of the first tokens each shard has."""
        each = self.interleave
        if not each:
            return [length] * self.count
        turns, rest = divmod(length, each * self.count)
        return [turns * each + min(max(rest - i * each, 0), each) for i in range(self.count)]

    def places(self, start, stop):
        """For each shard what indexes its tokens among those of [start, stop); None if there are none."""
        if not self.interleave:
            return [slice(None)] * self.count
        if start // self.interleave == (stop - 1) // self.interleave:
            owner = start // self.interleave % self.count
            return [slice(None) if i == owner else None for i in range(self.count)]
        own = (owned(start, stop, i, self.count, self.interleave) - start for i in range(self.count))
        return [at if at.size else None for at in own]

    def of_query(self, shard, length, query, mask, slopes, sinks):
        """What a shard gets of a query's arrays, the context of which is so long."""
        if self.interleave:
            if mask is not None:
                mask = mask[..., owned(0, length, shard, self.count, self.interleave)]
            return query, mask, slopes, None if shard else sinks  # sinks count once
        heads, group = self.heads[shard], query.shape[1] // self.heads[-1].stop
        own = slice(heads.start * group, heads.stop * group)
        if mask is not None and mask.ndim == 4 and mask.shape[1] > 1:
            mask = mask[:, own]
        slopes, sinks = (None if each is None else each[own] for each in (slopes, sinks))
        return query[:, own], mask, slopes, sinks


def owned(start, stop, shard, shards, interleave):
    """Which positions of [start, stop) a shard has; all, if interleave is 0."""
    positions = np.arange(start, stop)
    return positions[positions // interleave % shards == shard] if interleave else positions
