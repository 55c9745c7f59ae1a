"""Refuse blocks that an interrupted change has changed in part: nobody knows then whose they are."""

from __future__ import annotations

import functools
from typing import Any, cast

from kvkit.errors import KvkitError, argument_error
from kvkit.typed import Method


class Guard:
    """Says whether all changes of an allocator have ended."""

    __slots__ = ("interrupted",)

    def __init__(self) -> None:
        self.interrupted = False

    def check(self) -> None:
        """Raise if a change was interrupted."""
        if self.interrupted:
            wanted = "whole blocks (make a new cache, and give all tokens again)"
            raise argument_error("blocks", wanted, "blocks that an interrupted call has changed in part")


def whole_or_refused(method: Method) -> Method:
    """Decorate a method that changes blocks; after an interrupt in it every later call is refused."""

    @functools.wraps(method)
    def changing(self: Any, *arguments: Any, **options: Any) -> Any:
        guard = self._guard
        guard.check()
        try:
            return method(self, *arguments, **options)
        except (KvkitError, TypeError):  # of checks, which come before all changes
            raise
        except BaseException:
            guard.interrupted = True
            raise

    return cast(Method, changing)
