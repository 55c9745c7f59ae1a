"""Prefixes: what a new sequence finds, and what is evicted."""

import hashlib

import numpy as np
import pytest
from block_scenes import P, filled, refused, run

from kvkit.cache import BlockAllocator


def test_hashes_are_chained():
    """The same ids behind another beginning are other tokens."""
    blocks = BlockAllocator(9, 2)
    filled(blocks, [1, 2, 3, 4, 0])
    assert blocks.add([3, 4, 0]).length == 0
    assert blocks.add([9, 2, 3, 4, 0]).length == 0
    assert blocks.add([1, 2, 3, 5, 0]).length == 2


def test_hashes_are_as_specified():
    """sha256 over the hash before and ids as little-endian int64."""
    blocks = BlockAllocator(4, 2, identity=b"model")
    seq = filled(blocks, [1, -2, 3, 2**40])
    chain = seq.chain[0]
    for ids, link in (([1, -2], seq.chain[1]), ([3, 2**40], seq.chain[2])):
        chain = hashlib.sha256(chain + b"".join(i.to_bytes(8, "little", signed=True) for i in ids)).digest()
        assert link == chain


def test_what_decides_the_first_hash():
    def root(page_size=2, identity=b"model", salt=b"adapter"):
        return BlockAllocator(4, page_size, identity=identity).add(salt=salt).chain[0]

    others = [
        root(page_size=3),
        root(identity=b"other"),
        root(salt=b""),
        root(identity=b"modela", salt=b"dapter"),
    ]
    assert root() == root()
    assert len({root(), *others}) == 5


def test_salt_keeps_sequences_apart():
    blocks = BlockAllocator(9, 2)
    seq = blocks.add([1, 2, 3], salt=b"adapter")
    run(blocks, (seq, 3))
    assert blocks.add([1, 2, 3]).length == 0
    assert blocks.add([1, 2, 3], salt=b"adapter").length == 2


def test_a_hash_alone_is_not_believed(monkeypatch):
    """Two chains with one hash stay apart by their ids."""
    monkeypatch.setattr("kvkit.cache.blocks.allocator.chain_hash", lambda chain, ids: b"the same")
    blocks = BlockAllocator(9, 2)
    filled(blocks, [1, 2, 3])
    assert blocks.add([7, 8, 3]).length == 0
    assert blocks.add([1, 2, 3]).length == 2


def test_published_when_every_layer_has_written():
    blocks = BlockAllocator(9, 2)
    seq = blocks.add([1, 2, 3])
    with blocks.begin_step([(seq, 3)]):
        assert blocks.add([1, 2, 3]).length == 0
    assert blocks.add([1, 2, 3]).length == 2
    other = blocks.add([5, 6, 7])
    blocks.begin_step([(other, 3)]).abandon()
    assert blocks.add([5, 6, 7]).length == 0


def test_tokens_without_ids_are_not_found():
    blocks = BlockAllocator(9, 2)
    seq = blocks.add([1, 2, 3])
    run(blocks, (seq, 5))
    assert blocks.add([1, 2, 3, 4, 5]).length == 2
    assert "5 tokens" in refused(blocks, blocks.extend, seq, [6], sequences=[seq])


def test_ids_may_come_in_parts():
    blocks = BlockAllocator(9, 2)
    seq = blocks.add([1])
    run(blocks, (seq, 1))
    blocks.extend(seq, np.array([2, 3, 4], np.int32))
    run(blocks, (seq, 1))
    assert seq.token_ids.tolist() == [1, 2, 3, 4]
    assert blocks.add([1, 2, 3, 4, 5]).length == 2
    run(blocks, (seq, 2))
    assert blocks.add([1, 2, 3, 4, 5]).length == 4


def test_of_equal_blocks_the_first_is_found():
    blocks = BlockAllocator(9, 2)
    pair = [blocks.add([1, 2, 3]) for _ in range(2)]
    run(blocks, *((seq, 3) for seq in pair))
    assert blocks.add([1, 2, 3]).blocks == pair[0].blocks[:1]
    blocks.free(pair[1])
    assert blocks.add([1, 2, 3]).blocks == pair[0].blocks[:1]


# Eviction


def found(blocks):
    """Which of the tokens 0, 1, 2 still have a block."""
    seqs = [blocks.add([i, i, 9]) for i in range(3)]
    lengths = [seq.length for seq in seqs]
    for seq in seqs:
        blocks.free(seq)
    return [i for i in range(3) if lengths[i]]


def test_eviction_begins_when_nothing_is_free():
    blocks = BlockAllocator(5, 2)
    for i in range(3):
        blocks.free(filled(blocks, [i, i]))
    assert blocks.available == 5
    taken = blocks.add()
    run(blocks, (taken, 4))
    assert found(blocks) == [0, 1, 2]
    run(blocks, (taken, 1))
    assert len(found(blocks)) == 2


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 1, 0)], ids=str)
def test_the_least_recently_used_goes_first(order):
    """Used is, what a sequence let go of last."""
    blocks = BlockAllocator(3, 2)
    for seq in [filled(blocks, [i, i]) for i in range(3)]:
        blocks.free(seq)
    for i in order:
        blocks.free(blocks.add([i, i, 9]))
    taken = blocks.add()
    for i in order:
        assert run(blocks, (taken, 2)).block_tables[0, -1] == i
    assert found(blocks) == []


def test_the_end_of_a_chain_goes_before_its_beginning():
    blocks = BlockAllocator(4, 2)
    blocks.free(filled(blocks, range(8)))
    run(blocks, (blocks.add(), 3))
    assert blocks.add(range(9)).length == 4


def test_blocks_that_are_found_are_not_evicted():
    blocks = BlockAllocator(2, 2)
    blocks.free(filled(blocks, [1, 2]))
    seq = blocks.add([1, 2, 3])
    assert blocks.available == 1
    refused(blocks, blocks.begin_step, [(seq, 4)], sequences=[seq])
    assert run(blocks, (seq, 1)).block_tables.tolist() == [[0, 1]]


# Crops into published blocks


def test_crop_into_a_published_block_withdraws_it_before_the_next_write():
    blocks = BlockAllocator(9, P)
    seq = filled(blocks, range(5))
    blocks.crop(seq, 2)
    found = blocks.add(range(5))
    assert found.length == 4  # still whole
    blocks.free(found)
    blocks.extend(seq, [7, 8])
    step = run(blocks, (seq, 1))
    assert step.copies.tolist() == []
    assert blocks.add(range(5)).length == 0
    run(blocks, (seq, 1))
    assert blocks.add([0, 1, 7, 8, 9]).blocks == [0]


def test_crop_into_a_shared_published_block_copies_it():
    blocks = BlockAllocator(9, P)
    seq = filled(blocks, range(5))
    blocks.crop(seq, 2)
    found = blocks.add(range(5))
    step = run(blocks, (seq, 1))
    assert step.copies.tolist() == [[0, 1]]
    assert found.blocks == [0]
    assert blocks.add(range(5)).length == 4
