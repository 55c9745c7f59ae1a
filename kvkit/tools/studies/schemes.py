"""Find the schemes of `study`, by name, in a Python file, or as objects."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvkit import formats
from kvkit.cache.layers.quant_spec import code_spec
from kvkit.errors import KvkitError, argument_error, brief, describe
from kvkit.formats.known import ALIASES
from kvkit.formats.mixes import Mix, mix_named, side_format, split_formats
from kvkit.formats.schemes import REGISTERED, check_scheme, schemes_named

# Those among which a mix is chosen, if none are named: all are stored by a `QuantizedCache`.
MIXED = "kivi2,int4:g32,int4:g32+hadamard,kivi4,q4_0,q8_0,int8:g8"
DEFAULT = "fp8,int8:g8,int4:g32,int4:g32+hadamard,q8_0,q4_0"  # those that fit the heads, if none are named
EXACT = {str(fmt): fmt for fmt in formats.FLOATS}


@dataclass(frozen=True)
class Cast:
    """Rounds numbers to a float type, as a scheme."""

    name: str
    dtype: np.dtype
    whole = False
    by_token = True

    def encode(self, x: np.ndarray) -> dict[str, np.ndarray]:
        """Round numbers to the float type."""
        with np.errstate(over="ignore"):
            return {"codes": x.astype(self.dtype)}

    def decode(self, arrays: dict[str, np.ndarray]) -> np.ndarray:
        """Convert the numbers to float32."""
        return arrays["codes"].astype(np.float32)


@dataclass(frozen=True)
class MixedScheme:
    """Stands for the schemes that a mix names for layers."""

    mix: Mix
    is_value: bool


def of_layer(
    schemes: Sequence[Any], i: int, num_layers: int | None, numbers: Sequence[int] | None = None
) -> tuple[Any, ...]:
    """Return the schemes of one layer, the i-th of `numbers`, for those that mixes stand for."""
    found = []
    for scheme in schemes:
        if isinstance(scheme, MixedScheme):
            known = range(num_layers or 0) if numbers is None else numbers
            format = scheme.mix.of_numbers(known, num_layers)[i][scheme.is_value]
            scheme = key_and_value_schemes(format)[scheme.is_value]
        found.append(scheme)
    return tuple(found)


def key_and_value_schemes(text: Any) -> tuple[Any, ...]:
    """Return (scheme of keys, scheme of values) for "int4:g32+hadamard", "mine.py:Scheme", or an object.

    A mix that names layers is two of `MixedScheme`.
    """
    if not isinstance(text, str):
        instance = make_instance(text, text.__name__) if isinstance(text, type) else text
        return (check_scheme(instance, name_of(text)),) * 2
    if text in REGISTERED:
        return schemes_named(text)
    mix = mix_named(text)
    if mix.by_layer:
        return MixedScheme(mix, False), MixedScheme(mix, True)
    if mix.text.startswith("K="):
        return tuple(key_and_value_schemes(side_format(mix.text, value))[value] for value in (False, True))
    text = mix.text
    path, _, name = text.rpartition(":")
    if path.endswith(".py"):
        return (check_scheme(make_instance(load_object(path, name, "class"), text), text),) * 2
    word = re.split("[:+]", text)[0]
    format = ALIASES.get(word, word)
    if format in EXACT and text == word:
        return (Cast(text, EXACT[format].dtype),) * 2
    return schemes_named(format + text.removeprefix(word))


def load_object(path: str, name: str, kind: str) -> Any:
    """Load a class or a function of a Python file; `kind` is "class" or "function"."""
    word = {"class": "scheme", "function": "scorer"}[kind]
    if not Path(path).is_file():
        raise argument_error(word, f"a Python file and a {kind} in it, FILE.py:NAME", brief(path))
    spec = importlib.util.spec_from_file_location(f"kvkit_{word}_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise argument_error(word, "a Python file", brief(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        wanted = "a Python file that runs"
        raise argument_error(f"{word} {brief(path)}:{brief(name)}", wanted, error_in_words(error)) from error
    found = getattr(module, name, None)
    if not (isinstance(found, type) if kind == "class" else callable(found)):
        raise argument_error(f"{word} {brief(path)}", f"a {kind} {brief(repr(name))}", "none of the name")
    return found


def make_instance(cls: type, name: str) -> Any:
    """Construct an object of a class without arguments."""
    try:
        return cls()
    except Exception as error:
        wanted = "a class whose constructor needs no arguments"
        raise argument_error(f"scheme {brief(name)}", wanted, error_in_words(error)) from error


def error_in_words(error: BaseException) -> str:
    """Return the type and the text of an error."""
    return f"{type(error).__name__} ({brief(error)})"


def name_of(scheme: Any) -> str:
    """Return the attribute `name` of a class or object, or else the name of the class."""
    return str(getattr(scheme, "name", getattr(scheme, "__name__", type(scheme).__name__)))


def list_schemes(schemes: str | Sequence[Any]) -> list[tuple[str, Any, Any]]:
    """Return (name, scheme of keys, scheme of values) of each scheme."""
    items = split_formats(schemes) if isinstance(schemes, str) else list(schemes)
    items = [item.strip() if isinstance(item, str) else item for item in items]
    named = [(item if isinstance(item, str) else name_of(item), item) for item in items if item]
    found = [(name, *key_and_value_schemes(item)) for name, item in named]
    if not found:
        wanted = "one or more, as in 'fp8,int8:g8,int4:g32+hadamard'"
        raise argument_error("schemes", wanted, describe(schemes))
    if len({name for name, *_ in found}) < len(found):
        raise argument_error("schemes", "each once", ", ".join(name for name, *_ in found))
    return found


def mixable_schemes(names: Sequence[str]) -> list[str]:
    """Return the names of formats that layers of a `QuantizedCache` store, and so may be in a mix."""
    found = []
    for name in names:
        try:
            for is_value in (False, True):
                code_spec(name, is_value)
            found.append(name)
        except KvkitError:
            continue
    if not found:
        wanted = "formats that a QuantizedCache stores, for a mix"
        raise argument_error("schemes", wanted, ", ".join(names))
    return found


def fitting_schemes(
    heads: set[tuple[int, int, bool]], schemes: str = DEFAULT
) -> tuple[list[str], tuple[str, ...]]:
    """Return (schemes that fit, notes on the others) for sides of (heads, dim, whether values)."""
    names, notes = [], []
    for name, *pair in list_schemes(schemes):
        try:
            for count, dim, is_value in sorted(heads):
                scheme = pair[is_value]
                scheme.encode(np.ones((scheme.step, count, dim), np.float32))
            names.append(name)
        except KvkitError as error:
            notes.append(f"{name} is left out ({str(error).partition(': ')[2]})")
    return names, tuple(notes)
