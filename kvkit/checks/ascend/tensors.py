"""Checks of packed tensors and of caches in blocks."""

from collections.abc import Sequence
from typing import NamedTuple

from kvkit.checks.records import FRACTAL_BYTES
from kvkit.checks.values import DATA, check_apart, check_writeable, checked_format
from kvkit.errors import argument_error
from kvkit.formats import BFLOAT16, FLOAT16, INT8, Element
from kvkit.typed import Array

FORMATS = ("ND", "NZ")
INT32_MAX = 2**31 - 1  # the largest count or size, so that sums and products of two fit int64


class TokensAndCache(NamedTuple):
    """Tokens and the cache that takes them, with the names of the arguments."""

    name: str
    tokens: Array
    cache_name: str
    cache: Array


def fractal(fmt: Element) -> int:
    """Return n0, the elements in a group of NZ, Ascend's format of columns in groups of 32 bytes."""
    return FRACTAL_BYTES * 8 // fmt.bits


def pairs(
    key_name: str, key: Array, value: Array | None, key_cache: Array, value_cache: Array | None
) -> list[TokensAndCache]:
    """Return tokens and cache of keys and, if they are given, of values, with the names of the arguments."""
    keys = TokensAndCache(key_name, key, "key_cache", key_cache)
    if value is None and value_cache is None:
        return [keys]
    if value is None or value_cache is None:
        missing = "value" if value is None else "value_cache"
        other = "value_cache" if value is None else "value"
        wanted = f"an array, because {other} is one (or both None, for keys alone)"
        raise argument_error(missing, wanted, "None")
    return [keys, TokensAndCache("value", value, "value_cache", value_cache)]


def cache_in_blocks(name: str, array: Array, cache_format: str, written: bool) -> tuple[Element, Array]:
    """Return the format of a cache in blocks, and a view [blocks, rows, heads or groups, dim]."""
    fmt = checked_format(name, array, DATA, 4)
    if min(array.shape) < 1:
        raise argument_error(name, "no axis of size 0", f"shape {array.shape}")
    if written:
        check_writeable(name, array)
    if cache_format == "NZ" and array.shape[3] != fractal(fmt):
        raise argument_error(name, f"a last axis of {fractal(fmt)}, for NZ of {fmt}", f"shape {array.shape}")
    return fmt, in_rows(array, cache_format)


def in_rows(array: Array, cache_format: str) -> Array:
    """View a cache as [blocks, rows, heads or groups, dim], or matrices in NZ, each of which is a block."""
    return array.transpose(0, 2, 1, 3) if cache_format == "NZ" else array


def same_blocks(caches: Sequence[tuple[str, Array]]) -> tuple[int, int]:
    """Return (blocks, rows of a block), which must be equal for keys and values."""
    (_, first), *others = caches
    for name, view in others:
        if view.shape[:2] != first.shape[:2]:
            sizes = f"{first.shape[0]} blocks of {first.shape[1]} rows, as key_cache"
            raise argument_error(name, sizes, f"{view.shape[0]} of {view.shape[1]}")
    return first.shape[0], first.shape[1]


def caches_apart(caches: Sequence[tuple[str, Array]], others: Sequence[tuple[str, Array]] = ()) -> None:
    """Check that written caches, (name, array), share no byte with each other or with `others`."""
    for i, (name, array) in enumerate(caches):
        check_apart(name, array, [*caches[i + 1 :], *others])


def same_types(formats: Sequence[Element], cache_format: str, names: Sequence[str]) -> None:
    """Check that keys and values have one dtype; in NZ keys may be int8 and values 16-bit floats."""
    if len(formats) == 1:
        return
    legal = [formats[0]]
    if cache_format == "NZ" and formats[0] is INT8:
        legal += FLOAT16, BFLOAT16
    if formats[1] not in legal:
        others = "".join(f" or {fmt}" for fmt in legal[1:])
        raise argument_error(names[1], f"the dtype of {names[0]}, {formats[0]}{others}", formats[1])
