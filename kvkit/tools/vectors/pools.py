"""Make calls over caches in pages: the suites ascend and paged."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.random import Generator

from kvkit.tools.vectors.draws import FP_TYPES, NAN, Call, Sizes, plain
from kvkit.typed import Array

ATTENTION_CASES: dict[str, dict[str, Any]] = {  # {name: options of pool_attention}
    "plain": {}, "softcap": {"softcap": 2.0}, "sinks": {"sinks": True}, "window": {"window": (3, -1)},
    "one-query-head": {"groups": 1}, "mask": {"mask": "float"}, "mask-of-bits": {"mask": "bool"},
    "alibi": {"alibi": True}, "codes": {"codes": True},
}  # fmt: skip
KVHEAD, KVHEAD_ROPE, OMNI = 1, 2, 3  # Ascend's compress_type
COMPRESSION_MODES = {"kvhead": KVHEAD, "kvhead-rope": KVHEAD_ROPE, "omni": OMNI}


def pages(rng: Generator, sizes: Sizes, dtype: str = "fp16") -> tuple[Array, Array, Array, Array]:
    """Return (key_cache, value_cache, block_tables, lengths); rows without a token are NaN."""
    kind, page = FP_TYPES[dtype], sizes.page
    lengths = sizes.each(page + 1, page, 1, 2 * page + 1)
    counts = [-(-length // page) for length in lengths]
    ids, blocks = rng.permutation(sum(counts) + 2), sum(counts) + 2
    caches = [np.full((blocks, page, sizes.heads, sizes.dim), NAN, kind) for _ in range(2)]
    table = np.full((len(lengths), max(counts) + 1), -1, np.int32)
    for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table[b, :count], ids = ids[:count], ids[count:]
        for position in range(length):
            for cache in caches:
                there = table[b, position // page], position % page
                cache[there] = plain(rng, (sizes.heads, sizes.dim), kind)
    return caches[0], caches[1], table, np.array(lengths, np.int32)


def reshape_and_cache(rng: Generator, sizes: Sizes, dtype: str = "fp16") -> Call:
    """Make a call that stores to slots in any order, two of them negative."""
    key_cache, value_cache, *_ = pages(rng, sizes, dtype)
    slots = rng.permutation(key_cache.shape[0] * sizes.page)[:7].astype(np.int32)
    slots[[1, 4]] = -1
    key, value = (plain(rng, (len(slots), sizes.heads, sizes.dim), FP_TYPES[dtype]) for _ in range(2))
    key[4] = NAN
    inputs = {"key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache}
    return Call("ascend.reshape_and_cache", inputs | {"slot_mapping": slots}, {})


def store_compressed(rng: Generator, sizes: Sizes, mode: int, dtype: str = "fp16") -> Call:
    """Make a call that stores compressed heads. Dropped tokens are NaN; a skipped head has slot -1."""
    lengths, heads, kind = sizes.each(6, 9, 5), sizes.heads, FP_TYPES[dtype]
    dim = -(-sizes.dim // 32) * 32  # these modes need a multiple of 32
    runs, starts = len(lengths) * heads, np.cumsum([0, *lengths])
    wins, offsets = rng.integers(1, 4, runs), rng.integers(0, 3, runs)
    wins[0], offsets[1] = 0, -1  # an empty window, and a head without one
    tokens = {name: plain(rng, (starts[-1], heads, dim), kind) for name in ("key", "value")}
    for i in range(runs):
        first, end = starts[i // heads], starts[i // heads + 1]
        window = first + offsets[i]
        dropped = {KVHEAD: slice(first, end - wins[i]), OMNI: slice(window, window + wins[i])}.get(mode)
        if dropped is not None and wins[i] and (mode == KVHEAD or offsets[i] >= 0):
            for array in tokens.values():
                array[dropped, i % heads] = NAN
    blocks = -(-max(lengths) // sizes.page) + 1
    slots = rng.permutation(runs) * blocks * sizes.page + rng.integers(0, sizes.page, runs)
    slots[-1] = -1
    cache = (runs * blocks + 1, sizes.page, 1, dim)
    inputs = tokens | {name: np.full(cache, NAN, kind) for name in ("key_cache", "value_cache")}
    inputs |= {"slot_mapping": slots, "wins": wins, "seq_lens": np.array(lengths)}
    inputs |= {} if mode == KVHEAD else {"offset_index": offsets}
    return Call("ascend.reshape_and_cache", inputs, {"compress_type": mode})


def block_copy(rng: Generator, sizes: Sizes, dtype: str = "fp16") -> Call:
    """Make a call that copies one block to two and one to one; NaN is moved as it is."""
    key_cache, value_cache, *_ = pages(rng, sizes, dtype)
    ids = rng.permutation(len(key_cache)).astype(np.int32)
    inputs = {"key_cache": key_cache, "value_cache": value_cache, "src": ids[:2], "dst": ids[2:5]}
    return Call("ascend.block_copy", inputs | {"cum_sum": np.array([2, 3], np.int32)}, {})


def matrices(rng: Generator, dtype: str = "fp16") -> Call:
    """Make a call that converts matrices of odd sizes."""
    return Call("ascend.nd_to_nz", {"x": plain(rng, (2, 19, 37), FP_TYPES[dtype])}, {})


def ascend_attention(
    rng: Generator, sizes: Sizes, dtype: str = "fp16", groups: int = 2, sinks: bool = False, **more: Any,
) -> Call:  # fmt: skip
    """Make a call of attention with one decoded token for each sequence."""
    key_cache, value_cache, table, lengths = pages(rng, sizes, dtype)
    heads = groups * sizes.heads
    inputs = {"query": plain(rng, (len(lengths), heads, sizes.dim), FP_TYPES[dtype]), "key_cache": key_cache}
    inputs |= {"value_cache": value_cache, "block_tables": table, "context_lens": lengths}
    if sinks:
        inputs["sinks"] = plain(rng, (heads,), FP_TYPES[dtype])
    return Call("ascend.paged_attention", inputs, {"return_lse": True} | more)


def ascend(rng: Generator, sizes: Sizes) -> Iterator[tuple[str, Call]]:
    """Yield (name, call) of the suite `ascend`."""
    for dtype in FP_TYPES:
        yield f"store-{dtype}", reshape_and_cache(rng, sizes, dtype)
        name, inputs, *_ = reshape_and_cache(rng, sizes, dtype)
        n0 = 32 // FP_TYPES[dtype].itemsize
        for cache in ("key_cache", "value_cache"):
            rows = inputs[cache].reshape(*inputs[cache].shape[:2], -1, n0)
            inputs[cache] = np.ascontiguousarray(rows.swapaxes(1, 2))
        yield f"store-nz-{dtype}", Call(name, inputs, {"cache_format": "NZ"})
        for name, mode in COMPRESSION_MODES.items():
            yield f"store-{name}-{dtype}", store_compressed(rng, sizes, mode, dtype)
        key_cache, value_cache, table, lengths = pages(rng, sizes, dtype)
        inputs = {
            "key_cache": key_cache,
            "value_cache": value_cache,
            "block_tables": table,
            "seq_lens": lengths,
        }
        yield f"load-{dtype}", Call("ascend.paged_cache_load", inputs, {})
        yield f"copy-{dtype}", block_copy(rng, sizes, dtype)
        yield f"nz-{dtype}", matrices(rng, dtype)
        yield f"attention-{dtype}", ascend_attention(rng, sizes, dtype)
    outside = reshape_and_cache(rng, sizes)
    outside.inputs["slot_mapping"][0] = 2**20 * sizes.page
    yield "slot-outside-refused", outside
    read_and_written = block_copy(rng, sizes)
    read_and_written.inputs["dst"][0] = read_and_written.inputs["src"][1]
    yield "copied-and-written-refused", read_and_written


def in_layout(inputs: dict[str, Any], layout: str) -> dict[str, Any]:
    """Return inputs with pools in a layout, "b n h c" or "b h n c"."""
    if layout == "b n h c":
        return inputs
    pools = ("key_cache", "value_cache")
    return inputs | {name: np.ascontiguousarray(inputs[name].swapaxes(1, 2)) for name in pools}


def pool_attention(
    rng: Generator, sizes: Sizes, dtype: str = "fp16", layout: str = "b n h c",
    new_tokens: Sequence[int] | None = None, mask: str | None = None, alibi: bool = False,
    codes: bool = False, **more: Any,
) -> Call:  # fmt: skip
    """Make a call of attention over pools of pages, with one query for each sequence or `new_tokens`."""
    _, inputs, attributes, _ = ascend_attention(rng, sizes, dtype, **more)
    sinks, lengths, kind = inputs.pop("sinks", None), inputs["context_lens"], FP_TYPES[dtype]
    if new_tokens is not None:
        new_tokens = sizes.each(*new_tokens)
        inputs["query"] = plain(rng, (sum(new_tokens), *inputs["query"].shape[1:]), kind)
    inputs = in_layout(inputs, layout)
    inputs["query_starts"] = None if new_tokens is None else np.cumsum([0, *new_tokens])
    if mask:  # masks here are for one query of each sequence
        tokens, heads, _ = inputs["query"].shape
        shape = tokens, max(lengths) + 2
        if mask == "float":
            inputs["attn_mask"] = plain(rng, shape, kind)
            inputs["attn_mask"][np.arange(shape[1]) >= lengths[:, None]] = NAN
        else:
            inputs["attn_mask"] = rng.random((heads, *shape)) < 0.6
    if codes:
        for side in ("key", "value"):
            inputs[f"{side}_cache"] = rng.integers(-127, 128, inputs[f"{side}_cache"].shape).astype(np.int8)
            inputs[f"{side}_scale"] = rng.uniform(0.005, 0.02, sizes.heads).astype(np.float32)
    if alibi:
        inputs["alibi_slopes"] = rng.uniform(0.01, 0.5, inputs["query"].shape[1]).astype(np.float32)
    inputs |= {} if sinks is None else {"sinks": sinks}
    return Call("paged_attention", inputs, attributes | {"layout": layout})


def pool_append(rng: Generator, sizes: Sizes, dtype: str = "fp16", layout: str = "b n h c") -> Call:
    """Make a call that appends to slots in any order, in a pool of `layout`."""
    inputs = reshape_and_cache(rng, sizes, dtype).inputs
    return Call("paged_append", in_layout(inputs, layout), {"layout": layout})


def swap_blocks(rng: Generator, sizes: Sizes, dtype: str = "fp16") -> Call:
    """Make a call that copies blocks to another cache, one of them twice."""
    source, target, *_ = pages(rng, sizes, dtype)
    ids = rng.permutation(len(source))[:3]
    inputs = {"source": source, "target": target, "pairs": np.stack([ids[[0, 1, 0]], ids], 1)}
    return Call("swap_blocks", inputs, {})


def paged(rng: Generator, sizes: Sizes) -> Iterator[tuple[str, Call]]:
    """Yield (name, call) of the suite `paged`: pools of pages, as engines have them."""
    for dtype in FP_TYPES:
        for name, more in ATTENTION_CASES.items():
            yield f"{name}-{dtype}", pool_attention(rng, sizes, dtype, **more)
        for layout in ("b n h c", "b h n c"):
            order = layout.replace(" ", "")
            yield f"append-{order}-{dtype}", pool_append(rng, sizes, dtype, layout)
            several = pool_attention(rng, sizes, dtype, layout, (3, 1, 0, 9))
            yield f"several-queries-{order}-{dtype}", several
        yield f"swap-{dtype}", swap_blocks(rng, sizes, dtype)
    outside = pool_append(rng, sizes)
    outside.inputs["slot_mapping"][0] = 2**20 * sizes.page
    yield "slot-outside-refused", outside
