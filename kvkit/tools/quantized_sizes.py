"""Count the bytes of a `QuantizedCache`: codes, and the sinks and recent tokens that stay unquantized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvkit.cache.layers.quantized import QuantizedLayer

PLAIN_BYTES = 2  # of a number that stays unquantized: float16 or bfloat16


def quantized_bytes(text: str, **unquantized: Any) -> Callable[[int, int, int, int], float]:
    """Return f(side, tokens, heads, dim): the bytes of keys (side 0) or values (1), without those of an undo.

    `unquantized` has arguments of `QuantizedLayer`.
    """
    layer = QuantizedLayer(text, **unquantized)

    def count(side: int, tokens: int, heads: int, dim: int) -> float:
        spec = layer.specs[side].fitted(dim)
        coded = max(tokens - min(tokens, layer.sink) - layer.residual_length, 0)
        coded -= coded % spec.group if spec.axis == "channel" else 0
        return heads * ((tokens - coded) * dim * PLAIN_BYTES + coded * spec.bytes_per_token(dim))

    return count
