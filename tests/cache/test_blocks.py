"""Blocks and steps: the specification's vectors, copies on write, crops, cost."""

import time

import numpy as np
import pytest
from block_scenes import P, filled, refused, run, state

from kvkit.cache import BlockAllocator


def specified():
    """Those of the vectors: A of 5 tokens in blocks 2 and 0, B of none; 3, 1 and 4 are next."""
    blocks = BlockAllocator(5, P)
    singles = [blocks.add() for _ in range(5)]
    run(blocks, *((seq, 1) for seq in singles))
    for block in (4, 1, 3, 0, 2):
        blocks.free(singles[block])
    a, b = blocks.add(), blocks.add()
    run(blocks, (a, 5))
    assert a.blocks == [2, 0]
    return blocks, a, b


# The vectors


def test_step_vector():
    blocks, a, b = specified()
    step = run(blocks, (b, 6), (a, 1))
    expected = {
        "seqstarts": [0, 1, 7],
        "start_pos": [5, 0],
        "kvstarts": [0, 6, 12],
        "cachestarts": [[8, 0], [12, 4]],
        "slot_mapping": [1, 12, 13, 14, 15, 4, 5],
        "block_tables": [[2, 0], [3, 1]],
        "context_lens": [6, 6],
        "copies": [],
        "order": [1, 0],
    }
    for name, values in expected.items():
        tensor = getattr(step, name)
        assert tensor.tolist() == values, name
        narrow = name in ("slot_mapping", "block_tables", "context_lens")
        assert tensor.dtype == (np.int32 if narrow else np.int64), name
    assert (step.decoding_batches, step.max_seqlen, step.max_kvlen) == (1, 6, 6)
    assert step.sequences == (a, b)
    assert step.copies.shape == (0, 2)


def test_fork_vector():
    blocks, a, b = specified()
    run(blocks, (a, 1), (b, 6))
    a2 = blocks.fork(a)
    assert blocks.references[[2, 0]].tolist() == [2, 2]
    step = run(blocks, (a2, 1))
    assert step.copies.tolist() == [[0, 4]]
    assert a2.blocks == [2, 4]
    assert step.slot_mapping.tolist() == [18]
    assert blocks.references[[0, 4]].tolist() == [1, 1]
    step = run(blocks, (a, 1))
    assert step.copies.tolist() == []
    assert step.slot_mapping.tolist() == [2]
    assert a.blocks == [2, 0]


def test_reuse_vector():
    """P = 4: 9 tokens reuse 8, 8 tokens reuse 4."""
    blocks = BlockAllocator(8, P)
    first = filled(blocks, range(9))
    assert [blocks.add(range(n)).length for n in (9, 8, 5, 4, 1)] == [8, 4, 4, 0, 0]
    assert blocks.add(()).length == 0
    assert blocks.references[first.blocks].tolist() == [4, 2, 1]


# Steps


def test_tensors_of_ragged_lengths():
    """By plain loops."""
    rng = np.random.default_rng(0)
    blocks = BlockAllocator(60, 3, slot_dtype=np.int64)
    seqs = [blocks.add() for _ in range(7)]
    for counts in ((3, 1, 4, 1, 0, 9, 1), (1, 1, 1, 1, 1, 1, 1), (0, 2, 1, 5, 0, 0, 30), (0,) * 7):
        before = [seq.length for seq in seqs]
        order = [i for i in range(7) if counts[i] == 1] + [i for i in range(7) if counts[i] != 1]
        step = run(blocks, *zip(seqs, counts, strict=True))
        assert step.order.tolist() == order
        assert step.sequences == tuple(seqs[i] for i in order)
        slots, seqstarts, kvstarts = [], [0], [0]
        for b, i in enumerate(order):
            seqstarts.append(seqstarts[-1] + counts[i])
            kvstarts.append(kvstarts[-1] + before[i] + counts[i])
            assert step.start_pos[b] == before[i]
            table = seqs[i].blocks
            assert len(table) == -(-(before[i] + counts[i]) // 3)
            assert step.block_tables[b].tolist() == table + [-1] * (step.block_tables.shape[1] - len(table))
            starts = [3 * block for block in table]
            assert step.cachestarts[b].tolist() == starts + [-1] * (step.cachestarts.shape[1] - len(table))
            slots += [3 * table[p // 3] + p % 3 for p in range(before[i], before[i] + counts[i])]
        assert step.seqstarts.tolist() == seqstarts
        assert step.kvstarts.tolist() == kvstarts
        assert step.context_lens.tolist() == np.diff(kvstarts).tolist()
        assert step.slot_mapping.tolist() == slots
        assert len(set(slots)) == len(slots)
        assert step.slot_mapping.dtype == np.int64
        assert step.cachestarts.shape[1] == max(len(seq.blocks) for seq in seqs)
        assert step.decoding_batches == counts.count(1)
        assert step.max_seqlen == max(counts)
        assert step.max_kvlen == max(np.diff(kvstarts))
        rng.shuffle(seqs)


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
    step.commit()
    assert not step.is_open
    assert seq.length == 3
    for action in (step.commit, step.abandon):
        assert refused(blocks, action, sequences=[seq]).startswith("step: ")


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


# Copy on write


def test_all_holders_of_a_block_write():
    """The last of them needs no copy, so three blocks are enough."""
    blocks = BlockAllocator(3, P)
    a = filled(blocks, range(2))
    b, c = blocks.fork(a), blocks.fork(a)
    step = run(blocks, (b, 1), (a, 1), (c, 1))
    assert step.copies.tolist() == [[0, 1], [0, 2]]
    assert [seq.blocks for seq in (a, b, c)] == [[2], [1], [0]]
    assert step.slot_mapping.tolist() == [6, 10, 2]
    assert blocks.references.tolist() == [1, 1, 1]


def test_some_holders_of_a_block_write():
    blocks = BlockAllocator(3, P)
    a = filled(blocks, range(2))
    b, c = blocks.fork(a), blocks.fork(a)
    step = run(blocks, (b, 2), (c, 1), (a, 0))
    assert step.copies.tolist() == [[0, 1], [0, 2]]
    assert [seq.blocks for seq in (a, b, c)] == [[0], [2], [1]]


def test_a_fork_of_full_blocks_copies_nothing():
    blocks = BlockAllocator(4, P)
    a = filled(blocks, range(P))
    b = blocks.fork(a)
    step = run(blocks, (a, 1), (b, 1))
    assert step.copies.tolist() == []
    assert (a.blocks, b.blocks) == ([0, 1], [0, 2])


def test_forks_grow_apart():
    """Ids and hashes of a fork are its own."""
    blocks = BlockAllocator(9, P)
    a = filled(blocks, [1, 2, 3])
    b = blocks.fork(a)
    for seq, token in ((a, 4), (b, 5)):
        blocks.extend(seq, [token])
        run(blocks, (seq, 1))
    assert blocks.add([1, 2, 3, 4, 0]).blocks == a.blocks
    assert blocks.add([1, 2, 3, 5, 0]).blocks == b.blocks


# Crop


@pytest.mark.parametrize(
    ("length", "left"), [(4, 4), (-1, 5), (0, 6), (9, 6), (6, 6), (-6, 0), (1, 1), (-2, 4)], ids=str
)
def test_crop(length, left):
    blocks = BlockAllocator(9, P)
    seq = filled(blocks, range(6))
    blocks.crop(seq, length)
    assert seq.length == left
    assert len(seq.blocks) == -(-left // P)
    assert blocks.available == 9 - len(seq.blocks)
    assert seq.token_ids.tolist() == list(range(left))


def test_crop_forgets_ids_to_come():
    blocks = BlockAllocator(9, P)
    seq = blocks.add(range(12))
    run(blocks, (seq, 6))
    blocks.crop(seq, 0)
    assert seq.token_ids.tolist() == list(range(12))
    blocks.crop(seq, -1)
    assert seq.token_ids.tolist() == list(range(5))


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
