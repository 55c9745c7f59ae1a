"""Check pools of recurrent states, and the index tensor of a step: rules R1 to R4."""

import numpy as np

from kvkit.tools.case import Case
from kvkit.tools.findings import Seen, rule
from kvkit.tools.rules.slots import named_twice
from kvkit.tools.state_names import STATES


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
