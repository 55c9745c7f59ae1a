"""`kvkit inspect`: show what is in a file."""

from functools import partial

import click

from kvkit import tools
from kvkit.tools.contents import by_patterns
from kvkit.tools.model_facts import with_model
from kvkit_cli import show, tool


@click.command(cls=tool.ToolVerb)
@click.argument("source", metavar="FILE", type=tool.PATH)
@click.option("--layer", type=int, metavar="N", help="With --row: print the keys and values of this layer.")
@click.option("--row", type=int, metavar="N", help="The row, counted through the layer's blocks.")
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
      kvkit inspect cache.safetensors --layer 3 --row 17
      kvkit inspect slot.bin --model model.gguf
      kvkit inspect pool.npy --layout "b n h (kv c)" --sizes c=64
    """
    contents = with_model(by_patterns(source, keys, values, fused), model)
    total = source.stat().st_size if options["stats"] and source.is_file() else 0
    with show.progress(f"counting {source.name}", total, as_json) as advance:
        found = show.interruptible(partial(tools.inspect, contents, advance=advance, **options))
    tool.show_result(found, as_json)
