"""`kvkit ops`: what there is to run."""

import click
from rich.padding import Padding

from kvkit.operators import OPERATORS
from kvkit_cli import show


@click.command()
def ops():
    """List the operators."""
    screen = show.console()
    for op in OPERATORS.values():
        screen.print(op.name, style="bold")
        screen.print(Padding(f"{op.summary}\n{op.source}", (0, 0, 1, 4), expand=False))
    screen.print("kvkit describe OPERATOR shows what one takes and gives.")
