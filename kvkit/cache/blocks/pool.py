"""Count how many sequences use each block; list free and published blocks in the order of eviction."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

HASH_BYTES = hashlib.sha256().digest_size


class Pool:
    """Counts the users of blocks, and finds published blocks by a hash of all tokens up to their end.

    A chain is the first blocks of a sequence. Its hash is sha256(hash of the chain without its last block,
    token ids of that block). The hash of the empty chain covers all else that keys and values depend on.
    Every process computes the same hashes.
    """

    def __init__(self, num_blocks: int) -> None:
        self.references = [0] * num_blocks
        self._free = list(range(num_blocks))[::-1]
        self._idle: OrderedDict[int, None] = OrderedDict()  # published, without users; evicted in this order
        self._by_hash: dict[bytes, int] = {}  # hash -> published block
        self._published: dict[int, tuple[bytes, bytes]] = {}  # block -> hash, token ids

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

    def publish(self, block: int, chain: bytes, ids: bytes) -> None:
        """Publish a full block, unless another block of the same chain is published already."""
        if self._by_hash.setdefault(chain, block) == block:
            self._published[block] = chain, ids

    def is_published(self, block: int) -> bool:
        """Return whether new sequences can find a block."""
        return block in self._published

    def withdraw(self, block: int) -> None:
        """End the publication of a block, because its contents will change."""
        if block in self._published:
            del self._by_hash[self._published.pop(block)[0]]

    def published(self) -> Iterator[tuple[int, bytes, bytes]]:
        """Yield (block, hash, token ids) of the published blocks, in the order of eviction."""
        held = [block for block in self._published if self.references[block]]
        return ((block, *self._published[block]) for block in (*self._idle, *held))

    def restore(self, tables: Iterable[Iterable[int]], published: Iterable[tuple[int, bytes, bytes]]) -> None:
        """Set in a new pool which blocks the tables use and which are published."""
        for block in (block for table in tables for block in table):
            self.references[block] += 1
        for block, chain, ids in published:
            self.publish(block, chain, ids)
            if not self.references[block]:
                self._idle[block] = None
        self._free = [block for block in self._free if not self.references[block] and block not in self._idle]

    def find(self, chain: bytes, ids: bytes) -> int | None:
        """Return the published block of a chain, None if there is none. Its token ids must be `ids`."""
        block = self._by_hash.get(chain)
        return block if block is not None and self._published[block][1] == ids else None


def root_hash(*parts: bytes) -> bytes:
    """Return the hash of the empty chain."""
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()


def chain_hash(chain: bytes, ids: bytes) -> bytes:
    """Return the hash of a chain with one more block."""
    return hashlib.sha256(chain + ids).digest()
