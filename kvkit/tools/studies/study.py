"""Compare quantization schemes, and policies that evict tokens, over all layers of a cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvkit.errors import KvkitError, argument_error, hints_keywords
from kvkit.rope import Rope
from kvkit.tools.queries import EXCHANGE, FORM
from kvkit.tools.readers import CacheReader, LayerReader, open_cache
from kvkit.tools.studies import evicting, measures, mixes, report
from kvkit.tools.studies.policies import StudyPlan, Target, make_plan, make_target
from kvkit.tools.studies.records import THRESHOLD, WORST, ChosenMix, StudyRecord, Summary, TableRow
from kvkit.tools.studies.schemes import DEFAULT, MIXED, Cast, fitting_schemes
from kvkit.tools.studies.words import in_short, mix_in_words, table, worst_heads
from kvkit.tools.tasks import Lazy, Mapper
from kvkit.tools.text import columns

MAX_ROWS = 60  # the most rows of a printed table


class Study(StudyRecord):
    """The result of `study`: its text is a table of schemes, and the worst heads of each.

    `StudyRecord` describes its attributes.
    """

    def save(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write study.json, report.md, table.csv, table.tex, plots as SVG and PNG, and report.html.

        Plots need matplotlib, the extra ``plot``. Without it they are left out, and the report says so. A
        study that found a mix also writes mix.json.
        """
        written = report.write_report(self, Path(folder))
        return written if self.mix is None else [*written, self.save_mix(Path(folder) / "mix.json")]

    def save_mix(self, path: str | os.PathLike[str]) -> Path:
        """Write the mix that the study found, as a file that `kvkit.cache.QuantizedCache.from_file` reads."""
        if self.mix is None:
            raise argument_error("study", "bits or an error, for which it finds a mix", "none")
        return mixes.write_mix(self.mix, Path(path))

    def __str__(self) -> str:
        layers = f"{len(self.layers)} layer{'s' * (len(self.layers) != 1)}"
        parts = [f"{self.source}: {layers}, {self.num_kv_heads} key heads, {self.tokens:,} tokens"]
        early, late = (
            "\n".join(f"note: {note}" for note in self.notes if (self.unjudged or EXCHANGE in note) == first)
            for first in (True, False)
        )
        parts += [early, *mix_in_words(self.mix), *in_short(self)]
        parts.append(columns(*table(self.summary, wide=False), MAX_ROWS))
        if heads := worst_heads(self):
            parts.append(f"the {WORST} worst heads\n" + columns(("scheme", ""), heads, MAX_ROWS))
        parts.append(late)
        return "\n\n".join(filter(None, parts))


@hints_keywords
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
    bits: float | None = None,
    error: float | None = None,
) -> Study:
    """Compare quantization schemes on the keys and values of a cache, layer by layer and head by head.

    Parameters
    ----------
    source : path, mapping of arrays, or cache
        A file that `kvkit.tools.inspect` reads; arrays ``key`` and ``value``, [layers, tokens, heads, dim],
        perhaps with ``query`` (or ``queries``, ``current_query``, ``query_states``, ``q``) [layers,
        sequences, last tokens, query heads, dim], ``softmax_scale``, ``seqstarts``, and ``attn_mask`` (or
        ``attention_mask``) [sequences, tokens], 0 for padding, which is not counted; an array ``latent``,
        [layers, tokens, dim], whose rows are keys and whose first 512 elements are values (with ``query``
        also ``softmax_scale``), or such rows in a layout without ``kv``; or a cache of `kvkit.cache`. A
        quantized cache is decoded if its format is known.
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
        How many of the last queries measure the error (at most the last 64 are used): by default a quarter
        with `evict`, `bits` or `error`, otherwise all. Scorers do not see them, and tokens after the first of
        them are never evicted.
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
    bits : float, optional
        Find the mix of `schemes`, which may differ between layers and between keys and values, that loses
        least at so many stored bits a number. The errors are those of the outputs of attention. The queries
        before the judging ones choose the mix, and all errors are those of the judging ones, over tokens that
        the search did not see. Then `schemes` are by default those of
        "kivi2,int4:g32,int4:g32+hadamard,kivi4,q4_0,q8_0,int8:g8" that fit the heads.
    error : float, optional
        Find the mix with the fewest bits whose error is at most this: 0.05 for 5 %.

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
    opened = Lazy(open_without_padding, source, layout, sizes, None, rotation)
    notes: tuple[str, ...] = ()
    target = make_target(bits, error)
    if schemes is None and evict is None:
        layers = [opened.value.layer(i) for i in range(opened.value.count)]
        sides = {
            (side.heads, side.dim, name == "values") for each in layers for name, side in each.sides.items()
        }
        schemes, notes = fitting_schemes(sides, DEFAULT if target is None else MIXED)
        if not schemes:
            key = layers[0].key
            wanted = (
                f"some that fit {key.heads} heads of {key.dim} elements (if these are {key.dim} heads of "
            )
            wanted += f"{key.heads} elements: layout='| l n c h')"
            raise argument_error("schemes", wanted, "none")
    plan = Lazy(partial(make_plan, target=target), schemes, evict, budget, judge, rope)
    found = study_layers(opened, plan, progress, mapper)
    return replace(found, threshold=threshold, notes=(*notes, *found.notes))


def open_without_padding(*arguments: Any) -> CacheReader:
    """Open the layers of a cache without the tokens that its mask hides."""
    return open_cache(*arguments).without_padding()


def check_threshold(threshold: float) -> None:
    """Check the threshold: a finite number above 0."""
    if not 0 < threshold < np.inf:
        raise argument_error("threshold", "a positive number, as 0.1 for 10 %", threshold)


def study_layers(
    source: Lazy, plan: Lazy, progress: Callable[[int, int], object] | None = None, mapper: Mapper = map
) -> Study:
    """Study an opened source under a `StudyPlan`, and then the mix that a target asks for."""
    opened = source.value
    if EXCHANGE in (given := opened.layer(0).no_queries):  # outputs would be left out, and errors halved
        raise argument_error("query", FORM, given)
    titles, target = [f"{opened.name}, layer {i}" for i in range(opened.count)], plan.value.target
    done, passes = 0, 1 if target is None else 2

    def all_layers(plan: Lazy) -> Iterator[StudiedLayer]:
        nonlocal done
        for layer in mapper(partial(study_layer, source, plan), titles, range(opened.count)):
            yield layer
            done += 1
            if progress:
                progress(done, passes * opened.count)

    layers, found = list(all_layers(plan)), None
    if target is not None:
        elements = sum(layer.elements for layer in layers)
        candidates, judge = plan.value.candidates, plan.value.judge
        costs = [layer.costs for layer in layers if layer.costs is not None]
        found = mixes.find_mix(costs, candidates, target, elements, opened.places[0])
        of_mix = Lazy(partial(make_plan, target=target, mix=found.text), None, None, "uniform", judge)
        if found.text not in layers[0].bits:
            layers = [each.joined(other) for each, other in zip(layers, all_layers(of_mix), strict=True)]
        elif progress:
            progress(passes * opened.count, passes * opened.count)
    rows = [row for layer in layers for row in layer.rows]
    summary = with_order([summary_of(name, rows, layers) for name in layers[0].bits])
    outliers = [row for layer in layers for row in layer.outliers]
    channels = [{"layer": layer.name, "means": layer.channels} for layer in layers]
    named, notes, last = [layer.name for layer in layers], opened.notes, layers[-1]
    if opened.format:
        notes = (f"the source is quantized ({opened.format}): only errors beyond its own are counted", *notes)
    if plan.value.policies:
        notes = (*evicting.notes_of(opened.layer(0), plan.value), *notes)
    notes = (*notes, *notes_on_belief(opened.layer(0), plan.value))
    chosen = None if found is None else chosen_mix(found, plan.value, opened, layers, summary)
    return Study(
        opened.name, named, last.heads, last.tokens, summary,
        rows=rows, outliers=outliers, channels=channels, notes=notes, mix=chosen,
    )  # fmt: skip


def chosen_mix(
    found: mixes.FoundMix, plan: StudyPlan, opened: CacheReader, layers: Sequence[StudiedLayer],
    summary: Sequence[Summary],
) -> ChosenMix:  # fmt: skip
    """Compare a mix with what the search assumed of it, and with the best of its formats alone."""
    bits = {one.scheme: one.bits for one in summary}

    def measured(name: str) -> float:
        return float(np.sqrt(np.mean([(layer.outputs[name] or 0.0) ** 2 for layer in layers])))

    target, costs = plan.target or Target(), [layer.costs for layer in layers if layer.costs is not None]
    errors = np.sqrt(np.mean([own.errors.diagonal() for own in costs], 0))
    alone = dict(zip(plan.candidates, errors.tolist(), strict=True))  # of each format in all layers
    if target.error is None:
        order = [(own, name) for name, own in alone.items() if bits[name] <= (target.bits or 0)]
    else:
        order = [(bits[name], name) for name, own in alone.items() if own <= target.error]
    best = min(order)[1] if order else None
    count = sum(len(query) for query in (opened.layer(0).queries or ())[:1])
    held_back = evicting.count_judging(count, plan.judge)
    numbers, num_layers = opened.places
    return ChosenMix(
        text=found.text,
        layers=tuple((number, *pair) for number, pair in zip(numbers, found.formats, strict=True)),
        num_layers=num_layers,
        bits=bits[found.text],
        resolution=found.resolution,
        error_assumed=found.error_assumed,
        error_measured=measured(found.text),
        queries=min(count - held_back, mixes.CHOOSING),
        held_back=min(held_back, measures.JUDGING),
        target=str(target),
        uniform=None if best is None else (best, bits[best], measured(best)),
        above_target=target.error is not None and measured(found.text) > target.error,
    )


@dataclass(frozen=True)
class StudiedLayer:
    """Holds the results of one layer."""

    name: str
    heads: int
    tokens: int
    elements: int
    outliers: list[TableRow]
    channels: np.ndarray  # mean magnitudes of keys [heads, dim]
    rows: list[TableRow]
    bits: dict[str, float]  # {scheme: stored bits}
    sums: dict[str, np.ndarray]  # {scheme: [side, (sum of squared errors, sum of squares)]}
    entropy: dict[
        str, Any
    ]  # {scheme: bits of a lossless coder, of order 0 and by channel; None for policies}
    outputs: dict[str, float | None]  # {scheme: relative error of attention's outputs over all heads}
    costs: mixes.PairCosts | None  # of the candidates for a mix

    def joined(self, other: StudiedLayer) -> StudiedLayer:
        """Return the results of both, which have studied other schemes of the same layer."""
        names = "bits", "sums", "entropy", "outputs"
        dicts = {name: getattr(self, name) | getattr(other, name) for name in names}
        return replace(self, rows=self.rows + other.rows, **dicts)


def study_layer(source: Lazy, plan: Lazy, title: str, i: int) -> StudiedLayer:
    """Study a layer under all schemes and policies, each in a thread."""
    layer, name = source.value.layer(i), source.value.name
    chosen = plan.value.fitting(layer.queries, layer.no_queries).at_layer(i, *source.value.places)
    for side in (layer.key, layer.value):
        if 0 in (side.tokens, side.heads, side.dim):
            got = f"{side.tokens} tokens of {side.heads} heads of {side.dim} elements in {layer.name}"
            raise argument_error("source", "a cache that holds tokens", got)
    if layer.value_dim and (chosen.policies or chosen.target):
        name, what = ("evict", "policies") if chosen.policies else ("bits", f"a mix for {chosen.target}")
        raise argument_error(name, f"no {what}, for latent rows", what)
    rows: list[TableRow] = []
    outliers: list[TableRow] = []
    found: dict[str, evicting.Measured] = {}
    with ThreadPoolExecutor(min(len(chosen.names) + 1, os.cpu_count() or 1)) as threads:
        where = [f"{name}, {layer.name}, {side}" for side in layer.sides]
        outliers_and_means = list(threads.map(measures.outliers, where, layer.sides.values()))
        for sequence, query in enumerate(layer.queries or ()):
            measures.check_finite(f"{name}, {layer.name}, queries of sequence {sequence}", query)
        judge = evicting.count_judging(len(layer.queries[0]), chosen.judge) if layer.queries else None
        of_schemes = {
            each: threads.submit(
                study_scheme,
                layer,
                each,
                *pair,
                judge=judge if chosen.holds_back else None,
                evicts=bool(chosen.policies),
            )
            for each, *pair in chosen.schemes
        }
        needs_contexts = chosen.policies or chosen.candidates
        contexts = list(evicting.contexts_of(layer, chosen.judge)) if needs_contexts else []
        mixable = [(key, value) for each, key, value in chosen.schemes if each in chosen.candidates]
        of_pairs = [
            threads.submit(mixes.output_errors, layer, context, mixable, head)
            for context in contexts
            for head in range(layer.key.heads * bool(mixable))
        ]
        place = i, source.value.count
        if chosen.policies:
            found = evicting.study_policies(layer, contexts, chosen, place, threads)
        for side, (ratios, _) in zip(layer.sides, outliers_and_means, strict=True):
            for h, ratio in enumerate(ratios):
                outliers.append({"layer": layer.name, "head": h, "side": side, "ratio": float(ratio)})
        found |= {each: job.result() for each, job in of_schemes.items()}
        pairs = [job.result() for job in of_pairs]
    for each in chosen.names:
        rows += [{"scheme": each, "layer": layer.name, **row} for row in found[each].rows]
    heads, tokens, (_, channels) = layer.key.heads, layer.key.tokens, outliers_and_means[0]
    elements = tokens * heads * sum(side.dim for side in layer.sides.values())
    return StudiedLayer(
        layer.name, heads, tokens, elements, outliers=outliers, channels=channels, rows=rows,
        bits={each: found[each].bits for each in chosen.names},
        sums={each: found[each].sums for each in chosen.names},
        entropy={each: found[each].entropy for each in chosen.names},
        outputs={each: found[each].output_error for each in chosen.names},
        costs=mixes.costs_of([found[each].side_bits for each in chosen.candidates], pairs),
    )  # fmt: skip


def study_scheme(
    layer: LayerReader, name: str, *schemes: Any, judge: int | None = None, evicts: bool = False
) -> evicting.Measured:
    """Measure one scheme over a layer, with the last `judge` queries.

    In a study with policies, rows say that all tokens are kept.
    """
    found: list[TableRow] = []
    kept = {"weight_kept": 1.0, "tokens_kept": layer.key.tokens} if evicts else {}
    stored, sums, output_error, entropy = [], [], None, np.zeros(2)
    try:
        errors = [measures.SideErrors(data.heads, data.tokens) for data in layer.sides.values()]
        by_head = measures.code_sides(layer, schemes, errors, judge or measures.JUDGING)
        for (side, data), own in zip(layer.sides.items(), errors, strict=True):
            found += [{"head": h, "side": side, **row} for h, row in enumerate(own.by_head())]
            stored.append(own.bits)
            entropy += own.counts.bits(data.tokens) if own.counts else 0
            sums.append((own.errors.sum(), own.squares.sum()))
        sums *= 2 if layer.value_dim else 1  # a latent row has the scheme of keys
        if by_head is not None:
            output_error = by_head.output_error
            rows = by_head.by_head()
            found += [{"head": h, "side": "attention", **row, **kept} for h, row in enumerate(rows)]
    except KvkitError as error:
        raise KvkitError(f"{name}, {layer.name}: {error}") from error
    except Exception as error:
        cause = f"{type(error).__name__} ({error})"
        raise argument_error(f"scheme {name}", f"to code {layer.name}", cause) from error
    return evicting.Measured(found, sum(stored), np.array(sums), tuple(stored), output_error, entropy)


def summary_of(name: str, rows: list[TableRow], layers: list[StudiedLayer]) -> Summary:
    """Summarize one scheme over the rows of all layers, heads and sides."""
    own = [row for row in rows if row["scheme"] == name]
    sides = [row for row in own if row["side"] != "attention"]
    attention = [row for row in own if row["side"] == "attention"]
    bits = sum(layer.bits[name] for layer in layers)
    total = sum(layer.sums[name] for layer in layers)

    def mean(of: str, among: list[TableRow]) -> float | None:
        numbers = [row[of] for row in among if row.get(of) is not None]
        return float(np.mean(numbers)) if numbers else None

    errors = [float(np.sqrt(wrong / squares)) if squares else 0.0 for wrong, squares in np.asarray(total)]
    means: dict[str, Any] = {of: mean(of, sides) for of in ("cosine", "at_end", "zero")}
    means |= {of: mean(of, attention) for of in ("kl", "top_changed", "output_error", "logit_error")}
    means |= {"tokens_kept": mean("tokens_kept", own), "weight_kept": mean("weight_kept", own)}
    means["worst_output"] = max((row["output_error"] for row in attention), default=None)
    judged, measure = (attention, "output_error") if attention else (sides, "relative_rms")
    means["quartiles"] = np.percentile([row[measure] for row in judged], (25, 50, 75)).tolist()
    if halves := [row["halves"] for row in judged if "halves" in row]:
        means["halves"] = np.mean(halves, 0).tolist()
    if all(layer.entropy[name] is not None for layer in layers):
        numbers = sum(layer.entropy[name] for layer in layers) / sum(layer.elements for layer in layers)
        means["entropy"], means["channel_entropy"] = numbers.tolist()
    return Summary(
        name, bits / sum(layer.elements for layer in layers), bits / 8 / layers[-1].tokens,
        key_error=errors[0], value_error=errors[1], worst_error=max(row["relative_rms"] for row in sides),
        largest_error=max(row["largest_error"] for row in sides), **means,
    )  # fmt: skip


def with_order(summary: list[Summary]) -> list[Summary]:
    """Return summaries with the share of schemes, or policies, that have the same order in both halves."""
    found = []
    for one in summary:
        others = [each.halves for each in summary if each is not one and each.evicts == one.evicts]
        if one.halves is None or None in others or not others:
            found.append(one)
            continue
        (first, second), pairs = one.halves, [each for each in others if each]
        alike = [np.sign(first - a) == np.sign(second - b) for a, b in pairs]
        found.append(replace(one, order_holds=float(np.mean(alike))))
    return found


def notes_on_belief(layer: LayerReader, plan: StudyPlan) -> tuple[str, ...]:
    """Return notes on short contexts, and on how bits of schemes without `stored` are counted."""
    notes, shortest = [], min(np.diff(layer.starts))
    if shortest < evicting.SHORT and not plan.policies:  # policies have a note on lengths
        notes.append(f"contexts have {shortest:,} tokens or more: short contexts rank schemes badly")
    own = [
        name for name, *sides in plan.schemes
        if not all(hasattr(scheme, "stored") or isinstance(scheme, Cast) for scheme in sides)
    ]  # fmt: skip
    if own:  # their bits are not known without their arrays
        notes.append(
            f"bits of {', '.join(own)}: those of the arrays that encode returns, so codes of 4 bits count as "
            "8 unless two share a byte (low | high << 4)"
        )
    return tuple(notes)
