"""Find the inputs of a call that can help to explain its results."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from kvkit.formats import FLOATS
from kvkit.tools.causes.trial import Trial

FLOAT_DTYPES = {fmt.dtype for fmt in FLOATS}
WINDOWED = {"slot_mapping", "wins", "seq_lens"}  # inputs of calls that keep some rows of each head


def names_beside(name: str) -> tuple[str, tuple[str, ...]]:
    """Return (name of scales, possible names of their codes), by the name of scales or codes."""
    base = re.sub(r"_?(cache|scale)$", "", name)
    stem = f"{base}_" if base else ""
    return f"{stem}scale", (base, f"{stem}cache")


class QuantizedInput(NamedTuple):
    """Holds the floats that a call quantized, and how its codes and scales hold them."""

    floats: np.ndarray
    group: int  # elements with one scale
    bits: int  # of a code
    of_scales: bool  # whether the trial is of scales, not of codes


def quantized_input(trial: Trial) -> QuantizedInput | None:
    """Return the floats of which a trial has codes or scales, by PMX's rule; None if they are not given."""
    scale_name, names = names_beside(trial.name)
    x = next((trial.like[name] for name in names if name in trial.like), None)
    if not isinstance(x, np.ndarray) or x.dtype not in FLOAT_DTYPES or not x.ndim:
        return None
    arrays = trial.others | {trial.name: trial.expected}
    codes = next((arrays[name] for name in names if name in arrays), None)
    scale = arrays.get(scale_name)
    if codes is None or scale is None or codes.dtype.itemsize != 1 or x.shape[:-1] != codes.shape[:-1]:
        return None
    group, bits = x.shape[-1] // max(scale.shape[-1], 1), 8 * codes.shape[-1] // x.shape[-1]
    if bits not in (4, 8) or scale.shape[:-1] != x.shape[:-1] or scale.shape[-1] * group != x.shape[-1]:
        return None
    return QuantizedInput(x, group, bits, trial.name == scale_name)


def usable_inputs(like: Mapping[str, Any], expected: Mapping[str, np.ndarray]) -> set[str]:
    """Return the names of the inputs that some cause can use for one of the arrays."""
    usable = set()
    for name, array in expected.items():
        trial = Trial(name, (), array, array, dict(like), dict(expected))
        for each, value in like.items():
            shape = np.shape(value)
            cases = (
                each in (name, "before", f"before_{name}") and shape == array.shape,
                each == "positions" and np.size(value) > 0 and array.size % np.size(value) == 0,
                each == "rope_base" and not shape,
                each in names_beside(name)[1] and quantized_input(replace(trial, like={each: value})),
                trial.is_attention,
                name.endswith("_cache") and each == name.removesuffix("_cache") and set(like) >= WINDOWED,
            )
            if any(cases):
                usable.add(each)
    return usable
