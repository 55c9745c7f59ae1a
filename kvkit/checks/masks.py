"""Checks of attention masks, which return their places for kernels."""

from collections.abc import Sequence

import numpy as np

from kvkit.checks.records import NO_MASK, MaskPlace
from kvkit.checks.values import check_array
from kvkit.errors import argument_error
from kvkit.formats import BY_DTYPE, MASKS, Element
from kvkit.typed import Array


def static_mask(
    fmt: Element, mask: Array | None, batch: int, num_heads: int, seqlen: int, kvlen: int, *,
    one_column: bool = True,
) -> MaskPlace:  # fmt: skip
    """Check a mask [B, num_heads, S, kvlen or more], which may lack leading axes; return its place.

    A mask without elements is none, as PMX's reference has it. `one_column` says whether one column for all
    keys is legal.
    """
    if mask is not None:
        check_mask_type(fmt, mask)
    if mask is None or not mask.size:
        return NO_MASK
    legal = (batch, num_heads, seqlen)[max(0, 4 - mask.ndim) :]
    fits = 2 <= mask.ndim <= 4 and (mask.shape[-1] >= kvlen or (one_column and mask.shape[-1] == 1))
    if not fits or any(size not in (1, want) for size, want in zip(mask.shape[:-1], legal, strict=True)):
        wanted = f"[{batch}, {num_heads}, {seqlen}, {kvlen} or more], axes of 1, or without leading axes"
        raise argument_error("attn_mask", wanted, f"shape {mask.shape}")
    given = [0 if size == 1 else step for size, step in zip(mask.shape, mask.strides, strict=True)]
    return mask_place(mask, [0] * (4 - mask.ndim) + given, packed=0)


def dynamic_mask(
    fmt: Element, mask: Array | None, num_heads: int, tokens: int, keys: int, *, one_column: bool = True
) -> MaskPlace:
    """Check a mask [tokens, keys or more], perhaps with a first axis of heads; return its place.

    A mask without elements is none, as PMX's reference has it. `one_column` says whether one column for all
    keys is legal.
    """
    if mask is not None:
        check_mask_type(fmt, mask)
    if mask is None or not mask.size:
        return NO_MASK
    width = mask.shape[-1] if mask.ndim else 0
    fits = mask.ndim in (2, 3) and mask.shape[-2] == tokens and (width >= keys or (one_column and width == 1))
    if not fits or (mask.ndim == 3 and mask.shape[0] not in (1, num_heads)):
        wanted = f"[{tokens}, {keys} or more], or [{num_heads}, {tokens}, {keys} or more]"
        raise argument_error("attn_mask", wanted, f"shape {mask.shape}")
    head = mask.strides[0] if mask.ndim == 3 and mask.shape[0] > 1 else 0
    return mask_place(mask, (0, head, mask.strides[-2], 0 if width == 1 else mask.strides[-1]), packed=1)


def own_mask(fmt: Element, mask: Array | None, num_heads: int, tokens: int, longest: int) -> MaskPlace:
    """Check a mask [tokens, longest context or more], perhaps with a first axis of heads; return its place.

    Column j is position j of a token's own context.
    """
    place = dynamic_mask(fmt, mask, num_heads, tokens, longest)
    return place if place is NO_MASK else place._replace(packed=2)


def check_mask_type(fmt: Element, mask: Array, name: str = "attn_mask") -> None:
    """Check that a mask is an array of booleans, of float32, or of the format of the queries."""
    check_array(name, mask)
    if mask.dtype != np.bool_ and mask.dtype != fmt.dtype and mask.dtype != np.float32:
        legal = " or ".join(dict.fromkeys((fmt.name, "float32", "bool")))
        remedy = ": mask.astype(bool), if 0 hides a key and 1 does not" if mask.dtype.kind in "iu" else ""
        raise argument_error(name, f"dtype {legal}", f"{mask.dtype}{remedy}")


def mask_place(mask: Array, strides: Sequence[int], packed: int) -> MaskPlace:
    """Return the place of a mask with these strides (sequence, head, row, column)."""
    name = "bool" if mask.dtype == np.bool_ else BY_DTYPE[mask.dtype].name
    sequence, head, row, column = strides
    return MaskPlace(mask.ctypes.data, MASKS[name], sequence, head, row, column, packed=packed)
