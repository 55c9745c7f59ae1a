"""Count how many sequences use each block; list free and published blocks in the order of eviction."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

HASH_BYTES = hashlib.sha256().digest_size


class Published(NamedTuple):
    """Describes a block that new sequences can share."""

    block: int
    digest: bytes  # the hash of its chain
    token_ids: bytes


class Pool:
    """Counts the users of blocks, and finds published blocks by a hash of all tokens up to their end.

    A chain is the first blocks of a sequence. Its digest is the hash of the chain without its last block,
    and of that block's token ids. The hash of the empty chain covers all else that keys and values depend on.
    Every process computes the same digests::

        root_hash(identity, salt) -> h0;  chain_hash(h0, ids of block 0) -> h1;  chain_hash(h1, ...) -> h2
    """

    def __init__(self, num_blocks: int) -> None:
        self.references = [0] * num_blocks
        self._free = list(range(num_blocks))[::-1]
        self._idle: OrderedDict[int, None] = OrderedDict()  # published, without users; evicted in this order
        self._by_digest: dict[bytes, int] = {}  # digest of a chain -> its last block, if published
        self._published: dict[int, Published] = {}

    @property
    def available(self) -> int:
        """Return how many blocks are free or can be evicted."""
        return len(self._free) + len(self._idle)

    def take(self) -> int:
        """Take a block for one sequence: a free one, or else the least recently used published block."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self.withdraw(block)
        self.references[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Count one more user of each block."""
        for block in blocks:
            self.references[block] += 1
            self._idle.pop(block, None)

    def reclaim(self, block: int) -> None:
        """Count one more user of a block, which was released and may be free."""
        if not self.references[block] and block not in self._idle:
            self._free.remove(block)
        self.share([block])

    def release(self, blocks: Sequence[int]) -> None:
        """Count one user less of each block."""
        # The last block first, so that it is evicted first: earlier blocks are useful without it.
        for block in reversed(blocks):
            self.references[block] -= 1
            if not self.references[block]:
                if block in self._published:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def publish(self, block: int, digest: bytes, ids: bytes) -> None:
        """Publish a full block, unless another block of the same chain is published already."""
        if self._by_digest.setdefault(digest, block) == block:
            self._published[block] = Published(block, digest, ids)

    def is_published(self, block: int) -> bool:
        """Return whether new sequences can find a block."""
        return block in self._published

    def withdraw(self, block: int) -> None:
        """End the publication of a block, because its contents will change."""
        if block in self._published:
            del self._by_digest[self._published.pop(block).digest]

    def published(self) -> Iterator[Published]:
        """Yield the published blocks in the order of eviction; those in use come last."""
        used = [block for block in self._published if self.references[block]]
        return (self._published[block] for block in (*self._idle, *used))

    def restore(self, tables: Iterable[Iterable[int]], published: Iterable[Published]) -> None:
        """Set in a new pool which blocks the tables use and which are published."""
        for block in (block for table in tables for block in table):
            self.references[block] += 1
        for block, digest, ids in published:
            self.publish(block, digest, ids)
            if not self.references[block]:
                self._idle[block] = None
        self._free = [block for block in self._free if not self.references[block] and block not in self._idle]

    def find(self, digest: bytes, ids: bytes) -> int | None:
        """Return the published last block of a chain, None if there is none. Its token ids must be `ids`."""
        block = self._by_digest.get(digest)
        return block if block is not None and self._published[block].token_ids == ids else None


def root_hash(*parts: bytes) -> bytes:
    """Return the hash of the empty chain."""
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()


def chain_hash(digest: bytes, ids: bytes) -> bytes:
    """Return the hash of a chain with one more block."""
    return hashlib.sha256(digest + ids).digest()
