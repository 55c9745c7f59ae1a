"""`kvkit size`: compute how many bytes the cache of a model takes."""

import click

from kvkit import tools
from kvkit.errors import KvkitError
from kvkit_cli import complete, tool


def parse_numbers(context, param, text):
    """Parse a text such as 1,8 into numbers; None for an empty text."""
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    if not all(part.isascii() and part.isdecimal() and len(part) < 16 for part in parts):
        raise KvkitError(f"{param.opts[-1]}: expected NUMBER,..., as 1,8, got {text}")
    return [int(part) for part in parts] or None


@click.command(
    cls=tool.ToolVerb,
    words={"format": "--formats", "residual_length": "--residual", "num_hidden_layers": "--layers",
           "num_attention_heads": "--kv-heads", "head_dim": "--head-dim"},
)  # fmt: skip
@click.argument("model", metavar="[MODEL]", required=False)
@click.option("--layers", "num_layers", type=int, metavar="N", help="Without MODEL: how many layers it has.")
@click.option("--kv-heads", "num_kv_heads", type=int, metavar="N", help="Without MODEL: heads of keys.")
@click.option("--head-dim", type=int, metavar="N", help="Without MODEL: elements of a head.")
@click.option("--tokens", metavar="N,...", help="Lengths of a sequence: 4096,128k (k is 1,024).")
@click.option(
    "--batch", metavar="N,...", callback=parse_numbers, default="1", help="Sequences of that length."
)
@click.option(
    "--formats", metavar="NAME,...", default="float16", show_default=True, help="Formats, as in kvkit study.",
    shell_complete=complete.formats,
)  # fmt: skip
@click.option(
    "--engine", type=click.Choice(["exact", "kvkit", "transformers", "vllm", "llama.cpp"]), default="exact",
    show_default=True, help="The engine whose pages and windows round sizes up.",
)  # fmt: skip
@click.option(
    "--step",
    type=tool.TokenCount(),
    metavar="N",
    help="New tokens in a step; sliding windows need room for them.",
)
@click.option(
    "--fit",
    metavar="BYTES",
    help="Print the longest contexts that fit into so much memory: 24GiB; and if those of --tokens do.",
)
@click.option("--weights", metavar="BYTES", help="With --fit: what the model's weights take of it: 16GB.")
@click.option("--residual", "residual_length", type=int, metavar="N",
              help="With --engine kvkit: recent tokens that stay unquantized (128).")  # fmt: skip
@click.option("--sink", type=int, metavar="N", help="With --engine kvkit: first tokens that do (4).")
@tool.json_option
def size(model, as_json, **options):
    """Compute how many bytes the cache of a model takes.

    MODEL is a config.json of transformers, a folder that has one, a GGUF file, or the name of a public model.
    Its weights are not read.

    \b
    Examples:
      kvkit size llama-3.1-8b --tokens 8k,128k
      kvkit size config.json --formats float16,q8_0 --batch 1,8
      kvkit size model.gguf --engine llama.cpp --fit 24GiB --weights 16GB
      kvkit size --layers 32 --kv-heads 8 --head-dim 128
    """
    tool.show_result(tools.size(model, **options), as_json)
