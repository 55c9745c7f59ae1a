"""What a worker holds of a sharded cache: a `PagedCache`, and which positions its tokens have."""

import os
from pathlib import Path
from typing import Any

import numpy as np

import kvkit.cache
from kvkit.checks.words import wrong
from kvkit.errors import KvkitError
from kvkit.integrations.dask import parts


def owned(start, stop, shard, shards, interleave):
    """Which positions of [start, stop) a shard has, of ``interleave`` neighbours each."""
    positions = np.arange(start, stop)
    return positions[positions // interleave % shards == shard]


class Shard:
    """One of `shards` of a cache. With ``interleave`` 0 it has all tokens, of heads of its own."""

    def __init__(self, index, shards, interleave, sizes, threads=None):
        self.index, self.shards, self.interleave = index, shards, interleave
        self.threads = threads
        self.cache: Any = kvkit.cache.PagedCache(**sizes)
        self._positions = np.arange(0)

    def answer(self, method, arguments):
        """(What a method returns, None), or (None, a KvkitError): a shard that answers is not lost."""
        try:
            return getattr(self, method)(*arguments), None
        except KvkitError as error:
            return None, error
        except Exception as error:
            return None, wrong(f"shard {self.index}", f"to {method}", f"{type(error).__name__} ({error})")

    def about(self):
        """The tokens and rows that it has, and its process."""
        layer = self.cache.layers[0]
        return {"tokens": layer.get_seq_length(), "rows": layer.batch_size, "process": os.getpid()}

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
        if mask is not None and mask.ndim == 2:
            mask = mask[:, None, None]
        if not self.interleave and slopes is None:
            return layer.attend(query, mask, window=window, return_lse=True, **options)
        tokens = query.shape[2]
        hidden = tokens > 1 or slopes is not None or window != (-1, -1)
        keys = self._keys(length) if hidden else ()
        step = parts.rows_masked(len(keys), 1 if slopes is None else len(slopes))
        found = []
        for begin in range(0, tokens, step):
            rows = slice(begin, min(begin + step, tokens))
            bias = parts.cut(mask, rows, slice(None))
            if hidden:
                queries = np.arange(rows.start, rows.stop) + length - tokens
                bias = parts.both(parts.bias(queries, keys, True, window, slopes), bias)
            if bias is not None:
                bias = bias[(None,) * (4 - bias.ndim)]
            found.append(layer.attend(query[:, :, rows], bias, is_causal=False, return_lse=True, **options))
        if len(found) == 1:
            return found[0]
        return tuple(np.concatenate(side, 2) for side in zip(*found, strict=True))

    def _keys(self, length):
        """The positions of the tokens that it has of so many."""
        if not self.interleave:
            return np.arange(length)
        if not len(self._positions) or self._positions[-1] < length:
            self._positions = owned(0, 2 * length, self.index, self.shards, self.interleave)
        return self._positions[: np.searchsorted(self._positions, length)]

    def crop(self, length):
        """Forget a step that some layers have not seen, and all tokens from `length` on."""
        self.cache.crop(0)
        more = self.about()["tokens"] - length
        if not length:
            self.cache.reset()  # the next tokens may be of as many rows as the other shards have then
        elif more:
            self.cache.crop(-more)

    def fork(self, indices):
        self.cache.select(indices)

    def save(self, path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self.cache.save(path)

    def load(self, path):
        self.cache = kvkit.cache.load(path)
        return self.about()["tokens"]
