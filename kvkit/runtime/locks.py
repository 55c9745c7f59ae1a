"""Locks that admit one call at a time. A forked child is refused."""

import _thread
import os

import numpy as np

from kvkit.errors import KvkitError

used = False  # whether this process has locks or compiled code
forked = False  # whether its parent had any when it forked
BUSY = np.zeros(1, np.int64)  # 1 while a call runs, and in a forked child: then no call runs without its lock


def after_fork() -> None:
    """Note in a forked child if its parent had used kvkit: threads are gone, and locks stay taken."""
    global forked
    forked = used
    BUSY[0] = used


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=after_fork)


def refuse_after_fork() -> None:
    """Raise in a process that was forked after kvkit was used; otherwise note that kvkit is used."""
    global used
    if forked:
        raise KvkitError(
            "kvkit: expected a process of its own, got one forked after kvkit was used, which has no threads:"
            ' start processes with multiprocessing.get_context("spawn"), or before the first call'
        )
    used = True


class LayerLock(_thread.RLock):  # type: ignore[misc]
    """A lock that its thread may take again. Its copies are unlocked."""

    __slots__ = ()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()

    def is_owned(self) -> bool:
        """Return whether this thread holds the lock."""
        return bool(self._is_owned())  # type: ignore[attr-defined]


class CallLock(LayerLock):  # type: ignore[misc]
    """A lock that refuses a forked process. The thread that holds it may take it again."""

    __slots__ = ()
    reentrant = True

    def __init__(self) -> None:
        refuse_after_fork()

    def __enter__(self) -> bool:  # type: ignore[override]
        if forked:
            refuse_after_fork()
        if not self.reentrant and self._is_owned():  # type: ignore[attr-defined]
            raise KvkitError(
                "kvkit: expected one call at a time, got a call inside another of the same thread,"
                " from a signal handler or a finalizer: note the event there and call kvkit later"
            )
        try:
            return self.acquire()
        except BaseException:  # Ctrl-C may come after the lock has been taken
            if self.is_owned():
                self.release()
            raise


class OneCallLock(CallLock):  # type: ignore[misc]
    """A lock that its thread may not take again: a signal handler would wait for what it interrupts."""

    __slots__ = ()
    reentrant = False
