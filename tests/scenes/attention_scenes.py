"""Make random legal calls of the attention operators, and compare them with the oracle."""

import numpy as np
import scenes
from scenes import Formats, assert_same

import kvkit
from kvkit.reference.cache import CACHE_ATTRIBUTES
from kvkit.tools.vectors import calls as pmx_calls
from kvkit.tools.vectors.calls import MIXED_LENGTHS

KINDS = ("static", "dynamic", "static_cache", "dynamic_cache")
OPERATORS = {
    kind: ("dynamic_batching." if "dynamic" in kind else "")
    + f"multi_head{'_cache' * ('cache' in kind)}_attention"
    for kind in KINDS
}
TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
PLAIN = {t1: Formats(t1, t1) for t1 in scenes.FLOATS}
FP32, FP16, BF16 = PLAIN.values()
INT8 = Formats("fp16", "int8", "fp16", 8, 8)
INT4 = Formats("fp32", "int8", "bf16", 4, 32)
MIXED = [Formats("fp32", "fp16"), Formats("fp16", "bf16"), Formats("bf16", "fp32")]
# Stores of these are compiled by other tests already.
QUANTIZED = [f for f in scenes.QUANTIZED if f.group == 8]


class Call(scenes.Call):
    """Holds a call that attends."""

    @property
    def formats(self):
        return tuple(str(self[name].dtype) for name in ("query", "cache") if name in self.inputs)

    def expected(self, **more):
        """Return (output, lse, cache, scale) by the oracle; the call does not change."""
        after = self.copy()
        with np.errstate(all="ignore"):
            output, lse = after.by_reference(**more)
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
        if call.inputs.get("scale") is not None:  # a code times its scale may lie halfway between two numbers
            ours, right = (x.astype(t1).view(f"i{t1.itemsize}").astype(np.int64) for x in (got, output))
            output = np.where(abs(ours - right) <= 1, got, output)
        rounding = 1e-5 if t1 == np.float32 else tolerance / 4
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
        if call.attributes.get(name) is not None:
            assert_same(call.attributes[name], before.attributes[name], name)


# Calls


def drawn(call):
    return Call(call.name, {"attn_mask": None} | call.inputs, call.attributes)


def static(rng, formats=FP32, *how, **options):
    return drawn(pmx_calls.static_attention(rng, formats, *how, **options))


def dynamic(rng, formats=FP32, *how, **options):
    return drawn(pmx_calls.dynamic_attention(rng, formats, *how, **options))


def static_cache(
    rng, formats=FP32, past=3, seqlen=2, batch=2, heads=4, kv_heads=2, dim=64, layout=0, **options
):
    sizes = batch, past, seqlen, kv_heads or heads, dim
    append = pmx_calls.static_append(rng, formats, layout, *sizes, usual=True)
    return drawn(pmx_calls.cache_attention(rng, append, heads, kv_heads, **options))


def dynamic_cache(
    rng, formats=FP32, lengths=MIXED_LENGTHS, heads=4, kv_heads=2, dim=64, layout=0, mode=1, page_size=16,
    **options,
):  # fmt: skip
    sizes = lengths, page_size, kv_heads or heads, dim
    append = pmx_calls.dynamic_append(rng, formats, layout, mode, *sizes, usual=True)
    return drawn(pmx_calls.cache_attention(rng, append, heads, kv_heads, **options))


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
    return Call(OPERATORS[kind], inputs | {"attn_mask": mask}, attrs)


INDEX = ("seqstarts", "kvstarts", "cachestarts", "start_pos")


def whole_context(call):
    """Return the context's keys and values by kvkit's key_value_cache, which has tests of its own."""
    call = call.copy()
    arrays = [call[name] for name in ("current_key", "current_value", *INDEX)]
    attrs = {name: call.attributes[name] for name in CACHE_ATTRIBUTES}
    return kvkit.dynamic_batching.key_value_cache(*arrays, None, None, call["cache"], call["scale"], **attrs)
