"""Define `PagedStep`, which appends packed tokens to a paged cache and attends, layer by layer."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from kvkit import cpu
from kvkit.cache.blocks.step import Step
from kvkit.cache.paged.segments import SegmentedStep, batch_mask, check_window, packed_mask
from kvkit.calls.prepared import PreparedCall, PreparedCalls, form_of
from kvkit.checks import attention, index_tensors, masks
from kvkit.checks.arguments import Scoring, StepArguments
from kvkit.checks.records import StepIndex
from kvkit.checks.values import check_new_tokens, checked_format, integer, named_arrays, one_piece
from kvkit.errors import argument_error, check_shape
from kvkit.runtime.arrays import addresses_of
from kvkit.typed import Array, Attended, Pair


class PagedStep:
    """Appends new tokens to each layer of a `PagedCache`, and attends. `PagedCache.begin_step` makes it.

    Tokens are packed in the order of the sequences. Each layer is written once, then attended to. When
    all are written, `commit` ends the step. A ``with`` statement commits, or abandons the step on an
    exception, unless the block has ended it.

    Attributes
    ----------
    index : Step
        The sequences and index tensors, for calls of operators on the arrays of the cache.
    written : set of int
        The layers that the step has written. Add the number of a layer that you write with an operator.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.cache import PagedCache
    >>> cache = PagedCache(8, 4, num_layers=1, num_kv_heads=2, head_dim=16, dtype=np.float16)
    >>> sequences = [(cache.blocks.add(), 3), (cache.blocks.add(), 1)]
    >>> tokens = np.ones((4, 2, 16), np.float16)                    # packed
    >>> with cache.begin_step(sequences) as step:
    ...     step.update(tokens, tokens, layer_idx=0)
    ...     step.attend(tokens, layer_idx=0).shape, step.index.seqstarts
    ((4, 2, 16), array([0, 3, 4]))
    """

    __slots__ = ("_calls", "_segmented", "_step_index", "_store", "_subsets", "index", "written")

    def __init__(self, store: Any, index: Step) -> None:
        self._store, self.index = store, index
        self.written: set[int] = set()
        self._calls: PreparedCalls[PreparedCall] = PreparedCalls()
        self._segmented: dict[tuple[bool, int, int], SegmentedStep] = {}
        self._subsets: list[Subset] = []
        if not index.in_order:  # for appends; attention and `gather` go segment by segment
            context, tokens = int(index.kvstarts[-1]), int(index.seqstarts[-1])
            zeros = np.zeros_like(index.start_pos)
            self._step_index = StepIndex(
                index.seqstarts, index.kvstarts, index.first_places, zeros, index.pages, store.page_size,
                tokens=tokens, context=context, rows=0,
            )  # fmt: skip
            return
        arguments = StepArguments(
            index.seqstarts, index.kvstarts, index.cachestarts, index.start_pos, max_seqlen=index.max_seqlen,
            max_kvlen=index.max_kvlen, cache_mode=1, page_size=store.page_size,
        )  # fmt: skip
        self._step_index = index_tensors.check_step(index_tensors.read_step(None, arguments))

    def update(self, current_key: Array, current_value: Array, layer_idx: int) -> None:
        """Append the new tokens to a layer.

        Parameters
        ----------
        current_key, current_value : ndarray, shape [seqstarts[B], num_kv_heads, head_dim]
            The dtype is that of the cache.
        layer_idx : int
            A layer that the step has not written yet.
        """
        layer_idx = self._to_write(layer_idx)
        key, value = self._tokens(current_key, current_value, layer_idx)
        self._append(key, value, layer_idx)

    def attend(
        self, query: Array, layer_idx: int, attn_mask: Array | None = None, **options: Any
    ) -> Attended:
        """Attend to the contexts of a layer, new tokens included. Keys and values are read in place.

        Parameters
        ----------
        query : ndarray, shape [seqstarts[B], num_heads, head_dim]
            The dtype is that of the cache.
        layer_idx : int
            A layer that the step has written.
        attn_mask, **options
            As in `kvkit.dynamic_batching.multi_head_attention`: is_causal, is_alibi, softmax_scale, window,
            softcap, sinks, return_lse, out.

        Returns
        -------
        attn_output : ndarray, shape [seqstarts[B], num_heads, head_dim]
        lse : ndarray of float32, shape [seqstarts[B], num_heads]
            If ``return_lse``.
        """
        return self._run(query, self._to_read(layer_idx), attn_mask, options, tokens={})

    def multi_head_cache_attention(
        self,
        query: Array,
        current_key: Array,
        current_value: Array,
        layer_idx: int,
        attn_mask: Array | None = None,
        **options: Any,
    ) -> Attended:
        """Do `update` and `attend` in one call; on an error the layer has not been written."""
        layer_idx = self._to_write(layer_idx)
        key, value = self._tokens(current_key, current_value, layer_idx)
        tokens = {"current_key": key, "current_value": value}
        return self._run(query, layer_idx, attn_mask, options, tokens)

    def _run(
        self,
        query: Array,
        layer_idx: int,
        attn_mask: Array | None,
        options: dict[str, Any],
        tokens: Mapping[str, Array],
    ) -> Attended:
        """Append checked `tokens`, if any, to a layer whose number is checked, and attend to it."""
        form = launch = None
        if self.index.in_order:
            form = form_of((query,), (attn_mask, tuple(options), *options.values()))
        prepared = self._calls.find(form)
        if prepared:
            query = one_piece(query)
        else:
            query, out, lse, weights = self._queries(query, attn_mask, tokens, **options)
            if self.index.in_order:
                context, decoding = self._store.contexts[layer_idx], self.index.decoding_batches
                launch = cpu.attention.prepare.prepare_attention(
                    query, out, lse, context, self._step_index, decoding, weights
                )
        if tokens:  # all is checked: nothing fails from here on
            self._append(tokens["current_key"], tokens["current_value"], layer_idx)
        if prepared:
            return self._attend_again(prepared, query, layer_idx)
        if launch is not None:
            return self._start(form, launch, query, out, lse, layer_idx)
        if self.index.moved.all():
            results = self._attend_moved(query, layer_idx, attn_mask, weights)
            return fill_results(out, lse, slice(None), results)
        for subset in self._split():
            fill_results(out, lse, subset.queries, subset.attend(query, layer_idx, attn_mask, options))
        return out if lse is None else (out, lse)

    def _attend_moved(
        self, query: Array, layer_idx: int, attn_mask: Array | None, weights: attention.Weights
    ) -> Pair:
        """Attend to sequences that all have moved tokens; return float32 outputs and lse."""
        mask_of_pair = None
        if attn_mask is not None and attn_mask.size:
            mask, starts = attn_mask if attn_mask.ndim == 3 else attn_mask[None], self._step_index
            mask_of_pair = functools.partial(packed_mask, mask, starts.seqstarts, starts.kvstarts)
        return self._by_segments(weights.causal).attend(self, query, layer_idx, mask_of_pair, weights)

    @property
    def _value_dim(self) -> int:
        """Return the number of elements of a value."""
        return int(self._store.value_dim)

    def _split(self) -> list[Subset]:
        """Split the step into the sequences with moved tokens and those without."""
        if not self._subsets:
            index, every = self.index, np.arange(len(self.index.sequences))
            of_query, of_key = (np.repeat(every, np.diff(ends)) for ends in (index.seqstarts, index.kvstarts))
            for chosen in (index.moved, ~index.moved):
                step = PagedStep(self._store, index._subset(np.flatnonzero(chosen)))
                queries, keys = np.flatnonzero(chosen[of_query]), np.flatnonzero(chosen[of_key])
                self._subsets.append(Subset(step, queries, keys))
        return self._subsets

    def _by_segments(self, is_causal: bool, tokens: int = -1, length: int = -1) -> SegmentedStep:
        """Return the step by segments, for queries of its new tokens.

        With `tokens`, the queries are those of the last `tokens` of the first `length` in each sequence.
        """
        segmented = self._segmented.get((is_causal, tokens, length))
        if segmented is None:
            index, batch = self.index, len(self.index.sequences)
            counts, lengths = [tokens] * batch, [length] * batch
            if tokens < 0:
                counts, lengths = np.diff(index.seqstarts).tolist(), np.diff(index.kvstarts).tolist()
            size = self._store.page_size
            segmented = SegmentedStep(index.sequences, counts, lengths, index.pages, size, is_causal)
            self._segmented[is_causal, tokens, length] = segmented
        return segmented

    def _float32_context(self, layer_idx: int) -> Any:
        """Return a layer's `Context` for float32 queries."""
        context = self._store.contexts[layer_idx]
        as_loaded = context.as_loaded and context.data_dtype == "float32"
        return context._replace(data_dtype="float32", as_loaded=as_loaded)

    def gather(self, layer_idx: int) -> Pair:
        """Return copies of the keys and values of all contexts in a layer, new tokens included.

        Parameters
        ----------
        layer_idx : int
            A layer that the step has written.

        Returns
        -------
        key, value : ndarray, shape [kvstarts[B], num_kv_heads, head_dim]
            The dtype is that of the cache.
        """
        layer_idx = self._to_read(layer_idx)
        key, value = self._store.empty(self._step_index.context)
        contexts = self._step_index if self.index.in_order else self._by_segments(is_causal=True).contexts
        self._load(key, value, layer_idx, contexts)
        return key, value[..., : self._value_dim]

    def commit(self) -> None:
        """End the step and keep its tokens. Every layer must be written."""
        missing = sorted(set(range(self._store.num_layers)) - self.written)
        if missing and self._step_index.tokens:
            raise argument_error("step", "every layer to be written", f"layers {missing} that are not")
        self.index.commit()

    def abandon(self) -> None:
        """End the step; sequences are as if it had not begun. See `Step.abandon`."""
        self.index.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.index._end(kind, self.commit)

    def _tokens(self, current_key: Array, current_value: Array, layer_idx: int) -> Pair:
        """Check new keys and values; return the rows to store as keys and as values."""
        store = self._store
        fmt, current_key, current_value = check_new_tokens(current_key, current_value, 3, store.rope_dim)
        if fmt is not store.format:
            raise argument_error("current_key", f"dtype {store.format}, that of the cache", fmt)
        shape = self._step_index.tokens, store.heads, store.value_dim
        check_shape("current_key", current_key, shape, ("tokens", "heads", "dim"))
        store.check_apart(layer_idx, {"current_key": current_key, "current_value": current_value})
        return store.rows_of(current_key, current_value)

    def _queries(
        self,
        query: Array,
        attn_mask: Array | None,
        tokens: Mapping[str, Array],
        *,
        sinks: Array | None = None,
        return_lse: bool = False,
        out: Any = None,
        **options: Any,
    ) -> tuple[Array, Array, Array | None, Any]:
        """Check queries and options; return (queries, outputs, lse, weights). `out` may not be `tokens`."""
        store = self._store
        if store.latent_dim and options.get("softmax_scale") is None:
            wanted = "1 / sqrt(size of an expanded head), for latent rows"
            raise argument_error("softmax_scale", wanted, "None")
        for name in options.keys() - set(Scoring._fields):
            wanted = f"an option among {', '.join((*Scoring._fields, 'return_lse', 'out'))}"
            raise argument_error("attend", wanted, name)
        checked_format("query", query, (store.format,), 3)
        _, query, _ = attention.check_queries(query, 3, (query.shape[1], store.dim, store.heads))
        count, heads, _ = query.shape
        index_tensors.check_last_start("seqstarts", self._step_index.tokens, ("query", count))
        mask = masks.dynamic_mask(store.format, attn_mask, heads, count, self._step_index.context)
        weights = attention.checked_weights(query, mask, Scoring(sinks=sinks, **options))
        arrays = {"query": query, "attn_mask": attn_mask, "sinks": sinks, "cache": store.cache}
        inputs = named_arrays(**arrays, scale=store.scale, **tokens)
        window = weights.left, weights.right
        check_window(self.index.sequences, self.index.start_pos, window, weights.alibi)
        shape = count, heads, store.value_dim
        results = attention.attention_results(shape, store.format, return_lse, inputs).arrays(out)
        attn_output, lse, *_ = (*results, None)  # results have no lse unless it is requested
        return query, attn_output, lse, weights

    # For packed tokens and for batches of one length, with checked arguments

    def _to_write(self, layer_idx: Any) -> int:
        """Check the number of a layer, which this step must not have written; return it."""
        layer_idx = integer("layer_idx", layer_idx, 0, self._store.num_layers - 1)
        if not self.index.is_open:
            raise argument_error("step", "one that is open", "one that has ended")
        if layer_idx in self.written:
            raise argument_error("layer_idx", "a layer that the step has not written", layer_idx)
        return layer_idx

    def _to_read(self, layer_idx: Any) -> int:
        """Check the number of a layer, which this step must have written; return it."""
        layer_idx = integer("layer_idx", layer_idx, 0, self._store.num_layers - 1)
        if self._step_index.tokens and layer_idx not in self.written:
            raise argument_error("layer_idx", "a layer that the step has written", layer_idx)
        return layer_idx

    def _append(self, key: Array, value: Array, layer_idx: int) -> None:
        """Append checked new tokens, [tokens, heads, dim] or [batch, tokens, heads, dim], to a layer."""
        form, arrays = form_of((key, value), ()), {"current_key": key, "current_value": value}
        prepared = self._calls.find(form)
        if prepared:
            prepared.run_at(self._places(layer_idx, arrays))
        else:
            place = self._store.places[layer_idx]
            launch = cpu.copy.transfer.prepare_transfer("store", key, value, place, self._step_index)
            cpu.launches.start(launch)
            self._keep(form, layer_idx, arrays, launch)
        self.written.add(layer_idx)

    def _start(
        self, form: Any, launch: Any, query: Array, out: Array, lse: Array | None, layer_idx: int
    ) -> Attended:
        """Run a launch of attention, keep it as a prepared call, and return the results."""
        cpu.launches.start(launch)
        self._keep(form, layer_idx, {"query": query, "out": out, "lse": lse}, launch)
        return out if lse is None else (out, lse)

    def _attend_again(self, prepared: Any, query: Array, layer_idx: int) -> Attended:
        """Run a prepared call with other queries; return the results in new arrays."""
        out, lse = np.empty((*query.shape[:-1], self._value_dim), query.dtype), None
        if "lse" in prepared.names:
            lse = np.empty(query.shape[:-1], np.float32)
        prepared.run_at(self._places(layer_idx, {"query": query, "out": out, "lse": lse}))
        return out if lse is None else (out, lse)

    def _keep(self, form: Any, layer_idx: int, arrays: dict[str, Any], launch: Any) -> None:
        """Keep a launch for calls with other layers and arrays; none is kept without a form."""
        self._calls.keep(form, PreparedCall([launch], self._store.addresses[layer_idx] | arrays))

    def _places(self, layer_idx: int, arrays: dict[str, Any]) -> list[Any]:
        """Return the addresses of a layer's rows and of a call's arrays."""
        return [*self._store.addresses[layer_idx].values(), *addresses_of(arrays.values())]

    def _load(self, key: Array, value: Array, layer_idx: int, contexts: Any) -> None:
        """Copy contexts into arrays whose axes are [.., heads, dim]."""
        place = self._store.places[layer_idx]
        cpu.launches.start(cpu.copy.transfer.prepare_transfer("load", key, value, place, contexts))

    def _attend_rows(
        self, query: Array, layer_idx: int, mask: Array | None, weights: attention.Weights, length: int
    ) -> list[Array]:
        """Attend to moved tokens with queries [B, q, Hq, D] of the last tokens; return float32 results."""
        batch, tokens, *_ = query.shape
        mask_of_pair = None if mask is None or not mask.size else functools.partial(batch_mask, mask)
        packed = query.reshape(batch * tokens, *query.shape[2:])
        segmented = self._by_segments(weights.causal, tokens, length)
        results = segmented.attend(self, packed, layer_idx, mask_of_pair, weights)
        return [result.reshape(batch, tokens, *result.shape[1:]) for result in results]

    def _gather_rows(self, layer_idx: int, length: int) -> Pair:
        """Return copies of the first `length` keys and values of each sequence, [B, heads, length, dim]."""
        batch, store = len(self.index.sequences), self._store
        shape = batch, store.heads, length, store.dim
        key = np.empty(shape, store.format.dtype)
        value = key if store.latent_dim else np.empty_like(key)
        if self.index.in_order:
            self._load(key.swapaxes(1, 2), value.swapaxes(1, 2), layer_idx, self._equal_index(0, length))
        else:
            packed = keys, values = store.empty(batch * length)  # [tokens, heads, dim]
            self._load(keys, values, layer_idx, self._by_segments(True, tokens=0, length=length).contexts)
            for side, tokens in zip((key, value), packed, strict=True):
                side[...] = tokens.reshape(batch, length, *tokens.shape[1:]).swapaxes(1, 2)
        return key, value[..., : store.value_dim]

    def _equal_index(self, tokens: int, length: int) -> StepIndex:
        """Return index tensors for sequences of one length, whose last `tokens` are the new ones."""
        batch = len(self.index.sequences)
        count = np.arange(batch + 1)
        return self._step_index._replace(
            seqstarts=count * tokens, kvstarts=count * length, tokens=batch * tokens, context=batch * length
        )


class Subset(NamedTuple):
    """Selects sequences of a step for one launch of attention."""

    step: PagedStep  # with only these sequences
    queries: Array  # the indices of their queries in the whole step
    keys: Array  # the indices of their tokens in all contexts

    def attend(
        self, query: Array, layer_idx: int, attn_mask: Array | None, options: dict[str, Any]
    ) -> tuple[Array, ...]:
        """Attend with the checked arguments of the whole step; return (outputs,) or (outputs, lse)."""
        if attn_mask is not None and attn_mask.size:
            attn_mask = attn_mask[..., self.queries, :]
            attn_mask = attn_mask if attn_mask.shape[-1] == 1 else attn_mask[..., self.keys]
        results = self.step._run(
            query[self.queries], layer_idx, attn_mask, options | {"out": None}, tokens={}
        )
        return results if isinstance(results, tuple) else (results,)


def fill_results(out: Array, lse: Array | None, queries: Any, results: Sequence[Array]) -> Attended:
    """Write the results of some queries into `out` and `lse`, which may be None; return both."""
    out[queries] = results[0]
    if lse is None:
        return out
    lse[queries] = results[1]
    return out, lse
