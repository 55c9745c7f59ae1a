"""`kvkit check`: what cannot be right in a file of tables, slots and caches."""

import json
from pathlib import Path

import click

from kvkit.tools import check as look
from kvkit_cli import show

PATH = click.Path(path_type=Path, readable=False)
COLOURS = {"error": "red", "warning": "yellow"}


@click.command()
@click.argument("source", metavar="FILE", type=PATH)
@click.argument("after", metavar="[AFTER]", type=PATH, required=False)
@click.option("--layout", metavar="LINE", help="The line or name of the layout that the cache lies in.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def check(ctx, source, after, layout, as_json):
    """Say what cannot be right in page tables, slots, layouts, scales and data.

    FILE holds arrays under the names of `kvkit.tools.check`: block_tables and context_lens, num_blocks and
    page_size; slot_mapping, slot_sequences, slot_positions; key_cache, value_cache, key_scale, value_scale.
    AFTER holds the caches after a call, of which only the rows of its slot_mapping may have changed.

    The exit code is 1 if there is an error among the findings, 0 if there are warnings or none.

    \b
    Examples:
      kvkit check step.npz
      kvkit check pool.npz --layout vllm-lbnhc
      kvkit check before.npz after.npz --json
    """
    found = look(source, after, layout=layout)
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2))
    else:
        screen = show.console()
        for line in str(found).splitlines():
            screen.print(line, style=COLOURS.get(line.partition(" ")[0]), soft_wrap=True)
    ctx.exit(1 if found.errors else 0)
