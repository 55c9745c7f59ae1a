"""Parse mixes: one text that says in which format each layer of a cache stores its keys and values.

    mix      = formats | "K=" formats ",V=" formats
    formats  = format | (format "@" layers "/")* format
    layers   = numbers and ranges with commas: 0,1,-1 or 2:6

"int8@0,1,-1/int4:g32" stores layers 0, 1 and the last as int8, and the others as int4 in groups of 32. The
last format has no layers if it is for all others. Without "@" a slash separates the formats of keys and of
values.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvkit.errors import argument_error, brief, describe

TWO_SIDES = re.compile(r"K=(?P<key>.+?),\s*V=(?P<value>.+)")
SIDE = re.compile(r"[KkVv]=")
SIDES_FORM = "keys, then values, as in 'K=int8:g32,V=int4:g32'"
# A number, or a range as in Python: 4, -1, 2:, :4, 1::2
PART = re.compile(r"(?P<begin>-?\d{1,6})?(?P<colon>:)?(?P<end>-?\d{1,6})?(?::(?P<step>\d{1,6}))?")
NUMBER = re.compile(r"[-:]?\d")  # how a part that names layers begins
FILE_END, FILE_KEY = ".json", "kvkit_mix"


def split_formats(text: str) -> list[str]:
    """Split a text at the commas between formats or mixes."""
    return join_mixes(text.split(","))


def join_mixes(parts: Iterable[str]) -> list[str]:
    """Return the parts between commas, with the parts of a mix joined again; empty ones are left out."""
    found: list[str] = []
    for part in filter(None, (part.strip() for part in parts)):
        last = found[-1] if found else ""
        is_value = part.startswith("V=") and last.startswith("K=") and ",V=" not in last
        if is_value or ("@" in last and NUMBER.match(part)):
            found[-1] = f"{last},{part}"
        else:
            found.append(part)
    return found


def side_format(text: str, is_value: bool) -> str:
    """Return the format of keys, or of values, that a text for both names: "K=int8,V=fp8" or "q8_0/q4_0"."""
    found = TWO_SIDES.fullmatch(text)
    if found is None:
        if SIDE.match(text):
            raise argument_error("format", SIDES_FORM, brief(repr(text)))
        formats, plus, rotation = text.partition("+")
        if "/" not in formats or "@" in text:
            return text
        return f"{formats.split('/', 1)[is_value]}{plus}{rotation}"
    side = found["value" if is_value else "key"].strip()
    if SIDE.search(side) or ("/" in side and "@" not in side):
        raise argument_error("format", f"one format, or a mix, of {SIDES_FORM}", brief(repr(text)))
    return side


@dataclass(frozen=True)
class Mix:
    """Names the formats of layers; see the module. `num_layers` is that of the file it was read from."""

    text: str
    num_layers: int | None = None

    def of_layers(self, num_layers: int) -> list[tuple[str, str]]:
        """Return (format of keys, format of values) of each layer."""
        return self.of_numbers(range(num_layers), num_layers)

    def of_numbers(self, numbers: Sequence[int], num_layers: int | None = None) -> list[tuple[str, str]]:
        """Return the formats of some layers. Without `num_layers`, no number counts from the end."""
        if num_layers is not None and self.num_layers not in (None, num_layers):
            wanted = f"{self.num_layers}, as in the file of {brief(self.text)}"
            raise argument_error("num_layers", wanted, num_layers)
        keys, values = (self._of_side(is_value, numbers, num_layers) for is_value in (False, True))
        return list(zip(keys, values, strict=True))

    @property
    def by_layer(self) -> bool:
        """Return whether the mix names layers."""
        return "@" in self.text

    def _of_side(self, is_value: bool, numbers: Sequence[int], num_layers: int | None) -> list[str]:
        text = side_format(self.text, is_value)
        if "@" not in text:
            return [text] * len(numbers)
        *parts, last = (part.strip() for part in text.split("/"))
        rest = None if "@" in last else last
        named: dict[int, str] = {}
        for part in parts + [last] * (rest is None):
            format, at, layers = (each.strip() for each in part.partition("@"))
            if not (format and at):
                wanted = f"layers after each format but the last, or K=...,V=...: {format or 'FORMAT'}@0,1"
                raise argument_error("format", wanted, brief(repr(text)))
            for number in parse_layers(layers, numbers, num_layers, "format"):
                if num_layers is not None and number not in numbers:
                    wanted = f"layers from {-num_layers} to {num_layers - 1}"
                    raise argument_error("format", wanted, f"{brief(layers)} in {brief(repr(text))}")
                if number in named:
                    wanted = "each layer once"
                    raise argument_error("format", wanted, f"layer {number} twice in {brief(repr(text))}")
                named[number] = format
        others = [number for number in numbers if number not in named]
        if others and rest is None:
            wanted = f"a format for layer {others[0]}, as in '{brief(text)}/int4:g32'"
            raise argument_error("format", wanted, "none")
        if not others and rest is not None and num_layers is not None:
            wanted = f"a layer for {rest}, of {num_layers}"
            raise argument_error("format", wanted, f"none in {brief(repr(text))}")
        return [named.get(number, rest or "") for number in numbers]


def mix_named(format: Any) -> Mix:
    """Return the mix of a text; of the name of a file that `write_mix` wrote, the mix in it.

    Examples
    --------
    >>> from kvkit.formats.mixes import mix_named
    >>> mix_named("int8@0,-1/int4:g32").of_layers(3)
    [('int8', 'int8'), ('int4:g32', 'int4:g32'), ('int8', 'int8')]
    """
    if not isinstance(format, str):
        raise argument_error("format", "a format such as 'int4:g32', or a mix of formats", describe(format))
    if not format.endswith(FILE_END):
        return Mix(format)
    wanted = "a file that `kvkit study -o` wrote"
    try:
        with open(format, encoding="utf-8") as file:
            held = json.load(file)
        text, count = held[FILE_KEY], held["num_layers"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise argument_error("format", wanted, f"{brief(format)} ({type(error).__name__}: {error})") from None
    if not isinstance(text, str) or not (count is None or type(count) is int) or text.endswith(FILE_END):
        raise argument_error("format", wanted, f"{brief(format)}, in which the mix is {describe(text)}")
    return Mix(text, count)


def mix_text(formats: Iterable[tuple[str, str]], numbers: Sequence[int] | None = None) -> str:
    """Return the shortest text of a mix with these (formats of keys, of values), one for each layer.

    `numbers` are those of the layers, by default from 0 on.
    """
    pairs = list(formats)
    numbers, sides = numbers or range(len(pairs)), []
    for formats_of_side in zip(*pairs, strict=True):  # each with its layers, then the commonest
        (rest, _), *_ = Counter(formats_of_side).most_common(1)
        parts = []
        for format in dict.fromkeys(formats_of_side):
            own = [number for number, each in zip(numbers, formats_of_side, strict=True) if each == format]
            if format != rest:
                parts.append(f"{format}@{layers_text(own)}/")
        sides.append("".join([*parts, rest]))
    return sides[0] if sides[0] == sides[1] else f"K={sides[0]},V={sides[1]}"


def layers_text(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, three or more neighbours as a range."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = [f"{run[0]}:{run[-1] + 1}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    return ",".join(shown)


def parse_layers(text: str, known: Sequence[int], count: int | None, name: str = "layers") -> list[int]:
    """Return the numbers that a text such as 0,2,4: or 1::2 names, in its order; ranges are among `known`.

    With the number of all layers, `count`, negative numbers count from the end.
    """
    numbers: list[int] = []
    for part in text.split(","):
        found = PART.fullmatch(part.strip())
        if found is None or not (found["begin"] or found["colon"]) or found["step"] == "0":
            raise argument_error(name, "numbers and ranges, as 0,2,4: or 1::2", brief(text))
        begin, end = (None if found[each] is None else int(found[each]) for each in ("begin", "end"))
        if min(begin or 0, end or 0) < 0 and count is None:
            wanted = "numbers from 0 on, because it is not known which layer is the last"
            raise argument_error(name, wanted, brief(text))
        begin, end = (each if each is None or each >= 0 else each + (count or 0) for each in (begin, end))
        if not found["colon"] and begin is not None:
            numbers.append(begin)
            continue
        end = max(known, default=-1) + 1 if end is None else end
        chosen = set(range(begin or 0, end, int(found["step"] or 1)))
        numbers += [number for number in known if number in chosen]
    return numbers
