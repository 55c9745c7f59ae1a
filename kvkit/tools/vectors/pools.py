"""Make calls over caches in pages: the suites ascend and paged."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.random import Generator

from kvkit.reference.ascend import KVHEAD, KVHEAD_ROPE, OMNI, compress_run
from kvkit.tools.vectors.draws import (
    FP_TYPES,
    NAN,
    Call,
    Sizes,
    any_bytes,
    block_table,
    dtype_of,
    normal,
    poison,
)
from kvkit.typed import Array

ATTENTION_CASES: dict[str, dict[str, Any]] = {  # {name: options of pool_attention}
    "plain": {}, "softcap": {"softcap": 2.0}, "sinks": {"sinks": True}, "window": {"window": (3, -1)},
    "one-query-head": {"groups": 1}, "mask": {"mask": "float"}, "mask-of-bits": {"mask": "bool"},
    "alibi": {"alibi": True}, "codes": {"codes": True},
}  # fmt: skip
Draw = Callable[[Generator, tuple[int, ...], Any], Array]
COMPRESSION_MODES = {"kvhead": KVHEAD, "kvhead-rope": KVHEAD_ROPE, "omni": OMNI}


def store(
    rng: Generator, dtypes: Sequence[Any], slots: Array, blocks: int, rows: int, heads: int,
    dims: Sequence[int], cache_format: str = "ND", draw: Draw = any_bytes, before: Draw = any_bytes,
) -> Call:  # fmt: skip
    """Return a call of `reshape_and_cache` that stores keys, and values if they have a type.

    `draw` makes the tokens, and `before` what is in the caches.
    """
    inputs: dict[str, Any] = dict.fromkeys(("key", "value", "key_cache", "value_cache"))
    for side, dtype, dim in zip(("key", "value"), dtypes, dims, strict=False):
        inputs[side] = draw(rng, (len(slots), heads, dim), dtype)
        n0 = 32 // dtype_of(dtype).itemsize
        inner = (heads * dim // n0, rows, n0) if cache_format == "NZ" else (rows, heads, dim)
        inputs[f"{side}_cache"] = before(rng, (blocks, *inner), dtype)
    return Call("ascend.reshape_and_cache", inputs | {"slot_mapping": slots}, {"cache_format": cache_format})


def store_compressed(
    rng: Generator, dtype: Any, mode: int, seq_lens: Array, rows: int, heads: int, dim: int, count: int = 2,
    empty_window: str = "copy", draw: Draw = any_bytes, edges: bool = False,
) -> Call:  # fmt: skip
    """Return a call of `reshape_and_cache` that stores runs in any order, with gaps.

    Some heads have no slot, and any numbers as their windows. Tokens of theirs and dropped ones are NaN, but
    for bytes. With `edges` the first window is empty, the second head has no offset, and the last no slot.
    """
    lengths = np.repeat(seq_lens, heads)
    wins = rng.integers(0, lengths + 1)
    offsets = np.where(rng.random(len(wins)) < 0.2, -1, rng.integers(0, lengths - wins + 1))
    hidden = rng.random(len(wins)) < 0.2
    if edges:
        wins[0], offsets[:2], hidden = 0, (0, -1), np.arange(len(wins)) == len(wins) - 1
    if mode != KVHEAD:
        wins[offsets == -1] = rng.choice([-5, 0, 3, 2**40], (offsets == -1).sum())
    made = [
        compress_run(np.arange(n)[:, None], mode, w, o, empty_window)
        for n, w, o in zip(lengths, wins, offsets, strict=True)
    ]
    slots, end = np.zeros(len(wins), np.int64), 0
    for i in rng.permutation(len(wins)):
        slots[i] = end + rng.integers(0, 3)
        end = slots[i] + len(made[i])
    blocks = max(1, -(-int(end) // rows)) + int(rng.integers(0, 2))
    inputs: dict[str, Any] = dict.fromkeys(("key", "value", "key_cache", "value_cache"))
    starts = np.cumsum([0, *seq_lens])
    for side in ("key", "value")[:count]:
        tokens = inputs[side] = draw(rng, (starts[-1], heads, dim), dtype)
        inputs[f"{side}_cache"] = any_bytes(rng, (blocks, rows, 1, dim), dtype)
        for i, run in enumerate(made if tokens.dtype.itemsize > 1 else ()):
            read = [] if hidden[i] else np.arange(lengths[i]) if mode == KVHEAD_ROPE else run
            dropped = np.setdiff1d(np.arange(lengths[i]), read)
            tokens[starts[i // heads] + dropped, i % heads] = NAN
    slots[hidden] = rng.choice([-1, -7, -(2**63)], hidden.sum())
    wins[hidden] = rng.choice([-1, 2**40], hidden.sum())
    offsets[hidden] = rng.choice([-2, 2**40], hidden.sum())
    more = {"empty_window": empty_window} if mode == KVHEAD else {}
    inputs |= {"slot_mapping": slots, "wins": wins, "seq_lens": seq_lens}
    inputs |= {} if mode == KVHEAD else {"offset_index": offsets}
    return Call("ascend.reshape_and_cache", inputs, {"compress_type": mode} | more)


def block_attention(
    rng: Generator, dtype: Any = "fp32", apart: bool = False, lengths: Sequence[int] = (9, 0, 1, 40),
    kv_heads: int = 2, group: int = 2, dim: int = 16, value_dim: int | None = None, rows: int = 4,
    razor: bool = False, sinks: bool = False, **more: Any,
) -> Call:  # fmt: skip
    """Return a call of `ascend.paged_attention`; `apart`: each head has blocks and a length of its own."""
    batch = len(lengths)
    if apart:
        lengths = [max(n - 3 * h, min(n, 1)) for n in lengths for h in range(kv_heads)]
    table, used = block_table(rng, lengths, rows)
    heads, caches = 1 if apart else kv_heads, []
    for size in (dim, value_dim or dim):
        cache = poison(rng, (*used.shape, heads, size), dtype)
        cache[used] = normal(rng, cache[used].shape, dtype)
        caches.append(cache)
    inputs = {"query": normal(rng, (batch, kv_heads * group, dim), dtype), "key_cache": caches[0]}
    inputs |= {"value_cache": caches[1], "block_tables": table, "context_lens": np.array(lengths, np.int64)}
    if razor:
        offset = poison(rng, used.shape, np.float32)
        offset[used] = rng.uniform(-3, 8, int(used.sum()))
        inputs["razor_offset"] = offset
    if sinks:
        inputs["sinks"] = rng.uniform(-2, 4, kv_heads * group).astype(np.float32)
    return Call("ascend.paged_attention", inputs, more)


# The suites


def ascend_attention(
    rng: Generator, sizes: Sizes, dtype: str = "fp16", groups: int = 2, sinks: bool = False, **more: Any,
) -> Call:  # fmt: skip
    """Return a call of attention of one token of each context; contexts end at borders of pages."""
    page = sizes.page
    lengths = sizes.each(page + 1, page, 1, 2 * page + 1)
    shape = lengths, sizes.heads, groups, sizes.dim, sizes.dim, page
    call = block_attention(rng, dtype, False, *shape, sinks=sinks, return_lse=True, **more)
    table, blocks = call["block_tables"], len(call["key_cache"])
    table = np.where((table < 0) | (table >= blocks), -1, table)  # as engines fill them
    tables = {"block_tables": table, "context_lens": call["context_lens"]}
    call.inputs |= {name: array.astype(np.int32) for name, array in tables.items()}
    if sinks:
        call.inputs["sinks"] = call["sinks"].astype(FP_TYPES[dtype])
    return call


def page_pools(rng: Generator, sizes: Sizes, dtype: str = "fp16") -> list[Array]:
    """Return [key_cache, value_cache, block_tables, lengths]; rows without a token are not finite."""
    call = ascend_attention(rng, sizes, dtype)
    return [call[name] for name in ("key_cache", "value_cache", "block_tables", "context_lens")]


def store_tokens(rng: Generator, sizes: Sizes, dtype: str = "fp16", cache_format: str = "ND") -> Call:
    """Return a call that stores to slots in any order, two of them negative."""
    slots = rng.permutation(9 * sizes.page)[:7].astype(np.int32)
    slots[[1, 4]] = -1
    shape = 9, sizes.page, sizes.heads, [sizes.dim] * 2
    call = store(rng, [dtype] * 2, slots, *shape, cache_format, normal, poison)
    call["key"][4] = NAN
    return call


def block_copy(rng: Generator, sizes: Sizes, dtype: str = "fp16") -> Call:
    """Make a call that copies one block to two and one to one; NaN is moved as it is."""
    key_cache, value_cache, *_ = page_pools(rng, sizes, dtype)
    ids = rng.permutation(len(key_cache)).astype(np.int32)
    inputs = {"key_cache": key_cache, "value_cache": value_cache, "src": ids[:2], "dst": ids[2:5]}
    return Call("ascend.block_copy", inputs | {"cum_sum": np.array([2, 3], np.int32)})


def matrices(rng: Generator, dtype: str = "fp16") -> Call:
    """Make a call that converts matrices of odd sizes."""
    return Call("ascend.nd_to_nz", {"x": normal(rng, (2, 19, 37), dtype)})


def ascend(rng: Generator, sizes: Sizes) -> Iterator[tuple[str, Call]]:
    """Yield (name, call) of the suite `ascend`."""
    for dtype in FP_TYPES:
        yield f"store-{dtype}", store_tokens(rng, sizes, dtype)
        yield f"store-nz-{dtype}", store_tokens(rng, sizes, dtype, "NZ")
        for name, mode in COMPRESSION_MODES.items():
            shape = np.array(sizes.each(6, 9, 5)), sizes.page, sizes.heads, -(-sizes.dim // 32) * 32
            compressed = store_compressed(rng, dtype, mode, *shape, draw=normal, edges=True)
            yield f"store-{name}-{dtype}", compressed
        key_cache, value_cache, table, lengths = page_pools(rng, sizes, dtype)
        inputs = {
            "key_cache": key_cache,
            "value_cache": value_cache,
            "block_tables": table,
            "seq_lens": lengths,
        }
        yield f"load-{dtype}", Call("ascend.paged_cache_load", inputs)
        yield f"copy-{dtype}", block_copy(rng, sizes, dtype)
        yield f"nz-{dtype}", matrices(rng, dtype)
        yield f"attention-{dtype}", ascend_attention(rng, sizes, dtype)
    outside = store_tokens(rng, sizes)
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
    plain = ascend_attention(rng, sizes, dtype, **more)
    inputs, attributes = plain.inputs, plain.attributes
    sinks, lengths, kind = inputs.pop("sinks", None), inputs["context_lens"], FP_TYPES[dtype]
    if new_tokens is not None:
        new_tokens = sizes.each(*new_tokens)
        inputs["query"] = normal(rng, (sum(new_tokens), *inputs["query"].shape[1:]), kind)
    inputs = in_layout(inputs, layout)
    inputs["query_starts"] = None if new_tokens is None else np.cumsum([0, *new_tokens])
    if mask:  # masks here are for one query of each sequence
        tokens, heads, _ = inputs["query"].shape
        shape = tokens, max(lengths) + 2
        if mask == "float":
            inputs["attn_mask"] = normal(rng, shape, kind)
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
    inputs = store_tokens(rng, sizes, dtype).inputs
    return Call("paged_append", in_layout(inputs, layout), {"layout": layout})


def swap_blocks(rng: Generator, sizes: Sizes, dtype: str = "fp16") -> Call:
    """Make a call that copies blocks to another cache, one of them twice."""
    source, target, *_ = page_pools(rng, sizes, dtype)
    ids = rng.permutation(len(source))[:3]
    inputs = {"source": source, "target": target, "pairs": np.stack([ids[[0, 1, 0]], ids], 1)}
    return Call("swap_blocks", inputs)


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
