"""Compute positions, ALiBi masks and rotary embeddings for packed sequences."""

from __future__ import annotations

from typing import Literal, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from kvkit.calls.positions import rotate, write_alibi_mask
from kvkit.calls.targets import CallTarget, operator
from kvkit.checks.arguments import PackedPositions, RotaryArguments
from kvkit.checks.positions import checked_dynamic_alibi, checked_position_index, checked_rotation
from kvkit.typed import Array, Pair


@operator
def position_index(
    on: CallTarget,
    sequences: ArrayLike,
    seqstarts: ArrayLike,
    start_pos: ArrayLike,
    max_seqlen: SupportsIndex | None = None,
    *,
    out: Array | None = None,
) -> Array:
    """Return the position of every packed token.

    It is ``start_pos[b] + i`` for token ``seqstarts[b] + i``.

    Parameters
    ----------
    sequences : ndarray of int64, shape [seqstarts[B]]
        The packed tokens; only their number matters.
    seqstarts : ndarray of int64, shape [B + 1]
        Where each sequence begins among the tokens: first 0, last the number of tokens.
    start_pos : ndarray of int64, shape [B]
        Position of each sequence's first token.
    max_seqlen : int or None
        An upper bound of the sequence lengths. It is checked, and changes no result.
    out : ndarray, optional
        Array for the result; made if not given.

    Returns
    -------
    positions : ndarray of int64, shape [seqstarts[B]]
        The positions.

    Raises
    ------
    KvkitError
        If an argument is wrong; then nothing has been written.

    Notes
    -----
    PMX operator ``dynamic_batching.PositionIndex``.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> tokens = np.array([7, 7, 7, 9])
    >>> kvkit.dynamic_batching.position_index(tokens, [0, 3, 4], [0, 10])
    array([ 0,  1,  2, 10])
    """
    where = PackedPositions(seqstarts, start_pos, max_seqlen)
    call = on.check(checked_position_index, sequences, where)
    (out,) = call.results.arrays(out)
    shift = np.repeat(call.first - call.starts[:-1], np.diff(call.starts))
    np.add(shift, np.arange(call.starts[-1]), out=out)
    return out


@operator
def alibi_mask(
    on: CallTarget,
    seqstarts: ArrayLike,
    kvstarts: ArrayLike,
    attn_mask: Array | None = None,
    *,
    num_heads: int,
    data_type: Literal["float32", "float16", "bfloat16"] = "float32",
    out: Array | None = None,
) -> Array:
    """Return a mask with the ALiBi biases of packed sequences on its diagonal blocks.

    In the block of a sequence with n queries and m keys, query i has the position p = m - n + i. Its bias for
    key j is ``slope * (j - p)``, and -inf if j > p.

    Parameters
    ----------
    seqstarts, kvstarts : ndarray of int64, shape [B + 1]
        Where each sequence begins among the queries and among the keys: first 0, last their number.
    attn_mask : ndarray, optional
        Another mask to add, [seqstarts[B], at least kvstarts[B]], perhaps with a first axis of num_heads or
        1; float32, float16, bfloat16, or boolean (True may attend). Columns from kvstarts[B] on are not read.
    num_heads : int
        The number of query heads.
    data_type : str
        The dtype of the mask: "float32", "float16" or "bfloat16". Elements are rounded to it once.
    out : ndarray, optional
        Array for the result; made if not given.

    Returns
    -------
    mask : ndarray of data_type, shape [num_heads, seqstarts[B], kvstarts[B] rounded up to a multiple of 16]
        Outside the diagonal blocks it is ``attn_mask``, 0 if none. Columns from kvstarts[B] on are 0.

    Raises
    ------
    KvkitError
        If an argument is wrong.

    Notes
    -----
    PMX operator ``dynamic_batching.ALiBiMask``. PMX has no boolean masks.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> kvkit.dynamic_batching.alibi_mask([0, 1, 3], [0, 2, 4], num_heads=3)[2, :, :5]
    array([[-0.25,  0.  ,  0.  ,  0.  ,  0.  ],
           [ 0.  ,  0.  ,  0.  ,  -inf,  0.  ],
           [ 0.  ,  0.  , -0.25,  0.  ,  0.  ]], dtype=float32)
    """
    call = on.check(checked_dynamic_alibi, seqstarts, kvstarts, attn_mask, num_heads, data_type)
    return write_alibi_mask(call, out)


@operator
def rotary_position_embedding(
    on: CallTarget,
    query: Array,
    key: Array,
    seqstarts: ArrayLike,
    start_pos: ArrayLike,
    max_seqlen: SupportsIndex | None,
    *,
    rotary_dim: int = 0,
    interleaved: bool = True,
    cos: Array | None = None,
    sin: Array | None = None,
    theta: float = 10000.0,
    bypass_key: bool = False,
    max_position_embeddings: int = 2048,
    scaling_type: Literal["", "linear", "dynamic"] = "",
    scaling_factor: float = 1.0,
    out: Pair | None = None,
) -> Pair:
    """Rotate the queries and keys of packed sequences by angles that grow with their positions.

    Neighbouring elements of a head are pairs, as in GPT-J, GLM, Cohere and GGUF files of Llama. Llama, Qwen,
    Mistral and Gemma in transformers pair halves: use `Rope.from_config`, or ``interleaved=False``.

    Elements 2i and 2i+1 rotate by ``t * theta^(-2i/R)``, where t is the token's position and R is
    ``rotary_dim``. Token ``seqstarts[b] + i`` is at position ``start_pos[b] + i``.

    Parameters
    ----------
    query, key : ndarray, shapes [seqstarts[B], heads, Dh]
        float32, float16 or bfloat16, the same for both. Their numbers of heads may differ.
    seqstarts : ndarray of int64, shape [B + 1]
        Where each sequence begins among the tokens: first 0, last the number of tokens.
    start_pos : ndarray of int64, shape [B]
        Position of each sequence's first token.
    max_seqlen : int or None
        An upper bound of the sequence lengths. It is checked, and changes no result.
    cos, sin : ndarray, shape [positions, R/2], optional
        As in `kvkit.rotary_position_embedding`.
    interleaved : bool
        Whether pairs are neighbours, as in PMX.
    rotary_dim, theta, bypass_key, max_position_embeddings, scaling_type, scaling_factor, out
        As in `kvkit.rotary_position_embedding`.

    Returns
    -------
    query, key : ndarray
        Arrays with the shapes and the dtype of the inputs.

    Raises
    ------
    KvkitError
        If an argument is wrong; then nothing has been written.

    Notes
    -----
    PMX operator ``dynamic_batching.RotaryPositionEmbedding``. Computed in float32, rounded once.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> tokens = np.ones((3, 1, 2), np.float32)
    >>> query, key = kvkit.dynamic_batching.rotary_position_embedding(tokens, tokens, [0, 1, 3], [2, 1], None)
    >>> query[:, 0].round(3)
    array([[-1.325,  0.493],
           [-0.301,  1.382],
           [-1.325,  0.493]], dtype=float32)
    """
    arguments = RotaryArguments(
        rotary_dim, interleaved, cos, sin, theta, bypass_key=bypass_key,
        max_position_embeddings=max_position_embeddings, scaling_type=scaling_type,
        scaling_factor=scaling_factor,
    )  # fmt: skip
    where = PackedPositions(seqstarts, start_pos, max_seqlen)
    return on.repeat(checked_rotation, rotate)(query, key, where, arguments, out)
