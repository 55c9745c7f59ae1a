"""A plain model of a paged cache: lists of tokens, lists of blocks. It knows nothing of kvkit.

Keys and values of a token are numbers made from all tokens up to it, as in a causal language model.
"""

import functools
import zlib

import numpy as np


class Row:
    """Holds a sequence: its tokens, how many have ids, how many are in the cache, its blocks.

    Of its blocks the first `offered` have been full when a step ended.
    """

    def __init__(self, salt, tokens):
        self.salt, self.tokens, self.known, self.length = salt, tokens, len(tokens), 0
        self.blocks, self.offered = [], 0

    def copy(self):
        other = Row(self.salt, list(self.tokens))
        other.known, other.length = self.known, self.length
        other.blocks, other.offered = list(self.blocks), self.offered
        return other

    def prefix(self, length):
        return self.salt, tuple(self.tokens[:length])


class Model:
    """Models tables, published prefixes and free or idle blocks; the caller names a block that is taken."""

    def __init__(self, num_blocks, page_size):
        self.page_size = page_size
        self.rows = []
        self.free = set(range(num_blocks))
        self.idle = []  # published and held by nobody, the next to be evicted first
        self.published = {}  # prefix -> block

    def holders(self, block):
        return sum(block in row.blocks for row in self.rows)

    def pages(self, tokens):
        return len(range(0, tokens, self.page_size))

    def unpublish(self, block):
        self.published = {prefix: held for prefix, held in self.published.items() if held != block}

    def add(self, salt, ids):
        row = Row(salt, list(ids))
        while row.length + self.page_size < len(ids):
            block = self.published.get(row.prefix(row.length + self.page_size))
            if block is None:
                break
            row.blocks.append(block)
            row.length += self.page_size
            row.offered += 1
            if block in self.idle:
                self.idle.remove(block)
        self.rows.append(row)
        return row

    def fork(self, row):
        self.rows.append(row.copy())
        return self.rows[-1]

    def crop(self, row, length):
        if length < row.length:
            del row.tokens[length:]
            row.known, row.length = min(row.known, length), length
            row.offered = min(row.offered, length // self.page_size)
            self.release(row)

    def drop(self, row):
        row.length = 0
        self.release(row)
        self.rows.remove(row)

    def release(self, row):
        """Let go of the blocks behind a row's last token, the last one first."""
        while len(row.blocks) > self.pages(row.length):
            block = row.blocks.pop()
            if not self.holders(block):
                if block in self.published.values():
                    self.idle.append(block)
                else:
                    self.free.add(block)

    def needed(self, step):
        """Return how many blocks a step takes: new ones, and a copy for all but a block's last holder."""
        count, left = 0, {}
        for row, new in step:
            count += self.pages(row.length + new) - self.pages(row.length)
            if new and row.length % self.page_size:
                tail = row.blocks[-1]
                left.setdefault(tail, self.holders(tail))
                if left[tail] > 1:
                    left[tail] -= 1
                    count += 1
        return count

    def take(self, block):
        """Take a block: a free one, or if there is none the next to be evicted."""
        if self.free:
            assert block in self.free
            self.free.remove(block)
        else:
            assert block == self.idle.pop(0)
            self.unpublish(block)
        return block

    def begin(self, step, tables):
        """Reserve blocks; `tables` says which. Returns the copies."""
        copies = []
        for (row, new), table in zip(step, tables, strict=True):
            if new and row.length % self.page_size:
                tail = row.blocks[-1]
                if self.holders(tail) > 1:
                    row.blocks[-1] = None
                    row.blocks[-1] = self.take(table[len(row.blocks) - 1])
                    copies.append([tail, row.blocks[-1]])
                else:
                    self.unpublish(tail)
            while len(row.blocks) < self.pages(row.length + new):
                row.blocks.append(self.take(table[len(row.blocks)]))
            assert row.blocks == table
        return copies

    def commit(self, step):
        for row, new in step:
            row.length += new
            while (row.offered + 1) * self.page_size <= min(row.length, row.known):
                block, row.offered = row.blocks[row.offered], row.offered + 1
                self.published.setdefault(row.prefix(row.offered * self.page_size), block)

    def abandon(self, step, copies):
        originals = {copy: block for block, copy in copies}
        for row, _ in step:
            del row.tokens[max(row.length, row.known) :]
            self.release(row)
            if row.blocks and row.blocks[-1] in originals:
                self.free.add(row.blocks[-1])
                row.blocks[-1] = originals[row.blocks[-1]]


@functools.cache
def numbers(prefix, layer, side, heads, dim):
    """Return the key (side 0) or value of a prefix's last token [heads, dim], integers that any float has."""
    first = zlib.crc32(repr((prefix, layer, side)).encode())
    made = np.zeros((heads, dim), np.float32)
    for h in range(heads):
        for d in range(dim):
            made[h, d] = (first + 31 * h + 7 * d) % 127 - 63
    return made
