"""Implement ``attn_implementation="kvkit"``: attention that reads a `KvkitCache` in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvkit.errors import KvkitError, argument_error
from kvkit.integrations.transformers import pending
from kvkit.integrations.transformers.bridge import as_cast, to_numpy, without_gradient
from kvkit.interop import numpy_to_tensor
from kvkit.static.attention import multi_head_attention
from kvkit.typed import Array

NAME = "kvkit"
NO_WINDOW = -1, -1
THEIR_NAMES = {"attn_mask": "attention_mask", "softmax_scale": "scaling", "sinks": "s_aux"}
HIDDEN = -1e30  # a mask that is added to scores hides a key by a number below this


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
    if stored is not None and stored.is_moved:
        check_moved(stored.layer, attention_mask, position_ids)
    query, key, value = as_cast(query, key, value)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    options = {
        "softmax_scale": scaling,
        "softcap": softcap or 0.0,
        "sinks": None if s_aux is None else to_numpy("s_aux", s_aux),
    }
    indices = kwargs.get("indices")
    latent_dim = stored.layer.latent_dim if stored is not None else 0
    with THEIRS:
        if stored is not None and latent_dim and (stored.begin or indices is not None):
            attn_output = attend_latent(module, stored.layer, query, attention_mask, indices, options)
        else:
            source = None if latent_dim else stored  # the model has expanded the latent rows of a prompt
            states = query, key, value
            attn_output = attend_states(source, states, attention_mask, sliding_window, is_causal, options)
    if stored is not None and latent_dim and stored.after_attention is not None:
        latent, rotated, _ = absorb_queries(module, stored.layer, query)
        row_dim = latent_dim + rotated.shape[3]
        # The model's scores are q · k * scaling, a scorer's are q · k / sqrt(row_dim).
        scaled = np.concatenate((latent, rotated), 3) * np.float32(scaling * row_dim**0.5)
        padding = padding_of(
            stored.layer, None if attention_mask is None else to_numpy("attention_mask", attention_mask)
        )
        stored.after_attention(scaled.astype(latent.dtype), None, padding)
    return without_gradient(attn_output, query, key, value), None


class NamesOfTransformers:
    """Lets errors name the arguments as transformers does."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, KvkitError):
            name, colon, rest = str(error).partition(":")
            raise type(error)(THEIR_NAMES.get(name, name) + colon + rest) from error


THEIRS = NamesOfTransformers()  # made once: a generator for each call takes longer than the checks


def absorb_queries(module: Any, layer: Any, query: torch.Tensor) -> tuple[Array, Array, torch.Tensor]:
    """Return queries times W_UK [B, H, q, L], the rotated parts of queries [B, H, q, R], and W_UV [H, V, L].

    The module's ``kv_b_proj`` has the up-projections: for each head the rows of W_UK, then those of W_UV.
    """
    projection, nope = getattr(module, "kv_b_proj", None), getattr(module, "qk_nope_head_dim", None)
    if not isinstance(projection, torch.nn.Linear) or nope is None or projection.bias is not None:
        raise argument_error("module", "attention with kv_b_proj and qk_nope_head_dim", type(module).__name__)
    weight = projection.weight.to(query.dtype).view(query.shape[1], -1, layer.latent_dim)  # [H, K + V, L]
    latent = to_numpy("query", query[..., :nope] @ weight[:, :nope])
    return latent, to_numpy("query", query[..., nope:]), weight[:, nope:]


def attend_latent(
    module: Any,
    layer: Any,
    query: torch.Tensor,
    attention_mask: torch.Tensor | None,
    indices: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """Attend with absorbed queries to the latent rows of a layer; return outputs of heads [B, q, H, Dv]."""
    latent, rotated, w_uv = absorb_queries(module, layer, query)
    if options["softcap"] or options["softmax_scale"] is None:
        raise argument_error("scaling", "a number, and no softcap", options["softmax_scale"])
    new = query.shape[2]
    visible = mask = None if attention_mask is None else to_numpy("attention_mask", attention_mask)
    if mask is not None and mask.ndim == 4:
        visible = mask if mask.dtype == np.bool_ else np.asarray(mask, np.float32) > HIDDEN
        later = np.triu(np.ones((new, mask.shape[3]), np.bool_), mask.shape[3] - new + 1)  # [q, n]
        if new > 1 and (visible & later).any():
            raise argument_error("attention_mask", "one that hides later tokens", "one that shows some")
    elif mask is not None and layer._row_positions is None:
        visible = mask = mask[:, None, None]
    more = {name: options[name] for name in ("softmax_scale", "sinks")}
    if indices is not None:
        rows = to_numpy("indices", indices)  # [B, q, K], of all rows
        if visible is not None:  # an index of -1 selects no row
            visible = np.broadcast_to(visible, (len(rows), 1, new, visible.shape[3]))
            rows = np.where(np.take_along_axis(visible[:, 0], rows.astype(np.int64), 2), rows, -1)
        more, mask = more | {"indices": rows}, None
    output = numpy_to_tensor(layer.attend(latent, rotated, mask, **more))  # [B, H, q, L]
    return (output @ w_uv.transpose(1, 2)).transpose(1, 2)


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
    mask, has_causality = None, False  # whether the mask hides later tokens and those outside the window
    if attention_mask is not None:
        mask = to_numpy("attention_mask", attention_mask)
        has_causality = mask.ndim == 4
        has_positions = stored is not None and stored.is_moved  # its columns are positions, not rows
        mask = mask if has_causality or has_positions else mask[:, None, None]
    causal = is_causal and not has_causality
    window = (sliding_window - 1, -1) if causal and sliding_window else NO_WINDOW
    if stored is None:
        keys, values = to_numpy("key", key), to_numpy("value", value)
    else:
        layer_options = None
        if (
            mask is not None and has_causality and stored.layer.chunk_size
        ):  # with padding, chunks begin elsewhere in each row
            if shows_chunks(stored.layer, mask):
                return attend_in_place(stored, queries, None, options)
        elif causal or query.shape[2] == 1:  # a single query is the last token and sees all keys anyway
            layer_options = window_options(stored.layer, sliding_window, window)
        if layer_options is not None:
            return attend_in_place(stored, queries, mask, options | layer_options)
        keys, values = arrays_for_mask(stored, mask)
    queries, keys, values = (states.swapaxes(1, 2) for states in (queries, keys, values))
    attn_output = multi_head_attention(
        queries, keys, values, mask, num_heads=queries.shape[2], head_dim=queries.shape[3],
        num_kv_heads=keys.shape[2], is_causal=causal, window=window, **options,
    )  # fmt: skip
    return numpy_to_tensor(attn_output)


def attend_in_place(
    stored: pending.Stored, queries: Array, mask: Array | None, options: dict[str, Any]
) -> torch.Tensor:
    """Attend to a layer's rows where they lie, and pass queries and weights to `stored.after_attention`."""
    if stored.wants_weights:
        attn_output, weights = stored.layer.attend(queries, mask, **options, return_key_weights=True)
    else:
        attn_output, weights = stored.layer.attend(queries, mask, **options), None
    stored.drop_arrays()
    if stored.after_attention is not None:
        stored.after_attention(queries, weights, padding_of(stored.layer, mask))
    return numpy_to_tensor(attn_output.swapaxes(1, 2))


def padding_of(layer: Any, mask: Array | None) -> Array | None:
    """Return which positions the last query may see by a mask, bool [B, n]; None without a mask."""
    if mask is None:
        return None
    shown: Array = mask if mask.dtype == np.bool_ else np.asarray(mask, np.float32) > HIDDEN
    if shown.ndim == 4:
        shown = np.logical_or.reduce(shown[:, :, -1], axis=1)
    length, rows = layer.get_seq_length(), layer.stored_tokens
    if shown.shape[1] < length and shown.shape[1] == rows and layer.positions.ndim == 1:
        whole = np.ones((len(shown), length), np.bool_)
        whole[:, layer.positions] = shown
        shown = whole
    return np.broadcast_to(shown[:, :length], (layer.batch_size, length))


def arrays_for_mask(stored: pending.Stored, mask: Array | None) -> tuple[Array, ...]:
    """Return stored keys and values, for attention with a mask or window that the layer cannot apply."""
    found = "a mask or a window of its own"
    if stored.after_attention is not None:
        wanted = "causal attention with masks of padding only, for a cache that evicts tokens"
        raise argument_error("attention_mask", wanted, found)
    if stored.is_moved:
        wanted = "a mask of padding only and no window, because tokens of the cache were removed or moved"
        raise argument_error("attention_mask", wanted, found)
    keys, values = stored.arrays()
    if mask is not None and stored.layer.window is not None and mask.shape[3] != keys.shape[2]:
        wanted = f"{keys.shape[2]} columns, for the keys that the window needs"
        raise argument_error("attention_mask", wanted, mask.shape[3])
    return keys, values


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


def shows_chunks(layer: Any, mask: Array) -> bool:
    """Return whether a mask [B, 1, q, keys] shows each query its chunk, as the layer does without a mask."""
    if mask.dtype != np.bool_ or mask.shape[1] != 1:
        return False
    queries = np.arange(layer.span.length - mask.shape[2], layer.span.length)[:, None]
    keys = np.arange(layer.span.begin, layer.span.length)
    visible = (keys <= queries) & (keys >= queries // layer.chunk_size * layer.chunk_size)
    return mask.shape[3] == len(keys) and bool((mask == visible).all())


def window_options(layer: Any, sliding_window: int | None, window: tuple[int, int]) -> dict[str, Any] | None:
    """Return the options by which a layer's own attention applies a window; None if it cannot."""
    if layer._takes_window:
        return {"window": window}
    if layer.window is None:
        return {} if window == NO_WINDOW else None
    if sliding_window not in (None, layer.model_window):
        raise argument_error("sliding_window", f"{layer.model_window}, as the cache has it", sliding_window)
    return {}  # the layer applies its own window
