"""Oracle of the unquantized layers: a list of all tokens, and a count of those that are stored.

A token is a pair of arrays (key [B, H, Dk], value [B, H, Dv]). Nothing here is fast or shares anything with
the package.
"""

import numpy as np

from kvkit.reference import attention as attention_reference

KINDS = "dynamic", "sliding", "chunked", "static", "static sliding", "static chunked"
WINDOWS = tuple(kind for kind in KINDS if kind.endswith(("sliding", "chunked")))


def tokens_of(keys, values):
    """Return a list of tokens from arrays [B, H, q, D]."""
    return [(keys[:, :, i].copy(), values[:, :, i].copy()) for i in range(keys.shape[2])]


def arrays_of(tokens, like):
    """Return arrays [B, H, n, D] of a list of tokens; `like` is a token, for their shapes and type."""
    made = []
    for side in (0, 1):
        batch, heads, dim = like[side].shape
        array = np.zeros((batch, heads, len(tokens), dim), like[side].dtype)
        for i, token in enumerate(tokens):
            array[:, :, i] = token[side]
        made.append(array)
    return made


class Model:
    """Models a layer of one of the kinds. A chunked one stores as one with a window of that size."""

    def __init__(self, kind, window=None, max_cache_len=None):
        self.kind, self.max_cache_len, self.recording = kind, max_cache_len, False
        self.window = min(window, max_cache_len) if kind in WINDOWS and "static" in kind else window
        self.chunk = window if "chunked" in kind else None
        self.padding = True  # what masks say: padding, the same for all queries
        self.seen, self.stored = [], 0

    def __len__(self):
        return len(self.seen)

    def last(self, count):
        return self.seen[len(self.seen) - count :]

    def keeps(self):
        """Return how many tokens stay without recording; None for all."""
        if self.kind not in WINDOWS:
            return None
        return self.window if "static" in self.kind else self.window - 1

    def sizes(self, new):
        """Return (kv_length, kv_offset), by the specification's table."""
        n, w = len(self), self.window
        if self.kind == "dynamic":
            return n + new, 0
        if self.kind == "static":
            return self.max_cache_len, 0
        if self.kind in ("sliding", "chunked"):
            return (n + new, 0) if n < w else (w - 1 + new, n - w + 1)
        if n + new <= w:
            return w, 0
        return (n + new, 0) if n < w else (w - 1 + new, n - w + 1)

    def update(self, tokens):
        """Append tokens; return the tokens that an update returns, with zeros for missing ones at the end."""
        old = self.last(self.stored)
        whole = self.kind in WINDOWS and "static" in self.kind and len(self) + len(tokens) <= self.window
        if self.window is not None and len(self) >= self.window and not whole:
            old = old[len(old) - (self.window - 1) :]
        self.seen += tokens
        self.stored += len(tokens)
        keeps = self.keeps()
        if keeps is not None and not self.recording:
            self.stored = min(self.stored, keeps)
        return old + tokens

    def rewind(self, start):
        """Forget a static layer's tokens from `start` on, which are written again."""
        del self.seen[start:]
        self.stored = start

    def crop(self, x):
        """Crop the layer; return the error that it raises, or None if it is cropped."""
        n = len(self)
        left = min(x, n) if x > 0 else n + x
        if left < 0:
            return ValueError
        if self.window is not None and n - self.stored > max(0, left - self.window + 1):
            return RuntimeError
        self.stored -= n - left
        del self.seen[left:]
        if self.kind in ("sliding", "chunked"):
            self.stored = min(self.stored, self.window - 1)
        return None

    def remove(self, begin, end):
        """Remove tokens and move later ones up; in a window only tokens that are not stored."""
        del self.seen[begin:end]
        if self.window is None:
            self.stored -= end - begin

    def join(self, tokens, at):
        """Put tokens before token number `at`."""
        self.seen[at:at] = tokens
        self.stored += len(tokens)
        if self.window is not None:
            self.stored = min(self.stored, self.keeps())

    def take(self, indices):
        self.seen = [tuple(side[list(indices)] for side in token) for token in self.seen]

    def reset(self):
        self.seen, self.stored, self.recording = [], 0, False

    def attend(self, query, mask=None, **options):
        """Return (attn_output [B, Hq, q, Dv], lse [B, Hq, q]) in float64; mask is [B, Hq, q, n]."""
        keys, values = arrays_of(self.seen, self.seen[0])
        output = np.zeros((*query.shape[:3], values.shape[3]))
        lse = np.zeros(query.shape[:3])
        window = (-1, -1) if self.window is None or self.chunk else (self.window - 1, -1)
        if self.chunk:
            mask = self.in_chunks(query, mask)
        for b in range(query.shape[0]):
            one, two = attention_reference.attend_sequence(
                query[b].swapaxes(0, 1), keys[b].swapaxes(0, 1), values[b].swapaxes(0, 1),
                None if mask is None else mask[b], causal=True, window=window, **options,
            )  # fmt: skip
            output[b], lse[b] = one.swapaxes(0, 1), two.swapaxes(0, 1)
        return output, lse

    def in_chunks(self, query, mask):
        """Return a mask that also hides what is in another chunk.

        Chunks count from a row's first token if the mask is one of `padding`, else from slot 0.
        """
        batch, heads, new, _ = query.shape
        count = len(self)
        mask = np.ones((batch, heads, new, count), np.bool_) if mask is None else mask.copy()
        for b in range(batch):
            begins = int(np.argmax(mask[b, 0, 0])) if self.padding and mask[b].any() else 0
            for i in range(new):
                for j in range(count):
                    if (count - new + i - begins) // self.chunk != (j - begins) // self.chunk:
                        mask[b, :, i, j] = False if mask.dtype == np.bool_ else -np.inf
        return mask
