"""`kvkit inspect`: what is in a file."""

import json
from pathlib import Path

import click

from kvkit import tools
from kvkit_cli.pairs import sizes_of


@click.command()
@click.argument("file", type=click.Path(path_type=Path, readable=False))
@click.option(
    "--stats", is_flag=True, help="Least, largest, NaN and rows of zeros, of keys and values by layer."
)
@click.option(
    "--layout", metavar="NAME", help="How its cache lies, if it does not say so: see kvkit layouts."
)
@click.option("--sizes", metavar="AXIS=N,...", help="Lengths of axes that shapes do not tell: h=8.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(file, stats, layout, sizes, as_json):
    """Say what is in a file: arrays, layout, tables, numbers.

    FILE is a .npz, .npy or .safetensors file, one of torch.save, a prompt cache of MLX, a session or state of
    llama.cpp; it is told by how it begins.

    \b
    Examples:
      kvkit inspect cache.safetensors --stats
      kvkit inspect pool.npy --layout vllm-lbnhc --sizes c=64
    """
    found = tools.inspect(file, layout=layout, sizes=sizes_of(sizes), stats=stats)
    click.echo(json.dumps(found.to_dict(), indent=2, default=str) if as_json else str(found))
