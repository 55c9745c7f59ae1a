"""`kvkit vectors`: make and use packs of golden vectors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.progress import Progress

from kvkit.tools import vectors as tools
from kvkit_cli import clusters, show
from kvkit_cli.tool import parse_sizes

PATH = click.Path(path_type=Path, readable=False)
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
OPERATOR = click.option("--operator", metavar="OP", help="Only the cases of this operator.")


@click.group()
def vectors() -> None:
    """Make, verify, replay, compare and export packs of golden vectors.

    A pack is a folder with manifest.json and a .npy file for every array. Arrays of bfloat16 and fp8 are
    integers of the same bits; the manifest has their type. docs/tools/vectors.md describes packs.

    \b
    Examples:
      kvkit vectors make pack --suite pmx
      kvkit vectors make pack paged_attention --shapes num_kv_heads=8,head_dim=64,page_size=16
      kvkit vectors verify pack
      kvkit vectors replay pack --backend cuda
      kvkit vectors diff pack results
      kvkit vectors export pack onnx-pack --to onnx
    """


def print_result(ctx: click.Context, result: Any, as_json: bool) -> None:
    """Print a result, and exit with code 1 if it is not ok."""
    if as_json:
        click.echo(json.dumps(result.to_dict(), indent=2))
    else:
        show.text(result)
    ctx.exit(0 if getattr(result, "ok", True) else 1)


def with_progress(what: str, quiet: bool, function: Callable[..., Any], **arguments: Any) -> Any:
    """Call a function whose `advance` counts cases, and show a bar on a terminal."""
    screen = show.console(stderr=True)
    if quiet or not screen.is_terminal:
        return function(**arguments)
    with Progress(console=screen, transient=True) as bars:
        task = bars.add_task(what, total=None)
        return function(**arguments, advance=lambda count: bars.advance(task, count))


@vectors.command()
@click.argument("folder", metavar="FOLDER", type=PATH)
@click.argument("operator", metavar="[OP]", required=False)
@click.option(
    "--suite", type=click.Choice(list(tools.SUITES)), help="The default is OP's suite, or pmx without OP."
)
@click.option(
    "--shapes", metavar="NAME=N,...", help="Sizes by name (num_kv_heads, head_dim, page_size, batch)."
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Equal seeds give equal bytes."
)
@click.option("--raw", is_flag=True, help="Write .bin files, which have only the bytes of arrays.")
@AS_JSON
@click.pass_context
def make(ctx: click.Context, folder: Path, as_json: bool, shapes: str | None, **options: Any) -> None:
    """Write a pack of a suite or of one operator into a new folder."""
    options["shapes"] = parse_sizes(shapes, "--shapes")
    print_result(ctx, with_progress("making", as_json, tools.make, folder=folder, **options), as_json)


@vectors.command()
@click.argument("folder", metavar="FOLDER", type=PATH)
@clusters.on_cluster
@AS_JSON
@click.pass_context
def verify(ctx: click.Context, folder: Path, dask: str | None, as_json: bool) -> None:
    """Check the hashes, versions and list of files of a pack."""
    with clusters.mapper(dask) as mapper:
        found = tools.verify(folder, mapper=mapper)
    print_result(ctx, found, as_json)


@vectors.command()
@click.argument("folder", metavar="FOLDER", type=PATH)
@click.option("--backend", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@OPERATOR
@AS_JSON
@click.pass_context
def replay(ctx: click.Context, folder: Path, as_json: bool, **options: Any) -> None:
    """Run the cases of a pack, or dumps of KVKIT_LOG=10, with kvkit."""
    print_result(ctx, with_progress("replaying", as_json, tools.replay, folder=folder, **options), as_json)


@vectors.command("diff")
@click.argument("folder", metavar="FOLDER", type=PATH)
@click.argument("results", metavar="RESULTS", type=PATH)
@OPERATOR
@click.option("--case", metavar="NAME", help="Only this case, or those that a pattern fits, as 'plain-*'.")
@AS_JSON
@click.pass_context
def diff_results(ctx: click.Context, folder: Path, results: Path, as_json: bool, **options: Any) -> None:
    """Compare a device's results, files CASE/NAME.npy, with a pack."""
    found = with_progress("comparing", as_json, tools.diff, folder=folder, results=results, **options)
    print_result(ctx, found, as_json)


@vectors.command()
@click.argument("folder", metavar="FOLDER", type=PATH)
@click.argument("target", metavar="TARGET", type=PATH)
@click.option("--to", type=click.Choice(["onnx"]), default="onnx", show_default=True)
@AS_JSON
@click.pass_context
def export(ctx: click.Context, folder: Path, target: Path, as_json: bool, to: str) -> None:
    """Write cases as ONNX's test data sets, where ONNX has the operator."""
    print_result(ctx, tools.export(folder, target, to=to), as_json)
