"""Define Ascend's operators over caches in blocks. Tokens are copied bit for bit."""

import math
from typing import Any

import numpy as np
from numpy import ndarray as Array

from kvkit.reference.attention import attend_sequence

__all__ = ["block_copy", "nd_to_nz", "nz_to_nd", "paged_attention", "paged_cache_load", "reshape_and_cache"]

UNDEFINED, KVHEAD, KVHEAD_ROPE, OMNI = range(4)  # values of compress_type


def reshape_and_cache(
    key: Any, value: Any, key_cache: Array, value_cache: Any, slot_mapping: Any, *,
    compress_type: int = UNDEFINED, wins: Any = None, seq_lens: Any = None, offset_index: Any = None,
    cache_format: str = "ND", empty_window: str = "copy",
) -> tuple[Any, Any]:  # fmt: skip
    """Write keys, then values into their slots, token by token or in runs of rows; return the caches."""
    for tokens, cache in ((key, key_cache), (value, value_cache)):
        if tokens is None:
            continue
        if compress_type != UNDEFINED:
            rows = cache.shape[1]
            runs = runs_of(tokens, compress_type, wins, seq_lens, offset_index, empty_window)
            for run, slot in zip(runs, slot_mapping, strict=True):
                for s, row in enumerate(run if slot >= 0 else (), slot):
                    cache[s // rows, s % rows, 0, :] = row
        elif cache_format == "NZ":  # element c of all heads is element c % n0 of group c // n0
            (rows, n0), dim = cache.shape[2:], tokens.shape[2]
            for t, s in enumerate(slot_mapping):
                for c in range(tokens.shape[1] * dim if s >= 0 else 0):
                    cache[s // rows, c // n0, s % rows, c % n0] = tokens[t, c // dim, c % dim]
        else:
            store_tokens(tokens, cache, slot_mapping)
    return key_cache, value_cache


def store_tokens(tokens: Array, cache: Array, slots: Any) -> None:
    """Write tokens into a cache [blocks, rows, heads, dim]."""
    rows = cache.shape[1]
    for t, s in enumerate(slots):
        if s >= 0:
            for h in range(tokens.shape[1]):
                cache[s // rows, s % rows, h, :] = tokens[t, h, :]


def runs_of(tokens: Array, mode: int, wins: Any, seq_lens: Any, offsets: Any, empty_window: str) -> list[Any]:
    """Return the list of rows that a compressed mode stores for each head of each sequence."""
    runs: list[Any] = []
    first, heads = 0, tokens.shape[1]
    for n in seq_lens:
        for h in range(heads):
            i = len(runs)
            offset = -1 if offsets is None else offsets[i]
            runs.append(compress_run(tokens[first : first + n, h], mode, wins[i], offset, empty_window))
        first += n
    return runs


def compress_run(x: Array, mode: int, win: int, offset: int, empty_window: str) -> list[Array]:
    """Return the rows of x [n, D] that are stored.

    KVHEAD stores the last `win` rows. The others store all, but for the `win` rows from `offset` on, which
    KVHEAD_ROPE replaces by their mean and OMNI drops; with an offset of -1 all are stored.
    """
    if mode == KVHEAD:
        if win == 0:
            return list(x) if empty_window == "copy" else []
        return list(x[len(x) - win :])
    if offset == -1 or win == 0:
        return list(x)
    window = x[offset : offset + win]
    middle = [mean_of_rows(window)] if mode == KVHEAD_ROPE else []
    return [*x[:offset], *middle, *x[offset + win :]]


def mean_of_rows(rows: Array) -> Array:
    """Return the mean of rows: summed row by row in float32, divided once, rounded once."""
    result = np.empty(rows.shape[1], rows.dtype)
    with np.errstate(all="ignore"):
        for c in range(rows.shape[1]):
            total = np.float32(0)
            for r in range(rows.shape[0]):
                total = np.float32(total + np.float32(rows[r, c]))
            result[c] = np.float32(total / np.float32(rows.shape[0]))
    return result


def paged_cache_load(
    key_cache: Array, value_cache: Any, block_tables: Any, seq_lens: Any, seq_starts: Any = None, *,
    cache_format: str = "ND",
) -> tuple[Array, ...]:  # fmt: skip
    """Read the context of each sequence from its blocks; `seq_lens` may be cumulative (from 0)."""
    lengths = np.diff(seq_lens) if len(seq_lens) == len(block_tables) + 1 else seq_lens
    caches = [cache for cache in (key_cache, value_cache) if cache is not None]
    nz = cache_format == "NZ"
    return tuple(load_contexts(cache, block_tables, lengths, seq_starts, nz) for cache in caches)


def load_contexts(
    cache: Array, block_tables: Any, lengths: Any, seq_starts: Any = None, nz: bool = False
) -> Array:
    """Return packed contexts: [tokens, heads, dim] of ND, [tokens, C] of NZ; a missing block is zeros."""
    rows = cache.shape[2 if nz else 1]
    shape = (cache.shape[1] * cache.shape[3],) if nz else cache.shape[2:]
    out = np.zeros((sum(lengths), *shape), cache.dtype)
    token = 0
    for b, length in enumerate(lengths):
        for j in range(length):
            column = j // rows + (0 if seq_starts is None else seq_starts[b] // rows)
            block = block_tables[b][column] if column < len(block_tables[b]) else -1
            if 0 <= block < len(cache):
                if nz:
                    for g in range(cache.shape[1]):
                        out[token, g * cache.shape[3] : (g + 1) * cache.shape[3]] = cache[block, g, j % rows]
                else:
                    out[token] = cache[block, j % rows]
            token += 1
    return out


def block_copy(key_cache: Array, value_cache: Any, src: Any, dst: Any, cum_sum: Any) -> tuple[Any, Any]:
    """Copy block src[i] onto blocks dst[cum_sum[i - 1] : cum_sum[i]]; return the caches."""
    for cache in (key_cache, value_cache):
        if cache is not None:
            before, first = cache.copy(), 0
            for i, end in enumerate(cum_sum):
                for d in dst[first:end]:
                    cache[d] = before[src[i]]
                first = end
    return key_cache, value_cache


def nd_to_nz(x: Array) -> Array:
    """Return matrices x [b, m, n] in NZ: columns in groups of 32 bytes, padded with zeros."""
    b, m, n = x.shape
    n0 = 32 // x.dtype.itemsize
    y = np.zeros((b, math.ceil(n / n0), 16 * math.ceil(m / 16), n0), x.dtype)
    for i, r, c in np.ndindex(x.shape):
        y[i, c // n0, r, c % n0] = x[i, r, c]
    return y


def nz_to_nd(y: Array, m: int, n: int) -> Array:
    """Return matrices [b, m, n] from NZ."""
    n0 = y.shape[3]
    x = np.zeros((y.shape[0], m, n), y.dtype)
    for i, r, c in np.ndindex(x.shape):
        x[i, r, c] = y[i, c // n0, r, c % n0]
    return x


def attend_blocks(
    query: Array, key_cache: Array, value_cache: Array, block_tables: Any, context_lens: Any, *,
    razor_offset: Any = None, softmax_scale: float | None = None, **scoring: Any,
) -> tuple[Array, Array]:  # fmt: skip
    """Decode over blocks (Ascend's PagedAttention): query [B, H, D]; return (attn_output, lse).

    If each key head has its own blocks, `context_lens` and `block_tables` have an entry for each sequence and
    key head. `razor_offset` is added to scores after the softcap.
    """
    batch, heads, dim = query.shape
    rows, entries = key_cache.shape[1], len(context_lens) // batch  # rows of a block, entries of a sequence
    scale = 1 / math.sqrt(dim) if softmax_scale is None else softmax_scale
    sinks = scoring.pop("sinks", None)
    output, lse = np.zeros((batch, heads, value_cache.shape[3])), np.full((batch, heads), -np.inf)
    for b, h in np.ndindex(batch, heads):
        i = b * entries + h // (heads // entries)  # the entry of the sequence, or of the head
        head = 0 if entries > 1 else h // (heads // key_cache.shape[2])  # the key head
        places = [(block_tables[i][j // rows], j % rows) for j in range(int(context_lens[i]))]
        key, value = (
            np.array([cache[block, row, head] for block, row in places]).reshape(-1, 1, cache.shape[3])
            for cache in (key_cache, value_cache)
        )
        offset = None
        if razor_offset is not None:
            numbers = [scale * float(razor_offset[block, row]) for block, row in places]
            offset = np.array(numbers).reshape(1, 1, -1)
        q, sink = query[b : b + 1, h : h + 1], None if sinks is None else sinks[h : h + 1]
        o, s = attend_sequence(q, key, value, offset, softmax_scale=scale, sinks=sink, **scoring)
        output[b, h], lse[b, h] = o[0, 0], s[0, 0]
    return output, lse


paged_attention = attend_blocks  # the operator's name, as in `reference/paged.py`
