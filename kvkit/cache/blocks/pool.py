"""Count how many sequences use each block; list free and published blocks and the order of eviction."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

HASH_BYTES = hashlib.sha256().digest_size


class Pool:
    """Counts the users of blocks, and finds published blocks by the hash of all tokens up to their end.

    The hash of a chain of blocks is sha256(hash of the chain before, token ids of the last block). The hash
    of the empty chain covers all else that keys and values depend on. Every process computes the same hashes.
    """

    def __init__(self, num_blocks: int) -> None:
        self.references = [0] * num_blocks
        self._free = list(range(num_blocks))[::-1]
        self._idle: OrderedDict[int, None] = OrderedDict()  # published blocks without users, the oldest first
        self._found: dict[bytes, int] = {}  # hash -> block
        self._published: dict[int, tuple[bytes, bytes]] = {}  # block -> hash, token ids

    @property
    def available(self) -> int:
        """Return how many blocks are free or can be evicted."""
        return len(self._free) + len(self._idle)

    def take(self) -> int:
        """Take a block for one sequence: a free one, or else the least recently used published one."""
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

    def take_back(self, block: int) -> None:
        """Count one more user of a block that was released and not taken since."""
        if not self.references[block] and block not in self._idle:
            self._free.remove(block)
        self.share([block])

    def release(self, blocks: Sequence[int]) -> None:
        """Count one user less of each block."""
        # The last block first, so that it is evicted first: a chain is looked up from its beginning.
        for block in reversed(blocks):
            self.references[block] -= 1
            if not self.references[block]:
                if block in self._published:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def publish(self, block: int, chain: bytes, ids: bytes) -> None:
        """Publish a full block, unless another block of the same chain is published already."""
        if self._found.setdefault(chain, block) == block:
            self._published[block] = chain, ids

    def is_published(self, block: int) -> bool:
        """Return whether new sequences can find a block."""
        return block in self._published

    def withdraw(self, block: int) -> None:
        """Make a block unpublished, because its contents will change."""
        if block in self._published:
            del self._found[self._published.pop(block)[0]]

    def published(self) -> Iterator[tuple[int, bytes, bytes]]:
        """Yield (block, hash, token ids) of the published blocks, in the order of eviction."""
        held = [block for block in self._published if self.references[block]]
        return ((block, *self._published[block]) for block in (*self._idle, *held))

    def restore(self, tables: Iterable[Iterable[int]], published: Iterable[tuple[int, bytes, bytes]]) -> None:
        """Set which blocks the tables use and which are published, in a new pool."""
        for block in (block for table in tables for block in table):
            self.references[block] += 1
        for block, chain, ids in published:
            self.publish(block, chain, ids)
            if not self.references[block]:
                self._idle[block] = None
        self._free = [block for block in self._free if not self.references[block] and block not in self._idle]

    def find(self, chain: bytes, ids: bytes) -> int | None:
        """Return the published block of a chain, None if there is none; its token ids are compared too."""
        block = self._found.get(chain)
        return block if block is not None and self._published[block][1] == ids else None


def root_hash(*parts: bytes) -> bytes:
    """Return the hash of the empty chain."""
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()


def chain_hash(chain: bytes, ids: bytes) -> bytes:
    """Return the hash of a chain with one more block."""
    return hashlib.sha256(chain + ids).digest()
