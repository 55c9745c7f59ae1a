"""From checked calls to launches on the CPU; what comes back is new, or what is given as `out`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvkit import cpu
from kvkit.checks.attention import AttentionCall
from kvkit.checks.key_value_cache import TransferCall
from kvkit.checks.paged import PoolAppend
from kvkit.checks.positions import AlibiCall, RotationCall
from kvkit.checks.tensors import one_piece
from kvkit.typed import Array, Attended, Pair

COPIED_BYTES = 2**20


def transfer_launches(call: TransferCall, key: Array, value: Array) -> tuple[Any, Any]:
    """Return the launches of a checked call of `key_value_cache`."""
    store = cpu.copy.transfer.store(call.current_key, call.current_value, call.layer, call.steps)
    return store, cpu.copy.transfer.load(key, value, call.layer, call.steps, call.repeat)


def attend(call: AttentionCall, out: Array | Pair | None) -> Attended:
    """Attend, after an append if the call has a cache, and return the results as operators do."""
    results = call.results.arrays(out)
    cpu.launches.start(*attention_launches(call, results))
    return one_or_all(results)


def attention_launches(call: AttentionCall, results: Sequence[Array]) -> tuple[Any, ...]:
    """Return the launches of a checked call of attention."""
    out, lse = (*results, None)[:2]
    attend = cpu.attention.prepare.prepare_attention(
        call.query, out, lse, call.context, call.steps, call.decoding, call.weights
    )
    if call.layer is None:
        return (attend,)
    key, value = call.current
    return cpu.copy.transfer.store(key, value, call.layer, call.steps), attend


def one_or_all(results: tuple[Array, ...]) -> Attended:
    """Return the only result, or a tuple of several."""
    return results if len(results) > 1 else results[0]


def append_to_pools(call: PoolAppend) -> None:
    """Store tokens in pools of pages: bits as they are, in one launch, or as codes."""
    if not len(call.pieces):
        return
    moved = [side for side in call.sides if side.packed == side.stored]
    launches = [
        cpu.copy.pieces.encode(side, call.pieces) for side in call.sides if side.packed != side.stored
    ]
    if moved:
        arrays = [side.tokens for side in moved], [side.pool for side in moved]
        launches.append(cpu.copy.pieces.prepare_pieces("store", *arrays, call.pieces, moved[0].pool.shape[1]))
    cpu.launches.start(*launches)


def rotation_launch(call: RotationCall, results: Sequence[Array]) -> Any:
    """Return the launch of a checked call of `rotary_position_embedding` that has tokens."""
    moves = tuple(zip(map(one_piece, (call.query, call.key)), results, strict=True))
    tables = call.tables and np.array(call.tables, np.float32)
    how = call.rotated, call.bypass_key, call.halves, tables, call.scaling
    return cpu.positions.rotary.prepare_rotary(call.fmt.name, moves, call.starts, call.first, *how)


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


def copy_blocks(source: Array, target: Array, src: Array, dst: Array) -> None:
    """Copy checked blocks, some at a time: what numpy holds between stays near the core."""
    some = max(1, COPIED_BYTES * len(source) // max(source.nbytes, 1))
    for i in range(0, len(src), some):
        target[dst[i : i + some]] = source[src[i : i + some]]
