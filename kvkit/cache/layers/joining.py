"""Plan to put the rows of another layer behind those of a layer, or between them; see `Layer.append`.

A key of position p and rope shift d is rotated for p - d. At its new place p + a its shift is d + a: so no
key is rotated, and no code is decoded.
"""

from __future__ import annotations

from typing import Any, NamedTuple, SupportsIndex

import numpy as np

from kvkit.cache.layers.positions import (
    Rearrangement,
    RopeLike,
    RowPositions,
    check_rotation,
    moves_alike,
    pieces_array,
    rotation_of,
)
from kvkit.checks.values import integer
from kvkit.errors import argument_error, describe
from kvkit.rope import NO_ROTATION


class Join(NamedTuple):
    """Plans a join, which is checked and not yet done."""

    source: Any  # the layer whose rows are added
    row: int  # they go before this row, counted from the layer's `span.first`
    new: int  # how many rows are added
    moved: Rearrangement  # the positions of all rows afterwards


def check_alike(layer: Any, other: Any) -> None:
    """Raise unless the rows of two layers may be in one."""
    if other is layer:
        wanted = "another layer (copy.deepcopy of it, to have its tokens twice)"
        raise argument_error("other", wanted, "the layer itself")
    for each in (layer, other):
        if not hasattr(each, "_why_not_joined"):
            raise argument_error("other", "a layer", describe(each))
        if each._why_not_joined:
            raise argument_error(each.name, "rows that can be joined", each._why_not_joined)
    if kind_of(layer) != kind_of(other):
        raise argument_error("other", f"a layer of one kind and format, {kind_of(layer)}", kind_of(other))
    for each in (layer, other):
        if each._record_past:
            raise argument_error(each.name, "no past that is recorded (crop first)", "append")
    if other.window is not None and other.span.oldest:
        wanted = f"all tokens of a window of {other.window}, before the first has left it"
        raise argument_error("other", wanted, f"{other.span.oldest} that have left it")
    if layer.store is not None and other.store is not None:
        own, theirs = layer.store.geometry, other.store.geometry
        if own != theirs:
            raise argument_error("other", f"rows of {own}", f"rows of {theirs}")


def kind_of(layer: Any) -> tuple[str, dict[str, Any]]:
    """Return a layer's class and arguments, without the room that it has."""
    about = {name: value for name, value in layer._describe().items() if name != "max_cache_len"}
    return type(layer).__name__, about


def plan_join(layer: Any, now: RowPositions, other: Any, at: SupportsIndex | None, rope: RopeLike) -> Join:
    """Plan to put the rows of `other` before the token of position `at`; None: behind all tokens.

    `now` are the positions of the layer's rows.
    """
    check_alike(layer, other)
    stores = [each.store for each in (layer, other) if each.store is not None]
    dim = stores[0].geometry.key_dim if stores else None
    rotation = rotation_of(rope, layer.rope, dim, now.shifted)
    rotation = common_rotation(rotation, other.rope)
    count, length = other.stored_tokens, other.get_seq_length()
    theirs = RowPositions.restored(
        other.positions, pieces_array(other._pieces(other.span.oldest)), length, count
    )
    place, row, moved = join_positions(now, theirs, at, rotation)
    if layer.window is not None and place < now.length:
        raise argument_error("at", f"{now.length}, the end of a layer with a window", at)
    layer._check_room(layer.span.length, count)
    return Join(other, row, count, moved)


def common_rotation(own: RopeLike, other: RopeLike) -> RopeLike:
    """Return how the keys of both are rotated; raise if they are not rotated alike."""
    if own is not None and other is not None and not moves_alike(own, other):
        raise argument_error("rope", f"one rotation of all keys, {own}", f"{other} of the other ones")
    return other if own is None else own


def join_positions(
    now: RowPositions, theirs: RowPositions, at: SupportsIndex | None, rope: RopeLike
) -> tuple[int, int, Rearrangement]:
    """Return (the position and the row before which other rows go, the positions of all rows afterwards)."""
    place = now.length if at is None else integer("at", at, 0, now.length)
    row, new = int(np.searchsorted(now.positions, place)), theirs.length
    if (place and len(theirs.positions)) or (new and row < len(now.positions)):
        check_rotation(rope)
    turns = int(rope != NO_ROTATION)
    places = now.positions[:row], theirs.positions + place, now.positions[row:] + new
    shifts = now.shifts[:row], theirs.shifts + place * turns, now.shifts[row:] + new * turns
    after = RowPositions(np.concatenate(places), np.concatenate(shifts), now.length + new)
    kept = np.ones(len(after.positions), np.bool_)
    return place, row, Rearrangement(kept, after, rope).in_few_pieces()
