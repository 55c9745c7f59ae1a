"""The errors that kvkit raises, and functions that write their messages."""

import difflib
import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np

CACHE_AXES = "batch", "heads", "tokens", "dim"
MANY = 1 << 31  # more than any size of an axis
Called = TypeVar("Called", bound=Callable[..., Any])  # a decorator returns the type of what it decorates


class KvkitError(ValueError):
    """An argument is wrong. The message names the argument, what was expected and what was given."""


class DeviceError(KvkitError):
    """The requested backend cannot run on this machine."""


class CapacityError(KvkitError):
    """A cache of fixed size has no room for the new tokens."""


class DroppedTokensError(KvkitError, RuntimeError):
    """A call would go back to tokens that a window has dropped."""


class TooFewTokensError(KvkitError):
    """A scorer always keeps more tokens than the context has, or than the budget leaves."""


def argument_error(
    name: str, expected: object, got: object, error: type[KvkitError] = KvkitError
) -> KvkitError:
    """Return an error with the form of all messages, NAME: expected WHAT, got WHAT."""
    return error(f"{name}: expected {expected}, got {got}")


def exchanged(axes: Sequence[str], i: int, j: int, names: str = "these") -> str:
    """Return what an error says of arrays that have axes i and j the other way round."""
    order = [*axes]
    order[i], order[j] = axes[j], axes[i]
    who, verb = "", "look" if names == "these" or " and " in names else "looks"
    if len(axes) == 4 and (i, j) == (1, 2) and "heads" in axes[2]:
        who = ", which caches take"
    elif [*axes] == [*CACHE_AXES] and (i, j) == (1, 2):
        who = ", which operators take"
    given, wanted = ", ".join(order), ", ".join(axes)
    turn = f"swapaxes({i}, {j}) exchanges the two"
    return f"; {names} {verb} like [{given}]{who}, expected is [{wanted}]: {turn}"


def multiples(size: int) -> range:
    """Return sizes of an axis for `check_shape`: query heads for so many key heads."""
    return range(size, MANY, size)


def in_other_order(
    shape: tuple[int, ...], wanted: Sequence[int | range | None], axes: Sequence[str] = CACHE_AXES
) -> str:
    """Return what an error says if two exchanged axes make the wanted shape, where None fits any size."""
    if len(shape) != len(wanted) or sizes_fit(shape, wanted):
        return ""
    pairs = itertools.combinations(range(len(wanted)), 2)
    for i, j in sorted(pairs, key=lambda pair: pair[1] - pair[0]):
        order = [*shape]
        order[i], order[j] = shape[j], shape[i]
        if sizes_fit(order, wanted):
            return exchanged(axes[-len(wanted) :], i, j)
    return ""


def sizes_fit(sizes: Sequence[int], wanted: Sequence[int | range | None]) -> bool:
    """Return whether sizes are the wanted ones, where None fits any size."""
    return len(sizes) == len(wanted) and all(
        want is None or (size in want if isinstance(want, range) else size == want)
        for size, want in zip(sizes, wanted, strict=True)
    )


def check_shape(
    name: str, array: Any, wanted: Sequence[int | range | None], axes: Sequence[str] = CACHE_AXES
) -> None:
    """Raise unless an array has the wanted sizes, where None fits any; say if two axes look exchanged."""
    shape = np.shape(array)
    if not sizes_fit(shape, wanted):
        words = ["any" if want is None else in_words(want) for want in wanted]
        order = f"[{', '.join(axes[-len(wanted) :])}] = [{', '.join(words)}]"
        raise argument_error(name, f"shape {order}", f"{shape}{in_other_order(shape, wanted, axes)}")


def in_words(size: int | range) -> str:
    """Return a size of an axis, or sizes, as errors say it."""
    if not isinstance(size, range):
        return str(size)
    if size.step > 1:
        return f"a multiple of {size.step}"
    return f"at least {size.start}" if size.stop == MANY else f"{size.start} to {size.stop - 1}"


def printable(text: object) -> str:
    """Return a text in one line, with Python's escapes in place of control characters."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in str(text))


def brief(text: object, most: int = 80) -> str:
    """Return a text from a file or a caller in one printable line of at most `most` characters."""
    shown = printable(str(text)[: most + 1])  # a text may be very long
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."


def describe(value: Any) -> str:
    """Describe an argument in a few words. For an array these are dtype and shape, never its contents."""
    if value is None:
        return "None"
    kind = type(value).__name__
    is_array = hasattr(value, "shape") and hasattr(value, "dtype")
    if is_array and not isinstance(value, (np.generic, type)):  # numbers of numpy have these too
        kind = "an array" if isinstance(value, np.ndarray) else kind
        return f"{kind} of {value.dtype} and shape {tuple(value.shape)}"
    several = isinstance(value, Collection) and not isinstance(value, (str, bytes))
    items = value.values() if isinstance(value, Mapping) else value
    if several and (len(value) > 8 or not all(isinstance(item, (int, float, str)) for item in items)):
        return f"{kind} of {len(value)} elements"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    return f"{kind} {brief(repr(value))}"


def nearest(name: str, known: Iterable[str], count: int = 5) -> list[str]:
    """Return known names that are like a name, the likeliest first."""
    originals, low = {known_name.lower(): known_name for known_name in known}, name.lower()
    likely = [key for key in originals if key == low]
    if len(low) > 2:  # one or two letters are in too many names
        likely += [key for key in originals if key.startswith(low)] + [key for key in originals if low in key]
    likely += difflib.get_close_matches(low, originals, n=count)
    return [originals[key] for key in dict.fromkeys(likely)][:count]


def unknown_name(argument: str, what: str, got: str, known: Iterable[str], name: str = "") -> KvkitError:
    """Return the error for an unknown name of `what`, "a format": near ones, and the command that has all."""
    wanted = f"{what} that `kvkit list {what.split()[1]}s` prints"
    return argument_error(argument, wanted, brief(repr(got)) + near_names(name or got, known))


def near_names(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean ... or ...?)` with up to three names that are like a name, or ''."""
    likely = nearest(name, known, 3)
    return f" (did you mean {' or '.join(likely)}?)" if likely else ""


# {a word of other libraries, or of kvkit before: kvkit's}: what no likeness of letters finds, or finds wrong
OTHER_WORDS = {
    "attention_mask": "attn_mask", "bits": "format", "block_size": "page_size",
    "cache_kwargs": "cache_position", "cache_seqlens": "context_lens", "context": "tokens",
    "context_len": "tokens", "context_length": "tokens", "dtype": "formats", "heads": "num_heads",
    "kv_heads": "num_kv_heads", "kv_lens": "context_lens", "layers": "num_layers", "max_length": "length",
    "nbits": "format", "num_hidden_layers": "num_layers", "num_key_value_heads": "num_kv_heads",
    "num_pages": "num_blocks", "offloading": "offload", "page_size": "block_size",
    "page_table": "block_tables", "qkScale": "softmax_scale", "scale": "softmax_scale",
    "scaling": "softmax_scale", "seq_len": "tokens", "seq_lens": "context_lens", "sliding_window": "window",
    "slots": "slot_mapping",
}  # fmt: skip


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean ...?)` for a name that means, or is like, a known one, or ''."""
    known = list(known)
    meant = OTHER_WORDS.get(name)
    likely = [meant] if meant in known else nearest(name, known, 1)
    return f" (did you mean {likely[0]}?)" if likely else ""


def add_keyword_hint(error: TypeError, function: Callable[..., Any], keywords: Iterable[str]) -> None:
    """Add ` (did you mean ...?)` to the error of a call with a keyword that is like a parameter.

    It takes the place of Python's own hint (from version 3.13 on), which knows no word of elsewhere.
    """
    parameters = inspect.signature(function).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    unknown = [] if takes_any else [name for name in keywords if name not in parameters]
    said = str(error).partition(". Did you mean")[0]
    named = [name for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY]
    if named and "positional argument" in said and "were given" in said and "by name" not in said:
        error.args = (f"{said} (by name: {', '.join(named[:4])})",)
    if unknown and "did you mean" not in said:
        hint = suggestion(unknown[0], parameters)
        if unknown[0] == "config" and function.__qualname__.endswith("Cache.__init__"):  # as in transformers
            hint = " (kvkit.cache.from_config(config) makes the cache of a model)"
        error.args = (f"{said}{hint}",)


def hints_keywords(called: Called) -> Called:
    """Decorate a function, or the `__init__` of a class, so that `add_keyword_hint` words a wrong keyword."""
    function: Any = called.__init__ if isinstance(called, type) else called  # type: ignore[misc]

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except TypeError as error:
            add_keyword_hint(error, function, keywords)
            raise

    if not isinstance(called, type):
        return cast(Called, call)
    called.__init__ = call  # type: ignore[misc]
    return called
