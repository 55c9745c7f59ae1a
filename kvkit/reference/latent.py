"""Define operators over latent caches (MLA): append, attention, and the indexer of sparse attention."""

import math
from typing import Any

import ml_dtypes
import numpy as np
from numpy import ndarray as Array

from kvkit.reference.attention import attend_sequence
from kvkit.reference.formats import TABLES, bfloat16, bits32, float_code

__all__ = ["indexer_scores", "mla_absorb", "mla_append", "mla_attention", "mla_expand", "topk_rows"]

# A token in "ds_v4" has 448 codes, 64 bfloat16 numbers, and 8 bytes of scales after all tokens of its block.
BODY, TOKEN = 576, 584  # bytes of a token without its scales, and with them


def row_of_bytes(codes: Array, scales: Any, group: int, tail: Array) -> Array:
    """Return a row: e4m3 codes times the scale of their group, then bfloat16 numbers."""
    row = np.array(TABLES["e4m3"])[codes] * np.repeat(scales, group)
    return np.append(row, tail.copy().view(ml_dtypes.bfloat16).astype(np.float64))


def row_at(pool: Array, rope: Any, slot: int, format: str | None) -> Array:
    """Return the row of a slot as float64 [heads, dim]."""
    page = page_of(pool, format)
    if format is None:
        parts = [part[slot // page, slot % page] for part in (pool, rope) if part is not None]
        parts = [part.reshape(-1, part.shape[-1]).astype(np.float64) for part in parts]
        return np.concatenate(parts, axis=1)
    if format == "ds_v4":
        block = pool.view(np.uint8)
        body = block[slot // page, slot % page * BODY :][:BODY]
        exponents = block[slot // page, page * BODY + slot % page * 8 :][:7]
        scales = 2.0 ** (exponents.astype(int) - 127)
        return row_of_bytes(body[:448], scales, 64, body[448:])[None]
    row = pool.view(np.uint8)[slot // page, slot % page].reshape(-1)
    scales = row[512:528].copy().view(np.float32).astype(np.float64)
    return row_of_bytes(row[:512], scales, 128, row[528:])[None]


def page_of(pool: Array, format: str | None) -> int:
    """Return how many rows a block of a pool has."""
    return pool.shape[1] // TOKEN if format == "ds_v4" else pool.shape[1]


def mla_attention(
    query: Any, latent: Array, block_tables: Any = None, context_lens: Any = None, query_starts: Any = None,
    *, softmax_scale: float, rope_cache: Any = None, value_dim: int = 512, indices: Any = None,
    index_lens: Any = None, extra: Any = None, format: str | None = None, is_causal: bool = True,
    sinks: Any = None, lse_of_sinks: bool = True,
) -> tuple[Array, Array]:  # fmt: skip
    """Attend to all rows of contexts, or to the slots `indices` of one or two pools; return (output, lse)."""
    query = np.concatenate(query, axis=2) if isinstance(query, (tuple, list)) else query
    kind = None if format is None else format.partition(":")[0]
    contexts: list[tuple[slice, list[Array]]] = []  # queries, and the rows that they attend to
    if indices is not None:
        for token in range(len(query)):
            rows = []
            pools = [(latent, indices, index_lens)] + ([] if extra is None else [extra])
            for pool, chosen, lens in pools:
                count = len(chosen[token]) if lens is None else lens[token]
                for slot in chosen[token][: max(int(count), 0)]:
                    if 0 <= slot < len(pool) * page_of(pool, kind):
                        rows.append(row_at(pool, rope_cache, int(slot), kind))
            contexts.append((slice(token, token + 1), rows))
    else:
        starts, page = query_starts, page_of(latent, kind)
        starts = range(len(context_lens) + 1) if starts is None else starts
        for b, length in enumerate(context_lens):
            slots = [int(block_tables[b][j // page]) * page + j % page for j in range(int(length))]
            rows = [row_at(latent, rope_cache, slot, kind) for slot in slots]
            contexts.append((slice(int(starts[b]), int(starts[b + 1])), rows))
    output, lse = np.zeros((*query.shape[:2], value_dim)), np.full(query.shape[:2], -np.inf)
    causal = is_causal and indices is None
    for tokens, rows in contexts:
        heads = rows[0].shape[0] if rows else 1
        key = np.array(rows).reshape(len(rows), heads, query.shape[2])
        scoring: dict[str, Any] = {"causal": causal, "softmax_scale": softmax_scale}
        q, value = query[tokens], key[..., :value_dim]
        output[tokens], lse[tokens] = attend_sequence(q, key, value, sinks=sinks, **scoring)
        if sinks is not None and not lse_of_sinks:
            _, lse[tokens] = attend_sequence(q, key, value, **scoring)
    return output, lse


def bytes_of(row: Array, format: str) -> tuple[list[int], list[int]]:
    """Return (bytes of a row, bytes of its scales if they lie apart, as in "ds_v4")."""
    kind, *options = format.split(":")  # "ds_mla:p2" and "ds_v4" have scales that are powers of two
    group, coded = (64, 448) if kind == "ds_v4" else (128, 512)
    codes: list[int] = []
    scales: list[int] = []
    for first in range(0, coded, group):
        part = [np.float32(x) for x in row[first : first + group]]
        largest = max(abs(x) for x in part)
        scale = largest / np.float32(448)
        if options == ["vllm"]:
            scale = max(largest, np.float32(1e-4)) / np.float32(448)
            scale = np.float32(2.0 ** math.ceil(math.log2(scale)))
        elif options or kind == "ds_v4":
            scale = np.float32(2.0 ** math.ceil(math.log2(max(float(scale), 1e-4))))
        else:
            scale = max(scale, np.float32(2.0**-126))
        codes += [float_code(x / scale, TABLES["e4m3"]) for x in part]
        scales += [int(math.log2(scale)) + 127] if kind == "ds_v4" else bits32(scale)
    tail = [byte for x in row[coded:] for byte in bfloat16(x)]
    return (codes + tail, [*scales, 0]) if kind == "ds_v4" else (codes + scales + tail, [])


def mla_append(
    latent: Array, rope: Array, cache: Array, slot_mapping: Any, *, rope_cache: Any = None,
    format: str | None = None,
) -> Array:  # fmt: skip
    """Store rows in their slots, as floats in one or two pools or as bytes; return the first pool."""
    page = page_of(cache, None if format is None else format.partition(":")[0])
    for token, slot in enumerate(slot_mapping):
        if slot < 0:
            continue
        row = np.concatenate([latent[token], rope[token]])
        if format is not None:
            body, scales = bytes_of(row, format)
            block, at = cache.view(np.uint8)[slot // page], int(slot % page)
            if scales:
                block[at * BODY : (at + 1) * BODY] = body
                block[page * BODY + at * 8 : page * BODY + (at + 1) * 8] = scales
            else:
                block[at] = np.reshape(body, block[at].shape)
        elif rope_cache is None:
            cache[slot // page, slot % page] = row
        else:
            cache[slot // page, slot % page] = latent[token]
            rope_cache[slot // page, slot % page] = rope[token]
    return cache


def mla_absorb(query: Array, w_uk: Array) -> Array:
    """Return sums over p of query[n, h, p] * w_uk[h, p, l]."""
    tokens, heads, _ = query.shape
    query, w_uk = query.astype(np.float64), w_uk.astype(np.float64)
    return np.array([[query[n, h] @ w_uk[h] for h in range(heads)] for n in range(tokens)])


def mla_expand(latent_output: Array, w_uv: Array) -> Array:
    """Return sums over l of latent_output[n, h, l] * w_uv[h, v, l]."""
    tokens, heads, _ = latent_output.shape
    rows, w_uv = latent_output.astype(np.float64), w_uv.astype(np.float64)
    return np.array([[w_uv[h] @ rows[n, h] for h in range(heads)] for n in range(tokens)])


def indexer_scores(
    query: Array, keys: Array, weights: Array, block_tables: Any, context_lens: Any, query_starts: Any = None,
    *, key_scale: Any = None, softmax_scale: Any = None,
) -> Array:  # fmt: skip
    """Return sums over heads of weight * max(0, softmax_scale * q . k) for positions that a query may see."""
    starts = range(len(context_lens) + 1) if query_starts is None else query_starts
    page, factor = keys.shape[1], query.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    scores = np.full((len(query), max(map(int, context_lens), default=0)), -np.inf)
    for b, length in enumerate(context_lens):
        places = [(block_tables[b][s // page], s % page) for s in range(int(length))]
        scales = [1.0 if key_scale is None else float(key_scale[at]) for at in places]
        context = [keys[at].astype(np.float64) * scale for at, scale in zip(places, scales, strict=True)]
        for token in range(starts[b], starts[b + 1]):
            visible = int(length) - (starts[b + 1] - token) + 1  # the last query sees the whole context
            q, w = query[token].astype(np.float64), weights[token].astype(np.float64)
            for s in range(visible):
                scores[token, s] = w @ np.maximum(q @ context[s] * factor, 0)
    return scores


def topk_rows(scores: Array, k: int, block_tables: Any, page_size: int, query_starts: Any = None) -> Array:
    """Return the slots of each query's k largest scores in the order of positions; -1 after the last slot."""
    k, page_size = int(k), int(page_size)
    starts = range(len(block_tables) + 1) if query_starts is None else query_starts
    rows = np.full((len(scores), k), -1, np.int32)
    for b in range(len(block_tables)):
        for token in range(starts[b], starts[b + 1]):
            order = sorted(range(scores.shape[1]), key=lambda s: (-scores[token, s], s))
            best = sorted(s for s in order[:k] if scores[token, s] > -np.inf)
            for i, s in enumerate(best):
                rows[token, i] = block_tables[b][s // page_size] * page_size + s % page_size
    return rows
