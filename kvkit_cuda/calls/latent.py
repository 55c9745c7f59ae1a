"""Prepare the launches of checked calls on latent caches.

Kernels attend to floats in one pool in place, store rows, and decode rows of 656 bytes into a pool of floats.
Other rows are joined, chosen or decoded on the host, and then copied to the device.
"""

from typing import Any

import numpy as np

from kvkit.calls.latent import gather_rows, stored_parts
from kvkit.checks.contexts import Contexts
from kvkit.checks.latent import attention_to_rows
from kvkit.checks.records import Context, Side, StepIndex
from kvkit.formats import BY_NAME
from kvkit.layouts.tables import starts_of
from kvkit_cuda.calls import arrays, attention
from kvkit_cuda.calls.tables import DeviceTables
from kvkit_cuda.copy import pieces, transfer

GROUP, SCALE_BYTES = 128, 4  # in rows of 656 bytes: codes that share a scale, bytes of a scale


class QueryParts(arrays.Operand):
    """The latent and rotary parts of queries on the host, which are one array on the device."""

    def moved(self, stream, contents=True):
        return arrays.Operand(np.concatenate(self.seen, axis=2), False, self.owner).moved(stream, contents)


def operand(name, given, stream):
    """Return the operand of an array, or of the two parts of queries, as the checks see them."""
    if name != "query" or not isinstance(given, (tuple, list)):
        return arrays.operand(name, given, stream)
    parts = [arrays.operand(f"query[{i}]", part, stream).read(stream) for i, part in enumerate(given)]
    seen: Any = parts if isinstance(given, list) else tuple(parts)
    return QueryParts(seen, False, parts, *given[:1])


def host_only(operands, values):
    """Return the names of arrays that the host reads: all if kernels cannot read the rows, else none."""
    floats = values["rope_cache"] is values["format"] is values["indices"] is None
    coded = values["extra"] is None and are_decoded(operands["latent"].seen, values["format"])
    return () if floats or coded else tuple(operands)


def are_decoded(rows, format):
    """Return whether kernels can decode rows: of 656 bytes, aligned, in blocks that are whole rows apart."""
    if not isinstance(rows, np.ndarray) or rows.ndim < 3 or str(format).partition(":")[0] != "ds_mla":
        return False
    block, row = rows.strides[:2]
    return row > 0 and block % row == 0 and (rows.ctypes.data | row) % SCALE_BYTES == 0


def attend(placed):
    """Return the launches of `mla_attention`."""
    call = placed.call
    whole, launches = gathered(placed) if call.attention is None else (call.attention, [])
    if call.attention is not None:
        whole = whole._replace(weights=whole.weights._replace(sinks=call.sinks))
    out, lse = (*placed.outputs, None)[:2]
    launches = [*launches, *attend_whole(placed, whole, out, None if call.sinks_last else lse)]
    if call.sinks_last and lse is not None:  # the lse without sinks needs a second attention
        scratch = uploaded(placed, np.zeros(out.shape, out.dtype))
        plain = whole._replace(weights=whole.weights._replace(sinks=None))
        launches += attend_whole(placed, plain, scratch, lse)
    return launches


def attend_whole(placed, whole, out, lse):
    """Return the launches of attention to pages."""
    tables = DeviceTables(whole.steps, lasting=False)
    placed.owners.append(tables)
    given = whole.decoding, whole.weights, whole.steps.rows, placed.stream
    return attention.prepare(whole.query, out, lse, whole.context, tables, *given)


def gathered(placed):
    """Return attention to rows gathered in the dtype of the queries, and the launches that gather them."""
    call = placed.call
    if call.chosen:  # each token is a sequence of its own: its rows of one pool, then of the other
        tokens = range(len(call.query))
        rows = [
            (pool, slots[starts[i] : starts[i + 1]]) for i in tokens for pool, slots, starts in call.chosen
        ]
        counts = sum(np.diff(starts) for _, _, starts in call.chosen)
        query_starts = np.arange(len(call.query) + 1)
    else:
        counts, query_starts = call.contexts.lengths, call.contexts.starts
        ends = enumerate(counts.tolist())
        rows = [(call.pool, call.contexts.slots(i, np.arange(end))) for i, end in ends]
    heads, dim, dtype, launches = call.pool.heads, call.pool.dim, call.fmt.dtype, []
    if len(call.chosen) < 2 and are_decoded(call.pool.parts[0], call.pool.format):
        query, sinks = call.query, call.sinks
        slots = np.concatenate([np.zeros(0, np.int64), *(slots for _, slots in rows)])
        pool = arrays.allocated((len(slots), 1, 1, dim), dtype, placed.owners, placed.stream)
        launches = decoded(placed, call.pool, slots, pool[:, 0])
    else:
        query = uploaded(placed, call.query)
        sinks = None if call.sinks is None else uploaded(placed, call.sinks)
        found = [gather_rows(*each).reshape(-1, 1, heads, dim).astype(dtype) for each in rows]
        pool = uploaded(placed, np.concatenate([np.zeros((0, 1, heads, dim), dtype), *found]))
    causal = call.causal and not call.chosen
    kvstarts = starts_of(counts)
    contexts = Contexts(np.arange(len(pool)), kvstarts, counts, query_starts, 1, len(pool), kvstarts)
    whole = attention_to_rows(call, query, pool, contexts, causal)
    return whole._replace(weights=whole.weights._replace(sinks=sinks)), launches


def decoded(placed, pool, slots, target):
    """Return the launches that decode rows of 656 bytes into `target` [slots, 1, 576].

    The first decodes codes with their scales, the second the numbers after them. A launch copies keys and
    values; here these are the two halves of its elements.
    """
    (rows,), count, zero = pool.parts, len(slots), np.zeros(1, np.int64)
    block, row, _ = rows.strides
    row_ids = slots // pool.page_size * (block // row) + slots % pool.page_size
    ends, launches, done = np.array([0, count]), [], 0  # one sequence; elements that launches decode so far
    steps = StepIndex(
        seqstarts=ends, kvstarts=ends, start_pos=zero, load_starts=zero, table=row_ids[None], page_size=1,
        tokens=count, context=count, rows=0,
    )  # fmt: skip
    tables = DeviceTables(steps, lasting=False)
    placed.owners.append(tables)
    coded, tail = pool.dim - pool.format.tail, pool.format.tail
    scales = rows.ctypes.data + coded
    numbers = scales + coded // GROUP * SCALE_BYTES
    for at, format, scale, size in (
        (rows.ctypes.data, "e4m3", "float32", coded), (numbers, "bfloat16", None, tail)
    ):  # fmt: skip
        half = size // 2
        width = BY_NAME[format].bytes(half)
        first, second = (
            Side(at + i * width, 0, row, 0, scales + i * half // GROUP * SCALE_BYTES, 0, row)
            for i in range(2)
        )
        layer = Context(
            data_dtype=placed.call.fmt.name, cache_format=format, scale_format=scale, heads=1, dim=half,
            group=GROUP if scale else 0, value_dim=half, key_bytes=width, value_bytes=width,
            heads_adjoin=True, sides=(first, second),
        )  # fmt: skip
        key, value = (target[..., done + i * half : done + (i + 1) * half] for i in range(2))
        launches.append(transfer.load(key, value, layer, tables, 1, placed.stream))
        done += size
    return launches if count else []


def uploaded(placed, array):
    """Return a copy of an array on the device, which lives as long as the call."""
    copy = arrays.Operand(np.ascontiguousarray(array), False, None).moved(placed.stream)
    placed.owners.append(copy)
    return copy.seen


def append(placed):
    """Return the launch of `mla_append`: rows are encoded on the host, and their parts stored."""
    pool, rows, slots = placed.call
    moves = [
        pieces.byte_copy(uploaded(placed, stored)[None, :, None], part[:, :, None])
        for part, stored in zip(pool.parts, stored_parts(pool, rows), strict=True)
    ]
    where = np.stack([np.arange(len(slots)), slots, np.ones_like(slots)], axis=1)
    return pieces.launch_copies(moves, where, placed.stream) if len(slots) else []


def copy_computed(placed):
    """Return the launches that copy results of the CPU to the device, and arguments that it has changed."""
    pairs = [*zip(placed.call.arrays.values(), placed.outputs, strict=True), *placed.changed]
    launches = []
    for result, target in pairs:
        if target.size:
            source, target = (in_blocks(each) for each in (uploaded(placed, result), target))
            piece = np.array([[0, 0, target.shape[0] * target.shape[1]]])
            launches += pieces.prepare([(source, target)], piece, placed.stream)
    return launches


def in_blocks(array):
    """Return an array as [blocks, rows, heads, dim]."""
    if array.ndim > 4:
        return array.reshape(1, len(array), 1, -1)
    if array.ndim == 4:
        return array
    return array.reshape(1, len(array), *([1] * (3 - array.ndim)), *array.shape[1:])
