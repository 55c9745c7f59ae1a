"""Find the arrays of recurrent states, and of DeepSeek V4's compressors, by the names that engines use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvkit.errors import printable

# States of the rule or of Mamba, and those of convolutions.
STATES = tuple(f"{kind}_state{plural}" for kind in ("recurrent", "ssm", "conv") for plural in ("", "s"))
# DeepSeek V4's: states of compressors in engines, and what transformers has beside its window.
COMPRESSOR_STATES = "compressor_state", "indexer_state", "compress_state", "inner_compress_state"
COMPRESSED_ARRAYS = {
    "compressed_kv": "[sequences, rows, dim]", "entry_count": "how many there are",
    "buffer_kv": "tokens behind the last one",
    "buffer_gate": "gates of tokens behind the last one, without ape",
    "overlap_kv": "tokens of the last one, first half",
    "overlap_gate": "gates of tokens of the last one, first half, with ape",
}  # fmt: skip
RECURRENT, CONV, COMPRESSOR, COMPRESSED = "recurrent", "conv", "compressor", "compressed"
STATE_NAME = re.compile(rf"(?:.*[./_])?({'|'.join(STATES)})(?:[._][0-9]{{1,6}})*")
COMPRESSOR_NAME = re.compile(
    rf"(?:.*[./])?(?:{'|'.join(COMPRESSOR_STATES)}|states\.(?:compressor|indexer))(?:[._][0-9]{{1,6}})*"
)
COMPRESSED_NAME = re.compile(
    rf"(?:.*[./])?({'|'.join(COMPRESSED_ARRAYS)})\.(compressor|indexer)(?:[._][0-9]{{1,6}})*"
)
OF_LLAMA = re.compile(r"cache_([rs])_l[0-9]{1,6}")  # llama.cpp: r has the last inputs, s the states
MATRICES = "last axes [dk, dv] (state_layout KV) or [dv, dk] (VK), as the engine has them"
BY_AXES = {2: "a row has the states of all heads", 3: "states of sequences"}  # by the number of axes
INPUTS = "last inputs of convolutions, before their activation"
POOLED = "values and scores of tokens in a ring, float32: they become a compressed row"


@dataclass(frozen=True)
class StateArrays:
    """Describes arrays of recurrent states: the pattern of their names, with {l} for the first number."""

    pattern: str
    kind: str  # "recurrent", "conv", "compressor" or "compressed"
    count: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def meaning(self) -> str:
        """Return what the arrays hold."""
        found = COMPRESSED_NAME.fullmatch(self.pattern.replace("{l}", "0"))
        if found:
            return COMPRESSED_ARRAYS[found[1]]
        fixed = {CONV: INPUTS, COMPRESSOR: POOLED}
        return fixed[self.kind] if self.kind in fixed else BY_AXES.get(len(self.shape), MATRICES)

    def __str__(self) -> str:
        rows = "index keys" if ".indexer" in self.pattern else "compressed rows"
        what = rows if self.kind == COMPRESSED else f"{self.kind} states"
        several = what if self.count == 1 else f"{what}, {self.count} arrays"
        return f"{several} {printable(self.pattern)}: {self.meaning}"


def kind_of_state(name: str) -> str | None:
    """Return the kind of a state or a compressor's array by its name, as layers.3.conv_states; or None."""
    found = OF_LLAMA.fullmatch(name)
    if found:
        return CONV if found[1] == "r" else RECURRENT
    found = STATE_NAME.fullmatch(name)
    if found:
        return CONV if found[1].startswith(CONV) else RECURRENT
    if COMPRESSOR_NAME.fullmatch(name):
        return COMPRESSOR
    return COMPRESSED if COMPRESSED_NAME.fullmatch(name) else None


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
