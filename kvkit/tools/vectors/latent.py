"""Make calls over latent caches: suites mla-dense, mla-ds656, mla-ds584, dsa-indexer and dsa-sparse."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from numpy.random import Generator

from kvkit.formats import encode
from kvkit.tools.vectors.draws import FP_TYPES, NAN, Call, Sizes, block_table, normal
from kvkit.typed import Array

LATENT, ROPE, DS_V4_CODES = 512, 64, 448  # elements of the latent and the rotary part; of codes in 584 bytes
DS_V4_DATA = 576  # bytes of codes and rotary part in a row of 584; blocks are padded to a multiple
HEAD_PAIRS = ((16, 1), (16, 4), (64, 2), (128, 1), (128, 3))  # query heads, queries of each sequence
SCALE = 192**-0.5  # 1 / sqrt(size of an expanded head)
ROW_FORMATS = {"656": "ds_mla", "656-powers": "ds_mla:p2", "584": "ds_v4"}
ATTENTION = "mla_attention"
IN_FLOAT64 = ATTENTION, "indexer_scores"  # operators whose expected results are not rounded
CHOSEN_ROWS = 9  # indices for each query


def pool_of(rows: Array, used: Array, format: str | None) -> dict[str, Any]:
    """Return the arguments {"latent": pool, ...} for rows [blocks, page, dim]; unused rows are NaN."""
    blocks, page, dim = rows.shape
    if format is None:
        return {"latent": np.where(used[..., None], rows, rows.dtype.type(NAN))}
    stored = encode(rows.reshape(-1, dim), format)["codes"].view(np.uint8).reshape(blocks, page, -1)
    stored[~used] = 255  # bytes of NaN, as codes and as numbers
    if format.startswith("ds_v4"):
        parts = (part.reshape(blocks, -1) for part in np.split(stored, [DS_V4_DATA], axis=-1))
        padding = -page * stored.shape[-1] % DS_V4_DATA
        stored = np.concatenate([*parts, np.full((blocks, padding), 255, np.uint8)], axis=1)
    return {"latent": stored, "format": format}


def width_of(format: str | None) -> int:
    """Return the number of elements of a row."""
    return DS_V4_CODES + ROPE if str(format).startswith("ds_v4") else LATENT + ROPE


def contexts(
    rng: Generator, lengths: Sequence[int], queries: Sequence[int], page: int, dtype: type = np.int64
) -> tuple[dict[str, Array], Array]:
    """Return (index arrays of contexts in blocks, which rows [blocks, page] hold a token)."""
    table, used = block_table(rng, lengths, page, dtype)
    places = {"block_tables": table, "context_lens": np.array(lengths, dtype)}
    return places | {"query_starts": np.cumsum([0, *queries])}, used


def dense_attention(
    rng: Generator, sizes: Sizes, heads: int = 16, queries: int = 1, dtype: str = "bf16",
    format: str | None = None, sinks: bool = False, two_pools: bool = False, **more: Any,
) -> Call:  # fmt: skip
    """Return a call of attention over contexts that end near the ends of pages; one context is empty.

    With `two_pools` the rotary parts of rows are a pool of their own.
    """
    page, dim, kind = sizes.page, width_of(format), FP_TYPES[dtype]
    lengths = sizes.each(page + 3, 0, 2 * page + 1, max(page, queries))
    places, used = contexts(rng, lengths, [queries] * len(lengths), page, np.int32)
    pool = pool_of(normal(rng, (*used.shape, dim), kind), used, format)
    if two_pools:
        pool["rope_cache"] = pool["latent"][..., LATENT:].copy()
        pool["latent"] = pool["latent"][..., :LATENT].copy()
    inputs = {"query": normal(rng, (len(lengths) * queries, heads, dim), kind), "latent": pool.pop("latent")}
    inputs |= places
    inputs |= {"sinks": normal(rng, (heads,), "fp32")} if sinks else {}
    inputs |= {"rope_cache": pool.pop("rope_cache")} if two_pools else {}
    return Call(ATTENTION, inputs, {"softmax_scale": SCALE, "return_lse": True} | pool | more)


def sparse_attention(
    rng: Generator, sizes: Sizes, heads: int = 16, queries: int = 1, dtype: str = "bf16",
    format: str | None = None, sinks: bool = False, extra: bool = False, lens: bool = False, **more: Any,
) -> Call:  # fmt: skip
    """Return a call of attention to chosen rows: indices may be negative, outside or repeated.

    The last query has none. With `lens` each query has its own number of indices. With `extra` there are rows
    of a second pool.
    """
    tokens, dim, kind = sizes.batch * queries, width_of(format), FP_TYPES[dtype]

    def side(blocks: int) -> tuple[dict[str, Any], Array]:
        slots = blocks * sizes.page
        chosen = rng.integers(0, slots, (tokens, CHOSEN_ROWS)).astype(np.int32)
        chosen[rng.random(chosen.shape) < 0.2] = -1
        chosen[0, 1], chosen[0, 2:4] = slots + 7, chosen[0, 0]  # outside of the pool, and repeated
        chosen[-1] = -1
        used = np.zeros((blocks, sizes.page), bool)
        used.reshape(-1)[chosen[(chosen >= 0) & (chosen < slots)]] = True
        return pool_of(normal(rng, (*used.shape, dim), kind), used, format), chosen

    pool, chosen = side(5)
    inputs = {"query": normal(rng, (tokens, heads, dim), kind), "latent": pool.pop("latent")}
    inputs["indices"] = chosen
    inputs |= {"index_lens": rng.integers(1, CHOSEN_ROWS + 1, tokens).astype(np.int32)} if lens else {}
    inputs |= {"sinks": normal(rng, (heads,), "fp32")} if sinks else {}
    if extra:
        second, others = side(3)
        counts = rng.integers(0, CHOSEN_ROWS + 1, tokens).astype(np.int32) if lens else None
        inputs["extra"] = second["latent"], others, counts
    return Call(ATTENTION, inputs, {"softmax_scale": SCALE, "return_lse": True} | pool | more)


def append_rows(
    rng: Generator, sizes: Sizes, dtype: str = "bf16", format: str | None = None, two_pools: bool = False,
) -> Call:  # fmt: skip
    """Return a call that appends rows to slots in any order, one of them negative."""
    kind, dim = FP_TYPES[dtype], width_of(format)
    used = np.zeros((3, sizes.page), bool)
    cache = pool_of(normal(rng, (*used.shape, dim), kind), used, format)["latent"]
    slots = rng.permutation(used.size)[: max(2, used.size // 2)].astype(np.int32)
    slots[0] = -1
    tokens = normal(rng, (len(slots), dim), kind)
    inputs = {"latent": tokens[:, :-ROPE].copy(), "rope": tokens[:, -ROPE:].copy()}
    inputs |= {"cache": cache[..., :LATENT].copy() if two_pools else cache, "slot_mapping": slots}
    inputs |= {"rope_cache": cache[..., LATENT:].copy()} if two_pools else {}
    return Call("mla_append", inputs, {} if format is None else {"format": format})


def mla_dense(rng: Generator, sizes: Sizes) -> Iterator[tuple[str, Call]]:
    """Yield (name, call) of the suite `mla-dense`: floats in one pool or two."""
    for heads, queries in HEAD_PAIRS:
        yield f"heads{heads}-queries{queries}", dense_attention(rng, sizes, heads, queries)
    for dtype in FP_TYPES:
        yield f"attention-{dtype}", dense_attention(rng, sizes, 16, 3, dtype)
        yield f"append-{dtype}", append_rows(rng, sizes, dtype)
        kind, heads = FP_TYPES[dtype], sizes.heads
        query = normal(rng, (sizes.batch, heads, 128), kind)
        inputs = {"query": query, "w_uk": normal(rng, (heads, 128, 32), kind)}
        yield f"absorb-{dtype}", Call("mla_absorb", inputs)
        rows = normal(rng, (sizes.batch, heads, 32), kind)
        inputs = {"latent_output": rows, "w_uv": normal(rng, (heads, 128, 32), kind)}
        yield f"expand-{dtype}", Call("mla_expand", inputs)
    yield "not-causal", dense_attention(rng, sizes, 16, 2, is_causal=False)
    yield "sinks", dense_attention(rng, sizes, 16, 2, sinks=True)
    yield "sinks-not-in-lse", dense_attention(rng, sizes, 16, 2, sinks=True, lse_of_sinks=False)
    yield "two-pools", dense_attention(rng, sizes, 16, 2, two_pools=True)
    yield "append-two-pools", append_rows(rng, sizes, two_pools=True)
    outside = append_rows(rng, sizes)
    outside.inputs["slot_mapping"][-1] = 2**20
    yield "slot-outside-refused", outside


def coded(rng: Generator, sizes: Sizes, names: tuple[str, ...]) -> Iterator[tuple[str, Call]]:
    """Yield (name, call) of the suites `mla-ds656` and `mla-ds584`: rows are bytes of these formats."""
    for name in names:
        format = ROW_FORMATS[name]
        dense = partial(dense_attention, rng, sizes, format=format)
        chosen = partial(sparse_attention, rng, sizes, format=format)
        for heads, queries in HEAD_PAIRS:
            yield f"{name}-heads{heads}-queries{queries}", dense(heads, queries)
        yield f"{name}-fp32", dense(16, 2, "fp32")
        yield f"{name}-sinks", dense(16, 2, sinks=True, lse_of_sinks=False)
        yield f"{name}-chosen", chosen(16, 2, lens=True)
        yield f"{name}-extra", chosen(64, 1, extra=True, sinks=True)
        yield f"{name}-append", append_rows(rng, sizes, format=format)
    twice = append_rows(rng, sizes, format=ROW_FORMATS[names[0]])
    twice.inputs["slot_mapping"][:] = 1
    yield "slot-twice-refused", twice


def dsa_sparse(rng: Generator, sizes: Sizes) -> Iterator[tuple[str, Call]]:
    """Yield (name, call) of the suite `dsa-sparse`: chosen rows of one pool or two."""
    for heads, queries in HEAD_PAIRS:
        yield f"heads{heads}-queries{queries}", sparse_attention(rng, sizes, heads, queries)
    for dtype in FP_TYPES:
        yield f"lens-{dtype}", sparse_attention(rng, sizes, 16, 2, dtype, lens=True)
        yield f"extra-{dtype}", sparse_attention(rng, sizes, 16, 2, dtype, extra=True, lens=True)
    for lse_of_sinks in (True, False):
        name = "sinks" if lse_of_sinks else "sinks-not-in-lse"
        yield name, sparse_attention(rng, sizes, 16, 1, sinks=True, extra=True, lse_of_sinks=lse_of_sinks)


def dsa_indexer(rng: Generator, sizes: Sizes) -> Iterator[tuple[str, Call]]:
    """Yield (name, call) of the suite `dsa-indexer`: scores of 64 heads, and the rows that they choose."""
    for dtype in (*FP_TYPES, "e4m3"):
        for queries in (1, 3):
            yield f"scores-{dtype}-queries{queries}", index_scores(rng, sizes, dtype, queries)
    for k in (1, 5, 64):
        yield f"top{k}", top_rows(rng, sizes, k)


def index_scores(rng: Generator, sizes: Sizes, dtype: str, queries: int) -> Call:
    """Return a call of `indexer_scores`. One context is empty; keys after contexts are NaN."""
    inputs = dense_attention(rng, sizes, queries=queries, dtype="fp32" if dtype == "e4m3" else dtype).inputs
    keys, places = inputs["latent"][..., :128].copy(), ("block_tables", "context_lens", "query_starts")
    tokens, kind, more = len(inputs["query"]), inputs["query"].dtype, {}
    if dtype == "e4m3":
        keys = keys.astype(ml_dtypes.float8_e4m3fn)
        more["key_scale"] = rng.uniform(0.5, 2, keys.shape[:2]).astype(np.float32)
    found = {"query": normal(rng, (tokens, 64, 128), kind), "keys": keys}
    found |= {"weights": (normal(rng, (tokens, 64), kind) / 8).astype(kind)}
    return Call("indexer_scores", found | {name: inputs[name] for name in places} | more)


def top_rows(rng: Generator, sizes: Sizes, k: int) -> Call:
    """Return a call of `topk_rows` for scores with ties; one context is empty."""
    inputs = dense_attention(rng, sizes, queries=2, dtype="fp32").inputs
    lengths, tokens = np.repeat(inputs["context_lens"], 2), len(inputs["query"])
    found = rng.integers(0, 5, (tokens, int(lengths.max()))).astype(np.float32)
    found[np.arange(found.shape[1]) >= lengths[:, None]] = -np.inf
    call = {"scores": found, "k": k, "block_tables": inputs["block_tables"]}
    return Call("topk_rows", call | {"page_size": sizes.page, "query_starts": inputs["query_starts"]})
