"""The option `--dask`: run the tasks of a verb on a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click

from kvkit.errors import KvkitError
from kvkit.files.errors import FileError
from kvkit_cli import show

NEEDS = "--dask: needs distributed: pip install '.[dask]' in a clone"


def on_cluster(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option --dask to a verb; its value goes to `mapper`."""
    return click.option(
        "--dask",
        metavar="ADDRESS|local[:N]",
        help="Run on the workers of a Dask cluster, or in N processes of this machine.",
    )(verb)


@contextlib.contextmanager
def naming(path: Any) -> Iterator[None]:
    """Add the name of a file to errors that lack it."""
    try:
        yield
    except FileError:  # which names its own file
        raise
    except KvkitError as error:
        if str(path) in str(error):
            raise
        takes_message_only = type(error).__init__ is KvkitError.__init__
        error_class = type(error) if takes_message_only else KvkitError
        raise error_class(f"{path}: {error}") from error


@contextlib.contextmanager
def mapper(address: str | None) -> Iterator[Callable[..., Any]]:
    """Yield `map`, or with an address a function like it that runs tasks on a cluster and shows a bar."""
    if address is None:
        yield map
        return
    try:
        from kvkit.integrations.dask import tasks
    except ImportError:
        raise KvkitError(NEEDS) from None
    with tasks.started(address) as run, show.task_bar("tasks") as progress:

        def with_bar(function: Callable[..., Any], names: Iterable[Any], *arguments: Any) -> Iterator[Any]:
            names = list(names)
            for i, result in enumerate(run(function, names, *arguments), 1):
                if progress:
                    progress(i, len(names))
                yield result

        yield with_bar
