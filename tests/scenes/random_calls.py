"""Make random legal calls of every operator, to compare with an oracle or to run at borders of memory."""

import attention_scenes
import calls
import numpy as np
import pool_calls
import scenes
from ascend_attention_scenes import EXTRAS, call_of
from ascend_block_scenes import NO_BLOCK, caches_of
from ascend_scenes import compressed_call, plain_call
from attention_scenes import BF16, FP16, FP32, INT4, INT8, MIXED
from pool_calls import EXTRAS as OPTIONS
from position_scenes import random_mask
from scenes import DTYPES, FLOATS, MOVED, ODD_GROUPS
from surroundings import carve

from kvkit.reference.ascend import KVHEAD, KVHEAD_ROPE, OMNI
from kvkit.reference.cache import DYNAMIC_LAYOUTS, STATIC_LAYOUTS
from kvkit.tools.vectors import latent as latent_calls
from kvkit.tools.vectors.calls import LAYER, dynamic_mask, static_mask
from kvkit.tools.vectors.draws import any_bytes, normal

DIMS = (1, 5, 6, 8, 17, 24, 40, 64, 80, 128, 160)
ATTENDED = [FP32, FP16, BF16, *MIXED, INT8, INT4, *attention_scenes.QUANTIZED, *ODD_GROUPS]
COPIED = [MOVED[0], MOVED[4], MOVED[6], MOVED[-1], INT8, INT4]
ELEMENTS = [*map(DTYPES.get, FLOATS), DTYPES["int8"]]
WINDOWS = [(0, 0), (3, -1), (-1, 2), (5, 1), (0, -1), (-1, 0), (40, 0), (1000, 1000), (2**62, 2**62)]
STATIC_MASKS = ["q", "1", "hq", "1q", "h1", "11", "bhq", "b1q", "1hq", "bh1", "111", "b11"]
BLOCKS_WITHOUT_PARTS = ("flash-attn", "separate HND", "FlashInfer", "FlashInfer HND", "vLLM LBNHC")


def one(rng, choices):
    return choices[rng.integers(len(choices))]


def often(rng, share, value, other):
    return value if rng.random() < share else other


def dim_of(rng, formats):
    if not formats.bit:
        return int(one(rng, DIMS))
    return int(one(rng, [dim for dim in (24, 32, 40, 48, 64, 96, 128, 160) if dim % formats.group == 0]
                   or [formats.group, 2 * formats.group]))  # fmt: skip


def lengths_of(rng, most=40):
    """Return (past, new) of some sequences: empty, short and long ones."""
    past, new = (0, 0, 1, 3, 7, 16, most), (0, 1, 1, 1, 2, 5, 33)
    return [(int(one(rng, past)), int(one(rng, new))) for _ in range(rng.integers(0, 6))]


def tight(rng, call, **ends):
    """Cut half of the calls' caches off after the layer, the last row and the last sequence."""
    if "cache" in call.inputs and rng.random() < 0.5:
        axes = (STATIC_LAYOUTS, DYNAMIC_LAYOUTS)[call.kind.startswith("dynamic")]
        ends |= {"l": LAYER + 1}
        parts = tuple(slice(ends.get(axis)) for axis in axes[call.attributes["cache_layout"]].split())
        for name in ("cache", "scale"):
            if call[name] is not None:
                call.inputs[name] = call[name][parts].copy()
        call.attributes["num_layer"] = LAYER + 1
    return call


def key_value_cache(rng, formats=None):
    """Return a scene of key_value_cache, static or dynamic."""
    formats, heads, repeat = formats or one(rng, COPIED), int(rng.integers(1, 4)), int(rng.integers(1, 4))
    more = {"heads": heads, "repeat": repeat, "dim": dim_of(rng, formats)}
    if formats.dims != (6, 24, 40, 17, 1, 128):
        more["dim"] = int(one(rng, formats.dims))
    if rng.random() < 0.3:
        batch, start, seqlen = (int(rng.integers(0, end)) for end in (4, 40, 9))
        scene = scenes.static(rng, formats, int(rng.integers(2)), batch, start, seqlen, **more)
        return tight(rng, scene, b=batch, n=start + seqlen)
    page_size, mode = int(one(rng, (1, 2, 3, 7, 16, 128, 1000))), int(rng.integers(2))
    lengths = None if rng.random() < 0.3 and page_size < 20 else lengths_of(rng)
    return tight(rng, scenes.dynamic(rng, formats, int(rng.integers(4)), mode, lengths, page_size, **more))


def attention(rng, kind, formats=None):
    """Return a call of one of the four attention operators with any of their options."""
    formats = formats or one(rng, ATTENDED)
    if "cache" not in kind and formats not in (FP32, FP16, BF16):
        formats = one(rng, (FP32, FP16, BF16))
    kv_heads = int(rng.integers(1, 4))
    heads = kv_heads * int(one(rng, (1, 1, 2, 3, 7, 8, 16, 32)))
    if heads == kv_heads and rng.random() < 0.5:
        kv_heads = None  # as many as query heads
    more = {"heads": heads, "kv_heads": kv_heads, "dim": dim_of(rng, formats)}
    more |= {"is_causal": bool(rng.random() < 0.6), "is_alibi": bool(rng.random() < 0.3)}
    more |= often(rng, 0.3, {"window": one(rng, WINDOWS)}, {})
    more |= often(rng, 0.3, {"softcap": one(rng, (1e-3, 3.0, 50))}, {})
    scales = (0.1, np.float32(1e-3), 0.1 if formats.bit else 1)
    more |= often(rng, 0.3, {"softmax_scale": one(rng, scales)}, {})
    if rng.random() < 0.3:
        sinks = np.append(rng.uniform(-2, 4, heads - 1), one(rng, (8, -40, 100, -np.inf)))
        more["sinks"] = sinks.astype(DTYPES[one(rng, FLOATS)])
    if "cache" in kind:
        more["layout"] = int(rng.integers(2 if kind.startswith("static") else 4))
    elif rng.random() < 0.5:
        more["value_dim"] = int(one(rng, DIMS))
    long = (int(one(rng, (700, 3000))), int(one(rng, (1, 1, 5, 20)))) if rng.random() < 0.15 else None
    if long:
        more |= {"dim": min(more["dim"], formats.group * 8 if formats.bit else 24)}
    if kind.startswith("static"):
        batch = often(rng, 0.9, int(rng.integers(1, 4)), 0)
        past, seqlen = long or (*lengths_of(rng), (5, 1))[0]
        if kind == "static" and seqlen and rng.random() < 0.15:
            past = -int(rng.integers(1, seqlen + 1))  # fewer keys than queries
        call = getattr(attention_scenes, kind)(rng, formats, past, seqlen, 1 if long else batch, **more)
        call = tight(rng, call, b=max(batch, 1), n=past + seqlen)
    else:
        if kind == "dynamic_cache":
            more |= {"mode": int(rng.integers(2)), "page_size": int(one(rng, (1, 3, 16, 128)))}
        lengths = sorted([long, (3, 1)] if long else lengths_of(rng), key=lambda pair: pair[1] != 1)
        if kind == "dynamic" and rng.random() < 0.15:
            lengths = [(-(new // 2), new) for _, new in lengths]
        decoding = sum(new == 1 for _, new in lengths)
        more["decoding"] = one(rng, (0, decoding, decoding, len(lengths)))
        call = tight(rng, getattr(attention_scenes, kind)(rng, formats, lengths, **more))
    return with_mask(rng, kind, call) if rng.random() < 0.4 and call["query"].size else call


def with_mask(rng, kind, call):
    """Add a mask of any legal shape and type to a call; sometimes it hides everything."""
    pad, dtype = int(rng.integers(0, 10)), one(rng, (None, bool, np.float32))
    heads = call["query"].shape[-2]
    if kind.startswith("static"):
        sizes = {"b": call["query"].shape[0], "h": heads, "q": call["query"].shape[1], "1": 1}
        shape = tuple(sizes[axis] for axis in one(rng, STATIC_MASKS))
        mask = static_mask(rng, call, shape, dtype, pad)
    else:
        mask = dynamic_mask(rng, call, one(rng, (None, 1, heads)), dtype, pad)
    if mask.size and rng.random() < 0.1:
        mask[...] = False if dtype is bool else -np.inf
    return call.but(attn_mask=mask if mask.size else None)


def attend(rng):
    call = attention(rng, one(rng, attention_scenes.KINDS))
    return calls.by_name(call).but(return_lse=bool(rng.random() < 0.5))


def append(rng):
    return calls.by_name(key_value_cache(rng))


def merge(rng):
    dtype, count = DTYPES[one(rng, FLOATS)], int(rng.integers(1, 5))
    shape = (int(rng.integers(0, 6)), int(rng.integers(1, 5)), int(one(rng, DIMS)))
    outputs = [normal(rng, shape, dtype) for _ in range(count)]
    lses = [rng.choice([-np.inf, np.inf, 0.5, 3, -20], shape[:-1]).astype(np.float32) for _ in range(count)]
    if rng.random() < 0.5:
        outputs, lses = np.stack(outputs), np.stack(lses)
    return calls.Call("merge_attention_states", {"outputs": outputs, "lses": lses})


def of_sequences(rng):
    """Return (start of each sequence's tokens, past tokens, start of each context)."""
    past, new = np.array(lengths_of(rng), np.int64).reshape(-1, 2).T.copy()
    return np.r_[0, np.cumsum(new)], past, np.r_[0, np.cumsum(past + new)]


def rotary(rng):
    packed, (seqstarts, past, kvstarts) = rng.random() < 0.5, of_sequences(rng)
    dtype, dim = DTYPES[one(rng, FLOATS)], int(one(rng, (2, 6, 8, 16, 24, 40, 64, 72, 128)))
    attrs = {"rotary_dim": int(one(rng, (0, 0, 2, dim, dim // 4 * 2))), "theta": one(rng, (1e4, 5e5, 0.01))}
    attrs |= {name: bool(rng.random() < share) for name, share in (("bypass_key", 0.2), ("interleaved", 0.5))}
    if rng.random() < 0.3:
        pairs, end = (attrs["rotary_dim"] or dim) // 2, int(np.diff(kvstarts).max(initial=12))
        attrs |= {name: rng.standard_normal((end + 12, pairs), np.float32) for name in ("cos", "sin")}
    if rng.random() < 0.5:
        attrs |= {"scaling_type": one(rng, ("linear", "dynamic", "")), "scaling_factor": 2.5}
        attrs["max_position_embeddings"] = int(one(rng, (1, 6, 10)))
    shape = (int(seqstarts[-1]),) if packed else (int(rng.integers(1, 4)), int(rng.integers(0, 7)))
    inputs = {name: normal(rng, (*shape, int(rng.integers(1, 5)), dim), dtype) for name in ("query", "key")}
    if packed:
        inputs |= {"seqstarts": seqstarts, "start_pos": past, "max_seqlen": None}
        return calls.Call("dynamic_batching.rotary_position_embedding", inputs | attrs)
    far = int(one(rng, (0, 5, 5, 2**24 - 3, 2**40))) if "cos" not in attrs else 5
    most = 14 if "cos" not in attrs else 6
    inputs |= {"start_pos": far, "pad_len": often(rng, 0.5, rng.integers(0, most, shape[0]), None)}
    return calls.Call("rotary_position_embedding", inputs | attrs)


def bias(rng):
    """Return a call for positions, slopes, or masks of ALiBi with others added."""
    seqstarts, past, kvstarts = of_sequences(rng)
    operator, heads = rng.integers(6), int(rng.integers(1, 7))
    if operator == 0:
        tokens = np.zeros(seqstarts[-1], np.int64)
        inputs = {"sequences": tokens, "seqstarts": seqstarts, "start_pos": past}
        return calls.Call("dynamic_batching.position_index", inputs)
    if operator == 1:
        return calls.Call("alibi_slope", {"num_heads": int(rng.integers(1, 130))})
    more = {"num_heads": heads, "data_type": one(rng, ("float32", "float16", "bfloat16")), "attn_mask": None}
    mask_type = one(rng, (*map(DTYPES.get, FLOATS), bool))
    if operator < 4:
        n, m = int(rng.integers(0, 9)), int(one(rng, (0, 1, 5, 16, 17, 37, 65)))
        lead = one(rng, ((), (1,), (heads,), (2, heads), (3, 1)))
        if rng.random() < 0.6 and n and m:
            rows = (one(rng, (1, n)),) if len(lead) == 1 else (n,)
            more["attn_mask"] = random_mask(rng, (*lead, *rows, m + int(rng.integers(3))), mask_type)
        return calls.Call("alibi_mask", {"seqlen_q": n, "seqlen_kv": m, **more})
    if rng.random() < 0.6 and seqstarts[-1]:
        lead = one(rng, ((), (1,), (heads,)))
        shape = (*lead, int(seqstarts[-1]), int(kvstarts[-1]) + int(rng.integers(6)))
        more["attn_mask"] = random_mask(rng, shape, mask_type)
    return calls.Call("dynamic_batching.alibi_mask", {"seqstarts": seqstarts, "kvstarts": kvstarts, **more})


def reshape(rng):
    mode, dtype, count = (
        one(rng, (0, 0, KVHEAD, OMNI, KVHEAD_ROPE)),
        one(rng, ELEMENTS),
        int(rng.integers(1, 3)),
    )
    if mode:
        dtype = dtype if mode != KVHEAD_ROPE else one(rng, ELEMENTS[:3])
        arrays, more = compressed_call(rng, dtype, mode, count, one(rng, ("copy", "skip")))
    else:
        form = one(rng, ("ND", "NZ"))
        both = [dtype, one(rng, ELEMENTS[1:3]) if (form, dtype) == ("NZ", np.int8) else dtype]
        arrays, more = plain_call(rng, both[:count], form), {"cache_format": form}
    names = ("key", "value", "key_cache", "value_cache", "slot_mapping")
    return calls.Call("ascend.reshape_and_cache", dict(zip(names, arrays, strict=True)) | more)


def blocks(rng):
    """Return a call that loads contexts or copies blocks."""
    dtype, form, count = one(rng, ELEMENTS), one(rng, ("ND", "NZ")), int(rng.integers(1, 3))
    total, rows, batch = int(rng.integers(1, 6)), int(one(rng, (1, 2, 3, 16, 37))), int(rng.integers(0, 4))
    key_cache, value_cache = [*caches_of(rng, [dtype] * count, form, total, rows), None][:2]
    caches = {"key_cache": key_cache, "value_cache": value_cache}
    if rng.random() < 0.4:
        sizes = [rng.integers(1, 5, int(rng.integers(0, 6))) for _ in range(count)]
        arrays = [any_bytes(rng, (total, *size), dtype) for size in sizes]
        caches = dict(zip(caches, [*arrays, None], strict=False))
        ids = rng.permutation(total)
        cut, end = np.sort(rng.integers(0, total + 1, 2))
        src, dst = ids[:cut], ids[cut:end] if cut else ids[:0]
        if cut and rng.random() < 0.5:
            src = rng.choice(src, cut + 1)  # a source may come twice
        ends = np.sort(rng.integers(0, len(dst) + 1, len(src)))
        ends[-1:] = len(dst)
        return calls.Call("ascend.block_copy", caches | {"src": src, "dst": dst, "cum_sum": ends})
    table = rng.integers(0, total, (batch, int(rng.integers(0, 5))))
    gone = rng.random(table.shape) < 0.2
    table[gone] = rng.choice(NO_BLOCK, gone.sum())
    lengths = rng.integers(0, 3 * rows + 1, batch)
    index = {"block_tables": table, "seq_lens": often(rng, 0.5, lengths, np.cumsum([0, *lengths]))}
    index["seq_starts"] = rng.integers(0, 3 * rows, batch) if rng.random() < 0.5 else None
    return calls.Call("ascend.paged_cache_load", caches | index | {"cache_format": form})


def matrices(rng):
    dtype, (batch, m, n) = one(rng, ELEMENTS), (int(rng.integers(1, high)) for high in (4, 40, 70))
    if rng.random() < 0.5:
        return calls.Call("ascend.nd_to_nz", {"x": any_bytes(rng, (batch, m, n), dtype)})
    n0 = 32 // dtype.itemsize
    shape = (batch, -(-n // n0), -(-m // 16) * 16, n0)
    return calls.Call("ascend.nz_to_nd", {"y": any_bytes(rng, shape, dtype), "m": m, "n": n})


def attend_blocks(rng):
    more = {key: value for extra in EXTRAS.values() if rng.random() < 0.15 for key, value in extra.items()}
    lengths = rng.choice([0, 1, 5, 30, 70, 400], int(rng.integers(1, 4)))
    call = call_of(
        rng, one(rng, ("float32", "float16", "bfloat16")), bool(rng.random() < 0.4), lengths,
        int(rng.integers(1, 4)), int(one(rng, (1, 2, 3, 9))), int(one(rng, DIMS)), int(one(rng, DIMS)),
        int(one(rng, (1, 3, 16, 33))), **more,
    )  # fmt: skip
    return calls.Call("ascend.paged_attention", call | {"return_lse": bool(rng.random() < 0.5)})


def whole(made):
    """Return the pools of a call: one if it holds both keys and values."""
    key, value = made.given
    return {"key_cache": key, "value_cache": None if value is key else value, "layout": made.layout}


def pools(rng):
    """Return a call over pools: attention, an append, or a copy of blocks."""
    engine, rows = one(rng, BLOCKS_WITHOUT_PARTS), int(one(rng, (1, 3, 16)))
    heads, (dim, value_dim) = int(rng.integers(1, 4)), (int(one(rng, DIMS)) for _ in range(2))
    if engine not in BLOCKS_WITHOUT_PARTS[:2]:
        value_dim = dim
    kind = rng.random()
    if kind < 0.15:
        shape = (int(rng.integers(1, 5)), int(one(rng, DIMS)))
        pairs = np.array([[rng.integers(6), rng.integers(shape[0])]])
        source, target = (any_bytes(rng, size, np.int8) for size in ((6, shape[1]), shape))
        return calls.Call("swap_blocks", {"source": source, "target": target, "pairs": pairs})
    if kind < 0.4:
        dtype = one(rng, ("fp32", "fp16", "int8"))
        made, new, slots = pool_calls.scene(rng, engine, dtype, 6, 6, rows, heads, dim, value_dim)
        new = {"key": new[0], "value": new[1], "slot_mapping": slots}
        return calls.Call("paged_append", new | whole(made))
    lengths, queries = rng.choice([0, 1, 5, 70, 600], (2, int(rng.integers(1, 4)))) // [[1], [20]]
    extras = [OPTIONS[name] for name in ("left", "both sides", "softcap", "not causal") if rng.random() < 0.2]
    made = pool_calls.Scene(
        rng, engine, one(rng, FLOATS), lengths, queries, heads, int(one(rng, (1, 2, 9))), dim, value_dim, rows
    )  # fmt: skip
    call = made.arguments | whole(made.pools) | {"return_lse": bool(rng.random() < 0.5)}
    for extra in extras:
        call |= extra
    if rng.random() < 0.3:
        call["attn_mask"] = pool_calls.mask_of(rng, made, one(rng, (bool, np.float32)))
    if rng.random() < 0.3:
        call["alibi_slopes"] = np.ones(made.query.shape[1], np.float32)
    return calls.Call("paged_attention", call)


def latent(rng):
    """Return a call over a latent cache: floats of any width in one pool or two, or bytes."""
    kind, dtype = rng.random(), DTYPES[one(rng, FLOATS)]
    page, batch, heads = int(one(rng, (1, 3, 16))), int(rng.integers(1, 4)), int(one(rng, (1, 2, 9)))
    dim, rope = often(rng, 0.3, (512, 64), (int(one(rng, DIMS)), int(one(rng, (1, 8)))))

    def numbers(*shape):
        return rng.standard_normal(shape, np.float32).astype(dtype)

    if kind < 0.1:
        return calls.Call(
            "mla_absorb", {"query": numbers(batch, heads, dim), "w_uk": numbers(heads, dim, rope)}
        )
    if kind < 0.2:
        rows = {"latent_output": numbers(batch, heads, dim), "w_uv": numbers(heads, rope, dim)}
        return calls.Call("mla_expand", rows)
    lengths = rng.choice([0, 1, 5, 40], batch)
    queries = np.minimum(rng.choice([0, 1, 3], batch), lengths)
    places, used = latent_calls.contexts(rng, lengths, queries, page)
    tokens, slots = int(queries.sum()), used.size
    if kind < 0.3:
        scores = rng.integers(0, 4, (tokens, int(lengths.max()))).astype(np.float32)
        scores[np.arange(scores.shape[1]) >= np.repeat(lengths, queries)[:, None]] = -np.inf
        del places["context_lens"]
        more = {"k": int(one(rng, (1, 3, 50))), "page_size": page}
        return calls.Call("topk_rows", {"scores": scores} | more | places)
    if kind < 0.4:
        inputs = {"query": numbers(tokens, heads, dim), "keys": numbers(*used.shape, dim)}
        return calls.Call("indexer_scores", inputs | {"weights": numbers(tokens, heads)} | places)
    format = one(rng, (None, None, None, None, "ds_mla", "ds_mla:p2", "ds_v4", "ds_v4:vllm"))
    width, rope = (latent_calls.width_of(format), 64) if format else (dim + rope, rope)
    pool = latent_calls.pool_of(numbers(*used.shape, width), used, format)
    if not format and rng.random() < 0.3:
        pool = {
            "latent": pool["latent"][..., :-rope].copy(),
            "rope_cache": pool["latent"][..., -rope:].copy(),
        }
    if kind < 0.6:
        slots = np.where(rng.random(tokens) < 0.2, -1, rng.permutation(slots)[:tokens])
        parts = {"latent": numbers(tokens, width - rope), "rope": numbers(tokens, rope)}
        pool["cache"] = pool.pop("latent")
        return calls.Call("mla_append", parts | {"slot_mapping": slots} | pool)
    call = {"query": numbers(tokens, heads, width), "softmax_scale": width**-0.5} | pool
    call["value_dim"] = one(rng, (width - rope, min(width, 512)))
    if rng.random() < 0.4:
        chosen = rng.choice([-1, -2, slots, slots + 1, *4 * np.flatnonzero(used).tolist()], (tokens, 7))
        lens = {"index_lens": rng.integers(0, 8, tokens)}
        call |= {"indices": chosen} | often(rng, 0.5, lens, {})
    else:
        call |= places | {"is_causal": bool(rng.random() < 0.7)}
    sinks = {"sinks": rng.standard_normal(heads).astype(np.float32), "lse_of_sinks": bool(rng.random() < 0.5)}
    call |= often(rng, 0.5, sinks, {})
    return calls.Call("mla_attention", call | {"return_lse": bool(rng.random() < 0.5)})


GENERATORS = (merge, rotary, bias, reshape, blocks, matrices, attend_blocks, latent, pools, append, attend)
HINTS = ("max_seqlen", "max_kvlen")


# The same call in other memory


def index_form(rng, array):
    """Return an index tensor as int64 or int32, contiguous or not, at an odd address, or as a list."""
    form = rng.integers(6)
    if form == 1 and np.array_equal(array, array.astype(np.int32)):
        return array.astype(np.int32)
    if form == 2:
        return np.repeat(array, 2, -1)[..., ::2]
    if form == 3:
        return carve(array, 1)[0]
    if form == 4:
        array = array.copy()
        array.flags.writeable = False
    return array.tolist() if form == 5 and array.size else array


def data_form(rng, array, changes, in_one_piece, unit=1):
    """Return (the array in other memory with other strides, a function that checks the memory around it)."""
    form, rest = rng.integers(6), range(array.ndim - 1)
    if form == 0 or not array.ndim:
        return array.copy(), None
    if form == 1 and not changes and not in_one_piece:
        return np.repeat(array[..., ::-1], 2, -1)[..., ::-2], None
    if form == 2 and not changes:
        array = array.copy()
        array.flags.writeable = False
        return array, None
    if form == 3 and array.ndim > 2:
        order = rng.permutation(array.ndim - in_one_piece)
        order = np.append(order, array.ndim - 1) if in_one_piece else order
        return array.transpose(order).copy().transpose(np.argsort(order)), None
    flip = one(rng, (None, *rest)) if array.ndim > 1 else None
    return carve(array, unit * int(rng.integers(0, 9)), flip, int(rng.integers(1, 4)))


def moved(rng, call, device=None):
    """Return (the call in other memory, checks of the memory around it); some become `device` arrays."""
    checks, changed = [], {}
    for array in call.operator.inputs:
        value = call.inputs.get(array.name)
        if not isinstance(value, np.ndarray):
            if value is not None and array.name in HINTS:
                changed[array.name] = one(rng, (value, None, value + 1000, np.array(value), 2**70))
            elif array.name in ("start_pos", "decoding_batches"):
                changed[array.name] = one(rng, (value, np.int64(value), np.array(value), np.array([value])))
        elif "int64" in array.dtypes:
            changed[array.name] = index_form(rng, value) if not device else one(rng, (value, device(value)))
        else:
            bytes_of_rows = value.dtype == np.uint8 and array.name == "latent"
            pmx = array.name in ("cache", "scale") or bytes_of_rows
            unit = 64 if device else 1  # a device takes no odd addresses
            there, check = data_form(rng, value, array.inout, pmx, unit)
            changed[array.name] = device(there) if device and rng.random() < 0.7 else there
            checks.append(check)
    return call.but(**changed), [check for check in checks if check]
