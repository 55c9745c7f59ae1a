"""Make the calls of the suite pmx: random ones, and edge cases."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.random import Generator

from kvkit.tools.vectors.calls import (
    cache_attention,
    context_length,
    dynamic_append,
    dynamic_attention,
    dynamic_mask,
    static_append,
    static_attention,
    static_mask,
)
from kvkit.tools.vectors.draws import FP_TYPES, Call, Formats, Sizes, normal
from kvkit.tools.vectors.positions import positions

FEATURES: dict[str, dict[str, Any]] = {
    "every-head-its-own": {"groups": 1},
    "one-head-for-all": {"kv_heads": 1, "groups": 4},
    "not-causal": {"is_causal": False},
    "softcap": {"softcap": 1.5},
    "window": {"window": (2, -1)},
    "window-of-both-sides": {"window": (1, 1), "is_causal": False},
    "scale": {"softmax_scale": 0.3},
    "sinks": {"sinks": True},
    "mask": {"mask": float},
    "mask-of-bits": {"mask": bool},
    "alibi": {"is_alibi": True, "groups": 3},
    "more-queries-than-keys": {"past": -2, "seqlen": 5},
}


def static(rng: Generator, sizes: Sizes, dtype: str = "fp16", bits: int = 0, **more: Any) -> Call:
    """Return a call of `key_value_cache` after five tokens."""
    more = {"batch": sizes.batch, "past": 5, "heads": sizes.heads, "dim": sizes.dim} | more
    return static_append(rng, formats_of(dtype, bits), usual=True, **more)


def dynamic(
    rng: Generator, sizes: Sizes, dtype: str = "fp16", bits: int = 0, layout: int = 3, mode: int = 1,
    pasts: Sequence[int] | None = None, lengths: Sequence[int] = (1, 3, 0, 2),
) -> Call:  # fmt: skip
    """Return a call of the dynamic `key_value_cache`; by default pasts end at borders of pages."""
    page, shape = sizes.page, (sizes.heads, sizes.dim)
    pasts = sizes.each(*(pasts or (page + 1, page, 2 * page, page - 1)))
    both = list(zip(pasts, sizes.each(*lengths), strict=True))
    append = dynamic_append(rng, formats_of(dtype, bits), layout, mode, both, page, *shape, usual=True)
    return some_without_hints(rng, append)


def some_without_hints(rng: Generator, call: Call) -> Call:
    """Return a dynamic call; half of them do not say the largest lengths."""
    if rng.random() < 0.5:
        call.inputs |= {"max_seqlen": None, "max_kvlen": None}
    return call


def formats_of(dtype: str, bits: int) -> Formats:
    """Return the types of a cache of tokens as they are, or of codes."""
    return Formats(dtype, "int8", "fp16", bits) if bits else Formats(dtype, dtype)


def plain_attention(
    rng: Generator, sizes: Sizes, dtype: str = "fp32", past: int = 6, seqlen: int = 3, groups: int = 2,
    kv_heads: int | None = None, mask: type | None = None, sinks: bool = False, **more: Any,
) -> Call:  # fmt: skip
    """Return a call of `multi_head_attention`; a mask of floats hides all keys from a query."""
    kv_heads = kv_heads or sizes.heads
    heads, shape, types = groups * kv_heads, (past, seqlen, sizes.batch), Formats(dtype, dtype)
    call = static_attention(rng, types, *shape, heads, kv_heads, sizes.dim, return_lse=True, **more)
    if mask is bool:
        call.inputs["attn_mask"] = static_mask(rng, call, (heads, seqlen), bool)
    elif mask:
        call.inputs["attn_mask"] = static_mask(rng, call, (sizes.batch, 1, seqlen), pad=3)
        call.inputs["attn_mask"][0, 0, 0, : context_length(call)] = -np.inf
    if sinks:
        call.inputs["sinks"] = normal(rng, (heads,), dtype)
    return call


def packed_attention(rng: Generator, sizes: Sizes, dtype: str = "fp32", groups: int = 2, **more: Any) -> Call:
    """Return a call of the dynamic `multi_head_attention`."""
    lengths = list(zip(sizes.each(6, 0, 4, 3), sizes.each(1, 3, 0, 2), strict=True))
    types, heads = Formats(dtype, dtype), (groups * sizes.heads, sizes.heads)
    call = dynamic_attention(rng, types, lengths, *heads, sizes.dim, decoding=1, return_lse=True, **more)
    return some_without_hints(rng, call)


def over_cache(rng: Generator, append: Call, **more: Any) -> Call:
    """Return a call of `multi_head_cache_attention` with two query heads for each of what is appended."""
    kv_heads = append["current_key"].shape[-2]
    decoding = 1 if "seqstarts" in append.inputs else None
    return cache_attention(rng, append, 2 * kv_heads, kv_heads, decoding, return_lse=True, **more)


def masked(rng: Generator, call: Call) -> Call:
    """Return a dynamic call with a mask of floats."""
    call.inputs["attn_mask"] = dynamic_mask(rng, call, call["query"].shape[-2], pad=3)
    return call


def merge(rng: Generator, dtype: str = "fp32") -> Call:
    """Return a merge of splits of a context; some rows have an empty split, some have only empty ones."""
    outputs = normal(rng, (3, 4, 2, 8), dtype)
    inputs = {"outputs": outputs, "lses": normal(rng, (3, 4, 2), np.float32)}
    inputs["lses"][1, :2] = -np.inf
    inputs["lses"][:, 3, 1] = -np.inf
    inputs["outputs"][1, :2] = 0
    inputs["outputs"][:, 3, 1] = 0
    return Call("merge_attention_states", inputs)


def pmx(rng: Generator, sizes: Sizes) -> Iterator[tuple[str, Call]]:
    """Yield (name, call) of the suite `pmx`; an operator must refuse a call whose name ends in "refused"."""
    for dtype in FP_TYPES:
        for bits in (0, 8, 4):
            kind = f"int{bits}" if bits else "as-is"
            for layout in (0, 1):
                yield f"append-static{layout}-{dtype}-{kind}", static(rng, sizes, dtype, bits, layout=layout)
            for layout in range(4):
                call = dynamic(rng, sizes, dtype, bits, layout, layout % 2)
                yield f"append-dynamic{layout}-{dtype}-{kind}", call
        yield f"attention-{dtype}", plain_attention(rng, sizes, dtype)
        yield f"attention-one-token-{dtype}", plain_attention(rng, sizes, dtype, past=32, seqlen=1)
        yield f"attention-dynamic-{dtype}", packed_attention(rng, sizes, dtype)
        yield f"merge-{dtype}", merge(rng, dtype)
        for bits in (0, 8, 4):
            yield f"cache-attention-{dtype}-{bits}", over_cache(rng, static(rng, sizes, dtype, bits))
            made = dynamic(rng, sizes, dtype, bits)
            yield f"cache-attention-dynamic-{dtype}-{bits}", over_cache(rng, made)
    yield "append-first-token", static(rng, sizes, past=0, seqlen=1)
    yield "append-repeated-heads", static(rng, sizes, repeat=3)
    for past in (sizes.page - 1, sizes.page, sizes.page + 1):
        made = dynamic(rng, sizes, pasts=(past,), lengths=(1,))
        yield f"append-at-the-border-of-a-page-{past}", made
    yield "append-nothing", dynamic(rng, sizes, pasts=(4, 0), lengths=(0,))
    for name, more in FEATURES.items():
        yield f"attention-{name}", plain_attention(rng, sizes, **more)
    yield "attention-dynamic-alibi", packed_attention(rng, sizes, is_alibi=True, groups=3)
    yield "attention-dynamic-mask", masked(rng, packed_attention(rng, sizes))
    for bits in (0, 8):
        made = dynamic(rng, sizes, bits=bits)
        yield f"cache-attention-dynamic-alibi-{bits}", over_cache(rng, made, is_alibi=True)
    yield "cache-attention-dynamic-mask", masked(rng, over_cache(rng, dynamic(rng, sizes)))
    yield from positions(rng, sizes)
    yield from refused_calls(rng, sizes)


def refused_calls(rng: Generator, sizes: Sizes) -> Iterator[tuple[str, Call]]:
    """Yield (name, call) of calls with something wrong, which an operator must refuse."""
    for name in ("row-outside", "negative-row", "length", "row-twice", "no-scale"):
        call = dynamic(rng, sizes, bits=8)
        rows, lengths = call["cachestarts"], call["kvstarts"]
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
