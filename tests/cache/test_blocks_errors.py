"""What the allocator refuses, and that nothing has changed then."""

import pickle

import numpy as np
import pytest
from block_scenes import P, filled, refused, run, state

from kvkit import KvkitError
from kvkit.cache import BlockAllocator, OutOfBlocksError


def test_out_of_blocks_counts_copies_and_changes_nothing():
    blocks = BlockAllocator(4, P)
    a, idle = filled(blocks, range(6)), filled(blocks, [7, 7, 7, 7])
    b = blocks.fork(a)
    blocks.free(idle)
    assert blocks.available == 2
    before = state(blocks, a, b)
    with pytest.raises(OutOfBlocksError) as error:
        blocks.begin_step([(a, 4), (b, 3)])  # a copy, and one more each
    assert (error.value.needed, error.value.available) == (3, 2)
    assert state(blocks, a, b) == before
    assert str(error.value) == "num_blocks: expected 3 free or evictable blocks, got 2"
    assert pickle.loads(pickle.dumps(error.value)).needed == 3
    assert blocks.add([7, 7, 7, 7, 1]).length == 4
    refused(blocks, blocks.begin_step, [(a, 2), (b, 3)], sequences=[a, b])
    run(blocks, (a, 2), (b, 2))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((0, 4), "num_blocks"),
        ((4, 0), "page_size"),
        ((4.0, 4), "num_blocks"),
        ((2**20, 2**12), "slot_dtype"),
        ((4, 4, "model"), "identity"),
        ((4, 4, b"", np.int16), "slot_dtype"),
    ],
    ids=str,
)
def test_wrong_allocators(arguments, name):
    keywords = dict(zip(("num_blocks", "page_size", "identity", "slot_dtype"), arguments, strict=False))
    with pytest.raises(KvkitError, match=f"^{name}: expected "):
        BlockAllocator(**keywords)


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
