"""Sequences in blocks whose tokens are removed and moved: pages, positions, and attention by moved keys."""

import numpy as np
import pytest
from cell_model import Cells, exact

from kvkit import KvkitError, Rope
from kvkit.cache import OutOfBlocksError, PagedCache

ROPE, LAYERS, HEADS, DIM, P = Rope(8), 2, 2, 8, 4
ATTENDED = {"float32": 3e-6, "float16": 3e-3}


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def rotated(states, positions):
    """Rotate packed heads [tokens, heads, dim]."""
    return ROPE.rotate(states.swapaxes(0, 1), positions).swapaxes(0, 1)


class Server:
    """A paged cache beside cells: the token of name i has key and value i of a list, and is rotated."""

    def __init__(self, num_blocks=64, page_size=P, dtype="float32", **options):
        self.cache = PagedCache(num_blocks, page_size, LAYERS, HEADS, DIM, dtype, rope=ROPE, **options)
        self.raw, self.dtype = normal(256, HEADS, DIM, seed=1, dtype=dtype), np.dtype(dtype)
        self.tolerance, self.cells, self.steps = ATTENDED[dtype], {}, 0

    def add(self, count=0, ids=()):
        seq = self.cache.blocks.add(ids)
        self.cells[seq] = Cells()
        if count:
            self.decode((seq, count))
        return seq

    def fork(self, seq, begin=0, end=None):
        other = self.cache.blocks.fork(seq, begin, end)
        self.cells[other] = self.cells[seq].fork(begin, 1 << 40 if end is None else end)
        return other

    def call(self, name, seq, *arguments, **options):
        getattr(self.cache, name)(seq, *arguments, **options)
        if name == "retain":
            self.cells[seq].retain(*arguments)
        elif name != "flatten":
            begin, end, *more = arguments if len(arguments) > 1 else (*arguments, None)
            getattr(self.cells[seq], name)(begin, 1 << 40 if end is None else end, *more)
            if options.get("close") and end < self.cells[seq].length:
                self.cells[seq].shift(end, 1 << 40, begin - end)

    def decode(self, *pairs, check=True, **options):
        """Run a step of new tokens; check keys, values and attention of all layers by the cells."""
        with self.cache.begin_step(pairs) as step:
            new, self.steps = dict(pairs), self.steps + 1
            seqs = [(seq, new[seq]) for seq in step.index.sequences]
            for seq, count in seqs:
                self.cells[seq].decode(count)
            own = [self.cells[seq].cells for seq, _ in seqs]
            last = [cells[len(cells) - count :] for cells, (_, count) in zip(own, seqs, strict=True)]
            packed = [cell for cells in last for cell in cells]
            at, names = (np.array([cell[place] for cell in packed], int) for place in (0, 2))
            query = rotated(normal(len(packed), 4, DIM, seed=self.steps, dtype=self.dtype), at)
            outputs = []
            for layer in range(LAYERS):
                key, value = rotated(self.raw[names], at), self.raw[names][:, ::-1]
                outputs.append(
                    step.multi_head_cache_attention(query, key, value, layer, return_lse=True, **options)
                )
                if check:
                    self.check(step, query, outputs[-1], own, layer)
        return outputs

    def check(self, step, query, results, own, layer):
        begin, starts = 0, step.index.seqstarts
        keys, values = step.gather(layer)
        for i, (seq, cells) in enumerate(zip(step.index.sequences, own, strict=True)):
            at, names = (np.array([cell[place] for cell in cells], int) for place in (0, 2))
            here, new = slice(begin, begin + len(cells)), slice(starts[i], starts[i + 1])
            np.testing.assert_array_equal(values[here], self.raw[names][:, ::-1])
            turns = np.zeros(len(cells), int)
            for first, last, shift in seq.rope_shifts:
                turns[first:last] = shift
            wide = rotated(self.raw[names].astype(float), at)
            moved = ROPE.shift(keys[here].astype(float).swapaxes(0, 1), turns).swapaxes(0, 1)
            np.testing.assert_allclose(moved, wide, atol=2 * self.tolerance)
            if starts[i] < starts[i + 1]:
                sides = query[new], wide, self.raw[names][:, ::-1]
                wanted = exact(*(side.swapaxes(0, 1)[None] for side in sides))
                for result, want in zip(results, wanted, strict=True):
                    got = result[new].swapaxes(0, 1)[None]
                    np.testing.assert_allclose(got, want, atol=self.tolerance, rtol=0)
            begin += len(cells)

    def check_books(self):
        """Check positions, block counts and the number of segments of all sequences."""
        blocks, flat = self.cache.blocks, [block for seq in self.cells for block in seq.blocks]
        assert blocks.references.tolist() == [flat.count(block) for block in range(blocks.num_blocks)]
        for seq, cells in self.cells.items():
            assert seq.positions.tolist() == [at for at, *_ in cells.cells]
            assert (seq.next_position, seq.length) == (cells.length, len(cells.cells))
            assert len(seq.borders) < 8
            assert len(seq.blocks) == sum(
                -(-(end - begin) // blocks.page_size)
                for begin, end, *_ in seq.segments(blocks.page_size, seq.length)
            )

    def free(self, seq):
        self.cache.blocks.free(seq)
        del self.cells[seq]


def bytes_of(cache, seq):
    rows = seq.rows(cache.store.page_size)
    at = divmod(rows, cache.store.page_size)
    return [side[at].tobytes() for array in cache.store.blocks for layer in array for side in layer]


def test_the_vectors_of_llama_cpp_where_sharing_moves_nobody():
    server = Server()
    zero = server.add(8)
    one = server.fork(zero, 2, 6)
    assert (one.positions.tolist(), one.next_position) == ([2, 3, 4, 5], 6)
    server.call("remove", zero, 2, 5)
    assert zero.positions.tolist() == [0, 1, 5, 6, 7]
    assert one.positions.tolist() == [2, 3, 4, 5]
    server.call("shift", zero, 5, None, -3)
    assert zero.rope_shifts.tolist() == [[0, 2, 0], [2, 5, -3]]
    assert one.rope_shifts.tolist() == [[0, 4, 0]]
    server.decode((zero, 0), (one, 1))
    server.cache.blocks.free(one)
    server.call("divide", zero, 2, None, 2)
    assert zero.positions.tolist() == [0, 1, 1, 1, 2]
    assert zero.rope_shifts.tolist() == [[0, 2, 0], [2, 3, -4], [3, 5, -5]]
    server.call("shift", zero, 0, None, -2)
    assert (zero.positions.tolist(), zero.rope_shifts.tolist()) == ([0], [[0, 1, -7]])
    two = server.fork(zero)
    server.call("remove", zero, 1)
    server.cache.blocks.free(zero)
    assert (two.positions.tolist(), two.rope_shifts.tolist()) == ([0], [[0, 1, -7]])
    server.decode((two, 2))


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_the_vectors_of_attention_over_pieces(page_size):
    row, channel = np.meshgrid(np.arange(8), np.arange(4), indexing="ij")
    keys = ((3 * row + 2 * channel + row * channel) % 7 - 3).astype(np.float32)[:, None]
    values = ((row + 3 * channel + row * channel * channel) % 5 - 2).astype(np.float32)[:, None]
    raw, rope = ((14 + channel[7] + 7 * channel[7]) % 5 - 2).astype(np.float32)[None], Rope(4)
    cache = PagedCache(16, page_size, 1, 1, 4, np.float32, rope=[rope])
    closed = cache.blocks.add()
    with cache.begin_step([(closed, 7)]) as step:
        step.update(keys[:7], values[:7], 0)
    holed = cache.blocks.fork(closed)
    for seq, wanted, places in (
        (closed, [-1.25856, -1.057427, -1, 2], range(5)),
        (holed, [-1.000435, -1.671774, -1, 2], [0, 1, 5, 6, 7]),
    ):
        with cache.begin_step([(seq, 1)]) as step:
            step.update(keys[7:], values[7:], 0)
        cache.remove(seq, 2, 5, close=seq is closed)
        assert seq.positions.tolist() == list(places)
        cache.blocks.crop(seq, -1)  # the query's own key is the last one: it comes once more, as it lies
        shift = seq.next_position - 7
        with cache.begin_step([(seq, 1)]) as step:
            query = rope.rotate(raw, 5 if seq is closed else 8)[None]
            step.update(rope.shift(keys[7:].swapaxes(0, 1), shift).swapaxes(0, 1), values[7:], 0)
            output, lse = step.attend(query, 0, return_lse=True)
        np.testing.assert_allclose(output[0, 0], wanted, atol=1e-5)
        if seq is closed:
            assert lse[0, 0] == pytest.approx(np.logaddexp(2.931935, 2.750091), abs=1e-5)


def random_call(rng, seq):
    """Return a call of a sequence: its name, arguments and options. Not all are legal."""
    name = str(rng.choice(["remove", "remove", "retain", "shift", "shift", "divide", "flatten"]))
    begin, end = sorted(rng.integers(0, 2 + seq.next_position, 2).tolist())
    end = None if rng.random() < 0.4 else end
    if name == "remove":
        return name, (begin, end), {"close": bool(end and rng.random() < 0.5)}
    if name == "retain":
        places = np.unique(seq.positions if rng.random() < 0.9 else rng.integers(0, 9, 3))
        return name, (places[rng.random(len(places)) < 0.9],), {}
    if name == "flatten":
        return name, (), {}
    return name, (begin, end, int(rng.integers(1, 4) if name == "divide" else rng.integers(-4, 6))), {}


@pytest.mark.parametrize("page_size", [1, 2, 4, 5])
def test_a_thousand_random_calls_are_as_the_cells(page_size):
    """Sequences share blocks, move, shrink and find no room; `can` says which calls are refused."""
    server, rng = Server(80 // page_size, page_size), np.random.default_rng(page_size)
    server.tolerance, done = 2e-5, dict.fromkeys(["called", "refused", "full", "attended"], 0)
    cache, blocks = server.cache, server.cache.blocks
    server.add(9)
    for turn in range(250):
        seq = list(server.cells)[rng.integers(len(server.cells))]
        name, arguments, options = random_call(rng, seq)
        before = {one: (one.blocks, one.borders, one.intact, bytes_of(cache, one)) for one in server.cells}
        refusal, free = cache.can(name, seq, *arguments, **options), blocks.available
        try:
            if refusal is None:
                server.call(name, seq, *arguments, **options)
                done["called"] += 1
                del before[seq]
            else:
                with pytest.raises(KvkitError) as error:
                    getattr(cache, name)(seq, *arguments, **options)
                assert str(error.value) == refusal
                done["refused"] += 1
        except OutOfBlocksError:
            done["full"] += 1
            assert free == blocks.available
        assert before == {one: (one.blocks, one.borders, one.intact, bytes_of(cache, one)) for one in before}
        server.check_books()
        if rng.random() < 0.3:
            begin, end = sorted(rng.integers(0, 2 + seq.next_position, 2).tolist())
            try:
                server.fork(seq, *((begin, end) if turn % 2 else ()))
            except OutOfBlocksError:
                done["full"] += 1
        if rng.random() < 0.1:
            left = int(rng.integers(1, 2 + seq.next_position))
            blocks.crop(seq, left)
            server.cells[seq].remove(left, 1 << 40)
        counts = [(one, int(rng.integers(0, 4))) for one in server.cells]
        try:
            server.decode(*counts)
            done["attended"] += 1
        except OutOfBlocksError:
            done["full"] += 1
        while len(server.cells) > 4 or blocks.available < 20 // page_size:
            server.free(next(iter(server.cells)))
        for one in [one for one, cells in server.cells.items() if cells.named > 240]:
            server.free(one)
        if not server.cells:
            server.add(9)
        server.check_books()
    assert done["called"] > 100
    assert min(done.values()) > 0, done
