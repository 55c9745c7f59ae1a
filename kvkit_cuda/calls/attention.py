"""From a checked call of attention to its launches: the record, and which kernel takes it."""

import numpy as np

from kvkit_cuda.attend import decode, plain, prefill, task

KERNELS = (decode, prefill, plain)  # the first one that suits a call takes it; the last one suits any


def prepare(query, out, lse, context, tables, decoding, weights, stream):
    """Launches that compute attention into `out` and, unless None, `lse`; all arrays lie on the device.

    A kernel is a module with `suits(record, context, steps, most_rows)` and `prepare(record, context, tables,
    most_rows, stream)`, where `most_rows` is the number of query heads of new tokens that share a key head in
    some sequence. After the first call of its form a call with these `tables` copies and allocates nothing.
    """
    steps = tables.steps
    record = task.task(query, out, lse, context, steps.page_size, decoding, weights)
    most_rows = int(np.diff(steps.seqstarts).max(initial=0)) * record.group
    kernel = next(kernel for kernel in KERNELS if kernel.suits(record, context, steps, most_rows))
    return kernel.prepare(record, context, tables, most_rows, stream) if most_rows else []
