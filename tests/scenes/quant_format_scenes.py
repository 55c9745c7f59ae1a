"""Caches of every quant_format, and numbers at its limits."""

import numpy as np
import pytest

from kvkit.formats.elements import BY_NAME

B, H, HEADS, D, ROOM = 2, 2, 4, 64, 40


# (quant_format, what shares a scale: None, "tensor" or "head" if given, elements of a group if found)
CASES = [("e4m3", "head"), ("e4m3", 64), ("q8_0", None), ("q4_0", None)]
MORE = [("e4m3", None), ("e4m3", "tensor"), ("e4m3", 32), ("e5m2", None), ("e5m2", "head")]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in MORE]


def empty(name, shared, rng):
    """(cache, scale, attributes) of a static cache of one layer."""
    cache = np.zeros((B, 1, 2, ROOM, H, BY_NAME[name].bytes(D)), np.uint8)
    how = {"quant_format": name}
    if isinstance(shared, int):
        return cache, np.zeros((*cache.shape[:-1], D // shared), np.float32), how | {"quant_group": shared}
    if shared is None:
        return cache, None, how
    return cache, rng.uniform(0.2, 2, (2, H) if shared == "head" else 2).astype(np.float32), how


def bad_call(what, rng):
    """(arguments of a call that is refused, what the error says)."""
    cache, scale, _ = empty("e4m3", "head", rng)
    changes, message = BAD[what]
    given = {name: np.zeros((B, 1, H, D), np.float32) for name in ("current_key", "current_value")}
    given |= {"start_pos": 0, "cache": cache, "scale": scale, "quant_format": "e4m3"} | changes
    if given["quant_format"] == "q8_0":
        given["cache"] = np.zeros((B, 1, 2, ROOM, H, 68), np.uint8)
    if what == "int8 keys":
        given["current_value"] = given["current_key"]
    return given, message


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float16)


BAD = {
    "unknown": ({"quant_format": "fp8"}, "quant_format: expected one of e4m3, e5m2, q8_0, q4_0, or None"),
    "both": ({"quant_bit": 8}, "quant_bit: expected 0, for quant_format 'e4m3', got 8"),
    "dtype": ({"cache": np.zeros((B, 1, 2, ROOM, H, D), np.int8)}, "cache: expected dtype uint8 or float8"),
    "NaN": ({"scale": np.array([1, np.nan], np.float32)}, "scale: expected finite numbers above 0, got NaN"),
    "zero": ({"scale": np.zeros((2, H), np.float32)}, "scale: expected finite numbers above 0, got 0.0"),
    "inside": ({"quant_format": "q8_0", "scale": np.ones(2, np.float32)}, "scale: expected None"),
    "int8 keys": ({"current_key": np.zeros((B, 1, H, D), np.int8)}, "current_key: expected dtype float32"),
}  # fmt: skip
