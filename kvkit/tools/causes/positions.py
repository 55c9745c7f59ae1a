"""Guess causes in the rotary embedding of keys."""

import numpy as np

from kvkit.tools.causes.evidence import Guess
from kvkit.tools.causes.trial import Guesses, Trial, cause
from kvkit.tools.counting import word_view

ULPS = {"float32": 2**-20, "float16": 2**-9, "bfloat16": 2**-6}  # tolerance / largest element of a row


def rotate(x: np.ndarray, angles: np.ndarray, pairs: str) -> np.ndarray:
    """Rotate x [..., content] by angles [..., content / 2]; `pairs` are "halves" or "interleaved"."""
    half = x.shape[-1] // 2
    one, two = (x[..., :half], x[..., half:]) if pairs == "halves" else (x[..., ::2], x[..., 1::2])
    cos, sin = np.cos(angles), np.sin(angles)
    rotated = one * cos - two * sin, two * cos + one * sin
    if pairs == "halves":
        return np.concatenate(rotated, axis=-1)
    return np.stack(rotated, axis=-1).reshape(x.shape)


@cause("rotation of keys")
def rotation(trial: Trial) -> Guesses:
    """Rotary embedding was applied twice, not at all, or to the wrong pairs of elements."""
    rows = trial.token_rows(trial.expected) if trial.is_float else None
    if rows is None or rows.shape[-1] % 2 or "value" in trial.name:
        return
    positions = trial.like.get("positions")
    if positions is None:
        axis = trial.axis("n")
        tokens = trial.expected.shape[axis]
        positions = np.tile(np.arange(tokens), rows.shape[1] // tokens)
    positions = np.asarray(positions).reshape(-1)
    if len(positions) != rows.shape[1]:
        return
    base, half = float(np.asarray(trial.like.get("rope_base", 10000.0))), rows.shape[-1] // 2
    got_rows = trial.token_rows(trial.got)
    wrong = (word_view(rows) != word_view(got_rows)).any(axis=(0, 2, 3))
    angles = (positions[wrong, None] * base ** (-np.arange(half) / half))[:, None, :]  # [rows, 1, half]
    x, got = (array[:, wrong].astype(np.float64) for array in (rows, got_rows))
    forms = {}  # {variant: predicted keys}
    for pairs, other in (("halves", "interleaved"), ("interleaved", "halves")):
        plain = rotate(x, -angles, pairs)
        forms[f"applied twice, {pairs}"] = rotate(x, angles, pairs)
        forms[f"not applied, {pairs}"] = plain
        forms[f"{other} for {pairs}"] = rotate(plain, angles, other)
    limit = ULPS[trial.expected.dtype.name] * np.abs(x).max(axis=-1, keepdims=True)
    for detail, predicted in forms.items():
        close = (np.abs(predicted - got) <= limit).all(axis=-1, keepdims=True)
        near = np.zeros(rows.shape, bool)
        near[:, wrong] = close & (np.abs(x - got) > limit).any(axis=-1, keepdims=True)
        # `near` marks what the rotation predicts, all else is as expected.
        yield Guess(detail, trial.expected, bits=3, near=trial.from_rows(near))
