"""The calls of a pack: random ones, and those at the edges of what an operator may be asked.

Whatever must not be read is NaN in floats and arbitrary in codes; other layers are guard bands.
"""

from typing import Any

import ml_dtypes
import numpy as np

from kvkit.tools.vectors.reference import DYNAMIC, STATIC

FLOATS = {"fp32": np.dtype(np.float32), "fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
NAN = np.nan
SIZES = {"heads": 2, "dim": 16, "page": 4, "batch": 3}


FEATURES: dict[str, dict[str, Any]] = {
    "every-head-its-own": {"kv_heads": 4},
    "one-head-for-all": {"kv_heads": 1},
    "not-causal": {"is_causal": False},
    "softcap": {"softcap": 1.5},
    "window": {"window": (2, -1)},
    "window-of-both-sides": {"window": (1, 1), "is_causal": False},
    "scale": {"softmax_scale": 0.3},
    "sinks": {"sinks": True},
    "mask": {"mask": "float"},
    "mask-of-bits": {"mask": "bool"},
    "more-queries-than-keys": {"new": 5, "context": 3},
}
OVER_PAGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "window": {"window": (3, -1)},
    "one-query-head": {"heads": 2},
}


def numbers(rng, shape, dtype, most=127, group=8):
    """Numbers, some groups of them ties of codes, zeros, tiny, or as large as a code can say."""
    x = rng.standard_normal(shape).astype(np.float32)
    flat = x.reshape(-1, group) if x.size % group == 0 else x.reshape(-1, 1)
    style = rng.integers(0, 8, len(flat))
    ties = rng.integers(-2 * most, 2 * most + 1, flat.shape) / 2
    ties[:, 0] = most
    flat[style == 1] = ties[style == 1]
    flat[style == 2] = 0
    flat[style == 3] *= np.float32(1e-6)
    return x.astype(dtype)


def plain(rng, shape, dtype):
    """Numbers of the size that attention has."""
    return rng.standard_normal(shape).astype(dtype)


def blank(rng, shape, dtype, bits):
    """A cache or scale that nobody has written: NaN, or any bytes."""
    if bits:
        return rng.integers(-128, 128, shape).astype(np.int8)
    return np.full(shape, NAN, dtype)


def cache_of(rng, layout, sizes, dtype, bits, group):
    """(cache, scale) of a layout, with nothing in them."""
    axes = layout.split()
    width = sizes["c"] // 2 if bits == 4 else sizes["c"]
    shape = [sizes[axis] for axis in axes[:-1]]
    scale = np.full((*shape, sizes["c"] // group), NAN, np.float16) if bits else None
    return blank(rng, (*shape, width), dtype, bits), scale


def static_cache(rng, dtype="fp16", bits=0, layout=0, past=5, new=2, batch=2, repeat=1, heads=2, dim=16):
    """A call of `key_value_cache` after `past` tokens, which were stored by the same recipe."""
    kind = FLOATS[dtype]
    sizes = {"b": batch + 1, "l": 2, "kv": 2, "n": past + new + 2, "h": heads, "c": dim}
    cache, scale = cache_of(rng, STATIC[layout], sizes, kind, bits, 8)
    attributes = {"num_layer": 2, "layer_idx": 1, "quant_bit": bits, "cache_layout": layout}
    most = 7 if bits == 4 else 127

    def tokens(count):
        return {
            name: numbers(rng, (batch, count, heads, dim), kind, most)
            for name in ("current_key", "current_value")
        }

    before = tokens(past) | {"start_pos": 0, "cache": cache, "scale": scale}
    inputs = tokens(new) | {"start_pos": past, "cache": cache, "scale": scale}
    return "key_value_cache", inputs, attributes | {"num_repeat": repeat}, (before if past else None)


def steps(rng, lengths, pasts, mode, page):
    """Index tensors of packed sequences; in pages, the first two share what is full of their past."""
    new = np.array(lengths)
    starts, kvlens = np.concatenate([[0], np.cumsum(new)]), new + np.array(pasts)
    index = {"seqstarts": starts, "kvstarts": np.concatenate([[0], np.cumsum(kvlens)])}
    if mode == 0:
        room = kvlens + 1
        index["cachestarts"], rows = np.concatenate([[1], 1 + np.cumsum(room)[:-1]]), int(room.sum()) + 2
    else:
        pages = -(-kvlens // page)
        ids = rng.permutation(int(pages.sum()) + 3)
        table = np.full((len(new), int(pages.max(initial=0)) + 1), -1)
        for b, count in enumerate(pages):
            table[b, :count], ids = ids[:count] * page, ids[count:]
        shared = min(pasts[:2]) // page if len(pasts) > 1 else 0
        table[1, :shared] = table[0, :shared] if shared else table[1, :shared]
        index["cachestarts"], rows = table, (int(pages.sum()) + 3) * page
    return index | {"start_pos": np.array(pasts)}, rows


def dynamic_cache(rng, dtype="fp16", bits=0, layout=3, mode=1, lengths=(1, 3, 0), pasts=(5, 4, 8), repeat=1):
    """A call of the dynamic `key_value_cache`, likewise."""
    kind, heads, dim, page = FLOATS[dtype], SIZES["heads"], SIZES["dim"], SIZES["page"]
    index, rows = steps(rng, lengths, pasts, mode, page)
    sizes = {"l": 2, "kv": 2, "n": rows, "h": heads, "c": dim}
    cache, scale = cache_of(rng, DYNAMIC[layout], sizes, kind, bits, 8)
    attributes = {
        "num_layer": 2,
        "layer_idx": 0,
        "quant_bit": bits,
        "cache_layout": layout,
        "cache_mode": mode,
    }
    attributes |= {"page_size": page} if mode else {}
    most = 7 if bits == 4 else 127

    def call(count, at):
        total = int(np.sum(count))
        new = {
            name: numbers(rng, (total, heads, dim), kind, most) for name in ("current_key", "current_value")
        }
        at = np.array(at)
        starts = {"seqstarts": np.concatenate([[0], np.cumsum(count)])}
        ends = {"kvstarts": np.concatenate([[0], np.cumsum(np.array(count) + at)]), "start_pos": at}
        return (
            new
            | index
            | starts
            | ends
            | {"max_seqlen": None, "max_kvlen": None, "cache": cache, "scale": scale}
        )

    before = call(pasts, [0] * len(pasts)) if any(pasts) else None
    order = (
        "current_key", "current_value", "seqstarts", "kvstarts", "cachestarts", "start_pos", "max_seqlen",
        "max_kvlen", "cache", "scale",
    )  # fmt: skip
    inputs = call(lengths, pasts)
    inputs = {name: inputs[name] for name in order}
    return "dynamic_batching.key_value_cache", inputs, attributes | {"num_repeat": repeat}, before


def static_attention(
    rng, dtype="fp32", new=3, context=9, heads=4, kv_heads=2, dim=16, batch=2, mask=None, sinks=False, **more
):
    """A call of `multi_head_attention`."""
    kind = FLOATS[dtype]
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
    return "multi_head_attention", inputs, attributes, None


def dynamic_attention(
    rng,
    dtype="fp32",
    lengths=(1, 3, 0, 2),
    contexts=(7, 3, 4, 5),
    heads=4,
    kv_heads=2,
    dim=16,
    decoding=1,
    **more,
):
    """A call of the dynamic `multi_head_attention`."""
    kind = FLOATS[dtype]
    inputs = {
        "query": plain(rng, (sum(lengths), heads, dim), kind),
        "key": plain(rng, (sum(contexts), kv_heads, dim), kind),
        "value": plain(rng, (sum(contexts), kv_heads, dim), kind),
        "seqstarts": np.cumsum([0, *lengths]), "kvstarts": np.cumsum([0, *contexts]),
        "decoding_batches": decoding, "max_seqlen": None, "max_kvlen": None,
    }  # fmt: skip
    attributes = {"num_heads": heads, "head_dim": dim, "num_kv_heads": kv_heads, "return_lse": True} | more
    return "dynamic_batching.multi_head_attention", inputs, attributes, None


def cache_attention(rng, made, heads=4, **more):
    """A call of `multi_head_cache_attention` from one of `key_value_cache`, whose numbers are of its size."""
    name, inputs, attributes, before = made
    kind = inputs["current_key"].dtype
    for call in (inputs, before or {}):
        for key in ("current_key", "current_value"):
            if key in call:
                call[key] = plain(rng, call[key].shape, kind)
    *outer, kv_heads, dim = inputs["current_key"].shape
    query = {"query": plain(rng, (*outer, heads, dim), kind)}
    attributes = {key: value for key, value in attributes.items() if key != "num_repeat"} | {
        "num_heads": heads, "head_dim": dim, "num_kv_heads": kv_heads, "return_lse": True,
    }  # fmt: skip
    if name.startswith("dynamic"):
        inputs = {**{key: value for key, value in inputs.items() if key not in ("max_seqlen", "max_kvlen")}}
        cache, scale = inputs.pop("cache"), inputs.pop("scale")
        inputs |= {
            "decoding_batches": 1,
            "max_seqlen": None,
            "max_kvlen": None,
            "cache": cache,
            "scale": scale,
        }
    return (
        name.replace("key_value_cache", "multi_head_cache_attention"),
        query | inputs,
        attributes | more,
        before,
    )


def merge(rng, dtype="fp32"):
    """Parts of a context, one of them empty for some rows, and rows with no part at all."""
    inputs = {
        "outputs": plain(rng, (3, 4, 2, 8), FLOATS[dtype]),
        "lses": plain(rng, (3, 4, 2), np.dtype(np.float32)),
    }
    inputs["lses"][1, :2] = -np.inf
    inputs["lses"][:, 3, 1] = -np.inf
    inputs["outputs"][1, :2] = 0
    inputs["outputs"][:, 3, 1] = 0
    return "merge_attention_states", inputs, {}, None


def pages(rng, dtype="fp16", lengths=(5, 4, 1, 9), page=4, heads=2, dim=16):
    """(key_cache, value_cache, block_tables, lengths): contexts at the borders of pages, the rest NaN."""
    kind, counts = FLOATS[dtype], [-(-length // page) for length in lengths]
    ids, blocks = rng.permutation(sum(counts) + 2), sum(counts) + 2
    caches = [np.full((blocks, page, heads, dim), NAN, kind) for _ in range(2)]
    table = np.full((len(lengths), max(counts) + 1), -1, np.int32)
    for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table[b, :count], ids = ids[:count], ids[count:]
        for position in range(length):
            for cache in caches:
                cache[table[b, position // page], position % page] = plain(rng, (heads, dim), kind)
    return *caches, table, np.array(lengths, np.int32)


def reshape_and_cache(rng, dtype="fp16"):
    """Slots in any order, two of them negative."""
    key_cache, value_cache, *_ = pages(rng, dtype)
    slots = rng.permutation(key_cache.shape[0] * 4)[:7].astype(np.int32)
    slots[[1, 4]] = -1
    key, value = (plain(rng, (7, 2, 16), FLOATS[dtype]) for _ in range(2))
    key[4] = NAN
    inputs = {
        "key": key,
        "value": value,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "slot_mapping": slots,
    }
    return "ascend.reshape_and_cache", inputs, {}, None


def paged_load(rng, dtype="fp16"):
    """A gather of contexts."""
    key_cache, value_cache, table, lengths = pages(rng, dtype)
    inputs = {"key_cache": key_cache, "value_cache": value_cache, "block_tables": table, "seq_lens": lengths}
    return "ascend.paged_cache_load", inputs, {}, None


def paged_attention(rng, dtype="fp16", heads=4, sinks=False, **more):
    """A decoded token of each sequence."""
    key_cache, value_cache, table, lengths = pages(rng, dtype)
    inputs = {"query": plain(rng, (len(lengths), heads, 16), FLOATS[dtype]), "key_cache": key_cache}
    inputs |= {"value_cache": value_cache, "block_tables": table, "context_lens": lengths}
    if sinks:
        inputs["sinks"] = plain(rng, (heads,), FLOATS[dtype])
    return "ascend.paged_attention", inputs, {"return_lse": True} | more, None


def pmx(rng):
    """(name, call) of the suite `pmx`; a name that ends in "refused" is of a call that an operator must
    refuse.
    """
    for dtype in FLOATS:
        for bits in (0, 8, 4):
            kind = f"int{bits}" if bits else "as-is"
            for layout in (0, 1):
                yield f"append-static{layout}-{dtype}-{kind}", static_cache(rng, dtype, bits, layout)
            for layout in range(4):
                yield (
                    f"append-dynamic{layout}-{dtype}-{kind}",
                    dynamic_cache(rng, dtype, bits, layout, layout % 2),
                )
        yield f"attention-{dtype}", static_attention(rng, dtype)
        yield f"attention-one-token-{dtype}", static_attention(rng, dtype, new=1, context=33)
        yield f"attention-dynamic-{dtype}", dynamic_attention(rng, dtype)
        yield f"merge-{dtype}", merge(rng, dtype)
        for bits in (0, 8, 4):
            made = static_cache(rng, dtype, bits)
            yield f"cache-attention-{dtype}-{bits}", cache_attention(rng, made)
            made = dynamic_cache(rng, dtype, bits)
            yield f"cache-attention-dynamic-{dtype}-{bits}", cache_attention(rng, made)
    yield "append-first-token", static_cache(rng, past=0, new=1)
    yield "append-repeated-heads", static_cache(rng, repeat=3)
    for past in (3, 4, 5):
        yield f"append-at-the-border-of-a-page-{past}", dynamic_cache(rng, lengths=(1, 1), pasts=(past, past))
    yield "append-nothing", dynamic_cache(rng, lengths=(0, 0), pasts=(4, 0))
    for name, more in FEATURES.items():
        yield f"attention-{name}", static_attention(rng, **more)
    for name, change in refusals().items():
        made = dynamic_cache(rng, bits=8)
        made[1].update(
            {name: made[1][name].copy() for name in ("cachestarts", "kvstarts")}
        )  # the past has its own
        change(made)
        yield f"{name}-refused", made


def refusals():
    """Changes of a legal call that an operator must refuse, with nothing written."""

    def row_outside(made):
        made[1]["cachestarts"][0, 0] = 2**40

    def negative_row(made):
        made[1]["cachestarts"][1, 0] = -4

    def length(made):
        made[1]["kvstarts"][1:] += 1

    def row_twice(made):
        made[1]["cachestarts"][1] = made[1]["cachestarts"][0]

    def no_scale(made):
        made[1]["scale"] = None

    return {
        each.__name__.replace("_", "-"): each
        for each in (row_outside, negative_row, length, row_twice, no_scale)
    }


def ascend(rng):
    """(name, call) of the suite `ascend`."""
    for dtype in FLOATS:
        yield f"store-{dtype}", reshape_and_cache(rng, dtype)
        yield f"load-{dtype}", paged_load(rng, dtype)
        yield f"attention-{dtype}", paged_attention(rng, dtype)
    outside = reshape_and_cache(rng)
    outside[1]["slot_mapping"][0] = 2**20
    yield "slot-outside-refused", outside


def pool_attention(rng, dtype="fp16", layout="b n h c", news=None, **more):
    """Attention over pools of pages, of one query a sequence or of several."""
    _, inputs, attributes, _ = paged_attention(rng, dtype, **more)
    sinks = inputs.pop("sinks", None)
    if news is not None:
        inputs["query"] = plain(rng, (sum(news), *inputs["query"].shape[1:]), FLOATS[dtype])
    if layout != "b n h c":
        pools = ("key_cache", "value_cache")
        inputs |= {name: np.ascontiguousarray(inputs[name].swapaxes(1, 2)) for name in pools}
    inputs["query_starts"] = None if news is None else np.cumsum([0, *news])
    inputs |= {} if sinks is None else {"sinks": sinks}
    return "paged_attention", inputs, attributes | {"layout": layout}, None


def pool_append(rng, dtype="fp16", layout="b n h c"):
    """Slots in any order of a pool in another order."""
    _, inputs, _, _ = reshape_and_cache(rng, dtype)
    if layout != "b n h c":
        pools = ("key_cache", "value_cache")
        inputs |= {name: np.ascontiguousarray(inputs[name].swapaxes(1, 2)) for name in pools}
    return "paged_append", inputs, {"layout": layout}, None


def paged(rng):
    """(name, call) of the suite `paged`: pools of pages, as engines have them."""
    for dtype in FLOATS:
        for name, more in OVER_PAGES.items():
            yield f"{name}-{dtype}", pool_attention(rng, dtype, **more)
        for layout in ("b n h c", "b h n c"):
            order = layout.replace(" ", "")
            yield f"append-{order}-{dtype}", pool_append(rng, dtype, layout)
            yield f"several-queries-{order}-{dtype}", pool_attention(rng, dtype, layout, (3, 1, 0, 9))
    outside = pool_append(rng)
    outside[1]["slot_mapping"][0] = 2**20
    yield "slot-outside-refused", outside
