"""How a quantized layer codes its keys, or its values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvkit.checks.values import choice, integer
from kvkit.checks.words import wrong
from kvkit.formats import BY_NAME

AXES, SCHEMES, CELLS = ("token", "channel"), ("sym", "asym"), ("float16", "float32")


@dataclass(frozen=True)
class QuantSpec:
    """How a quantized layer codes its keys, or its values.

    Parameters
    ----------
    bits : int
        Of a code: 8, 4 or 2.
    scheme : str
        ``"sym"``: codes times a scale, as in PMX. ``"asym"``: codes from 0 times a scale, plus a minimum.
    axis : str, optional
        ``"token"``: a group is `group` neighbouring elements of a token, which must divide the head size.
        ``"channel"``: one element of each of `group` consecutive tokens (KIVI). By default channel for
        keys, whose outliers lie in few channels, and token for values.
    group : int
        Elements that share a scale.
    param_dtype : str
        ``"float16"`` or ``"float32"``: the dtype of scales and minima.

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

    def __post_init__(self) -> None:
        choice("bits", self.bits, (8, 4, 2))
        integer("group", self.group, 1)
        legal = ("scheme", SCHEMES), ("axis", (None, *AXES)), ("param_dtype", CELLS)
        for name, words in legal:
            if getattr(self, name) not in words:
                raise wrong(name, " or ".join(map(repr, words)), repr(getattr(self, name)))

    def bytes_per_token(self, head_dim: int) -> float:
        """Bytes of a coded token and head: its codes, and its part of scales and minima."""
        cells = (1 if self.scheme == "sym" else 2) * BY_NAME[self.param_dtype].bytes(1)
        return head_dim * self.bits / 8 + head_dim * cells / self.group
