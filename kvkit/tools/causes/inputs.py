"""Find the inputs of a call that can help to explain its results."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from kvkit.formats import FLOATS
from kvkit.tools.causes.trial import Trial

FLOAT_DTYPES = {fmt.dtype for fmt in FLOATS}
WINDOWS = {"slot_mapping", "wins", "seq_lens"}  # inputs of calls that keep some rows of each head


def names_beside(name: str) -> tuple[str, tuple[str, ...]]:
    """Return (name of scales, possible names of their codes), by the name of scales or codes."""
    base = re.sub(r"_?(cache|scale)$", "", name)
    stem = f"{base}_" if base else ""
    return f"{stem}scale", (base, f"{stem}cache")


def quantized_input(trial: Trial) -> tuple[np.ndarray, int, int, bool] | None:
    """Return (quantized floats, group, bits, whether the trial is of scales); None if they are not given."""
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
    return x, group, bits, trial.name == scale_name


def usable_inputs(like: Mapping[str, Any], expected: Mapping[str, np.ndarray]) -> set[str]:
    """Return the names of the inputs that some cause can use for one of the arrays."""
    usable = set()
    for name, array in expected.items():
        trial = Trial(name, (), array, array, dict(like), dict(expected))
        for each, value in like.items():
            shape = np.shape(value)
            same = each in (name, "before", f"before_{name}") and shape == array.shape
            tokens = each == "positions" and np.size(value) > 0 and array.size % np.size(value) == 0
            rows = each in names_beside(name)[1] and quantized_input(replace(trial, like={each: value}))
            kept = name.endswith("_cache") and each == name.removesuffix("_cache") and set(like) >= WINDOWS
            if same or tokens or rows or kept or (each == "rope_base" and not shape):
                usable.add(each)
    return usable
