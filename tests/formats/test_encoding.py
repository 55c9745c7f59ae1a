"""Every named format against formulas transcribed as loops: bytes, ties, limits, zeros, and back."""

import ml_dtypes
import numpy as np
import pytest

from kvkit import formats
from kvkit.formats import NAMED, decode, encode
from kvkit.reference import formats as oracle

F32 = np.float32
GGML = {name: getattr(oracle, name) for name in ("q8_0", "q4_0", "q4_1", "q5_1", "ggml_mxfp4")}


def some(rng, rows, dim, tiny=1e-36):
    """Rows of numbers of many sizes; zeros, equal numbers, ties of codes, tiny ones."""
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


@pytest.mark.parametrize("name", GGML)
def test_ggml(rng, name):
    x = some(rng, 12, 96)
    codes = encode(x, name)["codes"]
    expected = [[byte for i in (0, 32, 64) for byte in GGML[name](row[i : i + 32])] for row in x]
    np.testing.assert_array_equal(codes, expected)


def test_iq4_nl(rng):
    """Its encoder looks for the scale: what the bytes stand for, and that no other table is as near."""
    block = np.array([oracle.bits16(-0.5) + [17 * i for i in range(16)]], np.uint8)
    np.testing.assert_array_equal(decode(block, "iq4_nl")[0], -0.5 * np.array(oracle.TABLES["iq4"] * 2))
    x = rng.standard_normal((64, 128)).astype(F32)
    errors = [np.sqrt(np.mean((decode(encode(x, name), name) - x) ** 2)) for name in ("iq4_nl", "q4_0")]
    assert errors[0] < 0.93 * errors[1]
    assert not decode(encode(np.zeros((1, 32), F32), "iq4_nl"), "iq4_nl").any()


@pytest.mark.parametrize(("code", "rounding"), [("int8", "trunc"), ("int8", "rint"), ("e4m3", "rint")])
def test_token_and_head_inside_the_row(rng, code, rounding):
    x = some(rng, 12, 24).reshape(6, 2, 24)
    rows = encode(x, f"{code}_token_head:{rounding}")["codes"]
    even = {"trunc": "trunc", "rint": "even"}[rounding]
    expected = [[oracle.token_head(row, code, even) for row in token] for token in x]
    np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("bits", [8, 4])
def test_lmdeploy(rng, bits):
    x, name = some(rng, 12, 24), f"lmdeploy_int{bits}"
    arrays = encode(x, name)
    for i, row in enumerate(x):
        expected = oracle.lmdeploy(row, bits)
        if expected:
            codes, scale, zero = expected
            np.testing.assert_array_equal(arrays["codes"][i], codes)
            assert (arrays["scale"][i], arrays["zero"][i]) == (scale, zero)
    np.testing.assert_array_equal(decode(arrays, name)[:3], x[:3])  # equal numbers come back


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_mlx_affine(rng, bits):
    x = some(rng, 12, 64)
    arrays = encode(x, f"mlx{bits}:g32")
    for i, row in enumerate(x):
        for g in range(2):
            codes, scale, bias = oracle.mlx_affine(row[32 * g : 32 * g + 32], bits)
            np.testing.assert_array_equal(arrays["codes"][i, 4 * bits * g : 4 * bits * (g + 1)], codes)
            assert (arrays["scale"][i, g], arrays["minimum"][i, g]) == (scale, bias)
    assert (arrays["scale"] < 0).any()
    words = {**arrays, "codes": arrays["codes"].view(np.uint32)}
    np.testing.assert_array_equal(decode(words, f"mlx{bits}:g32"), decode(arrays, f"mlx{bits}:g32"))


@pytest.mark.parametrize("bits", [2, 4])
def test_kivi(rng, bits):
    x = some(rng, 64, 32).reshape(32, 2, 32).clip(-6e4, 6e4)
    keys, values = encode(x, f"kivi_key{bits}"), encode(x, f"kivi_value{bits}")
    assert [keys[name].shape for name in ("codes", "scale")] == [(4 * bits, 2, 32), (1, 2, 32)]
    for h in range(2):
        for c in range(0, 32, 5):
            codes, scale, low = oracle.kivi(x[:, h, c], bits)
            np.testing.assert_array_equal(keys["codes"][:, h, c], codes)
            assert (keys["scale"][0, h, c], keys["minimum"][0, h, c]) == (scale, low)
        for t in range(8):
            codes, scale, low = oracle.kivi(x[t, h], bits)
            np.testing.assert_array_equal(values["codes"][t, h], codes)
            assert (values["scale"][t, h, 0], values["minimum"][t, h, 0]) == (scale, low)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp4:ceil", "mxfp8", "mxfp8:ceil", "mlx_mxfp4", "mlx_mxfp8"])
def test_mx(rng, name):
    x, format = some(rng, 12, 64, 1e-40), formats.named(name)
    arrays = encode(x, name)
    for i, row in enumerate(x):
        for g in range(2):
            group = row[32 * g : 32 * g + 32]
            codes, e = oracle.mx(group, format.code.name, format.exponent, format.rounding)
            assert arrays["scale"][i, g] == e
            size = len(codes)
            np.testing.assert_array_equal(arrays["codes"][i, size * g : size * (g + 1)], codes)


@pytest.mark.parametrize("whole", [None, 1.0, 0.01])
@pytest.mark.parametrize("name", ["nvfp4", "mlx_nvfp4"])
def test_nvfp4(rng, name, whole):
    x = some(rng, 12, 32)
    arrays = encode(x, name, scale=whole)
    unit = whole or (1.0 if name == "mlx_nvfp4" else np.abs(x).max() / F32(448))
    assert arrays.get("whole", 1) == F32(unit)
    assert ("whole" in arrays) == (unit != 1)
    for i, row in enumerate(x):
        for g in range(2):
            group = row[16 * g : 16 * g + 16]
            codes, scale = oracle.nvfp4(group, unit, NAMED[name].rounding)
            assert arrays["scale"][i, g] == scale
            np.testing.assert_array_equal(arrays["codes"][i, 8 * g : 8 * g + 8], codes)
            if g == 0 and scale:
                numbers = [
                    oracle.TABLES["e2m1"][nibble] for byte in codes for nibble in (byte % 16, byte // 16)
                ]
                stand_for = np.array(numbers, F32) * (F32(oracle.TABLES["e4m3"][scale]) * F32(unit))
                np.testing.assert_array_equal(decode(arrays, name)[i, :16], stand_for)


def test_deepseek_rows(rng):
    x = np.concatenate((some(rng, 7, 512)[[1, 5, 6]], rng.standard_normal((3, 64)).astype(F32)), 1)
    rows = encode(x, "ds_mla")["codes"]
    assert rows.shape == (3, 656)
    np.testing.assert_array_equal(rows, [oracle.ds_mla(row) for row in x])
    np.testing.assert_array_equal(decode(rows, "ds_mla")[0, :512], F32(3))


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


@pytest.mark.parametrize("name", ["ort_int8", "ort_int4"])
def test_onnxruntime_codes(name):
    low, high = (-128, 127) if name == "ort_int8" else (-8, 7)
    x = F32([[0.5, 1.5, 2.5, -0.5, 1e9, -1e9, 3, -7.5]]) * F32(0.5)
    codes = [min(max(round(float(v) / 0.5), low), high) for v in x[0]]
    expected = [c % 256 for c in codes] if low == -128 else oracle.pack_low_first([c + 8 for c in codes], 4)
    arrays = encode(x, name, scale=0.5)
    np.testing.assert_array_equal(arrays["codes"].view(np.uint8)[0], expected)
    np.testing.assert_array_equal(decode(arrays, name)[0], F32(codes) * F32(0.5))


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
