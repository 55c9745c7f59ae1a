"""Prepare the launches of checked calls on latent caches.

Kernels attend to floats in one pool in place, and store rows. The host does all else: it joins, chooses or
decodes rows, which are then copied to the device.
"""

import numpy as np

from kvkit.calls.latent import gather_rows, slots_of, stored_parts
from kvkit.checks.arguments import PoolAttention, Scoring
from kvkit.checks.paged import checked_paged_attention
from kvkit_cuda.calls import arrays, attention
from kvkit_cuda.calls.tables import Tables
from kvkit_cuda.copy import pieces


def take(name, given, stream):
    """Return the operand of an array; the two parts of queries are joined on the host."""
    if name != "query" or not isinstance(given, (tuple, list)):
        return arrays.operand(name, given, stream)
    parts = [arrays.operand(f"query[{i}]", part, stream).read(stream) for i, part in enumerate(given)]
    alike = len(parts) == 2 and all(isinstance(part, np.ndarray) and part.ndim == 3 for part in parts)
    if alike and parts[0].shape[:2] == parts[1].shape[:2] and parts[0].dtype == parts[1].dtype:
        joined = np.concatenate(parts, axis=2)
        return arrays.Operand(joined, False, joined, given[0])
    refused = parts if isinstance(given, list) else tuple(parts)
    return arrays.Operand(refused, False, given, given)  # type: ignore[arg-type]


def on_host(here, values):
    """Return the names of the arrays that the host reads: all, unless attention is in place."""
    return () if values["rope_cache"] is values["format"] is values["indices"] is None else tuple(here)


def attend(placed):
    """Return the launches of `mla_attention`."""
    call = placed.call
    whole = call.whole or gathered(placed)
    out, lse = (*placed.outputs, None)[:2]
    launches = attend_whole(placed, whole, out, None if call.sinks_last else lse)
    if call.sinks_last and lse is not None:  # the lse is over rows alone
        scratch = uploaded(placed, np.zeros(out.shape, out.dtype))
        plain = whole._replace(weights=whole.weights._replace(sinks=None))
        launches += attend_whole(placed, plain, scratch, lse)
    return launches


def attend_whole(placed, whole, out, lse):
    """Return the launches of attention to pages."""
    tables = Tables(whole.steps, lasting=False)
    placed.owners.append(tables)
    given = whole.decoding, whole.weights, whole.steps.rows, placed.stream
    return attention.prepare(whole.query, out, lse, whole.context, tables, *given)


def gathered(placed):
    """Return attention to rows that are copied to the device, in the dtype of the queries."""
    call = placed.call
    if call.chosen:
        tokens = range(len(call.query))
        rows = [
            (pool, slots[starts[i] : starts[i + 1]]) for i in tokens for pool, slots, starts in call.chosen
        ]
        counts = sum(np.diff(starts) for _, _, starts in call.chosen)
        query_starts = None
    else:
        pages, counts, query_starts = call.contexts
        ends = enumerate(counts.tolist())
        rows = [(call.pool, slots_of(pages, call.pool.page_size, i, 0, end)) for i, end in ends]
    heads, dim = call.pool.heads, call.pool.dim
    found = [gather_rows(*each).reshape(-1, 1, heads, dim).astype(call.fmt.dtype) for each in rows]
    empty = np.zeros((0, 1, heads, dim), call.fmt.dtype)
    pool = uploaded(placed, np.concatenate([empty, *found]))
    sinks = None if call.sinks is None else uploaded(placed, call.sinks)
    causal = call.causal and not call.chosen
    tables = np.concatenate([[0], np.cumsum(counts)]), np.arange(len(pool))
    return checked_paged_attention(
        PoolAttention(
            uploaded(placed, call.query), pool, pool[..., : call.value_dim], tables, counts, query_starts,
            layout="b n h c", key_scale=None, value_scale=None, alibi_slopes=None, return_lse=True,
            scoring=Scoring(None, causal, False, call.scale, (-1, -1), 0.0, sinks),
        )
    )  # fmt: skip


def uploaded(placed, array):
    """Return a copy of an array on the device, which lives as long as the call."""
    copy = arrays.Operand(np.ascontiguousarray(array), False, None).moved(placed.stream)
    placed.owners.append(copy)
    return copy.seen


def append(placed):
    """Return the launch of `mla_append`: rows are encoded on the host, and their parts stored."""
    pool, rows, slots = placed.call
    moves = [
        pieces.byte_copy(uploaded(placed, stored)[None, :, None], part[:, :, None])
        for part, stored in zip(pool.parts, stored_parts(pool, rows), strict=True)
    ]
    where = np.stack([np.arange(len(slots)), slots, np.ones_like(slots)], axis=1)
    return pieces.launch_copies(moves, where, placed.stream) if len(slots) else []


def copy_computed(placed):
    """Return the launch that copies a result of the CPU to the device."""
    (target,), result = placed.outputs, placed.call.array
    axes = (1, len(target), *([1] * (3 - target.ndim)), *target.shape[1:])
    pair = uploaded(placed, result).reshape(axes), target.reshape(axes)
    return pieces.prepare([pair], np.array([[0, 0, len(target)]]), placed.stream) if target.size else []
