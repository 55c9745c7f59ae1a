"""Measure what attention loses when a scorer evicts tokens.

The last queries of a context are the *judging* queries: they measure the error, and scorers do not see them::

    tokens     may be evicted (`choosable`) .................... | stay
    queries    none in the source | `selecting`, for scorers ... | judging
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvkit.errors import KvkitError, argument_error, brief
from kvkit.eviction import SCORERS, budgets, select
from kvkit.eviction.inputs import Inputs, checked_inputs, scores_array
from kvkit.eviction.selection import Kept, kept_count
from kvkit.rope import Rope
from kvkit.tools.readers import LayerReader
from kvkit.tools.studies.kept_tokens import ExactAttention, attend_exactly, code_tokens, compare_kept
from kvkit.tools.studies.measures import JUDGING, AttentionSums, SideErrors, TokenErrors
from kvkit.tools.studies.policies import ORACLE, RANDOM, SEEDS, UNCODED, Policy, StudyPlan, scheme_of
from kvkit.typed import Array

SIDES = "keys", "values"
SHORT = 512  # tokens; a note warns of shorter contexts
# The measures of `SideErrors.by_head` for kept tokens that no scheme codes.
UNCHANGED = {"relative_rms": 0.0, "largest_error": 0.0, "cosine": 1.0, "at_end": None, "zero": None}
UNROTATED = "expected", "triattention"  # scorers that read queries before rotation
HeadPlace = tuple[int, int]  # (number of a layer, number of layers)


class Measured(NamedTuple):
    """Holds what a scheme or a policy costs in one layer."""

    rows: list[dict[str, Any]]  # measures of each head and side
    bits: float  # stored
    sums: Array  # [sides, (squared errors, squares)]
    side_bits: tuple[int, ...] = ()  # of a scheme
    output_error: float | None = None  # the relative error of the outputs of all heads
    entropy: Any = None  # bits of a lossless coder with codes of order 0, and by channel, of a scheme


class KeptRows(NamedTuple):
    """Holds the rows that some key heads keep."""

    heads: slice
    rows: Array  # ascending [heads, count]


Entry = tuple[Policy, list[list[KeptRows]]]  # a policy, and the groups of rows that it keeps of each context


class JudgedContext(NamedTuple):
    """Holds a sequence of a layer, and the attention of its judging queries."""

    keys: Array  # float32 [H, n, D]
    values: Array  # float32 [H, n, Dv]
    choosable: int  # how many first tokens may be evicted: those before the first judging query
    selecting: Array | None = None  # the queries before the judging ones, for scorers [1, Hq, W, D]
    exact: ExactAttention | None = None  # None without queries
    no_queries: str = "none"  # what the source has instead of queries, for errors
    inputs: Inputs | None = None  # of scorers, after their checks


def count_judging(count: int, judge: int | None) -> int:
    """Count the judging queries: `judge`, or a quarter of all (at least one)."""
    if judge is not None and judge > count:
        raise argument_error("judge", f"at most {count}, the queries of the source", judge)
    return max(1, count // 4) if judge is None else judge


def contexts_of(layer: LayerReader, judge: int | None) -> Iterator[JudgedContext]:
    """Yield the sequences of a layer."""
    for s, (begin, end) in enumerate(zip(layer.starts, layer.starts[1:], strict=False)):
        keys, values = (
            np.ascontiguousarray(side.read(slice(begin, end)).swapaxes(0, 1), np.float32)
            for side in (layer.key, layer.value)
        )
        if layer.queries is None:
            yield JudgedContext(keys, values, end - begin, no_queries=layer.no_queries)
            continue
        queries = np.asarray(layer.queries[s], np.float32)
        if layer.scale is not None:  # scorers divide scores by sqrt(D)
            queries = queries * np.float32(layer.scale * np.sqrt(layer.key.dim))
        count = count_judging(len(queries), judge)
        if count >= end - begin:
            raise argument_error("judge", f"fewer than the {end - begin} tokens of a context", count)
        selecting = queries[:-count].swapaxes(0, 1)[None] if count < len(queries) else None
        exact = attend_exactly(keys, values, queries[-min(count, JUDGING) :])
        yield JudgedContext(keys, values, end - begin - count, selecting, exact)


def study_policies(
    layer: LayerReader, contexts: Sequence[JudgedContext], plan: StudyPlan, place: HeadPlace,
    threads: Executor,
) -> dict[str, Measured]:  # fmt: skip
    """Measure all policies; return {name: result}.

    Policies with one scheme are measured together, for each head: a scheme that encodes tokens by themselves
    encodes all tokens once, whichever a policy keeps.
    """

    def selected(policies: Sequence[Policy]) -> list[Entry]:
        with errors_of(policies[0].name, layer.name):
            return list(kept_rows(contexts, policies, plan, place))

    named = [each.name for each in plan.policies if each.scorer in SCORERS]
    if named:
        with errors_of(named[0], layer.name):
            contexts = [each._replace(inputs=inputs_of(each)) for each in contexts]
    by_scheme: dict[str, list[Entry]] = {}
    for entry in itertools.chain(*threads.map(selected, plan.groups())):
        by_scheme.setdefault(scheme_of(entry[0]), []).append(entry)
    jobs: list[Any] = []
    for entries in by_scheme.values():
        if by_token(entries[0][0]):
            jobs += [(entries, h) for h in range(layer.key.heads)]
        else:
            jobs += [([entry], None) for entry in entries]
    found: dict[int, list[Measured]] = {}  # the measured parts of each entry
    for (entries, _), parts in zip(
        jobs, threads.map(partial(measure_job, layer, contexts), jobs), strict=True
    ):
        for entry, part in zip(entries, parts, strict=True):
            found.setdefault(id(entry), []).append(part)
    results: dict[str, list[Measured]] = {}
    for entry in itertools.chain(*by_scheme.values()):
        results.setdefault(entry[0].name, []).append(joined(found[id(entry)]))
    return {name: mean_of(each) for name, each in results.items()}


def by_token(policy: Policy) -> bool:
    """Return whether a policy's schemes encode each token by itself, or change nothing."""
    return policy.schemes is UNCODED or all(getattr(each, "by_token", False) for each in policy.schemes)


@contextmanager
def errors_of(name: str, layer: str) -> Iterator[None]:
    """Name the policy and the layer in errors; a user's scheme may raise anything."""
    try:
        yield
    except KvkitError as error:
        raise KvkitError(f"{name}, {layer}: {error}") from error
    except Exception as error:
        cause = f"{type(error).__name__} ({error})"
        raise argument_error(f"scheme {name}", f"to code {layer}", cause) from error


def kept_rows(
    contexts: Sequence[JudgedContext], policies: Sequence[Policy], plan: StudyPlan, place: HeadPlace
) -> Iterator[tuple[Policy, list[list[KeptRows]]]]:
    """Yield (policy, kept rows of each context) for policies of equal scores; `random` once per seed.

    The rows of a context are those of all heads together if all keep as many, or of each head.
    """
    first = policies[0]
    seeds: Any = SEEDS if first.scorer == RANDOM and not first.options else (None,)
    for seed in seeds:
        seeded = first if seed is None else replace(first, options={"seed": seed})
        scored = [scores_of(seeded, context, plan, place) for context in contexts]
        for policy in policies:
            groups: list[list[KeptRows]] = []
            for context, scores in zip(contexts, scored, strict=True):
                heads, tokens, _ = context.keys.shape
                count, later = count_of(policy, context, plan, place), np.arange(context.choosable, tokens)
                kept = select(scores, count=count, budget="ada" if plan.budget == "ada" else "uniform")
                if isinstance(kept, Kept):
                    parts = enumerate(np.split(kept.rows, kept.starts[1:-1]))
                    own = [KeptRows(slice(h, h + 1), np.append(rows, later)[None]) for h, rows in parts]
                else:
                    rows = np.concatenate((kept[0], np.tile(later, (heads, 1))), 1)
                    own = [KeptRows(slice(0, heads), rows)]
                groups.append(own)
            yield policy, groups


def count_of(policy: Policy, context: JudgedContext, plan: StudyPlan, place: HeadPlace) -> int:
    """Return how many of the tokens that may be evicted a layer keeps."""
    number, layers = place
    if plan.budget != "pyramid":
        return kept_count(context.choosable, policy.keep, None)
    counts = budgets("pyramid", layers=layers, tokens=context.choosable, keep=policy.keep)
    return min(int(counts[number]), context.choosable)


def scores_of(policy: Policy, context: JudgedContext, plan: StudyPlan, place: HeadPlace) -> Array:
    """Return the scores [1, H, choosable] of a policy; only the oracle sees judging queries."""
    end, count = context.choosable, count_of(policy, context, plan, place)
    keys, values = (side[None, :, :end] for side in (context.keys, context.values))
    if policy.scorer == ORACLE and context.exact is not None:
        return np.asarray(context.exact.weights[None, :, :end].sum(-1))
    if callable(policy.scorer):
        return scores_by(policy.scorer, place[0], keys, values, context.selecting)
    known = {"budget": count, "keep": count / end, "blend": 1 - count / end, "now": end,
             "positions": np.arange(end), "rope": plan.rope}  # fmt: skip
    options, queries = options_for(policy, context, known), context.selecting
    if policy.scorer in UNROTATED and isinstance(plan.rope, Rope) and queries is not None:
        begin = end - queries.shape[2]
        queries = plan.rope.shift(queries, -np.arange(begin, end)) / np.float32(plan.rope.attention_factor)
    inputs = (context.inputs or inputs_of(context))._replace(queries=queries)
    return np.ascontiguousarray(SCORERS[policy.scorer].score(inputs, **options), np.float32)


def inputs_of(context: JudgedContext) -> Inputs:
    """Check what scorers may read of a context."""
    keys, values = (side[None, :, : context.choosable] for side in (context.keys, context.values))
    return checked_inputs(keys, values, context.selecting)


def scores_by(function: Any, layer: int, keys: Array, values: Array, queries: Array | None) -> Array:
    """Return the scores of a user's function; raise if they have a wrong shape."""
    try:
        found = np.asarray(function(layer, keys, values, queries))
    except Exception as error:
        cause = f"{type(error).__name__} ({brief(error)})"
        raise argument_error("scorer", "a function that returns scores [B, Hkv, S]", cause) from error
    if found.shape != keys.shape[:3]:
        raise argument_error("scores", f"shape {keys.shape[:3]}", found.shape)
    return scores_array("scores", found)


def options_for(policy: Policy, context: JudgedContext, known: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a policy's scorer: `known` values and the user's; raise if one is missing."""
    found, queries = SCORERS[policy.scorer], context.selecting
    if queries is None and any("queries" in need for need in found.needs):
        wanted = f"queries before the judging ones, which {policy.scorer} needs"
        raise argument_error("query", wanted, context.no_queries)
    options = {name: value for name, value in known.items() if name in found.options and value is not None}
    options |= policy.options
    if (short := short_window(policy, queries)) is not None:
        options["window"] = short
    found.check({"values": True, "queries": queries}, options)
    return options


def short_window(policy: Policy, queries: Array | None) -> int | None:
    """Return the number of queries if it is less than a scorer's default window; otherwise None."""
    if queries is None or policy.scorer not in SCORERS or "window" in policy.options:
        return None
    found = SCORERS[policy.scorer]
    window = found.options.get("window")
    if window is None or not any("queries" in need for need in found.needs):
        return None
    count = queries.shape[2]
    return None if window.default is window.empty or window.default <= count else count


def measure_job(layer: LayerReader, contexts: Sequence[JudgedContext], job: Any) -> list[Measured]:
    """Measure (entries of one scheme, a head), or ([one entry], None) over all heads."""
    entries, head = job
    with errors_of(entries[0][0].name, layer.name):
        if head is None:
            return [measure_prompts(layer, contexts, *entries[0])]
        return measure_head(layer, contexts, entries, head)


def measure_head(
    layer: LayerReader, contexts: Sequence[JudgedContext], entries: Sequence[Entry], h: int
) -> list[Measured]:
    """Measure a head for entries with one scheme, which encodes each token by itself, or with none."""
    schemes, readers = entries[0][0].schemes, (layer.key, layer.value)
    coded = schemes is not UNCODED
    errors = [[SideErrors(1) for _ in SIDES] for _ in entries]
    attention = [AttentionSums() for _ in entries]
    counts, bits = np.zeros(len(entries), np.int64), np.zeros(len(entries))
    for number, context in enumerate(contexts):
        sides, decoded = (context.keys[h], context.values[h]), []
        kept = [rows_of_head(groups[number], h) for _, groups in entries]
        bits_of_token = 0.0 if coded else float(sum(side.dim * side.bits for side in readers))
        for side, scheme, reader in zip(range(len(SIDES) * coded), schemes, readers, strict=False):
            of_tokens = TokenErrors()
            decoded.append(code_tokens(scheme, sides[side][None], reader, of_tokens)[0])
            for own, at in zip(errors, kept, strict=True):
                of_tokens.add_to(own[side], at)
            bits_of_token += of_tokens.bits / len(sides[side])
        counts += [len(at) for at in kept]
        bits += [len(at) * bits_of_token for at in kept]
        if context.exact is not None:
            found = compare_kept(context.exact, h, sides, decoded or None, kept)
            for sums, measures in zip(attention, found, strict=True):
                sums.add(measures, context.exact.judging)
    return [
        as_measured(own, each, slice(h, h + 1), int(count), float(stored), coded=coded)
        for own, each, count, stored in zip(errors, attention, counts, bits, strict=True)
    ]


def measure_prompts(
    layer: LayerReader, contexts: Sequence[JudgedContext], policy: Policy, kept: Sequence[Sequence[KeptRows]]
) -> Measured:
    """Measure kept rows that are encoded together, as new prompts; `kept` has the groups of each context."""
    parts = []
    for of_contexts in zip(*kept, strict=True):
        heads = of_contexts[0].heads
        errors = [SideErrors(heads.stop - heads.start) for _ in SIDES]
        attention, count = [AttentionSums() for _ in range(heads.start, heads.stop)], 0
        for context, own in zip(contexts, of_contexts, strict=True):
            count += own.rows.shape[1]
            sides = [
                np.stack([head[rows] for head, rows in zip(side[heads], own.rows, strict=True)])
                for side in (context.keys, context.values)
            ]
            each = zip(policy.schemes, sides, (layer.key, layer.value), errors, strict=True)
            decoded = [code_tokens(*arguments) for arguments in each]
            for i, rows in enumerate(own.rows):
                if context.exact is None:
                    break
                h = heads.start + i
                both, coded = (context.keys[h], context.values[h]), [side[i] for side in decoded]
                [measures] = compare_kept(context.exact, h, both, coded, [rows], rows)
                attention[i].add(measures, context.exact.judging)
        bits = sum(side.bits for side in errors)
        together = AttentionSums.joined(attention)
        parts.append(as_measured(errors, together, heads, count, bits, coded=True))
    return joined(parts)


def as_measured(
    errors: Sequence[SideErrors], attention: AttentionSums, heads: slice, count: int, bits: float, *,
    coded: bool,
) -> Measured:  # fmt: skip
    """Return what was measured of some heads that keep `count` tokens."""
    rows: list[dict[str, Any]] = []
    found: list[Any] = [each.by_head() if coded else (UNCHANGED for _ in each.squares) for each in errors]
    found += [attention.by_head()] * bool(attention.count)
    for side, of_heads in zip((*SIDES, "attention"), found, strict=False):
        for h, row in enumerate(of_heads, heads.start):
            rows.append({"head": h, "side": side, **row, "tokens_kept": count})
    return Measured(rows, bits, np.array([(each.errors.sum(), each.squares.sum()) for each in errors]))


def joined(parts: Sequence[Measured]) -> Measured:
    """Return the results of heads as one."""
    rows, bits, sums, *_ = zip(*parts, strict=True)
    return Measured(list(itertools.chain(*rows)), sum(bits), np.sum(sums, 0))


def rows_of_head(groups: Sequence[KeptRows], h: int) -> Array:
    """Return the rows that a head keeps."""
    group = next(each for each in groups if each.heads.start <= h < each.heads.stop)
    return group.rows[h - group.heads.start]


def notes_of(layer: LayerReader, plan: StudyPlan) -> tuple[str, ...]:
    """Return notes on the lengths of contexts, and on the queries that scorers see."""
    lengths = sorted({end - begin for begin, end in zip(layer.starts, layer.starts[1:], strict=False)})
    words = f"{lengths[0]:,}" if len(lengths) == 1 else f"{lengths[0]:,} to {lengths[-1]:,}"
    warning = ": short contexts rank policies badly" * (lengths[0] < SHORT)
    notes = [f"contexts have {words} tokens{warning}"]
    if layer.queries is None:
        return ("without queries the cost of eviction is unknown, and there is no oracle", *notes)
    rows = len(layer.queries[0])
    count = count_judging(rows, plan.judge)
    seen = "scorers see the others, and tokens of judging queries stay"
    notes.append(f"queries that judge: the last {count} of {rows}; {seen}")
    selecting = np.empty((1, 1, rows - count, 1))
    for policy in {each.scorer: each for each in plan.policies if not callable(each.scorer)}.values():
        if rows > count and (window := short_window(policy, selecting)) is not None:
            notes.append(f"{policy.scorer} has a window of {window}: there are no more queries")
    if any(each.scorer == ORACLE for each in plan.policies):
        notes.append("oracle sees the judging queries: it is no policy, and shows what a policy could reach")
    return tuple(notes)


def mean_of(results: Sequence[Any]) -> Any:
    """Return the mean of nested numbers of equal structure. Members that are equal (texts, None) stay."""
    first = results[0]
    if isinstance(first, dict):
        return {name: mean_of([each[name] for each in results]) for name in first}
    if isinstance(first, Measured):
        return Measured(*map(mean_of, zip(*results, strict=True)))
    if isinstance(first, list):
        return [mean_of(each) for each in zip(*results, strict=True)]
    if not isinstance(first, np.ndarray) and all(each == first for each in results):
        return first
    return sum(results) / len(results)
