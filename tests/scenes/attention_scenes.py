"""Make random legal calls of the attention operators, and compare them with the oracle.

Whatever a call must not look at is NaN or infinite: unused rows and other layers of a cache, padding and
foreign blocks of a mask.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import scenes
from scenes import DTYPES, DYNAMIC_AXES, LAYER, LAYERS, STATIC_AXES, Formats, assert_same

import kvkit
from kvkit.reference import attention as oracle
from kvkit.reference import cache as reference
from kvkit.reference.cache import CACHE_ATTRIBUTES

KINDS = ("static", "dynamic", "static_cache", "dynamic_cache")
OPERATORS = {
    "static": ("multi_head_attention", oracle.multi_head_attention),
    "dynamic": ("dynamic_batching.multi_head_attention", oracle.dynamic_multi_head_attention),
    "static_cache": ("multi_head_cache_attention", oracle.multi_head_cache_attention),
    "dynamic_cache": (
        "dynamic_batching.multi_head_cache_attention",
        oracle.dynamic_multi_head_cache_attention,
    ),
}
TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
PLAIN = {t1: Formats(t1, t1) for t1 in scenes.FLOATS}
FP32, FP16, BF16 = PLAIN.values()
INT8 = Formats("fp16", "int8", "fp16", 8, 8)
INT4 = Formats("fp32", "int8", "bf16", 4, 32)
MIXED = [Formats("fp32", "fp16"), Formats("fp16", "bf16"), Formats("bf16", "fp32")]
# Stores of these are compiled by other tests already.
QUANTIZED = [f for f in scenes.QUANTIZED if f.group == 8]
MIXED_LENGTHS = ((0, 5), (40, 1), (3, 0), (0, 0), (7, 2), (0, 1), (1, 33))


@dataclass
class Call(scenes.Arguments):
    """Holds a call that attends."""

    operators: ClassVar[dict] = OPERATORS

    @property
    def formats(self):
        return tuple(str(self[name].dtype) for name in ("query", "cache") if name in self.inputs)

    def expected(self, **more):
        """Return (output, lse, cache, scale) by the oracle; the call does not change."""
        after = self.copy()
        with np.errstate(all="ignore"):
            output, lse = OPERATORS[self.kind][1](*after.inputs.values(), **after.attrs, **more)
        return output, lse, after.inputs.get("cache"), after.inputs.get("scale")


# Comparison


def error(got, expected):
    """Return the largest |y - y64| / max(1, |y64|), infinite if only one of the two is finite."""
    got, expected = got.astype(np.float64), expected.astype(np.float64)
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0, np.abs(got - expected) / np.maximum(1, np.abs(expected)))
    return float(np.where(np.isfinite(apart), apart, np.inf).max(initial=0))


def assert_near(got, expected, tolerance, label="output"):
    assert got.shape == expected.shape, label
    worst = error(got, expected)
    if worst > tolerance:
        wrong = [at for at in np.ndindex(got.shape) if error(got[at], expected[at]) > tolerance]
        counts = f"{len(wrong)} of {got.size} wrong by up to {worst:.3g}, over {tolerance:.3g}"
        first = wrong[0]
        raise AssertionError(f"{label}: {counts}, first {first}: {got[first]!r}, not {expected[first]!r}")


def check(call, usual=True, given=None):
    """Check outputs within the tolerance, cache and scale bit by bit, and that inputs do not change.

    `given` is the call in other memory, which kvkit gets.

    `usual`: its error is no more than twice that of plain code that rounds each step to the data's type.
    """
    before, (output, lse, cache, scale) = call.copy(), call.expected()
    given = given or call
    got, got_lse = given.run(return_lse=True)
    t1 = call["query"].dtype
    tolerance = TOLERANCE[str(t1)]
    assert got.dtype == t1
    assert_near(got, output, tolerance)
    assert got_lse.dtype == np.float32
    exact = "cache" not in call.inputs or call["cache"].dtype == t1
    assert_near(got_lse, lse, 2e-5 if exact else tolerance, "lse")
    if usual and got.size:
        plain = call.expected(kind=t1)[0]
        # What codes stand for may lie between two numbers of bfloat16: either is right, a unit apart.
        units = 2 if call.inputs.get("scale") is not None and t1 == DTYPES["bf16"] else 4
        rounding = 1e-5 if t1 == np.float32 else tolerance / units
        limit = 2 * error(plain, output) + rounding
        assert_near(got, output, limit, f"beside an error of {error(plain, output):.3g}, output")
    assert_unchanged(given, before, cache, scale)
    return got, got_lse


def assert_unchanged(call, before, cache=None, scale=None):
    """Check that no input has changed, but cache and scale as expected."""
    for name, array in call.inputs.items():
        if name in ("cache", "scale") and cache is not None:
            assert_same(array, cache if name == "cache" else scale, name)
        elif isinstance(before[name], np.ndarray):
            assert_same(np.asarray(array, before[name].dtype), before[name], name)
    for name in ("sinks",):
        if call.attrs.get(name) is not None:
            assert_same(call.attrs[name], before.attrs[name], name)


# Data


def normal(rng, shape, dtype):
    return rng.standard_normal(shape, np.float32).astype(DTYPES[dtype] if isinstance(dtype, str) else dtype)


def poison(rng, shape, dtype):
    """Return contents that nothing may read: NaN and infinities, or any bytes."""
    if np.dtype(dtype).itemsize == 1:
        return rng.integers(0, 256, shape).astype(np.uint8).view(dtype)
    return rng.choice(np.array([np.nan, np.inf, -np.inf], np.float32), shape).astype(dtype)


def contents(rng, shape, formats):
    """Return (cache, scale) of tokens of size about 1, as models write them; the shape ends with the head."""
    if not formats.bit:
        return normal(rng, shape, formats.t2), None
    qmax = reference.LARGEST_CODE[formats.bit]
    codes = np.clip(np.rint(rng.standard_normal(shape) * qmax / 3), -qmax, qmax).astype(np.int8)
    if formats.bit == 4:
        codes = ((codes[..., ::2] & 15) | (codes[..., 1::2] << 4)).view(DTYPES[formats.t2])
    cells = (*shape[:-1], shape[-1] // formats.group)
    return codes, (rng.uniform(1, 4, cells) / qmax).astype(DTYPES[formats.t3])


def cache_and_scale(rng, formats, axes, sizes, used):
    """Return a cache whose `used` rows, by (sequence, row) or (row,), hold tokens; the rest is poison."""
    axes = axes.split()
    shape = [sizes[axis] for axis in axes]
    filled = contents(rng, shape, formats)
    keep = np.zeros([sizes[axis] for axis in ("sequence", "row") if axis in axes], bool)
    keep[tuple(np.array(used, np.int64).reshape(-1, keep.ndim).T)] = True
    view = [slice(None) if axis in ("sequence", "row") else None for axis in axes]
    if axes.index("row") < axes.index("sequence") if "sequence" in axes else False:
        keep = keep.T
    layer = np.arange(sizes["layer"]) == LAYER
    keep = keep[tuple(view)] & layer[tuple(slice(None) if axis == "layer" else None for axis in axes)]
    return tuple(
        None if a is None else np.where(keep, a, poison(rng, a.shape, a.dtype)).astype(a.dtype)
        for a in filled
    )


# Masks


def mask_rows(rng, shape, dtype, share=0.2):
    """Return an additive mask of finite numbers and some -inf, or a boolean one."""
    hidden = rng.random(shape) < share
    if dtype is bool:
        return ~hidden
    return np.where(hidden, -np.inf, normal(rng, shape, np.float32)).astype(dtype)


def garbage(rng, shape, dtype):
    if dtype is bool:
        return rng.random(shape) < 0.5
    return rng.choice(np.array([np.nan, np.inf, -np.inf, 1e4], np.float32), shape).astype(dtype)


def static_mask(rng, call, shape, dtype=None, pad=0):
    """Return a mask for a static call with these leading axes, and `pad` more columns of random numbers."""
    m = context(call)
    dtype = dtype or call["query"].dtype
    return np.concatenate([mask_rows(rng, (*shape, m), dtype), garbage(rng, (*shape, pad), dtype)], -1)


def dynamic_mask(rng, call, heads=None, dtype=None, pad=0):
    """Return a mask for a dynamic call, random outside diagonal blocks; of two axes if `heads` is None."""
    seqstarts, kvstarts = call["seqstarts"], call["kvstarts"]
    dtype = dtype or call["query"].dtype
    lead = () if heads is None else (heads,)
    mask = garbage(rng, (*lead, seqstarts[-1], kvstarts[-1] + pad), dtype)
    for b in range(len(seqstarts) - 1):
        rows, columns = slice(*seqstarts[b : b + 2]), slice(*kvstarts[b : b + 2])
        block = (rows.stop - rows.start, columns.stop - columns.start)
        mask[..., rows, columns] = mask_rows(rng, (*lead, *block), dtype)
    return mask


def context(call):
    """Return the length of the context of a static call."""
    return call["key"].shape[1] if call.kind == "static" else int(call["start_pos"]) + call["query"].shape[1]


# Calls


def attention_attributes(heads, kv_heads, dim, options):
    return {"num_heads": heads, "head_dim": dim, "num_kv_heads": kv_heads or 0, **options}


def cache_attributes(formats, layout):
    return {"num_layer": LAYERS, "layer_idx": LAYER, "quant_bit": formats.bit, "quant_group": formats.group,
            "cache_layout": layout}  # fmt: skip


def static(
    rng, formats=FP32, past=3, seqlen=2, batch=2, heads=4, kv_heads=2, dim=64, value_dim=None, **options
):
    t1, m = formats.t1, past + seqlen
    query = normal(rng, (batch, seqlen, heads, dim), t1)
    key = normal(rng, (batch, m, kv_heads or heads, dim), t1)
    value = normal(rng, (batch, m, kv_heads or heads, value_dim or dim), t1)
    inputs = {"query": query, "key": key, "value": value, "attn_mask": None}
    return Call("static", inputs, attention_attributes(heads, kv_heads, dim, options))


def dynamic(
    rng, formats=FP32, lengths=MIXED_LENGTHS, heads=4, kv_heads=2, dim=64, value_dim=None, decoding=0,
    **options,
):  # fmt: skip
    """Return a dynamic call of lengths (past, seqlen); a negative past gives fewer keys than queries."""
    t1 = formats.t1
    past, seqlens = np.array(lengths, np.int64).reshape(-1, 2).T
    seqstarts, kvstarts = (np.r_[0, np.cumsum(x)].astype(np.int64) for x in (seqlens, past + seqlens))
    inputs = {
        "query": normal(rng, (seqstarts[-1], heads, dim), t1),
        "key": normal(rng, (kvstarts[-1], kv_heads or heads, dim), t1),
        "value": normal(rng, (kvstarts[-1], kv_heads or heads, value_dim or dim), t1),
        "seqstarts": seqstarts, "kvstarts": kvstarts, "decoding_batches": decoding,
        "max_seqlen": int(max(seqlens, default=0)), "max_kvlen": int(max(past + seqlens, default=0)),
        "attn_mask": None,
    }  # fmt: skip
    return Call("dynamic", inputs, attention_attributes(heads, kv_heads, dim, options))


def static_cache(
    rng, formats=FP32, past=3, seqlen=2, batch=2, heads=4, kv_heads=2, dim=64, layout=0, **options
):
    kv_heads = kv_heads or heads
    sizes = {"sequence": batch + 1, "row": past + seqlen + 2, "layer": LAYERS, "kv": 2, "head": kv_heads}
    used = [(b, t) for b in range(batch) for t in range(past)]
    cache, scale = cache_and_scale(rng, formats, STATIC_AXES[layout], sizes | {"dim": dim}, used)
    inputs = {
        "query": normal(rng, (batch, seqlen, heads, dim), formats.t1),
        "current_key": normal(rng, (batch, seqlen, kv_heads, dim), formats.t1),
        "current_value": normal(rng, (batch, seqlen, kv_heads, dim), formats.t1),
        "start_pos": past, "cache": cache, "scale": scale, "attn_mask": None,
    }  # fmt: skip
    attrs = attention_attributes(heads, kv_heads, dim, options)
    return Call("static_cache", inputs, attrs | cache_attributes(formats, layout))


def dynamic_cache(
    rng, formats=FP32, lengths=MIXED_LENGTHS, heads=4, kv_heads=2, dim=64, layout=0, mode=1, page_size=16,
    decoding=0, **options,
):  # fmt: skip
    kv_heads, lengths = kv_heads or heads, list(lengths)
    starts, rows = scenes.pages(rng, lengths, page_size) if mode else scenes.offsets(rng, lengths)
    sizes = {"row": rows, "layer": LAYERS, "kv": 2, "head": kv_heads, "dim": dim}
    tokens = [np.arange(past) for past, _ in lengths]
    first = [starts[b, t // page_size] if mode else starts[b] for b, t in enumerate(tokens)]
    used = [row + (t % page_size if mode else t) for row, t in zip(first, tokens, strict=True)]
    cache, scale = cache_and_scale(rng, formats, DYNAMIC_AXES[layout], sizes, np.r_[0, *used][1:])
    past, seqlens = np.array(lengths, np.int64).reshape(-1, 2).T.copy()
    seqstarts, kvstarts = (np.r_[0, np.cumsum(x)].astype(np.int64) for x in (seqlens, past + seqlens))
    tokens = int(seqstarts[-1])
    inputs = {
        "query": normal(rng, (tokens, heads, dim), formats.t1),
        "current_key": normal(rng, (tokens, kv_heads, dim), formats.t1),
        "current_value": normal(rng, (tokens, kv_heads, dim), formats.t1),
        "seqstarts": seqstarts, "kvstarts": kvstarts, "cachestarts": starts, "start_pos": past,
        "decoding_batches": decoding,
        "max_seqlen": int(max(seqlens, default=0)), "max_kvlen": int(max(past + seqlens, default=0)),
        "cache": cache, "scale": scale, "attn_mask": None,
    }  # fmt: skip
    attrs = attention_attributes(heads, kv_heads, dim, options) | cache_attributes(formats, layout)
    return Call("dynamic_cache", inputs, {**attrs, "cache_mode": mode, "page_size": page_size})


def any_kind(kind, rng, formats=FP32, past=3, seqlen=2, **options):
    """Return a call whose sequences have these lengths; a dynamic call has sequences of other lengths too."""
    if kind.startswith("static"):
        return globals()[kind](rng, formats, past, seqlen, **options)
    return globals()[kind](rng, formats, [(past, seqlen), (2, 1), (past, seqlen), (0, 4)], **options)


def f32(x):
    return np.array(x, np.float32)


def i64(x):
    return np.array(x, np.int64)


def one(kind, query, key, value, mask=None, **attrs):
    """Return a call of one sequence: query [n, H, Dh], key and value [m, KVH, D]."""
    query, key, value = f32(query), f32(key), f32(value)
    (n, heads, dim), (m, kv_heads, _) = query.shape, key.shape
    attrs = {"num_heads": heads, "head_dim": dim, "num_kv_heads": kv_heads} | attrs
    mask = None if mask is None else f32(mask)
    lengths = {"seqstarts": i64([0, n]), "kvstarts": i64([0, m])}
    if kind == "static":
        inputs = {"query": query[None], "key": key[None], "value": value[None]}
    elif kind == "dynamic":
        hints = {"decoding_batches": 0, "max_seqlen": n, "max_kvlen": m}
        inputs = {"query": query, "key": key, "value": value, **lengths, **hints}
    else:
        cache = np.stack([key, value], axis=1)[:, None]
        cache[m - n :] = np.nan
        inputs = {"query": query, "current_key": key[m - n :], "current_value": value[m - n :]}
        if kind == "static_cache":
            inputs = {name: array[None] for name, array in inputs.items()}
            inputs |= {"start_pos": m - n, "cache": cache.transpose(1, 2, 0, 3, 4)[None].copy()}
        else:
            inputs |= lengths | {"cachestarts": i64([0]), "start_pos": i64([m - n])}
            inputs |= {"decoding_batches": 0, "max_seqlen": n, "max_kvlen": m, "cache": cache}
        inputs["scale"] = None
    return Call(kind, inputs | {"attn_mask": mask}, attrs)


INDEX = ("seqstarts", "kvstarts", "cachestarts", "start_pos")


def whole_context(call):
    """Return the context's keys and values by kvkit's key_value_cache, which has tests of its own."""
    call = call.copy()
    arrays = [call[name] for name in ("current_key", "current_value", *INDEX)]
    attrs = {name: call.attrs[name] for name in CACHE_ATTRIBUTES}
    return kvkit.dynamic_batching.key_value_cache(*arrays, None, None, call["cache"], call["scale"], **attrs)
