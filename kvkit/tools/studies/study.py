"""`study`: schemes over all layers, and what came of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvkit.errors import KvkitError, argument_error
from kvkit.tools.readers import LayerReader, open_cache
from kvkit.tools.studies import measures, report
from kvkit.tools.studies.schemes import list_schemes
from kvkit.tools.studies.words import WORST, head_in_words, table
from kvkit.tools.tasks import Lazy, Mapper
from kvkit.tools.text import columns

MOST = 60  # schemes in a text
SIDES = "keys", "values"
Row = dict[str, Any]


@dataclass(frozen=True)
class Summary:
    """A scheme over all layers and heads.

    Attributes
    ----------
    scheme : str
    bits : float
        Stored for each number, scales and all.
    bytes_per_token : float
        In all layers and heads, of keys and values.
    key_error, value_error : float
        Relative root mean square: of what comes back, over all heads.
    worst_error : float
        That of the worst head.
    largest_error : float
        Of a number, in any head.
    cosine : float
        Of a token in a head and the same as it comes back: the mean over all.
    at_end, zero : float or None
        Shares of codes at an end of their range, and of those that stand for 0; None where codes are not
        seen. Where a scale comes of the largest of a group, that one is at an end by construction: one in 8
        of int8:g8. Of e4m3 and e5m2 with a scale of 1 all that are there have saturated, or just not.
    kl, top_changed, output_error, logit_error : float or None
        Means over queries: divergence of the weights, in nats; how often another key has the largest weight;
        relative error of outputs; mean error of a logit. None without queries.
    perplexity, agreement : float or None
        Of a model that reads a text over keys and values that have been through the scheme: how often the
        token that it finds most likely is the one that it finds without it. None without a model.
    """

    scheme: str
    bits: float
    bytes_per_token: float
    key_error: float
    value_error: float
    worst_error: float
    largest_error: float
    cosine: float
    at_end: float | None = None
    zero: float | None = None
    kl: float | None = None
    top_changed: float | None = None
    output_error: float | None = None
    logit_error: float | None = None
    perplexity: float | None = None
    agreement: float | None = None


@dataclass(frozen=True)
class Study:
    """The result of `study`; its text is a table of schemes and the worst heads of each.

    Attributes
    ----------
    source : str
    layers : list of str
    heads, tokens : int
    summary : list of Summary
        A scheme each, as they were given.
    rows : list of dict
        By scheme, layer, head and side: relative_rms, largest_error, cosine, at_end, zero; by scheme,
        layer and head, with the side "attention": logit_error, kl, output_error, top_changed.
    outliers : list of dict
        Of the data, by layer, head and side: the largest mean magnitude of a channel over the median one.
    channels : list of dict
        Of keys, by layer: mean magnitudes [heads, dim].
    notes : tuple of str
    """

    source: str
    layers: list[str]
    heads: int
    tokens: int
    summary: list[Summary]
    rows: list[Row] = field(repr=False)
    outliers: list[Row] = field(repr=False)
    channels: list[Row] = field(repr=False)
    notes: tuple[str, ...] = ()

    def worst(self, scheme: str, count: int = WORST) -> list[Row]:
        """Return the heads that a scheme serves worst: by divergence if there were queries, else by error."""
        own = [row for row in self.rows if row["scheme"] == scheme]
        by = "kl" if any("kl" in row for row in own) else "relative_rms"
        return sorted((row for row in own if by in row), key=lambda row: -row[by])[:count]

    def budget(self) -> str:
        """Return in a line which scheme is the smallest of the good ones."""
        fine = [one for one in self.summary if one.worst_error <= 0.1]
        if not fine:
            return "no scheme keeps every head within an error of 10 %"
        best = min(fine, key=lambda one: one.bits)
        return (
            f"the smallest that keeps every head within an error of 10 %: {best.scheme}, "
            f"{best.bits:.2f} bits a number, {best.bytes_per_token:,.0f} bytes a token"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON has it."""
        channels = [row | {"means": row["means"].tolist()} for row in self.channels]
        return asdict(self) | {"channels": channels, "budget": self.budget()}

    def save(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write study.json, report.md, plots, and report.html, which needs none of the others.

        Plots want matplotlib, the extra ``plot``; without it the rest is written, and says so.
        """
        return report.write_report(self, Path(folder))

    def __str__(self) -> str:
        parts = [f"{self.source}: {len(self.layers)} layers, {self.heads} key heads, {self.tokens:,} tokens"]
        parts.append(columns(*table(self.summary, wide=False), MOST))
        lines = [(one.scheme, ", ".join(map(head_in_words, self.worst(one.scheme)))) for one in self.summary]
        parts.append(f"the {WORST} worst heads\n" + columns(("scheme", ""), lines, MOST))
        parts.append(self.budget())
        parts.append("\n".join(f"note: {note}" for note in self.notes))
        return "\n\n".join(filter(None, parts))


def study(
    source: Any,
    schemes: str | Sequence[Any],
    *,
    layout: str | None = None,
    sizes: Mapping[str, int] | None = None,
    progress: Callable[[int, int], object] | None = None,
    mapper: Mapper = map,
) -> Study:
    """Compare schemes of quantization on the keys and values of a cache, layer by layer and head by head.

    Parameters
    ----------
    source : path, mapping of arrays, or cache
        A file that `kvkit.tools.inspect` knows; arrays ``key`` and ``value``, [layers, tokens, heads, dim],
        perhaps with ``query`` [layers, sequences, last tokens, query heads, dim] and ``seqstarts``; or a
        cache of `kvkit.cache`. Codes of a format that is known are decoded, some tokens at a time.
    schemes : str or sequence
        Separated by commas, or each for itself: a name of `kvkit.formats` with its options, as in
        "int4:g32"; that and a rotation, "int4:g32+hadamard"; "fp8" (e4m3 with a scale of 1); a class of a
        file, "mine.py:Scheme"; what `scheme` has registered; or an object with ``encode`` and ``decode``.
    layout : str, optional
        How the cache of a file lies, if it does not say so.
    sizes : mapping, optional
        Of the axes l, b, n, h, c that shapes do not tell.
    progress : callable, optional
        Is told how many of how many layers are done.
    mapper : callable
        As `map`: calls a function for each layer, perhaps elsewhere (`kvkit.integrations.dask.mapper`),
        where files are opened again.

    Returns
    -------
    Study

    Raises
    ------
    KvkitError
        If a scheme is unknown or does not fit, if numbers are not finite, or if the source is no cache.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.tools import study
    >>> keys = np.random.default_rng(0).standard_normal((2, 128, 3, 64)).astype(np.float16)
    >>> found = study({"key": keys, "value": keys}, "fp8,int8:g8,int4:g32")
    >>> [(one.scheme, one.bits) for one in found.summary]
    [('fp8', 8.0), ('int8:g8', 10.0), ('int4:g32', 4.5)]
    """
    return study_layers(
        Lazy(open_cache, source, layout, sizes), Lazy(list_schemes, schemes), progress, mapper
    )


def study_layers(
    source: Lazy, schemes: Lazy, progress: Callable[[int, int], object] | None = None, mapper: Mapper = map
) -> Study:
    """Study an opened source under listed schemes."""
    opened = source.value
    titles = [f"{opened.name}, layer {i}" for i in range(opened.count)]
    layers: list[StudiedLayer] = []
    for layer in mapper(partial(study_layer, source, schemes), titles, range(opened.count)):
        layers.append(layer)
        if progress:
            progress(len(layers), opened.count)
    rows = [row for layer in layers for row in layer.rows]
    summary = [summary_of(name, rows, layers) for name, *_ in schemes.value]
    outliers = [row for layer in layers for row in layer.outliers]
    channels = [{"layer": layer.name, "means": layer.channels} for layer in layers]
    named, notes, last = [layer.name for layer in layers], opened.notes, layers[-1]
    if opened.format:
        notes = (f"the source is quantized ({opened.format}): errors are those that come on top", *notes)
    return Study(
        opened.name, named, last.heads, last.tokens, summary,
        rows=rows, outliers=outliers, channels=channels, notes=notes,
    )  # fmt: skip


@dataclass(frozen=True)
class StudiedLayer:
    """A layer's part of a `Study`; by scheme the bits that it stores, and squares of errors and numbers."""

    name: str
    heads: int
    tokens: int
    elements: int
    outliers: list[Row]
    channels: np.ndarray
    rows: list[Row]
    bits: dict[str, int]
    sums: dict[str, np.ndarray]


def study_layer(source: Lazy, schemes: Lazy, title: str, i: int) -> StudiedLayer:
    """Study a layer under all schemes, each in a thread."""
    layer, name = source.value.layer(i), source.value.name
    rows: list[Row] = []
    outliers: list[Row] = []
    bits, sums = {}, {}
    with ThreadPoolExecutor(min(len(schemes.value) + 1, os.cpu_count() or 1)) as threads:
        where = [f"{name}, {layer.name}, {side}" for side in SIDES]
        found = list(threads.map(measures.outliers, where, (layer.key, layer.value)))
        for sequence, query in enumerate(layer.queries or ()):
            measures.check_finite(f"{name}, {layer.name}, queries of sequence {sequence}", query)
        jobs = {each: threads.submit(study_scheme, layer, each, *pair) for each, *pair in schemes.value}
        for side, (ratios, _) in zip(SIDES, found, strict=True):
            for h, ratio in enumerate(ratios):
                outliers.append({"layer": layer.name, "head": h, "side": side, "ratio": float(ratio)})
        for each, job in jobs.items():
            its_rows, bits[each], sums[each] = job.result()
            rows += [{"scheme": each, "layer": layer.name, **row} for row in its_rows]
    heads, tokens, channels = layer.key.heads, layer.key.tokens, found[0][1]
    elements = tokens * heads * (layer.key.dim + layer.value.dim)
    return StudiedLayer(
        layer.name,
        heads,
        tokens,
        elements,
        outliers=outliers,
        channels=channels,
        rows=rows,
        bits=bits,
        sums=sums,
    )


def study_scheme(layer: LayerReader, name: str, *schemes: Any) -> tuple[list[Row], int, np.ndarray]:
    """Return the rows of a layer under a scheme; its bits; squares of errors and numbers [side, 2]."""
    found: list[Row] = []
    stored, sums = 0, []
    try:
        for side, scheme, data in zip(SIDES, schemes, (layer.key, layer.value), strict=True):
            errors = measures.errors_of(scheme, data)
            found += [{"head": h, "side": side, **row} for h, row in enumerate(errors.by_head())]
            stored += errors.bits
            sums.append((errors.errors.sum(), errors.squares.sum()))
        if layer.queries is not None:
            by_head = measures.attention_errors(layer, *schemes)
            found += [{"head": h, "side": "attention", **row} for h, row in enumerate(by_head)]
    except KvkitError as error:
        raise KvkitError(f"{name}, {layer.name}: {error}") from error
    except Exception as error:
        cause = f"{type(error).__name__} ({error})"
        raise argument_error(f"scheme {name}", f"to code {layer.name}", cause) from error
    return found, stored, np.array(sums)


def summary_of(name: str, rows: list[Row], layers: list[StudiedLayer]) -> Summary:
    """Sum a scheme up over all layers and heads."""
    own = [row for row in rows if row["scheme"] == name]
    sides = [row for row in own if row["side"] != "attention"]
    attention = [row for row in own if row["side"] == "attention"]
    bits = sum(layer.bits[name] for layer in layers)
    total = sum(layer.sums[name] for layer in layers)

    def mean(of: str, among: list[Row]) -> float | None:
        numbers = [row[of] for row in among if row[of] is not None]
        return float(np.mean(numbers)) if numbers else None

    errors = [float(np.sqrt(wrong / squares)) if squares else 0.0 for wrong, squares in np.asarray(total)]
    means: dict[str, Any] = {of: mean(of, sides) for of in ("cosine", "at_end", "zero")}
    means |= {of: mean(of, attention) for of in ("kl", "top_changed", "output_error", "logit_error")}
    return Summary(
        name,
        bits / sum(layer.elements for layer in layers),
        bits / 8 / layers[-1].tokens,
        key_error=errors[0],
        value_error=errors[1],
        worst_error=max(row["relative_rms"] for row in sides),
        largest_error=max(row["largest_error"] for row in sides),
        **means,
    )
