"""`kvkit layouts`: list the memory layouts of engines' caches."""

import click

from kvkit.layouts import NAMED
from kvkit.tools.text import columns
from kvkit_cli import show, tool


@click.command()
@tool.json_option
def layouts(as_json):
    """List the layouts of engines' caches.

    `kvkit draw NAME` draws one, and says where it is from.

    \b
    Example:
      kvkit layouts
    """
    if as_json:
        show.as_json({name: layout_facts(name) for name in NAMED})
        return
    rows = [(name, about.line, f"{about.engine} {about.versions}") for name, about in NAMED.items()]
    click.echo(columns(("name", "line", "engine"), rows, len(rows)))


def layout_facts(name):
    """Return the facts about a layout, for JSON."""
    about = NAMED[name]
    keys = "line", "engine", "versions", "source", "mark", "note"
    return {key: getattr(about, key) for key in keys} | {"aliases": list(about.aliases)}
