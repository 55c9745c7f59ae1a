"""Attention over latent caches (multi-head latent attention, MLA), dense or over chosen rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from kvkit.calls.latent import (
    ROWS,
    attention_over_bytes,
    gather_rows,
    multiply_heads,
    pieces_of_contexts,
    scatter_rows,
)
from kvkit.calls.pools import attend_to_pages
from kvkit.calls.prepared import PreparedCalls, attend, form_of, one_or_all
from kvkit.calls.targets import CallTarget, operator
from kvkit.checks.arguments import LatentAppend, LatentArguments, PoolAttention, Scoring
from kvkit.checks.contexts import BlockTables, Contexts
from kvkit.checks.latent import (
    LatentCall,
    attention_to_rows,
    checked_absorb,
    checked_expand,
    checked_latent_append,
    checked_latent_attention,
)
from kvkit.checks.values import without_float8
from kvkit.formats import FLOAT32
from kvkit.layouts.tables import starts_of
from kvkit.merge import merge_checked
from kvkit.models.configuration import read_latent_scale
from kvkit.typed import Array, Attended, Pair

# Forms of `mla_attention` over one pool of floats that were checked, but for their index tensors and outputs.
legal_forms: PreparedCalls[bool] = PreparedCalls()


def mla_scale(config: Any) -> float:
    """Return the ``softmax_scale`` of a model with latent attention, for `mla_attention`.

    It is (P + R)^-1/2 for keys of P plain and R rotated elements; a latent row's size does not matter. Where
    YaRN stretches the context, it is multiplied by a temperature squared:
    ``(0.1 * mscale_all_dim * ln(factor) + 1) ** 2``.

    Parameters
    ----------
    config : mapping or PreTrainedConfig
        The entries of a config.json, or an object that has them as attributes.

    Raises
    ------
    KvkitError
        If the model has no latent attention, or an entry is missing or wrong.

    Examples
    --------
    >>> import kvkit
    >>> yarn = {"rope_type": "yarn", "factor": 40, "mscale_all_dim": 1.0}
    >>> sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    >>> round(kvkit.mla_scale(sizes | {"rope_scaling": yarn}), 4)   # DeepSeek-V3
    0.1352
    """
    return read_latent_scale(config)


@operator
def mla_attention(
    on: CallTarget,
    query: Array | Pair,
    latent: Array,
    block_tables: BlockTables | None = None,
    context_lens: ArrayLike | None = None,
    query_starts: ArrayLike | None = None,
    *,
    softmax_scale: float,
    rope_cache: Array | None = None,
    value_dim: int = 512,
    indices: ArrayLike | None = None,
    index_lens: ArrayLike | None = None,
    extra: tuple[Array, ArrayLike, ArrayLike | None] | None = None,
    format: str | None = None,
    is_causal: bool = True,
    sinks: Array | None = None,
    lse_of_sinks: bool = True,
    return_lse: bool = False,
    out: Array | Pair | None = None,
) -> Attended:
    """Attend with absorbed queries to the rows of a latent cache, which are keys and values at once.

    Score t of a head is ``softmax_scale * query . row[t]``; the value of a row is its first `value_dim`
    elements. All heads share the rows. Attention is dense over pages (`block_tables`), or over chosen rows
    (`indices`).

    Parameters
    ----------
    query : ndarray, shape [tokens, H, D], or a pair of shapes [tokens, H, L] and [tokens, H, R]
        float32, float16, bfloat16 or float8, which is widened to bfloat16: ``mla_absorb(q_nope, w_uk)``, then
        the rotated part. D = L + R is 576 in DeepSeek's models.
    latent : ndarray, shape [blocks, page_size, D]
        Floats, with any strides; or [blocks, page_size, h, D], where H / h heads of queries share each of h
        heads. With `rope_cache`, rows of L elements. With a format, bytes: rows of 656 of ``"ds_mla"``,
        [blocks, page_size, 656], or blocks of ``"ds_v4"``, [blocks, bytes], 584 a token and perhaps padding
        at the end of a block; also as FlashMLA's [blocks, page_size, 584] with or without an axis of 1.
    block_tables : array_like of int, shape [B, M], or a tuple (indptr [B + 1], indices)
        The pages of each context, as in `paged_attention`.
    context_lens, query_starts : array_like of int, shapes [B] and [B + 1]
        The length of each context, and where its queries begin, as in `paged_attention`.
    softmax_scale : float
        Factor of the scores. It is that of the expanded heads: 192 ** -0.5 for DeepSeek's 128 + 64, times
        the square of YaRN's mscale; not D ** -0.5.
    rope_cache : ndarray, shape [blocks, page_size, R], optional
        The rotated parts of rows, where they lie in a pool of their own.
    value_dim : int
        How many elements of a row are its value.
    indices : array_like of int, shape [tokens, K], optional
        The rows of each query: ``block * page_size + offset`` in the pool. Indices below 0 and past the end
        of the pool name no row; a row that is named twice counts twice.
    index_lens : array_like of int, shape [tokens], optional
        How many of a query's first indices count.
    extra : tuple (latent, indices, index_lens), optional
        Rows of a second pool of the same format that the queries with `indices` attend to as well.
    format : str, optional
        ``"ds_mla"`` or ``"ds_v4"`` of `kvkit.formats`, for pools of bytes. Codes are decoded to float32. Rows
        of ``"ds_mla"`` in pages are rounded to bfloat16, as FlashMLA does, if queries are bfloat16, a
        sequence has more than 8 query rows, and the processor multiplies pairs of bfloat16.
    is_causal : bool
        Whether a query ignores rows after its own position; not used with `indices`.
    sinks : ndarray of float32, shape [H], optional
        One more score for each head, which is part of its softmax and has no value.
    lse_of_sinks : bool
        Whether the returned lse contains the sinks. In FlashMLA it does not.
    return_lse : bool
        Whether to return the natural logarithms of the softmax denominators too.
    out : ndarray or tuple of ndarray, optional
        Arrays for the results; allocated if None.

    Returns
    -------
    attn_output : ndarray, shape [tokens, H, value_dim]
        In the dtype of `query`; 0 for a query without rows. `mla_expand` computes the heads' outputs from it.
    lse : ndarray of float32, shape [tokens, H]
        If `return_lse`; -inf for a query without rows (FlashMLA: inf).

    Raises
    ------
    KvkitError
        If an argument is wrong, or a page that a context needs is not in the pool.

    Notes
    -----
    Floats in one pool, and rows of 656 bytes in pages, are read in place. Other rows are gathered, each once,
    some 16,384 at a time; attention over several such parts is merged in float32 and rounded once.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> latent = np.array([[1, 0, -1, 1, 0], [2, 1, 0, 0, 1], [0, -1, 1, 1, 1]], np.float32)[None]
    >>> query = np.array([[[1, -1, 1, 0, 1]]], np.float32)
    >>> kvkit.mla_attention(query, latent, [[0]], [3], softmax_scale=0.5, value_dim=3).round(4)
    array([[[ 0.7849, -0.2151,  0.4246]]], dtype=float32)
    """
    given = LatentArguments(
        query, latent, block_tables, context_lens, query_starts, softmax_scale=softmax_scale,
        rope_cache=rope_cache, value_dim=value_dim, indices=indices, index_lens=index_lens, extra=extra,
        format=format, is_causal=is_causal, sinks=sinks, lse_of_sinks=lse_of_sinks, return_lse=return_lse,
    )  # fmt: skip
    return on.repeat(checked_latent_attention, attend_to_latent)(given, out)


def attend_to_latent(given: LatentArguments, out: Array | Pair | None) -> Attended:
    """Run `mla_attention`; calls over one pool of floats are checked as those of `paged_attention` are."""
    query, latent, form = without_float8(given.query), given.latent, None
    if query is not given.query:
        given = given._replace(query=query)
    _, _, _, _, _, scale, rope_cache, value_dim, indices, index_lens, extra, format, *others = given
    causal, sinks, *returned = others
    if rope_cache is indices is index_lens is extra is format is sinks is None:
        form = form_of((query, latent), (scale, value_dim, causal, *returned))
        if legal_forms.find(form):
            rows = PoolAttention(  # rows begin with the value
                query,  # type: ignore[arg-type]  # not a pair, which has no form
                key_cache=latent, value_cache=latent[..., : given.value_dim],
                block_tables=given.block_tables, context_lens=given.context_lens,
                query_starts=given.query_starts, layout="b n c", key_scale=None, value_scale=None,
                alibi_slopes=None, return_lse=given.return_lse,
                scoring=Scoring(is_causal=given.is_causal, softmax_scale=given.softmax_scale),
            )  # fmt: skip
            return attend_to_pages(rows, out)
    call = checked_latent_attention(given)
    if call.attention is not None and latent.ndim == len(("blocks", "page_size", "width")):
        legal_forms.keep(form, True)
    # If rows can be read in place, one call of attention does it all, unless the lse leaves sinks out.
    in_place = None if call.sinks_last else call.attention or attention_over_bytes(call)
    if in_place is not None:
        return attend(in_place, out)
    # Else attention is computed in float32 and without sinks, which scale the output at the end.
    outputs = None if out is None else call.results.checked(out)
    if call.contexts is None:
        output, lse = attend_to_chosen(call)
    elif call.attention is None:
        output, lse = attend_to_pieces(call, call.contexts)
    else:
        wide = call.query.astype(np.float32)
        output, lse = attend(attention_to_rows(call, wide, call.pool.rows, call.contexts), None)
    if call.sinks is not None:
        sinks = np.asarray(call.sinks, np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            share = 1 / (1 + np.exp(sinks - lse))  # e^lse / (e^lse + e^sink)
        share = np.where(lse == -np.inf, 0, share)  # 0, not NaN, for no rows and a sink of -inf
        output, lse = output * share[..., None], lse if call.sinks_last else np.logaddexp(lse, sinks)
    results: tuple[Array, ...] = (output.astype(call.fmt.dtype, copy=False), lse)[: len(call.results.forms)]
    if outputs is not None:
        for array, result in zip(outputs, results, strict=True):
            array[...] = result
        results = outputs
    return one_or_all(results)


def attend_to_rows(
    call: LatentCall, tokens: Array, rows: Array, counts: Array, starts: Array, causal: bool = False
) -> Pair:
    """Attend in float32 with some queries to gathered rows; context i has the next `counts[i]` of them."""
    pool = rows[:, None] if rows.ndim == 3 else rows[:, None, None]  # pages of one row
    kvstarts = starts_of(counts)
    contexts = Contexts(np.arange(len(rows)), kvstarts, counts, starts, 1, len(rows), kvstarts)
    query = call.query[tokens].astype(np.float32)
    output, lse = attend(attention_to_rows(call, query, pool, contexts, causal), None)
    return output, lse


def attend_to_pieces(call: LatentCall, contexts: Contexts) -> Pair:
    """Attend in float32, piece by piece, to contexts whose rows are in two pools or have to be decoded."""
    lengths, starts = contexts.lengths, contexts.starts
    output, lse = empty_attention(call)
    for pieces in pieces_of_contexts(lengths, np.diff(starts)):
        slots = np.concatenate([contexts.slots(i, np.arange(*piece)) for i, *piece in pieces])
        tokens = np.concatenate([np.arange(starts[i], starts[i + 1]) for i, *_ in pieces])
        counts = np.array([end - begin for _, begin, end in pieces])
        begins = starts_of(np.array([starts[i + 1] - starts[i] for i, *_ in pieces]))
        sequence, _, end = pieces[0]
        causal = call.causal and end == lengths[sequence]  # queries see all rows of earlier pieces
        part = attend_to_rows(call, tokens, gather_rows(call.pool, slots), counts, begins, causal)
        merge_part(output, lse, tokens, part)
    return output, lse


def attend_to_chosen(call: LatentCall) -> Pair:
    """Attend to the chosen rows of each query, in float32."""
    queries = len(call.query)
    output, lse = empty_attention(call)
    for pool, slots, starts in call.chosen:
        most_rows = max(1, int(np.diff(starts).max(initial=0)))  # of a query
        step = max(1, ROWS // most_rows)
        for begin in range(0, queries, step):
            tokens = np.arange(begin, min(begin + step, queries))
            rows = gather_rows(pool, slots[starts[begin] : starts[tokens[-1] + 1]])
            counts = np.diff(starts[begin : tokens[-1] + 2])
            part = attend_to_rows(call, tokens, rows, counts, np.arange(len(tokens) + 1))
            merge_part(output, lse, tokens, part)
    return output, lse


def empty_attention(call: LatentCall) -> Pair:
    """Return the output and the lse of queries that have not attended to any row yet."""
    shape = call.query.shape[:2]
    return np.zeros((*shape, call.value_dim), np.float32), np.full(shape, -np.inf, np.float32)


def merge_part(output: Array, lse: Array, tokens: Array, part: Pair) -> None:
    """Merge attention over one more part of their contexts into the outputs of queries `tokens`."""
    if (lse[tokens] != -np.inf).any():
        part = merge_checked(FLOAT32, (output[tokens], part[0]), (lse[tokens], part[1]))
    output[tokens], lse[tokens] = part


@operator
def mla_append(
    on: CallTarget,
    latent: Array,
    rope: Array,
    cache: Array,
    slot_mapping: ArrayLike,
    *,
    rope_cache: Array | None = None,
    format: str | None = None,
) -> Array:
    """Store the latent rows of new tokens in the slots of a latent cache.

    Slot s is token ``s % page_size`` of block ``s // page_size``. A negative slot stores nothing.

    Parameters
    ----------
    latent : ndarray, shape [tokens, L]
        float32, float16 or bfloat16: the normed latent vectors.
    rope : ndarray, shape [tokens, R]
        The rotated keys, of the same dtype.
    cache, rope_cache, format
        As `latent`, `rope_cache` and `format` of `mla_attention`. Floats have the dtype of the tokens. The
        pools change in place.
    slot_mapping : array_like of int, shape [tokens]
        The slot of each token.

    Returns
    -------
    cache : ndarray
        The pool itself.

    Raises
    ------
    KvkitError
        If an argument is wrong, a slot is not in the pool, or two tokens have one slot. Then nothing has been
        written.

    Notes
    -----
    This is vLLM's ``concat_and_cache_mla`` and FlashInfer's ``append_paged_mla_kv_cache``.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> cache, row = np.zeros((2, 4, 3), np.float32), np.array([[1, 2, 5]], np.float32)
    >>> _ = kvkit.mla_append(row[:, :2], row[:, 2:], cache, [6])
    >>> cache[1, 2]
    array([1., 2., 5.], dtype=float32)
    """
    given = LatentAppend(latent, rope, cache, slot_mapping, rope_cache, format)
    scatter_rows(*on.check(checked_latent_append, given))
    return cache


@operator
def mla_absorb(on: CallTarget, query: Array, w_uk: Array, *, out: Array | None = None) -> Array:
    """Multiply unrotated parts of queries with the up-projection of keys: latent rows are keys for them.

    Parameters
    ----------
    query : ndarray, shape [tokens, H, P]
        float32, float16 or bfloat16.
    w_uk : ndarray, shape [H, P, L]
        The first P of the P + V rows of each head in ``kv_b_proj`` [H * (P + V), L]; the dtype of `query`.
    out : ndarray, optional
        An array for the result; allocated if None.

    Returns
    -------
    latent_query : ndarray, shape [tokens, H, L]
        In the dtype of `query`.

    Raises
    ------
    KvkitError
        If an argument is wrong.

    Notes
    -----
    This is ``einsum("nhp,hpl->nhl", ...)``, computed in float32 and rounded once.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> w_uk = np.array([[[1, 0, 2], [0, 1, 1]]], np.float32)
    >>> kvkit.mla_absorb(np.array([[[1, -1]]], np.float32), w_uk)
    array([[[ 1., -1.,  1.]]], dtype=float32)
    """
    return multiply_heads(on.check(checked_absorb, query, w_uk), out)


@operator
def mla_expand(on: CallTarget, latent_output: Array, w_uv: Array, *, out: Array | None = None) -> Array:
    """Multiply attention outputs over latent rows with the up-projection of values.

    Parameters
    ----------
    latent_output : ndarray, shape [tokens, H, L]
        The output of `mla_attention`.
    w_uv : ndarray, shape [H, V, L]
        The last V of the P + V rows of each head in ``kv_b_proj``; the dtype of `latent_output`.
    out : ndarray, optional
        An array for the result; allocated if None.

    Returns
    -------
    head_output : ndarray, shape [tokens, H, V]
        In the dtype of `latent_output`.

    Raises
    ------
    KvkitError
        If an argument is wrong.

    Notes
    -----
    This is ``einsum("nhl,hvl->nhv", ...)``, computed in float32 and rounded once.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> w_uv = np.array([[[1, 2, 0], [0, 1, 1]]], np.float32)
    >>> kvkit.mla_expand(np.array([[[1, 0, 3]]], np.float32), w_uv)
    array([[[1., 3.]]], dtype=float32)
    """
    return multiply_heads(on.check(checked_expand, latent_output, w_uv), out)
