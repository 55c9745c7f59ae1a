"""Find the mix of formats that loses least at so many bits, or that needs the fewest bits for an error.

The queries of a sequence, in their order::

    choosing: their outputs, over tokens up to the last of them, choose the mix | held back: they measure it

E is the relative error of a layer's attention outputs o over its heads and queries, and the error of a cache
is the root mean square of E over layers. E is measured for every pair of a format of keys and one of values;
the search assumes that squared errors of layers add::

    E^2     = sum of |o' - o|^2 / sum of |o|^2
    error^2 = mean of E^2 over layers
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvkit.errors import KvkitError, argument_error, brief
from kvkit.files.paths import name_in_errors
from kvkit.files.replace import replacing
from kvkit.formats.mixes import FILE_END, FILE_KEY, mix_text, side_format
from kvkit.tools.readers import LayerReader
from kvkit.tools.studies.evicting import JudgedContext
from kvkit.tools.studies.kept_tokens import attend_exactly, code_tokens
from kvkit.tools.studies.policies import Target
from kvkit.tools.studies.records import ChosenMix
from kvkit.typed import Array

CHOOSING = 64  # at most so many of the queries before the held-back ones choose the mix
CELLS = 2**16  # the most different sums of bits that a search tells apart


@dataclass(frozen=True)
class PairCosts:
    """Holds what pairs of formats, of keys and of values, cost a layer."""

    bits: Array  # stored, int64 [formats, sides]
    errors: Array  # E^2 of the choosing queries [formats of keys, formats of values]


def output_errors(
    layer: LayerReader, context: JudgedContext, schemes: Sequence[tuple[Any, Any]], head: int
) -> tuple[Array, float]:
    """Return (|o' - o|^2 [schemes of keys, schemes of values], |o|^2) of a key head's choosing queries.

    Only the tokens up to the last of these queries are read.
    """
    if context.selecting is None:
        wanted = "two queries or more of each sequence: some choose the mix, the others measure it"
        raise argument_error("source", wanted, "one")
    sides = (side[head : head + 1, : context.choosable] for side in (context.keys, context.values))
    keys, values = sides  # [1, n, D]
    width = context.selecting.shape[1] // layer.key.heads
    query = context.selecting[0, head * width : (head + 1) * width, -CHOOSING:].swapaxes(0, 1)
    exact = attend_exactly(keys, values, query).output[:, :, None]  # [1, R, 1, Dv]
    coded = [code_tokens(scheme, values, layer.value) for _, scheme in schemes]
    all_values, found = np.concatenate(coded, 2), []  # [1, n, schemes * Dv]
    for scheme, _ in schemes:
        lossy = attend_exactly(code_tokens(scheme, keys, layer.key), all_values, query).output
        error = lossy.reshape(1, len(query) * width, len(schemes), -1) - exact
        found.append((error**2).sum((0, 1, 3), dtype=np.float64))
    return np.array(found), float((exact**2).sum(dtype=np.float64))


def costs_of(bits: Sequence[tuple[int, ...]], results: Sequence[tuple[Array, float]]) -> PairCosts | None:
    """Add the results of `output_errors` for the heads and contexts of a layer; None without any."""
    if not results:
        return None
    errors, squares = np.sum([each for each, _ in results], 0), sum(each for _, each in results)
    return PairCosts(np.array(bits), errors / squares if squares else errors)


def cheapest(
    bits: Array, losses: Array, most: int | None = None, limit: float | None = None
) -> tuple[list[int], int]:
    """Choose one of F formats for each of n items, by dynamic programming over sums of bits.

    Parameters
    ----------
    bits, losses : array, [n, F]
        Integers, and float64.
    most : int, optional
        The most bits in all. Then the sum of losses is the least.
    limit : float, optional
        The largest sum of losses. Then the sum of bits is the least.

    Returns
    -------
    choices : list of int
        The format of each item.
    resolution : int
        By how many bits sums are rounded up, in all; 0 if the result is exact.
    """
    least = bits.min(1)
    extra = bits - least[:, None]
    room = int(extra.max(1).sum())
    if most is not None:
        if most < least.sum():
            raise argument_error("bits", f"at least {least.sum()} in all", most)
        room = min(room, most - int(least.sum()))
    unit = int(np.gcd.reduce(extra, axis=None)) or 1
    rounded = max(unit, -(-room // CELLS))
    cost = -(-extra // rounded)
    # Rounded up, the bits of all best formats may be more than there is room for.
    cells = 1 + (cost.max(1).sum() if room == extra.max(1).sum() else room // rounded)
    best, chosen = np.zeros(cells), np.zeros((len(bits), cells), np.uint16)  # by the largest sum of bits
    for item, (item_cost, item_loss) in enumerate(zip(cost, losses, strict=True)):
        found = np.full(cells, np.inf)
        for f in np.flatnonzero(item_cost < cells):
            own = slice(item_cost[f], None)
            total = best[: cells - item_cost[f]] + item_loss[f]
            better = total < found[own]
            found[own][better] = total[better]
            chosen[item, own][better] = f
        best = found
    reached = np.flatnonzero(best <= (best[-1] if limit is None else limit))
    if not len(reached):
        raise argument_error("error", f"at least {best[-1]}", limit)
    cell, choices = reached[0], []
    for item in reversed(range(len(bits))):
        choices.append(int(chosen[item, cell]))
        cell -= cost[item, choices[-1]]
    return choices[::-1], rounded * len(bits) if rounded > unit else 0


@dataclass(frozen=True)
class FoundMix:
    """Holds the mix that a search found, and what it assumed."""

    text: str
    formats: list[tuple[str, str]]  # of keys and of values of each layer
    resolution: float
    error_assumed: float


def find_mix(
    costs: Sequence[PairCosts], names: Sequence[str], target: Target, elements: int, numbers: Sequence[int]
) -> FoundMix:
    """Find the mix of formats that reaches the target, by the costs of each layer."""
    bits = np.array([(own.bits[:, :1] + own.bits[:, 1]).ravel() for own in costs])
    losses = np.array([own.errors.ravel() for own in costs]) / len(costs)
    try:
        if target.error is None:
            choices, rounded = cheapest(bits, losses, int((target.bits or 0) * elements))
        else:
            choices, rounded = cheapest(bits, losses, limit=target.error**2)
    except KvkitError:
        least = f"{bits.min(1).sum() / elements:.2f} bits"
        if target.error is not None:
            least = f"an error of {100 * np.sqrt(losses.min(1).sum()):.2g} %"
        name = "bits" if target.error is None else "error"
        wanted = f"what a mix of these formats reaches: {least} at the least (other schemes may reach less)"
        raise argument_error(name, wanted, str(target)) from None
    pairs = [(names[key], names[value]) for key, value in (divmod(each, len(names)) for each in choices)]
    formats = [(side_format(key, False), side_format(value, True)) for key, value in pairs]
    assumed = np.sqrt(sum(loss[each] for loss, each in zip(losses, choices, strict=True)))
    return FoundMix(mix_text(formats, numbers), formats, rounded / elements, float(assumed))


def write_mix(mix: ChosenMix, path: Path) -> Path:
    """Write a mix as a file that `kvkit.cache.QuantizedCache.from_file` reads; return its path."""
    if path.suffix != FILE_END:
        raise argument_error("path", f"a name that ends with {FILE_END}, for a mix", brief(path))
    held = asdict(mix)
    text = json.dumps({FILE_KEY: held.pop("text"), "num_layers": held.pop("num_layers"), **held}, indent=1)
    with name_in_errors(path), replacing(path) as file:
        file.write(f"{text}\n".encode())
    return path
