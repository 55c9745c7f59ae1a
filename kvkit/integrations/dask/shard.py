"""What a worker holds of a sharded cache: a `PagedCache`, and which positions its tokens have."""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

import kvkit.cache
from kvkit.checks.words import wrong
from kvkit.errors import KvkitError
from kvkit.integrations.dask import parts
from kvkit.integrations.dask.division import owned
from kvkit.integrations.dask.messages import Receiver, Sender


class Served:
    """A shard that is asked by messages, the first of which makes it."""

    def __init__(self, *arguments):
        self._arguments, self._shard = arguments, None
        self._receiver, self._sender = Receiver(), Sender()

    def answer(self, message):
        """(A KvkitError or None, what a method returns): who answers is not lost. Arrays go apart."""
        arrays, (method, *others), numbers, name = self._receiver.read(message)
        error = found = None
        try:
            self._shard = self._shard or Shard(*self._arguments)
            given = (*numbers, *arrays) if arrays else ()
            found = getattr(self._shard, method)(*given, *others)
        except KvkitError as refused:
            error = refused
        except Exception as failed:
            what = f"{type(failed).__name__} ({failed})"
            error = wrong(f"shard {self._arguments[0]}", f"to {method}", what)
        if isinstance(found, tuple):  # of arrays, whose shapes depend on those of the message
            return self._sender.message(found, (None, None), name=name)
        return self._sender.message((), (error, found))


class Shard:
    """One of `shards` of a cache. With ``interleave`` 0 it has all tokens, of heads of its own."""

    def __init__(self, index, shards, interleave, sizes):
        self.index, self.shards, self.interleave = index, shards, interleave
        self.cache: Any = kvkit.cache.PagedCache(**sizes)
        self.seconds = 0.0
        self._threads = parts.threads_of_worker()
        self._positions = np.arange(0)

    def about(self):
        """The tokens and rows that it has, its process, and the seconds that attention has taken."""
        layer = self.cache.layers[0]
        sizes = {"tokens": layer.get_seq_length(), "rows": layer.batch_size}
        return sizes | {"process": os.getpid(), "seconds": self.seconds}

    def step(self, layer_idx, length, key, value, query, mask, slopes, sinks, *options):
        """Append tokens to a layer, if there are any, and attend, if a query is given.

        The queries are of the last tokens of the whole context, which has a length.
        """
        layer = self.cache.layers[layer_idx]
        with parts.threads(self._threads):
            if key is not None:
                layer.update(key, value)
            if query is None or not layer.get_seq_length():
                return None
            begin = time.perf_counter()
            found = self._attend(layer, query, length, mask, slopes, sinks, *options)
            self.seconds += time.perf_counter() - begin
            return found

    def _attend(self, layer, query, length, mask, slopes, sinks, window, softmax_scale, softcap):
        options = {"softmax_scale": softmax_scale, "softcap": softcap, "sinks": sinks, "return_lse": True}
        if mask is not None and mask.ndim == 2:
            mask = mask[:, None, None]
        if not self.interleave and slopes is None:
            return layer.attend(query, mask, window=window, **options)
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
            found.append(layer.attend(query[:, :, rows], bias, is_causal=False, **options))
        if len(found) == 1:
            return found[0]
        return tuple(np.concatenate(side, 2) for side in zip(*found, strict=True))

    def _keys(self, length):
        """The positions of the tokens that it has of so many."""
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
