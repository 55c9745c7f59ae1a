"""`kvkit cache`: manage the folder of compiled code."""

import click

from kvkit.runtime import disk_cache
from kvkit_cli import show


@click.group()
def cache() -> None:
    """Remove compiled code from the disk.

    \b
    Example:
      kvkit cache clean
    """


@cache.command()
def clean() -> None:
    """Remove the compiled code of every version of kvkit. Calls compile it again."""
    count, size = disk_cache.clean()
    folder = disk_cache.root_folder() or "nowhere: none is kept"
    click.echo(f"removed {count} files, {show.size(size)}, from {folder}")
