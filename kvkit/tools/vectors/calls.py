"""Make random legal calls of PMX's caches and attention: any types, layouts and lengths.

What a call must not look at is NaN or infinite, or any bytes: rows without a token and other layers of a
cache, padding and foreign blocks of a mask. Entries of tables that it must not look at are any numbers.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.random import Generator

from kvkit.reference.cache import DYNAMIC_LAYOUTS, STATIC_LAYOUTS, place
from kvkit.tools.vectors.draws import (
    ANY_INDEX,
    DTYPES,
    NOT_FINITE,
    Call,
    Formats,
    normal,
    poison,
    rows_and_scales,
    tokens,
)
from kvkit.typed import Array

PastAndNew = Sequence[tuple[int, int]]  # (past, new) tokens of each sequence

LAYERS, LAYER = 3, 1  # layers of a cache, and the one that a call may see
NEW = "current_key", "current_value"  # names of new tokens
MIXED_LENGTHS = ((0, 5), (40, 1), (3, 0), (0, 0), (7, 2), (0, 1), (1, 33))


# Where rows lie


def row_offsets(rng: Generator, lengths: PastAndNew) -> tuple[Array, int]:
    """Return (`cachestarts` in any order with gaps, rows); one that only reads may share another's past."""
    starts, row = rng.choice(ANY_INDEX, len(lengths)), 1
    for b in rng.permutation(len(lengths)):
        if sum(lengths[b]):
            starts[b] = row
            row += sum(lengths[b]) + int(rng.integers(0, 3))
    for b, (past, new) in enumerate(lengths):
        hosts = [a for a in range(len(lengths)) if a != b and lengths[a][1] and lengths[a][0] >= past]
        if past and not new and hosts:
            starts[b] = starts[rng.choice(hosts)]
    return starts, max((int(s) + sum(n) for s, n in zip(starts, lengths, strict=True) if sum(n)), default=1)


def paged_rows(rng: Generator, lengths: PastAndNew, page_size: int) -> tuple[Array, int]:
    """Return (`cachestarts` of scattered pages, rows): a shared prefix, and a last page that is cut short."""
    counts = [-(-sum(n) // page_size) for n in lengths]
    table = rng.choice(ANY_INDEX, (len(lengths), max(counts, default=0) + 2))
    sharing = [b for b, (past, _) in enumerate(lengths) if past >= page_size]
    own = [(b, p) for b, count in enumerate(counts) for p in range(count) if p or b not in sharing[1:]]
    own = [own[i] for i in rng.permutation(len(own))]
    partial = [(b, p) for b, p in own if sum(lengths[b]) < (p + 1) * page_size]
    if partial:
        own.remove(partial[0])
        own.append(partial[0])
    rows = row = 1
    for b, p in own:
        table[b, p] = row
        rows = row + min(page_size, sum(lengths[b]) - p * page_size)
        row += page_size + int(rng.integers(0, 3))
    for b in sharing[1:]:
        table[b, 0] = table[sharing[0], 0]
    return table, rows


def cache_of(
    rng: Generator, formats: Formats, layout: str, lengths: dict[str, int], used: dict[str, Array],
    usual: bool,
) -> dict[str, Array | None]:  # fmt: skip
    """Return {"cache", "scale"} with lengths by axis: tokens in the `used` rows of a layer, else poison."""
    axes = lengths | {"l": LAYERS, "kv": 2}
    *shape, dim = (axes[axis] for axis in layout.split())
    cache = poison(rng, (*shape, dim * (formats.bit or 8) // 8), DTYPES[formats.t2])
    scale = poison(rng, (*shape, dim // formats.group), DTYPES[formats.t3]) if formats.bit else None
    at = place(layout, l=LAYER, **used)
    cache[at], scales = rows_and_scales(rng, formats, (*cache[at].shape[:-1], dim), usual)
    if scale is not None:
        scale[at] = scales
    return {"cache": cache, "scale": scale}


# Calls that append


def static_append(
    rng: Generator, formats: Formats, layout: int = 0, batch: int = 2, past: int = 3, seqlen: int = 2,
    heads: int = 2, dim: int = 16, repeat: int = 1, usual: bool = False,
) -> Call:  # fmt: skip
    """Return a call of `key_value_cache`; `usual` numbers are of a size that models write."""
    shape = {"b": batch + 2, "n": past + seqlen + 2, "h": heads, "c": dim}
    used = {"b": np.repeat(np.arange(batch), past), "n": np.tile(np.arange(past), batch)}
    cache = cache_of(rng, formats, STATIC_LAYOUTS[layout], shape, used, usual)
    states = {name: tokens(rng, formats, (batch, seqlen, heads, dim), usual) for name in NEW}
    return Call(
        "key_value_cache", states | {"start_pos": past} | cache, append_attributes(formats, layout, repeat)
    )


def dynamic_append(
    rng: Generator, formats: Formats, layout: int = 0, mode: int = 0, lengths: PastAndNew = MIXED_LENGTHS,
    page_size: int = 16, heads: int = 2, dim: int = 16, repeat: int = 1, usual: bool = False,
) -> Call:  # fmt: skip
    """Return a call of the dynamic `key_value_cache`; `usual` numbers are of a size that models write."""
    starts, rows = paged_rows(rng, lengths, page_size) if mode else row_offsets(rng, lengths)
    used = [np.zeros(0, np.int64)]
    for start, (past, _) in zip(starts, lengths, strict=True):
        t = np.arange(past)
        used.append(start[t // page_size] + t % page_size if mode else start + t)
    shape = {"n": rows, "h": heads, "c": dim}
    cache = cache_of(rng, formats, DYNAMIC_LAYOUTS[layout], shape, {"n": np.concatenate(used)}, usual)
    index = packed(lengths) | {"cachestarts": starts}
    states = {name: tokens(rng, formats, (index["seqstarts"][-1], heads, dim), usual) for name in NEW}
    attributes = append_attributes(formats, layout, repeat) | {"cache_mode": mode, "page_size": page_size}
    return Call("dynamic_batching.key_value_cache", states | index | cache, attributes)


def append_attributes(formats: Formats, layout: int, repeat: int) -> dict[str, Any]:
    """Return the attributes of an append."""
    return {
        "num_layer": LAYERS, "layer_idx": LAYER, "quant_bit": formats.bit, "quant_group": formats.group,
        "num_repeat": repeat, "cache_layout": layout,
    }  # fmt: skip


def packed(lengths: PastAndNew) -> dict[str, Any]:
    """Return the index tensors of sequences; a negative past gives fewer keys than new tokens."""
    past, new = np.array(lengths, np.int64).reshape(-1, 2).T.copy()
    ends = {"seqstarts": new, "kvstarts": past + new}
    index: dict[str, Any] = {name: np.cumsum([0, *counts]) for name, counts in ends.items()}
    hints = {"max_seqlen": max(new, default=0), "max_kvlen": max(past + new, default=0)}
    return index | {"start_pos": past} | {name: int(most) for name, most in hints.items()}


# Calls that attend


def static_attention(
    rng: Generator, formats: Formats, past: int = 3, seqlen: int = 2, batch: int = 2, heads: int = 4,
    kv_heads: int | None = 2, dim: int = 64, value_dim: int | None = None, **more: Any,
) -> Call:  # fmt: skip
    """Return a call of `multi_head_attention`; without `kv_heads` each query head has its own."""
    sizes = {"query": (seqlen, heads, dim), "key": (past + seqlen, kv_heads or heads, dim)}
    sizes["value"] = (*sizes["key"][:2], value_dim or dim)
    inputs = {name: normal(rng, (batch, *size), formats.t1) for name, size in sizes.items()}
    return Call("multi_head_attention", inputs, head_sizes(heads, kv_heads, dim) | more)


def dynamic_attention(
    rng: Generator, formats: Formats, lengths: PastAndNew = MIXED_LENGTHS, *sizes: Any, decoding: int = 0,
    **more: Any,
) -> Call:  # fmt: skip
    """Return a call of the dynamic `multi_head_attention`; `sizes` are heads and more of a static call."""
    index = packed(lengths) | {"decoding_batches": decoding}
    del index["start_pos"]
    queries, keys = (int(index[name][-1]) for name in ("seqstarts", "kvstarts"))
    call = static_attention(rng, formats, keys - queries, queries, 1, *sizes, **more)
    inputs = {name: array[0] for name, array in call.inputs.items()}
    return Call("dynamic_batching.multi_head_attention", inputs | index, call.attributes)


def cache_attention(
    rng: Generator,
    append: Call,
    heads: int,
    kv_heads: int | None = 2,
    decoding: int | None = None,
    **more: Any,
) -> Call:
    """Return a call of `multi_head_cache_attention` over what a call of `key_value_cache` appends."""
    dtype, (*outer, _, dim) = append["current_key"].dtype, append["current_key"].shape
    states = {name: normal(rng, append[name].shape, dtype) for name in NEW}
    inputs = {"query": normal(rng, (*outer, heads, dim), dtype)} | append.inputs | states
    if decoding is not None or "seqstarts" in inputs:
        inputs["decoding_batches"] = decoding or 0
    attributes = append.attributes | head_sizes(heads, kv_heads, dim) | more
    del attributes["num_repeat"]
    name = append.name.replace("key_value_cache", "multi_head_cache_attention")
    return Call(name, inputs, attributes)


def head_sizes(heads: int, kv_heads: int | None, dim: int) -> dict[str, Any]:
    """Return the attributes of attention that say sizes."""
    return {"num_heads": heads, "head_dim": dim, "num_kv_heads": kv_heads or 0}


# Masks


def mask_rows(rng: Generator, shape: tuple[int, ...], dtype: Any, share: float = 0.2) -> Array:
    """Return an additive mask of finite numbers and some -inf, or a boolean one."""
    hidden = rng.random(shape) < share
    if dtype is bool:
        return ~hidden
    return np.where(hidden, -np.inf, normal(rng, shape, np.float32)).astype(dtype)


def any_mask(rng: Generator, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return what nothing may read of a mask."""
    return rng.random(shape) < 0.5 if dtype is bool else rng.choice([*NOT_FINITE, 1e4], shape).astype(dtype)


def static_mask(rng: Generator, call: Call, shape: tuple[int, ...], dtype: Any = None, pad: int = 0) -> Array:
    """Return a mask for a static call with these leading axes, and `pad` more columns that nothing reads."""
    keys, dtype = context_length(call), dtype or call["query"].dtype
    return np.concatenate([mask_rows(rng, (*shape, keys), dtype), any_mask(rng, (*shape, pad), dtype)], -1)


def context_length(call: Call) -> int:
    """Return the length of the contexts of a static call."""
    new = call["query"].shape[1]
    return call["key"].shape[1] if "key" in call.inputs else int(call["start_pos"]) + new


def dynamic_mask(
    rng: Generator, call: Call, heads: int | None = None, dtype: Any = None, pad: int = 0
) -> Array:
    """Return a mask for a dynamic call, random outside diagonal blocks; of two axes if `heads` is None."""
    rows, columns = (call[name].tolist() for name in ("seqstarts", "kvstarts"))
    dtype, lead = dtype or call["query"].dtype, () if heads is None else (heads,)
    mask = any_mask(rng, (*lead, rows[-1], columns[-1] + pad), dtype)
    for i, end, j, last in zip(rows, rows[1:], columns, columns[1:], strict=False):
        mask[..., i:end, j:last] = mask_rows(rng, (*lead, end - i, last - j), dtype)
    return mask
