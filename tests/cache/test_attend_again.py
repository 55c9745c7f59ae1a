"""Tokens that are removed and moved, and attention after every change of a cache, beside a model of cells.

Layers keep a prepared call for calls of one form. Here each call follows calls of its form and of others. It
is compared with attention in float64, and with the bits of a copy, which has no prepared calls. `can` says
which changes are refused, and they change nothing.
"""

import copy
from typing import NamedTuple

import numpy as np
import pytest
from cell_model import Cells, exact
from surroundings import budget

from kvkit import KvkitError, Rope
from kvkit.cache import (
    Cache,
    ChunkedLayer,
    DynamicLayer,
    IndexedLayer,
    LatentLayer,
    PagedCache,
    QuantizedLayer,
    SharedLayer,
    SlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
    load,
)
from kvkit.cache.layers.attention import LayerAttention

HEADS, GROUP, DIM, VALUES, ROOM, WINDOW = 2, 2, 16, 12, 96, 9
# Over a whole head, or a part: the other elements of a query are those of the present call too
ROPES = Rope(16), Rope(8), Rope(6, begin=4), Rope(10, interleaved=True), "none"
PLACES = Rope(4), "none"  # of the rotated part of a latent row


class Kind(NamedTuple):
    """Describes a kind of layer: how to make a cache of two, and what it can do."""

    make: object  # f(rope) -> Cache or PagedCache
    latent: bool = False
    mapped: bool = True  # whether files can hold it
    values: int = VALUES
    budget: object = None  # for heads, whose tokens then differ
    near: float = 1e-5  # of what its codes stand for


def two(make, other=None, **options):
    return Kind(lambda rope: Cache([make(), (other or make)()], rope=rope), **options)


def paged(rope, **options):
    return PagedCache(120, 4, 2, options.pop("heads", HEADS), DIM, np.float32, rope=rope, **options)


def codes(format="uint8:g4:channel/uint8:g4"):
    return QuantizedLayer(format, residual_length=4, sink=2)


KINDS = {
    "dynamic": two(DynamicLayer),
    "static": two(lambda: StaticLayer(ROOM)),
    "window": two(lambda: SlidingWindowLayer(WINDOW)),
    "static window": two(lambda: StaticSlidingWindowLayer(ROOM, WINDOW)),
    "chunks": two(lambda: ChunkedLayer(WINDOW)),
    "codes": two(codes, near=0.1),
    "codes by channel, and rotated": two(
        lambda: codes("uint8:g4:channel"), lambda: codes("e4m3:g4+hadamard"), near=0.5
    ),
    "mixed": two(lambda: SlidingWindowLayer(WINDOW), codes, near=0.1),
    "latent": two(lambda: LatentLayer(12, 4), latent=True),
    "indexed": two(lambda: IndexedLayer(LatentLayer(12, 4), 4), latent=True),
    "shared": Kind(lambda rope: Cache([DynamicLayer(), SharedLayer(of=0)], rope=rope)),
    "heads": two(DynamicLayer, mapped=False, values=DIM, budget=[[5, 9], [11, 2]]),
    "paged": Kind(paged, mapped=False, values=DIM),
    "paged latent": Kind(lambda rope: paged(rope, heads=1, latent_dim=12), latent=True, mapped=False),
}


class Scene:
    """Runs a cache beside cells: token i of the list of all tokens has the name i."""

    def __init__(self, kind, rope, rng, folder):
        self.kind, self.rng, self.cells, self.folder = kind, rng, Cells(), folder
        self.cache, self.batch = kind.make(rope), 2
        rope = Rope(4, begin=12) if kind.latent and isinstance(rope, Rope) else rope
        self.rope = rope if isinstance(rope, Rope) else None
        self.heads = 1 if kind.latent else HEADS
        self.raw = [np.zeros((2, self.batch, self.heads, 0, dim)) for dim in (DIM, kind.values)]
        self.before, self.shared = None, isinstance(self.cache.layers[1], SharedLayer)
        self.windows = any(layer.window for layer in self.cache.layers)

    def begin(self):
        """Add the first tokens, and choose those of heads."""
        self.update(12)
        if self.kind.budget:
            self.cache.compress("knorm", budget=self.kind.budget)

    def random(self, *shape):
        return self.rng.standard_normal(shape).astype(np.float32)

    def update(self, count):
        keys = self.random(2, self.batch, self.heads, count, DIM)
        values = keys[..., :12] if self.kind.latent else self.random(*keys.shape[:-1], self.kind.values)
        for i, (key, value) in enumerate(zip(keys, values, strict=True)):
            if i == 0 or not self.shared:
                self.cache.update(*((value, key[..., 12:]) if self.kind.latent else (key, value)), i)
        self.raw = [np.concatenate(sides, 3) for sides in zip(self.raw, (keys, values), strict=True)]
        self.cells.decode(count)

    def change(self):
        """Remove or move tokens, change the batch, or go on with what a file gives."""
        end = self.cells.length + 1
        begin, end = sorted(self.rng.integers(0, end, 2).tolist())
        everything, places = 1 << 40, [at for at, *_ in self.cells.cells]
        call, arguments, options = [
            ("remove", (begin, end), {"close": True}), ("remove", (begin, end), {}), ("remove", (end,), {}),
            ("shift", (0, None, int(self.rng.integers(-3, 6))), {}), ("shift", (begin, None, 2), {}),
            ("shift", (begin, end, -2), {}), ("divide", (0, None, 2), {}), ("divide", (begin, end, 3), {}),
            ("flatten", (), {}), ("crop", (-1,), {}), ("reorder", ([1, 0],), {}), ("come_back", (), {}),
            ("retain", (places[1::2],), {}), ("retain", (places[:-4] + places[-2:],), {}),
        ][self.rng.integers(14)]  # fmt: skip
        target = self.cache if call in ("crop", "reorder") else getattr(self.cache, "rows", self.cache)
        if call == "come_back":
            self.come_back()
        elif call == "crop":
            try:
                self.cache.crop(-1)
            except (KvkitError, RuntimeError):
                return
            self.cells.remove(max(self.cells.length - 1, 0), everything)
        elif call == "reorder":
            self.cache.reorder(*arguments)
            self.raw = [side[:, arguments[0]] for side in self.raw]
        elif not self.refused(target, call, *arguments, **options):
            getattr(target, call)(*arguments, **options)
            begin, end, *more = arguments if len(arguments) > 1 else (*arguments, None, None)[:2]
            closes = options.get("close") and end < self.cells.length
            if call == "retain":
                self.cells.retain(begin)
            elif call != "flatten":
                getattr(self.cells, call)(begin, everything if end is None else end, *more)
            if closes:
                self.cells.shift(end, everything, begin - end)

    def refused(self, target, call, *arguments, **options):
        """Return whether `can` refuses a call, which then raises the same words and changes nothing."""
        refusal, before = target.can(call, *arguments, **options), self.places()
        if refusal is not None:
            with pytest.raises((KvkitError, RuntimeError)) as error:
                getattr(target, call)(*arguments, **options)
            assert str(error.value) == refusal
            assert self.places() == before
        return refusal is not None

    def places(self):
        return [
            (layer.get_seq_length(), *map(str, (layer.positions, layer.rope_shifts)))
            for layer in self.cache.layers
        ]

    def come_back(self):
        """Go on with what a file gives of the cache, or the folder of a closed one."""
        path = self.folder / "cache.npz"
        if self.cache.folder is None:
            self.cache.save(path)
            self.cache = load(path)
        else:
            self.cache.close(keep=True)
            self.cache = Cache.open(self.folder, keep=False)

    def check_rows(self):
        """Check the positions, keys and values that layers of heads have stored of the last cells."""
        if self.kind.latent or self.kind.budget or isinstance(self.cache, PagedCache):
            return
        for i, layer in enumerate(self.cache.layers[: 1 if self.shared else 2]):
            count = layer.stored_tokens
            assert layer.get_seq_length() == self.cells.length
            assert layer.window is not None or count == len(self.cells.cells)
            kept = self.cells.cells[len(self.cells.cells) - count :]
            assert layer.positions.tolist() == [at for at, *_ in kept]
            if count:
                near = self.kind.near if isinstance(layer, QuantizedLayer) else 1e-5
                keys, values = (side[:, :, len(side[0, 0]) - count :] for side in self.rows(i))
                shifts = np.repeat(
                    *np.array([(shift, end - begin) for begin, end, shift in layer.rope_shifts]).T
                )
                moved = layer.keys[:, :, :count]
                moved = moved if self.rope is None else self.rope.shift(moved, shifts)
                np.testing.assert_allclose(moved, keys, atol=near)
                np.testing.assert_allclose(layer.values[:, :, :count], values, atol=near)

    def rows(self, layer):
        """Return the keys and values of a layer's cells in float64, rotated for their positions."""
        shifts, named = (np.array([cell[i] for cell in self.cells.cells], int) for i in (1, 2))
        keys, values = (side[0 if self.shared else layer][:, :, named] for side in self.raw)
        return (keys if self.rope is None else self.rope.shift(keys, shifts)), values

    def options(self, most):
        """Return (queries, mask, options) of a call: often those of the call before, with other arrays."""
        if self.before is None or self.rng.random() < 0.4:
            whole = not self.windows and not self.kind.budget
            masks = ["no", "no", "padding"] + ["bool", "bias"] * whole
            flags = (self.rng.random(3) < 0.25).tolist()
            self.before = int(self.rng.choice([1, 1, 2, 5])), self.rng.choice(masks), *flags
        new, mask, capped, sinks, lse = self.before
        new, heads, length = min(new, most), self.heads * GROUP, self.cells.length
        options = {"softmax_scale": float(self.rng.choice([0.2, 0.5])), "return_lse": lse}
        options |= {"softcap": 2.0} if capped and not self.kind.latent else {}
        options |= {"sinks": self.random(heads)} if sinks else {}
        shape = (self.batch, length) if mask == "padding" else (self.batch, 1, new, len(self.cells.cells))
        seen = self.rng.random(shape) < 0.7
        seen = self.random(*shape) if mask == "bias" else seen
        return self.random(self.batch, heads, new, DIM), None if mask == "no" else seen, options

    def attend(self, layer, most):
        """Attend some times, and compare each call with float64 and with a copy."""
        for _ in range(4):
            query, mask, options = self.options(most)
            given = dict(options)
            fresh = copy.deepcopy(self.cache)
            results = answer(self.cache, query, layer, mask, given)
            if results is None and (self.windows or self.kind.budget):
                continue
            again = fresh.attend(query, layer, mask, **given)
            for result, want in zip(results, again, strict=True):  # of rows of the batch, or of lse too
                assert result.tobytes() == want.tobytes()
            if self.kind.budget:
                self.compare_heads(results, layer, query, mask, options)
            elif not isinstance(self.cache.layers[layer], (QuantizedLayer, ChunkedLayer)):
                self.compare(results, layer, query, mask, options)

    def compare_heads(self, results, layer, query, mask, options):
        """Compare the results of a call with attention in float64 to each head's own tokens."""
        returned, sinks = options.pop("return_lse"), options.pop("sinks", None)
        states = iter(self.cache.layers[layer]._heads_states())
        for b, head in np.ndindex(self.batch, self.heads):
            (keys, values, places), own = next(states), slice(head * GROUP, (head + 1) * GROUP)
            options["sinks"] = None if sinks is None else sinks[own]
            visible = None if mask is None else mask[b, places]
            wanted = exact(query[b : b + 1, own], keys[None, None], values[None, None], visible, **options)
            for result, want in zip(results if returned else (results,), wanted, strict=returned):
                np.testing.assert_allclose(result[b, own], want[0], atol=2e-5, rtol=1e-5)

    def compare(self, results, layer, query, mask, options):
        """Compare the results of a call with attention in float64."""
        keys, values = self.rows(layer)
        places = np.array([cell[0] for cell in self.cells.cells], int)
        age = np.arange(len(places) - query.shape[2], len(places))[:, None] - np.arange(len(places))
        visible, bias = age < (self.cache.layers[layer].window or len(places) + 1), 0.0
        if mask is not None and mask.dtype != bool:
            bias = mask.astype(float)
        elif mask is not None:
            visible = visible & (mask if mask.ndim == 4 else mask[:, None, None, places])
        returned = options.pop("return_lse")
        wanted = exact(query, keys, values, visible, bias, **options)
        for result, want in zip(results if returned else (results,), wanted, strict=returned):
            np.testing.assert_allclose(result, want, atol=2e-5, rtol=1e-5)


def answer(cache, *arguments):
    """Attend; return None if tokens of a query's window, or queries' own tokens, are no longer stored."""
    *arguments, options = arguments
    try:
        return cache.attend(*arguments, **options)
    except KvkitError as error:
        if "whose windows" in str(error) or "does not store all of the last" in str(error):
            return None
        raise


def scenes():
    """Return each kind with every rotation, in memory and in files; one of a kind is quick."""
    for i, (name, kind) in enumerate(KINDS.items()):
        ropes = PLACES if kind.latent else ROPES
        for j, rope in enumerate(ropes):
            for mapped in (False, True) if kind.mapped else (False,):
                quick = (i + j) % len(ropes) == 0 and mapped == (kind.mapped and i % 2 == 0)
                yield pytest.param(name, rope, mapped, marks=[] if quick else [pytest.mark.slow])


@pytest.mark.parametrize(("name", "rope", "mapped"), [*scenes()], ids=str)
def test_each_call_of_attention_is_its_own(name, rope, mapped, tmp_path):
    for seed in range(budget(4)):
        scene = Scene(KINDS[name], rope, np.random.default_rng(seed), tmp_path / str(seed))
        scene.folder.mkdir()
        if mapped:
            scene.cache.offload(scene.folder, only_non_sliding=False)
        scene.begin()
        for _ in range(8):
            for _ in range(scene.rng.integers(1, 4)):
                scene.change()
                scene.check_rows()
            if scene.cells.cells:
                scene.attend(0, 1)
                scene.attend(1, 1)
            count = int(scene.rng.choice([1, 1, 3]))
            if scene.cells.length + count <= ROOM:
                scene.update(count)
                scene.attend(0, count)
                scene.attend(1, count)
        scene.cache.close()


PLAIN = {
    "dynamic": DynamicLayer, "static": lambda: StaticLayer(400), "window": lambda: SlidingWindowLayer(9),
    "static window": lambda: StaticSlidingWindowLayer(400, 9), "chunks": lambda: ChunkedLayer(9),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("dynamic", np.float32), *((name, (np.float16, np.float32)[i % 2]) for i, name in enumerate(PLAIN))],
)
def test_steps_that_run_again_without_python(name, dtype, rng, monkeypatch):
    """Token by token, with masks, drafts that go back, removed tokens and other batches between them."""
    ran, own = [], LayerAttention.again
    monkeypatch.setattr(LayerAttention, "again", lambda *call: ran.append(own(*call)) or ran[-1])
    layer = PLAIN[name]()

    def new(heads, tokens=1):
        return rng.standard_normal((layer.batch_size or 2, heads, tokens, DIM), np.float32).astype(dtype)

    changes = {
        40: lambda: layer.crop(-2), 60: lambda: layer.remove(20, 30), 80: lambda: layer.reorder([1, 0]),
        100: lambda: layer.reorder([0, 0, 1]), 120: lambda: layer.remove(20, 40, close=True, rope=Rope(DIM)),
        140: lambda: layer.reset(),
    }  # fmt: skip
    for step in range(180):
        layer.update(new(HEADS), new(HEADS))
        if step in changes and (
            step in (80, 100, 140) or name == "dynamic" or (name == "static" and step != 60)
        ):
            changes[step]()
            layer.update(new(HEADS), new(HEADS))
        for mask in (None, None, np.arange(layer.get_seq_length()) > 3, None):
            query, given, fresh = new(2 * HEADS), None, copy.deepcopy(layer)
            if mask is not None:
                given = np.stack([mask] * layer.batch_size)
            assert layer.attend(query, given).tobytes() == fresh.attend(query, given).tobytes()
            if step % 7 == 0:  # queries that lie otherwise
                turned = np.asfortranarray(query)
                assert layer.attend(turned).tobytes() == fresh.attend(turned).tobytes()
    assert name == "chunks" or sum(each is not None for each in ran) > 200
    with pytest.raises(KvkitError, match="query"):
        layer.attend(new(2 * HEADS)[:, :, :, :8])
    layer.reset()
    with pytest.raises(KvkitError, match=r"stored tokens|last 0 tokens"):
        layer.attend(new(2 * HEADS))
