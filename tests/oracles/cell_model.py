"""A model of sequences whose tokens are removed and moved, and attention over them in float64."""

import numpy as np


def exact(query, keys, values, visible=None, bias=0.0, softmax_scale=None, softcap=0.0, sinks=None):
    """Attend in float64 with queries [B, Hq, q, D] of the last tokens; return outputs and lse.

    `visible` is bool [.., q, tokens], `bias` is added to the scores, and sinks [Hq] are one more score each.
    """
    group, new, count = query.shape[1] // keys.shape[1], query.shape[2], keys.shape[2]
    keys, values = (np.repeat(side.astype(float), group, 1) for side in (keys, values))
    scale = query.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    scores = query.astype(float) @ keys.swapaxes(2, 3) * scale
    scores = softcap * np.tanh(scores / softcap) if softcap else scores
    causal = np.arange(count) <= np.arange(count - new, count)[:, None]
    scores = np.where(causal if visible is None else causal & visible, scores + bias, -np.inf)
    sink = np.full(query.shape[1], -np.inf) if sinks is None else sinks.astype(float)
    sink = np.broadcast_to(sink[:, None, None], (*scores.shape[:3], 1))
    top = np.maximum(np.maximum(scores.max(3, keepdims=True, initial=-np.inf), sink), -1e300)
    weights = np.exp(scores - top)
    total = weights.sum(3, keepdims=True) + np.exp(sink - top)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + top)[..., 0]
    return weights / np.where(total, total, 1) @ values, lse


class Cells:
    """Models one sequence as cells (position, rope shift, name), with the semantics of llama.cpp's calls.

    Each sequence has cells of its own, so a shift moves nobody who shares tokens: that is kvkit's rule.
    """

    def __init__(self):
        self.cells, self.length, self.named = [], 0, 0

    def decode(self, count):
        self.cells += [(self.length + i, 0, self.named + i) for i in range(count)]
        self.length, self.named = self.length + count, self.named + count

    def remove(self, begin, end):
        self.cells = [cell for cell in self.cells if not begin <= cell[0] < end]
        self.length = min(begin, self.length) if end >= self.length else self.length

    def flatten(self):
        pass

    def shift(self, begin, end, delta):
        self.move(begin, end, lambda at: at + delta)
        if begin <= self.length <= end:
            self.length = max(self.length + delta, 0)

    def divide(self, begin, end, d):
        self.move(begin, end, lambda at: at // d)
        if begin <= self.length <= end:
            self.length = (self.length + d - 1) // d

    def move(self, begin, end, place):
        places = [place(at) if begin <= at < end else at for at, _, _ in self.cells]
        moved = zip(self.cells, places, strict=True)
        self.cells = [(to, turn + to - at, name) for (at, turn, name), to in moved if to >= 0]

    def retain(self, positions):
        self.cells = [cell for cell in self.cells if cell[0] in positions]

    def fork(self, begin, end):
        """Return a second sequence with the same cells, whose positions and shifts are its own."""
        other = Cells()
        other.cells, other.length, other.named = list(self.cells), self.length, self.named
        other.cells = [cell for cell in other.cells if begin <= cell[0] < end]
        other.length = min(end, other.length)
        return other
