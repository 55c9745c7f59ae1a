"""Find the arrays of recurrent states by the names that engines use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvkit.errors import printable

# States of the rule or of Mamba, and those of convolutions.
STATES = tuple(f"{kind}_state{plural}" for kind in ("recurrent", "ssm", "conv") for plural in ("", "s"))
RECURRENT, CONV = "recurrent", "conv"
STATE_NAME = re.compile(rf"(?:.*[./_])?({'|'.join(STATES)})(?:[._][0-9]{{1,6}})*")
OF_LLAMA = re.compile(r"cache_([rs])_l[0-9]{1,6}")  # llama.cpp: r has the last inputs, s the states
MATRICES = "last axes [dk, dv] (state_layout KV) or [dv, dk] (VK), as the engine has them"
BY_AXES = {2: "a row has the states of all heads", 3: "states of sequences"}  # by the number of axes
INPUTS = "last inputs of convolutions, before their activation"


@dataclass(frozen=True)
class StateArrays:
    """Describes arrays of recurrent states: the pattern of their names, with {l} for the first number."""

    pattern: str
    kind: str  # "recurrent" or "conv"
    count: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def meaning(self) -> str:
        """Return what the arrays hold."""
        return INPUTS if self.kind == CONV else BY_AXES.get(len(self.shape), MATRICES)

    def __str__(self) -> str:
        several = "states" if self.count == 1 else f"states, {self.count} arrays"
        return f"{self.kind} {several} {printable(self.pattern)}: {self.meaning}"


def kind_of_state(name: str) -> str | None:
    """Return "recurrent" or "conv" for the name of a state, such as layers.3.conv_states; else None."""
    found = OF_LLAMA.fullmatch(name)
    if found:
        return CONV if found[1] == "r" else RECURRENT
    found = STATE_NAME.fullmatch(name)
    return None if not found else CONV if found[1].startswith(CONV) else RECURRENT


def find_states(arrays: Mapping[str, np.ndarray]) -> list[StateArrays]:
    """Return the states among named arrays; arrays of one pattern, dtype and shape count as one entry."""
    counts: dict[tuple[str, str, str, tuple[int, ...]], int] = {}
    for name, array in arrays.items():
        kind = kind_of_state(name)
        if kind is not None:
            form = re.sub("[0-9]+", "{l}", name, count=1), kind, array.dtype.name, array.shape
            counts[form] = counts.get(form, 0) + 1
    return [
        StateArrays(pattern, kind, count, dtype, shape)
        for (pattern, kind, dtype, shape), count in counts.items()
    ]
