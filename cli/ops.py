"""`kvkit ops`: list the operators."""

import click
from rich.padding import Padding

from kvkit.operators import OPERATORS
from kvkit_cli import show


@click.command()
@click.option("--json", "for_programs", is_flag=True, help="Print JSON.")
def ops(for_programs: bool) -> None:
    """List the operators.

    \b
    Examples:
      kvkit ops
      kvkit ops --json | jq -r '.[].name'
    """
    if for_programs:
        facts = "name", "summary", "source"
        show.as_json([{fact: getattr(op, fact) for fact in facts} for op in OPERATORS.values()])
        return
    for op in OPERATORS.values():
        show.out(op.name, style="bold")
        show.out(Padding(f"{op.summary}\n{op.source}", (0, 0, 1, 4), expand=False))
    show.out("kvkit describe OPERATOR shows the inputs, attributes and outputs of one.")
