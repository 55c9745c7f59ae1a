"""A cache whose tokens, or heads, lie on many workers."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any, Literal, NoReturn, Self, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from kvkit.checks import index_tensors
from kvkit.checks.values import integer, text
from kvkit.checks.words import describe, wrong
from kvkit.errors import KvkitError
from kvkit.files.replace import replacing
from kvkit.formats.elements import BY_NAME, FLOATS, QUANTIZED, STORED
from kvkit.integrations.dask import parts
from kvkit.integrations.dask.shard import owned
from kvkit.integrations.dask.transports import Actors, Pipes, ShardError
from kvkit.turns import Turn
from kvkit.typed import Array, FilePath, Pair

VERSION = 1
MANIFEST = "sharded.json"
CODES = {str(fmt): bits for bits, fmt in QUANTIZED.items()}
FORMATS = *map(str, FLOATS), *CODES, *STORED


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

    Attributes
    ----------
    traffic : int
        Bytes of arrays that have travelled, both ways.

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
    >>> with Client(processes=False, n_workers=2, dashboard_address=None) as client:
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
        text("format", format, FORMATS)
        text("split", split, ("tokens", "heads"))
        self.num_layers = integer("num_layers", num_layers, 1)
        page_size = integer("page_size", page_size, 1)
        self._arguments = {
            "num_layers": self.num_layers,
            "num_kv_heads": integer("num_kv_heads", num_kv_heads, 1),
            "head_dim": integer("head_dim", head_dim, 1),
            "format": format,
            "dtype": np.dtype(dtype or (format if format in map(str, FLOATS) else "float16")).name,
            "split": split,
            "interleave": integer("interleave", page_size if interleave is None else interleave, 1),
            "num_blocks": integer("num_blocks", num_blocks, 1),
            "page_size": page_size,
            "quant_group": quant_group,
            "shards": _count(client, shards, transport),
        }
        self._count = self._arguments["shards"]
        self._heads = _heads(self._arguments["num_kv_heads"], self._count, split)
        self._interleave = self._arguments["interleave"] if split == "tokens" else 0
        self._length, self._batch = 0, 0
        self._step, self._written, self._pending = 0, set[int](), dict[int, Pair]()  # the step that is open
        self._broken: BaseException | None = None
        self._turn, self.traffic = Turn(), 0
        calls = [self._shard(i, transport) for i in range(self._count)]
        self._transport = Pipes(calls, timeout) if client is None else Actors(client, calls, timeout)

    def _shard(self, i, transport):
        """The arguments of a shard."""
        names = "num_layers", "head_dim", "quant_group", "num_blocks", "page_size"
        sizes = {name: self._arguments[name] for name in names}
        stored = self._arguments["format"]
        sizes |= {"quant_bit": CODES.get(stored, 0), "quant_format": stored if stored in STORED else None}
        sizes |= {"dtype": BY_NAME[self._arguments["dtype"]].dtype}
        sizes |= {"num_kv_heads": self._heads[i].stop - self._heads[i].start}
        threads = max(1, (os.cpu_count() or 1) // self._count) if transport == "pipes" else None
        return i, self._count, self._interleave, sizes, threads

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
            heads, dim = self._arguments["num_kv_heads"], self._arguments["head_dim"]
            for name, array in (("key_states", key_states), ("value_states", value_states)):
                shape: tuple[int, ...] = getattr(array, "shape", ())
                fits = len(shape) == 4 and shape[0] and shape[2] and (shape[1], shape[3]) == (heads, dim)
                if (
                    not fits
                    or shape[0] != (self._batch or shape[0])
                    or array.dtype.name != self._arguments["dtype"]
                ):
                    wanted = f"{self._arguments['dtype']} [{self._batch or 'B'}, {heads}, q, {dim}]"
                    raise wrong(name, wanted, describe(array))
            if key_states.shape != value_states.shape:
                raise wrong("value_states", f"shape {key_states.shape}, that of the keys", value_states.shape)
            tokens = key_states.shape[2]
            if len(self._written) == self.num_layers:
                self._flush()
                self._settle()
            if layer_idx in self._written:
                raise wrong("layer_idx", "a layer that has not yet taken this step's tokens", layer_idx)
            if self._written and tokens != self._step:
                raise wrong("key_states", f"{self._step} tokens, as in other layers", tokens)
            self._pending[layer_idx] = np.array(key_states), np.array(value_states)
            self._written.add(layer_idx)
            self._step, self._batch = tokens, key_states.shape[0]

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
            if self._written and layer_idx not in self._written:
                raise wrong("layer_idx", "a layer that has taken the tokens of the step", layer_idx)
            length = self.get_seq_length() if not self._written else self._length + self._step
            heads, dim = self._arguments["num_kv_heads"], self._arguments["head_dim"]
            shape: tuple[int, ...] = getattr(query, "shape", ())
            fits = len(shape) == 4 and (shape[0], shape[3]) == (self._batch, dim) and 0 < shape[2] <= length
            if not fits or not shape[1] or shape[1] % heads or query.dtype.name != self._arguments["dtype"]:
                wanted = f"[{self._batch}, a multiple of {heads}, at most {length}, {dim}]"
                raise wrong("query", f"{self._arguments['dtype']} {wanted}", describe(query))
            mask = _mask(attention_mask, shape, length)
            if sinks is not None and np.shape(sinks) != shape[1:2]:
                raise wrong("sinks", f"shape {shape[1:2]}", describe(sinks))
            options = {"softmax_scale": softmax_scale, "softcap": softcap, "window": tuple(window)}
            slopes = parts.slopes_of(is_alibi, shape[1])
            found = self._send(layer_idx, query, length, mask, slopes, sinks, options)
            if self._interleave:
                output, lse = parts.merge(found)
            else:
                output, lse = (np.concatenate(side, 1) for side in zip(*found, strict=True))
            return (output, lse) if return_lse else output

    def get_seq_length(self) -> int:
        """Tokens that all layers have."""
        return self._length + (self._step if len(self._written) == self.num_layers else 0)

    def crop(self, length: SupportsIndex) -> None:
        """Keep the first ``length`` tokens; a step that some layers have not taken is forgotten."""
        with self._alone():
            kept = integer("length", length, 0, self.get_seq_length())
            if kept > self._length:
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
            if not len(rows) or rows.min() < 0 or rows.max() >= self._batch:
                raise wrong("indices", f"rows from 0 to {self._batch - 1}", rows.tolist())
            self._whole("fork")
            self._ask("fork", [(rows,) if n else None for n in self._lengths(self._length)])
            self._batch = len(rows)

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
            self._whole("save")
            folder, name = Path(folder).absolute(), secrets.token_hex(6)
            folder.mkdir(parents=True, exist_ok=True)
            before = _manifest(folder).get("save") if (folder / MANIFEST).exists() else None
            try:
                self._ask("save", [(_file(folder / name, i),) for i in range(self._count)])
                said = {"format_version": VERSION, "save": name, "length": self._length, "batch": self._batch}
                with replacing(folder / MANIFEST) as file:
                    file.write(json.dumps(said | {"cache": self._arguments}, indent=2).encode() + b"\n")
            except BaseException:
                before = name
                raise
            finally:
                if before:
                    shutil.rmtree(folder / before, ignore_errors=True)

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
            cache = cls(client, **_manifest(Path(folder))["cache"], **where)
        except TypeError as error:
            raise wrong(str(folder), f"a {MANIFEST} that kvkit wrote", f"another ({error})") from error
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
            folder = Path(folder).absolute()
            said = _manifest(folder)
            if said["cache"] != self._arguments:
                raise wrong(str(folder), f"a cache of {self._arguments}", said["cache"])
            expected = self._lengths(said["length"])
            self._pending, self._written, self._step = {}, set(), 0
            try:
                found = self._ask("load", [(_file(folder / said["save"], i),) for i in range(self._count)])
                if found != expected:
                    raise wrong(str(folder), f"shards of {expected} tokens", found)
            except KvkitError as error:
                self._broken = error  # some shards have it, some do not
                raise
            self._length, self._batch = said["length"], said["batch"]

    def about(self) -> list[dict[str, Any]]:
        """Of each shard: its ``name``, ``tokens``, ``rows`` and ``process``."""
        with self._alone():
            found = self._ask("about", [()] * self._count)
        return [{"name": name} | each for name, each in zip(self._transport.names, found, strict=True)]

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

    # Calls

    @contextlib.contextmanager
    def _alone(self):
        """Other threads wait; a cache that lost a shard refuses."""
        with self._turn:
            if self._broken is not None:
                why = str(self._broken) or type(self._broken).__name__
                raise wrong("cache", "one whose shards all answer", f"one that failed ({why})")
            yield

    def _lengths(self, length):
        """How many of the first tokens each shard has."""
        each = self._interleave
        if not each:
            return [length] * self._count
        turns, rest = divmod(length, each * self._count)
        return [turns * each + min(max(rest - i * each, 0), each) for i in range(self._count)]

    def _whole(self, what):
        """All layers have taken the tokens of the step, and they are where they belong."""
        if self._written and len(self._written) < self.num_layers:
            missing = sorted(set(range(self.num_layers)) - self._written)
            raise wrong(what, "all layers to have taken the step's tokens", f"layers {missing} that have not")
        self._flush()
        self._settle()

    def _settle(self):
        self._length, self._step, self._written = self.get_seq_length(), 0, set()

    def _keep(self, length):
        """Forget all that comes after so many tokens, on all shards."""
        self._pending, self._written, self._step = {}, set(), 0
        self._ask("crop", [(n,) for n in self._lengths(length)])
        self._length, self._batch = length, self._batch if length else 0

    def _flush(self):
        for layer_idx in sorted(self._pending):
            self._send(layer_idx, None, 0, None, None, None, {})

    def _send(self, layer_idx, query, length, mask, slopes, sinks, options):
        """Append what a layer has pending, and attend, on every shard that has to do with it."""
        pending = self._pending.pop(layer_idx, None)
        calls: list[Any] = []
        for i, heads in enumerate(self._heads):
            at: Any = slice(None)
            own = options
            if pending and self._interleave:
                start = self._length
                at = owned(start, start + self._step, i, self._count, self._interleave) - start
            new: list[Array | None] = [None, None]
            if pending and (not self._interleave or at.size):
                new = [side[:, heads, at] for side in pending]
            asked = query
            if query is not None:
                group = query.shape[1] // self._arguments["num_kv_heads"]
                queries = slice(heads.start * group, heads.stop * group)
                asked = query[:, queries]
                first = not self._interleave or i == 0  # which has the sinks
                own = options | {
                    "mask": self._mask_of(mask, i, length, queries),
                    "slopes": None if slopes is None else slopes[queries],
                    "sinks": np.ascontiguousarray(sinks[queries]) if sinks is not None and first else None,
                }
            has_part = new[0] is not None or query is not None
            calls.append((layer_idx, *new, asked, length, own) if has_part else None)
        try:
            return self._ask("step", calls)
        except ShardError:
            raise
        except KvkitError:
            self._keep(self._length)
            raise

    def _mask_of(self, mask, shard, length, queries):
        if mask is None:
            return None
        if self._interleave:
            return mask[..., owned(0, length, shard, self._count, self._interleave)]
        return mask[:, queries] if mask.ndim == 4 and mask.shape[1] > 1 else mask

    def _ask(self, method, calls):
        try:
            answers = self._transport.ask(method, calls)
        except BaseException as error:  # Ctrl-C among them: answers would come later
            if isinstance(error, ShardError) or not isinstance(error, KvkitError):
                self._broken = error
            raise
        self.traffic += sum(_bytes(message) for message in (*calls, *answers))
        return answers


def _count(client, shards, transport):
    """How many shards there are."""
    text("transport", transport, ("actors", "pipes"))
    if (client is None) != (transport == "pipes"):
        wanted = "None, with transport='pipes'" if transport == "pipes" else "a distributed.Client"
        raise wrong("client", wanted, describe(client))
    if shards is None:
        shards = 2 if client is None else len(client.nthreads()) or 1
    return integer("shards", shards, 1)


def _heads(heads, count, split):
    """The key heads of each shard."""
    if split == "tokens":
        return [slice(0, heads)] * count
    if heads < count:
        raise wrong("num_kv_heads", f"at least {count}, one a shard", heads)
    return [slice(heads * i // count, heads * (i + 1) // count) for i in range(count)]


def _file(folder, i):
    return str(folder / f"shard-{i}.npz")


def _mask(mask, shape, length):
    if mask is None:
        return None
    wanted = f"bool [{shape[0]}, {length}], or 4 axes right-aligned to {[*shape[:3], length]}"
    if not isinstance(mask, np.ndarray) or mask.shape[-1:] != (length,):
        raise wrong("attention_mask", wanted, describe(mask))
    sizes = [(1, whole) for whole in shape[:3]] if mask.ndim == 4 else [shape[:1]]
    known = mask.ndim == 4 or (mask.ndim == 2 and mask.dtype == np.bool_)
    if not known or any(n not in fits for n, fits in zip(mask.shape, sizes, strict=False)):
        raise wrong("attention_mask", wanted, describe(mask))
    return mask


def _manifest(folder):
    try:
        said = json.loads((folder / MANIFEST).read_bytes())
        version = said["format_version"]
        if version == VERSION and not said.keys() >= {"save", "length", "batch", "cache"}:
            raise KeyError(*said)
    except FileNotFoundError:
        raise wrong(str(folder), f"a folder with {MANIFEST}", "one without") from None
    except (ValueError, KeyError, TypeError) as error:
        raise wrong(str(folder), f"a {MANIFEST} that kvkit wrote", "another file") from error
    if version != VERSION:
        raise wrong(str(folder), f"{MANIFEST} of version {VERSION}", version)
    return said


def _bytes(message):
    if isinstance(message, np.ndarray):
        return message.nbytes
    if isinstance(message, dict):
        message = message.values()
    elif not isinstance(message, (tuple, list)):
        return 0
    return sum(map(_bytes, message))
