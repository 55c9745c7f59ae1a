"""What a worker holds of a sharded cache: a `PagedCache`, and which positions its tokens have."""

import os
from pathlib import Path

import numpy as np

import kvkit.cache
from kvkit.integrations.dask import parts


def owned(start, stop, shard, shards, interleave):
    """Which positions of [start, stop) a shard has, of ``interleave`` neighbours each."""
    positions = np.arange(start, stop)
    return positions[positions // interleave % shards == shard]


class Shard:
    """One of `shards` of a cache. With ``interleave`` 0 it has all tokens, of heads of its own."""

    def __init__(self, index, shards, interleave, sizes, path=None, threads=None):
        self.index, self.shards, self.interleave = index, shards, interleave
        self.threads = threads
        self.cache = kvkit.cache.load(path) if path else kvkit.cache.PagedCache(**sizes)

    def about(self):
        """The tokens and rows that it has, and its process."""
        layer = self.cache.layers[0]
        return {"length": layer.get_seq_length(), "batch": layer.batch_size, "process": os.getpid()}

    def step(self, layer_idx, key, value, query, length, options):
        """Append tokens to a layer, if there are any, and attend with the last ones of `length`."""
        layer = self.cache.layers[layer_idx]
        with parts.threads(self.threads or parts.threads_of_worker()):
            if key is not None:
                layer.update(key, value)
            if query is not None and layer.get_seq_length():
                return self._attend(layer, query, length, **options)
        return None

    def _attend(self, layer, query, length, mask, slopes, window, **options):
        tokens = query.shape[2]
        if mask is not None and mask.ndim == 2:
            mask = mask[:, None, None]
        if not self.interleave and slopes is None:
            return layer.attend(query, mask, window=window, return_lse=True, **options)
        keys = np.arange(length)
        if self.interleave:
            keys = owned(0, length, self.index, self.shards, self.interleave)
        hidden = None
        if tokens > 1 or slopes is not None or window != (-1, -1):
            hidden = parts.bias(np.arange(length - tokens, length), keys, True, window, slopes)
        hidden = parts.both(hidden, mask)
        if hidden is not None:
            hidden = hidden[(None,) * (4 - hidden.ndim)]
        return layer.attend(query, hidden, is_causal=False, return_lse=True, **options)

    def crop(self, length):
        """Forget a step that some layers have not seen, and all tokens from `length` on."""
        self.cache.crop(0)
        more = self.about()["length"] - length
        if more:
            self.cache.crop(-more)

    def fork(self, indices):
        self.cache.select(indices)

    def save(self, path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self.cache.save(path)
