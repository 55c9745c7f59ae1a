"""Verbs on a cluster: what `--dask` starts, and how its tasks are told of."""

import contextlib

import click

from kvkit.errors import KvkitError
from kvkit_cli import show

NEEDS = "--dask: needs distributed: pip install 'kvkit-kernels[dask]'"


def on_cluster(verb):
    """The option of a verb that takes `dask`, for `mapper`."""
    return click.option(
        "--dask",
        metavar="ADDRESS|local[:N]",
        help="Run its parts on the workers of a Dask cluster, or in N processes of this machine.",
    )(verb)


@contextlib.contextmanager
def naming(path):
    """Errors name the file that a task works on."""
    try:
        yield
    except KvkitError as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error


@contextlib.contextmanager
def mapper(address):
    """A function like `map`, for tools: that itself, or one on a cluster, with a bar on a terminal."""
    if address is None:
        yield map
        return
    try:
        from kvkit.integrations.dask import tasks
    except ImportError:
        raise KvkitError(NEEDS) from None
    with tasks.started(address) as run, show.counted("tasks") as progress:

        def mapped(function, names, *arguments):
            names = list(names)
            for i, result in enumerate(run(function, names, *arguments), 1):
                if progress:
                    progress(i, len(names))
                yield result

        yield mapped
