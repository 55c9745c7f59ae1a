"""The coding of keys or values in a quantized layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kvkit.checks.values import choice, finite_number, integer
from kvkit.errors import argument_error
from kvkit.formats import rotation_named
from kvkit.formats.elements import BY_NAME, STORED
from kvkit.formats.schemes import schemes_named

AXES, SCHEMES, CELLS = ("token", "channel"), ("sym", "asym"), ("float16", "float32")


@dataclass(frozen=True)
class QuantSpec:
    """The coding of keys, or of values, in a quantized layer.

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
    format : str, optional
        In the place of codes of `bits` and their `scheme`: ``"e4m3"`` or ``"e5m2"``, floats of 8 bits times
        a scale, the largest magnitude of `group` neighbouring elements over the largest code; or ggml's
        blocks of 32 elements, ``"q8_0"`` or ``"q4_0"``. Or a scheme: the name of a class of one's own (see
        `kvkit.formats.scheme`), or any other format, as ``"mxfp4"`` or ``"int4:g32:channel+hadamard"``, whose
        scale is not found from all tokens. It is given `group` tokens at a time, goes through numpy, and is
        slower: each step decodes the whole layer.
    scale : float or tuple of float, optional
        Of e4m3 and e5m2, what codes are multiplied with, as engines have it: 1, or another number, or one for
        each head; no scale is found or stored then. Likewise a number for ``"ort_int8"`` and ``"ort_int4"``,
        and for all of ``"nvfp4"``, which ask for it.
    rotation : str, optional
        What turns rows before they are stored, and queries and outputs, so that no channel stands out:
        ``"hadamard"``, in blocks ``"hadamard:64"``, ``"llama.cpp"`` or ``"vllm"`` as those do (see
        `kvkit.formats.rotate`). Tokens that are not coded are turned too, and rounded to the data again.

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
        if self.format is not None and not isinstance(self.format, str):
            raise argument_error(
                "format", f"one of {', '.join(STORED)}, the name of a scheme, or None", self.format
            )
        if self.format and self.axis == "channel":
            raise argument_error("axis", f"'token', for format '{self.format}'", "'channel'")
        rotation_named(self.rotation)
        if self.scale is not None:
            self._check_scale()
        if self.by_scheme:
            self._check_scheme()

    def _check_scale(self) -> None:
        scales = self.scale if isinstance(self.scale, (tuple, list)) else (self.scale,)
        for scale in scales:
            if not finite_number("scale", scale) > 0:
                raise argument_error("scale", "numbers above 0", scale)
        element = STORED.get(str(self.format))
        if not scales or not (element.minifloat if element else self.by_scheme):
            raise argument_error("scale", "None: codes have scales that are found", repr(self.scale))
        if isinstance(self.scale, list):  # of a file
            object.__setattr__(self, "scale", tuple(self.scale))

    def _check_scheme(self) -> None:
        for scheme in self.schemes():
            step, format = getattr(scheme, "step", 1), getattr(scheme, "format", None)
            if self.scale is None and getattr(format, "asks", False):
                raise argument_error("scale", f"a number, for {self.format!r}", "None")
            if getattr(scheme, "whole", False):
                found = f"{self.format!r}, which sees all at once"
                raise argument_error("format", "a scheme of some tokens at a time", found)
            if self.group % step:
                wanted = f"a multiple of {step}, the tokens that {self.format!r} codes together"
                raise argument_error("group", wanted, self.group)
        if self.rotation is not None:
            raise argument_error(
                "rotation", f"None, for {self.format!r}, which may say its own", repr(self.rotation)
            )

    @property
    def by_scheme(self) -> bool:
        """Return whether encoding and decoding go through numpy."""
        return self.format is not None and self.format not in STORED

    def schemes(self) -> tuple[Any, Any]:
        """Return the schemes of keys and of values."""
        return schemes_named(str(self.format), self.scale)

    def bytes_per_token(self, head_dim: int) -> float:
        """Return the bytes of a coded token and head with its scales; by a scheme, the mean of both sides."""
        if self.by_scheme:
            x = np.linspace(-1, 1, self.group * head_dim, dtype=np.float32).reshape(self.group, 1, head_dim)
            coded = [array for scheme in self.schemes() for array in scheme.encode(x).values()]
            return sum(array.nbytes for array in coded) / 2 / self.group
        scale = BY_NAME[self.param_dtype].bytes(1)
        if self.format:
            element = STORED[self.format]
            apart = not element.block and self.scale is None
            return float(element.bytes(head_dim) + apart * head_dim * scale / self.group)
        scales = (1 if self.scheme == "sym" else 2) * scale
        return head_dim * self.bits / 8 + head_dim * scales / self.group
