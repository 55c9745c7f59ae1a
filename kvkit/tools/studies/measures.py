"""Measure the errors that a scheme causes in keys and values, and in the outputs of attention.

A scheme has ``encode`` and ``decode``, and perhaps more (`kvkit.formats.schemes.Coded` has all)::

    step     slices of tokens that are encoded have a multiple of so many (1)
    over     makes the scheme for all slices from these slices, to see all tokens first
    whole    whether all tokens are encoded at once (False)
    codes    returns the codes in encoded arrays [tokens, heads, elements]
    stored   counts the bits of encoded arrays
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvkit.errors import argument_error
from kvkit.eviction.products import long_product, product
from kvkit.formats.scales import magnitude
from kvkit.tools.readers import LayerReader, SideReader
from kvkit.tools.studies.entropy import COUNTED, CodeCounts, codes_and_others

ELEMENTS = 2**17  # elements encoded at a time
JUDGING = 64  # at most so many of the last queries of a sequence are measured
MEANS = {  # {sum: name of its mean}
    "logit": "logit_error", "kl": "kl", "output": "output_error", "top_changed": "top_changed",
    "weight": "weight_kept",
}  # fmt: skip
# A mark is two counters in a uint64: bits 0 to 31 count codes at a limit of the range, the others codes of 0.
# So one sum of marks counts both: 5 codes at a limit and 2 codes of 0 are 5 + 2 * ZERO.
ZERO_MARK = 2**32


def measure_tokens(x: np.ndarray, decoded: np.ndarray) -> np.ndarray:
    """Return squares, squared errors, largest errors and cosines [4, tokens, heads] of decoded tokens."""
    error = decoded - x
    squares, decoded_squares, products, errors = (
        np.einsum("thd,thd->th", *pair) for pair in ((x, x), (decoded, decoded), (x, decoded), (error, error))
    )
    norms = np.sqrt(squares * decoded_squares)
    cosines = np.where(squares == decoded_squares, np.float32(1), np.float32(0))  # if a vector is 0
    np.divide(products, norms, out=cosines, where=norms > 0)
    return np.stack((squares, errors, magnitude(error)[..., 0], cosines))


class SideErrors:
    """Sums squares, errors and cosines over the tokens of a side, for each head."""

    def __init__(self, heads: int, tokens: int | None = None) -> None:
        self.counts = None if tokens is None else CodeCounts()
        self.halves = np.zeros((2, 2, heads))  # [squares or errors, half of the tokens, heads]
        self.largest, self.cosines = np.zeros((2, heads))
        self.middle = None if tokens is None else tokens // 2
        self.tokens = self.codes_of_head = 0
        self.marks: Any = None  # sum of marks of each head; None without codes
        self.bits = 0

    @property
    def squares(self) -> np.ndarray:
        """Return the sum of squares of each head."""
        return self.halves[0].sum(0)

    @property
    def errors(self) -> np.ndarray:
        """Return the sum of squared errors of each head."""
        return self.halves[1].sum(0)

    def add(self, x: np.ndarray, decoded: np.ndarray) -> None:
        """Add tokens x [tokens, heads, dim] with the decoded tokens."""
        self.add_measures(measure_tokens(x, decoded))

    def add_measures(self, measures: np.ndarray) -> None:
        """Add the measures of tokens, in order."""
        count = measures.shape[1]
        first = count if self.middle is None else min(max(self.middle - self.tokens, 0), count)
        for half, part in enumerate((slice(0, first), slice(first, count))):
            self.halves[:, half] += measures[:2, part].sum(1, dtype=np.float64)
        self.largest = np.maximum(self.largest, measures[2].max(0, initial=0))
        self.cosines += measures[3].sum(0, dtype=np.float64)
        self.tokens += count

    def add_codes(self, codes: np.ndarray, marks: np.ndarray) -> None:
        """Count codes [tokens, heads, elements] by their marks; ``marks[code]`` is the mark of a code."""
        self.add_marks(marks[codes].sum(0).sum(-1), codes[:, 0].size)

    def add_marks(self, found: np.ndarray, codes_of_head: int) -> None:
        """Add sums of marks [heads] of so many codes of each head."""
        self.marks = found if self.marks is None else self.marks + found
        self.codes_of_head += codes_of_head

    def by_head(self) -> Iterator[dict[str, Any]]:
        """Yield {measure: number} of each head; "halves" has the errors of both halves of the tokens."""
        errors, halves = relative(self.errors, self.squares), relative(self.halves[1], self.halves[0])
        for h, error in enumerate(errors):
            marks = None if self.marks is None else int(self.marks[h])
            row = {
                "relative_rms": float(error),
                "largest_error": float(self.largest[h]),
                "cosine": float(self.cosines[h] / max(1, self.tokens)),
                "at_end": None if marks is None else marks % ZERO_MARK / max(1, self.codes_of_head),
                "zero": None if marks is None else marks // ZERO_MARK / max(1, self.codes_of_head),
            }
            yield row if self.middle is None else row | {"halves": halves[:, h].tolist()}


class TokenErrors:
    """Holds the measures of each token of one head, to sum them over the tokens that policies keep."""

    counts = None

    def __init__(self) -> None:
        self.measures: list[np.ndarray] = []  # of parts, [4, tokens, 1]
        self.marks: list[np.ndarray] = []  # of parts, [tokens]
        self.codes_of_token = self.bits = 0

    def add(self, x: np.ndarray, decoded: np.ndarray) -> None:
        """Add tokens x [tokens, 1, dim] with the decoded tokens."""
        self.measures.append(measure_tokens(x, decoded))

    def add_codes(self, codes: np.ndarray, marks: np.ndarray) -> None:
        """Count codes [tokens, 1, elements] by their marks."""
        self.marks.append(marks[codes[:, 0]].sum(-1))
        self.codes_of_token = codes.shape[2]

    def add_to(self, errors: SideErrors, tokens: np.ndarray) -> None:
        """Add the tokens of these indices."""
        if len(self.measures) > 1:
            self.measures = [np.concatenate(self.measures, 1)]
            self.marks = [np.concatenate(self.marks)] if self.marks else []
        errors.add_measures(self.measures[0][:, tokens])
        if self.marks:
            errors.add_marks(self.marks[0][tokens].sum(keepdims=True), len(tokens) * self.codes_of_token)


def relative(errors: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """Return the roots of errors / squares; where all numbers are 0, whether there is any error."""
    return np.sqrt(np.divide(errors, squares, out=(errors > 0).astype(float), where=squares > 0))


def pieces(begin: int, end: int, elements: int, step: int = 1) -> list[slice]:
    """Split tokens of `elements` elements each into slices of about `ELEMENTS`, multiples of `step`."""
    count = max(ELEMENTS // elements // step, 1) * step
    return [slice(first, min(first + count, end)) for first in range(begin, end, count)]


def floats(side: SideReader, parts: Sequence[slice]) -> Iterator[np.ndarray]:
    """Yield float32 [tokens, heads, dim] of each slice."""
    return (np.ascontiguousarray(side.read(part), np.float32) for part in parts)


def prepare_schemes(begin: int, end: int, *pairs: tuple[Any, SideReader]) -> tuple[list[Any], list[slice]]:
    """Return (schemes to encode tokens begin..end of their sides, slices to encode one at a time)."""
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


def code_parts(
    scheme: Any, side: SideReader, errors: SideErrors | TokenErrors | None
) -> Iterator[np.ndarray]:
    """Encode and decode a side, part by part; add errors and bits, if any, and yield the decoded tokens."""
    (scheme,), parts = prepare_schemes(0, side.tokens, (scheme, side))
    for number, (part, x) in enumerate(zip(parts, floats(side, parts), strict=True)):
        yield code_part(scheme, side, x, number, part.start, errors)


def code_part(
    scheme: Any, side: SideReader, x: np.ndarray, number: int, first: int,
    errors: SideErrors | TokenErrors | None,
) -> np.ndarray:  # fmt: skip
    """Encode and decode a numbered part x of a side, from token `first` on; add errors and bits."""
    arrays = scheme.encode(x)
    decoded = decode_like(scheme, arrays, x)
    with np.errstate(invalid="ignore", over="ignore"):
        total = decoded.sum()
    if not np.isfinite(total):
        check_finite("decode", decoded, first)
    if errors is None:
        return decoded
    errors.add(x, decoded)
    codes = scheme.codes(arrays) if hasattr(scheme, "codes") else None
    if codes is not None and codes.size:
        table, (low, high) = scheme.format.code.table, scheme.format.code.limits
        marks = ((table <= low) | (table >= high)) + (table == 0) * np.uint64(ZERO_MARK)
        errors.add_codes(codes, marks)
    if errors.counts is not None and number % -(-side.tokens // COUNTED) == 0:
        plain = arrays["rest"].size * side.bits if hasattr(scheme, "others") else 0
        errors.counts.add(len(x), *codes_and_others(scheme, arrays, codes, x), plain)
    if hasattr(scheme, "stored"):
        errors.bits += scheme.stored(arrays, side.bits, first=not first)
    else:
        errors.bits += 8 * sum(np.asarray(array).nbytes for array in arrays.values())
    return decoded


def code_sides(
    layer: LayerReader, schemes: Sequence[Any], errors: Sequence[SideErrors], judge: int
) -> AttentionSums | None:
    """Encode and decode the sides of a layer, add their errors, and return those of attention.

    A sequence is encoded once where its codes are those of the whole side: if it is the only one, or if
    schemes encode each token by itself.
    """
    sides, queries = list(layer.sides.values()), layer.queries
    pairs = list(zip(schemes, sides, strict=False))
    alone = all(getattr(scheme, "by_token", False) for scheme, _ in pairs)
    if queries is None or not (alone or len(queries) == 1):
        for (scheme, side), own in zip(pairs, errors, strict=True):
            for _ in code_parts(scheme, side, own):
                pass  # only errors and bits are needed
        both = [schemes[0], schemes[0] if layer.value_dim else schemes[1]]
        return None if queries is None else attention_errors(layer, *both, judge=judge)
    sums = AttentionSums()
    for query, begin, end in zip(queries, layer.starts, layer.starts[1:], strict=False):
        comparison = AttentionComparison(layer, last_queries(query, judge), begin, end)
        prepared, parts = prepare_schemes(begin, end, *pairs)
        of_parts = zip(parts, *(floats(side, parts) for side in sides), strict=True)
        for number, (part, *xs) in enumerate(of_parts):
            each = zip(prepared, sides, xs, errors, strict=True)
            decoded = [code_part(scheme, side, x, number, part.start, own) for scheme, side, x, own in each]
            comparison.add(part, (xs[0], xs[-1]), (decoded[0], decoded[-1]))
        sums.add(comparison.measures, comparison.count)
    return sums


def outliers(name: str, side: SideReader) -> tuple[np.ndarray, np.ndarray]:
    """Return how far channels of each head stand out, and the mean magnitudes of channels [heads, dim].

    The first is the largest mean magnitude of a head divided by the median; 1 if the median is 0. Raises if
    a number is not finite.
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
        token, head, element = wrongs[0]
        what = "NaN" if np.isnan(x[token, head, element]) else "infinity"
        raise argument_error(name, "finite numbers", f"{what} in head {head}, token {first + token}")


class RunningAttention:
    """Accumulates attention of query rows [heads, rows] over blocks of tokens, with an online softmax."""

    def __init__(self, heads: int, rows: int, dim: int) -> None:
        self.m = np.full((heads, rows), -np.inf, np.float32)
        self.l = np.zeros((heads, rows))
        self.top = np.zeros((heads, rows), np.int64)  # the token of the largest weight
        self.o = np.zeros((heads, rows, dim), np.float32)

    def add(self, logits: np.ndarray, value: np.ndarray, first: int) -> Any:
        """Add a block from the token `first` on; replace its logits [heads, rows, tokens] by exp(logits - m).

        Returns alpha, by which sums over earlier blocks must be multiplied.
        """
        top = logits.argmax(-1)
        m = np.take_along_axis(logits, top[..., None], -1)[..., 0]
        self.top = np.where(m > self.m, first + top, self.top)
        m = np.maximum(m, self.m)
        alpha, self.m = np.exp(self.m - m), m
        np.exp(np.subtract(logits, m[..., None], out=logits), out=logits)
        self.l = self.l * alpha + logits.sum(-1)
        self.o *= alpha[..., None]
        self.o += long_product(logits, value)
        return alpha

    @property
    def output(self) -> Any:
        """Return the output [heads, rows, dim]."""
        return self.o / self.l[..., None]

    @property
    def log_sum(self) -> Any:
        """Return the log-sum-exp of each row."""
        return self.m + np.log(self.l)


class AttentionComparison:
    """Compares attention of the last queries [count, Hq, D] of a sequence with that over decoded tokens.

    The query heads of a key head are rows of one product, for a block of tokens at a time. With exact scores
    S, weights P and log-sum-exp L, and S' and L' from decoded keys, the divergence is

        KL(P, P') = -(sum of P (S' - S)) - L + L'
    """

    def __init__(self, layer: LayerReader, query: np.ndarray, begin: int, end: int) -> None:
        heads, (self.count, _, dim), self.begin = layer.key.heads, query.shape, begin
        rows = query.reshape(self.count, heads, -1, dim).transpose(1, 2, 0, 3).reshape(heads, -1, dim)
        self.rows = rows * np.float32(dim**-0.5 if layer.scale is None else layer.scale)
        # The last token that each row sees.
        self.last = np.tile(np.arange(end - begin - self.count, end - begin), rows.shape[1] // self.count)
        self.width = layer.value_dim or layer.value.dim
        self.exact, self.lossy = (RunningAttention(heads, rows.shape[1], self.width) for _ in range(2))
        # Sums of |S' - S|, and of exp(S - m) (S' - S).
        self.logit, self.weighted_change = np.zeros((2, *self.exact.l.shape))

    def add(self, part: slice, pair: Sequence[np.ndarray], decoded: Sequence[np.ndarray]) -> None:
        """Add keys and values [tokens, heads, D] of a part, and their decoded numbers."""
        key, value, lossy_key, lossy_value = (x.swapaxes(0, 1) for x in (*pair, *decoded))
        value, lossy_value = value[..., : self.width], lossy_value[..., : self.width]
        logits, lossy_logits = (product(self.rows, side.swapaxes(1, 2)) for side in (key, lossy_key))
        change = lossy_logits - logits  # [heads, rows, tokens]
        hidden = np.arange(part.start, part.stop) - self.begin > self.last[:, None]  # [rows, tokens]
        if hidden.any():
            change[:, hidden] = 0
            logits[:, hidden] = lossy_logits[:, hidden] = -np.inf
        self.logit += np.abs(change).sum(-1)
        alpha = self.exact.add(logits, value, part.start)
        self.weighted_change *= alpha
        self.weighted_change += np.einsum("hrt,hrt->hr", logits, change)
        self.lossy.add(lossy_logits, lossy_value, part.start)

    @property
    def measures(self) -> dict[str, np.ndarray]:
        """Return {measure: [heads, rows]}.

        "output" and "norm" are sums of squares: of the error, and of the exact output.
        """
        exact, lossy = self.exact, self.lossy
        return {
            "logit": self.logit / (self.last + 1),
            "kl": np.maximum(-self.weighted_change / exact.l - exact.log_sum + lossy.log_sum, 0),
            "output": ((lossy.output - exact.output) ** 2).sum(-1),
            "norm": (exact.output**2).sum(-1),
            "top_changed": lossy.top != exact.top,
        }


def last_queries(query: np.ndarray, judge: int) -> np.ndarray:
    """Return the last `judge` queries of a sequence, at most `JUDGING`, as float32."""
    return np.asarray(query[-min(judge, JUDGING) :], np.float32)


def attention_errors(layer: LayerReader, *schemes: Any, judge: int) -> AttentionSums:
    """Return the sums of the errors that schemes cause in attention, for each key head.

    Each sequence is encoded by itself. Its last `judge` queries measure the errors, at most `JUDGING`.
    """
    sums, sides = AttentionSums(), (layer.key, layer.value)
    for query, begin, end in zip(layer.queries or (), layer.starts, layer.starts[1:], strict=False):
        comparison = AttentionComparison(layer, last_queries(query, judge), begin, end)
        prepared, parts = prepare_schemes(begin, end, *zip(schemes, sides, strict=True))
        for part, *pair in zip(parts, *(floats(side, parts) for side in sides), strict=True):
            both = zip(prepared, pair, strict=True)
            comparison.add(part, pair, [decode_like(scheme, scheme.encode(x), x) for scheme, x in both])
        sums.add(comparison.measures, comparison.count)
    return sums


class AttentionSums:
    """Sums the results of `AttentionComparison` over queries, for each key head."""

    def __init__(self) -> None:
        self.sums: dict[str, np.ndarray] = {}
        self.by_token: list[np.ndarray] = []  # [output or norm, heads, judging tokens] of each sequence
        self.count = 0

    def add(self, numbers: Mapping[str, np.ndarray], tokens: int) -> None:
        """Add {measure: [heads, query heads of a key head x tokens]}."""
        for name, each in numbers.items():
            self.sums[name] = self.sums.get(name, np.zeros(1)) + each.sum(1, dtype=np.float64)
        pair = np.stack((numbers["output"], numbers["norm"]))
        self.by_token.append(pair.reshape(2, len(numbers["norm"]), -1, tokens).sum(2, dtype=np.float64))
        self.count += numbers["kl"].shape[1]

    @property
    def output_error(self) -> float:
        """Return the relative error of the outputs of all heads."""
        squares = self.sums["norm"].sum()
        return float(np.sqrt(self.sums["output"].sum() / squares)) if squares else 0.0

    @classmethod
    def joined(cls, heads: Sequence[AttentionSums]) -> AttentionSums:
        """Return the sums of several heads, each of which had its own."""
        found = cls()
        found.count = heads[0].count
        found.sums = {name: np.concatenate([each.sums[name] for each in heads]) for name in heads[0].sums}
        parts = zip(*(each.by_token for each in heads), strict=True)
        found.by_token = [np.concatenate(each, 1) for each in parts]
        return found

    def by_head(self) -> Iterator[dict[str, Any]]:
        """Yield {measure: mean} of each head; of outputs the relative error.

        "halves" has this error for both halves of the sequences, which share no keys, or of the judging
        tokens of a single sequence; one token has none.
        """
        by_token = np.concatenate(self.by_token, 2)
        first = self.by_token[: len(self.by_token) // 2]
        middle = sum(each.shape[2] for each in first) or by_token.shape[2] // 2
        halves = np.stack([by_token[..., part].sum(2) for part in (slice(middle), slice(middle, None))], 2)
        (norms, of_halves) = by_token[1].sum(1), relative(*halves)
        for h, norm in enumerate(norms):
            means = {name: float(each[h] / self.count) for name, each in self.sums.items()}
            means["output"] = float(np.sqrt(by_token[0, h].sum() / norm)) if norm else 0.0
            own = {"halves": of_halves[h].tolist()} if middle else {}
            yield {MEANS[name]: means[name] for name in MEANS if name in means} | own
