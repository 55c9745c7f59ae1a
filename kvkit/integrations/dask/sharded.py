"""A cache whose tokens, or heads, lie on many workers."""

from __future__ import annotations

import contextlib
from typing import Any, Literal, NoReturn, Self, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from kvkit.checks import index_tensors
from kvkit.checks.values import integer, positive
from kvkit.checks.words import wrong
from kvkit.errors import KvkitError
from kvkit.formats.elements import BY_NAME
from kvkit.integrations.dask import calls, parts
from kvkit.integrations.dask.actors import Actors
from kvkit.integrations.dask.division import Division
from kvkit.integrations.dask.pipes import Pipes
from kvkit.integrations.dask.saved import Folder
from kvkit.integrations.dask.tokens import Tokens
from kvkit.integrations.dask.transports import ShardError
from kvkit.repeats import Repeats, form
from kvkit.turns import Turn
from kvkit.typed import Array, FilePath


class ShardedCache:
    """Keys and values of rows of one length, on many workers; every worker attends to what it has.

    Tokens stay where they were appended. With ``split="tokens"`` the token at a position is on worker
    ``position // interleave % workers``, vLLM's rule for decode context parallelism; parts are merged in the
    order of the shards. With ``split="heads"`` each worker has all tokens of some key heads. A layer takes
    one round trip to all workers; what travels are the new tokens, the queries and the partial results.

    Parameters
    ----------
    client : distributed.Client or None
        Each of its workers holds a shard, an actor. None with ``transport="pipes"``.
    num_layers, num_kv_heads, head_dim : int
        Geometry of the model.
    format : str
        What the cache stores: "float32", "float16", "bfloat16"; codes with scales of their groups, "int8" and
        "int4"; floats of 8 bits, "e4m3" and "e5m2"; blocks of ggml, "q8_0" and "q4_0".
    dtype : dtype, optional
        Of keys, values and queries: ``format`` if that is one of the first three, and else float16.
    split : {"tokens", "heads"}
    interleave : int, optional
        Neighbouring tokens on one worker; ``page_size`` if not given.
    num_blocks, page_size : int
        Blocks of each shard, and tokens in each.
    quant_group : int
        Elements that share a scale, if there are codes.
    shards : int, optional
        One a worker if not given; more take turns on the workers. With pipes 2.
    transport : {"actors", "pipes"}
        Dask's actors (1 to 2 ms a round trip), or processes of this machine behind pipes.
    timeout : float
        Seconds within which every shard has to answer.

    Raises
    ------
    KvkitError
        If an argument is wrong or a worker has no room; then the cache is as before the step.
    ShardError
        A `KvkitError` that names the worker that is lost; `load` brings back what was saved last.

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
        transport: Literal["actors", "pipes"] = "actors",
        timeout: float = 60.0,
    ) -> None:
        self._arguments = calls.arguments(
            {
                "num_layers": num_layers,
                "num_kv_heads": num_kv_heads,
                "head_dim": head_dim,
                "format": format,
                "dtype": dtype,
                "split": split,
                "interleave": interleave,
                "num_blocks": num_blocks,
                "page_size": page_size,
                "quant_group": quant_group,
                "shards": calls.shards(client, shards, transport),
            }
        )
        timeout = positive("timeout", timeout)
        count, interleave = self._arguments["shards"], self._arguments["interleave"]
        heads = self._arguments["num_kv_heads"]
        self._division = Division(count, interleave if split == "tokens" else 0, heads)
        self.num_layers = self._arguments["num_layers"]
        self._format = BY_NAME[self._arguments["dtype"]]
        self._tokens = Tokens(self.num_layers)
        self._turn, self._repeats = Turn(), Repeats()
        self._broken: BaseException | None = None
        each = [
            (i, count, self._division.interleave, calls.of_shard(self._arguments, heads))
            for i, heads in enumerate(self._division.heads)
        ]
        self._transport: Any = Pipes(each, timeout) if client is None else Actors(client, each, timeout)

    def append(self, key_states: Array, value_states: Array, layer_idx: int) -> None:
        """Give a layer the keys and values of new tokens. They travel with the next `attend` of the layer.

        All layers take as many tokens before one takes more.

        Parameters
        ----------
        key_states, value_states : ndarray, shape [B, Hkv, q, D]
            Of the dtype of the cache. The first call decides on B.
        layer_idx : int
            A layer.
        """
        with self._alone():
            layer_idx = integer("layer_idx", layer_idx, 0, self.num_layers - 1)
            calls.new_tokens(self._arguments, self._tokens.batch, key_states, value_states)
            if self._tokens.whole:
                self._settle("append")
            self._tokens.take(layer_idx, key_states, value_states)

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
        """Attend with the queries of the last tokens, causally: one round trip to all workers.

        Parameters
        ----------
        query : ndarray, shape [B, Hq, q, D]
            Of the dtype of the cache.
        layer_idx : int
            A layer that has taken the tokens of the step.
        attention_mask : ndarray, optional
            bool [B, n], which of the n positions may be seen; or with 4 axes, right-aligned to
            [B, Hq, q, n], of which the first three may be 1: bool, or float32 to be added. It travels whole.
        is_alibi, window, softmax_scale, softcap, sinks, return_lse
            As in `kvkit.multi_head_attention`; positions are those in the whole context.

        Returns
        -------
        attn_output : ndarray, shape [B, Hq, q, D]
            Of the dtype of ``query``.
        lse : ndarray of float32, shape [B, Hq, q]
            With ``return_lse``.
        """
        with self._alone():
            layer_idx = integer("layer_idx", layer_idx, 0, self.num_layers - 1)
            length = self._tokens.seen(layer_idx)
            how = is_alibi, window, softmax_scale, softcap
            known = form((query,), (self._tokens.batch, *how)) if sinks is None else None
            options = self._options(known, length, query, sinks, how)
            mask = calls.mask(attention_mask, query.shape, length)
            found = self._step(layer_idx, length, query, mask, options, None if mask is not None else known)
            if self._division.interleave:
                output, lse = parts.merge(found, self._format)
            else:
                output, lse = (np.concatenate(side, 1) for side in zip(*found, strict=True))
            return (output, lse) if return_lse else output

    def get_seq_length(self) -> int:
        """Tokens that all layers have."""
        return self._tokens.total

    def crop(self, length: SupportsIndex) -> None:
        """Keep the first ``length`` tokens; a step that some layers have not taken is forgotten."""
        with self._alone():
            kept = integer("length", length, 0, self.get_seq_length())
            if kept > self._tokens.length:
                self._flush()
            self._keep(kept)

    def fork(self, indices: ArrayLike) -> None:
        """Go on with these rows, each as often as it is named. No keys and values move.

        Parameters
        ----------
        indices : array_like of int
            Rows of the batch.
        """
        with self._alone():
            rows = index_tensors.index("indices", indices, 1)
            if not len(rows) or rows.min() < 0 or rows.max() >= self._tokens.batch:
                raise wrong("indices", f"rows from 0 to {self._tokens.batch - 1}", rows.tolist())
            self._settle("fork")
            lengths = self._division.lengths(self._tokens.length)
            self._ask([((), ("fork", rows)) if n else None for n in lengths])
            self._tokens.batch = len(rows)

    def save(self, folder: FilePath) -> None:
        """Write every shard, where it is, into a folder that all workers and this process see.

        What was saved before stays until all shards are written. `load` reads it, on as many workers as
        there are then.

        Parameters
        ----------
        folder : path
            Made if it is not there.
        """
        with self._alone():
            self._settle("save")
            said = {"length": self._tokens.length, "batch": self._tokens.batch, "cache": self._arguments}
            Folder(folder).save(lambda files: self._ask_of_files("save", files), self._division.count, said)

    @classmethod
    def load(
        cls,
        client: Any,
        folder: FilePath,
        *,
        transport: Literal["actors", "pipes"] = "actors",
        timeout: float = 60.0,
    ) -> Self:
        """The cache that was saved in a folder, on the workers that there are now.

        Parameters
        ----------
        client : distributed.Client or None
            None with ``transport="pipes"``.
        folder : path
            That of `save`.
        """
        where: dict[str, Any] = {"transport": transport, "timeout": timeout}
        try:
            cache = cls(client, **Folder(folder).manifest()["cache"], **where)
        except TypeError as error:
            raise wrong(str(folder), "a cache that kvkit saved", f"another ({error})") from error
        try:
            cache.restore(folder)
        except BaseException:
            cache.close()
            raise
        return cache

    def restore(self, folder: FilePath) -> None:
        """Go back to what a cache of the same arguments saved in a folder.

        Parameters
        ----------
        folder : path
            That of `save`.
        """
        with self._alone():
            where = Folder(folder)
            said = where.manifest()
            if said["cache"] != self._arguments:
                raise wrong(str(folder), f"a cache of {self._arguments}", said["cache"])
            expected = self._division.lengths(said["length"])
            try:
                found = self._ask_of_files("load", where.files(said["save"], self._division.count))
                if found != expected:
                    raise wrong(str(folder), f"shards of {expected} tokens", found)
            except KvkitError as error:
                self._broken = error  # some shards have it, some do not
                raise
            self._tokens.begin(said["length"], said["batch"])

    def about(self) -> list[dict[str, Any]]:
        """Of each shard: its ``name``, ``tokens``, ``rows``, ``process``, and ``seconds`` in attention."""
        with self._alone():
            found = self._ask([((), ("about",))] * self._division.count)
        return [{"name": name} | each for name, each in zip(self._transport.names, found, strict=True)]

    @property
    def traffic(self) -> int:
        """Bytes of messages to shards and back, so far."""
        return self._transport.traffic

    def close(self) -> None:
        """Let the shards go."""
        self._transport.close()
        self._broken = wrong("cache", "one that is open", "one that was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise wrong(
            "ShardedCache", "to stay with its client (save it, and load it elsewhere)", "a copy of it"
        )

    @contextlib.contextmanager
    def _alone(self):
        """Other threads wait; a cache that lost a shard refuses."""
        with self._turn:
            if self._broken is not None:
                why = str(self._broken) or type(self._broken).__name__
                raise wrong("cache", "one whose shards all answer", f"one that failed ({why})")
            try:
                yield
            except Exception:
                raise
            except BaseException as error:  # Ctrl-C, anywhere in a call: shards may have done it or not
                self._broken = error
                raise

    def _options(self, known, length, query, sinks, how):
        """Checked `Options`; those of calls of a known form are checked once."""
        options = self._repeats.get(known)
        if options is None or query.shape[2] > length:
            names = "is_alibi", "window", "softmax_scale", "softcap"
            given = dict(zip(names, how, strict=True))
            options = calls.queries(self._arguments, self._tokens.batch, length, query, sinks, **given)
            if known is not None:
                self._repeats.keep(known, options)
        return options

    def _settle(self, what):
        """The tokens of the step, which all layers have taken, are where they belong."""
        if not self._tokens.whole:
            self._tokens.settle(what)
        self._flush()
        self._tokens.settle(what)

    def _flush(self):
        for layer_idx in sorted(self._tokens.pending):
            self._step(layer_idx, self._tokens.length + self._tokens.step)

    def _keep(self, length):
        """Forget all that comes after so many tokens, on all shards."""
        self._ask([((), ("crop", n)) for n in self._division.lengths(length)])
        self._tokens.begin(length, self._tokens.batch)

    def _step(self, layer_idx, length, query=None, mask=None, options=None, known=None):
        """Append what a layer has pending, and attend, on every shard that has to do with it.

        `known` is what decides on messages but for their bytes and the new tokens.
        """
        division, tokens = self._division, self._tokens
        pending = tokens.pending.pop(layer_idx, None)
        places = [None] * division.count
        if pending:
            places = division.places(tokens.length, tokens.length + tokens.step)
        asked: list[Any] = []
        for i, (at, heads) in enumerate(zip(places, division.heads, strict=True)):
            if at is None and query is None:
                asked.append(None)
                continue
            key, value = (None, None) if at is None else (side[:, heads, at] for side in pending)
            of_query, others = (None,) * 4, ()
            if query is not None:
                of_query = division.of_query(i, length, query, mask, options.slopes, options.sinks)
                others = options[:3]
            name = (known, key is not None and key.shape) if known else None
            asked.append(((key, value, *of_query), ("step", *others), (layer_idx, length), name))
        try:
            return self._ask(asked)
        except ShardError:
            raise
        except KvkitError:
            self._keep(tokens.length)
            raise

    def _ask_of_files(self, method, files):
        return self._ask([((), (method, file)) for file in files])

    def _ask(self, asked):
        try:
            return self._transport.ask(asked)
        except BaseException as error:
            if isinstance(error, ShardError) or not isinstance(error, KvkitError):
                self._broken = error
            raise
