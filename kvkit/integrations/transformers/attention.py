"""Implement ``attn_implementation="kvkit"``: attention that reads a `KvkitCache` in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import kvkit
from kvkit.errors import argument_error
from kvkit.integrations.transformers import pending
from kvkit.integrations.transformers.bridge import as_cast, to_numpy, without_gradient
from kvkit.interop import numpy_to_tensor

NAME = "kvkit"
NO_WINDOW = -1, -1
LEAST = -1e30  # a mask hides a key by a smaller number


@torch.compiler.disable
def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: None = None,
    position_ids: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for a layer of a transformers model.

    Parameters
    ----------
    module : Module
        The attention layer: its ``layer_idx``, and ``is_causal`` unless that is given.
    query : Tensor, shape [B, Hq, q, Dk]
    key : Tensor, shape [B, Hkv, S, Dk]
        A tensor that `KvkitCache.update` returned stands for all stored keys; other tensors are keys.
    value : Tensor, shape [B, Hkv, S, Dv]
        The tensor that came with `key`.
    attention_mask : Tensor, optional
        bool [B, S], the padding of the keys; if tokens were removed [B, n], of all positions. Or a mask with
        4 axes, bool or added to the scores, which includes causality and the window.
    dropout : float
        Must be 0.
    scaling : float, optional
        Factor of the scores; 1 / sqrt(Dk) if None.
    sliding_window : int, optional
        How many tokens a query sees, itself included.
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)``.
    s_aux : Tensor, shape [Hq], optional
        Sinks: an additional score for each head, without a value.
    is_causal : bool, optional
        Whether a query sees no later token. The queries are those of the last tokens.
    position_bias : None
        Must be None.
    position_ids : Tensor, optional
        The positions of the queries. If tokens were moved, they must follow the positions in the cache.

    Returns
    -------
    attn_output : Tensor, shape [B, q, Hq, Dv]
    attn_weights : None

    Examples
    --------
    >>> import torch
    >>> from kvkit.integrations.transformers.attention import attention_forward
    >>> value = torch.arange(3.).reshape(1, 1, 3, 1)
    >>> query, key = torch.ones(1, 2, 2, 4), torch.ones(1, 1, 3, 4)
    >>> attn_output, _ = attention_forward(torch.nn.Module(), query, key, value)
    >>> attn_output[0, :, 0, 0]
    tensor([0.5000, 1.0000])
    """
    stored = pending.claim(getattr(module, "layer_idx", None), key, value)
    if dropout:
        raise argument_error("dropout", "0", dropout)
    if position_bias is not None:
        raise argument_error("position_bias", "None", "a bias")
    if module.training and query.requires_grad and torch.is_grad_enabled():
        wanted = "one that is not trained: this attention has no gradient"
        raise argument_error("module", wanted, "training mode")
    if stored is not None and stored.layer.row_positions is not None:
        check_moved(stored.layer, attention_mask, position_ids)
    query, key, value = map(as_cast, (query, key, value))
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    options = {
        "softmax_scale": scaling,
        "softcap": softcap or 0.0,
        "sinks": None if s_aux is None else to_numpy("s_aux", s_aux),
    }
    indices = kwargs.get("indices")
    latent = stored is not None and stored.layer.latent_dim
    if stored is not None and latent and (stored.begin or indices is not None):
        attn_output = attend_latent(module, stored.layer, query, attention_mask, indices, options)
    else:
        source = None if latent else stored  # the model has expanded the latent rows of a prompt
        states = query, key, value
        attn_output = attend_states(source, states, attention_mask, sliding_window, is_causal, options)
    if stored is not None and latent and stored.seen is not None:
        parts = absorbed(module, stored.layer, query)[:2]
        scaled = np.concatenate(parts, 3) * np.float32(scaling * (latent + parts[1].shape[3]) ** 0.5)
        stored.seen(scaled.astype(parts[0].dtype), None)  # scorers divide by this root
    return without_gradient(attn_output, query, key, value), None


def absorbed(module: Any, layer: Any, query: torch.Tensor) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
    """Return (absorbed queries, rotated parts of queries, projections of outputs [H, V, L]).

    The module's ``kv_b_proj`` has the up-projections: for each head the rows of W_UK, then those of W_UV.
    """
    weight, nope = getattr(module, "kv_b_proj", None), getattr(module, "qk_nope_head_dim", None)
    if not isinstance(weight, torch.nn.Linear) or nope is None or weight.bias is not None:
        raise argument_error("module", "attention with kv_b_proj and qk_nope_head_dim", type(module).__name__)
    by_head = weight.weight.to(query.dtype).view(query.shape[1], -1, layer.latent_dim)
    latent = to_numpy("query", query[..., :nope] @ by_head[:, :nope])
    return latent, to_numpy("query", query[..., nope:]), by_head[:, nope:]


def attend_latent(
    module: Any,
    layer: Any,
    query: torch.Tensor,
    attention_mask: torch.Tensor | None,
    indices: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """Attend with absorbed queries to the latent rows of a layer; return outputs of heads [B, q, H, Dv]."""
    latent, rotated, by_head = absorbed(module, layer, query)
    if options["softcap"] or options["softmax_scale"] is None:
        raise argument_error("scaling", "a number, and no softcap", options["softmax_scale"])
    new = query.shape[2]
    mask = None if attention_mask is None else to_numpy("attention_mask", attention_mask)
    if mask is not None and mask.ndim == 4:
        shows = mask if mask.dtype == np.bool_ else np.asarray(mask, np.float32) > LEAST
        after = np.triu(np.ones((new, mask.shape[3]), np.bool_), mask.shape[3] - new + 1)
        if new > 1 and (shows & after).any():
            raise argument_error("attention_mask", "one that hides later tokens", "one that shows some")
    elif mask is not None and layer.row_positions is None:
        mask = mask[:, None, None]
    shared = {"scale": options["softmax_scale"], "sinks": options["sinks"]}
    if indices is not None:
        rows = to_numpy("indices", indices)  # [B, q, K], of all rows
        if mask is not None:
            seen = np.broadcast_to(shows if mask.ndim == 4 else mask, (len(rows), 1, new, mask.shape[3]))
            rows = np.where(np.take_along_axis(seen[:, 0], rows.astype(np.int64), 2), rows, -1)
        shared, mask = shared | {"indices": rows}, None
    output = numpy_to_tensor(layer.attend(latent, rotated, mask, **shared))
    return (output @ by_head.transpose(1, 2)).transpose(1, 2)


def attend_states(
    stored: pending.Stored | None,
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None,
    sliding_window: int | None,
    is_causal: bool,
    options: dict[str, Any],
) -> torch.Tensor:
    """Attend to stored keys and values, or if `stored` is None to the keys and values of `states`."""
    query, key, value = states
    queries = to_numpy("query", query)
    mask, whole = None, False
    if attention_mask is not None:
        mask = to_numpy("attention_mask", attention_mask)
        whole = mask.ndim == 4
        by_position = stored is not None and stored.layer.row_positions is not None
        mask = mask if whole or by_position else mask[:, None, None]
    causal = is_causal and not whole
    window = (sliding_window - 1, -1) if causal and sliding_window else NO_WINDOW
    if stored is None:
        keys, values = to_numpy("key", key), to_numpy("value", value)
    else:
        if causal or query.shape[2] == 1:  # a single query is the last token and sees all keys anyway
            more = window_options(stored.layer, sliding_window, window)
            if more is not None:
                if stored.wants_weights:
                    more["return_key_weights"] = True
                attended = stored.layer.attend(queries, mask, **options, **more)
                attn_output, weights = attended if stored.wants_weights else (attended, None)
                stored.drop_arrays()
                if stored.seen is not None:
                    stored.seen(queries, weights)
                return numpy_to_tensor(attn_output.swapaxes(1, 2))
        if stored.seen is not None:
            wanted = "causal attention with masks of padding only, for a cache that evicts tokens"
            raise argument_error("attention_mask", wanted, "a mask or a window of its own")
        if stored.layer.row_positions is not None:
            wanted = "a mask of padding only and no window, because tokens of the cache were removed or moved"
            raise argument_error("attention_mask", wanted, "a mask or a window of its own")
        keys, values = stored.arrays()
        if mask is not None and stored.layer.window is not None and mask.shape[3] != keys.shape[2]:
            expected = f"{keys.shape[2]} columns, for the keys that the window needs"
            raise argument_error("attention_mask", expected, mask.shape[3])
    queries, keys, values = (states.swapaxes(1, 2) for states in (queries, keys, values))
    attn_output = kvkit.multi_head_attention(
        queries, keys, values, mask, num_heads=queries.shape[2], head_dim=queries.shape[3],
        num_kv_heads=keys.shape[2], is_causal=causal, window=window, **options,
    )  # fmt: skip
    return numpy_to_tensor(attn_output)


def check_moved(layer: Any, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None) -> None:
    """Raise if a mask or positions do not fit a layer whose tokens were removed or moved."""
    length = layer.get_seq_length()
    if attention_mask is not None and attention_mask.ndim == 2 and attention_mask.shape[1] != length:
        wanted = f"{length} columns, one for each position up to the new tokens"
        raise argument_error("attention_mask", wanted, attention_mask.shape[1])
    if attention_mask is None and position_ids is not None and position_ids.ndim == 2:
        last = position_ids[:, -1]
        if not bool((last == length - 1).all()):
            wanted = f"{length - 1} for the last new token, the next position of the cache"
            raise argument_error("position_ids", wanted, int(last[last != length - 1][0]))


def window_options(layer: Any, sliding_window: int | None, window: tuple[int, int]) -> dict[str, Any] | None:
    """Return the options by which a layer's own attention applies a window; None if it cannot."""
    if layer.takes_window:
        return {"window": window}
    if layer.window is None:
        return {} if window == NO_WINDOW else None
    if sliding_window not in (None, layer.sliding_window):
        raise argument_error("sliding_window", f"{layer.sliding_window}, as the cache has it", sliding_window)
    return {}
