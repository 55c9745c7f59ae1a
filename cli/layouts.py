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
            show.as_json({each: layout_facts(each) for each in NAMED})
        else:
            rows = [(each, about.line, f"{about.engine} {about.versions}") for each, about in NAMED.items()]
            click.echo(columns(("name", "line", "engine"), rows, len(rows)))
        return
    if (found := known_layout(name)) is None:
        raise KvkitError(f"no layout {name!r}{show.suggestion(name, [*NAMED, *ALIASES])}: see kvkit layouts")
    about = NAMED.get(found)
    if as_json:
        show.as_json(layout_facts(found) if about else {"line": str(parse(found))})
        return
    click.echo(draw.layout(found if about else parse(found), sizes=sizes))
    if about:
        click.echo(f"\n{about.engine}, {about.versions}" if about.versions else f"\n{about.engine}")
        click.echo(f"{about.note}\n{about.source} ({MARKS[about.mark]})".strip())
        if about.aliases:
            click.echo(f"also called {', '.join(about.aliases)}")


def known_layout(text):
    """Return the name for an alias, a name or a line as it is, None for any other text."""
    name = ALIASES.get(text, text)
    return name if name in NAMED or set(name) & set("| ") else None


def layout_facts(name):
    """Return the facts about a layout, for JSON."""
    about = NAMED[name]
    keys = "line", "engine", "versions", "source", "mark", "note"
    return {key: getattr(about, key) for key in keys} | {"aliases": list(about.aliases)}
