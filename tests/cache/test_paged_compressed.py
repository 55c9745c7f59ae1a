"""PagedCompressedCache: any calls on many sequences, beside one CompressedLayer for each, bit for bit."""

import contextlib
import copy

import ml_dtypes
import numpy as np
import pytest

import kvkit
from kvkit import KvkitError
from kvkit.cache import Cache, CompressedLayer, OutOfBlocksError, PagedCompressedCache, load

F32, BF16 = np.float32, ml_dtypes.bfloat16
ROPE = kvkit.Rope(4, interleaved=True)
DRAFTS, PAGE, HEADS = 3, 8, 2


def compressed_layers(rng, dim=8, rope_dim=4, index_dim=8, format=None, rope=ROPE, drafts=DRAFTS):
    """Return empty layers of the three kinds, with weights."""
    options = {"window": 6, "drafts": drafts, "format": format}
    csa = CompressedLayer(dim, rope_dim, ratio=4, index_dim=index_dim, index_topk=3, **options)
    layers = [
        CompressedLayer(dim, rope_dim, **options),
        csa,
        CompressedLayer(dim, rope_dim, ratio=8, **options),
    ]
    for layer in layers[1:]:
        halves = 2 if layer.index_dim else 1
        dims = [dim] + [index_dim] * (layer.index_dim > 0)
        pairs = [(rng.standard_normal((layer.ratio, halves * d), F32), 1 + rng.random(d, F32)) for d in dims]
        layer.set_weights(*pairs, rope=rope)
    layers[0].rope = rope
    return layers


class Beside:
    """Makes every call on a paged cache and on one list of layers for each sequence."""

    def __init__(self, rng, dtype=F32, blocks=12, slots=4, **options):
        self.rng, self.dtype = rng, dtype
        self.layers = compressed_layers(rng, **options)
        self.cache = PagedCompressedCache(
            self.layers, blocks, slots, page_size=PAGE, step_tokens=9, dtype=dtype
        )
        self.alone = {}

    def add(self):
        seq = self.cache.add()
        self.alone[seq] = copy.deepcopy(self.layers)
        return seq

    def inputs(self, layer, tokens):
        """Return (row, compressor, indexer, query, index) of some tokens."""

        def normal(*shape):
            return self.rng.standard_normal((tokens, *shape), F32).astype(self.dtype)

        halves = 2 if layer.index_dim else 1
        compressor = (normal(halves * layer.dim), normal(halves * layer.dim)) if layer.ratio else None
        indexer = index = None
        if layer.index_dim:
            indexer = normal(halves * layer.index_dim), normal(halves * layer.index_dim)
            index = normal(HEADS, layer.index_dim), normal(HEADS)
        return normal(layer.dim), compressor, indexer, normal(HEADS, layer.dim), index

    def step(self, counts):
        """Append tokens to sequences {sequence: count}; both attend alike."""
        with self.cache.begin_step(counts.items()) as step:
            for i, layer in enumerate(self.layers):
                row, compressor, indexer, query, index = self.inputs(layer, sum(counts.values()))
                step.update(i, row, compressor, indexer)
                output, lse = step.attend(i, query, index=index, return_lse=True)
                begin = 0
                for seq, count in counts.items():
                    part, begin = slice(begin, begin + count), begin + count

                    def of(pair, part=part):
                        return None if pair is None else tuple(x[None, part] for x in pair)

                    alone = self.alone[seq][i]
                    alone.update(row[None, None, part], of(compressor), indexer=of(indexer))
                    expected = alone.attend(
                        query[None, part].swapaxes(1, 2), index=of(index), return_lse=True
                    )
                    np.testing.assert_array_equal(output[part], expected[0][0].swapaxes(0, 1))
                    np.testing.assert_array_equal(lse[part], expected[1][0].T)

    def abandoned(self, counts):
        """Write tokens to sequences in a step that fails."""
        with contextlib.suppress(ZeroDivisionError), self.cache.begin_step(counts.items()) as step:
            for i, layer in enumerate(self.layers[: self.rng.integers(4)]):
                row, compressor, indexer, *_ = self.inputs(layer, sum(counts.values()))
                step.update(i, row, compressor, indexer)
            raise ZeroDivisionError

    def check(self):
        """All sequences store what layers alone store."""
        for seq, layers in self.alone.items():
            for i, alone in enumerate(layers):
                own = self.cache.layer_of(seq, i)
                assert own.get_seq_length() == alone.get_seq_length()
                if alone.get_seq_length():
                    np.testing.assert_array_equal(own.window_rows[:, -3:], alone.window_rows[:, -3:])
                    kept = [x for x in (own.rows, own.index_keys, *own.states) if x is not None]
                    wanted = [x for x in (alone.rows, alone.index_keys, *alone.states) if x is not None]
                    for one, other in zip(kept, wanted, strict=True):
                        np.testing.assert_array_equal(one, other)


def random_calls(scene, calls):
    """Make random calls; `can` says which of them are refused."""
    rng, cache = scene.rng, scene.cache
    for _ in range(calls):
        sequences = list(scene.alone)
        seq = sequences[rng.integers(len(sequences))] if sequences else None
        call = rng.choice(["add", "fork", "free", "crop", "step", "step", "step", "abandon"])
        if call == "add" or seq is None:
            if cache.can("add") is None:
                scene.add()
            else:
                with pytest.raises(kvkit.cache.CapacityError):
                    cache.add()
        elif call == "fork" and cache.can("fork", seq) is None:
            scene.alone[cache.fork(seq)] = copy.deepcopy(scene.alone[seq])
        elif call == "free" and rng.random() < 0.4:
            cache.free(seq)
            del scene.alone[seq]
            assert cache.can("crop", seq, 0).startswith("seq: expected a sequence from")
        elif call == "crop":
            left = int(rng.integers(max(0, seq.length - 5), seq.length + 1)) * int(rng.random() > 0.1)
            refusals = [layer.can("crop", left) for layer in scene.alone[seq]]
            assert (cache.can("crop", seq, left) is None) == (refusals == [None] * 3), (refusals, left)
            if refusals[0] is None:
                cache.crop(seq, left)
                for layer in scene.alone[seq]:
                    layer.crop(left)
            else:
                with pytest.raises(KvkitError, match=r"at least \d+ tokens to stay"):
                    cache.crop(seq, left)
        else:
            chosen = rng.permutation(len(sequences))[: rng.integers(1, len(sequences) + 1)]
            counts = {sequences[i]: int(rng.choice([1, 1, 4, 9])) for i in chosen}
            if cache.can("begin_step", counts.items()) is not None:
                lengths = [(s, s.length, s.blocks) for s in sequences]
                with pytest.raises(OutOfBlocksError):
                    cache.begin_step(counts.items())
                assert lengths == [(s, s.length, s.blocks) for s in sequences]
            else:
                (scene.step if call == "step" else scene.abandoned)(counts)
        scene.check()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_random_calls(dtype, seed):
    random_calls(Beside(np.random.default_rng(seed), dtype), 40)


def test_coded_rows():
    """Rows of 584 bytes, and index keys as codes with scales."""
    rng = np.random.default_rng(0)
    options = {"dim": 512, "rope_dim": 64, "index_dim": 128, "format": "ds_v4"}
    random_calls(Beside(rng, BF16, rope=kvkit.Rope(64, interleaved=True), **options), 20)


def test_blocks_are_shared_until_written():
    scene = Beside(np.random.default_rng(0))
    first = scene.add()
    scene.step({first: 9})
    scene.step({first: 3})
    fork = scene.cache.fork(first)
    scene.alone[fork] = copy.deepcopy(scene.alone[first])
    assert first.blocks == fork.blocks == [0, 1]
    scene.step({first: 1, fork: 2})
    assert first.blocks[0] == fork.blocks[0]
    assert first.blocks[1] != fork.blocks[1]
    scene.check()
    free = scene.cache.blocks.available
    scene.cache.free(fork)
    assert scene.cache.blocks.available == free + 1


def test_files(tmp_path):
    """A file of one sequence is that of a cache; caches go into pages, and all continue alike."""
    scene = Beside(np.random.default_rng(0))
    first = scene.add()
    for count in (9, 9, 2):
        scene.step({first: count})
    scene.cache.save(tmp_path / "one.npz", first)
    second = scene.cache.add(load(tmp_path / "one.npz"))
    scene.alone[second] = copy.deepcopy(scene.alone[first])
    third = scene.cache.add(scene.alone[first])
    scene.alone[third] = load(tmp_path / "one.npz").layers
    scene.check()
    for seq in (first, second, third):
        scene.cache.crop(seq, -2)
        for layer in scene.alone[seq]:
            layer.crop(-2)
    scene.step({first: 4, second: 4, third: 1})
    scene.check()
    other = compressed_layers(np.random.default_rng(5))
    wanted = r"^source\[0\]: expected a CompressedLayer like"
    with pytest.raises(KvkitError, match=wanted):
        scene.cache.add(other)
    with pytest.raises(KvkitError, match=r"^source: expected 3 layers, got 1"):
        scene.cache.add(Cache([CompressedLayer(8, 4)]))


def test_calls_beside_an_open_step():
    """`can` says what each call does, and a refused one changes nothing."""
    scene = Beside(np.random.default_rng(0), blocks=4, slots=6)
    first, cache = scene.add(), scene.cache
    scene.step({first: 9})
    second, source = scene.add(), cache.extract(first)
    with cache.begin_step([(second, 2)]) as step:
        for call, *given in ("add",), ("add", source), ("fork", first), ("crop", first, 9), ("fork", second):
            free, known = cache.blocks.available, cache.sequences
            refusal = cache.can(call, *given)
            assert (refusal is not None) == (source in given or second in given)
            if refusal is None:
                getattr(cache, call)(*given)
            else:
                with pytest.raises(KvkitError) as error:
                    getattr(cache, call)(*given)
                assert str(error.value) == refusal
                assert (free, known) == (cache.blocks.available, cache.sequences)
        step.abandon()
    third = cache.add(source)
    assert cache.can("add", source) == "num_blocks: expected 2 free or evictable blocks, got 0"
    with pytest.raises(OutOfBlocksError):
        cache.add(source)
    cache.free(third)
    scene.check()


def test_refusals():
    rng = np.random.default_rng(0)
    scene = Beside(rng)
    first, tokens = scene.add(), np.ones((2, 8), F32)
    with pytest.raises(KvkitError, match=r"^new tokens: expected an integer from 0 to 9, got 10"):
        scene.cache.begin_step([(first, 10)])
    wanted = r"^step: expected an update of every layer, got none of layer 1"
    with pytest.raises(KvkitError, match=wanted), scene.cache.begin_step([(first, 2)]) as step:
        step.update(0, tokens)
    assert first.length == 0
    with scene.cache.begin_step([(first, 2)]) as step:
        with pytest.raises(KvkitError, match=r"^compressor: expected a pair"):
            step.update(1, tokens)
        with pytest.raises(KvkitError, match=r"^query: expected an update of layer 0 before"):
            step.attend(0, np.ones((2, 1, 8), F32))
        with pytest.raises(KvkitError, match=r"^row: expected an array of float32"):
            step.update(0, tokens.astype(BF16))
        step.abandon()
    with pytest.raises(KvkitError, match=r"^step: expected an open step"):
        step.update(0, tokens)
    with pytest.raises(KvkitError, match=r"^call: expected add or fork or free or crop or begin_step"):
        scene.cache.can("remove")
    layers, sizes = compressed_layers(rng), {"num_blocks": 4, "slots": 1, "dtype": F32}
    with pytest.raises(KvkitError, match=r"^page_size: expected a multiple of 4, as layers\[1\] has, got 6"):
        PagedCompressedCache(layers, page_size=6, **sizes)
    with pytest.raises(KvkitError, match=r"^layers\[1\]: expected drafts=3, as layers\[0\] has, got 0"):
        PagedCompressedCache([layers[0], CompressedLayer(8, 4)], **sizes)
