"""What operators must give, in plain numpy: caches by their recipe, byte for byte; attention in float64.

Nothing here comes from a kernel or a check of kvkit. Inputs are legal.
"""

from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16)
import numpy as np

from kvkit.tools.vectors import angles

STATIC = ("b l kv n h c", "l b kv h n c")
DYNAMIC = ("n l kv h c", "l n kv h c", "l kv n h c", "l kv h n c")


def cells(array, layout, layer, side):
    """[sequences, rows, heads, content] of one side of a layer: a view."""
    axes = layout.split()
    at = tuple({"l": layer, "kv": side}.get(axis, slice(None)) for axis in axes)
    left = [axis for axis in axes if axis not in ("l", "kv")]
    if "b" not in left:
        return array[at].transpose([left.index(axis) for axis in "nhc"])[None]
    return array[at].transpose([left.index(axis) for axis in "bnhc"])


def encoded(x, bits, group):
    """(codes as bytes, scales) of x [..., content]: PMX, quantization."""
    most = np.float32(2 ** (bits - 1) - 1)
    groups = x.astype(np.float32).reshape(*x.shape[:-1], -1, group)
    least = np.float32(1e-5).astype(x.dtype)
    scale = np.maximum((np.abs(groups).max(-1) / most).astype(x.dtype), least)
    quotient = (groups / scale.astype(np.float32)[..., None]).astype(x.dtype).astype(np.float32)
    codes = np.clip(np.rint(quotient), -most, most).astype(np.int8).reshape(x.shape)
    if bits == 4:
        codes = (codes[..., ::2] & 15) | ((codes[..., 1::2] & 15) << 4)
    return codes.view(np.uint8), scale


def decoded(codes, scale, bits, group, dtype):
    """The elements that codes and scales are, of a dtype."""
    codes = codes.view(np.uint8)
    if bits == 4:
        nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1).astype(np.int16)
        numbers = np.where(nibbles > 7, nibbles - 16, nibbles)
    else:
        numbers = codes.view(np.int8)
    product = numbers.astype(np.float32).reshape(*scale.shape, group) * scale.astype(np.float32)[..., None]
    return product.astype(scale.dtype).astype(dtype).reshape(numbers.shape)


def store(new, cache, scale, rows, bits, group):
    """Write tokens [tokens, heads, content] into rows of cells of one sequence."""
    for token, row in enumerate(rows):
        if bits:
            codes, cell = encoded(new[token], bits, group)
            cache[row], scale[row] = codes.view(cache.dtype), cell.astype(scale.dtype)
        else:
            cache[row] = new[token].astype(cache.dtype)


def load(cache, scale, rows, bits, group, dtype):
    """Read rows of cells of one sequence."""
    if bits:
        return decoded(cache[rows], scale[rows], bits, group, dtype)
    return cache[rows].astype(dtype)


def places(inputs, attributes):
    """For each sequence (index of its cells, slice or index of its tokens, rows of its context, past)."""
    if "seqstarts" not in inputs:
        batch, new = inputs["current_key"].shape[:2]
        past = inputs["start_pos"]
        return [(b, b, np.arange(past + new), past) for b in range(batch)]
    starts, table = inputs["seqstarts"], inputs["cachestarts"]
    found = []
    for b, past in enumerate(inputs["start_pos"].tolist()):
        position = np.arange(past + starts[b + 1] - starts[b])
        if attributes.get("cache_mode", 0):
            size = attributes["page_size"]
            rows = table[b, position // size] + position % size
        else:
            rows = table[b] + position
        found.append((0, slice(starts[b], starts[b + 1]), rows, past))
    return found


def key_value_cache(inputs, attributes):
    """(key, value) of the append, and its gather; cache and scale change in place."""
    bits, group = attributes.get("quant_bit", 0), attributes.get("quant_group", 8)
    layouts = STATIC if inputs["cache"].ndim == 6 else DYNAMIC
    layout, layer = layouts[attributes.get("cache_layout", 0)], attributes.get("layer_idx", 0)
    every = places(inputs, attributes)
    results: list[Any] = []
    for side, name in enumerate(("current_key", "current_value")):
        new = inputs[name]
        cache = cells(inputs["cache"], layout, layer, side)
        scale = cells(inputs["scale"], layout, layer, side) if bits else [None] * len(cache)
        for b, tokens, rows, past in every:
            store(new[tokens], cache[b], scale[b], rows[past:], bits, group)
        read = [load(cache[b], scale[b], rows, bits, group, new.dtype) for b, _, rows, _ in every]
        whole = np.stack(read) if layouts is STATIC else np.concatenate(read)
        results.append(whole.repeat(attributes.get("num_repeat", 1), axis=-2))
    return tuple(results)


def attend(query, key, value, attributes, mask=None, sinks=None, causal=True, slopes=None):
    """(output, lse) in float64 of one sequence [tokens, heads, content]; `mask` is [heads or 1, queries,
    keys], and `slopes` are ALiBi's of each head.
    """
    q, k, v = (array.astype(np.float64) for array in (query, key, value))
    n, heads, dim = q.shape
    m, repeat = len(k), heads // max(k.shape[1], 1)
    k, v = k.repeat(repeat, axis=1), v.repeat(repeat, axis=1)
    scale = attributes.get("softmax_scale") or dim**-0.5
    scores = np.einsum("qhd,khd->hqk", q, k) * scale
    cap = attributes.get("softcap", 0.0)
    scores = cap * np.tanh(scores / cap) if cap else scores
    at, keys = (m - n + np.arange(n))[:, None], np.arange(m)
    left, right = attributes.get("window", (-1, -1))
    hidden = np.zeros((n, m), bool)
    if causal:
        hidden |= keys > at
    if left >= 0:
        hidden |= keys < at - left
    if right >= 0:
        hidden |= keys > at + right
    if mask is not None:
        if mask.dtype == bool:
            hidden = hidden | ~mask
        else:
            scores = scores + mask.astype(np.float64)
    if slopes is not None:
        scores = scores - np.asarray(slopes, np.float64)[:, None, None] * np.abs(keys - at)
    scores = np.where(hidden, -np.inf, scores)
    extra = np.full((heads, n, 1), -np.inf) if sinks is None else np.broadcast_to(
        sinks.astype(np.float64)[:, None, None], (heads, n, 1)
    )  # fmt: skip
    top = np.maximum(scores.max(-1, initial=-np.inf, keepdims=True), extra)
    with np.errstate(all="ignore"):
        weights = np.where(np.isfinite(top), np.exp(scores - top), 0)
        total = weights.sum(-1, keepdims=True) + np.where(np.isfinite(top), np.exp(extra - top), 0)
        weights = np.where(total > 0, weights / total, 0)
        lse = np.where(total > 0, top + np.log(total), -np.inf)[..., 0]
    v = np.where(np.isfinite(v), v, 0)
    return np.einsum("hqk,khd->qhd", weights, v), lse.T


def attention(inputs, attributes):
    """(attn_output, lse) of an operator of attention, with a cache or over keys as they are."""
    query, mask = inputs["query"], inputs.get("attn_mask")
    decoding = int(inputs.get("decoding_batches", 0))
    slopes = angles.slopes(query.shape[-2]) if attributes.get("is_alibi") else None
    causal = attributes.get("is_causal", True) or slopes is not None
    if "cache" in inputs:
        names = ("current_key", "current_value")
        key, value = key_value_cache(inputs | {name: inputs[name] for name in names}, attributes)
    else:
        key, value = inputs["key"], inputs["value"]
    outputs, sums = [], []
    if query.ndim == 4:
        for b in range(len(query)):
            part = None if mask is None else static_mask(mask, b, key.shape[1])
            one = attend(query[b], key[b], value[b], attributes, part, inputs.get("sinks"), causal, slopes)
            outputs.append(one[0])
            sums.append(one[1])
        return np.stack(outputs), np.stack(sums)
    q, k = inputs["seqstarts"], inputs["kvstarts"]
    for b in range(len(q) - 1):
        part = None
        if mask is not None:
            part = mask.reshape(-1, *mask.shape[-2:])[:, q[b] : q[b + 1], k[b] : k[b + 1]]
        one = attend(
            query[q[b] : q[b + 1]], key[k[b] : k[b + 1]], value[k[b] : k[b + 1]], attributes, part,
            inputs.get("sinks"), causal and b >= decoding, slopes,
        )  # fmt: skip
        outputs.append(one[0])
        sums.append(one[1])
    return np.concatenate(outputs), np.concatenate(sums)


def static_mask(mask, b, keys):
    """[heads or 1, queries or 1, keys] of a mask that broadcasts."""
    mask = mask.reshape(*[1] * (4 - mask.ndim), *mask.shape)
    return mask[b if mask.shape[0] > 1 else 0, ..., :keys]


def merge(inputs, attributes):
    """(attn_output, lse) of parts."""
    outputs, lses = inputs["outputs"].astype(np.float64), inputs["lses"].astype(np.float64)
    top = lses.max(axis=0)
    with np.errstate(all="ignore"):
        weights = np.where(np.isneginf(lses), 0, np.exp(lses - top))
        total = weights.sum(axis=0)
        lse = np.where(total > 0, top + np.log(total), -np.inf)
        parts = np.where(weights[..., None] > 0, outputs * weights[..., None], 0).sum(axis=0)
        return np.where(total[..., None] > 0, parts / total[..., None], 0), lse


def reshape_and_cache(inputs, attributes):
    """Tokens in their slots, or runs of a head's."""
    mode = attributes.get("compress_type", 0)
    for name in ("key", "value"):
        tokens, cache = inputs.get(name), inputs[f"{name}_cache"]
        if tokens is None:
            continue
        if attributes.get("cache_format") == "NZ":
            tokens, cache = tokens.reshape(len(tokens), -1, cache.shape[-1]), cache.swapaxes(1, 2)
        elif attributes.get("layout", "b n h c") != "b n h c":
            cache = cache.swapaxes(1, 2)
        size = cache.shape[1]
        for i, slot in enumerate(inputs["slot_mapping"].tolist()):
            rows = run(tokens, i, mode, inputs) if mode else tokens[i : i + 1]
            for at, row in enumerate(rows if slot >= 0 else (), slot):
                cache[at // size, at % size] = row
    return ()


def run(tokens, i, mode, inputs):
    """The rows that are stored of one head of one sequence: its last, all but a range, or that as a mean."""
    b, h = divmod(i, tokens.shape[1])
    end, wins = int(inputs["seq_lens"][: b + 1].sum()), int(inputs["wins"][i])
    x = tokens[end - inputs["seq_lens"][b] : end, h]
    if mode == 1:
        return x[-wins:]
    offset = int(inputs["offset_index"][i])
    if offset < 0 or wins == 0:
        return x
    middle, total = x[offset : offset + wins], np.zeros(x.shape[1], np.float32)
    for row in middle:
        total = total + row.astype(np.float32)
    mean = (total / np.float32(wins)).astype(x.dtype)
    return np.concatenate([x[:offset], mean[None] if mode == 2 else x[:0], x[offset + wins :]])


def block_copy(inputs, attributes):
    """Blocks onto others of a cache."""
    first = 0
    for source, end in zip(inputs["src"].tolist(), inputs["cum_sum"].tolist(), strict=True):
        for name in ("key_cache", "value_cache"):
            inputs[name][inputs["dst"][first:end]] = inputs[name][source]
        first = end
    return ()


def swap_blocks(inputs, attributes):
    """Blocks onto those of another cache."""
    for source, target in inputs["pairs"].tolist():
        inputs["target"][target] = inputs["source"][source]
    return ()


def nd_to_nz(inputs, attributes):
    """Matrices in groups of columns, of rows in sixteens, with zeros behind."""
    x = inputs["x"]
    b, m, n = x.shape
    n0 = 32 // x.dtype.itemsize
    wide = np.zeros((b, -(-m // 16) * 16, -(-n // n0) * n0), x.dtype)
    wide[:, :m, :n] = x
    return (wide.reshape(*wide.shape[:2], -1, n0).swapaxes(1, 2),)


def paged_cache_load(inputs, attributes):
    """Contexts, one after the other."""
    found = []
    for name in ("key_cache", "value_cache"):
        cache, rows = inputs[name], []
        for pages, length in zip(inputs["block_tables"], inputs["seq_lens"].tolist(), strict=True):
            for position in range(length):
                page, size = pages[position // cache.shape[1]], cache.shape[1]
                there = 0 <= page < len(cache)
                rows.append(cache[page, position % size] if there else np.zeros_like(cache[0, 0]))
        found.append(np.array(rows, cache.dtype).reshape(-1, *cache.shape[2:]))
    return tuple(found)


def paged_attention(inputs, attributes):
    """The queries of each sequence, one if nobody says how many, over its pages."""
    outputs, sums = [], []
    starts = inputs.get("query_starts")
    starts = np.arange(len(inputs["query"]) + 1) if starts is None else starts
    tokens_first = attributes.get("layout", "b n h c") == "b n h c"
    for b, length in enumerate(inputs["context_lens"].tolist()):
        context = []
        for name in ("key_cache", "value_cache"):
            cache = inputs[name] if tokens_first else inputs[name].swapaxes(1, 2)
            pages = inputs["block_tables"][b, : -(-length // cache.shape[1])]
            rows = cache[pages].reshape(-1, *cache.shape[2:])[:length].astype(np.float64)
            context.append(rows * inputs.get(name.replace("cache", "scale"), np.ones(1))[:, None])
        query, causal = inputs["query"][starts[b] : starts[b + 1]], attributes.get("is_causal", True)
        mask = inputs.get("attn_mask")
        mask = None if mask is None else mask[..., starts[b] : starts[b + 1], :length]
        slopes = inputs.get("alibi_slopes")
        one = attend(query, context[0], context[1], attributes, mask, inputs.get("sinks"), causal, slopes)
        outputs.append(one[0])
        sums.append(one[1])
    return np.concatenate(outputs), np.concatenate(sums)


OPERATORS = {
    "key_value_cache": key_value_cache,
    "multi_head_attention": attention,
    "multi_head_cache_attention": attention,
    "merge_attention_states": merge,
    "rotary_position_embedding": angles.rotary_position_embedding,
    "alibi_slope": angles.alibi_slope,
    "alibi_mask": angles.alibi_mask,
    "dynamic_batching.key_value_cache": key_value_cache,
    "dynamic_batching.multi_head_attention": attention,
    "dynamic_batching.multi_head_cache_attention": attention,
    "dynamic_batching.rotary_position_embedding": angles.rotary_position_embedding,
    "dynamic_batching.alibi_mask": angles.dynamic_alibi_mask,
    "dynamic_batching.position_index": angles.position_index,
    "ascend.reshape_and_cache": reshape_and_cache,
    "ascend.paged_cache_load": paged_cache_load,
    "ascend.block_copy": block_copy,
    "ascend.nd_to_nz": nd_to_nz,
    "ascend.paged_attention": paged_attention,
    "paged_attention": paged_attention,
    "paged_append": reshape_and_cache,
    "swap_blocks": swap_blocks,
}
