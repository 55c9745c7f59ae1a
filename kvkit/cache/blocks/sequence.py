"""A sequence of tokens, and the blocks that store them."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from kvkit.checks import index_tensors
from kvkit.errors import argument_error, describe
from kvkit.typed import Array

ID_BYTES = 8


class Sequence:
    """A sequence of tokens, and the blocks that store them. `BlockAllocator.add` and `fork` make it.

    Attributes
    ----------
    length : int
        The number of its tokens in the cache.

    Examples
    --------
    >>> from kvkit.cache import BlockAllocator
    >>> sequence = BlockAllocator(num_blocks=4, page_size=2).add([7, 8, 9])
    >>> sequence.length, sequence.blocks, sequence.token_ids
    (0, [], array([7, 8, 9]))
    """

    __slots__ = ("allocator", "chain", "ids", "length", "pending", "table")

    def __init__(self, allocator: Any, ids: bytearray, chain: list[bytes]) -> None:
        self.allocator = allocator  # None after `BlockAllocator.free`
        self.length = 0
        self.table = array("q")  # blocks
        self.ids = ids  # of the first tokens, little-endian int64; perhaps more or fewer than `length`
        self.chain = chain  # hashes of the first 0, 1, 2... full blocks
        self.pending = 0  # tokens that the open step adds

    @property
    def blocks(self) -> list[int]:
        """Return the sequence's blocks, in the order of its tokens."""
        return self.table.tolist()

    @property
    def token_ids(self) -> Array:
        """Return the known ids of its tokens; those from index `length` on are not in the cache yet."""
        return np.frombuffer(bytes(self.ids), "<i8").astype(np.int64)

    @property
    def known(self) -> int:
        """Return how many of its tokens have ids."""
        return len(self.ids) // ID_BYTES

    def page(self, i: int, page_size: int) -> bytes:
        """Return the ids of its tokens in block i."""
        size = ID_BYTES * page_size
        return bytes(self.ids[i * size : (i + 1) * size])

    def copy(self) -> Sequence:
        """Return a sequence of the same tokens in the same blocks."""
        other = Sequence(self.allocator, self.ids[:], self.chain[:])
        other.length, other.table = self.length, self.table[:]
        return other

    def __repr__(self) -> str:
        return f"<Sequence of {self.length} tokens in blocks {self.blocks}>"


def encode_ids(token_ids: ArrayLike) -> bytearray:
    """Return token ids as bytes, the same on every machine."""
    return bytearray(index_tensors.index("token_ids", token_ids, 1).astype("<i8").tobytes())


def check_bytes(name: str, value: Any) -> bytes:
    """Return an argument if it is bytes; else raise."""
    if not isinstance(value, bytes):
        raise argument_error(name, "bytes", describe(value))
    return value
