"""Work on compressed caches (DeepSeek V4): rows that pool tokens, their slots, the rotation back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsIndex

from numpy.typing import ArrayLike

from kvkit.calls.compressed import compress
from kvkit.calls.targets import CallTarget, operator
from kvkit.checks.arguments import CompressArguments, SlotArguments
from kvkit.checks.compressed import checked_compress, checked_compressed_slots, checked_rotation_back
from kvkit.rope import Rope, as_rope
from kvkit.typed import Array, Pair


@operator
def compress_tokens(
    on: CallTarget,
    kv: Array,
    gate: Array,
    ape: Array,
    state: Array,
    *,
    ratio: SupportsIndex,
    overlap: bool,
    norm_weight: Array,
    positions: ArrayLike | None = None,
    starts: ArrayLike | None = None,
    state_indices: ArrayLike | None = None,
    rope: Rope | Mapping[str, Any] | None = None,
    eps: float = 1e-6,
    out: Pair | None = None,
) -> Pair:
    """Pool every `ratio` tokens into one row; the states, which hold the last tokens, change in place.

    row_c = RMSNorm(sum over tokens j of softmax_j(gate_jc + ape_jc) kv_jc), rotated at its first token.

    Parameters
    ----------
    kv : ndarray, shape [T, E]
        Projected tokens of all sequences, one after the other; float32, float16 or bfloat16. E is D, and with
        `overlap` 2 D: D numbers for the next window, then D for the token's own.
    gate : ndarray, shape [T, E]
        Their raw scores, of the same dtype.
    ape : ndarray, shape [ratio, E]
        Added to the score of the token with position p: row ``p % ratio``.
    state : ndarray of float32, shape [N or slots, ring, 2, E]
        The last tokens of each sequence, token p in row ``p % ring``: kv, then gate + ape. ring is at least
        ratio, with `overlap` 2 ratio, and as many more as there are drafts that may be taken back.
    ratio : int
        Tokens of a window: 4 and 128 in DeepSeek V4.
    overlap : bool
        Whether a row also pools the tokens of the window before, which row 0 does not have.
    norm_weight : ndarray, shape [D]
    positions : array_like of int, shape [T], optional
        Consecutive in each sequence, after the last ones that its state has seen. From 0 on if None.
    starts : array_like of int, shape [N + 1], optional
        Where each packed sequence begins, from 0 to T; one sequence if None.
    state_indices : array_like of int, shape [N], optional
        The slot of each sequence; -1 for padding, which finishes no row and touches no state.
    rope : Rope or mapping, optional
        How the last elements of a row are rotated, at position ``row * ratio``; not at all if None.
    eps : float
        Added to the mean of squares in the norm.
    out : tuple of ndarray, optional
        Arrays for both results; allocated if None.

    Returns
    -------
    rows : ndarray of float32, shape [n, D]
        The rows that these tokens finish, in the order of tokens.
    row_of_token : ndarray of int64, shape [T]
        The number of the row ``position // ratio`` that a token finishes in its sequence, else -1.

    Raises
    ------
    KvkitError
        If an argument is wrong, or two sequences have one slot. Then nothing has been written.

    Notes
    -----
    This is the compressor of DeepSeek V4: CSA has ratio 4 with overlap, HCA 128 without. All is float32.
    A state does not say which tokens it has seen, so positions after a gap are not noticed here. A
    `kvkit.cache.CompressedLayer` and a `PagedCompressedCache` count their tokens, and refuse others.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> kv, state = np.array([[1, 2], [3, 2], [5, 6]], np.float32), np.zeros((1, 2, 2, 2), np.float32)
    >>> zeros, options = np.zeros((2, 2), np.float32), {"ratio": 2, "overlap": False}
    >>> options["norm_weight"] = np.ones(2, np.float32)
    >>> rows, row_of_token = kvkit.compress_tokens(kv, 0 * kv, zeros, state, **options)
    >>> rows.round(3), row_of_token
    (array([[1., 1.]], dtype=float32), array([-1,  0, -1]))
    """
    call = CompressArguments(
        kv, gate, ape, state, ratio=ratio, overlap=overlap, norm_weight=norm_weight, positions=positions,
        starts=starts, state_indices=state_indices, rope=as_rope(rope), eps=eps,
    )  # fmt: skip
    return compress(on.check(checked_compress, call), out)


@operator
def compressed_slots(
    on: CallTarget,
    positions: ArrayLike,
    block_tables: ArrayLike,
    page_size: SupportsIndex,
    *,
    ratio: SupportsIndex,
    sequence_of_token: ArrayLike | None = None,
    out: Array | None = None,
) -> Array:
    """Return the slot in pages of the row that each token finishes, or -1 for a token inside a window.

    Parameters
    ----------
    positions : array_like of int, shape [T]
        Positions of tokens; -1 for padding.
    block_tables : array_like of int, shape [B, M]
        The pages of each sequence's compressed rows.
    page_size : int
        Rows of a page.
    ratio : int
        Tokens of a window.
    sequence_of_token : array_like of int, shape [T], optional
        The sequence of each token; only one sequence does without.
    out : ndarray, optional
        An array for the result; allocated if None.

    Returns
    -------
    slots : ndarray of int64, shape [T]
        ``page * page_size + row % page_size`` for row ``position // ratio``; -1 stores nothing.

    Raises
    ------
    KvkitError
        If an argument is wrong, or if a row has no page.

    Notes
    -----
    The same rule with another table gives the slots of index keys. It is vLLM's slot mapping of a step.

    Examples
    --------
    >>> import kvkit
    >>> kvkit.compressed_slots([2, 3, 4, 7, 11, -1], [[7, 3, 9]], 2, ratio=4)
    array([-1, 14, -1, 15,  6, -1])
    """
    call = SlotArguments(positions, block_tables, page_size, ratio, sequence_of_token)
    found, results = on.check(checked_compressed_slots, call)
    (slots,) = results.arrays(out)
    slots[...] = found
    return slots


@operator
def rope_back(
    on: CallTarget,
    output: Array,
    positions: ArrayLike,
    rope: Rope | Mapping[str, Any],
    *,
    out: Array | None = None,
) -> Array:
    """Rotate the last elements of attention outputs back, where rotated rows are values too.

    Parameters
    ----------
    output : ndarray, shape [T, H, D]
        float32, float16 or bfloat16.
    positions : array_like of int, shape [T]
        The position of each query.
    rope : Rope or mapping
        How the rows' last elements were rotated.
    out : ndarray, optional
        An array for the result; allocated if None.

    Returns
    -------
    rotated : ndarray, shape [T, H, D]
        In the dtype of `output`, computed in float32.

    Raises
    ------
    KvkitError
        If an argument is wrong.

    Notes
    -----
    DeepSeek V4's models call this the conjugate rotation, before the grouped output projection.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> from kvkit.rope import Rope
    >>> rope, x = Rope(2, interleaved=True), np.ones((1, 1, 4), np.float32)
    >>> rotated = Rope(2, interleaved=True, begin=2).rotate(x, 5)
    >>> bool(np.allclose(kvkit.rope_back(rotated, [5], rope), x))
    True
    """
    checked, placed, results = on.check(checked_rotation_back, output, positions, as_rope(rope))
    (rotated,) = results.arrays(out)
    rotated[...] = placed.shift(output, -checked[:, None])
    return rotated
