"""Rotary position embedding: queries and keys are rotated in calls that are prepared once for each form."""

from __future__ import annotations

import numpy as np

from kvkit import cpu
from kvkit.calls import launch
from kvkit.calls.prepared import PreparedCall, PreparedCalls, form_of, is_pair, is_unaligned
from kvkit.checks.arguments import PackedPositions, RotaryArguments, StaticPositions
from kvkit.checks.positions import checked_rotation, positions_of
from kvkit.checks.tensors import one_piece
from kvkit.runtime import result_pool
from kvkit.runtime.addresses import places_of
from kvkit.typed import Array, Pair

ARRAYS = "query", "key", "turned query", "turned key"
ROTATED = 2  # of them are written
FEW = 64  # forms of calls that are remembered

# By their form, with the starts and first positions of their sequences. A call takes its own away as long as
# it lasts.
rotations: PreparedCalls[tuple[PreparedCall, Array, Array]] = PreparedCalls(FEW)


def rotate(
    query: Array,
    key: Array,
    where: StaticPositions | PackedPositions,
    arguments: RotaryArguments,
    out: Pair | None,
) -> Pair:
    """Rotate queries and keys by the angles of their positions."""
    arrays, form = (query, key), None
    if (out is None or is_pair(out)) and arguments.cos is None and arguments.sin is None:
        form = form_of((*arrays, *(out or ())), arguments)
    if form and out:
        places = zip(places_of(arrays), places_of(out), strict=True)
        form += is_unaligned(out), *(here == there for here, there in places)
    prepared = rotations.take(form)
    if prepared:
        call, *own = prepared
        positions = positions_of(query, where)
        results = out or (
            result_pool.empty(query.shape, query.dtype),
            result_pool.empty(key.shape, key.dtype),
        )
        if len(own[0]) == len(positions[0]):
            for ours, theirs in zip(own, positions, strict=True):
                np.copyto(ours, theirs)
            if call.run((*arrays, *results)):
                rotations.keep(form, prepared)
                return results[0], results[1]
    checked = checked_rotation(query, key, where, arguments)
    rotated_query, rotated_key = checked.results.arrays(out)
    if checked.starts[-1]:
        rotation = launch.rotation_launch(checked, (rotated_query, rotated_key))
        cpu.launches.start(rotation)
        if form and all(one_piece(array) is array for array in arrays):
            repeated = dict(zip(ARRAYS, (*arrays, rotated_query, rotated_key), strict=True))
            call = PreparedCall([rotation], repeated, ROTATED)
            rotations.keep(form, (call, checked.starts, checked.first))
    return rotated_query, rotated_key
