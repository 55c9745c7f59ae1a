"""`kvkit inspect`: what is in a file."""

import click

from kvkit import tools
from kvkit_cli import tool


@click.command(cls=tool.ToolVerb)
@click.argument("source", metavar="FILE", type=tool.PATH)
@click.option("--stats", is_flag=True, help="Count least, largest, NaN and rows of zeros, layer by layer.")
@tool.layout()
@tool.sizes()
@tool.json_option
def inspect(source, as_json, **options):
    """Say what is in a file: arrays, layout, tables, numbers.

    FILE is a .npz, .npy or .safetensors file, one of torch.save, a prompt cache of MLX, a session or state of
    llama.cpp; it is told by how it begins.

    \b
    Examples:
      kvkit inspect cache.safetensors --stats
      kvkit inspect pool.npy --layout vllm-lbnhc --sizes c=64
    """
    tool.tell(tools.inspect(source, **options), as_json)
