"""Run RazorAttention on a model's keys and values: what does a compressed cache do to attention?

data/smollm2_kv.npz has what SmolLM2-135M-Instruct computed for two texts (make_smollm2_kv.py). The last 32
tokens of each are decoded, those before are its prompt. One key head of each layer is a retrieval head and
keeps every token; the others keep 4 sinks, the last fifth of the prompt, and the mean of what lies between,
weighed as the tokens it stands for. How far is attention from that to the whole cache, and how far without
the means?

    python examples/razor_attention.py [FOLDER for the plot, demo-out if not given]
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvkit import ascend
from kvkit_cli import npz, show

DATA = Path(__file__).parent / "data" / "smollm2_kv.npz"
STEPS, BLOCK_SIZE = 32, 16
POLICY = {"sinks": 4, "recent": 0, "fraction": 5}  # the paper keeps a fifth and at least 4,000 recent tokens
THETA = 1e5  # of the model's rotary embedding
MODES = {"mean": ascend.CompressType.KVHEAD_ROPE, "dropped": ascend.CompressType.OMNI}


@dataclass(frozen=True)
class Layer:
    """Holds a layer's keys and values of all tokens, packed, and its queries."""

    key: np.ndarray  # [tokens, heads, dim]
    value: np.ndarray
    query: np.ndarray  # [steps, sequences, heads, dim]
    starts: np.ndarray  # where each sequence begins in key and value
    lengths: np.ndarray  # of the prompts

    def tokens(self, first, last):
        """Return keys and values of the positions [first, last) of each sequence."""
        rows = np.concatenate(list(map(np.arange, self.starts + first, self.starts + last)))
        return self.key[rows], self.value[rows]


def main():
    layers = list(read(npz.read(DATA).arrays))
    lengths, heads = layers[0].lengths, layers[0].key.shape[1]
    print(
        f"A model's keys and values of two texts: {len(layers)} layers of {heads} key heads. Queries are\n"
        f"the last five of each, turned to {STEPS} steps after prompts of {lengths.tolist()} tokens.\n"
        "Errors: root mean square over all steps, relative to the outputs of the same heads. Memory kept:\n"
        "rows after the last step, means among them, of those of the whole cache.\n"
    )
    where = ascend.slots(lengths, block_size=BLOCK_SIZE, headroom=STEPS)
    exact = np.stack([decode(layer, where, heads, {}, {}) for layer in layers])
    # Retrieval heads are those that lose most when all are compressed, on the first text.
    lost = squares(np.stack([razor(layer, [], MODES["mean"])[0] for layer in layers]) - exact, heads)
    found = lost[:, :, 0].sum(1).argmax(-1)
    runs = {
        name: [razor(layer, [head], mode) for layer, head in zip(layers, found, strict=True)]
        for name, mode in MODES.items()
    }
    errors = {name: squares(np.stack([x for x, _ in run]) - exact, heads) for name, run in runs.items()}
    size, kept = squares(exact, heads), np.stack([rows for _, rows in runs["mean"]])
    retrieval, total = np.arange(heads) == found[:, None], (lengths + STEPS).sum()
    kinds = {"retrieval": retrieval, "compressed": ~retrieval, "all": retrieval | True}
    table = show.table("Attention error", "heads", "number", "memory kept", *MODES)
    for kind, chosen in kinds.items():
        cells = (f"{relative(error, size, chosen):.2%}" for error in errors.values())
        table.add_row(kind, str(chosen.sum()), f"{kept[chosen].mean() / total:.0%}", *cells)
    show.console().print(table)
    plot(Path(*(sys.argv[1:] or ["demo-out"])) / "razor_attention.png", errors, size, kinds)


def read(data):
    """Yield the layers of the file. A step has all queries of a text, as if more heads shared a key head."""
    starts, heads = data["seqstarts"], data["current_key"].shape[2]
    for key, value, query in zip(data["current_key"], data["current_value"], data["query"], strict=True):
        sequences, own, _, dim = query.shape
        steps = np.arange(-STEPS, 0)[:, None] - np.arange(-own, 0)  # from where a query was made
        turned = turn(query[:, None], steps).reshape(sequences, STEPS, own, heads, -1, dim)
        query = turned.transpose(1, 0, 3, 2, 4, 5).reshape(STEPS, sequences, -1, dim)
        yield Layer(key, value, query, starts[:-1], np.diff(starts) - STEPS)


def turn(x, positions):
    """Return x [..., heads, dim], rotated by so many positions more."""
    half = x.shape[-1] // 2
    angles = positions[..., None, None] * THETA ** (-np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag], -1).astype(x.dtype)


def razor(layer, retrieval, mode):
    """Attend to a cache whose heads keep rows of their own; return outputs, and the rows of each head."""
    lengths, heads = layer.lengths, layer.key.shape[1]
    wins, offsets = ascend.razor_windows(lengths, heads, retrieval, **POLICY)
    blocks = {"compress_type": mode, "block_size": BLOCK_SIZE, "headroom": STEPS}
    where = ascend.compressed_slots(lengths, heads, wins, offsets, **blocks)
    prompt = {"compress_type": mode, "wins": wins, "seq_lens": lengths, "offset_index": offsets}
    token = prompt | {"wins": 0 * wins, "seq_lens": 0 * lengths + 1, "offset_index": 0 * offsets - 1}
    outputs = decode(layer, where, 1, prompt, token, where.razor_offset(layer.key.shape[2] ** -0.5))
    return outputs, (where.context_lens + STEPS).reshape(-1, heads).sum(0)


def decode(layer, where, cache_heads, prompt, token, razor_offset=None):
    """Store the prompts, then append a token a step and attend; return [steps, sequences, heads, dim]."""
    shape, lengths = (where.num_blocks, BLOCK_SIZE, cache_heads, layer.key.shape[2]), layer.lengths
    caches, outputs = [np.zeros(shape, layer.key.dtype) for _ in range(2)], []
    ascend.reshape_and_cache(*layer.tokens(0, lengths), *caches, where.slot_mapping, **prompt)
    for at in range(STEPS):
        new = layer.tokens(lengths + at, lengths + at + 1)
        ascend.reshape_and_cache(*new, *caches, where.next_slots(at), **token)
        inputs = layer.query[at], *caches, where.block_tables, where.context_lens + at + 1
        outputs.append(ascend.paged_attention(*inputs, razor_offset=razor_offset))
    return np.stack(outputs).astype(np.float64)


def squares(outputs, heads):
    """Return the sums of squares [layers, steps, sequences, key heads] of the outputs of query heads."""
    return (outputs**2).reshape(*outputs.shape[:3], heads, -1).sum(-1)


def relative(error, size, chosen, axes=None):
    """Return the root mean square of an error over the chosen [layers, heads], relative to the outputs'."""
    error, size = (x.sum(axes, where=chosen[:, None, None]) for x in (error, size))
    return np.sqrt(error / size)


def plot(path, errors, size, kinds):
    """Draw the error of every step, if matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("No plot, which needs matplotlib: pip install '.[plot]' in a clone")
        return
    axes = (figure := Figure(figsize=(7, 4), layout="constrained")).subplots()
    for line, (name, error) in zip(("-", "--"), errors.items(), strict=True):
        for color, (kind, chosen) in enumerate(kinds.items()):
            percent = 100 * relative(error, size, chosen, (0, 2, 3))
            axes.plot(range(1, STEPS + 1), percent, line, color=f"C{color}", label=f"{kind} heads, {name}")
    axes.set(xlabel="decoded token", ylabel="attention error, %", ylim=(0, None))
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"The plot is {path}.")


if __name__ == "__main__":
    main()
