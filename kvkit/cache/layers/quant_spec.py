"""Define `QuantSpec`, which says in which format a quantized layer stores keys or values."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from kvkit.checks.values import finite_number, integer
from kvkit.errors import argument_error, describe, hints_keywords
from kvkit.formats import rotation_named
from kvkit.formats.elements import BY_NAME, FLOATS, STORED
from kvkit.formats.known import ALIASES
from kvkit.formats.mixes import side_format
from kvkit.formats.schemes import formats_named

SCHEME_OF = {"pmx": "sym", "kvkit_minimum": "asym", "kivi": "asym"}  # {`Format.rule`: the scheme of codes}
AXIS_OF = {"group": "token", "channel": "channel"}  # {`Format.per`: along which axis a group lies}
PARAM_DTYPES = "float16", "float32"
WANTED = (
    f"int8, int4, int2, uint8, uint4, uint2 (:g32, :channel, :float32), kivi4, kivi2, {', '.join(STORED)} "
    "(e4m3:g32), perhaps with +hadamard, which attention reads in place (`kvkit study` shows what other "
    "formats do to a cache)"
)


@dataclass(frozen=True)
class CodeSpec:
    """Says how codes of one side are stored; files of caches have these fields.

    A group is `group` neighbouring elements of a token, or one element of `group` consecutive tokens. A group
    of 32 along a token stands for the greatest common divisor of 32 and the head size. `format` is a name of
    `STORED`, which replaces `bits` and `scheme`. `scale` is a constant, or one for each head.
    """

    bits: int = 4
    scheme: str = "asym"
    axis: str = "token"
    group: int = 32
    param_dtype: str = "float16"
    format: str | None = None
    rotation: str | None = None
    scale: float | tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.scale, list):  # from JSON
            object.__setattr__(self, "scale", tuple(self.scale))

    @property
    def group_adapts(self) -> bool:
        """Return whether `group` adapts to the head size: it is the default, and along a token."""
        return not self.format and self.axis != "channel" and self.group == CodeSpec.group

    def fitted(self, dim: int) -> CodeSpec:
        """Return the spec for a head size, to which a default group adapts."""
        return replace(self, group=math.gcd(self.group, dim)) if self.group_adapts else self

    def bytes_per_token(self, head_dim: int) -> float:
        """Return the bytes of an encoded token of a head, with scales."""
        spec, cell = self.fitted(head_dim), BY_NAME[self.param_dtype].bytes(1)
        element = STORED.get(spec.format or "")
        has_scales = not (element and element.block) and self.scale is None  # besides the codes
        if has_scales and spec.axis != "channel" and head_dim % spec.group:
            raise argument_error("head_dim", f"a multiple of {spec.group}, the group of a scale", head_dim)
        cell *= 2 if element is None and spec.scheme == "asym" else 1
        codes = element.bytes(head_dim) if element else head_dim * spec.bits / 8
        return float(codes + has_scales * head_dim * cell / spec.group)


@hints_keywords
@dataclass(frozen=True)
class QuantSpec:
    """Says in which format a quantized layer stores keys or values.

    Parameters
    ----------
    format : str
        A format that attention reads in place, in the grammar of all formats (`kvkit list formats`):

        ``"int8"``, ``"int4"``, ``"int2"``: codes times a scale, as in PMX; ``"uint8"``, ``"uint4"``,
        ``"uint2"``: codes times a scale, plus a minimum. ``:g32`` names the group, the neighbouring elements
        of a token that share a scale; it must divide the head size, except that 32 stands for the greatest
        common divisor. With ``:channel`` a group is one element of each of so many consecutive tokens.
        Scales and minima are float16, or float32 with ``:float32``. A scale is at least 1e-5, as in PMX:
        numbers much smaller than that are lost. If a scale is beyond its type, its group is undefined.

        ``"kivi4"``, ``"kivi2"``: uint4 or uint2, by channel for keys, whose outliers are in few channels,
        and along tokens for values.

        ``"fp8"`` (e4m3) or ``"e5m2"``: floats of 8 bits, times 1 or `scale`. With ``:g32`` each group has a
        scale, the largest magnitude divided by the largest code.

        ``"q8_0"``, ``"q4_0"``: ggml's blocks of 32 elements.

        ``"K=int8:g32,V=int4:g32"``: one format for keys, another one for values.

        ``+hadamard``, ``+hadamard:64`` (in blocks), ``+llama.cpp`` or ``+vllm`` after any of them rotates
        rows before they are stored, which spreads outliers over all channels; queries and outputs are rotated
        to match (see `kvkit.formats.rotate`). Unquantized tokens are also rotated, and rounded again.
    scale : float or tuple of float, optional
        A constant scale for e4m3 and e5m2, as engines use it: a number, or one for each head.

    Examples
    --------
    >>> from kvkit.cache import QuantSpec
    >>> QuantSpec("uint2:g16").bytes_per_token(head_dim=64)
    32.0
    >>> QuantSpec("int4:g32+hadamard").bytes_per_token(head_dim=64)
    36.0
    """

    format: str = "kivi4"
    _: KW_ONLY
    scale: float | tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.scale, list):
            object.__setattr__(self, "scale", tuple(self.scale))  # a field of a frozen class
        for is_value in (False, True):
            self.of_side(is_value)

    def of_side(self, is_value: bool) -> CodeSpec:
        """Return how keys, or values, are stored."""
        return code_spec(self.format, is_value, self.scale)

    def bytes_per_token(self, head_dim: int) -> float:
        """Return the bytes of an encoded token of a head, with scales: the mean of keys and values."""
        head_dim = integer("head_dim", head_dim, 1)
        return sum(self.of_side(side).bytes_per_token(head_dim) for side in (False, True)) / 2


def code_spec(text: Any, is_value: bool, scale: Any = None) -> CodeSpec:
    """Return how a layer stores keys or values in a format of the grammar of all formats."""
    if not isinstance(text, str):
        raise argument_error("format", "a format such as 'int8:g32', 'kivi4' or 'fp8'", describe(text))
    text = side_format(text, is_value)
    name, plus, rotation = text.partition("+")
    if ALIASES.get(name, name) in map(str, FLOATS):
        raise argument_error("format", f"{WANTED}; a DynamicCache stores floats", repr(text))
    side = formats_named(name)[is_value]
    name, cell = side.name.partition(":")[0], str(side.cell)
    turned = rotation if plus else None
    rotation_named(turned)
    element = STORED.get(name)
    if scale is not None:
        scales = scale if isinstance(scale, tuple) else (scale,)
        for number in scales or (0,):  # no scales at all are as wrong as a scale of 0
            if not finite_number("scale", number) > 0:
                raise argument_error("scale", "numbers above 0", repr(scale))
        if element is None or not element.minifloat:
            raise argument_error("scale", "None, because codes have computed scales", repr(scale))
    if element is not None and element.minifloat and side.per in ("", "group"):
        scale = 1.0 if scale is None and not side.per else scale
        return CodeSpec(format=name, group=side.group, param_dtype=cell, scale=scale, rotation=turned)
    if element is not None and element.block:
        return CodeSpec(format=name, rotation=turned)
    known = (
        side.rule in SCHEME_OF
        and side.per in AXIS_OF
        and side.code.bits in (8, 4, 2)
        and cell in PARAM_DTYPES
    )
    if not known or cell not in PARAM_DTYPES or not side.group:
        raise argument_error("format", WANTED, repr(text))
    return CodeSpec(
        side.code.bits, SCHEME_OF[side.rule], AXIS_OF[side.per], side.group, cell, rotation=turned
    )
