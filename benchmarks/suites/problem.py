"""Define an attention problem for kvkit, its peers and numpy."""

import functools
from dataclasses import dataclass

import click
import ml_dtypes
import numpy as np

DIM = 128
GROUPS = {8: 8, 4: 32}  # quant_group by quant_bit
STEPS = {8: 2.0**-6, 4: 0.25}  # the scale of all groups by quant_bit
TOLERANCES = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 3e-2}  # of the largest output


@dataclass(frozen=True)
class Problem:
    """Describes attention with `new` tokens of each sequence, over `past` tokens and the new ones.

    All types can represent its numbers (bfloat16 rounds them), with `minifloats` also 8-bit floats. Groups
    of codes contain the largest code, or -8 of q4_0, so that all groups get one scale: caches with a scale
    per group and per tensor then hold the same numbers.
    """

    batch: int
    new: int
    past: int
    num_kv_heads: int
    quant: int = 0
    num_heads: int = 32
    minifloats: bool = False
    quant_group: int = 0  # 0: the usual group size
    lowest: bool = False  # groups contain the code of the largest magnitude, -8 or -128

    @property
    def length(self):
        return self.past + self.new

    @property
    def group(self):
        return self.num_heads // self.num_kv_heads

    @property
    def coded(self):
        """Return how many codes share a scale."""
        return self.quant_group or GROUPS[self.quant]

    @property
    def step(self):
        return STEPS[self.quant]

    @property
    def operations(self):
        """Return the operations of both products, over the pairs that the causal mask leaves."""
        pairs = self.new * self.past + self.new * (self.new + 1) // 2
        return 4 * DIM * self.batch * self.num_heads * pairs

    @functools.cached_property
    def query(self):
        """Return float32 [B, S, H, D], so large that few keys have most of the weight."""
        normal = np.random.default_rng(1).standard_normal
        query = 2 * normal((self.batch, self.new, self.num_heads, DIM), np.float32)
        return query.astype(np.float16).astype(np.float32)

    @functools.cached_property
    def stored(self):
        """Return keys and values as they are stored: float16 or codes [2, B, H, T, D]."""
        rng = np.random.default_rng(0)
        shape = 2, self.batch, self.num_kv_heads, self.length, DIM
        if not self.quant:
            stored = np.empty(shape, np.float16)
            for at in np.ndindex(shape[:3]):
                normal = rng.standard_normal(shape[3:], np.float32)
                stored[at] = normal.astype(ml_dtypes.float8_e4m3fn) if self.minifloats else normal
            return stored
        largest = 2 ** (self.quant - 1) - 1
        codes = rng.integers(-largest, largest + 1, shape, np.int8)
        codes[..., :: self.coded] = -largest - 1 if self.lowest else largest
        return codes if self.quant == 8 else codes[..., ::2] & 15 | codes[..., 1::2] << 4

    def context(self, begin=0):
        """Return keys and values of tokens from `begin` on: float16 [2, B, H, T, D]."""
        stored = self.stored[..., begin:, :]
        if self.quant == 4:
            stored = np.stack([stored << 4 >> 4, stored >> 4], -1).reshape(*stored.shape[:-1], DIM)
        return stored * np.float16(self.step) if self.quant else stored

    @functools.cached_property
    def expected(self):
        """Return float64 outputs of the first and last token of the first and last sequence."""
        context, outputs = self.context(), {}
        for b, i in {(b, i) for b in (0, self.batch - 1) for i in (0, self.new - 1)}:
            outputs[b, i] = np.zeros((self.num_heads, DIM))
            for h in range(self.num_heads):
                key, value = context[:, b, h // self.group, : self.past + i + 1].astype(np.float64)
                scores = key @ self.query[b, i, h] / DIM**0.5
                weights = np.exp(scores - scores.max())
                outputs[b, i][h] = weights @ value / weights.sum()
        return outputs

    def check(self, who, output, kind):
        """Raise unless `output` [B, S, H, D] equals numpy's result within the tolerance."""
        for at, expected in self.expected.items():
            error = np.abs(output[at].astype(np.float64) - expected).max() / np.abs(expected).max()
            if not error < TOLERANCES[kind]:
                raise click.ClickException(f"{who}: output is off by {error:.1e} of the largest")

    @functools.cached_property
    def peers(self):
        """Return the peers made so far."""
        return {}

    def peer(self, make, *args):
        """Return a peer, made and checked once; None if it is not installed."""
        if (make, args) not in self.peers:
            peer = self.peers[make, args] = make(self, *args)
            if peer:
                self.check(peer.form, peer.output(), peer.kind)
        return self.peers[make, args]


@functools.lru_cache(maxsize=1)
def problem(*sizes):
    """Return a problem; consecutive cases of equal sizes share its data and peers."""
    return Problem(*sizes)
