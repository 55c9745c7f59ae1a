"""Check calls of the operators on compressed caches: rows that pool tokens, their slots, outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from kvkit.checks.arguments import CompressArguments, SlotArguments
from kvkit.checks.index_tensors import index
from kvkit.checks.outputs import Results
from kvkit.checks.recurrent import checked_slots, checked_starts, checked_state
from kvkit.checks.values import (
    check_apart,
    check_array,
    checked_format,
    flag,
    integer,
    named_arrays,
    one_piece,
    positive_number,
)
from kvkit.errors import argument_error, describe
from kvkit.formats import FLOATS, Element
from kvkit.formats.elements import FLOAT32
from kvkit.models.rotations import NO_ROTATION
from kvkit.typed import Array

BLOCK = 64  # channels that kernels pool at a time
MOST_RATIO = 2**16
ROW_NUMBERS = np.dtype(np.int64)


class CompressCall(NamedTuple):
    """A checked call of `compress_tokens`, as kernels read it."""

    fmt: Element  # of kv and gate
    kv: Array  # [tokens, halves * dim]
    gate: Array
    ape: Array  # float32 [ratio, halves, dim rounded up to blocks]
    weight: Array  # float32 [dim rounded up to blocks]
    numbers: Array  # float32: 1 / dim, eps
    ratio: int
    state: Array  # float32 [slots, ring, 2, halves * dim]
    starts: Array  # int64 [N + 1]
    first: Array  # int64 [N]: the position of the first token of each sequence
    slots: Array  # int64 [N]: the slot of each sequence, -1 for none
    positions: Array  # int64 [tokens]
    sequence_of_token: Array  # int64 [tokens]
    sequences: Array  # int64 [rows]: the sequence of each row
    windows: Array  # int64 [rows]: the row's number in its sequence
    row_of_token: Array  # int64 [tokens]
    rope: Any  # a `Rope` of whole rows, or None
    results: Results


def rope_at_end(rope: Any, dim: int) -> Any:
    """Return a rotation of the last elements of rows of `dim`; one that begins at 0 is moved there."""
    begin = dim - rope.rotary_dim
    if begin < 0 or rope.begin not in (0, begin):
        raise argument_error("rope", f"a rotation of the last elements of {dim}", f"{rope}")
    return replace(rope, begin=begin) if rope.begin != begin else rope


def checked_compress(call: CompressArguments) -> CompressCall:
    """Check a call of `compress_tokens`."""
    fmt = checked_format("kv", call.kv, FLOATS, 2)
    if checked_format("gate", call.gate, FLOATS, 2) is not fmt or call.gate.shape != call.kv.shape:
        wanted = f"shape {call.kv.shape} of {fmt}, as kv"
        raise argument_error("gate", wanted, describe(call.gate))
    ratio, halves = integer("ratio", call.ratio, 1, MOST_RATIO), 1 + flag("overlap", call.overlap)
    eps, (tokens, width) = positive_number("eps", call.eps), call.kv.shape
    dim, rest = divmod(width, halves)
    if rest or not dim:
        wanted = f"{halves} times the elements of a row"
        raise argument_error("kv", wanted, f"shape {call.kv.shape}")
    for name, array, shape in (("ape", call.ape, (ratio, width)), ("norm_weight", call.norm_weight, (dim,))):
        checked_format(name, array, FLOATS, len(shape))
        if array.shape != shape:
            raise argument_error(name, f"shape {shape}", f"shape {array.shape}")
    check_array("state", call.state)
    ring = call.state.shape[1] if call.state.ndim == 4 else 0
    if ring < halves * ratio:
        wanted = f"shape [slots, {halves * ratio} or more tokens, 2, {width}]"
        raise argument_error("state", wanted, f"shape {call.state.shape}")
    checked_state(call.state, (ring, 2, width), (FLOAT32,))
    starts = checked_starts([0, tokens] if call.starts is None else call.starts, tokens)
    count = len(starts) - 1
    if call.state_indices is None and len(call.state) != count:
        raise argument_error("state", f"{count} states, one for each sequence", len(call.state))
    given = np.arange(count) if call.state_indices is None else call.state_indices
    slots = checked_slots("state_indices", given, count, len(call.state))
    inputs = named_arrays(kv=call.kv, gate=call.gate, ape=call.ape, norm_weight=call.norm_weight)
    check_apart("state", call.state, inputs)
    inputs.append(("state", call.state))
    owner = np.repeat(np.arange(count), np.diff(starts))
    positions = checked_positions(call.positions, starts, owner, slots)
    finished = ((positions + 1) % ratio == 0) & (slots[owner] >= 0)
    rows = np.where(finished, positions // ratio, -1)
    padded = -(-dim // BLOCK) * BLOCK
    ape, weight = np.zeros((ratio, halves, padded), np.float32), np.zeros(padded, np.float32)
    ape[..., :dim], weight[:dim] = call.ape.reshape(ratio, halves, dim), call.norm_weight
    rope = None if call.rope in (None, NO_ROTATION) else rope_at_end(call.rope, dim)
    first = np.zeros(count, np.int64)
    used = np.flatnonzero(np.diff(starts))
    first[used] = positions[starts[used]]
    forms = {"rows": ((int(finished.sum()), dim), FLOAT32.dtype), "row_of_token": ((tokens,), ROW_NUMBERS)}
    return CompressCall(
        fmt, one_piece(call.kv), one_piece(call.gate), ape, weight, np.array([1 / dim, eps], np.float32),
        ratio=ratio, state=call.state, starts=starts, first=first, slots=slots, positions=positions,
        sequence_of_token=owner, sequences=owner[finished], windows=rows[finished], row_of_token=rows,
        rope=rope, results=Results(forms, inputs),
    )  # fmt: skip


def checked_positions(positions: Any, starts: Array, owner: Array, slots: Array) -> Array:
    """Return the position of each token: from 0 on, or consecutive ones from any on in each sequence."""
    order = np.arange(len(owner)) - starts[owner]
    if positions is None:
        return order
    checked = index("positions", positions, 1, len(owner))
    begins = checked[starts[owner]] if len(owner) else checked
    wrong = np.flatnonzero((slots[owner] >= 0) & ((checked != begins + order) | (begins < 0)))
    if len(wrong):
        at = int(wrong[0])
        wanted = f"consecutive positions from 0 or more on in sequence {int(owner[at])}"
        raise argument_error("positions", wanted, f"{int(checked[at])} at token {at}")
    return np.where(slots[owner] >= 0, checked, 0)


def checked_compressed_slots(call: SlotArguments) -> tuple[Array, Results]:
    """Check a call of `compressed_slots`; return the slots, and the rules for `out`."""
    positions = index("positions", call.positions)
    tables = index("block_tables", call.block_tables, 2)
    page = integer("page_size", call.page_size, 1, 2**31)
    ratio = integer("ratio", call.ratio, 1, MOST_RATIO)
    if call.sequence_of_token is None:
        if len(tables) != 1:
            wanted = f"the sequence of each token, one of {len(tables)}"
            raise argument_error("sequence_of_token", wanted, "None")
        owner = np.zeros(len(positions), np.int64)
    else:
        owner = index("sequence_of_token", call.sequence_of_token, 1, len(positions))
    finished = np.flatnonzero((positions >= 0) & ((positions + 1) % ratio == 0))
    of, rows = owner[finished], positions[finished] // ratio
    wrong = np.flatnonzero((of < 0) | (of >= len(tables)))
    if len(wrong):
        got = f"{int(of[wrong[0]])} at token {int(finished[wrong[0]])}"
        raise argument_error("sequence_of_token", f"sequences from 0 to {len(tables) - 1}", got)
    columns = rows // page
    inside = columns < tables.shape[1]
    pages = np.full(len(rows), -1)
    pages[inside] = tables[of[inside], columns[inside]]
    wrong = np.flatnonzero(pages < 0)
    if len(wrong):
        row, sequence = int(rows[wrong[0]]), int(of[wrong[0]])
        raise argument_error("block_tables", f"a page for row {row} of sequence {sequence}", "none")
    slots = np.full(len(positions), -1)
    slots[finished] = pages * page + rows % page
    return slots, Results({"slots": (slots.shape, ROW_NUMBERS)}, [], alone=True)


def checked_rotation_back(output: Any, positions: Any, rope: Any) -> tuple[Array, Any, Results]:
    """Check a call of `rope_back`; return positions [tokens], the rotation of heads, the rules for `out`."""
    checked_format("output", output, FLOATS, 3)
    if rope is None or isinstance(rope, str):
        raise argument_error("rope", "a kvkit.Rope, or its arguments by name", describe(rope))
    results = Results({"rotated": (output.shape, output.dtype)}, [("output", output)], alone=True)
    return index("positions", positions, 1, len(output)), rope_at_end(rope, output.shape[2]), results
