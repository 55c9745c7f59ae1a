"""Launches of position operators: rotations, prepared once for calls of one form, and ALiBi masks."""

from __future__ import annotations

import numpy as np

from kvkit import cpu
from kvkit.calls.prepared import PreparedCall, PreparedCalls, form_of, is_pair, is_unaligned
from kvkit.checks.arguments import PackedPositions, RotaryArguments, StaticPositions
from kvkit.checks.positions import AlibiCall, checked_rotation, positions_of
from kvkit.checks.values import one_piece
from kvkit.runtime.arrays import addresses_of, empty_result
from kvkit.typed import Array, Pair

ARRAYS = "query", "key", "rotated query", "rotated key"
ROTATED = 2  # arrays that are written: rotated queries and keys
MOST = 64  # forms of calls that are remembered

# Prepared rotations by the form of the call, each with its arrays of starts and first positions. A running
# call takes its rotation out, so that no other thread uses it.
rotations: PreparedCalls[tuple[PreparedCall, Array, Array]] = PreparedCalls(MOST)


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
        both = zip(addresses_of(arrays), addresses_of(out), strict=True)
        in_place = [source == target for source, target in both]
        form += (is_unaligned(out), *in_place)  # the launch depends on these too
    prepared = rotations.take(form)
    if prepared:
        call, starts, first = prepared  # the launch reads these arrays
        new_starts, new_first = positions_of(query, where)
        results = out or (empty_result(query.shape, query.dtype), empty_result(key.shape, key.dtype))
        if len(starts) == len(new_starts):
            np.copyto(starts, new_starts)
            np.copyto(first, new_first)
            if call.run((*arrays, *results)):
                rotations.keep(form, prepared)
                return results[0], results[1]
    checked = checked_rotation(query, key, where, arguments)
    rotated_query, rotated_key = checked.results.arrays(out)
    if checked.starts[-1]:
        moves = (one_piece(checked.query), rotated_query), (one_piece(checked.key), rotated_key)
        tables = checked.tables and np.array(checked.tables, np.float32)
        angles = checked.rotated, checked.bypass_key, checked.halves, tables, checked.scaling
        rotation = cpu.positions.rotary.prepare_rotary(
            checked.fmt.name, moves, checked.starts, checked.first, *angles
        )
        cpu.launches.start(rotation)
        if form and all(one_piece(array) is array for array in arrays):
            repeated = dict(zip(ARRAYS, (*arrays, rotated_query, rotated_key), strict=True))
            call = PreparedCall([rotation], repeated, ROTATED)
            rotations.keep(form, (call, checked.starts, checked.first))
    return rotated_query, rotated_key


def write_alibi_mask(call: AlibiCall, out: Array | None) -> Array:
    """Write a mask of ALiBi's biases, and return it."""
    (out,) = call.results.arrays(out)
    target = out if out.ndim == 4 else out[None]
    if out.size:
        tokens = call.starts, call.kvstarts
        cpu.launches.start(
            cpu.positions.alibi.prepare_alibi(
                target, call.fmt.name, *tokens, call.place, call.element, call.padding
            )
        )
    return out
