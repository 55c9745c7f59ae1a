"""`kvkit ops`: what there is to run."""

import click

from kvkit.operators import OPERATORS
from kvkit_cli import show


@click.command()
def ops():
    """List the operators."""
    table = show.table(None, "operator", "what it does, and where it is specified")
    for op in OPERATORS.values():
        table.add_row(op.name, f"{op.summary}\n{op.source}", end_section=True)
    show.console().print(table)
