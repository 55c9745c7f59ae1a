"""Complete operators and settings in a shell, for `kvkit describe`, `kvkit run` and `--set`."""

from __future__ import annotations

import click

from kvkit.operators import OPERATORS
from kvkit_cli.arguments import settable


def operators(ctx: click.Context, param: click.Parameter, begun: str) -> list[str]:
    """Return names of operators that begin so, or whose last part does."""
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
