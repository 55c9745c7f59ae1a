"""The paged cache: attention over shared blocks has the bits of attention over contiguous tokens."""

import numpy as np
import pytest
from paged_scenes import DIM, HEADS, KINDS, LAYERS, P, Plain, paged
from scenes import assert_same

import kvkit
from kvkit.cache import BlockAllocator
from kvkit.tools.vectors.draws import normal

layouts = pytest.mark.parametrize("layout", range(4))


class Server:
    """Sequences in a paged cache, and their keys and values as plain arrays."""

    def __init__(self, rng, kind, layout):
        self.rng, self.kind, self.layout, self.cache = rng, kind, layout, paged(kind, layout)
        self.dtype = np.dtype(KINDS[kind][0])
        self.contexts = {}  # sequence -> layer -> keys, values

    def add(self, ids, like=None):
        """Add a sequence; blocks that it takes over hold the tokens of another one."""
        seq = self.cache.blocks.add(ids)
        self.contexts[seq] = [[side[: seq.length] for side in sides] for sides in self.contexts.get(like, [])]
        if not seq.length:
            self.contexts[seq] = [[np.zeros((0, HEADS, DIM), self.dtype)] * 2 for _ in range(LAYERS)]
        return seq

    def fork(self, seq):
        other = self.cache.blocks.fork(seq)
        self.contexts[other] = [list(sides) for sides in self.contexts[seq]]
        return other

    def crop(self, seq, length):
        self.cache.blocks.crop(seq, length)
        self.contexts[seq] = [[side[: seq.length] for side in sides] for sides in self.contexts[seq]]

    def run(self, *pairs, together=True, **options):
        """Run a step through all layers, and compare it with the plain operators bit for bit."""
        plain = Plain(self.kind, self.layout)
        with self.cache.begin_step(pairs) as step:
            seqs, counts = step.index.sequences, np.diff(step.index.seqstarts).tolist()
            tokens = sum(counts)
            for layer in range(LAYERS):
                query = normal(self.rng, (tokens, 4 * HEADS, DIM), self.dtype)
                new = [normal(self.rng, (tokens, HEADS, DIM), self.dtype) for _ in range(2)]
                for seq, begin, count in zip(seqs, step.index.seqstarts, counts, strict=False):
                    for side in (0, 1):
                        whole = [self.contexts[seq][layer][side], new[side][begin : begin + count]]
                        self.contexts[seq][layer][side] = np.concatenate(whole)
                if together:
                    got = step.multi_head_cache_attention(query, *new, layer, **options)
                else:
                    step.update(*new, layer)
                    got = step.attend(query, layer, **options)
                contexts = [self.contexts[seq][layer] for seq in seqs]
                decoding = step.index.decoding_batches
                want = plain.attend(query, contexts, counts, layer, decoding, **options)
                if options.get("return_lse"):
                    assert_same(got[1], want[1])
                    got, want = got[0], want[0]
                assert_same(got, want)
        return step


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("float16", 3),
        ("bfloat16", 1),
        ("int8", 0),
        *((kind, i) for kind in ("float32", "int4") for i in range(4)),
    ],
)
def test_attention_of_sequences_that_share_blocks(kind, layout, rng):
    """Prompts that begin alike, forks, decoding, crops: as if every context lay in one piece."""
    server = Server(rng, kind, layout)
    first = server.add(range(11))
    server.run((first, 11))
    second = server.add([*range(8), 50, 51], like=first)
    assert second.length == 8
    assert second.blocks == first.blocks[:2]
    server.run((first, 1), (second, 2))
    third = server.fork(first)
    server.run((third, 1), (second, 1), (first, 1), together=False)
    fourth = server.fork(third)
    step = server.run((second, 3), (fourth, 1), (first, 2), (third, 5), together=False)
    assert len(step.index.copies) == 1
    server.crop(third, 6)  # into a published block that others hold
    server.crop(second, -5)
    step = server.run((third, 4), (second, 1), (first, 1))
    assert len(step.index.copies) == 1
    server.run(*((seq, 1) for seq in (first, second, third, fourth)))


def test_options_of_attention(rng):
    server = Server(rng, "float32", 3)
    seqs = [server.add(range(n)) for n in (9, 1, 6)]
    sinks = np.arange(4 * HEADS, dtype=np.float32)
    for options in (
        {"return_lse": True},
        {"window": (2, 0), "sinks": sinks, "softcap": 5.0},
        {"is_alibi": True, "softmax_scale": 0.3},
        {"is_causal": False},
    ):
        for together in (True, False):
            server.run(*((seq, 1 + i) for i, seq in enumerate(seqs)), together=together, **options)


def test_masks_and_outputs(rng):
    cache = paged()
    seqs = [cache.blocks.add() for _ in range(2)]
    with cache.begin_step([(seqs[0], 3), (seqs[1], 5)]) as step:
        query, key, value = (normal(rng, (8, HEADS, DIM), np.float32) for _ in range(3))
        mask = rng.random((8, 8)) < 0.7
        mask[:, [0, 3]] = True
        out = np.empty_like(query)
        assert step.multi_head_cache_attention(query, key, value, 0, mask, out=out) is out
        step.update(key, value, 1)
        assert_same(step.attend(query, 1, mask), out)
        expected = kvkit.dynamic_batching.multi_head_attention(
            query, key, value, [0, 3, 8], [0, 3, 8], 0, None, None, mask, num_heads=HEADS, head_dim=DIM
        )
        np.testing.assert_allclose(out, expected, atol=1e-6)


def test_rows_beside_sequences(rng):
    """Both take their blocks from one pool and keep what they have."""
    cache, seq = paged(), None
    states, new = normal(rng, (2, HEADS, 5, DIM), np.float32), normal(rng, (3, HEADS, DIM), np.float32)
    for begin, end in ((0, 4), (4, 5)):
        for layer in range(LAYERS):
            cache.update(states[:, :, begin:end], states[:, :, begin:end], layer)
        seq = seq or cache.blocks.add()
        with cache.begin_step([(seq, 3)]) as step:
            for layer in range(LAYERS):
                step.update(new, new, layer)
    assert_same(step.gather(1)[0], np.concatenate([new, new]))
    assert_same(cache.layers[1].keys, states)
    assert cache.blocks.available == 24 - 2 * 2 - 2


# The storage


@layouts
def test_the_storage_is_a_pmx_cache(layout, rng):
    """The operators on the arrays themselves, with the index tensors of the step."""
    cache, other = (paged("int4", layout) for _ in range(2))
    rows = 24 * P
    shapes = [
        (rows, LAYERS, 2, HEADS), (LAYERS, rows, 2, HEADS), (LAYERS, 2, rows, HEADS), (LAYERS, 2, HEADS, rows)
    ]  # fmt: skip
    assert cache.cache.shape == (*shapes[layout], DIM // 2)
    assert cache.scale.shape == (*shapes[layout], 1)
    assert (cache.cache.dtype, cache.scale.dtype) == (np.int8, np.float32)
    seq, same = cache.blocks.add(), other.blocks.add()
    new = [normal(rng, (7, HEADS, DIM), np.float16) for _ in range(2)]
    with cache.begin_step([(seq, 7)]) as step, other.begin_step([(same, 7)]) as own:
        for layer in range(LAYERS):
            own.update(*new, layer)
            index = step.index
            kvkit.dynamic_batching.key_value_cache(
                *new, index.seqstarts, index.kvstarts, index.cachestarts, index.start_pos, index.max_seqlen,
                index.max_kvlen, cache.cache, cache.scale, num_layer=LAYERS, layer_idx=layer, quant_bit=4,
                quant_group=16, cache_mode=1, cache_layout=layout, page_size=P,
            )  # fmt: skip
            step.written.add(layer)
    assert_same(cache.cache, other.cache)
    assert_same(cache.scale, other.scale)


@layouts
def test_ascend_operators_on_the_blocks(layout, rng):
    """Slots and block tables of a step; the layer's blocks as Ascend sees them, in any layout."""
    cache = paged("float16", layout)
    seqs = [cache.blocks.add() for _ in range(3)]
    for counts in ((5, 9, 1), (1, 1, 1)):
        with cache.begin_step(zip(seqs, counts, strict=True)) as step:
            index = step.index
            query = normal(rng, (sum(counts), 2 * HEADS, DIM), np.float16)
            new = [normal(rng, (sum(counts), HEADS, DIM), np.float16) for _ in range(2)]
            for layer in range(LAYERS):
                blocks = cache.layers[layer].key_cache, cache.layers[layer].value_cache
                assert all(view.shape == (24, P, HEADS, DIM) for view in blocks)
                kvkit.ascend.reshape_and_cache(*new, *blocks, index.slot_mapping)
                step.written.add(layer)
                key, value = step.gather(layer)
                for i, count in enumerate(np.diff(index.seqstarts)):
                    end = index.kvstarts[i + 1]
                    first = index.seqstarts[i]
                    assert_same(key[end - count : end], new[0][first : first + count])
                    assert_same(value[end - count : end], new[1][first : first + count])
    got = kvkit.ascend.paged_attention(query, *blocks, index.block_tables, index.context_lens)
    assert_same(got, step.attend(query, LAYERS - 1))


def test_an_allocator_alone_serves_other_caches(rng):
    """Blocks of one's own, copied as the step says."""
    blocks = BlockAllocator(8, P)
    key_cache, value_cache = (np.zeros((8, P, HEADS, DIM), np.float16) for _ in range(2))
    seq, held = blocks.add(), {}
    for count, fork in ((6, False), (1, True), (3, False)):
        forked = blocks.fork(seq) if fork else None
        with blocks.begin_step([(seq, count)]) as step:
            ends = np.arange(1, len(step.copies) + 1)
            kvkit.ascend.block_copy(key_cache, value_cache, *step.copies.T, ends)
            new = [normal(rng, (count, HEADS, DIM), np.float16) for _ in range(2)]
            kvkit.ascend.reshape_and_cache(*new, key_cache, value_cache, step.slot_mapping)
        held[count] = new
        if fork:
            assert forked.blocks[0] == seq.blocks[0]
            assert forked.blocks[1] != seq.blocks[1]
    key, _ = kvkit.ascend.paged_cache_load(key_cache, value_cache, step.block_tables, step.context_lens)
    assert_same(key, np.concatenate([held[count][0] for count in (6, 1, 3)]))
