"""`kvkit size`: compute how many bytes the cache of a model takes."""

import click

from kvkit import tools
from kvkit.errors import KvkitError
from kvkit_cli import complete, tool


def parse_numbers(context, param, text):
    """Parse a text such as 4096,32768 into numbers; None for an empty text."""
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    if not all(part.isascii() and part.isdecimal() and len(part) < 16 for part in parts):
        raise KvkitError(f"{param.opts[-1]}: expected NUMBER,..., as 4096,32768, got {text}")
    return [int(part) for part in parts] or None


@click.command(cls=tool.ToolVerb, words={"format": "--formats"})
@click.argument("model", metavar="MODEL", type=tool.PATH)
@click.option("--tokens", metavar="N,...", callback=parse_numbers, help="Lengths of a sequence: 4096,32768.")
@click.option(
    "--batch", metavar="N,...", callback=parse_numbers, default="1", help="Sequences of that length."
)
@click.option(
    "--formats", metavar="NAME,...", default="float16", show_default=True, help="Formats, as in kvkit study.",
    shell_complete=complete.formats,
)  # fmt: skip
@click.option(
    "--engine", type=click.Choice(["exact", "transformers", "vllm", "llama.cpp"]), default="exact",
    show_default=True, help="The engine whose pages and windows round sizes up.",
)  # fmt: skip
@click.option(
    "--step", type=int, metavar="N", help="New tokens in a step; sliding windows need room for them."
)
@click.option(
    "--fit", metavar="BYTES", help="Print the longest contexts that fit into so much memory: 24GiB."
)
@tool.json_option
def size(model, as_json, **options):
    """Compute how many bytes the cache of a model takes.

    MODEL is a config.json of transformers, a folder that has one, or a GGUF file. Its weights are not read.

    \b
    Examples:
      kvkit size config.json --formats float16,q8_0 --batch 1,8
      kvkit size model.gguf --engine llama.cpp --fit 24GiB
    """
    tool.show_result(tools.size(model, **options), as_json)
