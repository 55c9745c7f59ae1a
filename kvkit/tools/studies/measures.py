"""Measure the errors that a scheme causes in keys and values, and in the outputs of attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvkit.errors import argument_error
from kvkit.tools.readers import LayerReader, SideReader

PIECE = 2**17  # elements encoded at a time
QUERIES = 64  # at most so many of the last queries of a sequence are measured
ONE_THREAD = 2**18  # OpenBLAS runs products with at most so many multiplications on one thread
MEANS = {  # {sum: name of its mean}
    "logit": "logit_error", "kl": "kl", "output": "output_error", "top_changed": "top_changed",
    "weight": "weight_kept",
}  # fmt: skip
ZERO = 2**32  # A mark is two counters: its low 32 bits count codes at a limit of the range, the high ones 0.


class SideErrors:
    """Sums squares, errors and cosines over the tokens of a side, for each head."""

    def __init__(self, heads: int) -> None:
        self.squares, self.errors, self.largest, self.cosines = np.zeros((4, heads))
        self.tokens = self.coded = 0
        self.marks: Any = None
        self.bits = 0

    def add(self, x: np.ndarray, found: np.ndarray, codes: Any = None, marks: Any = None) -> None:
        """Add tokens x [tokens, heads, dim] with the decoded tokens; `marks` is {code: mark} as an array."""
        error = found - x
        squares, back, both = (
            np.einsum("thd,thd->th", one, other) for one, other in ((x, x), (found, found), (x, found))
        )
        self.squares += squares.sum(0)
        self.errors += np.einsum("thd,thd->h", error, error)
        self.largest = np.maximum(self.largest, np.abs(error).max((0, 2), initial=0))
        norms = np.sqrt(squares * back)
        equal = np.where(squares == back, 1.0, 0.0)
        self.cosines += np.divide(both, norms, out=equal, where=norms > 0).sum(0)
        self.tokens += len(x)
        if codes is not None:
            found = marks[codes].sum(0).sum(-1)
            self.marks = found if self.marks is None else self.marks + found
            self.coded += codes[:, 0].size

    def by_head(self) -> Iterator[dict[str, Any]]:
        """Yield {measure: number} of each head."""
        for h in range(len(self.squares)):
            norm = self.squares[h]
            yield {
                "relative_rms": float(np.sqrt(self.errors[h] / norm)) if norm else float(self.errors[h] > 0),
                "largest_error": float(self.largest[h]),
                "cosine": float(self.cosines[h] / max(1, self.tokens)),
                "at_end": None if self.marks is None else int(self.marks[h]) % ZERO / self.coded,
                "zero": None if self.marks is None else int(self.marks[h]) // ZERO / self.coded,
            }


def marks_of(code: Any) -> Any:
    """Return the mark of each code, uint64: what one code adds to the two counters."""
    low, high = code.limits
    return ((code.table <= low) | (code.table >= high)) + (code.table == 0) * np.uint64(ZERO)


def pieces(begin: int, end: int, elements: int, step: int = 1) -> list[slice]:
    """Split tokens of `elements` elements each into slices of about `PIECE` elements, multiples of `step`."""
    count = max(PIECE // elements // step, 1) * step
    return [slice(first, min(first + count, end)) for first in range(begin, end, count)]


def floats(side: SideReader, parts: Sequence[slice]) -> Iterator[np.ndarray]:
    """Yield float32 [tokens, heads, dim] of each slice."""
    return (np.ascontiguousarray(side.read(part), np.float32) for part in parts)


def divided(begin: int, end: int, *pairs: tuple[Any, SideReader]) -> tuple[list[Any], list[slice]]:
    """Return (schemes, slices of tokens to encode one at a time).

    A scheme may ask for slices of a multiple of `step` tokens, to see all tokens first (`over`, which returns
    the scheme to encode with), or for one slice (`whole`).
    """
    steps = [getattr(scheme, "step", 1) for scheme, _ in pairs]
    elements = max(side.heads * side.dim for _, side in pairs)
    parts = pieces(begin, end, elements, int(np.lcm.reduce(steps)))
    schemes = [each.over(floats(side, parts)) if hasattr(each, "over") else each for each, side in pairs]
    whole = any(getattr(scheme, "whole", False) for scheme in schemes)
    return schemes, [slice(begin, end)] if whole else parts


def decode_like(scheme: Any, arrays: Any, like: np.ndarray) -> np.ndarray:
    """Decode to float32; raise unless the result has the shape of `like`."""
    found = np.asarray(scheme.decode(arrays), np.float32)
    if found.shape != like.shape:
        raise argument_error("decode", f"shape {like.shape}", found.shape)
    return found


def errors_of(scheme: Any, side: SideReader) -> SideErrors:
    """Return the errors of a side's decoded tokens, and the stored bits."""
    errors = SideErrors(side.heads)
    for _ in code_parts(scheme, side, errors):
        pass
    return errors


def code_parts(scheme: Any, side: SideReader, errors: SideErrors) -> Iterator[np.ndarray]:
    """Encode and decode a side, part by part; add errors and bits, and yield the decoded tokens."""
    (scheme,), parts = divided(0, side.tokens, (scheme, side))
    for part, x in zip(parts, floats(side, parts), strict=True):
        arrays = scheme.encode(x)
        found = decode_like(scheme, arrays, x)
        with np.errstate(invalid="ignore", over="ignore"):
            total = found.sum()
        if not np.isfinite(total):
            check_finite("decode", found, part.start)
        codes = scheme.codes(arrays) if hasattr(scheme, "codes") else None
        coded = codes is not None and codes.size
        errors.add(x, found, *((codes, marks_of(scheme.format.code)) if coded else ()))
        if hasattr(scheme, "stored"):
            errors.bits += scheme.stored(arrays, side.bits, first=not part.start)
        else:
            errors.bits += 8 * sum(np.asarray(array).nbytes for array in arrays.values())
        yield found


def outliers(name: str, side: SideReader) -> tuple[np.ndarray, np.ndarray]:
    """Return how far channels of each head stand out, and the mean magnitudes of channels [heads, dim].

    The first is the largest mean magnitude of a head divided by the median; 1 if the median is 0.
    This is the first pass over a side: it raises if a number is not finite.
    """
    total = np.zeros((side.heads, side.dim))
    for part in pieces(0, side.tokens, side.heads * side.dim):
        with np.errstate(invalid="ignore", over="ignore"):
            x = np.abs(side.read(part).astype(np.float32))
            sums = x.sum(0)
        if not np.isfinite(sums).all():
            check_finite(name, x, part.start)
            sums = x.sum(0, dtype=np.float64)
        total += sums
    means = total / max(1, side.tokens)
    middle = np.median(means, 1)
    return np.divide(means.max(1), middle, out=np.ones(side.heads), where=middle > 0), means


def check_finite(name: str, x: np.ndarray, first: int = 0) -> None:
    """Raise unless numbers [tokens, heads, dim] are finite; `first` is the index of the first token."""
    wrongs = np.argwhere(~np.isfinite(x))
    if len(wrongs):
        token, head, place = wrongs[0]
        what = "NaN" if np.isnan(x[token, head, place]) else "infinity"
        raise argument_error(name, "finite numbers", f"{what} in head {head}, token {first + token}")


def product(rows: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Multiply [heads, rows, k] by [heads, k, n], in parts for which BLAS starts no threads.

    Schemes already run in threads, and waiting threads of OpenBLAS spin. `other` is made contiguous because
    each part reads it.
    """
    other = np.ascontiguousarray(other)
    out = np.empty((*rows.shape[:2], other.shape[2]), np.float32)
    count = max(ONE_THREAD // other[0].size, 1)
    for first in range(0, rows.shape[1], count):
        part = slice(first, first + count)
        np.matmul(rows[:, part], other, out=out[:, part])
    return out


class RunningAttention:
    """Accumulates attention of query rows [heads, rows] over blocks of tokens, with an online softmax."""

    def __init__(self, heads: int, rows: int, dim: int) -> None:
        self.m = np.full((heads, rows), -np.inf, np.float32)
        self.l, self.top = np.zeros((heads, rows)), np.zeros((heads, rows), np.int64)
        self.o = np.zeros((heads, rows, dim), np.float32)

    def add(self, logits: np.ndarray, value: np.ndarray, first: int) -> Any:
        """Add a block: replace logits [heads, rows, tokens] by weights, in place; return alpha."""
        top = logits.argmax(-1)
        m = np.take_along_axis(logits, top[..., None], -1)[..., 0]
        self.top = np.where(m > self.m, first + top, self.top)
        m = np.maximum(m, self.m)
        alpha, self.m = np.exp(self.m - m), m
        np.exp(np.subtract(logits, m[..., None], out=logits), out=logits)
        self.l = self.l * alpha + logits.sum(-1)
        self.o *= alpha[..., None]
        self.o += product(logits, value)
        return alpha

    @property
    def output(self) -> Any:
        """Return the output [heads, rows, dim]."""
        return self.o / self.l[..., None]

    @property
    def log_sum(self) -> Any:
        """Return the log-sum-exp of each row."""
        return self.m + np.log(self.l)


def compare_attention(
    layer: LayerReader, query: np.ndarray, begin: int, end: int, *schemes: Any
) -> dict[str, np.ndarray]:
    """Return {measure: [heads, rows]} of the errors that schemes cause in attention of the last queries.

    The query heads of a key head are rows of one product, for a block of tokens at a time.
    """
    sides = layer.key, layer.value
    heads, (count, _, dim), tokens = layer.key.heads, query.shape, end - begin
    rows = query.reshape(count, heads, -1, dim).transpose(1, 2, 0, 3).reshape(heads, -1, dim)
    rows = rows / np.float32(np.sqrt(dim)) if layer.scale is None else rows * np.float32(layer.scale)
    last = np.tile(np.arange(tokens - count, tokens), rows.shape[1] // count)  # the last token each row sees
    width = layer.value_dim or layer.value.dim
    exact, found = (RunningAttention(heads, rows.shape[1], width) for _ in range(2))
    logit, divergence = np.zeros((2, *exact.l.shape))
    own, parts = divided(begin, end, *zip(schemes, sides, strict=True))
    for part, *numbers in zip(parts, *(floats(side, parts) for side in sides), strict=True):
        coded = [decode_like(scheme, scheme.encode(x), x) for scheme, x in zip(own, numbers, strict=True)]
        key, value, other_key, other_value = (x.swapaxes(0, 1) for x in (*numbers, *coded))
        value, other_value = value[..., :width], other_value[..., :width]
        logits, others = (product(rows, side.swapaxes(1, 2)) for side in (key, other_key))
        change = others - logits
        hidden = np.arange(part.start, part.stop) - begin > last[:, None]
        if hidden.any():
            change[:, hidden] = 0
            logits[:, hidden] = others[:, hidden] = -np.inf
        logit += np.abs(change).sum(-1)
        alpha = exact.add(logits, value, part.start)
        divergence = divergence * alpha - np.einsum("hrt,hrt->hr", logits, change)
        found.add(others, other_value, part.start)
    return {
        "logit": logit / (last + 1),
        "kl": np.maximum(divergence / exact.l - exact.log_sum + found.log_sum, 0),
        "output": ((found.output - exact.output) ** 2).sum(-1),
        "norm": (exact.output**2).sum(-1),
        "top_changed": found.top != exact.top,
    }


def attention_errors(layer: LayerReader, *schemes: Any, judge: int = QUERIES) -> Iterator[dict[str, float]]:
    """Yield {measure: mean} of the errors that schemes cause in attention, for each key head.

    The last `judge` queries of a sequence measure them, at most `QUERIES`.
    """
    sums = AttentionSums()
    for query, begin, end in zip(layer.queries or (), layer.starts, layer.starts[1:], strict=False):
        query = np.asarray(query[-min(judge, QUERIES) :], np.float32)
        sums.add(compare_attention(layer, query, begin, end, *schemes))
    return sums.by_head()


class AttentionSums:
    """Sums the results of `compare_attention` over queries, for each key head."""

    def __init__(self) -> None:
        self.sums: dict[str, np.ndarray] = {}
        self.count = 0

    def add(self, numbers: Mapping[str, np.ndarray]) -> None:
        """Add {measure: [heads, rows]}."""
        for name, each in numbers.items():
            self.sums[name] = self.sums.get(name, np.zeros(1)) + each.sum(1, dtype=np.float64)
        self.count += numbers["kl"].shape[1]

    def by_head(self) -> Iterator[dict[str, float]]:
        """Yield {measure: mean} of each head; of outputs the relative error."""
        for h, norm in enumerate(self.sums["norm"]):
            means = {name: float(each[h] / self.count) for name, each in self.sums.items()}
            means["output"] = float(np.sqrt(self.sums["output"][h] / norm)) if norm else 0.0
            yield {MEANS[name]: means[name] for name in MEANS if name in means}
