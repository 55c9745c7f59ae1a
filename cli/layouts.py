"""`kvkit layouts`: how engines' caches lie in memory."""

import json

import click

from kvkit.errors import KvkitError
from kvkit.layouts import NAMED, parse
from kvkit.layouts.named import ALIASES
from kvkit.tools import draw
from kvkit.tools.text import columns
from kvkit_cli import show
from kvkit_cli.pairs import sizes_of

MARKS = {
    "A": "checked against the engine's own index code",
    "S": "read in the engine's source",
    "T": "from a thread or documentation",
    "K": "common knowledge",
}


@click.command()
@click.argument("name", required=False)
@click.option("--sizes", metavar="AXIS=N,...", help="Lengths of axes to draw: n=4,h=3.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def layouts(name, sizes, as_json):
    """List the layouts of engines, or draw one.

    NAME is one of the list, what vLLM or LMCache call it, or a line: `l | b kv n h c`.

    \b
    Examples:
      kvkit layouts
      kvkit layouts vllm-lbnhc
    """
    if name is None:
        found = {name: described(name) for name in NAMED}
        click.echo(json.dumps(found, indent=2)) if as_json else listed()
        return
    real = ALIASES.get(name, name)
    if real not in NAMED and not set(name) & set("| "):
        raise KvkitError(f"no layout {name!r}{show.suggestion(name, [*NAMED, *ALIASES])}: see kvkit layouts")
    line = parse(real)
    if as_json:
        click.echo(json.dumps(described(real) if real in NAMED else {"line": str(line)}, indent=2))
        return
    click.echo(draw.layout(real if real in NAMED else line, sizes=sizes_of(sizes)))
    if real in NAMED:
        about = NAMED[real]
        click.echo(f"\n{about.engine}, {about.versions}" if about.versions else f"\n{about.engine}")
        click.echo(f"{about.note}\n{about.source} ({MARKS[about.mark]})".strip())
        if about.aliases:
            click.echo(f"also called {', '.join(about.aliases)}")


def described(name):
    about = NAMED[name]
    keys = "line", "engine", "versions", "source", "mark", "note"
    return {key: getattr(about, key) for key in keys} | {"aliases": list(about.aliases)}


def listed():
    """The table of all; a line each."""
    rows = [(name, about.line, f"{about.engine} {about.versions}") for name, about in NAMED.items()]
    click.echo(columns(("name", "line", "of"), rows, len(rows)))
