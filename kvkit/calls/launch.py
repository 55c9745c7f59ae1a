"""From checked calls to launches on the CPU; what comes back is new, or what is given as `out`."""

import numpy as np

from kvkit import cpu
from kvkit.checks.tensors import one_piece

COPIED_BYTES = 2**20


def arguments(given):
    """The arguments of an operator but for its outputs: its `locals()`, before anything else has a name."""
    given = dict(given)  # which a tracer may add to
    given.pop("self", None)
    given.pop("out", None)
    return given


def transfers(call, made):
    """The launches of a checked call of `key_value_cache`."""
    store = cpu.copy.transfer.store(call.current_key, call.current_value, call.layer, call.steps)
    return store, cpu.copy.transfer.load(*made, call.layer, call.steps, call.repeat)


def attend(call, out):
    """Attend, to a cache once new tokens are appended to it, and return the results as operators do."""
    made = call.results.taken(out)
    cpu.launches.start(*attention(call, made))
    return returned(made)


def attention(call, made):
    """The launches of a checked call of attention."""
    out, lse = (*made, None)[:2]
    attention = cpu.attention.prepare.prepare(
        call.query, out, lse, call.context, call.steps, call.decoding, call.weights
    )
    if call.layer is None:
        return (attention,)
    return cpu.copy.transfer.store(*call.current, call.layer, call.steps), attention


def append_to_pools(call):
    """Store tokens in pools of pages: bits as they are, in one launch, or as codes."""
    moved = [side for side in call.sides if side.packed == side.stored]
    coded = [cpu.copy.pieces.encode(side, call.pieces) for side in call.sides if side.packed != side.stored]
    if moved:
        arrays = [side.tokens for side in moved], [side.pool for side in moved]
        coded.append(cpu.copy.pieces.prepare("store", *arrays, call.pieces, moved[0].pool.shape[1]))
    cpu.launches.start(*coded)


def returned(made):
    """One result, or a tuple of several."""
    return made if len(made) > 1 else made[0]


def rotation(call, made):
    """The launch of a checked call of `rotary_position_embedding` that has tokens."""
    moves = tuple(zip(map(one_piece, (call.query, call.key)), made, strict=True))
    tables = call.tables and np.array(call.tables, np.float32)
    how = call.turned, call.bypass_key, call.halves, tables, call.scaling
    return cpu.positions.rotary.prepare(call.fmt.name, moves, call.starts, call.first, *how)


def alibi(call, out):
    """Write a mask."""
    (out,) = call.results.taken(out)
    target = out if out.ndim == 4 else out[None]
    if out.size:
        tokens = call.starts, call.kvstarts
        cpu.launches.start(
            cpu.positions.alibi.prepare(
                target, call.fmt.name, *tokens, call.place, call.element, call.padding
            )
        )
    return out


def copy_blocks(source, target, src, dst):
    """Copy checked blocks, some at a time: what numpy holds between stays near the core."""
    some = max(1, COPIED_BYTES * len(source) // max(source.nbytes, 1))
    for i in range(0, len(src), some):
        target[dst[i : i + some]] = source[src[i : i + some]]
