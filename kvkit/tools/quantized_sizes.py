"""Count the bytes of a `QuantizedCache`: codes, and the sinks and recent tokens that stay unquantized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvkit.cache.layers.quant_spec import QuantSpec
from kvkit.cache.layers.quantized import QuantizedLayer, fit_spec
from kvkit.errors import argument_error
from kvkit.formats.elements import STORED
from kvkit.formats.known import Format
from kvkit.formats.schemes import formats_named

PLAIN_BYTES = 2  # of a number that stays unquantized: float16 or bfloat16
RULES = {"pmx": "sym", "kvkit_minimum": "asym", "kivi": "asym"}
AXES = {"group": "token", "channel": "channel"}


def stored_spec(text: str, side: Format) -> QuantSpec:
    """Return how a `QuantizedCache` stores one side in a format."""
    name = str(side.name).partition(":")[0]
    if name in STORED:
        return QuantSpec(format=name, axis="token")
    if side.rule not in RULES or side.per not in AXES or side.code.bits not in (8, 4, 2):
        wanted = f"{', '.join(STORED)}, int8, int4, uint4 or kivi4 and the like, which caches store"
        raise argument_error("formats", wanted, repr(text))
    return QuantSpec(side.code.bits, RULES[side.rule], AXES[side.per], side.group)  # type: ignore[arg-type]


def quantized_bytes(text: str, **unquantized: Any) -> Callable[[int, int, int, int], float]:
    """Return f(side, tokens, heads, dim): the bytes of keys (side 0) or values (1), without those of an undo.

    `unquantized` has arguments of `QuantizedLayer`.
    """
    key, value = (stored_spec(text, side) for side in formats_named(text))
    layer = QuantizedLayer(key, value, **unquantized)

    def count(side: int, tokens: int, heads: int, dim: int) -> float:
        spec = fit_spec(layer.specs[side], dim)
        coded = max(tokens - min(tokens, layer.sink) - layer.residual_length, 0)
        coded -= coded % spec.group if spec.axis == "channel" else 0
        return heads * ((tokens - coded) * dim * PLAIN_BYTES + coded * spec.bytes_per_token(dim))

    return count
