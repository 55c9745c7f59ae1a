"""One clear line for what formats refuse."""

from dataclasses import replace

import numpy as np
import pytest

from kvkit import KvkitError
from kvkit.formats import NAMED, decode, encode, named, rotate
from kvkit.formats.schemes import schemes_named

X = np.ones((4, 2, 32), np.float32)
NAN = np.where(np.arange(32) == 5, np.nan, X).astype(np.float32)
CODES = np.zeros((4, 2, 32), np.uint8)

REFUSED = {
    "unknown": (lambda: encode(X, "q9_0"),
        r"format: .* `kvkit list formats` prints, got 'q9_0' \(did you mean q8_0 or .*\?\)"),
    "option": (lambda: encode(X, "int4:g"), r"format: expected options among gN, .*, for int4, got 'g'"),
    "keyword": (lambda: named("int4", gruop=8), r"options: expected names among cell, .*, got 'gruop'"),
    "a size of groups": (lambda: named("q8_0:g16"), r"format: expected no options, for q8_0, got 'g16'"),
    "a sharing": (lambda: named("lmdeploy_int8:group"), r"format: expected no options, .*, got 'group'"),
    "a rounding": (lambda: named("iq4_nl:rint"), r"format: expected no options, for iq4_nl, got 'rint'"),
    "a rounding of int8": (lambda: named("e4m3_token_head:trunc"),
        r"format: expected options among rint, for e4m3_token_head, got 'trunc'"),
    "an exponent": (lambda: encode(X, "nvfp4:ceil"), r"format: expected no options, .*, got 'ceil'"),
    "per": (lambda: encode(X, "int4", per="page"), r"format: expected options among gN, .*, got 'page'"),
    "rounding": (lambda: named("int4", rounding="even"), r"format: expected options .*, got 'rint'"),
    "rule": (lambda: encode(X, replace(named("ggml_mxfp4"), rule="power")),
        r"format\.rule: expected one of given, pmx, .*, mx_power, .*, turbo_value, got 'power'"),
    "field": (lambda: named("int4", per="g8"), r"format: expected options among .*, got 'g8'"),
    "plus": (lambda: schemes_named("int4+"), r"rotation: expected hadamard, .*, got ''"),
    "what": (lambda: rotate(X, "hadamard", what="key"),
        r"what: expected 'stored', 'query' or 'output', got 'key'"),
    "missing": (lambda: encode(X, "ort_int8"), r"scale: expected a number or an array, .*, got None"),
    "nan": (lambda: encode(X, "e4m3", scale=np.nan), r"scale: expected finite numbers, got NaN"),
    "zero of a tensor": (lambda: encode(X, "nvfp4", scale=0), r"scale: expected numbers above 0, got 0.0"),
    "zero": (lambda: encode(X, "e4m3", scale=0), r"scale: expected numbers above 0, got 0.0"),
    "below zero": (lambda: encode(X, "e5m2", scale=np.float32([1, -1])),
        r"scale: expected numbers above 0, got -1.0"),
    "infinite": (lambda: encode(X, "nvfp4", scale=np.inf), r"scale: expected finite numbers, got infinity"),
    "word": (lambda: encode(X, "e4m3", scale="page"), r"scale: expected one of tensor, .*, got 'page'"),
    "shape": (lambda: encode(X, "e4m3", scale=np.ones(3)),
        r"scale: expected shape \(\) by tensor, \(2,\) by head, \(4, 2\) by token, .* by group, got \(3,\)"),
    "one of its own": (lambda: encode(X, "q8_0", scale=1.0), r"scale: expected None, for q8_0, got 1.0"),
    "dtype": (lambda: encode(X.astype(np.float64), "q8_0"), r"x: expected dtype float32, .*, got float64"),
    "head": (lambda: encode(X[..., :24], "q8_0"), r"x: expected a head of a multiple of 32 .*, got 24"),
    "half a group": (lambda: encode(X[..., :31], "e4m3", scale="group"),
        r"x: expected a head of a multiple of 32 elements, for e4m3, got 31"),
    "half a byte": (lambda: encode(X[..., :31], "int4:token"),
        r"x: expected a head of a multiple of 2 elements, for int4:token, got 31"),
    "tail": (lambda: encode(X, "ds_mla"), r"x: expected a head of .* 128 elements and 64 more, .* got 32"),
    "tokens": (lambda: encode(X, "kivi_key2"), r"x: expected a multiple of 32 tokens, .*, got 4"),
    "data": (lambda: encode(NAN, "q8_0"), r"x: expected finite numbers, for q8_0, got NaN at \(0, 0, 5\)"),
    "infinity with a computed scale": (
        lambda: encode(np.where(np.isnan(NAN), np.inf, X).astype(np.float32), "e4m3", scale="head"),
        r"x: expected finite numbers, for e4m3 with a computed scale, got infinity at \(0, 0, 5\)"),
    "large": (lambda: encode(X * np.float32(1e6), "kivi_value2"),
        r"x: expected numbers whose minimum float16 holds, for kivi_value2, got up to 1e\+06"),
    "nothing but a tail": (lambda: encode(np.ones((4, 64), np.float32), "ds_mla"),
        r"x: expected a head of .*, got 64"),
    "codes": (lambda: decode({}, "e4m3"), r"codes: expected an array, for e4m3, got None"),
    "no scale": (lambda: decode({"codes": CODES}, "int8"), r"scale: expected an array, for int8, got None"),
    "no scale of e4m3": (lambda: decode(CODES, "e4m3:head"), r"scale: expected an array, .*, got None"),
    "NaN scale": (lambda: decode({"codes": CODES, "scale": np.array([1, np.nan])}, "e4m3"),
        r"scale: expected finite numbers, got NaN"),
    "scale of groups": (lambda: decode({"codes": CODES, "scale": np.ones((4, 2, 3), np.float32)}, "int8"),
        r"scale: expected shape \(4, 2, 4\), for int8 and such codes, got \(4, 2, 3\)"),
    "scale of heads": (lambda: decode({"codes": CODES, "scale": np.ones(3, np.float32)}, "int8:head"),
        r"scale: expected shape \(2,\), for int8:head and such codes, got \(3,\)"),
    "minimum": (lambda: decode(encode(X, "uint8") | {"minimum": np.ones((4, 1, 1), np.float32)}, "uint8"),
        r"minimum: expected shape \(4, 2, 1\), for uint8 and such codes, got \(4, 1, 1\)"),
    "numbers": (lambda: decode(X, "int8"), r"codes: expected bytes of .*, got dtype float32 and 3 axes"),
    "rows": (lambda: decode(CODES, "q8_0"), r"codes: expected rows of whole blocks, .*, got 32 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    call, message = REFUSED[what]
    with pytest.raises(KvkitError, match=f"^{message}$"):
        call()


def test_infinities_and_nan_where_codes_have_them():
    x = np.array([[np.inf, -np.inf, np.nan, 1]], np.float32)
    np.testing.assert_array_equal(decode(encode(x, "e4m3"), "e4m3"), [[448, -448, np.nan, 1]])
    np.testing.assert_array_equal(decode(encode(x, "e5m2"), "e5m2"), [[57344, -57344, np.nan, 1]])


def test_the_largest_number_that_codes_with_one_scale_hold():
    x = np.full((1, 1, 16), 6 * 448, np.float32)
    np.testing.assert_array_equal(decode(encode(x, "mlx_nvfp4"), "mlx_nvfp4"), x)


def test_no_tokens():
    for name in (*NAMED, "int4:head", "uint8:tensor", "e4m3:head"):
        x = np.zeros((0, 2, {"ds_mla": 576, "ds_v4": 512}.get(name, 64)), np.float32)
        arrays = encode(x, name, scale=1.0 if name.startswith("ort") else None)
        assert arrays["codes"].size == 0
        assert decode(arrays, name).shape == x.shape
