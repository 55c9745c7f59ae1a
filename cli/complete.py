"""Complete operators, settings, layouts, formats and schemes in a shell."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

from kvkit.formats import FLOATS, NAMED
from kvkit.formats.rotations import ROTATIONS
from kvkit.layouts import NAMED as LAYOUTS
from kvkit.layouts.named import ALIASES
from kvkit.operators import OPERATORS
from kvkit_cli.arguments import settable


def operators(ctx: click.Context, param: click.Parameter, begun: str) -> list[str]:
    """Return the operators whose name, or its last part, begins with `begun`."""
    return [name for name in OPERATORS if name.startswith(begun) or name.split(".")[-1].startswith(begun)]


def settings(ctx: click.Context, param: click.Parameter, begun: str) -> list[str]:
    """Return completions of --set: names of settings, and after "=" names of values."""
    named = [word for word in (ctx.params.get("operator"), *ctx.args) if word in OPERATORS]
    legal = settable(OPERATORS[named[0]]) if named else {}
    name, sign, _ = begun.partition("=")
    if not sign:
        return [f"{each}=" for each in legal if each.startswith(begun)]
    whole = [f"{name}={value}" for value in legal.get(name, (None, []))[1]]
    return [each for each in whole if each.startswith(begun)]


def layouts(ctx: click.Context, param: click.Parameter, begun: str) -> list[str]:
    """Return the names of layouts that begin with `begun`."""
    return [name for name in [*LAYOUTS, *ALIASES] if name.startswith(begun)]


def files_and_layouts(ctx: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:
    """Return the names of layouts that begin with `begun`, and let the shell complete files, too."""
    return [*map(CompletionItem, layouts(ctx, param, begun)), CompletionItem(begun, type="file")]


def formats(ctx: click.Context, param: click.Parameter, begun: str) -> list[str]:
    """Return completions of the last format in a list with commas; after a "+" its rotation is completed."""
    before, comma, last = begun.rpartition(",")
    base, plus, _ = last.partition("+")
    known = [f"{base}+{rotation}" for rotation in ROTATIONS] if plus else [*NAMED, *map(str, FLOATS)]
    return [f"{before}{comma}{name}" for name in known if name.startswith(last)]
