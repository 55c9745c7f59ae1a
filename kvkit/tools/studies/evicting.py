"""Measure what attention loses when a scorer evicts tokens.

The last queries of a context are the *judging* queries: they measure the error, and scorers do not see them::

    tokens     may be evicted (`choosable`) .................... | stay
    queries    none in the source | `selecting`, for scorers ... | judging
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
from kvkit.tools.studies.measures import JUDGING, ONE_THREAD, AttentionSums, SideErrors, code_parts, product
from kvkit.tools.studies.policies import ORACLE, RANDOM, SEEDS, UNCODED, Policy, StudyPlan
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


class KeptRows(NamedTuple):
    """Holds the rows that some key heads keep."""

    heads: slice
    rows: Array  # ascending [heads, count]


class CodedRows(NamedTuple):
    """Holds the kept rows of some heads before and after a scheme, [heads, count, dim]."""

    keys: Array
    decoded_keys: Array
    decoded_values: Array


class ExactAttention(NamedTuple):
    """Holds the attention of R judging queries for each of H key heads."""

    queries: Array  # divided by sqrt(D) [H, R, D]
    last: Array  # the last token that each query sees [R]
    weights: Array  # [H, n, R]
    log_sums: Array  # [H, R]
    top: Array  # the token of the largest weight [H, R]
    output: Array  # [H, R, Dv]


class JudgedContext(NamedTuple):
    """Holds a sequence of a layer, and the attention of its judging queries."""

    keys: Array  # float32 [H, n, D]
    values: Array  # float32 [H, n, Dv]
    choosable: int  # how many first tokens may be evicted: those before the first judging query
    selecting: Array | None = None  # the queries before the judging ones, for scorers [1, Hq, W, D]
    exact: ExactAttention | None = None  # None without queries
    no_queries: str = "none"  # what the source has instead of queries, for errors


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


def attend_exactly(keys: Array, values: Array, query: Array) -> ExactAttention:
    """Compute the attention of the judging queries [count, Hq, D] over a sequence."""
    heads, tokens, dim = keys.shape
    count = len(query)
    rows = query.reshape(count, heads, -1, dim).transpose(1, 2, 0, 3).reshape(heads, -1, dim)
    rows = rows / np.float32(np.sqrt(dim))
    last = np.tile(np.arange(tokens - count, tokens), rows.shape[1] // count)
    weights = product(keys, rows.swapaxes(1, 2))
    log_sums, _ = softmax_in_place(weights, np.arange(tokens), last)
    return ExactAttention(rows, last, weights, log_sums, weights.argmax(1), weighted(weights, values))


def softmax_in_place(logits: Array, tokens: Array, last: Array) -> tuple[Array, Array]:
    """Replace logits [H, m, R] of ascending tokens [m] by weights; return (log sums, largest logits), [H, R].

    Tokens after the last one that a query sees have the weight 0.
    """
    first = int(np.searchsorted(tokens, last.min(initial=0) + 1))  # some query does not see this token
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
    layer: LayerReader, contexts: Sequence[JudgedContext], policies: Sequence[Policy], plan: StudyPlan,
    place: HeadPlace,
) -> dict[str, Measured]:  # fmt: skip
    """Measure policies with equal scores; return {name: result}."""
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
    contexts: Sequence[JudgedContext], policies: Sequence[Policy], plan: StudyPlan, place: HeadPlace
) -> Iterator[tuple[Policy, list[list[KeptRows]]]]:
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
    policy: Policy, context: JudgedContext, scored: Array, plan: StudyPlan, place: HeadPlace
) -> list[KeptRows]:
    """Return the rows that heads keep: together if all heads keep as many, or for each head."""
    heads, tokens, _ = context.keys.shape
    count = count_of(policy, context, plan, place)
    kept = select(scored, count=count, budget="ada" if plan.budget == "ada" else "uniform")
    later = np.arange(context.choosable, tokens)
    if isinstance(kept, Kept):
        parts = np.split(kept.rows, kept.starts[1:-1])
        return [KeptRows(slice(h, h + 1), np.append(rows, later)[None]) for h, rows in enumerate(parts)]
    return [KeptRows(slice(0, heads), np.concatenate((kept[0], np.tile(later, (heads, 1))), 1))]


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


def measured(
    layer: LayerReader, contexts: Sequence[JudgedContext], kept: Sequence[Sequence[KeptRows]], policy: Policy
) -> Measured:
    """Measure the kept rows, encoded as new prompts; `kept` has the rows of each context."""
    rows: list[dict[str, Any]] = []
    bits, sums = 0, np.zeros((2, 2))
    coded, readers = policy.schemes is not UNCODED, (layer.key, layer.value)
    for own_of_contexts in zip(*kept, strict=True):
        heads = own_of_contexts[0].heads
        errors = [SideErrors(heads.stop - heads.start) for _ in SIDES]
        attention, tokens_kept = AttentionSums(), 0
        for context, own in zip(contexts, own_of_contexts, strict=True):
            tokens_kept += own.rows.shape[1]
            own_codes = None
            if coded:
                sides = [take_rows(side[heads], own.rows) for side in (context.keys, context.values)]
                decoded = [code(*each) for each in zip(policy.schemes, sides, readers, errors, strict=True)]
                own_codes = CodedRows(sides[0], *decoded)
            else:
                bits += own.rows.size * sum(side.dim * side.bits for side in readers)
            if context.exact is not None:
                attention.add(compare_kept(context.exact, context.values, own, own_codes))
        bits += sum(each.bits for each in errors)
        sums += [(each.errors.sum(), each.squares.sum()) for each in errors]
        found = [each.by_head() if coded else (UNCHANGED for _ in each.squares) for each in errors]
        found += [attention.by_head()] * bool(attention.count)
        for side, of_heads in zip((*SIDES, "attention"), found, strict=False):
            for h, row in enumerate(of_heads, heads.start):
                rows.append({"head": h, "side": side, **row, "tokens_kept": tokens_kept})
    return Measured(rows, bits, sums)


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
    exact: ExactAttention, values: Array, kept: KeptRows, coded: CodedRows | None
) -> dict[str, Array]:
    """Return {measure: [heads, queries]} of what attention loses if only some rows are kept."""
    found = []
    for h, rows in enumerate(kept.rows):  # one head at a time fits into the processor's caches
        head = slice(kept.heads.start + h, kept.heads.start + h + 1)
        own = None if coded is None else CodedRows(*(side[h : h + 1] for side in coded))
        found.append(compare_head(exact, values, head, rows, own))
    return {name: np.concatenate([each[name] for each in found]) for name in found[0]}


def compare_head(
    exact: ExactAttention, values: Array, head: slice, at: Array, coded: CodedRows | None
) -> dict[str, Array]:
    """Return the measures of `compare_kept` for one head, which keeps the rows `at`, ascending [m].

    With exact scores S and weights P, and S' and P' from decoded keys of the kept rows, the divergence is

        kept = sum of P over kept rows            L, L' = log-sum-exp of S, S' over kept rows
        kl   = -log(kept) + KL(P / kept, P')      KL(P / kept, P') = -(sum of P / kept (S' - S)) - L + L'

    Without a scheme P' is P / kept, and only the first term remains.
    """
    output, last, top = exact.output[head], exact.last, exact.top[head]
    weights = take_rows(exact.weights[head], at[None])  # P [1, m, R]
    kept = weights.sum(1, dtype=np.float64)  # [1, R]
    lost = -np.log(np.maximum(kept, np.finfo(np.float64).tiny))
    place = np.minimum(np.searchsorted(at, top), len(at) - 1)  # where the top key is among the kept rows
    changed = at[place] != top
    if coded is None:
        found = weighted(weights, take_rows(values[head], at[None])) / kept[..., None]
        logit, divergence = np.zeros_like(kept), lost
    else:
        rows = exact.queries[head].swapaxes(1, 2)
        scores, lossy_scores = product(coded.keys, rows), product(coded.decoded_keys, rows)  # [1, m, R]
        change = np.subtract(lossy_scores, scores, out=scores)
        first = int(np.searchsorted(at, last.min(initial=0) + 1))
        hidden = at[first:, None] > last
        change[:, first:][:, hidden] = 0
        within = -np.einsum("hmr,hmr->hr", weights, change) / kept - exact.log_sums[head] + lost
        logit = np.abs(change, out=change).sum(1) / (len(at) - hidden.sum(0))
        at_top = np.take_along_axis(lossy_scores, place[:, None], 1)[:, 0]
        log_sums, most = softmax_in_place(lossy_scores, at, last)  # now P'
        divergence = lost + np.maximum(within + log_sums, 0)
        found = weighted(lossy_scores, coded.decoded_values)
        changed |= at_top < most
    return {
        "logit": logit, "kl": divergence, "output": ((found - output) ** 2).sum(-1),
        "norm": (output**2).sum(-1), "top_changed": changed, "weight": kept,
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
