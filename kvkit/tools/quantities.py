"""Read numbers of tokens and of bytes as people write them: 128k, 24GiB."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from kvkit.checks.values import integer
from kvkit.errors import argument_error, brief, describe

QUANTITY = re.compile(r"(\d{1,18}(?:\.\d{1,9})?) ?([A-Za-z]*)", re.ASCII)
TOKEN_UNITS = {"": 1, "k": 2**10, "m": 2**20}
# A letter alone means a power of 1024, as in other programs; KB and so on are powers of 1000.
BYTE_UNITS = {"b": 1} | {f"{letter}{end}": base**power for power, letter in enumerate("kmgt", 1)
                    for end, base in (("", 1024), ("ib", 1024), ("b", 1000))}  # fmt: skip


def token_counts(name: str, value: Any) -> list[int]:
    """Return numbers of tokens: one, several, or a text such as "4096,128k", where k is 1024."""
    if isinstance(value, str):
        return [tokens_in(name, part) for part in value.split(",") if part.strip()]
    several = value if isinstance(value, (list, tuple)) else [value]
    return [tokens_in(name, each) if isinstance(each, str) else integer(name, each, 1) for each in several]


def tokens_in(name: str, text: str) -> int:
    """Return the number of tokens in a text."""
    match = QUANTITY.fullmatch(text.strip())
    found = Fraction(match[1]) * TOKEN_UNITS.get(match[2].lower(), 0) if match else Fraction(0)
    if found < 1 or found.denominator > 1:
        raise argument_error(name, "a number of tokens, such as 4096 or 128k", describe(text))
    return int(found)


def parse_bytes(name: str, value: int | str) -> int:
    """Return a number of bytes: a number, or a text with its unit, such as "24GiB"."""
    if not isinstance(value, str):
        if integer(name, value, 1) < 1024:
            wanted = f"bytes, or a text with their unit (did you mean {value}GiB?)"
            raise argument_error(name, wanted, describe(value))
        return int(value)
    match = QUANTITY.fullmatch(value.strip())
    if match is None or match[2].lower() not in BYTE_UNITS:
        alone = match is not None and not match[2]
        hint = f" without one (did you mean {value.strip()}GiB?)" if alone else ""
        raise argument_error(
            name, "a number of bytes with its unit, such as 24GiB", f"{brief(repr(value))}{hint}"
        )
    return int(float(match[1]) * BYTE_UNITS[match[2].lower()])
