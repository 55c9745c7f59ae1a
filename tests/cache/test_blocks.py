"""Blocks: steps begin and end, prefixes are found by their hashes, and what is wrong changes nothing."""

import hashlib
import pickle
import time

import numpy as np
import pytest
from block_scenes import P, filled, refused, run, state

from kvkit.cache import BlockAllocator, OutOfBlocksError


def test_hashes_are_as_specified():
    """sha256 over the hash before and ids as little-endian int64."""
    blocks = BlockAllocator(4, 2, identity=b"model")
    seq = filled(blocks, [1, -2, 3, 2**40])
    chain = seq._chain[0]
    for ids, link in (([1, -2], seq._chain[1]), ([3, 2**40], seq._chain[2])):
        chain = hashlib.sha256(chain + b"".join(i.to_bytes(8, "little", signed=True) for i in ids)).digest()
        assert link == chain


def test_what_decides_the_first_hash():
    def root(page_size=2, identity=b"model", salt=b"adapter"):
        return BlockAllocator(4, page_size, identity=identity).add(salt=salt)._chain[0]

    others = root(page_size=3), root(identity=b"other"), root(salt=b""), root(3, b"modela", b"dapter")
    assert root() == root()
    assert len({root(), *others}) == 5


def test_a_hash_alone_is_not_believed(monkeypatch):
    """Two chains with one hash stay apart by their ids."""
    monkeypatch.setattr("kvkit.cache.blocks.allocator.chain_hash", lambda chain, ids: b"the same")
    blocks = BlockAllocator(9, 2)
    filled(blocks, [1, 2, 3])
    assert blocks.add([7, 8, 3]).length == 0
    assert blocks.add([1, 2, 3]).length == 2


def test_out_of_blocks_says_how_many():
    error = pickle.loads(pickle.dumps(OutOfBlocksError(3, 2)))
    assert (error.needed, error.available) == (3, 2)
    assert str(error) == "num_blocks: expected 3 free or evictable blocks, got 2"


def test_wrong_arguments():
    blocks, elsewhere = BlockAllocator(9, P), BlockAllocator(9, P)
    seq, ended, foreign = filled(blocks, range(5)), blocks.add(), elsewhere.add()
    blocks.free(ended)
    for action in (blocks.fork, blocks.free, lambda s: blocks.crop(s, 1), lambda s: blocks.extend(s, [1])):
        for other in (ended, foreign, None, 0):
            assert refused(blocks, action, other, sequences=[seq]).startswith("seq: expected ")
    wrong = {
        "seq": [[(ended, 1)], [(foreign, 1)], [(0, 1)]],
        "sequences": [[(seq, 1), (seq, 1)], [seq], [(seq,)], seq, None],
        "new tokens": [[(seq, -1)], [(seq, 1.0)], [(seq, True)], [(seq, None)]],
    }
    for name, steps in wrong.items():
        for step in steps:
            assert refused(blocks, blocks.begin_step, step, sequences=[seq]).startswith(f"{name}: expected ")
    for ids in ([1.5], [[1]], ["a"], [2**63], 3):
        assert refused(blocks, blocks.add, ids).startswith("token_ids: expected ")
        assert refused(blocks, blocks.extend, seq, ids, sequences=[seq]).startswith("token_ids: expected ")
    assert refused(blocks, blocks.add, [1], salt="s").startswith("salt: expected ")
    for length in (-6, 1.0, None):
        assert refused(blocks, blocks.crop, seq, length, sequences=[seq]).startswith("length: expected ")


def test_a_step_of_nothing():
    blocks = BlockAllocator(2, P)
    step = run(blocks)
    shapes = [getattr(step, name).shape for name in ("seqstarts", "cachestarts", "slot_mapping", "copies")]
    assert shapes == [(1,), (0, 0), (0,), (0, 2)]
    assert (step.decoding_batches, step.max_seqlen, step.max_kvlen) == (0, 0, 0)


def test_one_step_at_a_time():
    blocks = BlockAllocator(4, P)
    seq, other = blocks.add(range(3)), blocks.add()
    step = blocks.begin_step([(seq, 3)])
    assert step.is_open
    assert seq.length == 0
    assert "open step" in refused(blocks, blocks.begin_step, [], sequences=[seq])
    for action in (blocks.fork, blocks.free, lambda s: blocks.crop(s, -1)):
        assert refused(blocks, action, seq, sequences=[seq]).startswith(("seq: ", "length: "))
    blocks.free(blocks.fork(other))  # what the step does not write may change
    blocks.extend(seq, [3])
    step.commit()
    without = blocks.begin_step([(other, 2)])
    assert "2 tokens" in refused(blocks, blocks.extend, other, [1], sequences=[other])
    without.commit()
    assert not step.is_open
    assert seq.length == 3
    for action in (step.commit, step.abandon):
        assert refused(blocks, action, sequences=[seq]).startswith("step: ")


@pytest.mark.parametrize("ends", [False, True], ids=["shared", "ended"])
def test_an_abandoned_step_gives_its_copies_back(ends):
    """The branch has its shared block again, even if the other sequence has ended since: nobody copied it."""
    blocks = BlockAllocator(3, 4)
    seq = blocks.add(range(6))
    run(blocks, (seq, 6))
    branch = blocks.fork(seq)
    step = blocks.begin_step([(branch, 1)])
    assert step.copies.tolist() == [[1, 2]]
    if ends:
        blocks.free(seq)
    step.abandon()
    assert (branch.blocks, blocks.available) == ([0, 1], 1)
    assert blocks.references.tolist() == ([1, 1, 0] if ends else [2, 2, 0])
    assert len(run(blocks, (branch, 1)).copies) == (not ends)


def test_an_exception_abandons_the_step():
    blocks = BlockAllocator(4, P)
    seq = filled(blocks, range(5))
    before = state(blocks, seq)

    def interrupted():
        with blocks.begin_step([(seq, 9)]):
            assert seq.blocks == [0, 1, 2, 3]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    assert state(blocks, seq) == before
    assert run(blocks, (seq, 9)).slot_mapping[0] == 5


# Cost


@pytest.mark.perf
@pytest.mark.parametrize("tokens", [100, 4000])
def test_a_step_of_64_sequences_takes_microseconds(tokens, microsecond):
    """With all its tensors, and its end: 150 to 200 on 2 quiet cores, whatever the sequences hold."""
    blocks = BlockAllocator(64 * (tokens // 16 + 8), 16)
    seqs = [filled(blocks, np.arange(tokens) + i) for i in range(64)]
    seconds = []
    for _ in range(60):
        begin = time.thread_time()
        step = blocks.begin_step([(seq, 1) for seq in seqs])
        assert len(step.slot_mapping) == len(step.block_tables) == len(step.context_lens) == 64
        step.commit()
        seconds.append(time.thread_time() - begin)
    assert min(seconds) < 400 * microsecond
