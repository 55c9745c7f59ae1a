"""Guess causes by which bytes are right but in the wrong place."""

import re
from collections import Counter

import numpy as np

from kvkit.tools.causes.evidence import Guess
from kvkit.tools.causes.trial import Guesses, Trial, cause
from kvkit.tools.counting import word_view
from kvkit.tools.state_names import RECURRENT, kind_of_state

SIDED = re.compile(r"key|value|(?<![a-z])[kv](?![a-z])", re.IGNORECASE)
OTHER = {"key": "value", "value": "key", "k": "v", "v": "k"}


@cause("keys and values swapped")
def swapped_sides(trial: Trial) -> Guesses:
    """Keys are in the place of values, and the reverse."""
    kind, untraced = (trial.expected.shape, trial.expected.dtype), untraced_targets(trial)
    for found in SIDED.finditer(trial.name):
        word, other = found[0], OTHER[found[0].lower()]
        other = other.upper() if word.isupper() else other.title() if word.istitle() else other
        partner = trial.others.get(trial.name[: found.start()] + other + trial.name[found.end() :])
        if partner is not None and (partner.shape, partner.dtype) == kind:
            yield Guess("", partner, targets=untraced)
    axis = trial.axis("kv")
    both_sides = not SIDED.search(re.sub(r"\bkv", "", trial.name))  # the name is of neither keys nor values
    unnamed = range(min(3, trial.expected.ndim - 1)) if both_sides else ()
    for i in unnamed if axis is None else (axis,):
        if trial.expected.shape[i] == 2:
            detail = "" if axis is not None else f"axis {i}"
            yield Guess(detail, np.flip(trial.expected, i), bits=2, targets=untraced)


@cause("heads and tokens swapped")
def swapped_axes(trial: Trial) -> Guesses:
    """Rows of [heads, tokens] are read as [tokens, heads], or the reverse."""
    tokens, heads = trial.axis("n"), trial.axis("h")
    content, shape = trial.axis("c"), trial.expected.shape
    if tokens is None or heads is None or content is None or 1 in (shape[tokens], shape[heads]):
        return
    back = (tokens, heads, content)
    array = np.moveaxis(trial.expected, back, (-3, -2, -1))
    *outer, n, h, c = array.shape
    written = array.swapaxes(-3, -2).reshape(array.shape)  # [h, n, c] in memory, read as [n, h, c]
    read = array.reshape(*outer, h, n, c).swapaxes(-3, -2).reshape(array.shape)  # the reverse
    details = "[heads, tokens] for [tokens, heads]", "[tokens, heads] for [heads, tokens]"
    for detail, swapped in zip(details, (written, read), strict=True):
        moved = np.moveaxis(swapped, (-3, -2, -1), back)
        yield Guess(detail, moved, bits=1, targets=untraced_targets(trial))


@cause("state in the other order")
def other_order(trial: Trial) -> Guesses:
    """States of [dv, dk] (VK) are read as [dk, dv] (KV), or the reverse."""
    array = trial.expected
    named = kind_of_state(trial.name) == RECURRENT or trial.name in (
        "state",
        "states",
    )  # engines', operators'
    if not named or array.ndim < 4 or 1 in array.shape[-2:]:
        return
    *outer, rows, columns = array.shape
    written = array.swapaxes(-1, -2).reshape(array.shape)
    yield Guess("rows for columns", written, bits=1, targets=untraced_targets(trial))
    if rows != columns:
        read = array.reshape(*outer, columns, rows).swapaxes(-1, -2)
        yield Guess("columns for rows", read, bits=1, targets=untraced_targets(trial))


def untraced_targets(trial: Trial) -> np.ndarray:
    """Return the targets of a guess that moves rows without saying where each one went."""
    return np.full(trial.as_rows(trial.expected).shape[:-1], -1)


def moved_rows(
    trial: Trial, detail: str, origin: np.ndarray, targets: np.ndarray, bits: float, row_bits: float = 0
) -> Guess:
    """Return the guess that row i holds row origin[i], and that row i went to row targets[i].

    Numbers outside of the rows mean its own row, and nowhere. Rows moved down by one have the origins
    [-1, 0, 1, ...] and the targets [1, 2, 3, ...].
    """
    rows = trial.token_rows(trial.expected)
    planes, tokens, heads = rows.shape[:3]
    moved = (origin >= 0) & (origin < tokens)
    flat = np.arange(planes * tokens * heads).reshape(planes, tokens, heads)
    inside = (targets >= 0) & (targets < tokens)
    gone = np.where(inside[:, None], flat[:, np.where(inside, targets, 0)], -1)
    each = np.broadcast_to(np.where(moved, row_bits, 0.0)[:, None], gone.shape)
    predicted = trial.from_rows(rows[:, np.where(moved, origin, np.arange(tokens))])
    return Guess(detail, predicted, bits, each, targets=gone)


@cause("row off by one")
def next_row(trial: Trial) -> Guesses:
    """Tokens are in the next row, or in the previous one."""
    rows = trial.token_rows(trial.expected)
    if rows is not None and rows.shape[1] > 1:
        tokens, size = np.arange(rows.shape[1]), trial.expected.shape[trial.axis("n")]
        for step in (1, -1):
            yield moved_rows(trial, f"row {step:+d}", tokens - step, tokens + step, bits=1)
            for period in {len(tokens), size}:  # with wrap-around at the end of the cache, or of each page
                first = tokens // period * period
                origin, targets = (first + (tokens + shift) % period for shift in (-step, step))
                yield moved_rows(trial, f"row {step:+d}", origin, targets, bits=3)


@cause("page number for row")
def page_for_row(trial: Trial) -> Guesses:
    """Row o of page p was stored in row p + o, not in p * page_size + o; or in row p."""
    rows = trial.token_rows(trial.expected)
    if rows is None or trial.axis("b") is None or trial.expected.shape[trial.axis("n")] < 2:
        return
    size, tokens = trial.expected.shape[trial.axis("n")], np.arange(rows.shape[1])
    got = trial.token_rows(trial.got)
    for detail, targets in (("page + offset", tokens // size + tokens % size), ("page", tokens // size)):
        # Several rows have one target. Its origin is the row that is found there, by its share of bytes.
        origin, fits = np.full(len(tokens), -1), np.zeros(len(tokens))
        for offset in range(size):  # rows of equal offsets have distinct targets
            source = tokens[offset::size]
            source = source[(targets[source] < len(tokens)) & (targets[source] != source)]
            target = targets[source]
            equal = (word_view(rows[:, source]) == word_view(got[:, target])).mean(axis=(0, 2, 3))
            better = equal > fits[target]
            origin[target[better]], fits[target[better]] = source[better], equal[better]
        yield moved_rows(trial, detail, origin, targets, bits=2, row_bits=float(np.log2(size)))


@cause("another token's or layer's bytes")
def elsewhere(trial: Trial) -> Guesses:
    """A head's row has the bytes of another token's or layer's row."""
    expected, got = trial.token_rows(trial.expected), trial.token_rows(trial.got)
    if expected is None:
        return
    layers, tokens, heads, _ = expected.shape
    x, y = word_view(expected), word_view(got)
    flat = np.arange(layers * tokens * heads).reshape(layers, tokens, heads)
    sources, targets = np.full(flat.shape, -1), np.full(flat.size, -1)  # flat indices
    steps = Counter[tuple[int, int]]()  # (layers, tokens) from a row to its source
    for head in range(heads):
        names = {x[layer, token, head].tobytes(): (layer, token)
                 for layer, token in np.ndindex(layers, tokens)}  # fmt: skip
        for layer, token in np.argwhere((x[:, :, head] != y[:, :, head]).any(axis=-1)).tolist():
            row = y[layer, token, head]
            where = None if (row == row[0]).all() else names.get(row.tobytes())
            if where is not None:
                sources[layer, token, head] = flat[where[0], where[1], head]
                steps[where[0] - layer, where[1] - token] += 1
    if not steps:
        return
    targets[sources[sources >= 0]] = flat[sources >= 0]
    bits = np.where(sources < 0, 0, 2 * np.log2(flat.size))  # bits that name each row and its source
    predicted = expected.reshape(-1, expected.shape[-1])[np.where(sources < 0, flat, sources)]
    plane = "side or layer" if trial.axis("kv") is not None else "layer"
    (layer, token), _ = steps.most_common(1)[0]
    detail = f"{plane} {layer:+d}, token {token:+d}" if layers > 1 else f"token {token:+d}"
    yield Guess(detail, trial.from_rows(predicted), 4, bits, targets=targets.reshape(flat.shape))


@cause("first rows kept for last ones")
def kept_first(trial: Trial) -> Guesses:
    """Ascend's KVHEAD mode kept the first tokens of each sequence, not the last. Needs the call's inputs."""
    wanted = "slot_mapping", "wins", "seq_lens"
    side = trial.like.get(trial.name.removesuffix("_cache"))
    rows = trial.token_rows(trial.expected)
    if rows is None or side is None or any(name not in trial.like for name in wanted):
        return
    slots, wins, lengths = (np.asarray(trial.like[name]).reshape(-1).astype(np.int64) for name in wanted)
    legal = side.ndim == 3 and side.dtype == rows.dtype and rows.shape[::2] == (1, 1) and len(lengths)
    if not legal or len(slots) != len(lengths) * side.shape[1] or side.shape[-1] != rows.shape[-1]:
        return
    predicted, starts = rows.copy(), np.cumsum(lengths) - lengths
    for i, (slot, window) in enumerate(zip(slots, wins, strict=False)):
        sequence, head = divmod(i, side.shape[1])
        if slot >= 0 and 0 < window <= lengths[sequence]:
            begin = starts[sequence]
            predicted[0, slot : slot + window, 0] = side[begin : begin + window, head]
    yield Guess("", trial.from_rows(predicted))
