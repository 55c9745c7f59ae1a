"""Make the mask that transformers passes to all layers of one kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask


@torch.compiler.disable
def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Return the mask that kvkit's attention needs. It applies causality and the window itself.

    Parameters
    ----------
    batch_size, q_length, kv_length, q_offset, kv_offset : int
        How many rows the batch has, how many queries and keys a row has, and the first one's position.
    mask_function : callable
        Says which keys a query sees. With `allow_is_causal_skip` it is causal, perhaps with a window.
    attention_mask : Tensor, optional
        bool [B, n]: False where padding is.
    local_size : int, optional
        The size of the window; of chunks if `config` has ``attention_chunk_size``.
    allow_is_causal_skip : bool
        Whether the mask is causal apart from padding.
    config : PreTrainedConfig, optional
        The config of the model.
    **kwargs
        Arguments of transformers' own mask function.

    Returns
    -------
    Tensor or None
        None if there is no padding. If only padding is hidden: bool [B, kv_length], a column for each key; or
        `attention_mask` itself, a column for each position, if tokens were removed from the cache. Otherwise
        the whole mask, bool [B, 1, q_length, kv_length].

    Examples
    --------
    >>> import torch
    >>> from kvkit.integrations.transformers.masks import attention_mask
    >>> padded = torch.tensor([[False, True, True], [True, True, True]])
    >>> attention_mask(2, 3, 3, attention_mask=padded).shape
    torch.Size([2, 3])
    >>> attention_mask(2, 3, 3, attention_mask=padded[1:]) is None
    True
    """
    aligned = q_offset + q_length == kv_offset + kv_length  # False if unused keys follow
    in_chunks = local_size is not None and getattr(config, "attention_chunk_size", None) is not None
    in_chunks = in_chunks and q_offset + q_length > local_size  # type: ignore[operator]  # more than one
    padded = attention_mask is not None and not bool(attention_mask.all())
    slices_masks = bool(getattr(config, "num_kv_shared_layers", 0))  # Gemma 4 takes rows of a mask by query
    if not allow_is_causal_skip or not aligned or in_chunks or (slices_masks and padded and q_length > 1):
        return sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, local_size,
            allow_is_causal_skip=False, **kwargs,
        )  # fmt: skip
    if attention_mask is None:
        return None
    if kv_offset and local_size is None:  # tokens were removed: fewer keys than positions without a window
        return None if attention_mask.all() else attention_mask
    padding = attention_mask[:, kv_offset : kv_offset + kv_length]
    is_needless = padding.shape[1] == kv_length and padding.all()  # attention will refuse a mask too short
    return None if is_needless else padding
