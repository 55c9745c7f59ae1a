"""Rotary position embedding: queries and keys turned, in calls that are prepared once for each form."""

import numpy as np

from kvkit import cpu
from kvkit.calls import launch
from kvkit.calls.repeats import Guarded, Repeats, form, is_pair, unaligned
from kvkit.checks import positions
from kvkit.checks.tensors import one_piece
from kvkit.runtime import result_pool

ARRAYS = "query", "key", "turned query", "turned key"
TURNED = 2  # of them are written
FEW = 64  # forms of calls that are remembered

calls = Repeats(FEW)  # by their form; one that is made is taken away as long as it lasts


def static(given, out):
    """`rotary_position_embedding` of arguments by name, for sequences of one length."""
    where = {name: given[name] for name in ("query", "start_pos", "pad_len")}
    return rotate(given, out, where, positions.static_turn, positions.static_positions)


def dynamic(given, out):
    """The same for packed ones."""
    where = {name: given[name] for name in ("query", "seqstarts", "start_pos", "max_seqlen")}
    return rotate(given, out, where, positions.dynamic_turn, positions.dynamic_positions)


def rotate(given, out, where, checked, positions_of):
    """Turn queries and keys; `where` has the arguments that positions come from."""
    arrays, known = (given["query"], given["key"]), None
    if out is None or is_pair(out):
        attributes = tuple(given.values())[1 + len(where) :]  # which tables of cosines make unhashable
        known = form((*arrays, *(out or ())), attributes)
    if known and out:
        address = cpu.launches.address
        known += unaligned(out), *(address(a) == address(b) for a, b in zip(arrays, out, strict=True))
    prepared = calls.pop(known, None)
    if prepared:
        guarded, *kept = prepared
        found = positions_of(**where)
        made = out or [result_pool.empty(array.shape, array.dtype) for array in arrays]
        if len(kept[0]) == len(found[0]):
            for ours, numbers in zip(kept, found, strict=True):
                np.copyto(ours, numbers)
            if guarded.run((*arrays, *made)):
                calls.keep(known, prepared)
                return made[0], made[1]
    call = checked(**given)
    made = call.results.taken(out)
    if call.starts[-1]:
        turn = launch.rotation(call, made)
        cpu.launches.start(turn)
        if known and all(one_piece(array) is array for array in arrays):
            repeated = dict(zip(ARRAYS, (*arrays, *made), strict=True))
            calls.keep(known, (Guarded([turn], repeated, TURNED), call.starts, call.first))
    return made
