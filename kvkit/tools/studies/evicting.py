"""Measure what attention loses when a scorer evicts tokens.

The last queries of a context are the *judging* queries: they measure the error, and scorers do not see them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from kvkit.errors import KvkitError, argument_error, brief
from kvkit.eviction import SCORERS, budgets, scores, select
from kvkit.eviction.inputs import scores_array
from kvkit.eviction.selection import Kept, kept_count
from kvkit.rope import Rope
from kvkit.tools.readers import LayerReader, SideReader
from kvkit.tools.studies.measures import ONE_THREAD, QUERIES, AttentionSums, SideErrors, code_parts, product
from kvkit.tools.studies.policies import ORACLE, RANDOM, SEEDS, UNCODED, Policy, StudyPlan
from kvkit.typed import Array

SIDES = "keys", "values"
SHORT = 512  # tokens; a note warns of shorter contexts
NOT_EVICTED = {"relative_rms": 0.0, "largest_error": 0.0, "cosine": 1.0, "at_end": None, "zero": None}
UNROTATED = "expected", "triattention"  # scorers that read queries before rotation
Place = tuple[int, int]  # (number of a layer, number of layers)
Measured = tuple[list[dict[str, Any]], float, Array]  # (rows by head, bits, sums of squares [side, 2])
Group = tuple[slice, Array]  # (key heads, rows that each of them keeps [heads, count])


class JudgedContext(NamedTuple):
    """Holds a sequence of a layer, and the exact attention of its R judging queries for each key head."""

    keys: Array  # float32 [H, n, D]
    values: Array  # float32 [H, n, Dv]
    choosable: int  # how many first tokens may be evicted: those before the first judging query
    selecting: Array | None  # the queries before the judging ones, for scorers [1, Hq, W, D]
    queries: Any = None  # judging queries, divided by sqrt(D) [H, R, D]
    last: Any = None  # the last token that each query sees [R]
    weights: Any = None  # [H, n, R]
    log_sums: Any = None  # [H, R]
    top: Any = None  # the token of the largest weight [H, R]
    output: Any = None  # [H, R, Dv]
    no_queries: str = "none"  # what the source has instead of queries, for errors


def judging(count: int, judge: int | None) -> int:
    """Return the number of judging queries: `judge`, or a quarter of all (at least one)."""
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
            yield JudgedContext(keys, values, end - begin, None, no_queries=layer.no_queries)
            continue
        queries = np.asarray(layer.queries[s], np.float32)
        count = judging(len(queries), judge)
        if count >= end - begin:
            raise argument_error("judge", f"fewer than the {end - begin} tokens of a context", count)
        selecting = queries[:-count].swapaxes(0, 1)[None] if count < len(queries) else None
        context = JudgedContext(keys, values, end - begin - count, selecting)
        yield attended(context, queries[-min(count, QUERIES) :])


def attended(context: JudgedContext, query: Array) -> JudgedContext:
    """Compute the exact attention of the judging queries [count, Hq, D]; return the context with it."""
    heads, tokens, dim = context.keys.shape
    count = len(query)
    rows = query.reshape(count, heads, -1, dim).transpose(1, 2, 0, 3).reshape(heads, -1, dim)
    rows = rows / np.float32(np.sqrt(dim))
    last = np.tile(np.arange(tokens - count, tokens), rows.shape[1] // count)
    weights = product(context.keys, rows.swapaxes(1, 2))
    log_sums, _ = soften(weights, np.arange(tokens), last)
    return context._replace(
        queries=rows, last=last, weights=weights, log_sums=log_sums, top=weights.argmax(1),
        output=weighted(weights, context.values),
    )  # fmt: skip


def soften(logits: Array, tokens: Array, last: Array) -> tuple[Array, Array]:
    """Replace logits [H, tokens, R] by weights, in place; return (log sums, largest logits), [H, R]."""
    first = int(np.searchsorted(tokens, last.min(initial=0) + 1))
    logits[:, first:][:, tokens[first:, None] > last] = -np.inf
    most = logits.max(1, keepdims=True)
    np.exp(np.subtract(logits, most, out=logits), out=logits)
    sums = logits.sum(1, dtype=np.float64)
    logits /= sums[:, None].astype(np.float32)
    return most[:, 0] + np.log(sums), most[:, 0]


def weighted(weights: Array, values: Array) -> Array:
    """Return the sums of values [H, m, Dv] with weights [H, m, R], float32 [H, R, Dv]."""
    heads, tokens, rows = weights.shape
    result = np.zeros((heads, rows, values.shape[2]), np.float32)
    size = max(ONE_THREAD // (rows * values.shape[2]), 64)
    for begin in range(0, tokens, size):
        part = slice(begin, begin + size)
        result += product(weights[:, part].swapaxes(1, 2), values[:, part])
    return result


def study_policies(
    layer: LayerReader,
    contexts: Sequence[JudgedContext],
    policies: Sequence[Policy],
    plan: StudyPlan,
    place: Place,
) -> dict[str, Measured]:
    """Measure policies with equal scores; return {name: (rows by head, bits, sums of squares)}."""
    results: dict[str, list[Measured]] = {policy.name: [] for policy in policies}
    policy = policies[0]
    try:
        for policy, groups in kept_rows(contexts, policies, plan, place):
            results[policy.name].append(measured(layer, contexts, groups, policy))
    except KvkitError as error:
        raise KvkitError(f"{policy.name}, {layer.name}: {error}") from error
    except Exception as error:  # a user's scheme may raise anything
        cause = f"{type(error).__name__} ({error})"
        raise argument_error(f"scheme {policy.name}", f"to code {layer.name}", cause) from error
    return {name: mean_of(each) for name, each in results.items()}


def kept_rows(
    contexts: Sequence[JudgedContext], policies: Sequence[Policy], plan: StudyPlan, place: Place
) -> Iterator[tuple[Policy, list[list[Group]]]]:
    """Yield (policy, kept rows of each context) for policies of equal scores; `random` once per seed."""
    first = policies[0]
    seeds: Any = SEEDS if first.scorer == RANDOM and not first.options else (None,)
    for seed in seeds:
        seeded = first if seed is None else replace(first, options={"seed": seed})
        scored = [scores_of(seeded, context, plan, place) for context in contexts]
        for policy in policies:
            pairs = zip(contexts, scored, strict=True)
            yield policy, [kept_groups(policy, *each, plan, place) for each in pairs]


def kept_groups(
    policy: Policy, context: JudgedContext, scored: Array, plan: StudyPlan, place: Place
) -> list[Group]:
    """Return the rows that heads keep, in one group if all heads keep the same number, or a group a head."""
    heads, tokens, _ = context.keys.shape
    count = count_of(policy, context, plan, place)
    kept = select(scored, count=count, budget="ada" if plan.budget == "ada" else "uniform")
    later = np.arange(context.choosable, tokens)
    if isinstance(kept, Kept):
        parts = np.split(kept.rows, kept.starts[1:-1])
        return [(slice(h, h + 1), np.append(rows, later)[None]) for h, rows in enumerate(parts)]
    return [(slice(0, heads), np.concatenate((kept[0], np.tile(later, (heads, 1))), 1))]


def count_of(policy: Policy, context: JudgedContext, plan: StudyPlan, place: Place) -> int:
    """Return how many of the tokens that may be evicted a layer keeps."""
    number, layers = place
    if plan.budget != "pyramid":
        return kept_count(context.choosable, policy.keep, None)
    counts = budgets("pyramid", layers=layers, tokens=context.choosable, keep=policy.keep)
    return min(int(counts[number]), context.choosable)


def scores_of(policy: Policy, context: JudgedContext, plan: StudyPlan, place: Place) -> Array:
    """Return the scores [1, H, choosable] of a policy; only the oracle sees judging queries."""
    end, count = context.choosable, count_of(policy, context, plan, place)
    keys, values = (side[None, :, :end] for side in (context.keys, context.values))
    if policy.scorer == ORACLE:
        return np.asarray(context.weights[None, :, :end].sum(-1))
    if callable(policy.scorer):
        return scores_by(policy.scorer, place[0], keys, values, context.selecting)
    known = {"budget": count, "keep": count / end, "blend": 1 - count / end, "now": end,
             "positions": np.arange(end), "rope": plan.rope}  # fmt: skip
    options, queries = options_for(policy, context, known), context.selecting
    if policy.scorer in UNROTATED and isinstance(plan.rope, Rope) and queries is not None:
        begin = end - queries.shape[2]
        queries = plan.rope.shift(queries, -np.arange(begin, end)) / np.float32(plan.rope.attention_factor)
    return scores(policy.scorer, keys, values, queries=queries, **options)


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
    needs = any("queries" in need for need in found.needs)
    if needs and queries is None:
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
    return None if window.default is window.empty or window.default <= queries.shape[2] else queries.shape[2]


def measured(
    layer: LayerReader, contexts: Sequence[JudgedContext], groups: Sequence[Sequence[Group]], policy: Policy
) -> Measured:
    """Measure the kept tokens, encoded as new prompts; return (rows by head, bits, sums of squares)."""
    rows: list[dict[str, Any]] = []
    bits, sums = 0, np.zeros((2, 2))
    coded, readers = policy.schemes is not UNCODED, (layer.key, layer.value)
    for g, (heads, _) in enumerate(groups[0]):
        errors = [SideErrors(heads.stop - heads.start) for _ in SIDES]
        attention, kept = AttentionSums(), 0
        for context, own in zip(contexts, groups, strict=True):
            at = own[g][1]
            kept += at.shape[1]
            if coded:
                sides = [take_rows(side[heads], at) for side in (context.keys, context.values)]
                back = [code(*each) for each in zip(policy.schemes, sides, readers, errors, strict=True)]
            else:
                bits += at.size * sum(side.dim * side.bits for side in readers)
            if context.queries is not None:
                pair = (sides[0], back[0], back[1]) if coded else None
                attention.add(compare_kept(context, heads, at, pair))
        bits += sum(each.bits for each in errors)
        sums += [(each.errors.sum(), each.squares.sum()) for each in errors]
        found = [each.by_head() if coded else (NOT_EVICTED for _ in each.squares) for each in errors]
        found += [attention.by_head()] * bool(attention.count)
        for side, of_heads in zip((*SIDES, "attention"), found, strict=False):
            for h, row in enumerate(of_heads, heads.start):
                rows.append({"head": h, "side": side, **row, "tokens_kept": kept})
    return rows, bits, sums


def take_rows(states: Array, at: Array) -> Array:
    """Return the rows `at` [H, m] of each head of states [H, n, D]."""
    result = np.empty((*at.shape, states.shape[2]), states.dtype)
    for h, rows in enumerate(at):
        np.take(states[h], rows, axis=0, out=result[h], mode="clip")  # "clip" skips the check of indices
    return result


def code(scheme: Any, x: Array, side: SideReader, errors: SideErrors) -> Array:
    """Encode rows [H, m, D] as a new prompt and return them decoded."""
    tokens = x.swapaxes(0, 1)
    if not len(tokens):
        return x
    reader = SideReader(tokens.__getitem__, len(tokens), tokens.shape[1], tokens.shape[2], side.bits)
    parts = list(code_parts(scheme, reader, errors))
    return np.ascontiguousarray(np.concatenate(parts).swapaxes(0, 1))


def compare_kept(
    context: JudgedContext, heads: slice, at: Array, coded: tuple[Array, Array, Array] | None
) -> dict[str, Array]:
    """Return {measure: [heads, queries]} of the loss of attention if only the rows `at` are kept.

    `coded` is (keys, decoded keys, decoded values) of these rows, or None without a scheme.
    """
    found = []
    for h, rows in enumerate(at):  # one head at a time fits into the processor's caches
        own = None if coded is None else (coded[0][h : h + 1], coded[1][h : h + 1], coded[2][h : h + 1])
        found.append(compare_head(context, slice(heads.start + h, heads.start + h + 1), rows, own))
    return {name: np.concatenate([each[name] for each in found]) for name in found[0]}


def compare_head(
    context: JudgedContext, head: slice, at: Array, coded: tuple[Array, Array, Array] | None
) -> dict[str, Array]:
    """Return the measures of `compare_kept` for one head.

    The divergence has two terms: -log(kept weight) for the eviction, and the divergence of decoded from exact
    weights among the kept rows.
    """
    exact, last, top = context.output[head], context.last, context.top[head]
    weights = take_rows(context.weights[head], at[None])  # [1, m, R]
    kept = weights.sum(1, dtype=np.float64)  # [1, R]
    lost = -np.log(np.maximum(kept, np.finfo(np.float64).tiny))
    place = np.minimum(np.searchsorted(at, top), len(at) - 1)  # where the top key is among the kept rows
    changed = at[place] != top
    if coded is None:
        output = weighted(weights, take_rows(context.values[head], at[None])) / kept[..., None]
        logit, divergence = np.zeros_like(kept), lost
    else:
        rows = context.queries[head].swapaxes(1, 2)
        keys, coded_keys, coded_values = coded
        logits, others = product(keys, rows), product(coded_keys, rows)
        count = int((context.keys.shape[1] - last).max())
        own = np.full(len(at), -1)
        own[-count:] = at[-count:]  # all heads keep the last tokens; all queries see earlier ones
        hidden = own[-count:, None] > last
        changes = np.subtract(others, logits, out=logits)
        changes[:, -count:][:, hidden] = 0
        added = -np.einsum("hmr,hmr->hr", weights, changes) / kept - context.log_sums[head] + lost
        logit = np.abs(changes, out=changes).sum(1) / (len(at) - hidden.sum(0))
        at_top = np.take_along_axis(others, place[:, None], 1)[:, 0]
        log_sums, most = soften(others, own, last)
        divergence = lost + np.maximum(added + log_sums, 0)
        output = weighted(others, coded_values)
        changed |= at_top < most
    return {
        "logit": logit, "kl": divergence, "output": ((output - exact) ** 2).sum(-1),
        "norm": (exact**2).sum(-1), "top_changed": changed, "weight": kept,
    }  # fmt: skip


def notes_of(layer: LayerReader, plan: StudyPlan) -> tuple[str, ...]:
    """Return notes on the lengths of contexts, and on the queries that scorers see."""
    lengths = sorted({end - begin for begin, end in zip(layer.starts, layer.starts[1:], strict=False)})
    words = f"{lengths[0]:,}" if len(lengths) == 1 else f"{lengths[0]:,} to {lengths[-1]:,}"
    warning = ": short contexts rank policies badly" * (lengths[0] < SHORT)
    notes = [f"contexts have {words} tokens{warning}"]
    if layer.queries is None:
        return ("without queries the cost of eviction is unknown, and there is no oracle", *notes)
    rows = len(layer.queries[0])
    count = judging(rows, plan.judge)
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
    if isinstance(first, (list, tuple)):
        return type(first)(mean_of(each) for each in zip(*results, strict=True))
    if not isinstance(first, np.ndarray) and all(each == first for each in results):
        return first
    return sum(results) / len(results)
