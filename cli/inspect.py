"""`kvkit inspect`: show what is in a file."""

import click

from kvkit import tools
from kvkit.tools.contents import by_patterns
from kvkit.tools.model_facts import with_model
from kvkit_cli import tool


@click.command(cls=tool.ToolVerb)
@click.argument("source", metavar="FILE", type=tool.PATH)
@click.option("--stats", is_flag=True, help="Show minimum, maximum, NaN and rows of zeros of each layer.")
@tool.layout()
@tool.names
@tool.sizes()
@tool.model
@tool.json_option
def inspect(source, keys, values, fused, model, as_json, **options):
    """List what is in a file: arrays, layout, tables, numbers.

    FILE is a .npz, .npy or .safetensors file, a file of torch.save, a prompt cache of MLX, a session or state
    of llama.cpp, or a chunk of LMCache.

    \b
    Examples:
      kvkit inspect cache.safetensors --stats
      kvkit inspect slot.bin --model model.gguf
      kvkit inspect pool.npy --layout "b n h (kv c)" --sizes c=64
    """
    tool.show_result(
        tools.inspect(with_model(by_patterns(source, keys, values, fused), model), **options), as_json
    )
