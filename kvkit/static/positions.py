"""Compute ALiBi slopes and masks, and rotary embeddings, for sequences of one length."""

from __future__ import annotations

from typing import Literal, SupportsIndex

from numpy.typing import ArrayLike

from kvkit import cpu
from kvkit.calls.positions import rotate, write_alibi_mask
from kvkit.calls.targets import CallTarget, operator
from kvkit.checks.arguments import RotaryArguments, StaticPositions
from kvkit.checks.positions import checked_rotation, checked_slopes, checked_static_alibi
from kvkit.typed import Array, Pair


@operator
def alibi_slope(on: CallTarget, *, num_heads: int, out: Array | None = None) -> Array:
    """Return the slope of each head's linear bias.

    With P the largest power of two up to ``num_heads``: 2^(-8(h+1)/P) for head h < P, and
    2^(-4(2(h-P)+1)/P) for the others.

    Parameters
    ----------
    num_heads : int
        The number of query heads, at most 65,536.
    out : ndarray, optional
        Array for the result; made if not given.

    Returns
    -------
    slopes : ndarray of float32, shape [num_heads]
        The slopes.

    Raises
    ------
    KvkitError
        If an argument is wrong.

    Notes
    -----
    PMX operator ``ALiBiSlope``.

    Examples
    --------
    >>> import kvkit
    >>> kvkit.alibi_slope(num_heads=3)
    array([0.0625    , 0.00390625, 0.25      ], dtype=float32)
    """
    (out,) = on.check(checked_slopes, num_heads).results.arrays(out)
    cpu.positions.alibi.slopes.code.ctypes(out.ctypes.data, len(out))
    return out


@operator
def alibi_mask(
    on: CallTarget,
    seqlen_q: SupportsIndex,
    seqlen_kv: SupportsIndex,
    attn_mask: Array | None = None,
    *,
    num_heads: int,
    data_type: Literal["float32", "float16", "bfloat16"] = "float32",
    out: Array | None = None,
) -> Array:
    """Return a causal mask with ALiBi biases, where the last query is at the position of the last key.

    Query i of n has the position p = m - n + i. Its bias for key j of m is ``slope * (j - p)``, and -inf if
    j > p. Add the mask to scores, or call an attention operator with ``is_alibi`` instead.

    Parameters
    ----------
    seqlen_q, seqlen_kv : int
        Queries n and keys m.
    attn_mask : ndarray, optional
        Another mask to add, which broadcasts to [B, num_heads, n, columns] with columns >= m: 2 to 4 axes,
        of which all but the last may be 1; float32, float16, bfloat16, or boolean (True may attend). Columns
        from m on are not read.
    num_heads : int
        The number of query heads.
    data_type : str
        The dtype of the mask: "float32", "float16" or "bfloat16". Elements are rounded to it once.
    out : ndarray, optional
        Array for the result; made if not given.

    Returns
    -------
    mask : ndarray of data_type, shape [num_heads, n, m rounded up to a multiple of 16]
        If ``attn_mask`` has 4 axes, there is a first axis B. Columns from m on are -inf.

    Raises
    ------
    KvkitError
        If an argument is wrong.

    Notes
    -----
    PMX operator ``ALiBiMask``. PMX has no boolean masks.

    Examples
    --------
    >>> import kvkit
    >>> kvkit.alibi_mask(2, 3, num_heads=3)[2, :, :4]
    array([[-0.25,  0.  ,  -inf,  -inf],
           [-0.5 , -0.25,  0.  ,  -inf]], dtype=float32)
    """
    call = on.check(checked_static_alibi, seqlen_q, seqlen_kv, attn_mask, num_heads, data_type)
    return write_alibi_mask(call, out)


@operator
def rotary_position_embedding(
    on: CallTarget,
    query: Array,
    key: Array,
    start_pos: SupportsIndex,
    pad_len: ArrayLike | None = None,
    *,
    rotary_dim: int = 0,
    interleaved: bool | None = None,
    cos: Array | None = None,
    sin: Array | None = None,
    theta: float = 10000.0,
    bypass_key: bool = False,
    max_position_embeddings: int = 2048,
    scaling_type: Literal["", "linear", "dynamic"] = "",
    scaling_factor: float = 1.0,
    out: Pair | None = None,
) -> Pair:
    """Rotate queries and keys by angles that grow with their positions.

    Neighbouring elements of a head are pairs in PMX, GPT-J, GLM, Cohere and GGUF files of Llama. Llama, Qwen,
    Mistral and Gemma in transformers pair halves: use `Rope.from_config`, or ``interleaved=False``. Nobody
    can tell the two from arrays, so `interleaved` must be given, as PMX's own namespace need not.

    Pair i, elements 2i and 2i+1 or i and i + R/2, rotates by ``t * theta^(-2i/R)``, where t is the token's
    position and R is ``rotary_dim``. Token s is at position ``start_pos + s - pad_len[b]``.

    Parameters
    ----------
    query, key : ndarray, shapes [B, S, heads, Dh]
        float32, float16 or bfloat16, the same for both. Their numbers of heads may differ.
    start_pos : int
        Position of the first token.
    pad_len : ndarray of int64, shape [B], optional
        Padding tokens in front of each sequence, which positions do not count.
    rotary_dim : int
        R, how many elements at the front of each head rotate, an even number. The others are copied. 0: all.
    interleaved : bool
        Whether pairs are neighbours. If not, elements i and i + R/2 are a pair, as in NeoX and, in most
        engines, Llama models. None is refused.
    cos, sin : ndarray, shape [positions, R/2], optional
        The cosine and sine of each pair at each position from 0 on, of any float type. If they are given,
        `theta` and the scaling arguments are not used.
    theta : float
        Base of the frequencies.
    bypass_key : bool
        Whether keys are copied without rotation.
    max_position_embeddings, scaling_type, scaling_factor : int, str, float
        "linear" divides positions by the factor. "dynamic" multiplies theta by
        (scaling_factor * e / max_position_embeddings - (scaling_factor - 1))^(R / (R - 2)) for a sequence
        whose end e, its last position + 1, is beyond ``max_position_embeddings``. "" does neither.
    out : tuple of ndarray, optional
        Arrays for query and key; made if not given. Give ``(query, key)`` to work in place.

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
    PMX operator ``RotaryPositionEmbedding``. Computed in float32, rounded once.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> tokens = np.ones((1, 2, 1, 4), np.float32)
    >>> query, key = kvkit.rotary_position_embedding(tokens, tokens, 1, rotary_dim=2, interleaved=True)
    >>> query[0, :, 0].round(3)
    array([[-0.301,  1.382,  1.   ,  1.   ],
           [-1.325,  0.493,  1.   ,  1.   ]], dtype=float32)
    """
    arguments = RotaryArguments(
        rotary_dim, interleaved, cos, sin, theta, bypass_key=bypass_key,
        max_position_embeddings=max_position_embeddings, scaling_type=scaling_type,
        scaling_factor=scaling_factor,
    )  # fmt: skip
    where = StaticPositions(start_pos, pad_len)
    return on.repeat(checked_rotation, rotate)(query, key, where, arguments, out)
