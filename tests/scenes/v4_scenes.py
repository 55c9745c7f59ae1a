"""Compute attention layers of DeepSeek V4 with tiny weights, in float64, up to the operators of a cache."""

from dataclasses import dataclass

import numpy as np

from kvkit.rope import Rope

HIDDEN, HEADS, DIM, ROPE, LORA, WINDOW, INDEX_HEADS, INDEX_DIM, TOP = 12, 2, 8, 4, 6, 6, 2, 8, 2
RATIOS = {"window": 0, "csa": 4, "hca": 8}
YARN = {
    "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
    "beta_slow": 1.0, "attention_factor": 1.0,
}  # fmt: skip
TOKENS = 21
T, C = np.arange(TOKENS)[:, None], np.arange(HIDDEN)
X = (((2 * T + 3 * C + T * C) % 13) - 6) / 4


def rms(x, weight=1.0, eps=1e-6):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def weights_of(shape, seed):
    i, j = np.ix_(*(np.arange(n) for n in shape)) if len(shape) == 2 else (np.arange(shape[0]), 0)
    return ((7 * i + 3 * j + i * j + seed) % 11 - 5) / 8


@dataclass
class Inputs:
    """Holds what a layer's projections make of its tokens: float64 arrays [T, ...]."""

    q: np.ndarray  # [T, heads, dim]
    row: np.ndarray  # [T, dim]
    compressor: tuple | None  # kv and gate [T, E]
    indexer: tuple | None
    index: tuple | None  # queries [T, heads, dim] and weights [T, heads] of the indexer

    def part(self, begin, end, dtype=np.float64):
        """Return the inputs of tokens begin..end in a dtype."""

        def cut(x):
            if x is None:
                return None
            return tuple(map(cut, x)) if isinstance(x, tuple) else x[begin:end].astype(dtype)

        return Inputs(*(cut(x) for x in (self.q, self.row, self.compressor, self.indexer, self.index)))


class Layer:
    """Has the weights and the projections of one layer of the specification's vectors."""

    def __init__(self, kind):
        numbers = iter(range(1, 99))

        def matrix(*shape):
            return weights_of(shape, next(numbers))

        self.kind, self.ratio, self.overlap = kind, RATIOS[kind], kind == "csa"
        self.qa, self.qa_norm, self.qb = matrix(LORA, HIDDEN), 1 + matrix(LORA) / 4, matrix(HEADS * DIM, LORA)
        self.kv, self.kv_norm, self.sinks = matrix(DIM, HIDDEN), 1 + matrix(DIM) / 4, matrix(HEADS)
        theta, scaling = (1e4, None) if kind == "window" else (16e4, YARN)
        self.rope = Rope(ROPE, theta, True, scaling, begin=DIM - ROPE)
        width = DIM * (1 + self.overlap)
        if kind != "window":
            self.ckv, self.cgate = matrix(width, HIDDEN), matrix(width, HIDDEN)
            self.ape, self.c_norm = matrix(self.ratio, width), 1 + matrix(DIM) / 4
        if kind == "csa":
            self.ikv, self.igate = (matrix(2 * INDEX_DIM, HIDDEN) for _ in range(2))
            self.iape, self.i_norm = matrix(self.ratio, 2 * INDEX_DIM), 1 + matrix(INDEX_DIM) / 4
            self.iq, self.iw = matrix(INDEX_HEADS * INDEX_DIM, LORA), matrix(INDEX_HEADS, HIDDEN)

    def inputs(self, x=X):
        p = np.arange(len(x))
        low = rms(x @ self.qa.T, self.qa_norm)
        q = self.rope.rotate(rms((low @ self.qb.T).reshape(len(x), HEADS, DIM)), p[:, None])
        row = self.rope.rotate(rms(x @ self.kv.T, self.kv_norm), p)
        compressor = indexer = index = None
        if self.kind != "window":
            compressor = x @ self.ckv.T, x @ self.cgate.T
        if self.kind == "csa":
            indexer = x @ self.ikv.T, x @ self.igate.T
            queries = (low @ self.iq.T).reshape(len(x), INDEX_HEADS, INDEX_DIM)
            index = self.rope.rotate(queries, p[:, None]), x @ self.iw.T * INDEX_HEADS**-0.5
        return Inputs(q, row, compressor, indexer, index)


# By kind: the sums of outputs, of outputs times their index, of lse, of rows, of index keys.
SUMS = {
    "window": (-11.103317, -2752.089819, 87.518814, None, None),
    "csa": (29.452708, 5631.487039, 96.461640, 27.006398, 10.793418),
    "hca": (17.993980, 4380.285320, 93.070194, 13.514549, None),
}
CSA_20 = [
    [.228213, .335091, .299391, .449436, -.207893, .451159, -.13432, .954873],
    [.168034, -.659053, -.26967, .568725, .40714, .777608, -.859373, -.1639],
]  # fmt: skip
# The rows that each token of the CSA layer chooses.
CHOSEN = ["-"] * 3 + ["0"] * 4 + ["01"] * 4 + ["12", "01", "12", "02", "02", "02", "13", "13", "14", "24"]


def check_sums(kind, out, lse, rows, keys, tolerance):
    """Compare results with the specification's sums; out [T, heads, dim] is rotated back."""
    numbers = out.sum(), (out.ravel() * np.arange(out.size)).sum(), lse.sum()
    numbers += None if rows is None else rows.sum(), None if keys is None else keys.sum()
    for number, wanted in zip(numbers, SUMS[kind], strict=True):
        assert (number is None) == (wanted is None)
        assert wanted is None or abs(number - wanted) <= tolerance * max(1, abs(wanted)), (kind, number)
