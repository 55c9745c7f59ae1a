"""`kvkit cache`: the folder of compiled code."""

import click

from kvkit import kept
from kvkit_cli import show


@click.group()
def cache():
    """Remove the compiled code that is kept.

    \b
    Example:
      kvkit cache clean
    """


@cache.command()
def clean():
    """Remove the compiled code of every version; it is made again when it is needed."""
    count, size = kept.clean()
    click.echo(f"removed {count} files, {show.size(size)}, from {kept.root() or 'nowhere: none is kept'}")
