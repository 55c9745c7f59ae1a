"""`kvkit layouts`: list or draw the memory layouts of engines' caches."""

import click

from kvkit.errors import KvkitError
from kvkit.layouts import NAMED, parse
from kvkit.layouts.named import ALIASES
from kvkit.tools import draw
from kvkit.tools.text import columns
from kvkit_cli import complete, show, tool

MARKS = {
    "A": "checked against the engine's own index code",
    "S": "read in the engine's source",
    "T": "from a thread or documentation",
    "K": "common knowledge",
}


@click.command(cls=tool.ToolVerb)
@click.argument("name", required=False, shell_complete=complete.layouts)
@tool.sizes("Lengths of axes to draw: n=4,h=3.")
@tool.json_option
def layouts(name, sizes, as_json):
    """List the layouts of engines, or draw one.

    NAME is one of the list, a name that vLLM or LMCache use, or a line: `l | b kv n h c`.

    \b
    Examples:
      kvkit layouts
      kvkit layouts vllm-lbnhc
    """
    if name is None:
        if as_json:
            show.as_json({known: layout_facts(known) for known in NAMED})
        else:
            rows = [(known, about.line, f"{about.engine} {about.versions}") for known, about in NAMED.items()]
            click.echo(columns(("name", "line", "engine"), rows, len(rows)))
        return
    if (text := known_layout(name)) is None:
        raise KvkitError(f"no layout {name!r}{show.suggestion(name, [*NAMED, *ALIASES])}: see kvkit layouts")
    about = NAMED.get(text)
    if as_json:
        show.as_json(layout_facts(text) if about else {"line": str(parse(text))})
        return
    click.echo(draw.layout(text if about else parse(text), sizes=sizes))
    if about:
        click.echo(f"\n{about.engine}, {about.versions}" if about.versions else f"\n{about.engine}")
        click.echo(f"{about.note}\n{about.source} ({MARKS[about.mark]})".strip())
        if about.aliases:
            click.echo(f"also called {', '.join(about.aliases)}")


def known_layout(text):
    """Return the name that an alias means; a name or a line as it is; None for any other text."""
    name = ALIASES.get(text, text)
    is_line = "|" in name or " " in name
    return name if name in NAMED or is_line else None


def layout_facts(name):
    """Return the facts about a layout, for JSON."""
    about = NAMED[name]
    keys = "line", "engine", "versions", "source", "mark", "note"
    return {key: getattr(about, key) for key in keys} | {"aliases": list(about.aliases)}
