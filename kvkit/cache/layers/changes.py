"""Make a change of a layer whole or not at all, also if an interrupt or the end of memory comes inside it.

A change works on attributes, and on new arrays or on rows that no token has yet. If it raises, all attributes
get their old values in one step; a change that ends with its only assignment needs no guard. A change that
must overwrite rows of tokens says so first (`overwrites`). If that raises, the rows are lost, and the layer
refuses every later call with a sentence until `reset`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, cast

from kvkit.errors import argument_error, hints_keywords
from kvkit.typed import Method


class LostRows:
    """Stands for the rows of a layer that an interrupted change has lost; every use raises KvkitError."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def refuse(self, *_: Any) -> NoReturn:
        """Raise the error that says what has happened, and what to do."""
        wanted = "whole rows (call reset, and give all tokens again)"
        raise argument_error(self.name, wanted, "rows that an interrupted call has changed in part")

    def counters(self) -> tuple[()]:
        """Return no objects that count rows."""
        return ()

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # copies and pickles ask for these
            raise AttributeError(attribute)
        self.refuse()

    __getitem__ = __iter__ = __len__ = __bool__ = refuse  # type: ignore[assignment]  # all raise

    def __reduce__(self) -> tuple[Any, ...]:
        return LostRows, (self.name,)


def whole(method: Method) -> Method:
    """Decorate a method that changes a layer, so that an error or interrupt in it leaves the layer whole."""

    @functools.wraps(method)
    def changing(self: Any, *arguments: Any, **options: Any) -> Any:
        before = Before(self)
        try:
            return method(self, *arguments, **options)
        except BaseException:
            go_back([before])
            raise

    return cast(Method, changing)


def all_layers(method: Method) -> Method:
    """Decorate a method that changes all layers of a cache, so that all change or none."""

    @functools.wraps(method)
    def changing(self: Any, *arguments: Any, **options: Any) -> Any:
        with self._lock:
            before = [Before(layer) for layer in self.layers]
            try:
                return method(self, *arguments, **options)
            except BaseException:
                self.layers[:] = [each.layer for each in before]
                go_back(before)
                raise

    return cast(Method, hints_keywords(changing))


class Before:
    """Holds the attributes that a layer had before a change, and those of the objects that count its rows."""

    __slots__ = ("counters", "layer", "overwritten", "values")

    def __init__(self, layer: Any) -> None:
        self.layer, self.overwritten, self.counters = layer, layer.overwritten, layer._counters()
        self.values = [counter._attributes.read(counter) for counter in self.counters]


def go_back(before: Sequence[Before]) -> None:
    """Give layers their old attributes; if one has overwritten rows since, all lose their rows."""
    if any(each.layer.overwritten != each.overwritten for each in before):
        for each in before:
            each.layer._lose_rows()
        return
    assign(
        (counter, name, value)
        for each in before
        for counter, values in zip(each.counters, each.values, strict=True)
        for name, value in zip(counter._attributes.names, values, strict=True)
    )


def assign(attributes: Iterable[tuple[Any, str, Any]]) -> None:
    """Set attributes (object, name, value) in one step: after an interrupt all are old or all are new."""
    any(itertools.starmap(setattr, list(attributes)))  # one call, in C
