"""Run ONNX `Attention` on kvkit's kernels, without copies of inputs, caches and outputs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from onnx.reference.op_run import OpRun

from kvkit.errors import argument_error
from kvkit.formats import FLOATS
from kvkit.integrations.onnx import scores
from kvkit.integrations.onnx.scores import Visibility
from kvkit.static.attention import multi_head_attention
from kvkit.typed import Array

Window = tuple[int, int]
FLOAT_TYPES = 1, 10, 11, 16  # ONNX's numbers of FLOAT, FLOAT16, DOUBLE, BFLOAT16


class Attention(OpRun):
    """Computes the ONNX operator `Attention`, opsets 23 to 25, for float32, float16 and bfloat16, also mixed.

    Scores, softmax and sums are float32 whatever `softmax_precision` says. Numpy computes the output
    `qk_matmul_output` of a node that has it, because no kernel keeps that matrix.
    """

    def _run(
        self,
        query: Array,
        key: Array,
        value: Array,
        attn_mask: Array | None = None,
        past_key: Array | None = None,
        past_value: Array | None = None,
        nonpad_kv_seqlen: Array | None = None,
        *,
        scale: float | None = None,
        is_causal: int = 0,
        q_num_heads: int | None = None,
        kv_num_heads: int | None = None,
        softmax_precision: int | None = None,
        softcap: float = 0.0,
        qk_matmul_output_mode: int = 0,
        left_window_size: int = -1,
        right_window_size: int = -1,
    ) -> tuple[Array, ...]:
        if softmax_precision not in (None, *FLOAT_TYPES):
            wanted = f"a float type, one of {FLOAT_TYPES}"
            raise argument_error("softmax_precision", wanted, softmax_precision)
        if left_window_size < -1 or right_window_size < -1:
            sizes = left_window_size, right_window_size
            raise argument_error("left_window_size, right_window_size", "-1 or more", sizes)
        if (past_key is None) != (past_value is None):
            raise argument_error("past_key, past_value", "both or neither", "one")
        joins_heads = query.ndim == 3  # [B, S, H * D], and so is the output
        query = tokens_first("Q", query, q_num_heads)
        key, value = tokens_first("K", key, kv_num_heads), tokens_first("V", value, kv_num_heads)
        past = 0
        if past_key is not None and past_value is not None:
            key, value = append_past("past_key", past_key, key), append_past("past_value", past_value, value)
            past = past_key.shape[2]
        batch, rows, heads, dim = query.shape
        context = key.shape[1]
        if key.shape[0] != batch or value.shape[:3] != key.shape[:3]:
            wanted = f"keys and values of {batch} sequences, alike"
            raise argument_error("K, V", wanted, (key.shape, value.shape))
        valid, offset = np.array([context]), np.array([past])
        if nonpad_kv_seqlen is not None:
            if past_key is not None:
                raise argument_error("nonpad_kv_seqlen", "a node without past_key", "one with it")
            valid = check_lengths(nonpad_kv_seqlen, batch, context)
            offset = valid - rows
        mask, full = None, (batch, heads, rows, context)
        if attn_mask is not None:  # keys after its last column are hidden
            mask = attn_mask.reshape((1,) * (4 - attn_mask.ndim) + attn_mask.shape)
            fits = all(n in (1, size) for n, size in zip(mask.shape[:3], full, strict=False))
            if mask.ndim != 4 or not fits or mask.shape[3] > context:
                raise argument_error("attn_mask", f"a shape that broadcasts to {full}", attn_mask.shape)
        visibility = Visibility(valid, offset, left_window_size, 0 if is_causal else right_window_size, mask)
        scale, softcap = float(dim**-0.5 if scale is None else scale), float(softcap)

        shape = (batch, rows, heads) if joins_heads else (batch, heads, rows)
        output: Array = np.zeros((*shape, value.shape[3]), query.dtype)
        out_rows = output if joins_heads else output.transpose(0, 2, 1, 3)  # [B, S, H, Dv]
        attend_visible(query, key, value, visibility, scale, softcap, out_rows)
        if joins_heads:
            output = output.reshape(batch, rows, heads * value.shape[3])
        outputs = [output, key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)]
        if len(self.output) > 3 and self.output[3]:
            outputs.append(scores.score_matrix(query, key, visibility, scale, softcap, qk_matmul_output_mode))
        return tuple(outputs)


def attend_visible(
    query: Array, key: Array, value: Array, visibility: Visibility, scale: float, softcap: float, out: Array
) -> None:
    """Write attention into the rows of `out` whose queries see a key. The other rows stay zero.

    Inputs of several dtypes, or a mask of another dtype, are widened to float32.
    """
    rows, mask = query.shape[1], visibility.mask
    types = {array.dtype for array in (query, key, value)}
    types |= {mask.dtype} if mask is not None and mask.dtype != np.bool_ else set()
    if len(types) > 1 and types <= {fmt.dtype for fmt in FLOATS}:
        query, key, value = (array.astype(np.float32) for array in (query, key, value))
        mask = mask if mask is None or mask.dtype == np.bool_ else mask.astype(np.float32)
        out_float32 = out.astype(np.float32)
        attend_visible(query, key, value, replace(visibility, mask=mask), scale, softcap, out_float32)
        out[...] = out_float32
        return
    lengths = zip(visibility.valid.tolist(), visibility.offset.tolist(), strict=True)
    for sequence, (keys, offset) in enumerate(lengths):
        batch = slice(sequence, sequence + 1) if len(visibility.valid) > 1 else slice(None)
        keys = keys if mask is None else min(keys, mask.shape[3])
        n, m, window = visible_part(rows, keys, offset, visibility.left, visibility.right)
        if n and m:
            multi_head_attention(
                query[batch, :n], key[batch, :m], value[batch, :m],
                None if mask is None else mask[batch if len(mask) > 1 else slice(None), :, :n, :m],
                num_heads=query.shape[2], head_dim=query.shape[3], is_causal=False, num_kv_heads=key.shape[2],
                softmax_scale=scale, window=window, softcap=softcap, out=out[batch, :n],
            )  # fmt: skip


def tokens_first(name: str, array: Array, heads: int | None) -> Array:
    """Return a view [B, S, H, D] of an array [B, H, S, D] or [B, S, H * D]."""
    if array.ndim == 4:
        return array.transpose(0, 2, 1, 3)
    if array.ndim != 3 or not heads or array.shape[2] % heads:
        wanted = "4 axes, or 3 and heads that divide the last"
        raise argument_error(name, wanted, f"shape {array.shape}, {heads} heads")
    return array.reshape(*array.shape[:2], heads, array.shape[2] // heads)


def append_past(name: str, past: Array, current: Array) -> Array:
    """Join [B, H, past, D] and [B, S, H, D] into [B, past + S, H, D]."""
    batch, _, heads, dim = current.shape
    if past.ndim != 4 or (*past.shape[:2], past.shape[3]) != (batch, heads, dim):
        raise argument_error(name, f"shape ({batch}, {heads}, any, {dim})", past.shape)
    return np.concatenate((past, current.transpose(0, 2, 1, 3)), axis=2).transpose(0, 2, 1, 3)


def check_lengths(nonpad_kv_seqlen: Array, batch: int, context: int) -> Array:
    """Check and return the number of valid keys of each sequence."""
    if nonpad_kv_seqlen.shape != (batch,):
        raise argument_error("nonpad_kv_seqlen", f"shape ({batch},)", nonpad_kv_seqlen.shape)
    if ((nonpad_kv_seqlen < 0) | (nonpad_kv_seqlen > context)).any():
        raise argument_error("nonpad_kv_seqlen", f"lengths from 0 to {context}", nonpad_kv_seqlen)
    return nonpad_kv_seqlen


def visible_part(rows: int, keys: int, offset: int, left: int, right: int) -> tuple[int, int, Window]:
    """Return (rows, keys, window) for a call of kvkit: how many first queries and keys can see each other.

    In ONNX query i is at position offset + i. In kvkit the last query is at the last key, so that its window
    must move by the difference. For 2 rows from position 4 on, and 5 keys::

        position      0  1  2  3  4  5
        keys          k0 k1 k2 k3 k4
        in ONNX                   q0 q1    window (2, 0): q1 sees k3 and k4
        in kvkit               q0 q1       window (1, 1)
    """
    if right >= 0:
        keys = max(min(keys, offset + rows + right), 0)
    if left >= 0:
        rows = max(min(rows, keys + left - offset), 0)
    shift = offset + rows - keys
    return rows, keys, (left - shift if left >= 0 else -1, right + shift if right >= 0 else -1)
