"""Check contexts in an engine's pages once for all layers of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsIndex

from numpy.typing import ArrayLike

from kvkit.calls.pools import PlannedPages
from kvkit.calls.targets import plan_method
from kvkit.checks.arguments import PoolAttention, PoolTransfer, Scoring
from kvkit.checks.contexts import checked_plan
from kvkit.interop import returns_input_kind
from kvkit.rope import Rope, as_rope
from kvkit.runtime.repeats import Repeats
from kvkit.typed import Array, Arrays, Attended


@returns_input_kind
def paged_plan(
    block_tables: ArrayLike | tuple[ArrayLike, ArrayLike],
    context_lens: ArrayLike,
    query_starts: ArrayLike | None = None,
    *,
    page_size: SupportsIndex,
) -> PagedPlan:
    """Check the pages of a step once, for all layers of a model.

    Parameters
    ----------
    block_tables, context_lens, query_starts
        As in `paged_attention`. The arrays are copied, so later changes to them have no effect.
    page_size : int
        The tokens of a page.

    Returns
    -------
    PagedPlan
        Its methods run `paged_append` and `paged_attention` for one layer.

    Raises
    ------
    KvkitError
        If an index tensor is wrong.

    Examples
    --------
    Two sequences get a token each, the first one in its second page:

    >>> import numpy as np, kvkit
    >>> plan = kvkit.paged_plan([[3, 0], [1, -1]], [5, 2], page_size=4)
    >>> keys, values = (np.zeros((2, 4, 4, 1, 8), np.float16) for _ in range(2))    # two layers
    >>> new = np.ones((2, 1, 8), np.float16)
    >>> for layer in range(2):
    ...     _ = plan.paged_append(new, new, keys[layer], values[layer])
    ...     output = plan.paged_attention(new, keys[layer], values[layer])
    >>> output.shape, np.argwhere(keys[1, :, :, 0, 0]).tolist()                     # pages, tokens
    ((2, 1, 8), [[0, 0], [1, 1]])
    """
    return PagedPlan(PlannedPages(checked_plan(block_tables, context_lens, query_starts, page_size)))


class PagedPlan:
    """Runs operators for checked contexts in pages, over any pools. `paged_plan` makes it.

    The contexts end with the tokens that `paged_append` stores. Calls that differ only in the addresses of
    their arrays are checked and prepared once, unless they have a mask, slopes, sinks or scales of heads.
    """

    __slots__ = ("repeats", "step")

    def __init__(self, step: PlannedPages) -> None:
        pools = (2, "key_cache"), (3, "value_cache")
        self.step = step
        self.repeats = {"paged_append": Repeats(*pools), "paged_attention": Repeats()}

    @plan_method
    def paged_append(
        self,
        key: Array | None,
        value: Array | None,
        key_cache: Array | None,
        value_cache: Array | None,
        *,
        layout: str = "b n h c",
        key_scale: float | Array | None = None,
        value_scale: float | Array | None = None,
        rope: Rope | Mapping[str, Any] | str | None = None,
    ) -> tuple[Array | None, Array | None]:
        """Run `paged_append` for the last tokens of the contexts, whose lengths must include them."""
        call = PoolTransfer(
            key, value, key_cache, value_cache, (), layout=layout, key_scale=key_scale,
            value_scale=value_scale, rope=as_rope(rope),
        )  # fmt: skip
        self.step.append(call)
        return key_cache, value_cache

    @plan_method
    def paged_attention(
        self,
        query: Array,
        key_cache: Array,
        value_cache: Array | None,
        attn_mask: Array | None = None,
        *,
        layout: str = "b n h c",
        key_scale: float | Array | None = None,
        value_scale: float | Array | None = None,
        quant_format: str | None = None,
        is_causal: bool = True,
        alibi_slopes: Array | None = None,
        softmax_scale: float | None = None,
        window: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        sinks: Array | None = None,
        return_lse: bool = False,
        return_key_weights: bool = False,
        out: Array | Arrays | None = None,
    ) -> Attended:
        """Run `paged_attention` for the contexts."""
        call = PoolAttention(
            query, key_cache, value_cache, (), (), None, layout=layout, key_scale=key_scale,
            value_scale=value_scale, alibi_slopes=alibi_slopes,
            scoring=Scoring(attn_mask, is_causal, False, softmax_scale, window, softcap, sinks),
            return_lse=return_lse, return_key_weights=return_key_weights, quant_format=quant_format,
        )  # fmt: skip
        return self.step.attend(call, out)
