"""Write the files for the pictures of docs/gallery.md: a model's cache of three sequences, and a fault.

The data are SmolLM2-135M-Instruct's, data/smollm2_kv.npz. The commands that draw them are on the page.

    python examples/gallery.py [FOLDER for the files, demo-out if not given]
"""

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import ten_faults

from kvkit import files
from kvkit.cache import PagedCache

DATA = ten_faults.DATA
BLOCKS, PAGE = 14, 16
SHARED, OWN = 64, 25  # tokens of a prompt that a third sequence shares, and of its own


def main(folder="demo-out"):
    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    files.write(folder / "chats.npz", chats())
    codes, _ = ten_faults.stored()
    expected = {name: codes[name] for name in ("key_cache", "value_cache")}
    device = ten_faults.copied(expected)
    layer, page = 2, 3  # of keys, written [heads, tokens] and read [tokens, heads]
    wrong = device["key_cache"][layer, page]
    device["key_cache"][layer, page] = wrong.swapaxes(0, 1).reshape(wrong.shape)
    files.write(folder / "expected.npz", expected)
    files.write(folder / "device.npz", device)


def chats():
    """Return the cache and page tables of two texts, and of a sequence that begins as the first one does."""
    data = files.read(DATA).arrays
    keys, values, starts = data["current_key"], data["current_value"], data["seqstarts"]
    layers, _, heads, dim = keys.shape
    cache = PagedCache(
        num_blocks=BLOCKS,
        page_size=PAGE,
        num_layers=layers,
        num_kv_heads=heads,
        head_dim=dim,
        dtype=np.float16,
    )
    sequences = []
    first, second = (np.arange(begin, end) for begin, end in pairwise(starts))
    third = np.concatenate([first[:SHARED], second[:OWN]])
    for rows in (first, second, third):
        sequence = cache.blocks.add(data["tokens"][rows])
        new = rows[sequence.length :]  # those that no other sequence has stored
        with cache.begin_step([(sequence, len(new))]) as step:
            for layer in range(layers):
                step.update(keys[layer, new], values[layer, new], layer)
        sequences.append(sequence)
    longest = max(len(sequence.blocks) for sequence in sequences)
    table = [[*sequence.blocks, *[-1] * (longest - len(sequence.blocks))] for sequence in sequences]
    pages = cache.cache.reshape(layers, 2, heads, BLOCKS, PAGE, dim).transpose(1, 0, 3, 4, 2, 5)
    return {
        "key_cache": pages[0],  # [layers, pages, tokens, heads, dim]
        "value_cache": pages[1],
        "block_tables": np.array(table),
        "context_lens": np.array([sequence.length for sequence in sequences]),
    }


if __name__ == "__main__":
    main(*sys.argv[1:2])
