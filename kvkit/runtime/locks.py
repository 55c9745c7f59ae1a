"""Whose turn it is: locks between threads, and processes that were forked too late to get them back."""

import _thread
import os

from kvkit.errors import KvkitError

used = forked = False  # whether there are turns or compiled code here; whether there were before a fork


def after_fork():
    """A child has neither the threads of its parent nor those that would give back its locks."""
    global forked
    forked = used


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=after_fork)


def refuse_after_fork():
    """Note that locks are taken; raise in a process that was forked after kvkit was used."""
    global used
    if forked:
        raise KvkitError(
            "kvkit: expected a process of its own, got one forked after kvkit was used, which has no threads:"
            ' start processes with multiprocessing.get_context("spawn"), or before the first call'
        )
    used = True


class CallLock(_thread.RLock):  # type: ignore[misc]
    """A lock that a forked process is refused; its holder may take it again."""

    __slots__ = ()
    again = True

    def __init__(self):
        refuse_after_fork()

    def __enter__(self):  # type: ignore[override]
        if forked:
            refuse_after_fork()
        if not self.again and self._is_owned():  # type: ignore[attr-defined]
            raise KvkitError(
                "kvkit: expected one call at a time, got a call inside another of the same thread,"
                " from a signal handler or a finalizer: note the event there and call kvkit later"
            )
        try:
            return self.acquire()
        except BaseException:  # Ctrl-C may come when the turn has been taken
            if self._is_owned():  # type: ignore[attr-defined]
                self.release()
            raise


class OneCallLock(CallLock):  # type: ignore[misc]
    """One that its holder is refused too: a signal handler would wait for what it interrupts."""

    __slots__ = ()
    again = False
