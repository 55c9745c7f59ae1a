"""Prepare attention of one query token for each sequence over Ascend's cache in blocks.

An entry of the table is a sequence, or a key head of one. Queries and outputs are viewed as [entries, heads
of an entry, dim]; arrays whose strides do not allow this are copied before or after attention.
"""

import numpy as np

from kvkit.checks.ascend import attention as checked
from kvkit_cuda.attention import bias
from kvkit_cuda.calls import arrays, attention
from kvkit_cuda.calls.tables import DeviceTables
from kvkit_cuda.copy import pieces


def prepare(call, outputs, owners, stream):
    """Return the launches of a checked call; add the owners of their memory to `owners`."""
    before: list = []  # launches that copy inputs, and write scores to add
    after: list = []  # launches that copy outputs

    def new(shape, dtype):
        return arrays.allocated(shape, dtype, owners, stream)

    def move(source, target, launches):
        rows = np.array([[0, 0, source.shape[0] * source.shape[1]]])
        launches += pieces.prepare([(source, target)], rows, stream)

    query, contexts = call.query, checked.folded_shape(call)
    if not folds(query, call):
        source, query = query, new(query.shape, query.dtype)
        move(source[None], query[None], before)
    targets = []
    for array in outputs:
        rows, target = array if array.ndim == 3 else array[..., None], array
        if not folds(rows, call):
            target = new(array.shape, array.dtype)
            move(target.reshape(1, *rows.shape), rows[None], after)
        targets.append(target.reshape(*contexts, *array.shape[2:]))
    out, lse = targets[0], targets[1] if len(targets) > 1 else None
    tables, weights = DeviceTables(call.steps, lasting=False), call.weights
    owners.append(tables)
    if call.row_bias is not None:
        offsets, blocks = call.row_bias
        scores = new((*blocks.shape, offsets.shape[1]), np.dtype(np.float32))
        weights = checked.with_bias(weights, scores)
    query = query.reshape(*contexts, query.shape[2])
    given = call.decoding, weights, tables.steps.rows, stream
    attend = attention.prepare(query, out, lse, call.context, tables, *given)
    if call.row_bias is not None and scores.size:
        (table,) = tables.of(("table",), stream)
        before.append(bias.prepare(table, call.context.pages[0], offsets, weights.scale, scores, stream))
    return [*before, *attend, *after]


def folds(array, call):
    """Return whether [B, heads, dim] can be viewed as [entries, heads of an entry, dim]."""
    batch, heads, dim = array.shape
    together = call.weights.sink_sequences == 1 or batch < 2 or array.strides[0] == heads * array.strides[1]
    return together and (dim < 2 or array.strides[2] == array.itemsize)
