"""Attention of kvkit_cuda against the oracle.

What a kernel is compiled for differs little here, since in the simulator every form takes seconds.
"""

import attention_scenes as scenes
import numpy as np
import pytest
from attention_scenes import BF16, FP16, FP32, KINDS, TOLERANCE, assert_near, check
from device_arrays import Array, Tensor, contents
from scenes import ALL_FORMATS, Formats, assert_same

import kvkit
import kvkit_cuda
from kvkit.checks.records import Context
from kvkit.tools.vectors.calls import dynamic_mask, static_mask
from kvkit_cuda.attention import forms
from kvkit_cuda.calls import tables
from kvkit_cuda.device_runtime import host

LENGTHS = ((9, 2), (0, 0), (17, 1), (-1, 2), (0, 2))  # (past, seqlen): one form of kernel, of 4 rows
PAST = ((9, 2), (0, 0), (17, 1), (4, 0), (0, 2))
SINKS = np.array([3, -3, 0, 9], np.float32)
OPTIONS = {
    "plain": {}, "full": {"is_causal": False}, "alibi": {"is_alibi": True},
    "window": {"window": (3, 1), "is_causal": False}, "softcap": {"softcap": 1.5, "sinks": SINKS},
    "scale": {"softmax_scale": 0.7, "window": (4, -1), "decoding": 3},
}  # fmt: skip
SHORT = {"MOST_SPLITS": 64, "LEAST_SPLIT": 5}  # splits of 5 tokens


def make(kind, rng, formats=FP32, **options):
    options = {"dim": 16} | options
    if kind.startswith("static"):
        options.pop("decoding", 0)
        return getattr(scenes, kind)(rng, formats, 9, 2, **options)
    lengths = options.pop("lengths", PAST if kind == "dynamic_cache" else LENGTHS)
    return getattr(scenes, kind)(rng, formats, lengths, **options)


# Values


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_what_weighs_keys(options, rng):
    for kind in KINDS if not options else ("dynamic", "dynamic_cache"):
        check(make(kind, rng, **options))


@pytest.mark.parametrize("dtype", [None, bool], ids=["additive", "boolean"])
def test_masks(dtype, rng):
    for kind, shape in (("static", (4, 1)), ("static_cache", (2, 1, 2)), ("static", (1,))):
        call = make(kind, rng)
        check(call.but(attn_mask=static_mask(rng, call, shape, dtype, 3)))
    for kind, heads in (("dynamic", None), ("dynamic_cache", 4)):
        call = make(kind, rng, is_causal=False)
        check(call.but(attn_mask=dynamic_mask(rng, call, heads, dtype, 3)))


@pytest.mark.parametrize("options", [OPTIONS[name] for name in ("plain", "softcap")], ids=str)
def test_split_contexts(options, rng, monkeypatch):
    for name, value in SHORT.items():
        monkeypatch.setattr(tables, name, value)
    check(make("dynamic_cache", rng, layout=3, page_size=4, **options))


def test_codes(rng):
    """Chunks with several scales."""
    formats, lengths = Formats("fp16", "int8", "fp16", 8, 4), [(9, 1), (3, 1)]
    check(make("dynamic_cache", rng, formats, heads=2, lengths=lengths, page_size=5, layout=3))


def test_head_sizes(rng):
    """Chunks of one element, several for each thread, and values of another size; more rows than a tile."""
    check(make("dynamic", rng, BF16, dim=7, value_dim=35, heads=2, lengths=[(7, 1), (-2, 2)]))
    check(make("static", rng, FP32, dim=16, heads=9, kv_heads=1))


@pytest.mark.parametrize("formats", [FP32, FP16], ids=str)
@pytest.mark.parametrize("dim", [1, 24, 96])
@pytest.mark.slow
def test_more_head_sizes(formats, dim, rng):
    for rows in (1, 3, 20):
        check(make("static", rng, formats, dim=dim, value_dim=2 * dim, heads=rows, kv_heads=1, is_alibi=True))


@pytest.mark.slow
@pytest.mark.parametrize("formats", [f for f in ALL_FORMATS if f.t1 != "int8"], ids=str)
def test_every_format(formats, rng):
    number = ALL_FORMATS.index(formats)
    for i, dim in enumerate(formats.dims[:3]):
        if not formats.bit or dim % formats.group == 0:
            check(make("static_cache", rng, formats, dim=dim, layout=(i + number) % 2))
            check(make("dynamic_cache", rng, formats, dim=dim, layout=(i + number) % 4, mode=i % 2))


def test_sums_beyond_float32(rng, monkeypatch):
    """Weights times values may overflow on the way to a sum that does not, in parts too."""
    call = make("static", rng)
    call["value"][...] = 3e38
    check(call, usual=False)
    for name, value in SHORT.items():
        monkeypatch.setattr(tables, name, value)
    check(call, usual=False)


def test_what_is_hidden_may_be_nan(rng):
    call = make("static", rng, is_causal=False)
    mask = np.zeros((2, 11), np.float32)
    mask[:, [0, 7]] = -np.inf
    call["key"][:, 0], call["value"][:, [0, 7]] = np.nan, np.inf
    output, _ = check(call.but(attn_mask=mask))
    assert np.isfinite(output).all()


def test_results_do_not_depend_on_other_sequences(rng):
    """Nor on what else is in a call, as long as contexts are split alike."""
    call = make("dynamic", rng)
    alone = [
        call.but(
            **{name: call[name][slice(*call[starts][b : b + 2])]
               for name, starts in (("query", "seqstarts"), ("key", "kvstarts"), ("value", "kvstarts"))},
            seqstarts=call["seqstarts"][b : b + 2] - call["seqstarts"][b],
            kvstarts=call["kvstarts"][b : b + 2] - call["kvstarts"][b],
        ).run()
        for b in (0, 3, 4)
    ]  # fmt: skip
    together = call.run()
    rows = [slice(*call["seqstarts"][b : b + 2]) for b in (0, 3, 4)]
    for one, part in zip(alone, rows, strict=True):
        assert_same(one, together[part])


# Arrays


def test_arrays_of_the_device(rng):
    """They are used where they are, and results are of their kind."""
    call = make("dynamic_cache", rng, layout=3)
    call = call.but(attn_mask=dynamic_mask(rng, call), sinks=SINKS[::-1].astype(np.float16))
    output, lse, cache, _ = call.expected()
    names = ("query", "current_key", "current_value", "cache", "attn_mask", "seqstarts", "cachestarts")
    given = call.but(**{name: Tensor(call[name]) for name in names}, sinks=Array(call.attributes["sinks"]))
    got = given.run(return_lse=True)
    assert type(got) is tuple
    assert [type(array) for array in got] == [Tensor, Tensor]
    assert_near(contents(got[0]), output, TOLERANCE["float32"])
    assert_near(contents(got[1]), lse, TOLERANCE["float32"])
    assert_same(call["cache"], cache)


def test_a_planned_call_copies_and_allocates_nothing(rng, monkeypatch):
    for name, value in SHORT.items():
        monkeypatch.setattr(tables, name, value)
    call = make("dynamic_cache", rng, is_alibi=True)
    output, lse, cache, _ = call.expected()
    steps = {name: call[name] for name in ("seqstarts", "kvstarts", "cachestarts", "start_pos")}
    own = {name: call.attributes.pop(name) for name in ("cache_mode", "page_size")}
    step = kvkit_cuda.dynamic_batching.plan(**steps, **own, stream=None)
    names = ("query", "current_key", "current_value", "cache")
    out = Array(np.empty(output.shape, np.float32)), Array(np.empty(lse.shape, np.float32))
    for again in range(2):
        if again:
            monkeypatch.setattr(host, "upload", None)
            monkeypatch.setattr(host, "empty", None)
            out[0].array.fill(0)
        step.multi_head_cache_attention(
            *(Array(call[name]) for name in names), return_lse=True, out=out, **call.attributes
        )
        assert_near(out[0].array, output, TOLERANCE["float32"])
        assert_near(out[1].array, lse, TOLERANCE["float32"])
        assert_same(call["cache"], cache)


# Forms


def form(stored, dim, rows, moved=0, group=8, cell=None, head=0, packed=None):
    """Return the form for a cache [8 rows, 2 heads, dim] that begins `moved` bytes after a multiple of 16."""
    packed = packed or cell or "float32"
    size = kvkit.formats.BY_NAME[stored].bytes(dim) + head
    sides = ((4096 + moved, 0, 2 * size, size, 8192, 0, 64, 32),) * 2
    context = Context(packed, stored, cell, group, 2, dim, dim, sides, size, size)
    names = dict.fromkeys(kvkit_cuda.attention.params.AttentionParams._fields, 0)
    places = (
        "keys", "key_sequence", "key_row", "key_head", "key_scales", "scale_sequence", "scale_row",
        "scale_head",
    )  # fmt: skip
    names |= dict(zip(places, sides[0], strict=True))
    places = "values", "value_sequence", "value_row", "value_head", "value_scales"
    names |= dict(zip(places, sides[1], strict=False))
    made = forms.form_of(kvkit_cuda.attention.params.AttentionParams(**names), context, rows)
    return made.span, made.chunk_scales, made.pieces, made.rows, made.lanes


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("float16", 128, 4), (8, 0, 1, 4, 16)), (("float16", 128, 5), (8, 0, 1, 8, 16)),
        (("float16", 128, 99), (8, 0, 1, 8, 16)), (("float16", 128, 4, 2), (1, 0, 4, 4, 32)),
        (("float16", 128, 4, 8), (4, 0, 1, 4, 32)), (("float16", 20, 1), (4, 0, 1, 1, 8)),
        (("float16", 24, 1, 0, 8, None, 4), (2, 0, 1, 1, 16)), (("float32", 128, 1), (4, 0, 1, 1, 32)),
        (("float32", 256, 8), (4, 0, 2, 4, 32)), (("float32", 512, 8), (4, 0, 4, 2, 32)),
        (("float32", 17, 1), (1, 0, 1, 1, 32)), (("int8", 128, 4, 0, 8, "float16"), (16, 2, 1, 4, 8)),
        (("int8", 128, 8, 0, 8, "float16"), (8, 1, 1, 8, 16)),
        (("int8", 128, 4, 0, 64, "float16"), (16, 1, 1, 4, 8)),
        (("int8", 24, 1, 0, 3, "float16"), (1, 1, 1, 1, 32)),
        (("int4", 128, 1, 0, 8, "float16"), (32, 4, 1, 1, 4)),
        (("int4", 128, 1, 0, 2, "float32"), (8, 4, 1, 1, 16)),
        (("int4", 6, 1, 0, 6, "float32"), (2, 1, 1, 1, 4)),
        (("int8", 128, 4, 0, 8, "float16", 0, "float32"), (8, 1, 1, 4, 16)),
        (("int4", 128, 1, 0, 8, "float16", 0, "float32"), (16, 2, 1, 1, 8)),
    ],
    ids=str,
)  # fmt: skip
def test_form(given, expected, monkeypatch):
    """16 bytes at once, where rows are whole chunks, aligned, of whole groups or parts of one, and few."""
    monkeypatch.setattr(forms, "THREADS", 128)
    assert form(*given) == expected


# Merge


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_merge(dtype, rng):
    """Parts anywhere, some without keys; of a list, or along an axis; into arrays that are given."""
    outputs = rng.standard_normal((3, 2, 5, 2, 8), np.float32).astype(dtype)[..., 1, :]
    lses = 3 * rng.standard_normal((3, 5, 2), np.float32)
    lses[0, 2], lses[1, 3], lses[:, 4] = -np.inf, np.inf, -np.inf
    lses = lses.swapaxes(1, 2)
    expected = kvkit.merge_attention_states(outputs, lses)
    tolerance = TOLERANCE[np.dtype(dtype).name] / 2
    out = Array(np.empty((5, 2, 8), dtype).swapaxes(0, 1)), np.empty((2, 5), np.float32)
    for got in (
        kvkit_cuda.merge_attention_states(outputs, lses),
        kvkit_cuda.merge_attention_states([*map(Tensor, outputs)], [*lses[:2], Tensor(lses[2])]),
        kvkit_cuda.merge_attention_states(Tensor(outputs), Array(lses), out=out),
    ):
        for one, other in zip(got, expected, strict=True):
            assert_near(contents(one), other, tolerance)


# Weights of keys

HIDDEN = np.where(np.arange(5 * 12).reshape(5, 12) % 3, 0.5, -np.inf).astype(np.float32)
RULES = {
    "plain": {"return_lse": True},
    "window": {"window": (3, -1), "softcap": 1.5},
    "alibi": {"is_alibi": True, "sinks": SINKS},
    "mask": {"attn_mask": HIDDEN},
}


@pytest.mark.parametrize("rule", RULES)
def test_sums_of_weights(rule, rng, monkeypatch):
    """They equal the CPU's, of keys in several blocks and queries in several tiles."""
    monkeypatch.setattr(forms, "ROWS", 4)
    query, key, value = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((2, 5, 4, 8), (2, 12, 2, 8), (2, 12, 2, 8))
    )
    options = {"num_heads": 4, "head_dim": 8, "num_kv_heads": 2, "return_key_weights": True}
    got, expected = (
        package.multi_head_attention(query, key, value, **options, **RULES[rule])
        for package in (kvkit_cuda, kvkit)
    )
    assert len(got) == len(expected) == 2 + (rule == "plain")
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
