"""Compare quantization schemes, and policies that evict tokens, over all layers of a cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvkit.errors import KvkitError, argument_error
from kvkit.rope import Rope
from kvkit.tools.readers import LayerReader, open_cache
from kvkit.tools.studies import evicting, measures, report
from kvkit.tools.studies.policies import ORACLE, make_plan, parts_of
from kvkit.tools.studies.schemes import fitting_schemes
from kvkit.tools.studies.words import WORST, table, worst_heads
from kvkit.tools.tasks import Lazy, Mapper
from kvkit.tools.text import columns

MAX_ROWS = 60  # the most rows of a printed table
THRESHOLD = 0.1
Row = dict[str, Any]


@dataclass(frozen=True)
class Summary:
    """Holds the errors and sizes of one scheme over all layers and heads.

    Attributes
    ----------
    scheme : str
    bits : float
        Stored bits per number, scales included.
    bytes_per_token : float
        Bytes of a token's keys and values in all layers and heads.
    key_error, value_error : float
        Relative root mean square error of decoded keys and values, over all heads.
    worst_error : float
        Largest relative root mean square error of a head.
    largest_error : float
        Largest error of a single number.
    cosine : float
        Mean cosine similarity between a head's vector and its decoded vector.
    at_end, zero : float or None
        Shares of codes at a limit of their range, and of codes for 0; None for schemes that do not expose
        their codes. With a scale taken from a group's maximum, one code of each group is at the limit: 1 in 8
        for int8:g8. For e4m3 and e5m2 with scale 1, a code at the limit has saturated or just fits.
    kl, top_changed, output_error, logit_error : float or None
        Means over queries: divergence of the weights, in nats; how often another key has the largest weight;
        relative error of outputs; mean error of a logit. None without queries.
    worst_output : float or None
        Largest relative error of a head's outputs. None without queries.
    perplexity, agreement : float or None
        For a model that reads a text with the quantized cache: the text's perplexity, and how often the most
        likely token is the same as without quantization. None without a model.
    tokens_kept, weight_kept : float or None
        With eviction: how many tokens a head keeps on average, and their share of the weights of the judging
        queries. `scheme` is then the policy, such as "snapkv@0.5+int4:g32"; bits and bytes are divided by all
        tokens of the context, and errors of keys and values count kept tokens only.
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
    worst_output: float | None = None
    tokens_kept: float | None = None
    weight_kept: float | None = None

    @property
    def evicts(self) -> bool:
        """Return whether tokens are evicted."""
        return parts_of(self.scheme) is not None

    @property
    def is_oracle(self) -> bool:
        """Return whether this is the oracle, which sees the judging queries, unlike any real policy."""
        parts = parts_of(self.scheme)
        return parts is not None and parts.scorer == ORACLE

    @property
    def advised_error(self) -> float:
        """Return the error of the worst head: of its outputs with queries, otherwise of keys and values.

        It is infinite for the oracle, and for eviction without queries, which are never advised.
        """
        if self.is_oracle or (self.evicts and self.worst_output is None):
            return float("inf")
        return self.worst_error if self.worst_output is None else self.worst_output


@dataclass(frozen=True)
class Study:
    """Holds the result of `study`; its text is a table of schemes, and the worst heads of each.

    Attributes
    ----------
    source : str
    layers : list of str
    num_kv_heads, tokens : int
    summary : list of Summary
        One for each scheme, in the caller's order.
    rows : list of dict
        One for each scheme, layer, head and side with relative_rms, largest_error, cosine, at_end, zero; one
        for each scheme, layer and head with side "attention", logit_error, kl, output_error, top_changed.
    outliers : list of dict
        For each layer, head and side: largest mean magnitude of a channel / median of all channels.
    channels : list of dict
        For each layer: mean magnitudes of keys [heads, dim].
    notes : tuple of str
    threshold : float
        The largest error of a head that the advice accepts. It is arbitrary; models differ.
    """

    source: str
    layers: list[str]
    num_kv_heads: int
    tokens: int
    summary: list[Summary]
    rows: list[Row] = field(repr=False)
    outliers: list[Row] = field(repr=False)
    channels: list[Row] = field(repr=False)
    notes: tuple[str, ...] = ()
    threshold: float = THRESHOLD

    @property
    def evicts(self) -> bool:
        """Return whether the study compares policies."""
        return any(one.evicts for one in self.summary)

    @property
    def by_attention(self) -> bool:
        """Return whether there were queries; then the advice uses the outputs of attention."""
        return any(one.worst_output is not None for one in self.summary)

    @property
    def unjudged(self) -> bool:
        """Return whether there are policies but no queries, without which their cost is unknown."""
        return self.evicts and not self.by_attention

    def worst(self, scheme: str, count: int = WORST) -> list[Row]:
        """Return the worst heads of a scheme: by divergence if there were queries, otherwise by error."""
        own = [row for row in self.rows if row["scheme"] == scheme]
        by = "kl" if any("kl" in row for row in own) else "relative_rms"
        return sorted((row for row in own if by in row), key=lambda row: -row[by])[:count]

    def budget(self) -> str:
        """Return a line that names the smallest scheme whose worst head has an error within the threshold."""
        what = "attention output" if self.by_attention else "keys and values"
        within = f"the {what} of every head within an error of {100 * self.threshold:g} %"
        arbitrary = f"(an arbitrary limit: threshold={self.threshold:g})"
        fine = [one for one in self.summary if one.advised_error <= self.threshold]
        if self.unjudged and not fine and all(one.evicts for one in self.summary):
            return "without queries no policy can be advised"
        if not fine:
            return f"no scheme keeps {within} {arbitrary}"
        best = min(fine, key=lambda one: one.bits)
        return (
            f"the smallest that keeps {within}: {best.scheme}, {best.bits:.2f} bits a number, "
            f"{best.bytes_per_token:,.0f} bytes a token {arbitrary}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the result as values that JSON can hold."""
        channels = [row | {"means": row["means"].tolist()} for row in self.channels]
        return asdict(self) | {"channels": channels, "budget": self.budget()}

    def save(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write study.json, report.md, plots, and report.html (self-contained).

        Plots need matplotlib, the extra ``plot``. Without it they are left out, and the report says so.
        """
        return report.write_report(self, Path(folder))

    def __str__(self) -> str:
        layers = f"{len(self.layers)} layer{'s' * (len(self.layers) != 1)}"
        parts = [f"{self.source}: {layers}, {self.num_kv_heads} key heads, {self.tokens:,} tokens"]
        notes = "\n".join(f"note: {note}" for note in self.notes)
        parts += [notes] * self.unjudged
        parts.append(columns(*table(self.summary, wide=False), MAX_ROWS))
        if heads := worst_heads(self):
            parts.append(f"the {WORST} worst heads\n" + columns(("scheme", ""), heads, MAX_ROWS))
        parts += [self.budget()] + [notes] * (not self.unjudged)
        return "\n\n".join(filter(None, parts))


def study(
    source: Any,
    schemes: str | Sequence[Any] | None = None,
    *,
    evict: str | Sequence[Any] | None = None,
    budget: str = "uniform",
    judge: int | None = None,
    rope: Rope | str | None = None,
    layout: str | None = None,
    sizes: Mapping[str, int] | None = None,
    rotation: str | None = None,
    progress: Callable[[int, int], object] | None = None,
    mapper: Mapper = map,
    threshold: float = THRESHOLD,
) -> Study:
    """Compare quantization schemes on the keys and values of a cache, layer by layer and head by head.

    Parameters
    ----------
    source : path, mapping of arrays, or cache
        A file that `kvkit.tools.inspect` reads; arrays ``key`` and ``value``, [layers, tokens, heads, dim],
        perhaps with ``query`` [layers, sequences, last tokens, query heads, dim] and ``seqstarts``; an array
        ``latent``, [layers, tokens, dim], whose rows are keys and whose first 512 elements are values (with
        ``query`` also ``softmax_scale``), or such rows in a layout without ``kv``; or a cache of
        `kvkit.cache`. A quantized cache is decoded if its format is known.
    schemes : str or sequence
        A comma-separated string or a sequence. A scheme is a name of `kvkit.formats` with its options, as in
        "int4:g32"; a format and a rotation, "int4:g32+hadamard"; "fp8" (e4m3 with a scale of 1); a class in a
        file, "mine.py:Scheme"; a name that `scheme` registered; or an object with ``encode`` and ``decode``.
        None without `evict`: those of "fp8,int8:g8,int4:g32,int4:g32+hadamard,q8_0,q4_0" that fit the heads.
    evict : str or sequence, optional
        Policies "SCORER@SHARE" and "SCORER@SHARE+SCHEME", and schemes: "snapkv@0.5,int4:g32,
        snapkv(window=32)@0.25+int4:g32". A scorer of `kvkit.eviction`, or a function in a file, "mine.py:f",
        keeps that share of each head's tokens; the scheme encodes these as a new prompt. In a sequence,
        (function, share) is a policy, too. With `schemes`, each policy is combined with each scheme, and
        "none" stands for the schemes without eviction. The scorers `random` (the mean of three seeds) and
        `oracle` are added.
    budget : str
        How the kept tokens are distributed: "uniform" (each head keeps the same number), "ada" (heads of a
        layer share them) or "pyramid" (early layers keep more).
    judge : int, optional
        How many of the last queries measure the error, by default a quarter (at most the last 64 are used).
        Scorers do not see them, and tokens after the first of them are never evicted.
    rope : Rope or "none", optional
        The rotary embedding of keys, for scorers that need it.
    layout : str, optional
        The layout of the file's cache, if the file does not name one.
    sizes : mapping, optional
        Sizes of axes (l, b, n, h, c) that cannot be derived from the shapes.
    rotation : str, optional
        The rotation of the stored keys and values, which is undone: "llama.cpp", or any other name that
        `kvkit.formats.rotate` takes.
    progress : callable, optional
        A function that is called with (finished layers, all layers).
    mapper : callable
        A function such as `map`, which studies each layer. `kvkit.integrations.dask.mapper` uses other
        processes, which open the files themselves.
    threshold : float
        The largest error of a head that the advised scheme may have: of the outputs of attention with
        queries, otherwise of keys and values. The default, 10 %, is arbitrary.

    Returns
    -------
    Study

    Raises
    ------
    KvkitError
        If a scheme is unknown or does not fit, if numbers are not finite, or if the source has no cache.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.tools import study
    >>> keys = np.random.default_rng(0).standard_normal((2, 128, 3, 64)).astype(np.float16)
    >>> found = study({"key": keys, "value": keys}, "fp8,int8:g8,int4:g32")
    >>> [(one.scheme, one.bits) for one in found.summary]
    [('fp8', 8.0), ('int8:g8', 10.0), ('int4:g32', 4.5)]
    >>> query = np.ones((2, 1, 16, 6, 64), np.float16)
    >>> found = study({"key": keys, "value": keys, "query": query}, evict="knorm@0.5")
    >>> [(one.scheme, one.tokens_kept) for one in found.summary]
    [('knorm@0.5', 66.0), ('random@0.5', 66.0), ('oracle@0.5', 66.0)]
    """
    check_threshold(threshold)
    opened = Lazy(open_cache, source, layout, sizes, None, rotation)
    notes: tuple[str, ...] = ()
    if schemes is None and evict is None:
        layers = [opened.value.layer(i) for i in range(opened.value.count)]
        sides = {
            (side.heads, side.dim, name == "values") for each in layers for name, side in each.sides.items()
        }
        schemes, notes = fitting_schemes(sides)
    plan = Lazy(make_plan, schemes, evict, budget, judge, rope)
    found = study_layers(opened, plan, progress, mapper)
    return replace(found, threshold=threshold, notes=(*notes, *found.notes))


def check_threshold(threshold: float) -> None:
    """Check the threshold: a finite number above 0."""
    if not 0 < threshold < np.inf:
        raise argument_error("threshold", "a positive number, as 0.1 for 10 %", threshold)


def study_layers(
    source: Lazy, plan: Lazy, progress: Callable[[int, int], object] | None = None, mapper: Mapper = map
) -> Study:
    """Study an opened source under a `StudyPlan`."""
    opened = source.value
    titles = [f"{opened.name}, layer {i}" for i in range(opened.count)]
    layers: list[StudiedLayer] = []
    for layer in mapper(partial(study_layer, source, plan), titles, range(opened.count)):
        layers.append(layer)
        if progress:
            progress(len(layers), opened.count)
    rows = [row for layer in layers for row in layer.rows]
    summary = [summary_of(name, rows, layers) for name in layers[0].bits]
    outliers = [row for layer in layers for row in layer.outliers]
    channels = [{"layer": layer.name, "means": layer.channels} for layer in layers]
    named, notes, last = [layer.name for layer in layers], opened.notes, layers[-1]
    if opened.format:
        notes = (f"the source is quantized ({opened.format}): only errors beyond its own are counted", *notes)
    if plan.value.policies:
        notes = (*evicting.notes_of(opened.layer(0), plan.value), *notes)
    return Study(
        opened.name, named, last.heads, last.tokens, summary,
        rows=rows, outliers=outliers, channels=channels, notes=notes,
    )  # fmt: skip


@dataclass(frozen=True)
class StudiedLayer:
    """Holds the results of one layer."""

    name: str
    heads: int
    tokens: int
    elements: int
    outliers: list[Row]
    channels: np.ndarray  # mean magnitudes of keys [heads, dim]
    rows: list[Row]
    bits: dict[str, float]  # {scheme: stored bits}
    sums: dict[str, np.ndarray]  # {scheme: [side, (sum of squared errors, sum of squares)]}


def study_layer(source: Lazy, plan: Lazy, title: str, i: int) -> StudiedLayer:
    """Study a layer under all schemes and policies, each in a thread."""
    layer, name = source.value.layer(i), source.value.name
    chosen = plan.value.fitting(layer.queries)
    check_tokens(layer)
    if layer.value_dim and chosen.policies:
        raise argument_error("evict", "no policies, for latent rows", "policies")
    rows: list[Row] = []
    outliers: list[Row] = []
    found: dict[str, evicting.Measured] = {}
    with ThreadPoolExecutor(min(len(chosen.names) + 1, os.cpu_count() or 1)) as threads:
        where = [f"{name}, {layer.name}, {side}" for side in layer.sides]
        outliers_and_means = list(threads.map(measures.outliers, where, layer.sides.values()))
        for sequence, query in enumerate(layer.queries or ()):
            measures.check_finite(f"{name}, {layer.name}, queries of sequence {sequence}", query)
        judge = evicting.count_judging(len(layer.queries[0]), chosen.judge) if layer.queries else None
        of_schemes = {
            each: threads.submit(study_scheme, layer, each, *pair, judge=judge if chosen.policies else None)
            for each, *pair in chosen.schemes
        }
        contexts = list(evicting.contexts_of(layer, chosen.judge)) if chosen.policies else []
        place = i, source.value.count
        of_policies = [
            threads.submit(evicting.study_policies, layer, contexts, group, chosen, place)
            for group in chosen.groups()
        ]
        for side, (ratios, _) in zip(layer.sides, outliers_and_means, strict=True):
            for h, ratio in enumerate(ratios):
                outliers.append({"layer": layer.name, "head": h, "side": side, "ratio": float(ratio)})
        found = {each: job.result() for each, job in of_schemes.items()}
        for job in of_policies:
            found |= job.result()
    for each in chosen.names:
        rows += [{"scheme": each, "layer": layer.name, **row} for row in found[each].rows]
    heads, tokens, (_, channels) = layer.key.heads, layer.key.tokens, outliers_and_means[0]
    elements = tokens * heads * sum(side.dim for side in layer.sides.values())
    return StudiedLayer(
        layer.name, heads, tokens, elements, outliers=outliers, channels=channels, rows=rows,
        bits={each: found[each].bits for each in chosen.names},
        sums={each: found[each].sums for each in chosen.names},
    )  # fmt: skip


def check_tokens(layer: LayerReader) -> None:
    """Raise if a layer has no elements."""
    for side in (layer.key, layer.value):
        if 0 in (side.tokens, side.heads, side.dim):
            got = f"{side.tokens} tokens of {side.heads} heads of {side.dim} elements in {layer.name}"
            raise argument_error("source", "a cache that holds tokens", got)


def study_scheme(layer: LayerReader, name: str, *schemes: Any, judge: int | None = None) -> evicting.Measured:
    """Measure one scheme over a layer.

    In a study with policies, `judge` is the number of queries that measure the error, and rows say that all
    tokens are kept.
    """
    found: list[Row] = []
    kept = {} if judge is None else {"weight_kept": 1.0, "tokens_kept": layer.key.tokens}
    stored, sums = 0, []
    try:
        for (side, data), scheme in zip(layer.sides.items(), schemes, strict=False):
            errors = measures.SideErrors(data.heads)
            for _ in measures.code_parts(scheme, data, errors):
                pass  # only errors and bits are needed
            found += [{"head": h, "side": side, **row} for h, row in enumerate(errors.by_head())]
            stored += errors.bits
            sums.append((errors.errors.sum(), errors.squares.sum()))
        if layer.value_dim:  # a latent row has the scheme of keys
            sums, schemes = sums * 2, schemes[:1] * 2
        if layer.queries is not None:
            by_head = measures.attention_errors(layer, *schemes, judge=judge or measures.QUERIES)
            found += [{"head": h, "side": "attention", **row, **kept} for h, row in enumerate(by_head)]
    except KvkitError as error:
        raise KvkitError(f"{name}, {layer.name}: {error}") from error
    except Exception as error:
        cause = f"{type(error).__name__} ({error})"
        raise argument_error(f"scheme {name}", f"to code {layer.name}", cause) from error
    return evicting.Measured(found, stored, np.array(sums))


def summary_of(name: str, rows: list[Row], layers: list[StudiedLayer]) -> Summary:
    """Summarize one scheme over the rows of all layers, heads and sides."""
    own = [row for row in rows if row["scheme"] == name]
    sides = [row for row in own if row["side"] != "attention"]
    attention = [row for row in own if row["side"] == "attention"]
    bits = sum(layer.bits[name] for layer in layers)
    total = sum(layer.sums[name] for layer in layers)

    def mean(of: str, among: list[Row]) -> float | None:
        numbers = [row[of] for row in among if row.get(of) is not None]
        return float(np.mean(numbers)) if numbers else None

    errors = [float(np.sqrt(wrong / squares)) if squares else 0.0 for wrong, squares in np.asarray(total)]
    means: dict[str, Any] = {of: mean(of, sides) for of in ("cosine", "at_end", "zero")}
    means |= {of: mean(of, attention) for of in ("kl", "top_changed", "output_error", "logit_error")}
    means |= {"tokens_kept": mean("tokens_kept", own), "weight_kept": mean("weight_kept", own)}
    means["worst_output"] = max((row["output_error"] for row in attention), default=None)
    return Summary(
        name, bits / sum(layer.elements for layer in layers), bits / 8 / layers[-1].tokens,
        key_error=errors[0], value_error=errors[1], worst_error=max(row["relative_rms"] for row in sides),
        largest_error=max(row["largest_error"] for row in sides), **means,
    )  # fmt: skip
