"""Find schemes by name: registered classes, and formats with or without a rotation, in numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvkit.errors import argument_error, describe
from kvkit.formats import packing
from kvkit.formats.coding import decode, encode
from kvkit.formats.elements import FLOAT16
from kvkit.formats.known import NAMED, Format, named
from kvkit.formats.rotations import rotate, rotation_named
from kvkit.typed import Array

PAIRS = {  # names of engines for formats of keys and of values
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
    ``encode(x) -> dict of arrays`` and ``decode(arrays) -> float32 [tokens, heads, dim]``. It sees some
    tokens at a time, unless it has ``whole = True``. `kvkit.tools.study` takes it by its name, and so does
    `kvkit.cache.QuantizedCache`, as ``QuantSpec(format=name)``.

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

    def register(made: type) -> type:
        check_scheme(made(), name)
        REGISTERED[name] = made
        return made

    return register


def check_scheme(made: Any, name: str) -> Any:
    if not callable(getattr(made, "encode", None)) or not callable(getattr(made, "decode", None)):
        raise argument_error("scheme", f"methods encode and decode, for {name}", describe(made))
    return made


@dataclass(frozen=True)
class Coded:
    """Uses a format as a scheme, with or without a rotation. Tokens that fill no group stay uncoded."""

    name: str
    format: Format
    rotation: str | None = None
    value: bool = False
    scale: float | None = None  # for formats that take one
    ends: Any = None  # [2, heads, dim] of tokens that `over` has seen: each channel's extremes

    @property
    def whole(self) -> bool:
        """Return whether a scale spans all tokens, and `over` has not seen them yet."""
        of_whole = self.format.finds_whole and self.scale is None
        return self.ends is None and (
            of_whole
            or self.format.per in ("tensor", "head")
            or (self.format.per == "channel" and not self.format.group)
        )

    def over(self, parts: Iterable[Array]) -> Coded:
        """Return a scheme that codes parts of these tokens [tokens, heads, dim] with the scales of all."""
        if not self.whole:
            return self
        low: Any = np.inf
        high: Any = -np.inf
        for x in parts:
            x = self.turned(x)
            low, high = np.minimum(low, x.min(0)), np.maximum(high, x.max(0))
        return replace(self, ends=np.stack((low, high)))

    def turned(self, x: Array) -> Array:
        return rotate(x, self.rotation, value=self.value) if self.rotation else x

    @property
    def step(self) -> int:
        """Return how many tokens are coded together."""
        by_tokens = 8 // self.format.code.bits if self.format.along == "tokens" else 1
        return max(self.format.group if self.format.per == "channel" else 1, by_tokens)

    def encode(self, x: Array) -> dict[str, Array]:
        x = self.turned(x)
        if self.ends is not None:
            # Scales depend only on extremes, so these two tokens give every part the scales of the whole.
            arrays = encode(np.concatenate((self.ends, x)), self.format, scale=self.scale)
            return {
                name: array if name in self.shared else array[len(self.ends) :]
                for name, array in arrays.items()
            } | {"rest": x[:0]}
        fit = len(x) // self.step * self.step
        return (encode(x[:fit], self.format, scale=self.scale) if fit else {}) | {"rest": x[fit:]}

    @property
    def shared(self) -> tuple[str, ...]:
        """Return the names of arrays that all parts share."""
        names = {"scale", self.format.beside, "whole"}
        return ("whole",) if self.format.per == "group" else tuple(names)

    def decode(self, arrays: Mapping[str, Array]) -> Array:
        arrays = dict(arrays)
        rest = arrays.pop("rest")
        x = np.concatenate((decode(arrays, self.format), rest)) if arrays else rest
        if self.rotation:
            x = rotate(x, self.rotation, what="output", value=self.value)
        return x

    def stored(self, arrays: Mapping[str, Array], bits: int, first: bool = True) -> int:
        """Count the bits of arrays. Uncoded elements have `bits` bits; arrays that parts share count once."""
        rest = arrays["rest"].size * bits
        skipped = {"rest"} if first or self.ends is None else {"rest", *self.shared}
        return rest + 8 * sum(array.nbytes for name, array in arrays.items() if name not in skipped)

    def codes(self, arrays: Mapping[str, Array]) -> Array | None:
        """Return indices into the table, uint8 [coded tokens, heads, elements]; None without codes."""
        if "codes" not in arrays:
            return None
        stored = np.ascontiguousarray(arrays["codes"]).view(np.uint8)
        if self.format.order:
            codes = packing.split_blocks(self.format, stored)["codes"]
            return codes.reshape(*stored.shape[:-1], -1)
        return packing.unpack_array(self.format, stored)


def schemes_named(text: str, scale: Any = None) -> tuple[Any, Any]:
    """Return the schemes of keys and of values: a registered one, or a format as in "int4:g32+hadamard".

    `scale` is a number for formats that take one.
    """
    if text in REGISTERED:
        made = REGISTERED[text]()
        return made, made
    format, turned, rotation = text.partition("+")
    if turned:
        rotation_named(rotation)
    key, value = formats_named(format)
    if scale is not None and key.find not in ("given", "blocks16"):
        raise argument_error("scale", f"None, for {text}", describe(scale))
    rotated = rotation or None
    return Coded(text, key, rotated, scale=scale), Coded(text, value, rotated, value=True, scale=scale)


def formats_named(text: str) -> tuple[Format, Format]:
    """Return the formats of keys and values: they differ for "kivi2", "turboquant_k3v4_nc", "q8_0/q4_0"."""
    if text in PAIRS:
        return named(PAIRS[text][0]), named(PAIRS[text][1])
    if "/" in text:
        sides = text.split("/", 1)
        return cache_format(sides[0]), cache_format(sides[1])
    if text.startswith("kivi") and text.split(":")[0] not in NAMED:
        key, value = (cache_format(text.replace("kivi", f"kivi_{side}", 1)) for side in ("key", "value"))
        return key, value
    return cache_format(text), cache_format(text)


def cache_format(text: str) -> Format:
    """Return a format by its name; kvkit's own codes get scales of 16 bits, as in its caches."""
    made = named(text)
    own = made.source == "kvkit" and made.find in ("pmx", "span")
    return named(made, cell=FLOAT16) if own and "float" not in text else made
