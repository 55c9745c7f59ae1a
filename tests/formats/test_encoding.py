"""Every named format: its bytes as loops write them, and attention over it."""

from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np
import pytest
import quantized_cache_reference as own

from kvkit import KvkitError, formats
from kvkit.cache import QuantizedCache, QuantSpec
from kvkit.formats import NAMED, decode, encode, known, scales
from kvkit.formats.elements import STORED
from kvkit.reference import formats as oracle
from kvkit.reference import latent as oracle_latent
from kvkit.reference.attention import attend_sequence

F32 = np.float32
SCALE = F32(0.5)  # that ort_int8 and ort_int4 are given


def own_code(x, bits, symmetric):
    codes, *beside = (own.sym_group if symmetric else own.asym_group)(x, bits, np.dtype(F32))
    return own.pack(codes, bits), *beside


def given_code(x, bits):
    codes = [oracle.clamp(round(v / SCALE), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for v in x]
    return [c % 256 for c in codes] if bits == 8 else oracle.pack_low_first([c + 8 for c in codes], 4)


def power(name, code):
    """Return the oracle's coding of a block of an MX format."""
    known = formats.named(name)
    return partial(oracle.mx, code=code, exponent=known.exponent, rounding=known.rounding)


# By name: the bytes of numbers that share a scale, and what lies beside these bytes.
REFERENCE = {
    **{name: getattr(oracle, name)
       for name in ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "ggml_mxfp4", "ds_mla")},
    **{name: partial(lambda x, table: [oracle.float_code(v, table) for v in x], table=oracle.TABLES[name])
       for name in ("e4m3", "e5m2")},
    **{f"int{bits}": partial(own_code, bits=bits, symmetric=True) for bits in (8, 4, 2)},
    **{f"uint{bits}": partial(own_code, bits=bits, symmetric=False) for bits in (8, 4, 2)},
    **{f"{code}_token_head:{word}": partial(oracle.token_head, code=code, rounding=rounding)
       for code, word, rounding in (("int8", "away", "away"), ("int8", "trunc", "trunc"),
                                    ("int8", "rint", "even"), ("e4m3", "rint", "even"))},
    "int4_token_head": oracle.int4_token_head,
    **{f"lmdeploy_int{bits}": partial(oracle.lmdeploy, bits=bits) for bits in (8, 4)},
    **{f"mlx{bits}:g32": partial(oracle.mlx_affine, bits=bits) for bits in (2, 3, 4, 5, 6, 8)},
    **{f"turbo_k{bits}{end}": partial(oracle.turbo_key, bits=bits) for bits in (3, 4) for end in ("", "_nc")},
    **{f"turbo_v{bits}": partial(oracle.turbo_value, bits=bits) for bits in (2, 3, 4)},
    **{f"openvino_{side}_u{bits}": partial(oracle.openvino, bits=bits, side=side)
       for side, bits in (("key", 8), ("value", 8), ("value", 4))},
    **{f"kivi_{side}{bits}": partial(oracle.kivi, bits=bits) for side in ("key", "value") for bits in (2, 4)},
    **{name: power(name, "e4m3" if "8" in name else "e2m1")
       for name in ("mxfp4", "mxfp4:ceil", "mxfp8", "mxfp8:ceil", "mlx_mxfp4", "mlx_mxfp8")},
    **{name: partial(oracle.nvfp4, rounding=NAMED[name].rounding) for name in ("nvfp4", "mlx_nvfp4")},
    **{f"ort_int{bits}": partial(given_code, bits=bits) for bits in (8, 4)},
}  # fmt: skip
DIMS = {"ds_mla": 576, "int8_token_head": 24, "e4m3_token_head": 24, "lmdeploy_int8": 24, "lmdeploy_int4": 24}


def some(rng, rows, dim, tiny=1e-36):
    """Return rows of numbers of many sizes, with zeros, equal numbers, ties of codes and tiny ones."""
    x = rng.standard_normal((rows, dim)) * 10.0 ** rng.integers(-4, 4, (rows, 1))
    x[0], x[1], x[2] = 0, 3, -0.0
    x[3] = np.arange(dim) % 16 - 7.5
    x[4] = (np.arange(dim) % 255 - 127) / 2
    x[4, 0] = 127
    x[5] = rng.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -5, 6], dim)
    x[5, 0] = 6
    x[6] = rng.standard_normal(dim) * tiny
    return x.astype(F32)


def test_tables():
    for name, dtype in (("e4m3", "float8_e4m3fn"), ("e5m2", "float8_e5m2")):
        table = formats.named(name).code.table
        np.testing.assert_array_equal(table, np.array(oracle.TABLES[name], F32))
        for codes in (every := np.arange(256, dtype=np.uint8), every.view(dtype)):
            np.testing.assert_array_equal(decode(codes, name), table)
    for name, code in (("mxfp4", "e2m1"), ("iq4_nl", "iq4")):
        np.testing.assert_array_equal(formats.named(name).code.table, np.array(oracle.TABLES[code], F32))
    np.testing.assert_array_equal(formats.named("mxfp4").cell.table, np.array(oracle.TABLES["e8m0"], F32))


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_floats_of_8_bits(rng, name):
    """Numbers of the table, halves between neighbours and beside them, and beyond it."""
    table = np.array(oracle.TABLES[name][:128], F32)
    finite = table[np.isfinite(table)]
    middles = (finite[1:] + finite[:-1]) / 2
    x = np.concatenate((
        finite, middles, np.nextafter(middles, F32(0)), np.nextafter(middles, F32(np.inf)),
        F32([np.inf, np.nan, 449, 464, 465, 1e9, 57345, 61440, 61441, 3e38, 1e-45, 2**-10, 2**-17]),
        rng.standard_normal(200).astype(F32),
    ))  # fmt: skip
    x = np.concatenate((x, -x))
    expected = [oracle.float_code(v, oracle.TABLES[name]) for v in x]
    np.testing.assert_array_equal(encode(x, name)["codes"], expected)


def test_every_format_has_a_reference():
    own = {"iq4_nl", "ds_v4", "openvino_key_u4"}  # which have tests of their own
    assert {name.partition(":")[0] for name in REFERENCE} == set(NAMED) - own


@pytest.mark.parametrize("name", REFERENCE)
def test_bytes(rng, name):
    fmt, dim = formats.named(name), DIMS.get(name.partition(":")[0], 64)
    tiny = 1e-40 if fmt.exponent else 1e-36
    wholes = (None, 1.0, 0.01) if fmt.rule == "nvfp4" else (SCALE,) if fmt.needs_scale else (None,)
    x = some(rng, 64 if fmt.per == "channel" else 12, dim, tiny).reshape(-1, 2, dim)
    if name == "ds_mla":
        x[..., 512:] = rng.standard_normal((*x.shape[:-1], 64))
    elif fmt.rule == "kivi":
        x = x.clip(-6e4, 6e4)  # what float16 holds
    for whole in wholes:
        arrays = encode(x, name, scale=whole)
        more = ()
        if fmt.rule == "nvfp4":
            unit = whole or (1.0 if name == "mlx_nvfp4" else np.abs(x).max() / F32(448))
            assert arrays.get("whole", 1) == F32(unit)
            assert ("whole" in arrays) == (unit != 1)
            more = (unit,)
        check_groups(REFERENCE[name], x, arrays, fmt, more)


def check_groups(reference, x, arrays, fmt, more):
    """Compare the codes, scales, minima and zeros of the numbers that share a scale, group by group."""
    parts = [
        arrays[part]
        for part in ("codes", "scale", "zero", "minimum")
        if part in arrays and not fmt.needs_scale
    ]
    parts = parts or [arrays["codes"].view(np.uint8)]
    if fmt.per == "channel":
        x, *parts = (np.moveaxis(part, 0, -1) for part in (x, *parts))
    size = fmt.group if fmt.per and fmt.group and not fmt.tail else fmt.block or x.shape[-1]
    groups = x.reshape(-1, size)
    codes, *beside = (np.ascontiguousarray(part).reshape(len(groups), -1) for part in parts)
    for group, *got in zip(groups, codes, *beside, strict=True):
        expected = reference(group, *more)
        if expected is None:  # equal numbers, for LMDeploy
            continue
        expected = expected if isinstance(expected, tuple) else (expected,)
        assert len(expected) == len(got)
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_array_equal(one.view(np.uint8) if one.dtype == np.int8 else one, other)


def test_iq4_nl(rng):
    """Its encoder looks for the scale: what the bytes stand for, and that no other table is as near."""
    block = np.array([oracle.bits16(-0.5) + [17 * i for i in range(16)]], np.uint8)
    np.testing.assert_array_equal(decode(block, "iq4_nl")[0], -0.5 * np.array(oracle.TABLES["iq4"] * 2))
    x = rng.standard_normal((64, 128)).astype(F32)
    errors = [np.sqrt(np.mean((decode(encode(x, name), name) - x) ** 2)) for name in ("iq4_nl", "q4_0")]
    assert errors[0] < 0.93 * errors[1]
    assert not decode(encode(np.zeros((1, 32), F32), "iq4_nl"), "iq4_nl").any()


def test_numbers_that_codes_stand_for(rng):
    """Facts of other projects: a scale below zero, words of MLX, equal numbers, a scale of a scale."""
    x = some(rng, 12, 64)
    for bits in (2, 4, 8):
        arrays = encode(x, f"mlx{bits}:g32")
        assert (arrays["scale"] < 0).any()
        words = {**arrays, "codes": arrays["codes"].view(np.uint32)}
        np.testing.assert_array_equal(decode(words, f"mlx{bits}:g32"), decode(arrays, f"mlx{bits}:g32"))
    for name in ("lmdeploy_int8", "lmdeploy_int4"):
        np.testing.assert_array_equal(decode(encode(x, name), name)[:3], x[:3])
    arrays = encode(x, "nvfp4", scale=0.01)
    numbers = np.array(oracle.TABLES["e2m1"], F32)[
        np.stack((arrays["codes"] % 16, arrays["codes"] // 16), -1)
    ]
    unit = np.array(oracle.TABLES["e4m3"], F32)[arrays["scale"]] * F32(0.01)
    np.testing.assert_array_equal(decode(arrays, "nvfp4"), numbers.reshape(x.shape) * np.repeat(unit, 16, -1))
    three = np.full((2, 576), 3, F32)
    np.testing.assert_array_equal(decode(encode(three, "ds_mla"), "ds_mla"), three)
    codes = F32([[-8, 7, 0, 1, 2, 2, 0, 6]])
    np.testing.assert_array_equal(
        decode(encode(codes * SCALE, "ort_int4", scale=SCALE), "ort_int4"), codes * SCALE
    )


def test_deepseek_vectors():
    """The specification's row: byte sums, first codes, scales, padding."""
    i = np.arange(512)
    latent = (i % 37 - 18) * 2.0 ** (i // 128 - 3) / 3
    x = np.concatenate([latent, np.arange(64) / 8 - 4]).astype(ml_dtypes.bfloat16)
    for name, total, first, fourth in (
        ("ds_mla", 106024, [254, 253, 252, 252, 251, 250, 249, 249], [236, 233, 228, 220]),
        ("ds_mla:p2", 103692, [252, 251, 251, 250, 249, 249, 248, 247], [235, 232, 227, 219]),
    ):
        row = encode(x[None], name)["codes"][0]
        assert (row.sum(dtype=int), row[:8].tolist(), row[384:388].tolist()) == (total, first, fourth)
    np.testing.assert_array_equal(row[512:528].view(F32), 2.0 ** np.arange(-9, -5))
    row = encode(np.concatenate([x[:448], x[512:]])[None], "ds_v4")["codes"][0]
    assert row[576:].tolist() == [118, 118, 119, 119, 120, 120, 121, 0]
    assert row[:8].tolist() == first
    np.testing.assert_array_equal(row[448:576].view(ml_dtypes.bfloat16), x[512:])


@pytest.mark.parametrize("name", ["ds_v4", "ds_v4:vllm"])
def test_the_least_scales_of_flash_mla_and_vllm(rng, name):
    """FlashMLA's scale is at least 1e-4 and vLLM's amax, before they are rounded up to a power of two."""
    x = (rng.standard_normal((8, 512)) * np.logspace(-12, 1, 8)[:, None]).astype(ml_dtypes.bfloat16)
    x[0] = 0
    rows = encode(x, name)["codes"]
    for row, codes in zip(x, rows, strict=True):
        body, scales = oracle_latent.bytes_of(row, name)
        assert codes.tolist() == body + scales
    least = -22 if name == "ds_v4:vllm" else -13
    assert rows[0, 576:].tolist() == [least + 127] * 7 + [0]
    assert rows[:, 576:583].min() == least + 127
    assert "vllm" not in NAMED["ds_mla"].options


def test_formats_that_are_not_known_are_named():
    for name, width, message in (
        ("ds_mla", 352, "got 352 bytes .as of nvfp4_ds_mla of vLLM, which kvkit does not know"),
        ("ds_mla", 528, "got 528 bytes .as of DeepSeek V4.1, which kvkit does not know"),
    ):
        with pytest.raises(KvkitError, match=message):
            decode(np.zeros((4, width), np.uint8), name)
    with pytest.raises(KvkitError, match=r"format: expected .* kvkit knows, got nvfp4_ds_mla: rows of 352"):
        encode(np.zeros((4, 512), F32), "nvfp4_ds_mla")


def test_own_codes_by_channel(rng):
    x = rng.standard_normal((64, 2, 16)).astype(F32)
    for name in ("int2", "uint4", "int8"):
        arrays = encode(x, f"{name}:g32:channel")
        assert arrays["scale"].shape == (2, 2, 16)
        turned = np.ascontiguousarray(np.moveaxis(x, 0, -1))  # by group along the head
        np.testing.assert_array_equal(
            decode(arrays, f"{name}:channel"), np.moveaxis(decode(encode(turned, f"{name}:g32"), name), -1, 0)
        )


@pytest.mark.parametrize("name", ["int8", "int4", "uint4"])
def test_own_codes_with_a_scale_that_many_share(rng, name):
    """What shares a scale is a group of rows that lie so."""
    x = rng.standard_normal((5, 3, 64)).astype(F32)
    turned = np.ascontiguousarray(x.swapaxes(0, 1))
    for per, rows in (("tensor", x.reshape(1, -1)), ("head", turned.reshape(3, -1)), ("token", x)):
        arrays = encode(x, f"{name}:{per}")
        group = encode(rows, f"{name}:g{rows.shape[-1]}")
        np.testing.assert_array_equal(arrays["scale"].ravel(), group["scale"].ravel())
        expected = decode(group, name).reshape(turned.shape if per == "head" else x.shape)
        got = decode(arrays, f"{name}:{per}")
        np.testing.assert_array_equal(got.swapaxes(0, 1) if per == "head" else got, expected)


@pytest.mark.parametrize("code", ["e4m3", "e5m2"])
def test_scales_that_are_given_or_found(rng, code):
    x = rng.standard_normal((5, 3, 64)).astype(F32)
    x[:, 1] = 0
    top = F32(max(v for v in oracle.TABLES[code] if np.isfinite(v)))
    for per, shape in (("tensor", ()), ("head", (3,)), ("token", (5, 3)), ("group", (5, 3, 2))):
        arrays = encode(x, code, scale=per)
        assert (arrays["scale"].shape, arrays["scale"].dtype) == (shape, np.float32)
        again = encode(x, code, scale=arrays["scale"])
        np.testing.assert_array_equal(again["codes"], arrays["codes"])
        over = {"tensor": (0, 1, 2), "head": (0, 2), "token": 2}.get(per)
        if over:
            largest = np.abs(x).max(over) / top
            np.testing.assert_array_equal(arrays["scale"], np.where(largest > 0, largest, 1))
        assert np.abs(decode(arrays, code) - x).max() <= np.abs(x).max() / (16 if code == "e4m3" else 8)
        np.testing.assert_array_equal(encode(x, f"{code}:{per}")["codes"], arrays["codes"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["e4m3", "int8", "uint4", "q8_0", "mlx4", "lmdeploy_int8"])
def test_data_of_16_bits(rng, name, dtype):
    x = rng.standard_normal((2, 64)).astype(formats.BY_NAME[dtype].dtype)
    arrays = encode(x, name)
    assert np.abs(decode(arrays, name) - x.astype(F32)).max() < 0.3
    if NAMED[name].cell is None:
        assert arrays["scale"].dtype == x.dtype


TOKENS, HEADS = 32, 2
GIVEN = {"e4m3": 1.0, "e5m2": 1.0, "ort_int8": 0.03, "ort_int4": 0.4, "nvfp4": 0.002}
# Relative rms on normal numbers, docs/specifications/formats.md 5; of others by the bits of a code.
RMS = {
    "q8_0": 0.0054, "int8": 0.0040, "e4m3": 0.0264, "e5m2": 0.0529, "q5_1": 0.0379, "q5_0": 0.0427,
    "q4_1": 0.0782, "q4_0": 0.0859, "nvfp4": 0.0952, "int4": 0.0971, "mxfp4": 0.1151, "mlx_mxfp4": 0.1157,
    "mlx_mxfp8": 0.0265, "turbo_k3": 0.186, "turbo_k4": 0.0975,
}  # fmt: skip
LATENT = {"ds_mla": 576, "ds_v4": 512}  # elements of their rows
LESS_THAN = {8: 0.04, 6: 0.04, 5: 0.07, 4: 0.13, 3: 0.3, 2: 0.7}  # int2 has -1, 0 and 1


@pytest.mark.cpu
@pytest.mark.parametrize("name", [name for name in NAMED if name in STORED])
def test_attention_over(rng, name):
    dim, scale = LATENT.get(name, 64), GIVEN.get(name)
    sides = rng.standard_normal((2, TOKENS, HEADS, dim)).astype(np.float32)
    told = (
        f"{name}:float16" if NAMED[name].rule in ("pmx", "kvkit_minimum") else name
    )  # as caches have their own
    keys, values = (decode(encode(side, told, scale=scale), name) for side in sides)
    spec = QuantSpec(name, scale=scale)
    cache = QuantizedCache(num_layers=1, key=spec, value=spec, residual_length=0, sink=0, read_back=True)
    cache.update(*sides.swapaxes(1, 2)[:, None], 0)
    query = rng.standard_normal((1, HEADS, 1, dim)).astype(np.float32)
    got, expected = cache.attend(query, 0)[0, :, 0], attend_sequence(query[0].swapaxes(0, 1), keys, values)[0]
    largest = np.abs(np.einsum("nhd,hd->hn", keys, query[0, :, 0])).max(1) / np.sqrt(dim)  # score of a head
    assert (
        np.abs(got - expected[0]) <= 2e-5 * np.maximum(1, largest / 8)[:, None] + 1e-7 * np.abs(expected[0])
    ).all()
    error = np.linalg.norm(keys - sides[0]) / np.linalg.norm(sides[0])
    if name in RMS:
        assert error == pytest.approx(RMS[name], rel=0.1)
    else:
        assert error < LESS_THAN[NAMED[name].code.bits]


def lloyd_levels(bits, steps=200):
    """Return the levels above 0 of vLLM's solver: trapezoids on [-10.5, 10.5], at most 200 rounds."""
    count = 2**bits
    levels = -3.5 + 7 * (np.arange(count) + 0.5) / count
    for _ in range(200):
        edges = np.concatenate([[-10.5], (levels[1:] + levels[:-1]) / 2, [10.5]])
        x = np.linspace(edges[:-1], edges[1:], steps + 1)
        density = np.exp(-x * x / 2)
        before, levels = levels, np.trapezoid(x * density, x, axis=0) / np.trapezoid(density, x, axis=0)
        if np.abs(levels - before).max() < 1e-10:
            break
    return levels[count // 2 :]


@pytest.mark.parametrize(
    ("bits", "said"),
    [
        (3, (0.24498, 0.75565, 1.34318, 2.15035)),
        (4, (0.12843, 0.38814, 0.65688, 0.94245, 1.25626, 1.61788, 2.06845, 2.73092)),
    ],
)
def test_levels_are_those_of_the_engines_solver(bits, said):
    levels = NAMED[f"turbo_k{bits}"].code.numbers[2 ** (bits - 1) :]
    np.testing.assert_array_max_ulp(np.float32(levels), np.float32(lloyd_levels(bits)), 1)
    np.testing.assert_allclose(levels, said, atol=5.1e-6)


def test_codes_of_a_token_and_head_round_half_away_by_default(rng):
    """As vLLM 0.33; truncation, which kvkit took for the default, is one code off in half of all."""
    x = rng.standard_normal((64, 4, 128)).astype(np.float32)
    new, old = (
        encode(x, f"int8_token_head{word}")["codes"][..., :128].view(np.int8) for word in ("", ":trunc")
    )
    np.testing.assert_array_equal(new, encode(x, "int8_token_head:away")["codes"][..., :128].view(np.int8))
    assert np.abs(new.astype(int) - old).max() == 1
    assert 0.4 < (new != old).mean() < 0.6


def test_the_zero_point_is_no_part_of_the_scale(rng):
    """vLLM's 4 bits per token and head: `bits & -16` is the scale, `bits & 15` the zero point."""
    x = rng.standard_normal((5, 3, 64)).astype(np.float32) + 1
    rows = encode(x, "int4_token_head")["codes"]
    assert rows.shape == (5, 3, 32 + 4)
    bits = np.ascontiguousarray(rows[..., 32:]).view(np.uint32)
    scale, zero = (bits & np.uint32(0xFFFFFFF0)).view(np.float32), (bits & 15).astype(np.float32)
    codes = np.stack([rows[..., :32] & 15, rows[..., :32] >> 4], -1).reshape(x.shape)
    np.testing.assert_array_equal(decode(rows, "int4_token_head"), (codes - zero) * scale)
    assert len(np.unique(zero)) > 1
    assert np.abs(decode(rows, "int4_token_head") - x).max() < scale.max()


def test_nearest_iq4_codes_around_ties(rng):
    """The table of halves finds the codes of the distances, at ties and one bit beside them."""
    table = scales.IQ4.table
    ties = ((table[1:] + table[:-1]) / 2).astype(F32)
    beside = [np.nextafter(ties, F32(end)) for end in (-np.inf, np.inf)]
    odd = np.array([np.nan, np.inf, -np.inf, 1e38, -1e38, 0.0, -0.0], F32)
    x = np.concatenate([table, ties, *beside, odd, rng.uniform(-140, 130, 20_000).astype(F32)])
    for upper in (False, True):
        expected = scales.codes_by_distance(x, table, upper)
        np.testing.assert_array_equal(scales.nearest_codes(x, table, upper), expected)


@pytest.mark.parametrize("code", [known.INT4, known.E2M1], ids=["int4", "e2m1"])
def test_the_best_scale_is_searched_for_any_table(rng, code):
    """The search has a table of its own for the codes of iq4_nl; a format with others must not use it."""
    x, errors = rng.standard_normal((64, 32), np.float32), {}
    for rule in ("ggml_searched", "ggml_signed"):
        format = replace(NAMED["iq4_nl"], code=code, rule=rule)
        errors[rule] = (x * x * (x - decode(encode(x, format), format)) ** 2).sum()  # what a search lessens
    assert errors["ggml_searched"] < errors["ggml_signed"]


def test_a_minimum_of_minus_zero_is_zero():
    x = np.where(np.arange(32) < 31, F32(-0.0), F32(1))[None]
    assert not np.signbit(encode(x, "uint8")["minimum"]).any()
