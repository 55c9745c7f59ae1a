"""Define `ShardedCache`, whose tokens or heads are distributed over workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NoReturn, Self, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from kvkit.checks import index_tensors
from kvkit.checks.values import integer, positive_number
from kvkit.errors import KvkitError, argument_error
from kvkit.formats.elements import BY_NAME
from kvkit.integrations.dask.actors import ShardActors, ShardError
from kvkit.integrations.dask.checks import (
    AttendCall,
    check_new_tokens,
    checked_attention,
    checked_sizes,
    shard_count,
    shard_sizes,
)
from kvkit.integrations.dask.folder import ShardFolder
from kvkit.integrations.dask.open_step import OpenStep
from kvkit.integrations.dask.partial_attention import merge_parts
from kvkit.integrations.dask.placement import Placement
from kvkit.runtime.locks import CallLock
from kvkit.typed import Array, FilePath


class ShardedCache:
    """Distributes the keys and values of sequences of one length over workers. Each attends to its own part.

    Keys and values do not move between workers. With ``split="tokens"`` the token at a position is on worker
    ``position // interleave % workers``, vLLM's rule for decode context parallelism; partial results are
    merged in the order of the shards. With ``split="heads"`` each worker has all tokens of some key heads. A
    layer takes one round trip to all workers, with new tokens, queries and partial results.

    Parameters
    ----------
    client : distributed.Client
        Each of its workers holds a shard, a Dask actor; a round trip takes 1 to 2 ms.
    num_layers, num_kv_heads, head_dim : int
        The sizes of the model's keys and values.
    format : str
        The format of the cache: "float32", "float16", "bfloat16"; codes with a scale per group, "int8" and
        "int4"; 8-bit floats, "e4m3" and "e5m2"; ggml's blocks, "q8_0" and "q4_0".
    dtype : dtype, optional
        The dtype of keys, values and queries. By default ``format`` if it is a float dtype, else float16.
    split : {"tokens", "heads"}
        What is distributed.
    interleave : int, optional
        How many neighbouring tokens are on one worker; ``page_size`` if not given.
    num_blocks, page_size : int
        The number of blocks of each shard, and of tokens in each block.
    quant_group : int
        How many elements of codes share a scale.
    shards : int, optional
        By default one for each worker; a worker may hold several.
    timeout : float
        The seconds within which every shard must answer.

    Raises
    ------
    KvkitError
        If an argument is wrong or a worker has no room; then the cache is as before the step.
    ShardError
        A `KvkitError` that names the lost worker; `load` loads the last save.

    Examples
    --------
    >>> import numpy as np
    >>> from distributed import Client
    >>> from kvkit.integrations.dask import ShardedCache
    >>> tokens = np.ones((1, 2, 5, 16), np.float32)         # [batch, heads, tokens, dim]
    >>> with Client(processes=False, n_workers=2, dashboard_address=":0") as client:
    ...     cache = ShardedCache(client, 1, 2, 16, format="float32", page_size=2, num_blocks=8)
    ...     cache.append(tokens, 3 * tokens, layer_idx=0)
    ...     output = cache.attend(tokens[:, :, -1:], layer_idx=0)
    >>> output[0, 0, 0, :2]
    array([3., 3.], dtype=float32)
    """

    def __init__(
        self,
        client: Any,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        format: str = "float16",
        dtype: DTypeLike | None = None,
        split: Literal["tokens", "heads"] = "tokens",
        interleave: int | None = None,
        num_blocks: int = 1024,
        page_size: int = 64,
        quant_group: int = 8,
        shards: int | None = None,
        timeout: float = 60.0,
    ) -> None:
        sizes = {"num_layers": num_layers, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        blocks = {"num_blocks": num_blocks, "page_size": page_size, "quant_group": quant_group}
        placement = {"split": split, "interleave": interleave, "shards": shard_count(client, shards)}
        self._arguments = checked_sizes(sizes | {"format": format, "dtype": dtype} | blocks | placement)
        timeout = positive_number("timeout", timeout)
        count, interleave = self._arguments["shards"], self._arguments["interleave"]
        heads = self._arguments["num_kv_heads"]
        self._placement = Placement(count, interleave if split == "tokens" else 0, heads)
        self.num_layers = self._arguments["num_layers"]
        self._format = BY_NAME[self._arguments["dtype"]]
        self._tokens = OpenStep(self.num_layers)
        self._lock = CallLock()
        self._failure: BaseException | None = None
        arguments_of_shards = [
            (i, count, self._placement.interleave, shard_sizes(self._arguments, heads))
            for i, heads in enumerate(self._placement.heads)
        ]
        self._actors = ShardActors(client, arguments_of_shards, timeout)

    def append(self, key_states: Array, value_states: Array, layer_idx: int) -> None:
        """Append keys and values of new tokens to a layer. The layer's next `attend` sends them.

        All layers must get the tokens of a step before any layer gets more.

        Parameters
        ----------
        key_states, value_states : ndarray, shape [B, Hkv, q, D]
            The dtype is that of the cache. The first call decides on B.
        layer_idx : int
        """
        with self._exclusive():
            layer_idx = integer("layer_idx", layer_idx, 0, self.num_layers - 1)
            check_new_tokens(self._arguments, self._tokens.batch, key_states, value_states)
            if self._tokens.complete:
                self._commit("append")
            self._tokens.add(layer_idx, key_states, value_states)

    def attend(
        self,
        query: Array,
        layer_idx: int,
        attention_mask: Array | None = None,
        *,
        is_alibi: bool = False,
        window: tuple[int, int] = (-1, -1),
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        sinks: Array | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Attend with the queries of the last tokens, causally, in one round trip to all workers.

        Parameters
        ----------
        query : ndarray, shape [B, Hq, q, D]
            The dtype is that of the cache.
        layer_idx : int
            A layer that has the tokens of the step.
        attention_mask : ndarray, optional
            bool [B, n]: False for positions that no query attends to. Or 4 axes, right-aligned to
            [B, Hq, q, n], the first three may be 1: bool, or float32 to add. It is sent whole.
        is_alibi, window, softmax_scale, softcap, sinks, return_lse
            As in `kvkit.multi_head_attention`. Positions count from the beginning of the whole context.

        Returns
        -------
        attn_output : ndarray, shape [B, Hq, q, D]
            The dtype is that of ``query``.
        lse : ndarray of float32, shape [B, Hq, q]
            With ``return_lse``.
        """
        with self._exclusive():
            layer_idx = integer("layer_idx", layer_idx, 0, self.num_layers - 1)
            length = self._tokens.visible_tokens(layer_idx)
            call = checked_attention(
                self._arguments, self._tokens.batch, length, query, attention_mask, is_alibi=is_alibi,
                window=window, softmax_scale=softmax_scale, softcap=softcap, sinks=sinks,
            )  # fmt: skip
            parts = self._step(layer_idx, length, call)  # an (output, lse) for each shard
            if self._placement.interleave:
                output, lse = merge_parts(parts, self._format)
            else:  # each shard has other heads
                output, lse = (np.concatenate(arrays, 1) for arrays in zip(*parts, strict=True))
            return (output, lse) if return_lse else output

    def get_seq_length(self) -> int:
        """Return the number of tokens that all layers have."""
        return self._tokens.total

    def crop(self, length: SupportsIndex) -> None:
        """Keep the first ``length`` tokens; an incomplete step is dropped."""
        with self._exclusive():
            kept = integer("length", length, 0, self.get_seq_length())
            if kept > self._tokens.length:
                self._send_pending()
            self._crop_shards(kept)

    def fork(self, indices: ArrayLike) -> None:
        """Continue with these rows of the batch, each perhaps several times. No keys and values move.

        Parameters
        ----------
        indices : array_like of int
            Rows of the batch.
        """
        with self._exclusive():
            rows = index_tensors.index("indices", indices, 1)
            if not len(rows) or rows.min() < 0 or rows.max() >= self._tokens.batch:
                raise argument_error("indices", f"rows from 0 to {self._tokens.batch - 1}", rows.tolist())
            self._commit("fork")
            counts = self._placement.token_counts(self._tokens.length)
            self._call([("fork", rows) if count else None for count in counts])
            self._tokens.batch = len(rows)

    def save(self, folder: FilePath) -> None:
        """Save the cache: each worker writes its shards into a folder that all workers and this process see.

        An earlier save in the folder stays until all shards are written. `load` may use another number of
        workers.

        Parameters
        ----------
        folder : path
            Made if it is not there.
        """
        with self._exclusive():
            self._commit("save")
            manifest = {"length": self._tokens.length, "batch": self._tokens.batch, "cache": self._arguments}
            ShardFolder(folder).write_save(
                lambda files: self._call([("save", file) for file in files]), self._placement.count, manifest
            )

    @classmethod
    def load(cls, client: Any, folder: FilePath, *, timeout: float = 60.0) -> Self:
        """Return the cache that was saved in a folder, distributed over the present workers.

        Parameters
        ----------
        client : distributed.Client
            Its workers hold the shards.
        folder : path
            A folder that `save` wrote.
        timeout : float
            The seconds within which every shard must answer.
        """
        try:
            cache = cls(client, **ShardFolder(folder).read_manifest()["cache"], timeout=timeout)
        except TypeError as error:
            wanted = "a cache that kvkit saved"
            raise argument_error(str(folder), wanted, f"other arguments ({error})") from error
        try:
            cache.restore(folder)
        except BaseException:
            cache.close()
            raise
        return cache

    def restore(self, folder: FilePath) -> None:
        """Replace all tokens by the tokens that a cache with the same arguments saved in a folder.

        Parameters
        ----------
        folder : path
            A folder that `save` wrote.
        """
        with self._exclusive():
            saved = ShardFolder(folder)
            manifest = saved.read_manifest()
            if manifest["cache"] != self._arguments:
                raise argument_error(str(folder), f"a cache of {self._arguments}", manifest["cache"])
            expected = self._placement.token_counts(manifest["length"])
            files = saved.shard_files(manifest["save"], self._placement.count)
            try:
                counts = self._call([("load", file) for file in files])
                if counts != expected:
                    raise argument_error(str(folder), f"shards of {expected} tokens", counts)
                rows = {shard["rows"] for shard in self._call([("about",)] * self._placement.count)}
                if rows - {0} - {manifest["batch"]}:
                    raise argument_error(str(folder), f"shards of {manifest['batch']} rows", sorted(rows))
            except KvkitError as error:
                self._failure = error  # some shards have loaded the save, others have not
                raise
            self._tokens.begin(manifest["length"], manifest["batch"])

    def about(self) -> list[dict[str, Any]]:
        """Return each shard's ``name``, ``tokens``, ``rows``, ``process``, and ``seconds`` in attention."""
        with self._exclusive():
            shards = self._call([("about",)] * self._placement.count)
        return [{"name": name} | shard for name, shard in zip(self._actors.names, shards, strict=True)]

    @property
    def traffic(self) -> int:
        """Return how many bytes all messages to and from shards had so far."""
        return self._actors.traffic

    def close(self) -> None:
        """Release the shards."""
        self._actors.close()
        self._failure = argument_error("cache", "one that is open", "one that was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        wanted = "to stay with its client (save it, and load it elsewhere)"
        raise argument_error("ShardedCache", wanted, "a copy of it")

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Admit one call at a time, and none after the cache has lost a shard."""
        with self._lock:
            if self._failure is not None:
                why = str(self._failure) or type(self._failure).__name__
                raise argument_error("cache", "one whose shards all answer", f"one that failed ({why})")
            try:
                yield
            except Exception:
                raise
            except BaseException as error:  # such as Ctrl-C: shards may or may not have completed the call
                self._failure = error
                raise

    def _commit(self, caller: str) -> None:
        """Send the pending tokens of a complete step, and end the step."""
        if self._tokens.complete:
            self._send_pending()
        self._tokens.commit(caller)

    def _send_pending(self) -> None:
        """Append the pending keys and values of all layers."""
        for layer_idx in sorted(self._tokens.pending):
            self._step(layer_idx, self._tokens.length + self._tokens.step)

    def _crop_shards(self, length: int) -> None:
        """Keep the first ``length`` tokens of all shards."""
        self._call([("crop", count) for count in self._placement.token_counts(length)])
        self._tokens.begin(length, self._tokens.batch)

    def _step(self, layer_idx: int, length: int, call: AttendCall | None = None) -> list[Any]:
        """Append a layer's pending keys and values, and attend, on every shard that this concerns."""
        placement, tokens = self._placement, self._tokens
        pending = tokens.pending.pop(layer_idx, None)
        indices = [None] * placement.count  # of each shard's tokens among the pending ones
        if pending:
            indices = placement.token_indices(tokens.length, tokens.length + tokens.step)
        calls: list[tuple[Any, ...] | None] = []
        for i, (own, heads) in enumerate(zip(indices, placement.heads, strict=True)):
            new = None if own is None or pending is None else tuple(side[:, heads, own] for side in pending)
            part = None if call is None else placement.shard_call(i, length, call)
            calls.append(None if new is None and part is None else ("step", layer_idx, new, length, part))
        try:
            return self._call(calls)
        except ShardError:
            raise
        except KvkitError:
            self._crop_shards(tokens.length)
            raise

    def _call(self, calls: Sequence[tuple[Any, ...] | None]) -> list[Any]:
        """Call methods of shards. After an interrupt or a lost shard the cache refuses all further calls."""
        try:
            return self._actors.call(calls)
        except BaseException as error:
            if isinstance(error, ShardError) or not isinstance(error, KvkitError):
                self._failure = error
            raise
