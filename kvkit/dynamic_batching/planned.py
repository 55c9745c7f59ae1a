"""Check a step of packed sequences once for all layers of a model."""

from __future__ import annotations

from typing import Literal, SupportsIndex

from numpy.typing import ArrayLike

from kvkit.calls.steps import PlannedStep
from kvkit.calls.targets import plan_method
from kvkit.checks.arguments import (
    CacheArguments,
    CacheAttention,
    CacheTransfer,
    Scoring,
    StepArguments,
)
from kvkit.checks.index_tensors import packed_in_cache
from kvkit.interop import returns_input_kind
from kvkit.runtime.repeats import Repeats
from kvkit.typed import Array, Attended, Pair


@returns_input_kind
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
    """Check the index tensors of a step once, for all layers of a model.

    Parameters
    ----------
    seqstarts, kvstarts, cachestarts, start_pos, max_seqlen, max_kvlen, cache_mode, page_size
        As in `key_value_cache`. The arrays are copied, so later changes to them have no effect.
    decoding_batches : int
        How many sequences, counted from the first, ignore ``is_causal``.

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
    index = StepArguments(
        seqstarts, kvstarts, cachestarts, start_pos, decoding_batches, max_seqlen=max_seqlen,
        max_kvlen=max_kvlen, cache_mode=cache_mode, page_size=page_size,
    )  # fmt: skip
    return Plan(PlannedStep(packed_in_cache(None, index)))


class Plan:
    """Runs operators for one checked step, over any caches. `plan` makes it.

    Calls without mask and sinks that differ only in the addresses of their arrays are checked and prepared
    once.
    """

    __slots__ = ("repeats", "step")

    def __init__(self, step: PlannedStep) -> None:
        names = "key_value_cache", "multi_head_cache_attention"
        self.step, self.repeats = step, {name: Repeats() for name in names}

    @plan_method
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
        """Run `dynamic_batching.key_value_cache` for this step."""
        place = CacheArguments(num_layer, layer_idx, quant_bit, quant_group, quant_format, cache_layout)
        call = CacheTransfer(current_key, current_value, cache, scale, place, num_repeat)
        return self.step.load(call, out)

    @plan_method
    def multi_head_cache_attention(
        self,
        query: Array,
        current_key: Array,
        current_value: Array,
        cache: Array,
        scale: Array | None = None,
        attn_mask: Array | None = None,
        *,
        num_heads: int = 0,
        head_dim: int = 0,
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
        """Run `dynamic_batching.multi_head_cache_attention` for this step."""
        place = CacheArguments(num_layer, layer_idx, quant_bit, quant_group, quant_format, cache_layout)
        scoring = Scoring(attn_mask, is_causal, is_alibi, softmax_scale, window, softcap, sinks)
        heads = num_heads, head_dim, num_kv_heads
        call = CacheAttention(
            query, current_key, current_value, cache, scale, place=place, heads=heads, scoring=scoring,
            return_lse=return_lse,
        )  # fmt: skip
        return self.step.attend(call, out)
