"""Make caches that mlx-lm fills and saves: rows that tell their token, in layers of several classes."""

from pathlib import Path

import numpy as np

WRITTEN = Path(__file__).parents[1] / "files" / "written"  # files that mlx-lm wrote, by its versions
TOKENS, WINDOW, KEEP, GROUP = 20, 16, 4, 32
SHAPE = 1, 2, TOKENS, 32  # batch, heads, tokens, elements


def rows(layer):
    """Return keys and values of a layer, in float16."""
    _, heads, tokens, dim = SHAPE
    h, t, c = np.ogrid[:heads, :tokens, :dim]
    keys = (t + 32 * h + c / 32 * (layer + 1)).astype(np.float16)[None]
    return keys, (-keys).astype(np.float16)


def kept():
    """Return the tokens that a window has, in order."""
    return [*range(KEEP), *range(TOKENS - WINDOW + KEEP, TOKENS)]


def filled(mx, classes, layers):
    """Return caches of these classes after a prompt of half of the tokens and single tokens."""
    made = [classes.RotatingKVCache(max_size=WINDOW, keep=KEEP) if kind == "RotatingKVCache"
            else classes.QuantizedKVCache(group_size=GROUP, bits=kind) if isinstance(kind, int)
            else getattr(classes, kind)() for kind in layers]  # fmt: skip
    for layer, cache in enumerate(made):
        if hasattr(cache, "update_and_fetch"):
            for begin, end in [(0, TOKENS // 2), *((t, t + 1) for t in range(TOKENS // 2, TOKENS))]:
                cache.update_and_fetch(*(mx.array(side[:, :, begin:end]) for side in rows(layer)))
    return made


FILES = {  # name of a file: classes of its layers, or bits of its codes
    "floats": ["KVCache", "RotatingKVCache"],
    "codes": [3, 3],
}
