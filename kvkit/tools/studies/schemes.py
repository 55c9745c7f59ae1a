"""Schemes: formats by name, with rotations; and classes of one's own."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvkit import formats
from kvkit.checks.words import describe, wrong
from kvkit.errors import brief
from kvkit.formats import Format

ALIASES = {"fp8": "e4m3", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
EXACT = {str(fmt): fmt for fmt in formats.FLOATS}
REGISTERED: dict[str, Any] = {}


def scheme(name: str) -> Callable[[type], type]:
    """Register a class as a scheme.

    A scheme turns keys or values, float32 [tokens, heads, dim], into what is stored and back:
    ``encode(x) -> dict of arrays`` and ``decode(arrays) -> float32 [tokens, heads, dim]``. It sees some
    tokens at a time, unless it has ``whole = True``.

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

    def register(made):
        checked(made(), name)
        REGISTERED[name] = made
        return made

    return register


def checked(made: Any, name: str) -> Any:
    if not callable(getattr(made, "encode", None)) or not callable(getattr(made, "decode", None)):
        raise wrong("scheme", f"methods encode and decode, for {name}", describe(made))
    return made


@dataclass(frozen=True)
class Coded:
    """A format as a scheme, rotated or not; tokens that fill no group of a channel stay as they are."""

    name: str
    format: Format
    rotation: str | None = None
    value: bool = False

    @property
    def whole(self) -> bool:
        """Whether a scale spans all tokens."""
        spans = self.format.per in ("tensor", "head") or self.format.find == "blocks16"
        return spans or (self.format.per == "channel" and not self.format.group)

    @property
    def step(self) -> int:
        """Tokens that are coded together."""
        by_tokens = 8 // self.format.code.bits if self.format.along == "tokens" else 1
        return max(self.format.group if self.format.per == "channel" else 1, by_tokens)

    def encode(self, x):
        if self.rotation:
            x = formats.rotate(x, self.rotation, value=self.value)
        fit = len(x) // self.step * self.step
        return (formats.encode(x[:fit], self.format) if fit else {}) | {"rest": x[fit:]}

    def decode(self, arrays):
        arrays = dict(arrays)
        rest = arrays.pop("rest")
        x = np.concatenate((formats.decode(arrays, self.format), rest)) if arrays else rest
        if self.rotation:
            x = formats.rotate(x, self.rotation, what="output", value=self.value)
        return x

    def stored(self, arrays, bits):
        """Bits of the arrays; what stays as it is has `bits` an element."""
        rest = arrays["rest"].size * bits
        return rest + 8 * sum(array.nbytes for name, array in arrays.items() if name != "rest")

    def codes(self, arrays):
        """Numbers of codes, from least to largest, of formats whose codes are an array."""
        if self.format.order or "codes" not in arrays:
            return None
        data = np.ascontiguousarray(arrays["codes"]).view(np.uint8)
        return self.format.code.table[formats.packing.from_arrays(self.format, data)]


@dataclass(frozen=True)
class Cast:
    """Numbers rounded to a float type."""

    name: str
    dtype: np.dtype
    whole = False

    def encode(self, x):
        return {"codes": x.astype(self.dtype)}

    def decode(self, arrays):
        return arrays["codes"].astype(np.float32)


def parsed(text: Any) -> tuple[Any, Any]:
    """The scheme of keys and that of values: of "int4:g32+hadamard", "mine.py:Scheme", or an object."""
    if not isinstance(text, str):
        made = checked(text() if isinstance(text, type) else text, getattr(text, "name", type(text).__name__))
        return made, made
    if text in REGISTERED:
        made = REGISTERED[text]()
        return made, made
    path, _, name = text.rpartition(":")
    if path.endswith(".py"):
        made = checked(loaded(path, name)(), text)
        return made, made
    told, _, rotation = text.partition("+")
    told = ":".join([ALIASES.get(word, word) for word in told.split(":")[:1]] + told.split(":")[1:])
    if told in EXACT and not rotation:
        cast = Cast(text, EXACT[told].dtype)
        return cast, cast
    if told.startswith("kivi") and told.split(":")[0] not in formats.NAMED:
        sides = [told.replace("kivi", f"kivi_{side}", 1) for side in ("key", "value")]
    else:
        sides = [told, told]
    if rotation:
        formats.rotation_named(rotation)
    key, value = (of_format(side) for side in sides)
    return Coded(text, key, rotation or None), Coded(text, value, rotation or None, value=True)


def of_format(text: str) -> Format:
    """A format by its name; kvkit's own codes have scales of 16 bits, as its caches have them."""
    made = formats.named(text)
    own = made.source == "kvkit" and made.find in ("pmx", "span")
    return formats.named(made, cell=formats.FLOAT16) if own and "float" not in text else made


def loaded(path: str, name: str) -> Any:
    """A class of a Python file."""
    if not Path(path).is_file():
        raise wrong("scheme", "a Python file and a class in it, FILE.py:NAME", brief(path))
    spec = importlib.util.spec_from_file_location(f"kvkit_scheme_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise wrong("scheme", "a Python file", brief(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if not isinstance(getattr(module, name, None), type):
        raise wrong("scheme", f"a class {brief(name)} in {brief(path)}", "none of the name")
    return getattr(module, name)


def listed(schemes: str | Sequence[Any]) -> list[tuple[str, Any, Any]]:
    """(name, scheme of keys, scheme of values) of each."""
    items = schemes.split(",") if isinstance(schemes, str) else list(schemes)
    items = [item.strip() if isinstance(item, str) else item for item in items]
    found = []
    for item in filter(None, items):
        name = (
            item
            if isinstance(item, str)
            else getattr(item, "name", getattr(item, "__name__", type(item).__name__))
        )
        found.append((str(name), *parsed(item)))
    if not found:
        raise wrong("schemes", "one or more, as in 'fp8,int8:g8,int4:g32+hadamard'", describe(schemes))
    if len({name for name, *_ in found}) < len(found):
        raise wrong("schemes", "each once", ", ".join(name for name, *_ in found))
    return found
