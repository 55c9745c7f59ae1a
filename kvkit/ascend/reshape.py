"""Store new keys and values in the slots of a cache in blocks, whole or compressed per head."""

from __future__ import annotations

from typing import Literal

from numpy.typing import ArrayLike

from kvkit import cpu
from kvkit.calls.targets import CallTarget, operator
from kvkit.checks.arguments import BlockStore, Windows
from kvkit.checks.ascend.reshape import checked_reshape
from kvkit.checks.values import one_piece
from kvkit.operators.compression import CompressType
from kvkit.typed import Array, Values


@operator
def reshape_and_cache(
    on: CallTarget,
    key: Array,
    value: Values,
    key_cache: Array,
    value_cache: Values,
    slot_mapping: ArrayLike,
    *,
    compress_type: CompressType | int | str = CompressType.UNDEFINED,
    wins: ArrayLike | None = None,
    seq_lens: ArrayLike | None = None,
    offset_index: ArrayLike | None = None,
    cache_format: Literal["ND", "NZ"] = "ND",
    empty_window: Literal["copy", "skip"] = "copy",
) -> tuple[Array, Values]:
    """Store packed keys and values in the slots of a cache in blocks, whole or compressed per head.

    Slot s is row ``s % block_size`` of block ``s // block_size``. A negative slot stores nothing.

    Parameters
    ----------
    key, value : ndarray, shapes [num_tokens, num_head, Dk] and [num_tokens, num_head, Dv]
        float32, float16, bfloat16 or int8; the tokens of one sequence after those of another. `value` and
        `value_cache` may both be None; then only keys are stored.
    key_cache, value_cache : ndarray
        [num_blocks, block_size, num_head, D]; for NZ [num_blocks, num_head * D / n0, block_size, n0], where
        n0 elements are 32 bytes; for compressed modes [num_blocks, block_size, 1, D]. The dtypes are those of
        `key` and `value`, and strides are free. No two of the four arrays may overlap. The caches change in
        place; slots that are not in `slot_mapping` keep their bytes.
    slot_mapping : ndarray of int32 or int64
        The slot of each token. In compressed modes, entry ``b * num_head + h`` is the slot of the first row
        of sequence b and head h, whose other rows take the slots after it.
    compress_type : CompressType
        UNDEFINED (0), KVHEAD (1), KVHEAD_ROPE (2) or OMNI (3).
    wins : ndarray of int32 or int64, shape [B * num_head], optional
        A number of tokens of a sequence. KVHEAD keeps its last `wins` tokens. KVHEAD_ROPE stores the mean of
        `wins` tokens from `offset_index` on in their place. OMNI drops these tokens.
    seq_lens : ndarray of int32 or int64, shape [B], optional
        The number of tokens of each sequence, for compressed modes.
    offset_index : ndarray of int32 or int64, shape [B * num_head], optional
        The first token that is averaged or dropped, counted from the start of its sequence; -1 for none.
    cache_format : str
        "ND" or "NZ".
    empty_window : str
        What KVHEAD stores where wins is 0: "copy" for all tokens, "skip" for none.

    Returns
    -------
    key_cache, value_cache : ndarray
        The arrays given.

    Raises
    ------
    KvkitError
        If an argument is wrong, a slot is beyond the cache, or two tokens have one slot. Then nothing has
        been written.

    Notes
    -----
    Ascend ATB ReshapeAndCache. Bits are copied unchanged. A mean is a sum in float32, token by token, which
    is divided once and rounded once to the dtype of the data.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> cache = np.zeros((2, 4, 1, 1), np.float16)
    >>> key = np.array([1, 2, 3], np.float16).reshape(3, 1, 1)
    >>> kvkit.ascend.reshape_and_cache(key, None, cache, None, np.array([5, -1, 0]))[1]
    >>> cache[:, :, 0, 0]
    array([[3., 0., 0., 0.],
           [0., 1., 0., 0.]], dtype=float16)
    """
    arguments = BlockStore(
        key, value, key_cache, value_cache, slot_mapping, compress_type=compress_type,
        windows=Windows(wins, seq_lens, offset_index), cache_format=cache_format, empty_window=empty_window,
    )  # fmt: skip
    call = on.check(checked_reshape, arguments)
    if len(call.pieces):
        packed = [  # a compressed mode stores the heads of a token in different rows
            one_piece(tokens) if call.mode else tokens.reshape(len(tokens), *cache.shape[2:])
            for tokens, cache in zip(call.tokens, call.caches, strict=True)
        ]
        rows = call.caches[0].shape[1]
        prepare = cpu.copy.pieces.prepare_pieces
        cpu.launches.start(prepare("store", packed, call.caches, call.pieces, rows, call.averaged))
    return key_cache, value_cache
