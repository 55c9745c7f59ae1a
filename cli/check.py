"""`kvkit check`: find errors in the tables, slots and caches of a file."""

import json
from functools import partial

import click

from kvkit import tools
from kvkit.errors import KvkitError
from kvkit.tools.contents import by_patterns
from kvkit.tools.model_facts import with_model
from kvkit_cli import clusters, show, tool

COLOURS = {"error": "red", "warning": "yellow"}


@click.command(cls=tool.ToolVerb)
@click.argument("sources", metavar="FILE...", type=tool.PATH, nargs=-1)
@click.option("--before", metavar="FILE", type=tool.PATH, help="The same as FILE, to be read with --after.")
@click.option("--after", metavar="FILE", type=tool.PATH, help="The caches after the call with FILE's inputs.")
@tool.layout(about="The layout of the cache: a name or a line.")
@tool.sizes()
@tool.model
@tool.names
@clusters.on_cluster
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON; for several files, one object by file name."
)
@click.pass_context
def check(ctx, sources, before, after, keys, values, fused, dask, as_json, **options):
    """Find errors in page tables, slots, layouts, scales and data.

    FILE holds arrays under the names of `kvkit.tools.check`: block_tables and context_lens, num_blocks and
    page_size; slot_mapping, slot_sequences, slot_positions; cache, or key_cache and value_cache, with their
    scales. With --after, rows that changed must be in slot_mapping; without slot_mapping, they must be new in
    the tables of the second file.

    The exit code is 1 if an error is found, 2 if nothing was checked in a file, otherwise 0.

    \b
    Examples:
      kvkit check step.npz
      kvkit check pool.npz --layout vllm-lbnhc
      kvkit check --before before.npz --after after.npz --json
      kvkit check dumps/*.npz --dask local
    """
    sources = (*sources, *([] if before is None else [before]))
    if before is not None and after is None:
        raise KvkitError(f"--before {before}: expected --after beside it, got none")
    if not sources:
        raise KvkitError("check: expected FILE, or --before and --after, got neither")
    if after is not None and len(sources) > 1:
        raise KvkitError(f"--after {after}: expected one FILE before it, got {len(sources)}")
    several, results = len(sources) > 1, {}
    patterns = keys, values, fused
    with (
        clusters.mapper(dask) as mapper,
        show.task_bar("rules", quiet=as_json or dask is not None) as progress,
    ):
        work = partial(check_file, after, patterns, options, progress, dask is None)
        for name, found in zip(sources, mapper(work, sources), strict=True):
            results[str(name)] = found
            if as_json:
                continue
            if several:
                show.text(f"{name}:", lambda line: "bold")
            show.text(ctx.command.in_shell(str(found)), lambda line: COLOURS.get(line.partition(" ")[0]))
    if as_json:
        reports = {name: found.to_dict() for name, found in results.items()}
        for report in reports.values():
            for finding in report["findings"]:
                finding["hint"] = ctx.command.in_shell(finding["hint"])
        click.echo(json.dumps(reports if several else next(iter(reports.values())), indent=2))
    if any(found.errors for found in results.values()):
        ctx.exit(1)
    ctx.exit(0 if all(found.checked for found in results.values()) else 2)


def check_file(after, patterns, options, progress, is_here, source):
    """Check a file; errors name it. A task of this process, `is_here`, can be interrupted at any time."""

    def with_options(file):
        return None if file is None else with_model(by_patterns(file, *patterns), options["model"])

    with clusters.naming(source):
        about = {"layout": options["layout"], "sizes": options["sizes"], "progress": progress}
        work = partial(tools.check, with_options(source), with_options(after), **about)
        return show.interruptible(work) if is_here else work()
