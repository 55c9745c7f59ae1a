"""`kvkit clean`: remove compiled code from the disk."""

import click

from kvkit.runtime import disk_cache
from kvkit_cli import show


@click.command()
def clean() -> None:
    """Remove the compiled code of every version of kvkit. Calls compile it again.

    \b
    Example:
      kvkit clean
    """
    count, size = disk_cache.clean()
    folder = disk_cache.root_folder() or "nowhere: none is kept"
    click.echo(f"removed {count} files, {show.size(size)}, from {folder}")
