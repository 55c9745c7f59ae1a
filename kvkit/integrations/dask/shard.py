"""Keep a shard of a cache on a worker: a `PagedCache`, and the positions of its tokens."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np

import kvkit.cache
from kvkit.errors import KvkitError, argument_error
from kvkit.integrations.dask.checks import AttendCall
from kvkit.integrations.dask.partial_attention import (
    combine_masks,
    kernel_threads,
    position_mask,
    queries_per_mask,
    slice_mask,
    worker_threads,
)
from kvkit.integrations.dask.placement import shard_positions
from kvkit.typed import Array

PROTOCOL = 5  # of pickle, the same on all machines


class ShardActor:
    """Calls methods of a `Shard`, and makes it in the first call. Calls and results are pickled bytes."""

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments
        self._shard: Shard | None = None

    def answer(self, message: bytes) -> bytes:
        """Call a method; return its result, or a `KvkitError` in place of the error that it raised."""
        method, *arguments = pickle.loads(message)
        result: Any
        try:
            self._shard = self._shard or Shard(*self._arguments)
            result = getattr(self._shard, method)(*arguments)
        except KvkitError as error:
            result = error
        except Exception as error:
            reason = f"{type(error).__name__} ({error})"
            result = argument_error(f"shard {self._arguments[0]}", f"{method} to succeed", reason)
        return pickle.dumps(result, PROTOCOL)


class Shard:
    """Holds one of ``shards`` parts of a cache: some tokens, or with ``interleave`` 0 some key heads."""

    def __init__(self, index: int, shards: int, interleave: int, sizes: dict[str, Any]) -> None:
        self.index, self.shards, self.interleave = index, shards, interleave
        self.cache: Any = kvkit.cache.PagedCache(**sizes)
        self.seconds = 0.0
        self._threads = worker_threads()
        self._positions: Array = np.arange(0)

    def about(self) -> dict[str, Any]:
        """Return the numbers of tokens and sequences, the process, and the seconds spent in attention."""
        layer = self.cache.layers[0]
        sizes = {"tokens": layer.get_seq_length(), "rows": layer.batch_size}
        return sizes | {"process": os.getpid(), "seconds": self.seconds}

    def step(
        self, layer_idx: int, new: tuple[Array, Array] | None, length: int, call: AttendCall | None
    ) -> tuple[Array, Array] | None:
        """Append new keys and values to a layer, then attend; the context has ``length`` tokens."""
        layer = self.cache.layers[layer_idx]
        with kernel_threads(self._threads):
            if new is not None:
                layer.update(*new)
            if call is None or not layer.get_seq_length():
                return None
            begin = time.perf_counter()
            states = self._attend(layer, length, call)
            self.seconds += time.perf_counter() - begin
            return states

    def _attend(self, layer: Any, length: int, call: AttendCall) -> tuple[Array, Array]:
        """Return outputs and lse of attention to the tokens of this shard."""
        query, mask = call.query, call.mask
        options = {"softmax_scale": call.softmax_scale, "softcap": call.softcap, "sinks": call.sinks}
        options |= {"return_lse": True}
        if mask is not None and mask.ndim == 2:
            mask = mask[:, None, None]
        has_all_tokens = not self.interleave
        if has_all_tokens and call.slopes is None:
            return layer.attend(query, mask, window=call.window, **options)
        # The layer counts its rows as positions. Where a position matters, a mask by true positions decides.
        tokens = query.shape[2]
        needs_positions = tokens > 1 or call.slopes is not None or call.window != (-1, -1)
        keys = self._positions_below(length) if needs_positions else np.arange(0)
        queries_at_once = queries_per_mask(len(keys), 1 if call.slopes is None else len(call.slopes))
        states = []
        for begin in range(0, tokens, queries_at_once):
            rows = slice(begin, min(begin + queries_at_once, tokens))
            bias = slice_mask(mask, rows, slice(None))
            if needs_positions:
                queries = np.arange(rows.start, rows.stop) + length - tokens
                bias = combine_masks(position_mask(queries, keys, True, call.window, call.slopes), bias)
            if bias is not None:
                bias = bias[(None,) * (4 - bias.ndim)]
            states.append(layer.attend(query[:, :, rows], bias, is_causal=False, **options))
        if len(states) == 1:
            return states[0]
        outputs, lses = zip(*states, strict=True)
        return np.concatenate(outputs, 2), np.concatenate(lses, 2)

    def _positions_below(self, length: int) -> Array:
        """Return the positions of this shard's tokens that are below ``length``."""
        if not len(self._positions) or self._positions[-1] < length:
            ahead = 2 * length  # enough for many later steps
            self._positions = shard_positions(0, ahead, self.index, self.shards, self.interleave)
        return self._positions[: np.searchsorted(self._positions, length)]

    def crop(self, length: int) -> None:
        """Drop an incomplete step, and all tokens from ``length`` on."""
        self.cache.crop(0)  # drops the tokens that not all layers have
        surplus = self.about()["tokens"] - length
        if not length:
            self.cache.reset()  # the next tokens may have another batch size
        elif surplus:
            self.cache.crop(-surplus)

    def fork(self, indices: Array) -> None:
        """Continue with these sequences of the batch."""
        self.cache.select(indices)

    def save(self, path: str) -> None:
        """Write the shard into a file."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self.cache.save(path)

    def load(self, path: str) -> int:
        """Read the shard from a file; return its number of tokens."""
        cache, own = kvkit.cache.load(path), self.cache.describe()
        loaded = cache.describe() if isinstance(cache, kvkit.cache.PagedCache) else {}
        for name in own.keys() - {"salt"}:
            if loaded.get(name) != own[name]:
                raise argument_error(path, f"a shard whose {name} is {own[name]}", loaded.get(name))
        self.cache = cache
        return self.about()["tokens"]
