"""What a scheme does to the keys or values of a layer, head by head, and through attention to its outputs."""

from __future__ import annotations

import numpy as np

from kvkit.checks.words import wrong

PIECE = 2**17  # elements that are coded at a time
QUERIES = 64  # of a sequence, the last ones
ZERO = 2**32  # the mark of a code that stands for 0; at an end of the range it is 1


class Errors:
    """Sums over the tokens of a side, by head: of numbers, of errors, of cosines."""

    def __init__(self, heads):
        self.squares, self.errors, self.largest, self.cosines = np.zeros((4, heads))
        self.tokens = self.elements = 0
        self.marks = None
        self.bits = 0

    def add(self, x, found, codes=None, marks=None):
        """Tokens [tokens, heads, dim], the same as they come back, and what `marked` says of their codes."""
        error = found - x
        squares, back, both = (
            np.einsum("thd,thd->th", one, other) for one, other in ((x, x), (found, found), (x, found))
        )
        self.squares += squares.sum(0)
        self.errors += np.einsum("thd,thd->h", error, error)
        self.largest = np.maximum(self.largest, np.abs(error).max((0, 2), initial=0))
        norms = np.sqrt(squares * back)
        self.cosines += np.divide(both, norms, out=np.where(squares == back, 1.0, 0.0), where=norms > 0).sum(
            0
        )
        self.tokens, self.elements = self.tokens + len(x), self.elements + x[:, 0].size
        if codes is not None:
            found = marks[codes].sum(0).sum(-1)
            self.marks = found if self.marks is None else self.marks + found

    def by_head(self):
        """A dict of numbers for each head."""
        for h in range(len(self.squares)):
            norm = self.squares[h]
            yield {
                "relative_rms": float(np.sqrt(self.errors[h] / norm)) if norm else float(self.errors[h] > 0),
                "largest_error": float(self.largest[h]),
                "cosine": float(self.cosines[h] / max(1, self.tokens)),
                "saturated": None if self.marks is None else int(self.marks[h]) % ZERO / self.elements,
                "zero": None if self.marks is None else int(self.marks[h]) // ZERO / self.elements,
            }


def marked(code):
    """uint64 for each code: its marks, which are counted at once."""
    low, high = code.limits
    return ((code.table <= low) | (code.table >= high)) + (code.table == 0) * np.uint64(ZERO)


def pieces(side, step=1):
    """Slices of the tokens of a side, some at a time."""
    count = max(PIECE // (side.heads * side.dim) // step, 1) * step
    return [slice(begin, min(begin + count, side.tokens)) for begin in range(0, side.tokens, count)]


def through(scheme, side):
    """The tokens of a side, and as a scheme gives them back: errors, and bits that are stored."""
    whole = getattr(scheme, "whole", False)
    parts = [slice(0, side.tokens)] if whole else pieces(side, getattr(scheme, "step", 1))
    errors = Errors(side.heads)
    for part in parts:
        x = np.ascontiguousarray(side.read(part), np.float32)
        arrays = scheme.encode(x)
        found = np.asarray(scheme.decode(arrays), np.float32)
        if found.shape != x.shape:
            raise wrong("decode", f"shape {x.shape}", found.shape)
        finite("decode", found, part.start)
        codes = scheme.codes(arrays) if hasattr(scheme, "codes") else None
        if codes is not None and codes.shape == x.shape:
            errors.add(x, found, codes, marked(scheme.format.code))
        else:
            errors.add(x, found)
        stored = getattr(scheme, "stored", None)
        errors.bits += (
            stored(arrays, side.bits) if stored else 8 * sum(np.asarray(a).nbytes for a in arrays.values())
        )
    return errors


def outliers(name, side):
    """Of each head, the largest mean magnitude of a channel over the median one; and all of them.

    The first pass over a side, which refuses what is not finite.
    """
    total = np.zeros((side.heads, side.dim))
    for part in pieces(side):
        with np.errstate(invalid="ignore", over="ignore"):
            x = np.abs(side.read(part).astype(np.float32))
            sums = x.sum(0)
        if not np.isfinite(sums).all():
            finite(name, x, part.start)
            sums = x.sum(0, dtype=np.float64)
        total += sums
    means = total / max(1, side.tokens)
    middle = np.median(means, 1)
    return np.divide(means.max(1), middle, out=np.ones(side.heads), where=middle > 0), means


def finite(name, x, first=0):
    """Check numbers [tokens, heads, dim], of which the first is that token."""
    wrongs = np.argwhere(~np.isfinite(x))
    if len(wrongs):
        token, head, place = wrongs[0]
        what = "NaN" if np.isnan(x[token, head, place]) else "infinity"
        raise wrong(name, "finite numbers", f"{what} in head {head}, token {first + token}")


def attended(query, key, value, scale):
    """Logits, weights and outputs of queries of the last tokens, causally: float32 [queries, heads, ...]."""
    group = query.shape[1] // key.shape[1]
    key, value = (np.repeat(side, group, 1) for side in (key, value))
    logits = np.einsum("qhd,khd->qhk", query, key) * scale
    hidden = np.arange(len(key)) > np.arange(len(key) - len(query), len(key))[:, None]
    logits = np.where(hidden[:, None], -np.inf, logits)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return logits, weights, np.einsum("qhk,khd->qhd", weights, value)


def through_attention(layer, key_scheme, value_scheme):
    """By key head: what coded keys and values do to attention of the queries that are known."""
    heads = layer.key.heads
    sums, count = {name: np.zeros(heads) for name in ("logit", "kl", "output", "norm", "top_changed")}, 0
    for query, begin, end in zip(layer.queries, layer.starts, layer.starts[1:], strict=False):
        query = np.asarray(query[-QUERIES:], np.float32)
        sides = [
            np.ascontiguousarray(side.read(slice(begin, end)), np.float32)
            for side in (layer.key, layer.value)
        ]
        coded = [
            np.asarray(scheme.decode(scheme.encode(x)), np.float32)
            for scheme, x in zip((key_scheme, value_scheme), sides, strict=True)
        ]
        scale = 1 / np.sqrt(query.shape[-1])
        exact, found = (attended(query, key, value, scale) for key, value in (sides, coded))
        with np.errstate(divide="ignore", invalid="ignore"):
            terms = np.where(exact[1] > 0, exact[1] * np.log(exact[1] / np.maximum(found[1], 1e-30)), 0)
            logit = np.where(np.isfinite(exact[0]), np.abs(found[0] - exact[0]), 0)
        seen = np.isfinite(exact[0]).sum(-1)
        changed = found[0].argmax(-1) != exact[0].argmax(-1)
        by_query = {
            "logit": logit.sum(-1) / seen,
            "kl": terms.sum(-1),
            "output": ((found[2] - exact[2]) ** 2).sum(-1),
            "norm": (exact[2] ** 2).sum(-1),
            "top_changed": changed.astype(float),
        }
        for name, numbers in by_query.items():  # [queries, query heads]
            sums[name] += numbers.reshape(len(query), heads, -1).sum((0, 2))
        count += len(query) * (query.shape[1] // heads)
    for h in range(heads):
        yield {
            "logit_error": sums["logit"][h] / count,
            "kl": sums["kl"][h] / count,
            "output_error": float(np.sqrt(sums["output"][h] / sums["norm"][h])) if sums["norm"][h] else 0.0,
            "top_changed": sums["top_changed"][h] / count,
        }
