"""Guess causes in attention, by calling the operator again with other arguments.

A guess is made only if the call as it was gives the expected results, and the changed call explains nearly
all of the difference: o is expected, o' was got and o'' is predicted, and |o'' - o'|^2 <= 0.02 |o - o'|^2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvkit.errors import KvkitError
from kvkit.operators import OPERATORS
from kvkit.tools.causes.evidence import Guess
from kvkit.tools.causes.trial import Guesses, Trial, cause

ATTRIBUTE = "attribute_"  # begins the names of attributes of a call in `Trial.like`
OWN_NAMES = "softmax_scale", "window", "softcap", "is_causal"  # attributes that need no such beginning
OF_DTYPE = {"float32": 2**-17, "float16": 2**-9, "bfloat16": 2**-6, "float64": 2**-17}  # errors of a row
RIGHT, EXPLAINED = 0.02, 0.9  # the most that is left of a difference, squared; the least share of elements
BASES = {"base 2": 1 / np.log(2), "base 10": 1 / np.log(10), "base e for base 2": np.log(2)}
ATTENDS, STORES = ("query", "key", "value"), ("current_key", "cache")  # inputs that name an operator
STEPS, SHARE, CLOSE = 8, 0.03, 1e-3  # of the search for a scale: most steps, the change tried, the last one


class AttentionRecall(NamedTuple):
    """Holds a call of an operator, and how its result lies in the array of a trial."""

    operator: str
    arguments: dict[str, Any]
    place: Callable[[np.ndarray], np.ndarray]  # turns a result to the axes of the trial's array

    def results(self, trial: Trial) -> np.ndarray | None:
        """Return the results that a trial has one of, as float64; None if the call is refused."""
        op, arguments = OPERATORS[self.operator], self.arguments
        is_lse = trial.expected.ndim < np.ndim(arguments["query"])
        if is_lse:
            arguments = arguments | {"return_lse": True}
        try:
            found = op.call(arguments)
        except KvkitError:
            return None
        found = self.place(
            np.asarray(found[1] if is_lse else found[0] if isinstance(found, tuple) else found)
        )
        return found.astype(np.float64) if found.shape == trial.expected.shape else None


def attention_calls(trial: Trial) -> list[AttentionRecall]:
    """Return the calls of attention that the inputs of a trial may be."""
    like = trial.like
    if not trial.is_attention:
        return []
    attributes = {name: like[name] for name in OWN_NAMES if name in like}
    attributes |= {name.removeprefix(ATTRIBUTE): x for name, x in like.items() if name.startswith(ATTRIBUTE)}
    plain = {name: tuple(x.tolist()) if np.ndim(x) else x.item() for name, x in attributes.items()}
    operator = str(like.get("operator", ""))
    if operator:
        return call_of_operator(operator, like, plain) if operator in OPERATORS else []
    if {"key_cache", "value_cache", "block_tables", "context_lens"} <= set(like):
        return call_of_operator(operator_with("query", "key_cache", "block_tables"), like, plain)
    if not {"key", "value"} <= set(like) or like["query"].ndim != 4:
        return []
    inputs = {name: like[name] for name in ("query", "key", "value")}
    turned = {name: array.swapaxes(1, 2) for name, array in inputs.items()}  # transformers' order
    same, back = (lambda x: x), (lambda x: x.swapaxes(1, 2))
    forms = (inputs, same), (turned, back), (turned, same)
    return [AttentionRecall(operator_with(*ATTENDS), arrays | plain, place) for arrays, place in forms]


def operator_with(*inputs: str, room: str = "") -> str:
    """Return the operator of a room that has these inputs, and queries only if they are among them."""
    return next(
        name for name, op in OPERATORS.items()
        if name.rpartition(".")[0] == room and set(inputs) <= (own := {array.name for array in op.inputs})
        and ("query" in own) == ("query" in inputs)
    )  # fmt: skip


def call_of_operator(
    operator: str, like: dict[str, Any], attributes: dict[str, Any]
) -> list[AttentionRecall]:
    """Return the call of an operator; PMX's over caches becomes one over the keys and values in them."""

    def arguments_of(name: str) -> dict[str, Any]:
        op = OPERATORS[name]
        arrays = {each.name for each in op.inputs}
        known = arrays | {each.name for each in op.attributes}
        return {each: np.array(x) for each, x in like.items() if each in arrays} | {
            each: value for each, value in attributes.items() if each in known
        }

    if any(array.name == "current_key" for array in OPERATORS[operator].inputs):
        room = operator.rpartition(".")[0]
        attend, store = (operator_with(*names, room=room) for names in (ATTENDS, STORES))
        try:
            key, value = OPERATORS[store].call(arguments_of(store))
        except KvkitError:
            return []
        inputs = arguments_of(attend) | {"key": key, "value": value}
        return [AttentionRecall(attend, inputs, lambda x: x)]
    return [AttentionRecall(operator, arguments_of(operator), lambda x: x)]


def right_call(trial: Trial) -> AttentionRecall | None:
    """Return the call whose results are the expected ones, which is sought once; None if there is none."""
    if "right call" in trial.memo:
        return trial.memo["right call"]
    x, right = trial.expected.astype(np.float64), None
    for call in attention_calls(trial):
        found = call.results(trial)
        if found is None:
            continue
        if ((np.abs(found - x) <= error_of(trial, x)) | (found == x)).mean() >= 1 - RIGHT:
            right = call
            break
    return trial.memo.setdefault("right call", right)


def error_of(trial: Trial, x: np.ndarray) -> Any:
    """Return the error that two right results may have: of sums, roundings and the trial's tolerance."""
    atol, rtol, _ = trial.tolerances
    of_row = OF_DTYPE[trial.expected.dtype.name] * np.abs(x).max(axis=-1, keepdims=True)
    return np.maximum(of_row, atol + rtol * np.abs(x))


def left_over(trial: Trial, predicted: np.ndarray | None) -> float:
    """Return the share of the difference, squared, that a prediction leaves."""
    if predicted is None:
        return np.inf
    x, got = trial.expected.astype(np.float64), trial.got.astype(np.float64)
    finite = np.isfinite(x) & np.isfinite(got) & np.isfinite(predicted)  # lse of an empty context is not
    if not (predicted == got)[~finite].all():
        return np.inf
    difference = np.square(x - got, where=finite, out=np.zeros_like(x)).sum()
    return float(np.square(predicted - got, where=finite, out=np.zeros_like(x)).sum() / difference)


def explains(trial: Trial, predicted: np.ndarray | None, detail: str, bits: float) -> Guesses:
    """Yield the guess of a changed call, if it leaves nearly nothing of the difference."""
    if predicted is None or not left_over(trial, predicted) <= RIGHT:
        return
    x, got = trial.expected.astype(np.float64), trial.got.astype(np.float64)
    apart = np.abs(predicted - got)
    near = (apart <= error_of(trial, predicted)) & (apart < np.abs(x - got))
    near |= (x == got) | (predicted == got)
    if near.mean() >= EXPLAINED:
        yield Guess(detail, predicted.astype(trial.expected.dtype), bits, near=near)


@cause("another softmax_scale")
def other_scale(trial: Trial) -> Guesses:
    """Scores were multiplied with another factor: none, 1 / head_dim, twice, for exp2, or any other."""
    call = right_call(trial)
    if call is None:
        return
    dim = call.arguments["query"].shape[-1]
    given = call.arguments.get("softmax_scale")
    own = dim**-0.5 if given is None else float(given)

    def attend(scale: float) -> np.ndarray | None:
        return call._replace(arguments=call.arguments | {"softmax_scale": float(scale)}).results(trial)

    usual = {"none": 1.0, "1 / head_dim": 1 / dim, "head_dim ** -0.5": dim**-0.5, "twice": own * own,
             "for exp2, without it": own / np.log(2), "for exp, with exp2": own * np.log(2)}  # fmt: skip
    tried = {scale: left_over(trial, attend(scale)) for scale in usual.values()}
    tried |= {each: left_over(trial, attend(each)) for each in own * 2.0 ** np.arange(-6, 7)}
    best = min(tried, key=lambda scale: tried[scale])
    if tried[best] > 1:
        return
    found, got = best, trial.got.astype(np.float64)
    for _ in range(STEPS):  # Newton's method for least squares, in the logarithm of the scale
        here, near = attend(found), attend(found * np.exp(SHARE))
        if here is None or near is None:
            break
        slope, rest = near - here, got - here
        finite = np.isfinite(slope) & np.isfinite(rest)
        steepness = np.square(slope[finite]).sum()
        if not steepness:  # one key has all of the weight
            break
        shares = SHARE * (slope * rest)[finite].sum() / steepness
        found = float(np.clip(found * np.exp(shares), *sorted((best / 2, best * 2))))
        if abs(shares) < CLOSE:
            break
    words, bits = f"{found:.3g}", 24
    # A usual scale nearby explains narrow outputs nearly as well: it must do so but for roundings.
    if tried[best] <= 2 * left_over(trial, attend(found)) + OF_DTYPE[trial.expected.dtype.name] ** 2 / 16:
        name = next((f", {name}" for name, scale in usual.items() if scale == best), "")
        found, words, bits = best, f"{best:.4g}{name}", 6
    yield from explains(trial, attend(found), f"{words} for {own:.4g}", bits)


@cause("query heads read other key heads")
def other_heads(trial: Trial) -> Guesses:
    """Query heads h, h + num_kv_heads, ... share a key head (repeated as a whole), not neighbours."""
    call = right_call(trial)
    if call is None or not {"key", "key_cache"} & set(call.arguments):
        return
    by_head = {"sinks", "attn_mask", "alibi_slopes"} & set(call.arguments)
    if by_head or call.arguments.get("is_alibi"):
        return
    query = call.arguments["query"]
    for num_kv_heads in range(2, query.shape[-2]):
        if query.shape[-2] % num_kv_heads:
            continue
        shape = *query.shape[:-2], -1, num_kv_heads, query.shape[-1]
        turned = np.ascontiguousarray(query.reshape(shape).swapaxes(-3, -2)).reshape(query.shape)
        axis = -1 if trial.expected.ndim < query.ndim else -2

        def back(x: np.ndarray, groups: int = num_kv_heads, axis: int = axis) -> np.ndarray:
            x = np.moveaxis(x, axis, 0)
            x = x.reshape(groups, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)
            return call.place(np.moveaxis(x, 0, axis))

        changed = call._replace(arguments=call.arguments | {"query": turned}, place=back).results(trial)
        detail = f"head h reads head h % {num_kv_heads}, not h // {query.shape[-2] // num_kv_heads}"
        yield from explains(trial, changed, detail, bits=3)


@cause("contexts one token short")
def shorter_contexts(trial: Trial) -> Guesses:
    """The last token of each context, usually the query's own, was not read; or the first one."""
    call = right_call(trial)
    if call is None:
        return
    given = call.arguments
    if "context_lens" in given:
        changes: dict[str, dict[str, Any]] = {
            "the last one is missing": {"context_lens": np.maximum(given["context_lens"] - 1, 0)}
        }
    elif "kvstarts" in given:
        starts = given["kvstarts"]
        last, first = starts[1:][np.diff(starts) > 0] - 1, starts[:-1][np.diff(starts) > 0]
        shorter = starts - np.concatenate([[0], np.cumsum(np.diff(starts) > 0)]).astype(starts.dtype)
        changes = {
            f"the {what} one is missing": {"kvstarts": shorter} | {
                side: np.delete(given[side], rows, axis=0) for side in ("key", "value")
            }
            for what, rows in (("last", last), ("first", first))
        }  # fmt: skip
    else:
        parts = {"last": slice(None, -1), "first": slice(1, None)}
        changes = {
            f"the {what} one is missing": {side: given[side][:, part] for side in ("key", "value")}
            for what, part in parts.items()
        }
    for detail, change in changes.items():
        yield from explains(trial, call._replace(arguments=given | change).results(trial), detail, bits=2)


@cause("later tokens")
def later_tokens(trial: Trial) -> Guesses:
    """Queries read tokens behind their own, as without a causal mask; or they do not, but should."""
    call = right_call(trial)
    if call is None or all(each.name != "is_causal" for each in OPERATORS[call.operator].attributes):
        return
    causal = call.arguments.get("is_causal", True)
    changed = call._replace(arguments=call.arguments | {"is_causal": not causal})
    detail = "read, as without a causal mask" if causal else "not read, as with a causal mask"
    yield from explains(trial, changed.results(trial), detail, bits=2)


@cause("log-sum-exp in another base")
def other_base(trial: Trial) -> Guesses:
    """The logarithm is of base 2 or 10, or has its sign reversed; expected is base e."""
    if "lse" not in trial.name.lower() or not trial.is_float:
        return
    x = trial.expected.astype(np.float64)
    for detail, factor in ({"sign reversed": -1.0} | BASES).items():
        yield from explains(trial, np.where(np.isfinite(x), x * factor, trial.got), detail, bits=2)
