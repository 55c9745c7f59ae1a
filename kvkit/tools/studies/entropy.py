"""Estimate how many bits a lossless coder would need for the codes and scales of a scheme."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvkit.typed import Array

COUNTED = 2048  # tokens of a side that are counted at most, in parts over its whole length


def codes_and_others(
    scheme: Any, arrays: Mapping[str, Array], codes: Array | None, like: Array
) -> tuple[Array | None, dict[str, Array]]:
    """Return (codes of one byte each, [tokens, heads, elements]; the other arrays) of encoded tokens."""
    if hasattr(scheme, "others"):
        return codes, scheme.others(arrays)
    found = {name: np.asarray(array) for name, array in arrays.items()}
    for name, array in found.items():
        if array.shape == like.shape and array.dtype.itemsize == 1:
            return array.view(np.uint8), {each: found[each] for each in found if each != name}
    return None, found


class CodeCounts:
    """Counts codes by channel, and the bytes of scales, over some tokens of a side.

    An ideal coder with the frequencies p of symbols needs -log2(p) bits for each. "Order 0" has one table of
    codes for a layer's keys or values, "by channel" one for each channel of each head; bytes of scales have a
    table for each place in an element. The tables themselves are not counted.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.codes: Any = None  # counts [channels, codes]
        self.bytes: dict[tuple[str, int], Array] = {}  # {(array, place of a byte): counts [256]}
        self.plain = 0  # bits that no coder touches: those of tokens that fill no group

    def add(self, tokens: int, codes: Array | None, others: Mapping[str, Array], plain: int = 0) -> None:
        """Count codes [tokens, heads, elements] of one byte each, and other arrays of these tokens."""
        self.tokens += tokens
        self.plain += plain
        if codes is not None and codes.size:
            channels = codes.shape[1] * codes.shape[2]
            if self.codes is None:
                self.codes = np.zeros((channels, 256), np.int64)
            size = 16 if codes.max() < 16 else 256  # a small table stays in a processor's cache
            index = codes.reshape(len(codes), channels) + np.arange(0, size * channels, size)
            found = np.bincount(index.ravel(), minlength=size * channels)
            self.codes[:, :size] += found.reshape(channels, size)
        for name, array in others.items():
            data = np.ascontiguousarray(array).reshape(-1)
            for place, column in enumerate(data.view(np.uint8).reshape(len(data), -1).T if len(data) else ()):
                before = self.bytes.get((name, place), 0)
                self.bytes[name, place] = before + np.bincount(column, minlength=256)

    def bits(self, tokens: int) -> list[float]:
        """Return the bits of all `tokens` of the side, with codes of order 0 and by channel."""
        scales = sum(bits_of(counts) for counts in self.bytes.values())
        codes = [0.0, 0.0] if self.codes is None else [bits_of(self.codes.sum(0)), bits_of(self.codes)]
        return [(each + scales + self.plain) * tokens / max(1, self.tokens) for each in codes]


def bits_of(counts: Array) -> float:
    """Return the bits of symbols with these counts [..., symbols], each row with a table of its own.

    Frequencies of few symbols look less even than they are. The correction of Miller and Madow adds half a
    nat for each symbol that occurs, but one.
    """
    totals, used = counts.sum(-1), np.count_nonzero(counts, -1)
    nats = totals * np.log(np.maximum(totals, 1)) - (counts * np.log(np.maximum(counts, 1))).sum(-1)
    nats = np.minimum(nats + (used - 1) / 2, totals * np.log(np.maximum(used, 1)))
    return float(nats.sum() / np.log(2))
