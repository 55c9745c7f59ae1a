"""Compare kinds of cache (`smollm2.py --compare`): what each costs, and what it does to the model.

The first tokens of data/bread.txt are the prompt. The others are fed, some one by one, the rest a few at a
time as drafts would be; what the model expects next is held against what it expects over a float32 cache,
and against the text.
"""

import itertools
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.progress import track
from smollm2_caches import KINDS, SINK, Kind, attention, nbytes

from kvkit.cache import QuantizedCache
from kvkit_cli import show

TEXT = Path(__file__).parent / "data" / "bread.txt"
PROMPT, ONE_BY_ONE, DRAFT = 96, 32, 8  # tokens: at first, fed alone to measure speed, fed at a time


def coded(bits, axis):
    """Return a kind of cache that codes all tokens but the first, as soon as their group is full."""
    keys = f"uint{bits}:channel" if axis == "channel" else f"uint{bits}"

    def make(model, tokens, folder):
        return QuantizedCache(f"{keys}/uint{bits}", num_layers=model.num_layers, residual_length=0, sink=SINK)

    return Kind("", make)


CODED = {
    f"int{bits}, keys per {axis}": coded(bits, axis) for bits in (8, 4, 2) for axis in ("channel", "token")
}


@dataclass
class Reading:
    """Holds a model's predictions for a text."""

    best: np.ndarray  # the most likely token, at each token of the text after the prompt
    loss: np.ndarray  # -log of the probability of the text's token
    rate: float  # tokens a second
    size: float  # bytes of the cache for each token

    @property
    def perplexity(self):
        return float(np.exp(self.loss.mean()))


def read(model, tokens, kind, folder):
    """Read a text over a kind of cache."""
    cache = kind.make(model, len(tokens), folder)
    attend, last = attention(model, cache, kind.dtype), len(tokens) - 1  # the last token is not fed
    alone = min(PROMPT + ONE_BY_ONE, last)
    ends = [*range(PROMPT, alone), *range(alone, last, DRAFT), last]
    best, loss, times = [], [], []
    for begin, end in itertools.pairwise([0, *ends]):
        clock = time.perf_counter()
        hidden = model.forward(tokens[begin:end], attend)
        logits = model.logits(hidden if begin else hidden[-1:])
        times.append(time.perf_counter() - clock)
        next_tokens = np.array(tokens[end + 1 - len(logits) : end + 1])
        best.append(logits.argmax(1))
        total = np.logaddexp.reduce(logits, 1, dtype=np.float64)
        loss.append(total - np.take_along_axis(logits, next_tokens[:, None], 1)[:, 0])
    rate, size = 1 / np.median(times[1:ONE_BY_ONE]), nbytes(cache) / last
    return Reading(np.concatenate(best), np.concatenate(loss), rate, size)


def paragraphs(path):
    """Return a text with each paragraph in one line."""
    return "\n\n".join(" ".join(text.split()) for text in path.read_text().split("\n\n"))


def compare_caches(model, tokenizer, out):
    """Print the tables and plot."""
    tokens = tokenizer.encode(paragraphs(TEXT)).ids
    readings = {}
    for name, kind in track((KINDS | CODED).items(), "reading", transient=True):
        with tempfile.TemporaryDirectory() as folder:
            readings[name] = read(model, tokens, kind, folder)
    for title, kinds in ("Caches", KINDS), ("Codes alone", CODED):
        table = show.table(title, "cache", "B/token", "share", "tokens/s", "agreement", "perplexity")
        for name in kinds:
            table.add_row(name, *cells(readings[name], readings["fp16"], readings["fp32"]))
        show.console().print(table)
    print(
        f"{len(tokens) - PROMPT} tokens after {PROMPT} of a text. share: of fp16. tokens/s: the median step\n"
        "agreement: how often the same token is most likely next as over fp32. Codes\n"
        f"alone: all tokens but the first {SINK} and, where keys are coded per channel, the\n"
        "last ones, which fill no group."
    )
    plot(out / "smollm2.png", readings)


def cells(reading, half, exact):
    agreement = (reading.best == exact.best).mean()
    yield from (f"{reading.size:.0f}", f"{reading.size / half.size:.0%}", f"{reading.rate:.1f}")
    yield from (f"{agreement:.1%}", f"{reading.perplexity:.2f}")


def plot(path, readings):
    """Draw memory against perplexity, if matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("No plot, which needs matplotlib: pip install '.[plot]' in a clone")
        return
    axes = (figure := Figure(figsize=(7, 4), layout="constrained")).subplots()
    for color, axis in enumerate(("channel", "token")):
        chosen = [reading for name, reading in readings.items() if name.endswith(f"per {axis}")]
        points = [(reading.size / 1024, reading.perplexity) for reading in chosen]
        axes.plot(*zip(*points, strict=True), "o-", color=f"C{color}", label=f"8, 4, 2 bits, keys per {axis}")
    plain = [readings[name] for name in ("fp32", "fp16")]
    points = [(reading.size / 1024, reading.perplexity) for reading in plain]
    axes.plot(*zip(*points, strict=True), "s-", color="C2", label="float32, float16")
    axes.set(xlabel="KiB a token", ylabel="perplexity", xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}")
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"The plot is {path}.")
