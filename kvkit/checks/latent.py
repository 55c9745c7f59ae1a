"""Check latent caches (MLA): pools whose rows are a key, and whose rows' first elements are the value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from kvkit.checks.index_tensors import index
from kvkit.checks.values import checked_format
from kvkit.errors import argument_error, describe
from kvkit.formats import FLOATS
from kvkit.formats.known import Format, named
from kvkit.formats.packing import count_elements
from kvkit.typed import Array

CODED = "ds_mla", "ds_v4"  # formats of rows of bytes
ROW_584, BODY_584 = 584, 576  # bytes of a token of ds_v4, and those of them that lie before a block's scales


@dataclass(frozen=True)
class LatentPool:
    """The rows of a latent cache, whose parts may lie in several arrays.

    Attributes
    ----------
    parts : tuple of ndarray, each [blocks, page_size, width] or [blocks, page_size, heads, width]
        Joined along their last axes they are a row: numbers, or the bytes of a format.
    format : Format or None
        Of bytes; None for floats.
    dim : int
        The elements of a row.
    """

    parts: tuple[Array, ...]
    format: Format | None
    dim: int

    @property
    def heads(self) -> int:
        """Return the heads of a row, each of which is a key and a value."""
        return int(self.parts[0].shape[2]) if self.parts[0].ndim == 4 else 1

    @property
    def page_size(self) -> int:
        """Return the tokens of a block."""
        return int(self.parts[0].shape[1])

    @property
    def slots(self) -> int:
        """Return the rows of the pool."""
        return len(self.parts[0]) * self.page_size

    @property
    def in_place(self) -> bool:
        """Return whether attention can read the rows where they lie."""
        return self.format is None and len(self.parts) == 1


def checked_latent_pool(name: str, latent: Any, rope_cache: Any, format: str | None) -> LatentPool:
    """Return the pool of a latent cache: floats, floats with rotary parts in `rope_cache`, or bytes."""
    if format is None:
        parts = [float_part(name, latent)]
        if rope_cache is not None:
            parts.append(float_part("rope_cache", rope_cache))
            if parts[1].shape[:-1] != parts[0].shape[:-1] or parts[1].dtype != parts[0].dtype:
                wanted = f"{parts[0].shape[:-1]} rows of {parts[0].dtype}, as {name}"
                raise argument_error("rope_cache", wanted, describe(rope_cache))
        return LatentPool(tuple(parts), None, sum(part.shape[-1] for part in parts))
    known = named(format)
    if known.name.partition(":")[0] not in CODED:
        raise argument_error("format", f"None, {' or '.join(CODED)}", repr(format))
    if rope_cache is not None:
        raise argument_error("rope_cache", f"None, for {known}, whose rows have it", describe(rope_cache))
    is_bytes = isinstance(latent, np.ndarray) and latent.dtype.itemsize == 1 and latent.ndim > 1
    if not is_bytes or (latent.size and latent.strides[-1] != 1):
        raise argument_error(name, f"an array of bytes, for {known}", describe(latent))
    rows = latent.view(np.uint8)
    if known.name == "ds_v4":
        return LatentPool(parts_of_584(name, rows), known, 448 + known.tail)
    rows = without_head(name, rows)
    return LatentPool((rows,), known, count_elements(known, rows.shape[2]) + known.tail)


def float_part(name: str, array: Any) -> Array:
    """Return floats [blocks, page_size, width], or with several heads [blocks, page_size, heads, width]."""
    several = isinstance(array, np.ndarray) and array.ndim == 4 and array.shape[1] and array.shape[2] > 1
    rows: Array = array if several else without_head(name, array)
    checked_format(name, rows, FLOATS, rows.ndim)
    return rows


def without_head(name: str, array: Any) -> Array:
    """Return a pool [blocks, page_size, width], given as such or with an axis of one head."""
    if isinstance(array, np.ndarray) and array.ndim == 4 and array.shape[2] == 1:
        array = array[:, :, 0]
    if not isinstance(array, np.ndarray) or array.ndim != 3 or not array.shape[1]:
        wanted = "a pool [blocks, page_size, width], perhaps with an axis of one head"
        raise argument_error(name, wanted, describe(array))
    pool: Array = array
    return pool


def parts_of_584(name: str, blocks: Array) -> tuple[Array, Array]:
    """Return views of the codes and of the scales of blocks of bytes, where scales lie behind all codes."""
    page_size = blocks.shape[-1] // ROW_584
    if blocks.ndim != 2 or not page_size:
        raise argument_error(name, f"[blocks, bytes] of {ROW_584} bytes a token or more", describe(blocks))
    ends = BODY_584 * page_size, ROW_584 * page_size
    shape = len(blocks), page_size, -1
    return blocks[:, : ends[0]].reshape(shape), blocks[:, ends[0] : ends[1]].reshape(shape)


def checked_query(query: Any, pool: LatentPool) -> Array:
    """Return queries [tokens, heads, dim], given as such or as a pair of their latent and rotary parts."""
    if isinstance(query, (tuple, list)):
        if len(query) != 2:
            raise argument_error("query", "an array, or a pair (latent part, rotary part)", describe(query))
        for i, part in enumerate(query):
            checked_format(f"query[{i}]", part, FLOATS, 3)
        if query[0].shape[:2] != query[1].shape[:2] or query[0].dtype != query[1].dtype:
            raise argument_error("query[1]", "the tokens, heads and dtype of query[0]", describe(query[1]))
        query = np.concatenate(query, axis=2)
    checked_format("query", query, FLOATS, 3)
    if query.shape[2] != pool.dim:
        raise argument_error("query", f"rows of {pool.dim} elements, as latent has", query.shape[2])
    if query.shape[1] % pool.heads:
        raise argument_error("query", f"a multiple of {pool.heads} heads, as latent has", query.shape[1])
    joined: Array = query
    return joined


def checked_indices(
    names: tuple[str, str], indices: ArrayLike, lengths: ArrayLike | None, tokens: int, slots: int
) -> tuple[Array, Array]:
    """Return the slots of chosen rows, and indptr: query i has slots[indptr[i]:indptr[i + 1]].

    Indices below 0 or behind the pool, and those from `lengths` on, name no row.
    """
    chosen = index(names[0], indices, 2, tokens)
    valid = (chosen >= 0) & (chosen < slots)
    if lengths is not None:
        counts = index(names[1], lengths, 1, tokens)
        valid &= np.arange(chosen.shape[1]) < counts[:, None]
    return chosen[valid], np.concatenate([[0], np.cumsum(valid.sum(axis=1))])
