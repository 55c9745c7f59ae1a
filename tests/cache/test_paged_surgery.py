"""Sequences in blocks whose tokens are removed and moved: pages, positions, and attention by moved keys."""

import numpy as np
import pytest
from cell_model import Cells, exact
from paged_scenes import random_call

from kvkit import KvkitError, Rope, cpu
from kvkit.cache import BlockAllocator, OutOfBlocksError, PagedCache, load

LAYERS, HEADS, DIM, P = 2, 2, 8, 4
ROPE = Rope(4, begin=2)  # the other elements of a query are those of the present call, too
ATTENDED = {"float32": 3e-6, "float16": 3e-3}


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def rotated(states, positions):
    """Return packed heads [tokens, heads, dim], rotated."""
    return ROPE.rotate(states.swapaxes(0, 1), positions).swapaxes(0, 1)


class Server:
    """Runs a paged cache beside cells; the token named i has key and value i of a list, rotated."""

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
            queries = [
                rotated(normal(len(packed), 4, DIM, seed=seed, dtype=self.dtype), at)
                for seed in (self.steps, -self.steps % 1000)
            ]
            outputs = []
            for layer in range(LAYERS):
                key, value = rotated(self.raw[names], at), self.raw[names][:, ::-1]
                options = {**options, "return_lse": True}
                outputs.append(step.multi_head_cache_attention(queries[0], key, value, layer, **options))
                if check:
                    self.check(step, queries[0], outputs[-1], own, layer)
                    self.check(step, queries[1], step.attend(queries[1], layer, **options), own, layer)
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
            assert len(seq._borders) < 8
            assert len(seq.blocks) == sum(
                -(-(end - begin) // blocks.page_size)
                for begin, end, *_ in seq._segments(blocks.page_size, seq.length)
            )

    def come_back(self, path):
        """Go on with a loaded file."""
        self.cache.save(path, list(self.cells))
        self.cache = load(path)
        self.cells = dict(zip(self.cache.sequences, self.cells.values(), strict=True))

    def free(self, seq):
        self.cache.blocks.free(seq)
        del self.cells[seq]


def bytes_of(cache, seq):
    rows = seq._rows(cache.store.page_size)
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


@pytest.mark.parametrize("page_size", [5, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4))])
def test_a_thousand_random_calls_are_as_the_cells(page_size, tmp_path):
    """Sequences share blocks, move, shrink, find no room, are saved; `can` says which calls are refused."""
    server, rng = Server(80 // page_size, page_size), np.random.default_rng(page_size)
    server.tolerance, done = 2e-5, dict.fromkeys(["called", "refused", "full", "attended"], 0)
    server.add(9)
    for turn in range(250):
        if turn % 10 == 9:
            server.come_back(tmp_path / "cache.npz")
        cache, blocks = server.cache, server.cache.blocks
        seq = list(server.cells)[rng.integers(len(server.cells))]
        name, arguments, options = random_call(rng, seq)
        before = {one: (one.blocks, one._borders, one._intact, bytes_of(cache, one)) for one in server.cells}
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
        assert before == {
            one: (one.blocks, one._borders, one._intact, bytes_of(cache, one)) for one in before
        }
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


def test_a_removal_copies_what_stays_of_one_page_and_releases_whole_ones():
    server = Server()
    seq = server.add(22)
    branch = server.fork(seq)
    before, free = bytes_of(server.cache, branch), server.cache.blocks.available
    server.call("remove", seq, 2, 17)  # pages 1 to 3 go, 17 to 19 of page 4 are copied
    assert (seq.blocks, seq._borders) == ([0, 6, 5], [2, 5])
    assert server.cache.blocks.available == free - 1
    server.free(branch)
    assert server.cache.blocks.references.tolist()[:7] == [1, 0, 0, 0, 0, 1, 1]
    assert bytes_of(server.cache, seq) == [
        side[: 2 * 64] + side[17 * 64 :] for side in before
    ]  # 64 bytes: two heads
    server.call("remove", seq, 1, 18)  # alone, so that token 18 lies behind token 0, in its page
    assert (seq.blocks, seq._borders) == ([0, 5], [3])
    server.decode((seq, 3))
    server.call("remove", seq, 0)
    assert (seq.blocks, seq._borders, seq._intact) == ([], [], None)
    server.decode((seq, 3))
    server.check_books()


def test_a_ninth_segment_lets_all_be_copied_from_the_first_hole_on():
    server = Server()
    seq = server.add(70)
    branch = server.fork(seq)
    for i in range(8):
        server.call("remove", seq, 8 * i + 4, 8 * i + 7)
        server.decode((seq, 0), (branch, 1))
    assert len(seq._borders) < 8
    for i in range(20):  # of turns, too, there are eight at most
        at = seq.positions[2 * i + 1]
        server.call("shift", seq, int(at), None, 1)
        server.decode((seq, 1))
        assert len(seq._borders) < 8
    server.check_books()


def test_prefixes_are_published_up_to_the_first_hole():
    server, ids = Server(), list(range(30))
    first = server.add(0, ids)
    server.decode((first, 12))
    server.call("remove", first, 6, 9, close=True)
    assert first.token_ids.tolist() == [*range(6), *range(9, 30)]
    server.decode((first, 10))
    other = server.cache.blocks.add(ids)
    assert (other.length, other.blocks) == (12, [0, 1, 2])  # what the first one had published before
    server.cache.blocks.free(other)
    assert len(first._chain) == 2
    server.call("remove", first, 6)  # and the hole is gone
    server.cache.blocks.extend(first, [6, 7, 90, 91, 92, 93])
    server.decode((first, 6))
    assert len(first._chain) == 4
    assert server.cache.blocks.add([*range(8), 90, 91, 92, 93, 94]).length == 12


@pytest.mark.parametrize(
    "options", [{}, {"quant_bit": 8}, {"quant_bit": 4}, {"quant_format": "q8_0"}], ids=str
)
def test_a_forked_prefix_is_the_same_bytes_after_the_other_branch_has_changed(options):
    """A -> B -> A, for codes too, which move as bytes and are never rotated."""
    cache = PagedCache(40, P, LAYERS, HEADS, 32, np.float32, rope=Rope(32), **options)
    states, query = normal(2, 21, HEADS, 32, seed=3), normal(1, 4, 32, seed=4)
    seq = cache.blocks.add(range(21))
    with cache.begin_step([(seq, 21)]) as step:
        for layer in range(LAYERS):
            step.update(*states, layer)

    def attended(seq):
        branch = cache.blocks.fork(seq)
        with cache.begin_step([(branch, 1)]) as step:
            results = [
                step.multi_head_cache_attention(query, *states[:, 7:8], layer).tobytes()
                for layer in range(LAYERS)
            ]
        cache.blocks.free(branch)
        return results

    before, outputs = bytes_of(cache, seq), attended(seq)
    other = cache.blocks.fork(seq)
    cache.remove(other, 3, 9)
    kept = [0, 1, 2, *range(9, 21)]
    size = [len(side) // 21 for side in before]
    wanted = [b"".join(side[n * i : n * i + n] for i in kept) for side, n in zip(before, size, strict=True)]
    assert bytes_of(cache, other) == wanted
    cache.shift(other, 9, None, -6)
    cache.retain(other, [0, 1, 4, 5, 8, 13, 14])
    attended(other)
    if options:
        with pytest.raises(KvkitError, match="codes are not rotated"):
            cache.flatten(other)
    else:
        cache.flatten(other)
    cache.remove(other, 0, 4)
    attended(other)
    cache.blocks.free(other)
    filler = cache.blocks.add()
    cache.begin_step([(filler, cache.blocks.available * P)]).abandon()
    assert (bytes_of(cache, seq), cache.blocks.references[seq.blocks].tolist()) == (before, [1] * 6)
    cache.blocks.free(filler)
    assert attended(seq) == outputs


@pytest.mark.parametrize(
    "options", [{}, {"softcap": 3.0}, {"sinks": np.array([1, -1, 0, 2], np.float32)}], ids=str
)
@pytest.mark.parametrize("mask", [None, "bool", "bias", "heads"])
@pytest.mark.parametrize("causal", [True, False])
def test_removed_tokens_are_as_hidden_ones(options, mask, causal):
    """Attention over holes is attention of the whole context under a mask, of whatever else it is given."""
    server, rng = Server(), np.random.default_rng(0)
    seq = server.add(30)
    whole = server.fork(seq)
    server.call("remove", seq, 5, 11)
    server.call("remove", seq, 19, 26)
    kept = [*range(5), *range(11, 19), *range(26, 32)]
    query, states = normal(2, 4, DIM, seed=1), normal(2, 2, HEADS, DIM, seed=2)
    own = np.ones((2, 32), bool)
    if mask is not None:
        own = rng.random((2, 32)) < 0.8 if mask == "bool" else rng.standard_normal((2, 32)).astype(np.float32)
        own = np.stack([own + i for i in range(4)]) if mask == "heads" else own
    hidden = np.ones(32, bool)
    hidden[kept] = False
    over = own & ~hidden if own.dtype == bool else np.where(hidden, np.float32(-np.inf), own)
    results = []
    for one, columns in (whole, over), (seq, own[..., kept] if mask else None):
        with server.cache.begin_step([(one, 2)]) as step:
            step.update(*states, 0)
            step.update(*states, 1)
            results.append(step.attend(query, 1, columns, is_causal=causal, return_lse=True, **options))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


@pytest.mark.parametrize(("mask", "bits"), [(None, 0), (None, 8), ("bool", 0), ("bias", 8)])
def test_sequences_get_the_same_bits_whoever_is_moved_beside_them(mask, bits, monkeypatch):
    """Attention to moved sequences alone takes another launch, of float32 queries."""
    cache, launches = PagedCache(64, P, LAYERS, HEADS, DIM, np.float16, rope=ROPE, quant_bit=bits), []
    one, moved, two = (cache.blocks.add() for _ in range(3))
    query, states = (normal(*shape, dtype=np.float16) for shape in ((7, 4, DIM), (2, 99, HEADS, DIM)))
    with cache.begin_step([(one, 70), (moved, 20), (two, 9)]) as step:
        for layer in range(LAYERS):
            step.update(*states, layer)
    cache.remove(moved, 2, 9, close=True)
    prepare = cpu.attention.prepare.prepare_attention
    monkeypatch.setattr(
        cpu.attention.prepare,
        "prepare_attention",
        lambda query, *more: launches.append((query.dtype.name, len(query))) or prepare(query, *more),
    )
    columns = {None: None, "bool": normal(7, 99) < 1, "bias": normal(7, 99)}[mask]

    def attended(pairs, tokens, keys):
        own = None if mask is None else columns[tokens][:, keys]
        with cache.begin_step([(cache.blocks.fork(seq), count) for seq, count in pairs]) as step:
            for layer in range(LAYERS):
                step.update(*states[:, tokens], layer)
            return [step.attend(query[tokens], layer, own, return_lse=True) for layer in range(LAYERS)]

    others = np.array([0, 3, 4, 5, 6])
    whole = attended([(one, 1), (moved, 2), (two, 4)], np.arange(7), np.arange(99))
    alone = attended([(one, 1), (two, 4)], others, np.r_[:71, 86:99])
    for result, wanted in zip(whole, alone, strict=True):
        for side, want in zip(result, wanted, strict=True):
            np.testing.assert_array_equal(side[others], want)
    assert set(launches) == {("float16", 5), ("float32", 8)}  # two queries, each of four pieces


def test_windows_count_positions():
    server = Server()
    seq = server.add(30)
    server.call("remove", seq, 3, 9)
    server.call("remove", seq, 10, 14, close=True)  # no hole, but another segment
    whole = server.fork(seq)
    query, states = normal(3, 4, DIM, seed=1), normal(2, 3, HEADS, DIM, seed=2)
    with server.cache.begin_step([(seq, 3)]) as step:
        step.update(*states, 0)
        step.update(*states, 1)
        outputs = step.attend(query, 0, window=(16, -1))
        mask = np.arange(23) >= np.arange(20, 23)[:, None] - 16
        np.testing.assert_allclose(outputs, step.attend(query, 0, mask), atol=2e-6)
        with pytest.raises(KvkitError, match="window: expected one without holes"):
            step.attend(query, 0, window=(18, -1))
        with pytest.raises(KvkitError, match="is_alibi: expected False"):
            step.attend(query, 0, is_alibi=True)
    server.cache.blocks.free(whole)


def test_tables_that_cannot_say_where_tokens_lie_are_refused():
    server = Server()
    seq, plain = server.add(16), server.add(3)
    server.call("remove", seq, 4, 8)  # whole pages: a table can say that
    with server.cache.begin_step([(seq, 0), (plain, 0)]) as step:
        assert step.index.block_tables.tolist() == [[0, 2, 3], [4, -1, -1]]
    server.call("remove", seq, 9, 10)
    with server.cache.begin_step([(seq, 1), (plain, 1)]) as step:
        assert step.index.slot_mapping.tolist() == [1 * P, 4 * P + 3]
        for name in ("cachestarts", "block_tables"):
            with pytest.raises(KvkitError, match="without removed or moved tokens"):
                getattr(step.index, name)
        for layer in range(LAYERS):
            step.update(*normal(2, 2, HEADS, DIM), layer)


def test_calls_are_refused_while_a_step_is_open_and_of_sequences_that_are_not_there():
    server = Server()
    seq, other = server.add(8), server.add(5)
    with server.cache.begin_step([(other, 0)]):
        for action in (
            lambda: server.cache.remove(seq, 2, 3),
            lambda: server.cache.shift(seq, 2, None, 1),
            lambda: server.cache.blocks.fork(seq, 1),
        ):
            with pytest.raises(KvkitError, match="seq: expected a sequence between steps"):
                action()
        assert "between steps" in server.cache.can("retain", seq, [1])
    server.free(other)
    assert "a live sequence" in server.cache.can("retain", other, [1])
    assert "a live sequence" in server.cache.can("remove", 3, 4)
    cache = PagedCache(8, P, LAYERS, HEADS, DIM, np.float32)
    with pytest.raises(KvkitError, match="length: expected"):
        cache.crop(-1)
    cache.crop(3)
    for layer in range(LAYERS):
        cache.update(*normal(2, 1, HEADS, 3, DIM), layer)
    assert "a row of the batch" in cache.can("remove", cache.rows.sequences[0], 1, 2)
    seq = cache.blocks.add()
    with pytest.raises(KvkitError, match="how keys were rotated"):
        cache.shift(seq, 0, None, 1, rope="half")
    blocks = BlockAllocator(8, P)
    seq = blocks.add()
    with blocks.begin_step([(seq, 8)]):
        pass
    assert blocks.fork(seq, 4).blocks == [1]
    with pytest.raises(KvkitError, match="copy_rows: expected a function"):
        blocks.fork(seq, 5)
    assert blocks.references.tolist()[:2] == [1, 2]


@pytest.mark.parametrize("moved", [False, True])
def test_a_crop_within_a_step_takes_nothing_from_the_step(moved):
    """Neither from sequences that it adds to nor from what it reads of the one that is cropped."""
    server = Server(num_blocks=10)
    seq, other = server.add(8), server.add(12)
    if moved:
        server.call("remove", other, 1, 3, close=True)
    with server.cache.begin_step([(seq, 1), (other, 0)]) as step:
        for layer in range(LAYERS):
            step.update(*normal(2, 1, HEADS, DIM), layer)
        before = [side.tobytes() for side in step.gather(1)]
        server.cache.blocks.crop(other, 2)
        assert [side.tobytes() for side in step.gather(1)] == before
        with pytest.raises(KvkitError, match="no open step adds to"):
            server.cache.blocks.crop(seq, 2)
    assert (seq.length, other.length) == (9, 2)
    assert other.positions.tolist() == [0, 1]
    with server.cache.begin_step([(other, 4 * P)]) as step:
        for layer in range(LAYERS):
            step.update(*normal(2, 4 * P, HEADS, DIM), layer)
    assert not {*seq.blocks} & {*other.blocks}


def test_a_window_over_tokens_that_share_a_position_is_refused():
    """It would count rows: of two tokens with the position at its edge it would see one."""
    cache = PagedCache(16, 4, 1, 1, 4, np.float32, rope="none")
    states = normal(1, 1, 8, 4)
    cache.update(states, states, 0)
    cache.rows.divide(0, 4, 2)
    assert cache.layers[0].positions.tolist() == [0, 0, 1, 1, 4, 5, 6, 7]
    assert cache.attend(states[:, :, -1:], 0, window=(3, -1)).shape == (1, 1, 1, 4)
    for left in (4, 5, 6, 7):
        with pytest.raises(KvkitError, match="window: expected one without holes"):
            cache.attend(states[:, :, -1:], 0, window=(left, -1))
    cache.rows.divide(0, None, 2)
    assert cache.layers[0].positions.tolist() == [0, 0, 0, 0, 2, 2, 3, 3]
    with pytest.raises(KvkitError, match="window"):  # the token before has the position of the query
        cache.attend(states[:, :, -1:], 0, window=(0, -1))
