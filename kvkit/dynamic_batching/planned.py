"""A step of packed sequences, checked once for all layers of a model."""

from __future__ import annotations

from typing import Any, Literal, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from kvkit import cpu, launch
from kvkit.checks.attention import checked_cache_attention
from kvkit.checks.key_value_cache import checked_key_value_cache
from kvkit.checks.sequences import planned
from kvkit.foreign import in_kind
from kvkit.repeats import Guarded, Repeats, form
from kvkit.typed import Array, Attended, Pair


@in_kind
def plan(
    seqstarts: ArrayLike,
    kvstarts: ArrayLike,
    cachestarts: ArrayLike,
    start_pos: ArrayLike,
    decoding_batches: SupportsIndex = 0,
    *,
    max_seqlen: SupportsIndex | None = None,
    max_kvlen: SupportsIndex | None = None,
    cache_mode: Literal[0, 1] = 0,
    page_size: int = 128,
) -> Plan:
    """Check the index tensors of a step, which are the same for every layer of a model, once.

    Parameters
    ----------
    seqstarts, kvstarts, cachestarts, start_pos, max_seqlen, max_kvlen, cache_mode, page_size
        As in `key_value_cache`. They are copied: what happens to the arrays later changes nothing.
    decoding_batches : int
        How many sequences, from the first on, the causal mask leaves alone.

    Returns
    -------
    Plan
        Its methods run the operators of this module for one layer.

    Raises
    ------
    KvkitError
        If an index tensor is wrong.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> step = kvkit.dynamic_batching.plan([0, 3, 4], [0, 3, 4], [8, 4], [0, 0])
    >>> cache = np.zeros((2, 2, 1, 16, 8), np.float16)
    >>> new = np.ones((4, 1, 8), np.float32)
    >>> for layer in range(2):
    ...     output = step.multi_head_cache_attention(
    ...         new, new, new, cache, num_heads=1, head_dim=8, num_layer=2, layer_idx=layer, cache_layout=3)
    >>> output.shape, int(cache[1, 0, 0, :, 0].sum())
    ((4, 1, 8), 4)
    """
    return Plan(planned(None, **locals()))


# The arrays of calls that repeat, by the names that launches have for them; what is written comes last.
LOADED = "current_key", "current_value", "cache", "scale", "key", "value"
ATTENDED = "query", "current_key", "current_value", "cache", "scale", "out"


def is_pair(out):
    """Whether outputs are two arrays."""
    return isinstance(out, (tuple, list)) and len(out) == 2 and all(isinstance(a, np.ndarray) for a in out)


def unaligned(out):
    """Whether given outputs lie where a load may not write around the caches, which takes other code."""
    return None if out is None else any(cpu.launches.address(array) % 16 for array in out)


class Plan:
    """The operators over one checked step; `plan` makes it. Its methods may be called for any caches.

    Calls that differ only in the addresses of their arrays, and have neither mask nor sinks, are checked and
    prepared once (see `repeats`).
    """

    __slots__ = ("_repeats", "_sequences")

    def __init__(self, sequences: Any) -> None:
        self._sequences, self._repeats = sequences, Repeats()

    @in_kind
    def key_value_cache(
        self,
        current_key: Array,
        current_value: Array,
        cache: Array,
        scale: Array | None = None,
        *,
        num_layer: int = 1,
        layer_idx: int = 0,
        quant_bit: Literal[0, 4, 8] = 0,
        quant_group: int = 8,
        quant_format: Literal["e4m3", "e5m2", "q8_0", "q4_0"] | None = None,
        num_repeat: int = 1,
        cache_layout: int = 0,
        out: Pair | None = None,
    ) -> Pair:
        """`dynamic_batching.key_value_cache` for this step."""
        given, arrays, known = launch.arguments(locals()), (current_key, current_value, cache, scale), None
        if out is None or is_pair(out):
            known = form((*arrays, *(out or ())), (*given.values(), unaligned(out))[len(arrays) :])
        prepared = self._repeats.get(known)
        if prepared:
            made: Any = out
            if out is None:
                tokens = self._sequences.steps.context
                shape = tokens, current_key.shape[1] * num_repeat, current_key.shape[2]
                made = np.empty(shape, current_key.dtype), np.empty(shape, current_key.dtype)
            if prepared.run(dict(zip(LOADED, (*arrays, *made), strict=True))):
                return made[0], made[1]
        call = checked_key_value_cache(self._sequences, **given)
        made = call.results.taken(out)
        launches = launch.transfers(call, made, new=out is None)
        cpu.launches.start(*launches)
        if known and call.current_key is current_key and call.current_value is current_value:
            repeated = dict(zip(LOADED, (*arrays, *made), strict=True))
            self._repeats.keep(known, Guarded(launches, repeated, LOADED[2:]))
        return made

    @in_kind
    def multi_head_cache_attention(
        self,
        query: Array,
        current_key: Array,
        current_value: Array,
        cache: Array,
        scale: Array | None = None,
        attn_mask: Array | None = None,
        *,
        num_heads: int,
        head_dim: int,
        is_causal: bool = True,
        is_alibi: bool = False,
        num_kv_heads: int = 0,
        num_layer: int = 1,
        layer_idx: int = 0,
        quant_bit: Literal[0, 4, 8] = 0,
        quant_group: int = 8,
        quant_format: Literal["e4m3", "e5m2", "q8_0", "q4_0"] | None = None,
        cache_layout: int = 0,
        softmax_scale: float | None = None,
        window: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        sinks: Array | None = None,
        return_lse: bool = False,
        out: Array | Pair | None = None,
    ) -> Attended:
        """`dynamic_batching.multi_head_cache_attention` for this step."""
        given, arrays = launch.arguments(locals()), (query, current_key, current_value, cache, scale)
        known = None
        if attn_mask is None and sinks is None and return_lse is False:
            known = form((*arrays, out), tuple(given.values())[len(arrays) :])
        prepared = self._repeats.get(known)
        if prepared:
            made = np.empty(query.shape, query.dtype) if out is None else out
            if prepared.run(dict(zip(ATTENDED, (*arrays, made), strict=True))):
                return made
        call = checked_cache_attention(self._sequences, **given)
        made = call.results.taken(out)
        launches = launch.attention(call, made)
        cpu.launches.start(*launches)
        used = call.query, *call.current
        if known and all(a is b for a, b in zip(arrays, used, strict=False)):
            repeated = dict(zip(ATTENDED, (*arrays, made[0]), strict=True))
            self._repeats.keep(known, Guarded(launches, repeated, ATTENDED[3:]))
        return launch.returned(made)
