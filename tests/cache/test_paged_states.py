"""Whatever happens to sequences in blocks, each keeps its tokens: a paged cache beside a plain model."""

import functools
import tempfile

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from paged_model import Model, numbers
from scenes import first_quick
from surroundings import budget

from kvkit import KvkitError, Rope
from kvkit.cache import OutOfBlocksError, PagedCache, load
from kvkit.reference import cache as reference

LAYERS, HEADS, DIM = 2, 2, 8
NUM_BLOCKS, PAGE_SIZE = 11, 2
IDS = st.lists(st.sampled_from([0, 0, 1]), max_size=9)
WHICH = st.integers(0, 2**16)
some = precondition(lambda self: self.pairs)
few = precondition(lambda self: len(self.pairs) < 4)


@functools.cache
def stored(head, bit):
    """Return a head's numbers after a cache of this kind has stored them."""
    exact = np.frombuffer(head, np.float32)
    if not bit:
        return exact
    codes, scales = reference.quantize_heads(exact, bit, 8)
    return reference.dequantize_heads(codes, scales.astype(np.float16), 8, np.dtype(np.float32))


class Paged(RuleBasedStateMachine):
    """Sequences come, fork, grow, shrink and go; blocks are shared, copied, found again and evicted."""

    options: dict

    def __init__(self):
        super().__init__()
        self.cache = PagedCache(NUM_BLOCKS, PAGE_SIZE, LAYERS, HEADS, DIM, np.float32, **self.options)
        self.blocks = self.cache.blocks
        self.model = Model(NUM_BLOCKS, PAGE_SIZE)
        self.pairs = []  # (kvkit's sequence, the model's row)

    def pick(self, which):
        return self.pairs[which % len(self.pairs)]

    @few
    @rule(ids=IDS, salt=st.sampled_from([b"", b"", b"", b"adapter"]), at_once=st.booleans())
    def add(self, ids, salt, at_once):
        self.pairs.append((self.blocks.add(ids, salt=salt), self.model.add(salt, ids)))
        if at_once:
            self.compute_what_has_ids(-1)

    @some
    @few
    @rule(which=WHICH, counts=st.sampled_from([(0, 0), (1, 1), (0, 2), (3, 0)]))
    def fork(self, which, counts):
        seq, row = self.pick(which)
        self.pairs.append((self.blocks.fork(seq), self.model.fork(row)))
        self.compute([(seq, row, counts[0]), (*self.pairs[-1], counts[1])], LAYERS)

    @some
    @rule(which=WHICH, ids=IDS)
    def extend(self, which, ids):
        seq, row = self.pick(which)
        if row.known < row.length:
            with pytest.raises(KvkitError, match="ids"):
                self.blocks.extend(seq, ids)
        else:
            self.blocks.extend(seq, ids)
            row.tokens += ids
            row.known += len(ids)

    @some
    @rule(which=WHICH, length=st.integers(-4, 9))
    def crop(self, which, length):
        seq, row = self.pick(which)
        if row.length + length < 0:
            with pytest.raises(KvkitError, match="length"):
                self.blocks.crop(seq, length)
        else:
            self.blocks.crop(seq, length)
            self.model.crop(row, length if length > 0 else row.length + length)

    @some
    @rule(which=WHICH, begin=st.integers(0, 6), count=st.integers(0, 4), close=st.booleans())
    def edit_a_branch(self, which, begin, count, close):
        """Fork a sequence, remove and move tokens of the fork, and release it; no trace may be left."""
        if len(self.model.free) < 3:  # else the copies would evict published blocks
            return
        branch, rope = self.blocks.fork(self.pick(which)[0]), Rope(DIM)
        self.cache.remove(branch, begin, begin + count, close=close, rope=rope)
        self.cache.shift(branch, begin, None, 3, rope=rope)
        self.blocks.free(branch)

    @some
    @rule(which=WHICH)
    def free(self, which):
        seq, row = self.pick(which)
        self.pairs.remove((seq, row))
        self.blocks.free(seq)
        self.model.drop(row)

    @some
    @rule(which=WHICH)
    def compute_what_has_ids(self, which):
        seq, row = self.pick(which)
        self.compute([(seq, row, max(0, row.known - row.length))], LAYERS)

    @rule()
    def come_back(self):
        """Go on with a loaded file: sequences, published prefixes, and the order of their eviction."""
        with tempfile.TemporaryDirectory() as room:
            self.cache.save(f"{room}/cache.npz", [seq for seq, _ in self.pairs])
            self.cache = load(f"{room}/cache.npz")
        self.blocks, rows = self.cache.blocks, [row for _, row in self.pairs]
        self.pairs = list(zip(self.cache.sequences, rows, strict=True))

    @some
    @rule()
    def compute_a_token_each(self):
        self.compute([(seq, row, 1) for seq, row in self.pairs], LAYERS)

    @some
    @rule(
        counts=st.lists(st.sampled_from([0, 1, 1, 2, 3, 4]), min_size=1, max_size=5),
        shift=WHICH,
        layers=st.sampled_from([LAYERS, LAYERS, *range(LAYERS)]),
    )
    def compute_anything(self, counts, shift, layers):
        """Run a step of some sequences, in some order, perhaps not in all layers."""
        pairs = [self.pick(shift + i) for i in range(min(len(counts), len(self.pairs)))]
        self.compute([(*pair, count) for pair, count in zip(pairs, counts, strict=False)], layers)

    def compute(self, given, layers):
        step = [(row, count) for _, row, count in given]
        needed, available = self.model.needed(step), len(self.model.free) + len(self.model.idle)
        asked = [(seq, count) for seq, _, count in given]
        if needed > available:
            before = self.cache.cache.tobytes()
            with pytest.raises(OutOfBlocksError) as error:
                self.cache.begin_step(asked)
            assert (error.value.needed, error.value.available) == (needed, available)
            assert self.cache.cache.tobytes() == before
            return
        begun = self.cache.begin_step(asked)
        assert begun.index.sequences == tuple(seq for seq, *_ in given)
        copies = self.model.begin(step, [seq.blocks for seq, *_ in given])
        assert begun.index.copies.tolist() == copies
        for row, count in step:  # tokens without ids are some tokens, too
            row.tokens += [2] * (row.length + count - len(row.tokens))
        self.check_index(begun.index, step)
        for layer in range(layers):
            begun.update(*self.expected(step, layer, past=False), layer)
            self.check_contents(begun, step, layer)
        if layers == LAYERS:
            begun.commit()
            self.model.commit(step)
        else:
            begun.abandon()
            self.model.abandon(step, copies)

    def check_index(self, index, step):
        """Check that each slot is written once, in a block that one sequence holds and no prefix finds."""
        counts, past = [count for _, count in step], [row.length for row, _ in step]
        lengths, tables = np.add(past, counts).tolist(), [row.blocks for row, _ in step]
        width, slots = max(map(len, tables), default=0), index.slot_mapping.tolist()
        padded = [table + [-1] * (width - len(table)) for table in tables]
        assert index.block_tables.tolist() == padded
        assert index.cachestarts.tolist() == [[b if b < 0 else b * PAGE_SIZE for b in t] for t in padded]
        assert index.seqstarts.tolist() == np.cumsum([0, *counts]).tolist()
        assert index.kvstarts.tolist() == np.cumsum([0, *lengths]).tolist()
        assert (index.start_pos.tolist(), index.context_lens.tolist()) == (past, lengths)
        front = next((i for i, count in enumerate(counts) if count != 1), len(counts))
        most = front, max(counts, default=0), max(lengths, default=0)
        assert (index.decoding_batches, index.max_seqlen, index.max_kvlen) == most
        assert index.block_tables.dtype == index.slot_mapping.dtype == index.context_lens.dtype == np.int32
        assert index.cachestarts.dtype == index.kvstarts.dtype == np.int64
        assert len(set(slots)) == len(slots)
        for slot in slots:
            assert self.model.holders(slot // PAGE_SIZE) == 1
            assert slot // PAGE_SIZE not in self.model.published.values()
        assert slots == [
            row.blocks[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE
            for row, count in step
            for p in range(row.length, row.length + count)
        ]

    def expected(self, step, layer, past):
        """Return keys and values of the new tokens of a step, packed, or of all tokens."""
        for side in (0, 1):
            parts = [
                numbers(row.prefix(i + 1), layer, side, HEADS, DIM)
                for row, count in step
                for i in range(0 if past else row.length, row.length + count)
            ]
            yield np.array(parts, np.float32).reshape(-1, HEADS, DIM)

    def check_contents(self, begun, step, layer):
        bit = self.options.get("quant_bit", 0)
        for got, exact in zip(begun.gather(layer), self.expected(step, layer, past=True), strict=True):
            want = [stored(head.tobytes(), bit) for head in exact.reshape(-1, DIM)]
            np.testing.assert_array_equal(got, np.array(want, np.float32).reshape(exact.shape))

    @invariant()
    def counts(self):
        tables = [seq.blocks for seq, _ in self.pairs]
        assert tables == [row.blocks for _, row in self.pairs]
        assert [seq.length for seq, _ in self.pairs] == [row.length for _, row in self.pairs]
        ids = [row.tokens[: row.known] for _, row in self.pairs]
        assert [seq.token_ids.tolist() for seq, _ in self.pairs] == ids
        flat = [block for table in tables for block in table]
        assert self.blocks.references.tolist() == [flat.count(block) for block in range(NUM_BLOCKS)]
        assert self.blocks.available == len(self.model.free) + len(self.model.idle)

    @invariant()
    def contents(self):
        step = [(row, 0) for _, row in self.pairs]
        with self.cache.begin_step([(seq, 0) for seq, _ in self.pairs]) as begun:
            self.check_index(begun.index, step)
            for layer in range(LAYERS):
                self.check_contents(begun, step, layer)


KINDS = {
    "int8-layout1": {"quant_bit": 8, "cache_layout": 1},
    "float32-layout3": {},
    "int4-layout2": {"quant_bit": 4, "cache_layout": 2},
    "float32-layout0": {"cache_layout": 0},
}


@pytest.mark.parametrize("kind", first_quick(KINDS))
def test_every_sequence_keeps_its_tokens(kind):
    class Machine(Paged):
        options = KINDS[kind]

    run_state_machine_as_test(Machine, settings=settings(max_examples=budget(60), stateful_step_count=50))
