"""New keys and values into the slots of a cache in blocks, on the device."""

import numpy as np

from kvkit import checks
from kvkit.checks.ascend import reshape, tensors
from kvkit.compression import CompressType


def reshape_and_cache(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    *,
    compress_type=CompressType.UNDEFINED,
    wins=None,
    seq_lens=None,
    offset_index=None,
    cache_format="ND",
    empty_window="copy",
    stream=None,
):
    """`kvkit.ascend.reshape_and_cache` on a CUDA device: the same arguments, results, checks and bits.

    Parameters
    ----------
    key, value, key_cache, value_cache
        As the twin has them, each an array of the current device (with the CUDA array interface or DLPack;
        used where it is) or of numpy (copied to the device, and back if it changes).
    slot_mapping, wins, seq_lens, offset_index
        As the twin has them. They are best on the host, where they are checked: the call waits for those that
        are on the device.
    compress_type, cache_format, empty_window
        As the twin has them.
    stream : optional
        The stream to work on: of numba, torch, CuPy or cuda.core, or its address. The call does not wait for
        it, unless arrays are copied.

    Returns
    -------
    key_cache, value_cache
        The arrays given.

    Raises
    ------
    DeviceError
        If there is no device.
    KvkitError
        If an argument is wrong; then nothing has changed.

    Examples
    --------
    >>> import numpy as np, kvkit_cuda
    >>> cache = np.zeros((2, 4, 1, 1), np.float16)
    >>> key = np.array([1, 2, 3], np.float16).reshape(3, 1, 1)
    >>> kvkit_cuda.ascend.reshape_and_cache(key, None, cache, None, np.array([5, -1, 0]))[1]
    >>> cache[:, :, 0, 0]
    array([[3., 0., 0., 0.],
           [0., 1., 0., 0.]], dtype=float16)
    """
    from kvkit_cuda.calls import arrays
    from kvkit_cuda.ground import device
    from kvkit_cuda.moves import means, pieces

    device.require()
    stream = device.stream(stream)
    names, given = ("key", "value", "key_cache", "value_cache"), (key, value, key_cache, value_cache)
    here = [arrays.operand(name, array, stream) for name, array in zip(names, given, strict=True)]
    windows = {"wins": wins, "seq_lens": seq_lens, "offset_index": offset_index}
    call = reshape.checked(
        here[0].seen,
        here[1].seen,
        here[2].seen,
        here[3].seen,
        arrays.host("slot_mapping", slot_mapping, stream),
        compress_type=compress_type,
        cache_format=cache_format,
        empty_window=empty_window,
        **{name: arrays.host(name, index, stream) for name, index in windows.items()},
    )
    there = [operand.moved(stream) for operand in here if operand.seen is not None]
    tokens, caches = there[: len(call.tokens)], there[len(call.tokens) :]
    pairs = [
        (blocks_of(packed.seen, call.mode), tensors.rows(cache.seen, cache_format))
        for packed, cache in zip(tokens, caches, strict=True)
    ]
    plain, averaged = moves_of(call)
    start = pieces.prepare(pairs, plain, stream), means.prepare(pairs, averaged, call.averaged, stream)
    for launch in start:  # nothing has been written so far, and nothing can fail any more
        launch()
    for mine, copy in zip(here[2:], caches, strict=False):
        mine.take(copy, stream)
    return key_cache, value_cache


def blocks_of(tokens, mode):
    """Packed tokens [tokens, heads, dim] as one block; compressed, a block for each head."""
    return tokens.transpose(1, 0, 2)[:, :, None] if mode else tokens[None]


def moves_of(call):
    """(plain pieces, means), as kernels take them."""
    slots, found = checks.slots, call.pieces
    source = found[:, slots.HEAD] * len(call.tokens[0]) + found[:, slots.TOKEN]
    moves = np.stack([source, found[:, slots.SLOT], found[:, slots.COUNT]], axis=1)
    averaged = found[:, slots.MEAN] == 1
    return moves[~averaged], moves[averaged]
