"""Make the calls of the suite pmx: random ones, and edge cases.

Elements that must not be read are NaN, or arbitrary codes. Other layers of a cache must not change.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.random import Generator

from kvkit.reference.cache import (
    CACHE_ATTRIBUTES,
    DYNAMIC_LAYOUTS,
    STATIC_LAYOUTS,
    dynamic_key_value_cache,
    key_value_cache,
)
from kvkit.tools.vectors.draws import FP_TYPES, NAN, Call, Sizes, cache_of, numbers, plain
from kvkit.tools.vectors.positions import positions
from kvkit.typed import Array

FEATURES: dict[str, dict[str, Any]] = {
    "every-head-its-own": {"groups": 1},
    "one-head-for-all": {"kv_heads": 1, "groups": 4},
    "not-causal": {"is_causal": False},
    "softcap": {"softcap": 1.5},
    "window": {"window": (2, -1)},
    "window-of-both-sides": {"window": (1, 1), "is_causal": False},
    "scale": {"softmax_scale": 0.3},
    "sinks": {"sinks": True},
    "mask": {"mask": "float"},
    "mask-of-bits": {"mask": "bool"},
    "alibi": {"is_alibi": True, "groups": 3},
    "more-queries-than-keys": {"new": 5, "context": 3},
}
LAST = "max_seqlen", "max_kvlen", "cache", "scale"  # inputs of dynamic operators after the index tensors


def store_past(operator: str, before: dict[str, Any], attributes: dict[str, Any]) -> None:
    """Store the past tokens of a call in its cache, with the reference."""
    store = dynamic_key_value_cache if operator.startswith("dynamic") else key_value_cache
    store(**before, **{name: value for name, value in attributes.items() if name in CACHE_ATTRIBUTES})


def static_cache(
    rng: Generator, sizes: Sizes, dtype: str = "fp16", bits: int = 0, layout: int = 0, past: int = 5,
    new: int = 2, repeat: int = 1,
) -> Call:  # fmt: skip
    """Return a call of `key_value_cache` after `past` tokens, which the reference stores."""
    kind, batch, heads, dim = FP_TYPES[dtype], sizes.batch, sizes.heads, sizes.dim
    axes = {"b": batch + 1, "l": 2, "kv": 2, "n": past + new + 2, "h": heads, "c": dim}
    cache, scale = cache_of(rng, STATIC_LAYOUTS[layout], axes, kind, bits, 8)
    attributes = {"num_layer": 2, "layer_idx": 1, "quant_bit": bits, "cache_layout": layout}
    most = 7 if bits == 4 else 127

    def tokens(count: int) -> dict[str, Array]:
        return {
            name: numbers(rng, (batch, count, heads, dim), kind, most)
            for name in ("current_key", "current_value")
        }

    before = tokens(past) | {"start_pos": 0, "cache": cache, "scale": scale}
    inputs = tokens(new) | {"start_pos": past, "cache": cache, "scale": scale}
    return Call("key_value_cache", inputs, attributes | {"num_repeat": repeat}, before if past else None)


def cache_rows(
    rng: Generator, contexts: Sequence[int], pasts: Sequence[int], mode: int, page: int
) -> tuple[Array, int]:
    """Return (cachestarts, rows of the cache). Two sequences share the full pages of their past."""
    if mode == 0:  # a free row before the first context and after each one
        room = np.array(contexts) + 1
        return np.cumsum([1, *room[:-1]]), int(room.sum()) + 2
    pages = [-(-context // page) for context in contexts]
    ids = rng.permutation(sum(pages) + 3)
    table = np.full((len(pages), max(pages) + 1), -1)
    for b, count in enumerate(pages):
        table[b, :count], ids = ids[:count] * page, ids[count:]
    shared = min(pasts[:2]) // page
    table[1, :shared] = table[0, :shared]
    return table, (sum(pages) + 3) * page


def dynamic_cache(
    rng: Generator, sizes: Sizes, dtype: str = "fp16", bits: int = 0, layout: int = 3, mode: int = 1,
    lengths: Sequence[int] = (1, 3, 0, 2), pasts: Sequence[int] | None = None, repeat: int = 1,
) -> Call:  # fmt: skip
    """Return a call of the dynamic `key_value_cache`; by default pasts end at borders of pages."""
    kind, heads, dim, page = FP_TYPES[dtype], sizes.heads, sizes.dim, sizes.page
    lengths, pasts = sizes.each(*lengths), sizes.each(*(pasts or (page + 1, page, 2 * page, page - 1)))
    contexts = [new + past for new, past in zip(lengths, pasts, strict=True)]
    cachestarts, rows = cache_rows(rng, contexts, pasts, mode, page)
    axes = {"l": 2, "kv": 2, "n": rows, "h": heads, "c": dim}
    cache, scale = cache_of(rng, DYNAMIC_LAYOUTS[layout], axes, kind, bits, 8)
    attributes = {"num_layer": 2, "layer_idx": 0, "quant_bit": bits, "cache_layout": layout}
    attributes |= {"cache_mode": mode} | ({"page_size": page} if mode else {})
    most = 7 if bits == 4 else 127

    def inputs(lengths: Sequence[int], pasts: Sequence[int]) -> dict[str, Any]:
        new = {name: numbers(rng, (sum(lengths), heads, dim), kind, most)
               for name in ("current_key", "current_value")}  # fmt: skip
        starts, contexts = np.cumsum([0, *lengths]), np.array(lengths) + np.array(pasts)
        index = {"seqstarts": starts, "kvstarts": np.cumsum([0, *contexts]), "cachestarts": cachestarts}
        rest = dict(zip(LAST, (None, None, cache, scale), strict=True))
        return new | index | {"start_pos": np.array(pasts)} | rest

    before = inputs(pasts, [0] * len(pasts)) if any(pasts) else None
    more = {"num_repeat": repeat}
    return Call("dynamic_batching.key_value_cache", inputs(lengths, pasts), attributes | more, before)


def static_attention(
    rng: Generator, sizes: Sizes, dtype: str = "fp32", new: int = 3, context: int = 9, groups: int = 2,
    kv_heads: int | None = None, mask: str | None = None, sinks: bool = False, **more: Any,
) -> Call:  # fmt: skip
    """Return a call of `multi_head_attention`."""
    kind, batch, dim, kv_heads = FP_TYPES[dtype], sizes.batch, sizes.dim, kv_heads or sizes.heads
    heads = groups * kv_heads
    inputs = {
        "query": plain(rng, (batch, new, heads, dim), kind),
        "key": plain(rng, (batch, context, kv_heads, dim), kind),
        "value": plain(rng, (batch, context, kv_heads, dim), kind),
    }
    if mask == "float":
        inputs["attn_mask"] = plain(rng, (batch, 1, new, context + 3), kind)
        inputs["attn_mask"][..., context:] = NAN
        inputs["attn_mask"][0, 0, 0, :context] = -np.inf
    elif mask == "bool":
        inputs["attn_mask"] = rng.random((heads, new, context)) < 0.6
    if sinks:
        inputs["sinks"] = plain(rng, (heads,), kind)
    attributes = {"num_heads": heads, "head_dim": dim, "num_kv_heads": kv_heads, "return_lse": True} | more
    return Call("multi_head_attention", inputs, attributes)


def dynamic_attention(
    rng: Generator, sizes: Sizes, dtype: str = "fp32", groups: int = 2, **more: Any,
) -> Call:  # fmt: skip
    """Return a call of the dynamic `multi_head_attention`."""
    kind, dim, kv_heads = FP_TYPES[dtype], sizes.dim, sizes.heads
    lengths, contexts, heads = sizes.each(1, 3, 0, 2), sizes.each(7, 3, 4, 5), groups * sizes.heads
    inputs = {
        "query": plain(rng, (sum(lengths), heads, dim), kind),
        "key": plain(rng, (sum(contexts), kv_heads, dim), kind),
        "value": plain(rng, (sum(contexts), kv_heads, dim), kind),
        "seqstarts": np.cumsum([0, *lengths]), "kvstarts": np.cumsum([0, *contexts]),
        "decoding_batches": 1, "max_seqlen": None, "max_kvlen": None,
    }  # fmt: skip
    attributes = {"num_heads": heads, "head_dim": dim, "num_kv_heads": kv_heads, "return_lse": True} | more
    return Call("dynamic_batching.multi_head_attention", inputs, attributes)


def cache_attention(rng: Generator, append: Call, **more: Any) -> Call:
    """Return a call of `multi_head_cache_attention` for the arguments of a call of `key_value_cache`."""
    name, inputs, attributes, before = append
    kind = inputs["current_key"].dtype
    for call in (inputs, before or {}):
        for key in ("current_key", "current_value"):
            if key in call:
                call[key] = plain(rng, call[key].shape, kind)
    *outer, kv_heads, dim = inputs["current_key"].shape
    heads = 2 * kv_heads
    query = {"query": plain(rng, (*outer, heads, dim), kind)}
    attributes = {key: value for key, value in attributes.items() if key != "num_repeat"} | {
        "num_heads": heads, "head_dim": dim, "num_kv_heads": kv_heads, "return_lse": True,
    }  # fmt: skip
    if name.startswith("dynamic"):
        last = {"decoding_batches": 1} | {key: inputs[key] for key in LAST}
        inputs = {key: value for key, value in inputs.items() if key not in LAST} | last
    name = name.replace("key_value_cache", "multi_head_cache_attention")
    return Call(name, query | inputs, attributes | more, before)


def merge(rng: Generator, dtype: str = "fp32") -> Call:
    """Return a merge of splits of a context; some rows have an empty split, some have only empty ones."""
    outputs = plain(rng, (3, 4, 2, 8), FP_TYPES[dtype])
    inputs = {"outputs": outputs, "lses": plain(rng, (3, 4, 2), np.dtype(np.float32))}
    inputs["lses"][1, :2] = -np.inf
    inputs["lses"][:, 3, 1] = -np.inf
    inputs["outputs"][1, :2] = 0
    inputs["outputs"][:, 3, 1] = 0
    return Call("merge_attention_states", inputs, {})


def pmx(rng: Generator, sizes: Sizes) -> Iterator[tuple[str, Call]]:
    """Yield (name, call) of the suite `pmx`; an operator must refuse a call whose name ends in "refused"."""
    for dtype in FP_TYPES:
        for bits in (0, 8, 4):
            kind = f"int{bits}" if bits else "as-is"
            for layout in (0, 1):
                yield f"append-static{layout}-{dtype}-{kind}", static_cache(rng, sizes, dtype, bits, layout)
            for layout in range(4):
                call = dynamic_cache(rng, sizes, dtype, bits, layout, layout % 2)
                yield f"append-dynamic{layout}-{dtype}-{kind}", call
        yield f"attention-{dtype}", static_attention(rng, sizes, dtype)
        yield f"attention-one-token-{dtype}", static_attention(rng, sizes, dtype, new=1, context=33)
        yield f"attention-dynamic-{dtype}", dynamic_attention(rng, sizes, dtype)
        yield f"merge-{dtype}", merge(rng, dtype)
        for bits in (0, 8, 4):
            made = static_cache(rng, sizes, dtype, bits)
            yield f"cache-attention-{dtype}-{bits}", cache_attention(rng, made)
            made = dynamic_cache(rng, sizes, dtype, bits)
            yield f"cache-attention-dynamic-{dtype}-{bits}", cache_attention(rng, made)
    yield "append-first-token", static_cache(rng, sizes, past=0, new=1)
    yield "append-repeated-heads", static_cache(rng, sizes, repeat=3)
    for past in (sizes.page - 1, sizes.page, sizes.page + 1):
        made = dynamic_cache(rng, sizes, lengths=(1,), pasts=(past,))
        yield f"append-at-the-border-of-a-page-{past}", made
    yield "append-nothing", dynamic_cache(rng, sizes, lengths=(0,), pasts=(4, 0))
    for name, more in FEATURES.items():
        yield f"attention-{name}", static_attention(rng, sizes, **more)
    yield "attention-dynamic-alibi", dynamic_attention(rng, sizes, is_alibi=True, groups=3)
    for bits in (0, 8):
        made = dynamic_cache(rng, sizes, bits=bits)
        yield f"cache-attention-dynamic-alibi-{bits}", cache_attention(rng, made, is_alibi=True)
    yield from positions(rng, sizes)
    yield from refused_calls(rng, sizes)


def refused_calls(rng: Generator, sizes: Sizes) -> Iterator[tuple[str, Call]]:
    """Yield (name, call) of calls with something wrong, which an operator must refuse."""
    for name in ("row-outside", "negative-row", "length", "row-twice", "no-scale"):
        call = dynamic_cache(rng, sizes, bits=8)
        rows, lengths = (call.inputs[tensor].copy() for tensor in ("cachestarts", "kvstarts"))
        call.inputs.update(cachestarts=rows, kvstarts=lengths)
        if name == "row-outside":
            rows[0, 0] = 2**40
        elif name == "negative-row":
            rows[1, 0] = -4
        elif name == "length":
            lengths[1:] += 1
        elif name == "row-twice":
            rows[1] = rows[0]
        else:
            call.inputs["scale"] = None
        yield f"{name}-refused", call
