"""Define the compressed caches of DeepSeek V4: pooled rows, their slots, and attention beside a window.

A row i of ratio m pools the tokens i m .. i m + m - 1, and with overlap the m tokens before them too:
row_c = RMSNorm(sum over tokens j of softmax_j(gate_jc + ape_jc) kv_jc), rotated at position i m.
"""

import math
from typing import Any

import numpy as np
from numpy import ndarray as Array

__all__ = ["compress_tokens", "compressed_slots", "rope_back"]


def rope_back(output: Array, positions: Any, rope: Any) -> Array:
    """Return outputs [tokens, heads, dim] with their last elements rotated back by their positions."""
    return np.array([rotated(x, rope, -int(p)) for x, p in zip(output, positions, strict=True)])


def rotated(x: Array, rope: Any, position: int) -> Array:
    """Return rows [.., dim] with their last `rotary_dim` elements rotated by a position.

    `rope` has the keywords of `kvkit.Rope`, or is one; scaled frequencies are read from it.
    """
    x, how = np.array(x, np.float64), rope if isinstance(rope, dict) else vars(rope)
    dim, theta, interleaved = how["rotary_dim"], how.get("theta", 1e4), how.get("interleaved", False)
    frequencies = how.get("frequencies", [theta ** (-2 * i / dim) for i in range(dim // 2)])
    tail = x[..., x.shape[-1] - dim :]
    for i, frequency in enumerate(frequencies):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + dim // 2)
        cosine, sine = math.cos(position * frequency), math.sin(position * frequency)
        tail[..., a], tail[..., b] = (
            tail[..., a] * cosine - tail[..., b] * sine,
            tail[..., a] * sine + tail[..., b] * cosine,
        )
    return x


def compress_tokens(
    kv: Array, gate: Array, ape: Array, state: Array, *, ratio: int, overlap: bool, norm_weight: Array,
    positions: Any = None, starts: Any = None, state_indices: Any = None, rope: Any = None, eps: float = 1e-6,
) -> tuple[Array, Array]:  # fmt: skip
    """Return the rows [n, dim] that packed tokens finish, and the row of each token or -1; states change."""
    dim, ring = len(norm_weight), state.shape[1]
    starts = [0, len(kv)] if starts is None else starts
    rows, row_of_token, factor = [], np.full(len(kv), -1), getattr(rope, "attention_factor", 1.0)
    for n in range(len(starts) - 1):
        begin, end = int(starts[n]), int(starts[n + 1])
        slot = n if state_indices is None else int(state_indices[n])
        for t in range(begin, end if slot >= 0 else begin):
            p = t - begin if positions is None else int(positions[t])
            state[slot, p % ring] = kv[t], np.asarray(gate[t], np.float64) + ape[p % ratio]
            if (p + 1) % ratio:
                continue
            values, scores = [], []
            for j in range(max(0, p + 1 - (2 * ratio if overlap else ratio)), p + 1):
                own = slice(dim) if overlap and j <= p - ratio else slice(kv.shape[1] - dim, None)
                value, score = np.asarray(state[slot, j % ring], np.float64)
                values.append(value[own])
                scores.append(score[own])
            e = np.exp(np.array(scores) - np.max(scores, 0))
            pooled = (np.array(values) * e).sum(0) / e.sum(0)
            row = pooled / np.sqrt(np.mean(pooled * pooled) + eps) * norm_weight
            rows.append(row if rope is None else rotated(row, rope, p + 1 - ratio) * factor)
            row_of_token[t] = p // ratio
    return np.array(rows, np.float64).reshape(-1, dim), row_of_token


def compressed_slots(
    positions: Any, block_tables: Array, page_size: int, *, ratio: int, sequence_of_token: Any = None
) -> Array:
    """Return the slot of the row that each token finishes, -1 where it finishes none."""
    slots = np.full(len(positions), -1)
    for t, position in enumerate(positions):
        p = int(position)
        if p >= 0 and (p + 1) % ratio == 0:
            table = block_tables[0 if sequence_of_token is None else int(sequence_of_token[t])]
            slots[t] = int(table[p // ratio // page_size]) * page_size + p // ratio % page_size
    return slots


def compressed_attention(
    q: Array, window_rows: Array, rows: Array, positions: Any, *, window: int = 128, ratio: int = 0,
    sinks: Any = None, softmax_scale: Any = None, index: Any = None, index_keys: Any = None,
    index_topk: int = 0,
) -> tuple[Array, Array]:  # fmt: skip
    """Return the outputs [tokens, heads, dim] and lse [tokens, heads] of one sequence's queries.

    `window_rows` [positions, dim] are the rows of all positions, `rows` [n, dim] the compressed ones. `index`
    is (queries [tokens, heads, d], weights [tokens, heads]), which choose rows by `index_keys` [n, d].
    """
    out, lse = np.zeros(q.shape), np.zeros(q.shape[:2])
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    for t, position in enumerate(positions):
        p = int(position)
        ready = (p + 1) // ratio if ratio else 0
        chosen = np.arange(ready)
        if index is not None:
            query, weights = (np.asarray(x[t], np.float64) for x in index)
            products = np.maximum(query @ np.asarray(index_keys[:ready], np.float64).T, 0)
            scores = (products * query.shape[1] ** -0.5 * weights[:, None]).sum(0)
            chosen = np.sort(np.argsort(-scores, kind="stable")[:index_topk])
        near = np.asarray(window_rows[max(0, p + 1 - window) : p + 1], np.float64)
        keys = np.concatenate([near, np.asarray(rows[chosen], np.float64)])
        for h in range(q.shape[1]):
            scores = [*(keys @ np.asarray(q[t, h], np.float64) * scale)]
            e = np.exp(np.array(scores + ([] if sinks is None else [float(sinks[h])])) - max(scores))
            out[t, h] = e[: len(keys)] @ keys / e.sum()
            lse[t, h] = max(scores) + math.log(e.sum())
    return out, lse
