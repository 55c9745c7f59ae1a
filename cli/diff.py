"""`kvkit diff`: find where two caches or outputs differ, and why."""

import click

from kvkit import tools
from kvkit.tools.contents import by_patterns_of_any
from kvkit.tools.model_facts import with_model
from kvkit_cli import clusters, show, tool


@click.command(cls=tool.ToolVerb)
@click.argument("a", metavar="A", type=tool.PATH)
@click.argument("b", metavar="B", type=tool.PATH)
@tool.layout("--layout-a", "layout_a", "The layout of the cache in A.")
@tool.layout("--layout-b", "layout_b", "The layout of the cache in B.")
@click.option("--like", metavar="IN", type=tool.PATH, help="The inputs of the call that wrote A and B.")
@click.option("--axes", help="Axes of arrays that have no layout, from l b n h c.")
@click.option("--atol", type=float, default=0.0, help="Absolute tolerance of an element.")
@click.option("--rtol", type=float, default=0.0, help="Relative tolerance, added to the absolute one.")
@click.option("--ulp", type=int, default=0, help="Tolerance in units in the last place, instead.")
@click.option("--plot", metavar="FILE", type=tool.PATH, help="Draw a map of differences, tokens by heads.")
@tool.sizes()
@tool.model
@tool.names
@clusters.on_cluster
@tool.json_option
@click.pass_context
def diff(ctx, a, b, keys, values, fused, model, as_json, dask, **options):
    """Find where two caches or outputs differ, and why.

    A is the expected file, B the actual one. They have arrays of equal names, or caches in two layouts. Each
    cause is printed with the share of differences that it explains. Without tolerances, bits are compared.

    The exit code is 0 if nothing differs, 1 if something does, 2 for a wrong command or file.

    \b
    Examples:
      kvkit diff expected.npz device.npz
      kvkit diff vllm.npz flashinfer.npz --layout-a vllm-lbnhc --layout-b flashinfer-nhd
      kvkit diff expected.npz device.npz --like inputs.npz --plot map.png
    """
    total = a.stat().st_size if a.is_file() else 0
    with (
        clusters.mapper(dask) as mapper,
        show.progress(f"comparing {a.name}", total, quiet=as_json or dask is not None) as advance,
    ):
        sides = [with_model(side, model) for side in by_patterns_of_any((a, b), keys, values, fused)]
        found = tools.diff(*sides, advance=advance, mapper=mapper, **options)
    causes = set(map(str, found.causes))
    tool.show_result(found, as_json, lambda line: "bold" if line in causes else None)
    ctx.exit(0 if found.equal else 1)
