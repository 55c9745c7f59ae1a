"""`kvkit check`: what cannot be right in a file of tables, slots and caches."""

import json
from functools import partial

import click

from kvkit import tools
from kvkit.errors import KvkitError
from kvkit_cli import clusters, show, tool

COLOURS = {"error": "red", "warning": "yellow"}


@click.command(cls=tool.ToolVerb)
@click.argument("sources", metavar="FILE...", type=tool.PATH, nargs=-1, required=True)
@click.option("--after", metavar="FILE", type=tool.PATH, help="The caches after a call, of one FILE.")
@tool.layout(about="The line or name of the layout that the cache lies in.")
@clusters.on_cluster
@click.option("--json", "as_json", is_flag=True, help="Print JSON: of several files, by their names.")
@click.pass_context
def check(ctx, sources, after, layout, dask, as_json):
    """Say what cannot be right in page tables, slots, layouts, scales and data.

    FILE holds arrays under the names of `kvkit.tools.check`: block_tables and context_lens, num_blocks and
    page_size; slot_mapping, slot_sequences, slot_positions; cache, or key_cache and value_cache, with their
    scales. Of the caches of --after only the rows of its slot_mapping may have changed.

    The exit code is 1 if there is an error among the findings, 0 if there are warnings or none.

    \b
    Examples:
      kvkit check step.npz
      kvkit check pool.npz --layout vllm-lbnhc
      kvkit check before.npz --after after.npz --json
      kvkit check dumps/*.npz --dask local
    """
    if after is not None and len(sources) > 1:
        raise KvkitError(f"--after {after}: expected one FILE before it, got {len(sources)}")
    several, results = len(sources) > 1, {}
    with clusters.mapper(dask) as mapper:
        for name, found in zip(sources, mapper(partial(check_file, after, layout), sources), strict=True):
            results[str(name)] = found
            if as_json:
                continue
            if several:
                show.text(f"{name}:", lambda line: "bold")
            show.text(ctx.command.in_shell(str(found)), lambda line: COLOURS.get(line.partition(" ")[0]))
    if as_json:
        whole = {name: found.to_dict() for name, found in results.items()}
        for found in whole.values():
            for each in found["findings"]:
                each["hint"] = ctx.command.in_shell(each["hint"])
        click.echo(json.dumps(whole if several else next(iter(whole.values())), indent=2))
    ctx.exit(1 if any(found.errors for found in results.values()) else 0)


def check_file(after, layout, source):
    """Return what is found in a file."""
    with clusters.naming(source):
        return tools.check(source, after, layout=layout)
