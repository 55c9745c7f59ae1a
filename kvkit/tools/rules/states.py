"""Check pools of recurrent states, and the index tensor of a step: rules R1 to R4, and W2."""

import itertools
from typing import Any

import numpy as np

from kvkit.errors import argument_error
from kvkit.tools.case import Case
from kvkit.tools.findings import Rule, Seen, rule
from kvkit.tools.rules.slots import named_twice
from kvkit.tools.state_names import CONV, STATES, kind_of_state

CLOSE = 0.02  # of the largest number of a state: more than bfloat16 rounds off, less than another order does


def state_indices(case: Case) -> np.ndarray | None:
    """Return the slots of a step; None if they are not given."""
    found = case.index("state_indices")
    return None if found is None else found.reshape(-1)


def pools(case: Case) -> dict[str, np.ndarray]:
    """Return the pools of states [slots, ...] by name."""
    return {name: np.asarray(array) for name, array in case.given.items() if name in STATES}


@rule(
    "R1",
    "Two sequences write one state, in any order. Give each its own slot; a fork copies the state.",
    needs="state_indices",
)
def state_named_twice(case: Case) -> Seen:
    """Report slots that two rows of a step have. tokenspeed#700: padding was clamped to a live slot 0."""
    return named_twice("state_indices", state_indices(case))


@rule(
    "R2",
    "The sequence reads another one's state, or memory behind the pool. Look where slots are given back.",
    needs="state_indices, recurrent_state or free_slots",
)
def state_of_nobody(case: Case) -> Seen:
    """Report slots outside a pool, below -1, or freed. tokenspeed#700: slot 0 was of another sequence."""
    slots, found = state_indices(case), pools(case)
    if slots is None or (not found and "free_slots" not in case.given):
        return None
    count = min((len(array) for array in found.values()), default=np.iinfo(np.int64).max)
    free = np.asarray(case.given.get("free_slots", np.zeros(0, np.int64)))
    outside = (slots < -1) | (slots >= count)
    hits = np.flatnonzero(outside | np.isin(slots, free))

    def words(i: int) -> tuple[str, str]:
        what = f"the pool has {count}" if outside[i] else "which is free"
        return f"state_indices[{i}]", f"slot {slots[i]}, {what}"

    return hits, words


@rule(
    "R3",
    "Rows of padding are behind all sequences. A sequence lost its slot, or the batch is in another order.",
    severity="warning",
    needs="state_indices",
)
def padding_in_the_middle(case: Case) -> Seen:
    """Report -1 before the slot of another sequence. tokenspeed#700: -1 marks rows of padding."""
    slots = state_indices(case)
    if slots is None:
        return None
    last = np.flatnonzero(slots >= 0).max(initial=-1)
    hits = np.flatnonzero(slots[: last + 1] == -1)
    return hits, lambda i: (f"state_indices[{i}]", f"-1 before entry {last}, slot {slots[last]}")


@rule(
    "R4",
    "All later tokens of the sequence are NaN. Look for keys that were not normed, g above 0, or e^g as g.",
    needs="recurrent_state, ssm_state or conv_state",
)
def state_not_finite(case: Case) -> Seen:
    """Report slots in use whose state has NaN or infinity. executorch#21417: e^c times e^-c overflowed."""
    found = pools(case)
    if not found:
        return None
    slots = state_indices(case)
    hits = []
    for name, array in found.items():
        if not array.ndim or array.dtype.kind not in "fV":
            continue
        used = range(len(array)) if slots is None else sorted({int(s) for s in slots if 0 <= s < len(array)})
        bad = [slot for slot in used if not np.isfinite(array[slot].astype(np.float32)).all()]
        hits += [(f"{name}[{slot}]", "NaN or infinity") for slot in bad]
    return hits


def state_in_other_order(call: tuple[Case, Case, np.ndarray]) -> Seen:
    """Report states that a step changed in another order than the stated one. vllm: KV before, VK since."""
    before, after, _ = call
    stated, found, looked = before.source.text("state_layout"), [], False
    k, v = (np.asarray(before.given.get(name, ()), np.float64) for name in "kv")
    if stated not in ("KV", "VK"):
        raise argument_error("state_layout", "KV or VK, which are tried", stated)
    for name, pool in pools(before).items():
        later = pools(after).get(name)
        if kind_of_state(name) == CONV or later is None or pool.shape != later.shape or pool.ndim != 4:
            continue
        slots = state_indices(before)
        slots = np.arange(len(v)) if slots is None else slots
        if k.ndim != 3 or v.ndim != 3 or not len(k) == len(v) == len(slots) or pool.shape[1] % k.shape[1]:
            continue
        rows = np.flatnonzero((slots >= 0) & (slots < len(pool)))
        old, new = (each[slots[rows]].astype(np.float64) for each in (pool, later))
        orders = list(itertools.product(("KV", "VK"), ("", ":tiled"), (False, True)))
        tokens = k[rows], v[rows]
        errors = [state_error(before, rows, (old, new), tokens, order) for order in orders]
        fits = {axes + tiled for (axes, tiled, _), error in zip(orders, errors, strict=True) if error < CLOSE}
        looked = looked or bool(fits)
        if fits and stated not in fits:
            found.append((name, f"the step changed it as {' or '.join(sorted(fits))}, not as {stated}"))
    return found if looked else None


def state_error(
    case: Case, rows: np.ndarray, states: Any, tokens: Any, order: tuple[str, str, bool]
) -> float:
    """Return how far states are from those that a step of this order makes, beside their largest number."""
    (axes, tiled, norm), (k, v) = order, tokens
    old, new = (each if axes == "KV" else each.swapaxes(-1, -2) for each in states)
    if old.shape[1:] != (v.shape[1], k.shape[2], v.shape[2]):
        return np.inf
    heads = np.arange(v.shape[1])
    k = k[:, heads % k.shape[1] if tiled else heads * k.shape[1] // v.shape[1]]
    k = k / np.maximum(np.linalg.norm(k, axis=-1, keepdims=True), 1e-6) if norm else k
    g, beta = (np.asarray(case.given.get(name, np.full(len(rows), end)), np.float64) for name, end in
               (("g", 0.0), ("beta", 1.0)))  # fmt: skip
    g, beta = (each if each.ndim == 1 else each[rows] for each in (g, beta))
    decayed = old * np.exp(g.reshape(*g.shape, *[1] * (4 - g.ndim)))
    delta = v - np.einsum("nhkv,nhk->nhv", decayed, k)
    delta *= beta.reshape(*beta.shape, *[1] * (3 - beta.ndim))
    made = decayed + k[..., None] * delta[..., None, :]
    return float(np.abs(made - new).max(initial=0) / max(np.abs(new).max(initial=0), 1e-30))


STATE_IN_OTHER_ORDER = Rule(
    "W2",
    "error",
    "Rows are read as columns, or heads of another key. kvkit convert --states brings states into an order.",
    state_in_other_order,
    "k, v, recurrent_state, a step of the delta rule",
)
