"""Check calls of the indexer of sparse attention."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np

from kvkit.checks.arguments import ChoiceArguments, IndexerArguments
from kvkit.checks.contexts import Contexts, checked_contexts, checked_starts, checked_table
from kvkit.checks.index_tensors import index
from kvkit.checks.latent import LatentPool, float_part
from kvkit.checks.outputs import Results
from kvkit.checks.values import (
    check_not_empty,
    checked_format,
    integer,
    named_arrays,
    positive_number,
    without_float8,
)
from kvkit.errors import argument_error, describe
from kvkit.formats import FLOATS
from kvkit.formats.elements import E4M3
from kvkit.typed import Array

Forms = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]


class IndexerCall(NamedTuple):
    """A checked call of `indexer_scores`."""

    query: Array  # [tokens, heads, dim]
    weights: Array  # [tokens, heads]
    pool: LatentPool
    scaled: bool  # whether the last element of a row of the pool is its scale
    contexts: Contexts
    softmax_scale: float
    results: Results


class ChoiceCall(NamedTuple):
    """A checked call of `topk_rows`."""

    scores: Array  # [tokens, N]
    k: int
    contexts: Contexts  # a context ends after its last score above -inf
    results: Results


def checked_scores(call: IndexerArguments) -> IndexerCall:
    """Check a call of `indexer_scores`."""
    query, weights = without_float8(call.query), call.weights
    checked_format("query", query, FLOATS, 3)
    check_not_empty("query", query)
    checked_format("weights", weights, FLOATS, 2)
    tokens, heads, dim = query.shape
    if weights.shape != (tokens, heads):
        raise argument_error("weights", f"shape {(tokens, heads)}, as query has", weights.shape)
    pool = pool_of_keys(call.keys, call.key_scale, dim)
    tables = call.block_tables, call.context_lens, call.query_starts
    contexts = checked_contexts(*tables, len(call.keys), pool.page_size, tokens)
    given = call.softmax_scale
    softmax_scale = dim**-0.5 if given is None else positive_number("softmax_scale", given)
    forms: Forms = {"scores": ((tokens, int(contexts.lengths.max(initial=0))), FLOATS[0].dtype)}
    inputs = named_arrays(query=query, keys=call.keys, weights=weights, key_scale=call.key_scale)
    return IndexerCall(
        query, weights, pool, call.key_scale is not None, contexts, softmax_scale,
        Results(forms, inputs, alone=True),
    )  # fmt: skip


def pool_of_keys(keys: Any, key_scale: Any, dim: int) -> LatentPool:
    """Return the checked pool of index keys; a scale becomes one more element at the end of a row."""
    if key_scale is None:
        parts: tuple[Array, ...] = (float_part("keys", keys),)
    else:
        checked_format("keys", keys, (E4M3,), 3)
        checked_format("key_scale", key_scale, FLOATS[:1], 2)
        if key_scale.shape != keys.shape[:2]:
            raise argument_error("key_scale", f"shape {keys.shape[:2]}, as keys have", key_scale.shape)
        parts = keys, key_scale[..., None]
    if parts[0].ndim != 3 or keys.shape[-1] != dim:
        raise argument_error("keys", f"one head of {dim} elements, as query has", describe(keys))
    return LatentPool(parts, None, dim)


def checked_choice(call: ChoiceArguments) -> ChoiceCall:
    """Check a call of `topk_rows`."""
    scores = call.scores
    checked_format("scores", scores, FLOATS[:1], 2)
    k, page_size = integer("k", call.k, 1, 2**31), integer("page_size", call.page_size, 1, 2**31)
    ends = np.zeros(len(scores), np.int64)
    for token, row in enumerate(scores):  # a row at a time stays in the cache
        if np.isnan(row.max(initial=-np.inf)):
            raise argument_error("scores", "numbers", "NaN")
        visible = (row > -np.inf)[::-1]
        # A context is as long as one of its queries needs: up to its last score above -inf.
        ends[token] = len(row) - visible.argmax() if visible.any() else 0
    tables = call.block_tables
    if isinstance(tables, tuple):  # (indptr [B + 1], indices)
        batch = len(index("block_tables", tables[0] if tables else (), 1)) - 1
    else:  # [B, M]
        batch = len(index("block_tables", tables, 2))
    starts = checked_starts(call.query_starts, batch, len(scores), ("scores", "block_tables"))
    lengths = np.array([ends[a:b].max(initial=0) for a, b in itertools.pairwise(starts)], np.int64)
    blocks = 2**31 // page_size  # rows fit int32
    table, table_starts, largest, kvstarts = checked_table(tables, lengths, blocks, page_size)
    contexts = Contexts(table, table_starts, lengths, starts, page_size, largest + 1, kvstarts)
    forms: Forms = {"rows": ((len(scores), k), np.dtype(np.int32))}
    results = Results(forms, named_arrays(scores=scores), alone=True)
    return ChoiceCall(scores, k, contexts, results)
