"""Attention of one query token a sequence over a cache in blocks, on the device."""

import functools

import numpy as np

from kvkit.checks.ascend import attention as twin


def paged_attention(
    query,
    key_cache,
    value_cache,
    block_tables,
    context_lens,
    *,
    razor_offset=None,
    softmax_scale=None,
    window=(-1, -1),
    softcap=0.0,
    sinks=None,
    return_lse=False,
    out=None,
    stream=None,
):
    """`kvkit.ascend.paged_attention` on a CUDA device: the same arguments, results and checks.

    Sums are in another order than on the CPU, so the last bits differ; they depend on no device.

    Parameters
    ----------
    query, key_cache, value_cache, razor_offset, sinks, out
        As the twin has them, each an array of the current device (with the CUDA array interface or DLPack;
        used where it is) or of numpy (copied to the device, and back if it changes).
    block_tables, context_lens
        As the twin has them. They are best on the host, where they are checked: the call waits for those that
        are on the device.
    softmax_scale, window, softcap, return_lse
        As the twin has them.
    stream : optional
        The stream to work on: of numba, torch, CuPy or cuda.core, or its address. The call does not wait for
        it, unless arrays are copied.

    Returns
    -------
    attn_output : shape [B, num_head, Dv]
        `out`, or a new array where ``query`` is: numpy's, torch's, CuPy's or else numba's.
    lse : float32, shape [B, num_head]
        With ``return_lse``, likewise.

    Raises
    ------
    DeviceError
        If there is no device.
    KvkitError
        If an argument is wrong.

    Examples
    --------
    >>> import numpy as np, kvkit_cuda
    >>> keys, values = np.zeros((2, 2, 1, 1), np.float32), np.array([7, 99, 1, 3], np.float32)
    >>> one_head = np.ones((1, 1, 1), np.float32)
    >>> table, lens = np.array([[1]]), np.array([2])
    >>> kvkit_cuda.ascend.paged_attention(one_head, keys, values.reshape(2, 2, 1, 1), table, lens)
    array([[[2.]]], dtype=float32)
    """
    from kvkit_cuda.calls import arrays, results
    from kvkit_cuda.ground import device

    device.require()
    stream = device.stream(stream)
    checked = functools.partial(
        twin.checked,
        block_tables=arrays.host("block_tables", block_tables, stream),
        context_lens=arrays.host("context_lens", context_lens, stream),
        softmax_scale=softmax_scale,
        window=window,
        softcap=softcap,
        return_lse=return_lse,
    )
    given = {"query": query, "key_cache": key_cache, "value_cache": value_cache}
    given |= {"razor_offset": razor_offset, "sinks": sinks}
    here = {name: arrays.operand(name, array, stream) for name, array in given.items()}
    call = checked(**{name: operand.seen for name, operand in here.items()})
    source = query, here["query"]
    made, returned = results.outputs(out, call.results, source, stream)

    there = {
        name: operand if operand.seen is None else operand.moved(stream) for name, operand in here.items()
    }
    copies = [result.moved(stream, contents=False) for result in made]
    call = checked(**{name: operand.seen for name, operand in there.items()})
    launches, _owners = prepare(call, there, [copy.seen for copy in copies], stream)
    for launch in launches:  # nothing has been written so far, and nothing can fail any more
        launch()
    for result, copy in zip(made, copies, strict=True):
        result.take(copy, stream)
    return returned


def prepare(call, given, outputs, stream):
    """(launches of a checked call on the device, what owns their memory)."""
    from kvkit_cuda.attend import bias
    from kvkit_cuda.calls import arrays, attention
    from kvkit_cuda.calls.tables import Tables
    from kvkit_cuda.ground import device
    from kvkit_cuda.moves import pieces

    before: list = []
    after: list = []
    owners: list = []

    def new(shape, dtype):
        owners.append(device.empty(max(int(np.prod(shape)), 1), dtype, stream))
        return arrays.addressed(device.address(owners[-1]), shape, None, dtype)

    def move(source, target, launches):
        rows = np.array([[0, 0, source.shape[0] * source.shape[1]]])
        launches.append(pieces.prepare([(source, target)], rows, stream))

    query, caches, entries = given["query"].seen, call.caches, twin.folded_shape(call)
    if not folds(query, call):
        source, query = query, new(query.shape, query.dtype)
        move(source[None], query[None], before)
    places = [twin.rows_of(array) for array in caches]
    if twin.uneven(places):
        sources, caches = caches, [new(array.shape, array.dtype) for array in caches]
        for source, target in zip(sources, caches, strict=True):
            move(source, target, before)
        places = [twin.rows_of(array) for array in caches]
    made = []
    for array in outputs:
        rows = array if array.ndim == 3 else array[..., None]
        made.append(array)
        if not folds(rows, call):
            made[-1] = new(array.shape, array.dtype)
            move(made[-1].reshape(1, *rows.shape), rows[None], after)
    made = [array.reshape(*entries, *array.shape[2:]) for array in made]
    out, lse = made[0], made[1] if len(made) > 1 else None
    tables, weights = Tables(twin.steps_of(call, places), lasting=False), call.weights
    owners.append(tables)
    offset = given["razor_offset"].seen
    if offset is not None:
        scores = new((len(call.lengths), twin.rows_of_a_context(call)), np.dtype(np.float32))
        weights = twin.biased(weights, scores)
    query = query.reshape(*entries, query.shape[2])
    context = twin.context_of(call, caches, places)
    attend = attention.prepare(query, out, lse, context, tables, len(call.lengths), weights, stream)
    if offset is not None and scores.size:
        (table,) = tables.of(("table",), stream)
        before.append(bias.prepare(table, places[0][1], offset, weights.scale, scores, stream))
    return [*before, *attend, *after], owners


def folds(array, call):
    """Whether [B, heads, dim] is [entries, heads of an entry, dim] where it lies."""
    batch, heads, dim = array.shape
    together = call.apart == 1 or batch < 2 or array.strides[0] == heads * array.strides[1]
    return together and (dim < 2 or array.strides[2] == array.itemsize)
