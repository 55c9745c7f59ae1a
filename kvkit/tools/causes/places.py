"""Causes of differences in which the bytes are right and their place is wrong."""

from collections import Counter
from typing import Any

import numpy as np

from kvkit.tools.causes.trial import Guesses, Trial, cause

PAIRS = (("key", "value"), ("value", "key"), ("k_", "v_"), ("v_", "k_"))


@cause("keys and values swapped")
def swapped_sides(trial: Trial) -> Guesses:
    """Keys are where values should be, or the other way round."""
    for one, other in PAIRS:
        partner = trial.others.get(trial.name.replace(one, other)) if one in trial.name else None
        kind = trial.expected.shape, trial.expected.dtype
        if partner is not None and (partner.shape, partner.dtype) == kind:
            yield "", partner


@cause("heads and tokens swapped")
def swapped_axes(trial: Trial) -> Guesses:
    """Rows of [heads, tokens] that are read as [tokens, heads], or the other way round."""
    tokens, heads = trial.axis("n"), trial.axis("h")
    content, shape = trial.axis("c"), trial.expected.shape
    if tokens is None or heads is None or content is None or 1 in (shape[tokens], shape[heads]):
        return
    back = (tokens, heads, content)
    array = np.moveaxis(trial.expected, back, (-3, -2, -1))
    n, h = array.shape[-3:-1]
    swapped = array.swapaxes(-3, -2).reshape(array.shape)
    yield "[heads, tokens] for [tokens, heads]", np.moveaxis(swapped, (-3, -2, -1), back)
    turned = array.reshape(*array.shape[:-3], h, n, array.shape[-1]).swapaxes(-3, -2)
    yield "[tokens, heads] for [heads, tokens]", np.moveaxis(turned, (-3, -2, -1), back)


@cause("row off by one")
def next_row(trial: Trial) -> Guesses:
    """Every token is in the next row, or in the previous one."""
    rows = trial.rows(trial.expected)
    if rows is not None and rows.shape[1] > 1:
        for step in (1, -1):
            yield f"row {step:+d}", trial.of_rows(np.roll(rows, step, axis=1))


@cause("page number for row")
def page_for_row(trial: Trial) -> Guesses:
    """Row o of page p was stored in row p + o, not in p * page_size + o."""
    rows = trial.rows(trial.expected)
    if rows is None or trial.axis("b") is None:
        return
    size = trial.expected.shape[trial.axis("n")]
    if size < 2:
        return
    pages = rows.shape[1] // size
    got = trial.rows(trial.got)
    moved = np.zeros(got.shape[:2], bool)
    for offset in range(size):
        targets = np.arange(pages) + offset
        inside = targets < rows.shape[1]
        source = rows[:, np.arange(pages)[inside] * size + offset]
        moved[:, targets[inside]] |= same_rows(got[:, targets[inside]], source)
    strayed = moved & ~same_rows(got, rows)
    if strayed.any():  # stray rows also explain rows that are empty where data should be
        empty = ~got.reshape(*got.shape[:2], -1).any(axis=-1)
        mask = np.broadcast_to((strayed | empty)[..., None, None], got.shape)
        yield "", trial.of_rows(np.ascontiguousarray(mask))


def same_rows(one: np.ndarray, two: np.ndarray) -> Any:
    """Return which rows [layers, rows] have equal bytes."""
    word = f"u{one.dtype.itemsize}"
    one, two = np.ascontiguousarray(one).view(word), np.ascontiguousarray(two).view(word)
    return (one == two).reshape(*one.shape[:2], -1).all(axis=-1)


@cause("another token's or layer's bytes")
def elsewhere(trial: Trial) -> Guesses:
    """A head's row has the bytes of another token's or layer's row."""
    expected, got = trial.rows(trial.expected), trial.rows(trial.got)
    if expected is None:
        return
    layers, tokens, heads, _ = expected.shape
    mask, steps = np.zeros(got.shape, bool), Counter[tuple[int, int]]()
    for head in range(heads):
        rows, found = np.ascontiguousarray(expected[:, :, head]), np.ascontiguousarray(got[:, :, head])
        differing = np.argwhere(~same_rows(rows[:, :, None], found[:, :, None])).tolist()
        if not differing:
            continue
        places = {
            rows[layer, token].tobytes(): (layer, token) for layer in range(layers) for token in range(tokens)
        }
        for layer, token in differing:
            row = found[layer, token]
            where = places.get(row.tobytes()) if row.view(np.uint8).any() else None
            if where is not None:
                mask[layer, token, head] = True
                steps[where[0] - layer, where[1] - token] += 1
    if steps:
        plane = "side or layer" if trial.axis("kv") is not None else "layer"
        (layer, token), _ = steps.most_common(1)[0]
        detail = f"{plane} {layer:+d}, token {token:+d}" if layers > 1 else f"token {token:+d}"
        yield detail, trial.of_rows(mask)
