"""Run the work of tools on a cluster, by a function like `map` whose calls are tasks."""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing.resource_tracker
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import dask
import distributed

from kvkit.errors import KvkitError, argument_error

LOCAL = "local"
MOST_PROCESSES = 1024
NO_PAGES = {f"distributed.{server}.http.routes": list[str]() for server in ("scheduler", "worker")}
NO_DASHBOARD = {"dashboard": False, "dashboard_address": "127.0.0.1:0"}


def mapper(client: distributed.Client) -> Callable[..., Iterator[Any]]:
    """Return the ``mapper`` of tools: a task for each call, results in order.

    Parameters
    ----------
    client : distributed.Client
        Its workers have kvkit and see the same files.

    Returns
    -------
    callable
        Works as `map`. It raises what a task raises, and for a lost task a `KvkitError` with the first
        argument of its call. When the caller stops iterating, the remaining tasks are cancelled.

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

    def map_tasks(function: Callable[..., Any], names: Any, *arguments: Any) -> Iterator[Any]:
        names = list(names)
        if not names:
            return
        futures = client.map(functools.partial(call_or_refuse, function), names, *arguments, pure=False)
        try:
            for name, future in zip(names, futures, strict=True):
                yield task_result(name, future)
        finally:
            client.cancel([future for future in futures if not future.done()])

    return map_tasks


def call_or_refuse(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return a function's result, or the `KvkitError` that it raises, which a worker would log."""
    try:
        return function(*arguments)
    except KvkitError as error:
        return error


def task_result(name: str, future: Any) -> Any:
    """Return the result of a task, or raise its error."""
    error = future.exception()
    if error is None:
        result = future.result()
        if isinstance(result, KvkitError):
            raise result
        return result
    if isinstance(error, (distributed.KilledWorker, distributed.client.FutureCancelledError, OSError)):
        wanted = "the result of its task"
        raise argument_error(str(name), wanted, f"{type(error).__name__} ({error})") from error
    error.add_note(f"in the task of {name}")
    raise error


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Delay Ctrl-C. Processes that start meanwhile ignore it, although a terminal sends it to them, too."""
    multiprocessing.resource_tracker.ensure_running()  # its start would let interrupts through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def local_client(count: int) -> Iterator[distributed.Client]:
    """Start ``count`` worker processes that only this process can use, and end them.

    Whoever reaches a worker can run code as its user. So workers listen on the loopback interface only, and
    require a key that is made here. There is no dashboard and no other page.
    """
    try:
        security = distributed.Security.temporary()
    except ImportError:
        wanted = "cryptography, which protects the cluster (pip install '.[dask]' in a clone)"
        raise argument_error("--dask local", wanted, "none") from None
    options: dict[str, Any] = {"n_workers": count, "threads_per_worker": 1, "silence_logs": logging.CRITICAL}
    options |= {"host": "127.0.0.1", "security": security, "scheduler_kwargs": NO_DASHBOARD}
    with (
        dask.config.set(NO_PAGES),
        distributed.LocalCluster(**options) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@contextlib.contextmanager
def started(address: str) -> Iterator[Callable[..., Iterator[Any]]]:
    """Connect `mapper` to the cluster at an address, or to new local processes for "local" or "local:4"."""
    host, _, number = address.partition(":")
    if host == LOCAL:
        count = number or str(os.cpu_count() or 1)
        is_number = count.isascii() and count.isdecimal() and len(count) < 10
        if not is_number or not 0 < int(count) <= MOST_PROCESSES:
            wanted = f"an ADDRESS, local, or local:N of 1 to {MOST_PROCESSES} processes"
            raise argument_error("--dask", wanted, address)
        connect = functools.partial(local_client, int(count))
    else:
        connect = functools.partial(distributed.Client, address, timeout=10)
    with contextlib.ExitStack() as stack:
        try:
            with interrupts_held():
                client = stack.enter_context(connect())
        except KvkitError:
            raise
        except (OSError, ValueError, TypeError) as error:
            raise argument_error("--dask", "a cluster that answers", f"{address} ({error})") from error
        yield mapper(client)
