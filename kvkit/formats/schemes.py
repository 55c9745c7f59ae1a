"""Resolve names of schemes. A scheme encodes keys or values with numpy: a format, or a registered class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvkit.errors import argument_error, brief, describe
from kvkit.formats import packing
from kvkit.formats.coding import decode, encode
from kvkit.formats.elements import FLOAT16
from kvkit.formats.known import NAMED, Format, named
from kvkit.formats.mixes import side_format
from kvkit.formats.rotations import rotate, rotation_named
from kvkit.typed import Array

FORMAT_PAIRS = {  # {an engine's name: (format of keys, format of values)}
    **{f"openvino_u{bits}": (f"openvino_key_u{bits}", f"openvino_value_u{bits}") for bits in (8, 4)},
    "turboquant_k8v4": ("e4m3", "turbo_v4"),
    "turboquant_4bit_nc": ("turbo_k4_nc", "turbo_v4"),
    "turboquant_k3v4_nc": ("turbo_k3_nc", "turbo_v4"),
    "turboquant_3bit_nc": ("turbo_k3_nc", "turbo_v3"),
}
REGISTERED: dict[str, Any] = {}


def scheme(name: str) -> Callable[[type], type]:
    """Register a class as a scheme.

    A scheme encodes keys or values, float32 [tokens, heads, dim], and decodes them:
    ``encode(x) -> dict of arrays`` and ``decode(arrays) -> float32 [tokens, heads, dim]``. A call of `encode`
    gets a part of the tokens, or all tokens if the class has ``whole = True``. `kvkit.tools.study` takes the
    name.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.tools import scheme, study
    >>> @scheme("half")
    ... class Half:
    ...     def encode(self, x):
    ...         return {"codes": x.astype(np.float16)}
    ...     def decode(self, arrays):
    ...         return arrays["codes"].astype(np.float32)
    >>> keys = np.ones((1, 8, 2, 16), np.float32)
    >>> study({"key": keys, "value": keys}, ["half"]).summary[0].bits
    16.0
    """

    def register(cls: type) -> type:
        check_scheme(cls(), name)
        REGISTERED[name] = cls
        return cls

    return register


def check_scheme(instance: Any, name: str) -> Any:
    """Return the instance; raise unless it has the methods of a scheme."""
    if not all(callable(getattr(instance, method, None)) for method in ("encode", "decode")):
        raise argument_error("scheme", f"methods encode and decode, for {name}", describe(instance))
    return instance


@dataclass(frozen=True)
class Coded:
    """Uses a format as a scheme, with or without a rotation. Tokens that fill no group stay uncoded.

    `kvkit.tools.study` encodes a context in parts. It asks a scheme with `whole` to look at all tokens first
    (`over`), and gives each part a multiple of `step` tokens.
    """

    name: str
    format: Format
    rotation: str | None = None
    value: bool = False  # whether rows are values, not keys
    scale: float | None = None  # for formats that take one from the caller
    extremes: Any = None  # [2, heads, dim]: each channel's minimum and maximum over all tokens; see `over`

    @property
    def whole(self) -> bool:
        """Return whether scales depend on all tokens, whose extremes are not known yet."""
        form = self.format
        shared = form.per in ("tensor", "head") or (form.per == "channel" and not form.group)
        computes_tensor_scale = form.computes_whole and self.scale is None
        return self.extremes is None and (shared or computes_tensor_scale)

    def over(self, parts: Iterable[Array]) -> Coded:
        """Return a scheme that encodes each part [tokens, heads, dim] with the scales of all parts."""
        if not self.whole:
            return self
        low: Any = np.inf
        high: Any = -np.inf
        for x in parts:
            x = self.rotated(x)
            low, high = np.minimum(low, x.min(0)), np.maximum(high, x.max(0))
        return replace(self, extremes=np.stack((low, high)))

    def rotated(self, x: Array) -> Array:
        """Return rows as the scheme stores them."""
        return rotate(x, self.rotation, value=self.value) if self.rotation else x

    @property
    def by_token(self) -> bool:
        """Return whether a token of a head has the same codes and scales whichever others are encoded."""
        shared = self.format.per in ("tensor", "head", "channel") or self.format.computes_whole
        return not shared and self.step == 1 and self.extremes is None

    @property
    def step(self) -> int:
        """Return how many tokens are encoded together."""
        in_byte = 8 // self.format.code.bits if self.format.along == "tokens" else 1
        return max(self.format.group if self.format.per == "channel" else 1, in_byte)

    def encode(self, x: Array) -> dict[str, Array]:
        """Return arrays of a part of the tokens: those of `encode`, and "rest", the tokens left uncoded."""
        x = self.rotated(x)
        if self.extremes is not None:
            # Scales depend only on extremes: with these two rows before it, each part gets the scales of all.
            arrays = encode(np.concatenate((self.extremes, x)), self.format, scale=self.scale)
            return {
                name: array if name in self.shared else array[len(self.extremes) :]
                for name, array in arrays.items()
            } | {"rest": x[:0]}
        fit = len(x) // self.step * self.step
        return (encode(x[:fit], self.format, scale=self.scale) if fit else {}) | {"rest": x[fit:]}

    @property
    def shared(self) -> tuple[str, ...]:
        """Return the names of arrays that all parts share; "whole" is the tensor-wide scale."""
        return ("whole",) if self.format.per == "group" else ("scale", self.format.offset, "whole")

    def decode(self, arrays: Mapping[str, Array]) -> Array:
        """Return the tokens of an encoded part, rotated back."""
        arrays = dict(arrays)
        rest = arrays.pop("rest")
        x = np.concatenate((decode(arrays, self.format), rest)) if arrays else rest
        if self.rotation:
            x = rotate(x, self.rotation, what="output", value=self.value)
        return x

    def stored(self, arrays: Mapping[str, Array], bits: int, first: bool = True) -> int:
        """Count the bits of encoded arrays. An uncoded element has `bits` bits.

        Arrays that all parts share count for the first part only.
        """
        uncoded = arrays["rest"].size * bits
        skipped = {"rest"} if first or self.extremes is None else {"rest", *self.shared}
        return uncoded + 8 * sum(array.nbytes for name, array in arrays.items() if name not in skipped)

    def codes(self, arrays: Mapping[str, Array]) -> Array | None:
        """Return indices into the code table, uint8 [coded tokens, heads, elements]; None without codes."""
        if "codes" not in arrays:
            return None
        stored = np.ascontiguousarray(arrays["codes"]).view(np.uint8)
        if self.format.order:
            codes = packing.split_blocks(self.format, stored)["codes"]
            return codes.reshape(*stored.shape[:-1], -1)
        return packing.unpack_array(self.format, stored)

    def others(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return the arrays beside the codes and the tokens left uncoded; a block is split into its parts."""
        if "codes" in arrays and self.format.order:
            parts = packing.split_blocks(self.format, np.ascontiguousarray(arrays["codes"]).view(np.uint8))
            return {name: array for name, array in parts.items() if name not in ("codes", "high")}
        skipped = {"codes", "rest", *(() if self.extremes is None else self.shared)}
        return {name: np.asarray(array) for name, array in arrays.items() if name not in skipped}


def schemes_named(text: str, scale: Any = None) -> tuple[Any, Any]:
    """Return (scheme of keys, scheme of values) for the name of a class, or a format: "int4:g32+hadamard".

    `scale` is the scale of formats that take a number.
    """
    if text.startswith("K="):
        sides = side_format(text, False), side_format(text, True)
        return schemes_named(sides[0], scale)[0], schemes_named(sides[1], scale)[1]
    if text in REGISTERED:
        registered = REGISTERED[text]()
        return registered, registered
    format, plus, rotation = text.partition("+")
    if plus:
        rotation_named(rotation)
    key, value = formats_named(format)
    if scale is not None and key.rule not in ("given", "nvfp4"):
        raise argument_error("scale", f"None, for {text}", describe(scale))
    rotated = rotation or None
    return Coded(text, key, rotated, scale=scale), Coded(text, value, rotated, value=True, scale=scale)


def formats_named(text: str) -> tuple[Format, Format]:
    """Return (format of keys, format of values), which differ for "kivi2" or "q8_0/kivi4:g8"."""
    if "@" in text:
        wanted = "a format of one layer (a QuantizedCache takes formats of layers)"
        raise argument_error("format", wanted, brief(repr(text)))
    sides = side_format(text, False), side_format(text, True)
    if sides != (text, text):
        return formats_named(sides[0])[0], formats_named(sides[1])[1]
    if text in FORMAT_PAIRS:
        return named(FORMAT_PAIRS[text][0]), named(FORMAT_PAIRS[text][1])
    if text.startswith("kivi") and text.split(":")[0] not in NAMED:
        sides = text.replace("kivi", "kivi_key", 1), text.replace("kivi", "kivi_value", 1)
    return cache_format(sides[0]), cache_format(sides[1])


def cache_format(text: str) -> Format:
    """Return a format by its name. Scales of kvkit's own codes are float16, as in its caches."""
    format = named(text)
    kvkits_own = format.source == "kvkit" and format.rule in ("pmx", "kvkit_minimum", "given") and format.per
    names_scale_type = "float" in text  # as "int8:float32" does
    return replace(format, cell=FLOAT16) if kvkits_own and not names_scale_type else format
