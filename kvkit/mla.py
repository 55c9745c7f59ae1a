"""Attention over latent caches (multi-head latent attention, MLA), dense or over chosen rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from kvkit.calls.latent import ROWS, gather_rows, pieces_of_contexts, scatter_rows, slots_of
from kvkit.checks.index_tensors import index
from kvkit.checks.latent import LatentPool, checked_indices, checked_latent_pool, checked_query
from kvkit.checks.outputs import Results
from kvkit.checks.paged import starts_of
from kvkit.checks.pools import checked_table
from kvkit.checks.values import check_writeable, checked_format, flag, integer, positive_number
from kvkit.errors import argument_error, describe
from kvkit.formats import FLOATS
from kvkit.interop import returns_input_kind
from kvkit.merge import merge_attention_states
from kvkit.paged import paged_attention
from kvkit.typed import Array, Attended, Pair

Table = ArrayLike | tuple[ArrayLike, ArrayLike]
NO_TABLE = "block_tables and context_lens, or indices"


class LatentWeights(NamedTuple):
    """The arguments that turn scores of latent rows into weights and values."""

    scale: float
    value_dim: int
    sinks: Array | None


@returns_input_kind
def mla_attention(
    query: Array | Pair,
    latent: Array,
    block_tables: Table | None = None,
    context_lens: ArrayLike | None = None,
    query_starts: ArrayLike | None = None,
    *,
    scale: float,
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

    Score t of a head is ``scale * query . row[t]``; the value of a row is its first `value_dim` elements. All
    heads share the rows. Attention is dense over pages (`block_tables`), or over chosen rows (`indices`).

    Parameters
    ----------
    query : ndarray, shape [tokens, H, D], or a pair of shapes [tokens, H, L] and [tokens, H, R]
        float32, float16 or bfloat16: ``mla_absorb(q_nope, w_uk)``, then the rotated part. D = L + R is 576 in
        DeepSeek's models.
    latent : ndarray, shape [blocks, page_size, D]
        Floats, with any strides; or [blocks, page_size, h, D], where H / h heads of queries share each of h
        heads. With `rope_cache`, rows of L elements. With a format, bytes: rows of 656 of ``"ds_mla"``,
        [blocks, page_size, 656], or blocks of ``"ds_v4"``, [blocks, bytes], 584 a token and perhaps padding
        at the end of a block.
    block_tables, context_lens, query_starts : array_like
        As in `paged_attention`: the pages and the length of each context, and where its queries begin.
    scale : float
        Factor of the scores. It is that of the expanded heads: 192 ** -0.5 for DeepSeek's 128 + 64, times
        the square of YaRN's mscale; not D ** -0.5.
    rope_cache : ndarray, shape [blocks, page_size, R], optional
        The rotated parts of rows, where they lie in a pool of their own.
    value_dim : int
        How many elements of a row are its value.
    indices : array_like of int, shape [tokens, K], optional
        The rows of each query: ``block * page_size + offset`` in the pool. Negative ones and those behind the
        pool name no row; a row that is named twice counts twice.
    index_lens : array_like of int, shape [tokens], optional
        How many of a query's indices count, the first ones.
    extra : tuple (latent, indices, index_lens), optional
        Rows of a second pool of the same format that the queries with `indices` attend to as well.
    format : str, optional
        ``"ds_mla"`` or ``"ds_v4"`` of `kvkit.formats`, for pools of bytes. Codes are decoded to float32;
        FlashMLA rounds them to bfloat16.
    is_causal : bool
        Whether a query ignores rows after its own position; not used with `indices`.
    sinks : ndarray of float32, shape [H], optional
        One more score for each head, which is part of its softmax and has no value.
    lse_of_sinks : bool
        Whether the returned lse contains the sinks. In FlashMLA it does not.
    return_lse : bool
        Whether to return the natural logarithms of the softmax denominators too.
    out : ndarray or tuple of ndarray, optional
        Arrays for the results; made if not given.

    Returns
    -------
    attn_output : ndarray, shape [tokens, H, value_dim]
        In the dtype of `query`; 0 for a query without rows. `mla_expand` makes the heads' values of it.
    lse : ndarray of float32, shape [tokens, H]
        If `return_lse`; -inf for a query without rows (FlashMLA: inf).

    Raises
    ------
    KvkitError
        If an argument is wrong, or a page that a context needs is not in the pool.

    Notes
    -----
    Floats in one pool are read in place. Other rows are gathered some 16,384 at a time, each once; what is
    computed in several parts is merged in float32 and rounded once.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> latent = np.array([[1, 0, -1, 1, 0], [2, 1, 0, 0, 1], [0, -1, 1, 1, 1]], np.float32)[None]
    >>> query = np.array([[[1, -1, 1, 0, 1]]], np.float32)
    >>> kvkit.mla_attention(query, latent, [[0]], [3], scale=0.5, value_dim=3).round(4)
    array([[[ 0.7849, -0.2151,  0.4246]]], dtype=float32)
    """
    pool = checked_latent_pool("latent", latent, rope_cache, format)
    joined = checked_query(query, pool)
    value_dim = integer("value_dim", value_dim, 1, pool.dim)
    shape, fmt = (*joined.shape[:2], value_dim), checked_format("query", joined, FLOATS, 3)
    forms = {"attn_output": (shape, fmt.dtype)}
    if flag("return_lse", return_lse):
        forms["lse"] = shape[:2], FLOATS[0].dtype
    results = Results(forms, [("latent", latent)], alone=not return_lse)
    outputs = None if out is None else results.checked(out)
    later = sinks is not None and not flag("lse_of_sinks", lse_of_sinks)  # sinks scale the output at the end
    weights = LatentWeights(positive_number("scale", scale), value_dim, None if later else sinks)
    if indices is not None:
        if block_tables is not None or context_lens is not None or query_starts is not None:
            raise argument_error("indices", NO_TABLE, "both")
        chosen = checked_indices(("indices", "index_lens"), indices, index_lens, len(joined), pool.slots)
        places = (
            [(pool, *chosen)] if extra is None else [(pool, *chosen), extra_rows(extra, pool, len(joined))]
        )
        found = attend_to_rows(joined, places, weights)
    elif block_tables is None or context_lens is None or extra is not None or index_lens is not None:
        raise argument_error("indices", NO_TABLE, "None")
    elif pool.in_place:
        where = block_tables, context_lens, query_starts
        found = attend_in_place(joined.astype(np.float32) if later else joined, pool.parts[0], *where,
                                is_causal, weights)  # fmt: skip
    else:
        where = block_tables, context_lens, query_starts
        found = attend_to_pieces(joined, pool, *where, is_causal, weights)
    output, lse = apply_sinks(*found, sinks) if later else found
    made: tuple[Array, ...] = (output.astype(fmt.dtype, copy=False), lse)[: len(forms)]
    if outputs is not None:
        for array, result in zip(outputs, made, strict=True):
            array[...] = result
        made = outputs
    return (made[0], made[1]) if return_lse else made[0]


def attend_in_place(
    query: Array,
    rows: Array,
    block_tables: Table,
    context_lens: ArrayLike,
    query_starts: ArrayLike | None,
    is_causal: bool,
    weights: LatentWeights,
) -> Pair:
    """Attend to floats [blocks, page_size, dim], perhaps with heads before dim, where they lie."""
    values, layout = rows[..., : weights.value_dim], "b n c" if rows.ndim == 3 else "b n h c"
    output, lse = paged_attention(
        query, rows, values, block_tables, context_lens, query_starts, layout=layout, is_causal=is_causal,
        softmax_scale=weights.scale, sinks=weights.sinks, return_lse=True,
    )  # fmt: skip
    return output, lse


def attend_to_pieces(
    query: Array,
    pool: LatentPool,
    block_tables: Table,
    context_lens: ArrayLike,
    query_starts: ArrayLike | None,
    is_causal: bool,
    weights: LatentWeights,
) -> Pair:
    """Attend to contexts whose rows have to be joined or decoded, piece by piece; in float32."""
    lengths = index("context_lens", context_lens)
    starts = starts_of(query_starts, len(lengths), len(query))
    pages = checked_table(block_tables, lengths, pool.parts[0].shape[0], pool.page_size)
    output, lse = nothing_seen(query, weights)
    for pieces in pieces_of_contexts(lengths, np.diff(starts)):
        slots = np.concatenate([slots_of(pages, pool.page_size, *piece) for piece in pieces])
        tokens = np.concatenate([np.arange(starts[i], starts[i + 1]) for i, *_ in pieces])
        counts = np.array([end - begin for _, begin, end in pieces])
        own = np.concatenate([[0], np.cumsum([starts[i + 1] - starts[i] for i, *_ in pieces])])
        last = pieces[0][2] == lengths[pieces[0][0]]
        rows = gather_rows(pool, slots)[:, None]
        part = attend_in_place(
            query[tokens].astype(np.float32), rows, table_of_rows(counts), counts, own, is_causal and last,
            weights if last else weights._replace(sinks=None),
        )  # fmt: skip
        add_part(output, lse, tokens, part)
    return output, lse


def attend_to_rows(
    query: Array, places: list[tuple[LatentPool, Array, Array]], weights: LatentWeights
) -> Pair:
    """Attend to the chosen rows of each query, in float32; sinks are those of the first pool's part."""
    output, lse = nothing_seen(query, weights)
    for pool, slots, indptr in places:
        most = max(1, int(np.diff(indptr).max(initial=0)))
        for begin in range(0, len(query), max(1, ROWS // most)):
            tokens = np.arange(begin, min(begin + max(1, ROWS // most), len(query)))
            rows = slots[indptr[begin] : indptr[tokens[-1] + 1]]
            counts = np.diff(indptr[begin : tokens[-1] + 2])
            part = attend_in_place(
                query[tokens].astype(np.float32), gather_rows(pool, rows)[:, None],
                table_of_rows(counts), counts, None, False, weights,
            )  # fmt: skip
            add_part(output, lse, tokens, part)
        weights = weights._replace(sinks=None)
    return output, lse


def nothing_seen(query: Array, weights: LatentWeights) -> Pair:
    """Return the output and the lse of queries that have not seen a row."""
    shape = query.shape[:2]
    return np.zeros((*shape, weights.value_dim), np.float32), np.full(shape, -np.inf, np.float32)


def add_part(output: Array, lse: Array, tokens: Array, part: Pair) -> None:
    """Add attention over one more part of the contexts of some queries."""
    if (lse[tokens] > -np.inf).any():
        part = merge_attention_states((output[tokens], part[0]), (lse[tokens], part[1]))
    output[tokens], lse[tokens] = part


def table_of_rows(counts: Array) -> tuple[Array, Array]:
    """Return block tables (indptr, indices) of contexts one behind the other, in pages of one row."""
    return np.concatenate([[0], np.cumsum(counts)]), np.arange(counts.sum())


def apply_sinks(output: Array, lse: Array, sinks: Any) -> Pair:
    """Scale outputs by the share that sinks leave them; the lse stays that of the rows."""
    checked_format("sinks", sinks, FLOATS, 1)
    if len(sinks) != lse.shape[1]:
        raise argument_error("sinks", f"one for each of {lse.shape[1]} heads", len(sinks))
    with np.errstate(over="ignore"):
        share = 1 / (1 + np.exp(sinks.astype(np.float32) - lse))  # e^lse / (e^lse + e^sink)
    return output * share[..., None], lse


def extra_rows(
    extra: tuple[Array, ArrayLike, ArrayLike | None], pool: LatentPool, tokens: int
) -> tuple[LatentPool, Array, Array]:
    """Check the second pool of a call, and return it with its chosen rows."""
    if not isinstance(extra, (tuple, list)) or len(extra) != 3:
        raise argument_error("extra", "(latent, indices, index_lens)", describe(extra))
    latent, indices, lengths = extra
    second = checked_latent_pool("extra[0]", latent, None, None if pool.format is None else pool.format.name)
    if (second.heads, second.dim) != (pool.heads, pool.dim):
        wanted = f"rows of {pool.heads} x {pool.dim} elements, as latent has"
        raise argument_error("extra[0]", wanted, f"{second.heads} x {second.dim}")
    return second, *checked_indices(("extra[1]", "extra[2]"), indices, lengths, tokens, second.slots)


@returns_input_kind
def mla_append(
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
        The array given.

    Raises
    ------
    KvkitError
        If an argument is wrong, a slot is behind the pool, or two tokens have one slot. Then nothing has been
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
    pool = checked_latent_pool("cache", cache, rope_cache, format)
    if pool.heads > 1:
        raise argument_error("cache", "rows of one head", describe(cache))
    fmt = checked_format("latent", latent, FLOATS, 2)
    if checked_format("rope", rope, FLOATS, 2) is not fmt or len(rope) != len(latent):
        raise argument_error("rope", f"{len(latent)} rows of {fmt}, as latent has", describe(rope))
    rows = np.concatenate((latent, rope), axis=1)
    if rows.shape[1] != pool.dim:
        raise argument_error(
            "latent", f"{pool.dim} elements with those of rope, as a row of cache", rows.shape[1]
        )
    if pool.format is None and pool.parts[0].dtype != fmt.dtype:
        raise argument_error("cache", f"the dtype of latent, {fmt}", pool.parts[0].dtype)
    for part in pool.parts:
        check_writeable("cache", part)
    slots = index("slot_mapping", slot_mapping, 1, len(rows))
    stored = slots >= 0
    if (slots >= pool.slots).any():
        raise argument_error("slot_mapping", f"slots below {pool.slots}", int(slots.max()))
    if len(np.unique(slots[stored])) < stored.sum():
        raise argument_error("slot_mapping", "each slot once", "two tokens in one")
    scatter_rows(pool, slots[stored], rows[stored])
    return cache


@returns_input_kind
def mla_absorb(query: Array, w_uk: Array) -> Array:
    """Multiply unrotated parts of queries with the up-projection of keys: latent rows are keys for them.

    Parameters
    ----------
    query : ndarray, shape [tokens, H, P]
        float32, float16 or bfloat16.
    w_uk : ndarray, shape [H, P, L]
        The first P of the P + V rows of each head in ``kv_b_proj`` [H * (P + V), L]; the dtype of `query`.

    Returns
    -------
    ndarray, shape [tokens, H, L]
        Computed in float32 and rounded once to the dtype of `query`.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> w_uk = np.array([[[1, 0, 2], [0, 1, 1]]], np.float32)
    >>> kvkit.mla_absorb(np.array([[[1, -1]]], np.float32), w_uk)
    array([[[ 1., -1.,  1.]]], dtype=float32)
    """
    return product_by_head("query", query, "w_uk", w_uk, 1)


@returns_input_kind
def mla_expand(latent_output: Array, w_uv: Array) -> Array:
    """Multiply attention outputs over latent rows with the up-projection of values.

    Parameters
    ----------
    latent_output : ndarray, shape [tokens, H, L]
        What `mla_attention` returns.
    w_uv : ndarray, shape [H, V, L]
        The last V of the P + V rows of each head in ``kv_b_proj``; the dtype of `latent_output`.

    Returns
    -------
    ndarray, shape [tokens, H, V]
        Computed in float32 and rounded once to the dtype of `latent_output`.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> w_uv = np.array([[[1, 2, 0], [0, 1, 1]]], np.float32)
    >>> kvkit.mla_expand(np.array([[[1, 0, 3]]], np.float32), w_uv)
    array([[[1., 3.]]], dtype=float32)
    """
    return product_by_head("latent_output", latent_output, "w_uv", w_uv, 2)


def product_by_head(name: str, rows: Array, weight_name: str, weight: Array, axis: int) -> Array:
    """Return rows [tokens, H, n] times each head's weights, whose axis `axis` has n elements."""
    fmt = checked_format(name, rows, FLOATS, 3)
    if checked_format(weight_name, weight, FLOATS, 3) is not fmt:
        raise argument_error(weight_name, f"the dtype of {name}, {fmt}", weight.dtype)
    if (weight.shape[0], weight.shape[axis]) != rows.shape[1:]:
        raise argument_error(weight_name, "the heads {} and {} elements of {}".format(*rows.shape[1:], name),
                             f"shape {weight.shape}")  # fmt: skip
    wide = weight.astype(np.float32)
    product = rows.astype(np.float32).swapaxes(0, 1) @ (wide if axis == 1 else wide.swapaxes(1, 2))
    return np.ascontiguousarray(product.swapaxes(0, 1)).astype(fmt.dtype, copy=False)
