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
    """Return completions of --set: names of settings, and, after "=", names of values."""
    named = [word for word in (ctx.params.get("operator"), *ctx.args) if word in OPERATORS]
    legal = settable(OPERATORS[named[0]]) if named else {}
    name, sign, _ = begun.partition("=")
    if not sign:
        return [f"{each}=" for each in legal if each.startswith(begun)]
    return [
        f"{name}={value}" for value in legal.get(name, (None, []))[1] if f"{name}={value}".startswith(begun)
    ]


def layouts(ctx: click.Context, param: click.Parameter, begun: str) -> list[str]:
    """Return names of layouts that begin so."""
    return [name for name in [*LAYOUTS, *ALIASES] if name.startswith(begun)]


def files_and_layouts(ctx: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:
    """Return names of layouts, and let the shell complete files."""
    return [*map(CompletionItem, layouts(ctx, param, begun)), CompletionItem(begun, type="file")]


def formats(ctx: click.Context, param: click.Parameter, begun: str) -> list[str]:
    """Return names of formats that complete the last entry of a list with commas, also after a "+"."""
    before, comma, last = begun.rpartition(",")
    base, plus, _ = last.partition("+")
    known = (
        [f"{base}+{rotation}" for rotation in ROTATIONS] if plus else [*NAMED, *(one.name for one in FLOATS)]
    )
    return [f"{before}{comma}{name}" for name in known if name.startswith(last)]
