"""Prepare attention of one query token for each sequence over Ascend's cache in blocks.

An entry of the table is a sequence, or a key head of one. Queries and outputs are viewed as [entries, heads
of an entry, dim]; arrays whose strides do not allow this are copied before or after attention.
"""

import numpy as np

from kvkit.checks import pools
from kvkit.checks.ascend import attention as twin
from kvkit.checks.values import element_step
from kvkit_cuda.attention import bias
from kvkit_cuda.calls import arrays, attention
from kvkit_cuda.calls.tables import Tables
from kvkit_cuda.copy import pieces
from kvkit_cuda.device_runtime import host


def prepare(call, outputs, owners, stream):
    """Return the launches of a checked call; add the owners of their memory to `owners`."""
    before: list = []
    after: list = []

    def new(shape, dtype):
        owners.append(host.empty(max(int(np.prod(shape)), 1), dtype, stream))
        return arrays.addressed(host.address(owners[-1]), shape, None, dtype)

    def move(source, target, launches):
        rows = np.array([[0, 0, source.shape[0] * source.shape[1]]])
        launches += pieces.prepare([(source, target)], rows, stream)

    query, caches, entries = call.query, call.caches, twin.folded_shape(call)
    if not folds(query, call):
        source, query = query, new(query.shape, query.dtype)
        move(source[None], query[None], before)
    if uneven(caches):
        sources, caches = caches, [new(array.shape, array.dtype) for array in caches]
        for source, target in zip(sources, caches, strict=True):
            move(source, target, before)
    made = []
    for array in outputs:
        rows = array if array.ndim == 3 else array[..., None]
        made.append(array)
        if not folds(rows, call):
            made[-1] = new(array.shape, array.dtype)
            move(made[-1].reshape(1, *rows.shape), rows[None], after)
    made = [array.reshape(*entries, *array.shape[2:]) for array in made]
    out, lse = made[0], made[1] if len(made) > 1 else None
    tables, weights = Tables(twin.entry_steps(call, caches), lasting=False), call.weights
    owners.append(tables)
    offset = call.razor_offset
    if offset is not None:
        scores = new((len(call.lengths), twin.context_rows(call)), np.dtype(np.float32))
        weights = twin.with_bias(weights, scores)
    query = query.reshape(*entries, query.shape[2])
    context = pools.context_of(call.fmt, *caches)
    given = len(call.lengths), weights, tables.steps.rows, stream
    attend = attention.prepare(query, out, lse, context, tables, *given)
    if offset is not None and scores.size:
        (table,) = tables.of(("table",), stream)
        before.append(
            bias.prepare(table, pools.place_of(caches[0]).page, offset, weights.scale, scores, stream)
        )
    return [*before, *attend, *after]


def uneven(caches):
    """Return whether caches must be copied, because one table cannot address the rows of both."""
    key, value = map(pools.place_of, caches)
    return any(map(element_step, caches)) or key.step != 1 or key[1:] != value[1:]


def folds(array, call):
    """Return whether [B, heads, dim] can be viewed as [entries, heads of an entry, dim]."""
    batch, heads, dim = array.shape
    together = call.per_sequence == 1 or batch < 2 or array.strides[0] == heads * array.strides[1]
    return together and (dim < 2 or array.strides[2] == array.itemsize)
