"""Tools' work on a cluster: a function like `map`, whose calls are tasks."""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing.resource_tracker
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import distributed

from kvkit.errors import KvkitError, argument_error

LOCAL = "local"


def mapper(client: distributed.Client) -> Callable[..., Iterator[Any]]:
    """The ``mapper`` of tools: a task for each call, results in order; who stops asking cancels the rest.

    Parameters
    ----------
    client : distributed.Client
        Its workers have kvkit, and see the files that are named.

    Returns
    -------
    callable
        As `map`. What a function raises comes from here, too; for a task that is lost a `KvkitError` names
        the first argument of its call.

    Examples
    --------
    >>> import numpy as np, kvkit.tools
    >>> from distributed import Client
    >>> from kvkit.integrations.dask import mapper
    >>> keys = np.random.default_rng(0).standard_normal((2, 128, 3, 64)).astype(np.float16)
    >>> with Client(processes=False, n_workers=2, dashboard_address=":0") as client:
    ...     found = kvkit.tools.study({"key": keys, "value": keys}, "fp8,int8:g8", mapper=mapper(client))
    >>> found.layers
    ['layer 0', 'layer 1']
    """

    def mapped(function: Callable[..., Any], names: Any, *arguments: Any) -> Iterator[Any]:
        names = list(names)
        if not names:
            return
        futures = client.map(functools.partial(refused, function), names, *arguments, pure=False)
        try:
            for name, future in zip(names, futures, strict=True):
                yield answer(name, future)
        finally:
            client.cancel([future for future in futures if not future.done()])

    return mapped


def refused(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function, or the `KvkitError` it raises: what a task raises, workers print whole."""
    try:
        return function(*arguments)
    except KvkitError as error:
        return error


def answer(name: str, future: Any) -> Any:
    """The result of a task."""
    error = future.exception()
    if error is None:
        result = future.result()
        if isinstance(result, KvkitError):
            raise result
        return result
    if isinstance(error, (distributed.KilledWorker, distributed.client.FutureCancelledError, OSError)):
        raise argument_error(
            str(name), "the result of its task", f"{type(error).__name__} ({error})"
        ) from error
    error.add_note(f"in the task of {name}")
    raise error


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl-C waits; processes that start meanwhile, which a terminal interrupts too, never hear of it."""
    multiprocessing.resource_tracker.ensure_running()  # lets interrupts through when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def started(address: str) -> Iterator[Callable[..., Iterator[Any]]]:
    """`mapper` on the cluster at an address; or in processes of this machine, "local" or "local:4"."""
    kind, _, number = address.partition(":")
    if kind == LOCAL:
        count = number or str(os.cpu_count() or 1)
        if not (count.isascii() and count.isdecimal()) or not 0 < int(count[:6]) <= 1024:
            raise argument_error("--dask", "an ADDRESS, local, or local:N of 1 to 1024 processes", address)
        where: Any = {"n_workers": int(count), "threads_per_worker": 1, "dashboard_address": ":0"}
        where |= {"silence_logs": logging.CRITICAL}
    else:
        where = {"address": address, "timeout": 10}
    with contextlib.ExitStack() as opened:
        try:
            with interrupts_held():
                client = opened.enter_context(distributed.Client(**where))
        except (OSError, ValueError, TypeError) as error:
            raise argument_error("--dask", "a cluster that answers", f"{address} ({error})") from error
        yield mapper(client)
