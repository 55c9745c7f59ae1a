"""Define `QuantSpec`, which says how a quantized layer encodes keys or values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from kvkit.checks.values import choice, finite_number, integer
from kvkit.errors import argument_error
from kvkit.formats import rotation_named
from kvkit.formats.elements import BY_NAME, STORED
from kvkit.formats.known import ALIASES

AXES, SCHEMES, CELLS = ("token", "channel"), ("sym", "asym"), ("float16", "float32")


@dataclass(frozen=True)
class QuantSpec:
    """Says how a quantized layer encodes keys or values.

    Parameters
    ----------
    bits : int
        Bits of a code: 8, 4 or 2.
    scheme : str
        ``"sym"``: codes times a scale, as in PMX. ``"asym"``: codes from 0 times a scale, plus a minimum.
    axis : str, optional
        ``"token"``: a group is `group` neighbouring elements of a token; `group` must divide the head size,
        except that 32, the default, stands for the greatest common divisor of 32 and the head size.
        ``"channel"``: a group is one element of each of `group` consecutive tokens (KIVI). By default channel
        for keys, whose outliers are in few channels, and token for values.
    group : int
        Elements that share a scale.
    param_dtype : str
        ``"float16"`` or ``"float32"``: the dtype of scales and minima. A scale is at least 1e-5, as in PMX:
        numbers much smaller than that are lost. If a scale is beyond float16, its group is undefined.
    format : str, optional
        Replaces `bits` and `scheme`. ``"e4m3"`` (alias ``"fp8"``) or ``"e5m2"``: 8-bit floats times a scale,
        which is the largest magnitude of `group` neighbouring elements divided by the largest code.
        ``"q8_0"`` or ``"q4_0"``: ggml's blocks of 32 elements. Attention reads these in place.
        ``kvkit study`` shows what any other format, or a scheme of your own, does to a cache.
    scale : float or tuple of float, optional
        A constant scale for e4m3 and e5m2, as engines use it: a number, or one for each head. Scales are then
        neither computed nor stored.
    rotation : str, optional
        The rotation of rows before they are stored, which spreads outliers over all channels; queries and
        outputs are rotated to match: ``"hadamard"``, ``"hadamard:64"`` (in blocks), ``"llama.cpp"`` or
        ``"vllm"`` (see `kvkit.formats.rotate`). Unquantized tokens are also rotated, and rounded again.

    Examples
    --------
    >>> from kvkit.cache import QuantSpec
    >>> QuantSpec(bits=2, group=16).bytes_per_token(head_dim=64)
    32.0
    """

    bits: Literal[8, 4, 2] = 4
    scheme: Literal["sym", "asym"] = "asym"
    axis: Literal["token", "channel"] | None = None
    group: int = 32
    param_dtype: Literal["float16", "float32"] = "float16"
    format: str | None = None
    rotation: str | None = None
    scale: float | tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        choice("bits", self.bits, (8, 4, 2))
        integer("group", self.group, 1)
        legal = ("scheme", SCHEMES), ("axis", (None, *AXES)), ("param_dtype", CELLS)
        for name, words in legal:
            if getattr(self, name) not in words:
                raise argument_error(name, " or ".join(map(repr, words)), repr(getattr(self, name)))
        if self.format is not None:
            known = ALIASES.get(self.format, self.format) if isinstance(self.format, str) else None
            if known not in STORED:
                in_place = f"one of {', '.join(STORED)}, which attention reads in place, or None"
                wanted = f"{in_place} (`kvkit study` shows what other formats do to a cache)"
                raise argument_error("format", wanted, repr(self.format))
            object.__setattr__(self, "format", known)  # a field of a frozen class
        if self.format and self.axis == "channel":
            raise argument_error("axis", f"'token', for format '{self.format}'", "'channel'")
        rotation_named(self.rotation)
        if self.scale is not None:
            self._check_scale()

    def _check_scale(self) -> None:
        scales = self.scale if isinstance(self.scale, (tuple, list)) else (self.scale,)
        for scale in scales or (0,):  # no scales at all are as wrong as a scale of 0
            if not finite_number("scale", scale) > 0:
                raise argument_error("scale", "numbers above 0", repr(self.scale))
        element = STORED.get(str(self.format))
        if not (element and element.minifloat):
            raise argument_error("scale", "None, because codes have computed scales", repr(self.scale))
        if isinstance(self.scale, list):  # from JSON
            object.__setattr__(self, "scale", tuple(self.scale))

    @property
    def group_adapts(self) -> bool:
        """Return whether `group` adapts to the head size: it is the default, and along a token."""
        return not self.format and self.axis != "channel" and self.group == QuantSpec.group

    def bytes_per_token(self, head_dim: int) -> float:
        """Return the bytes of an encoded token of a head, with scales.

        Where keys and values differ, without an axis, it is their mean.
        """
        head_dim = integer("head_dim", head_dim, 1)
        scale = BY_NAME[self.param_dtype].bytes(1)
        if self.format:
            element = STORED[self.format]
            has_scales = not element.block and self.scale is None  # besides the codes
            self._check_group(head_dim, has_scales)
            return float(element.bytes(head_dim) + has_scales * head_dim * scale / self.group)
        self._check_group(head_dim, self.axis != "channel" and not self.group_adapts)
        cell = (1 if self.scheme == "sym" else 2) * scale
        groups = {"channel": self.group, "token": self.token_group(head_dim)}
        per_element = [cell / groups[axis] for axis in ([self.axis] if self.axis else groups)]
        return head_dim * (self.bits / 8 + sum(per_element) / len(per_element))

    def _check_group(self, head_dim: int, by_token: bool) -> None:
        if by_token and head_dim % self.group:
            raise argument_error("head_dim", f"a multiple of {self.group}, the group of a scale", head_dim)

    def token_group(self, head_dim: int) -> int:
        """Return the largest number of a token's elements that divides `group` and the head size."""
        return math.gcd(self.group, head_dim)
