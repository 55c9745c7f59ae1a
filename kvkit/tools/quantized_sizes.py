"""Count the bytes of kvkit's own caches: codes, and the sinks and recent tokens that stay unquantized."""

from __future__ import annotations

from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class QuantizedRows:
    """Counts the bytes of a `QuantizedLayer`.

    Attributes
    ----------
    specs : tuple of QuantSpec
        Of keys and of values.
    residual_length, sink : int
        As in `QuantizedLayer`.
    """

    specs: tuple[QuantSpec, QuantSpec]
    residual_length: int
    sink: int

    @classmethod
    def of(cls, text: str, **unquantized: Any) -> QuantizedRows:
        """Return the counts of a format by its name, with arguments of `QuantizedLayer`."""
        key, value = formats_named(text)
        layer = QuantizedLayer(stored_spec(text, key), stored_spec(text, value), **unquantized)
        return cls((layer.specs[0], layer.specs[1]), layer.residual_length, layer.sink)

    def bytes(self, side: int, tokens: int, heads: int, dim: int) -> float:
        """Return the bytes of a sequence's keys (side 0) or values (1), without those that an undo needs."""
        spec = fit_spec(replace(self.specs[side]), dim)
        sinks = min(tokens, self.sink)
        coded = max(tokens - sinks - self.residual_length, 0)
        coded -= coded % spec.group if spec.axis == "channel" else 0
        plain = tokens - coded
        return heads * (plain * dim * PLAIN_BYTES + coded * spec.bytes_per_token(dim))
