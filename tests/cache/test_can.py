"""`can` answers for every call that changes a cache: None exactly if it succeeds, else the error's text."""

import numpy as np
import pytest
from kind_scenes import delta, step

from kvkit import KvkitError, Rope
from kvkit.cache import (
    Cache,
    ChunkedLayer,
    CompressedLayer,
    DynamicLayer,
    GatedDeltaLayer,
    IndexedLayer,
    LatentLayer,
    OutOfBlocksError,
    PagedCache,
    QuantizedLayer,
    SharedLayer,
    SlidingWindowLayer,
    StateLayer,
    StaticChunkedLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

ROPE = Rope(8)
CODES = "uint8:g4:channel/uint8:g8"


def pooling(**more):
    """Return a layer of compressed rows with its weights."""
    layer, zeros = CompressedLayer(8, 8, 6, 2, **more), np.zeros((2, 16), np.float32)
    pair = zeros if more.get("index_dim") else zeros[:, :8], np.ones(8, np.float32)
    layer.set_weights(*[pair] * (2 if more.get("index_dim") else 1), rope="none")
    return layer


KINDS = {
    "dynamic": DynamicLayer,
    "static": lambda: StaticLayer(40),
    "window": lambda: SlidingWindowLayer(6),
    "static window": lambda: StaticSlidingWindowLayer(40, 6),
    "chunks": lambda: ChunkedLayer(6),
    "static chunks": lambda: StaticChunkedLayer(40, 6),
    "codes": lambda: QuantizedLayer(CODES, residual_length=4, sink=2),
    "channels": lambda: QuantizedLayer("kivi4:g4", residual_length=4, sink=2),
    "latent": lambda: LatentLayer(8, 8),
    "indexed": lambda: IndexedLayer(LatentLayer(8, 8), 4),
    "window of V4": lambda: CompressedLayer(8, 8, 6, drafts=3),
    "csa": lambda: pooling(index_dim=8, index_topk=3, drafts=3),
    "hca": lambda: pooling(drafts=2),
    "state": lambda: StateLayer(checkpoint_every=3),
    "no checkpoints": StateLayer,
    "delta": delta,
    "delta by channel": lambda: delta("kda", checkpoint_every=3),
    "shared": lambda: SharedLayer(of=0),
}
ALONE = [[kind] for kind in KINDS if kind != "shared"]
MIXED = [
    ["csa", "hca", "window of V4"], ["dynamic", "window"], ["dynamic", "state"], ["dynamic", "delta"],
    ["codes", "window", "state"], ["latent", "state"],
    ["dynamic", "shared"], ["chunks", "shared", "static window"], ["codes", "channels"],
    ["static", "static window"],
]  # fmt: skip


def rows_of(layer, count, rng, batch):
    heads = 1 if layer.latent_dim else 2
    return rng.standard_normal((2, batch, heads, count, 8)).astype(np.float32)


def grow(cache, count, rng, batch=2):
    length = cache.get_seq_length()
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, CompressedLayer):
            wide = rng.standard_normal((2, batch, count, 16 if layer.index_dim else 8)).astype(np.float32)
            pair = tuple(wide) if layer.ratio else None
            more = {"indexer": pair} if layer.index_dim else {}
            cache.update(rows_of(layer, count, rng, batch)[0][:, :1], pair, i, **more)
        elif layer._of is None and layer._has_rows:
            cache.update(*rows_of(layer, count, rng, batch), i)
        elif isinstance(layer, GatedDeltaLayer):
            step(layer, count, length, batch)
        elif layer._of is None:
            cache.update({"s": np.full((batch, 3), length + count, np.float32)}, count, i)


def calls(length, batch, rng, other):
    """Return legal and illegal calls, with arguments in place and by name."""
    a, b = sorted(rng.integers(-1, length + 3, 2).tolist())
    some = sorted({*rng.integers(0, max(length, 1), 4).tolist()})
    return [
        ("remove", (a, b), {}), ("remove", (a, b), {"close": True}), ("remove", (a,), {}),
        ("remove", (), {"begin": a}),
        ("remove", (a, b), {"rope": Rope(8, 99.0)}), ("retain", (some,), {}), ("retain", ([b, a],), {}),
        ("shift", (a, b, int(rng.integers(-4, 5))), {}), ("shift", (0, None, int(rng.integers(-3, 5))), {}),
        ("shift", (0, None), {"delta": 2, "rope": "none"}), ("shift", (0, None, 1, ROPE), {}),
        ("divide", (a, b, 2), {}), ("divide", (0, None, 2), {}), ("flatten", (), {}), ("flatten", (3,), {}),
        ("crop", (a,), {}), ("crop", (-b,), {}), ("crop", ("x",), {}), ("reorder", ([a, 0],), {}),
        ("reorder_cache", ([],), {}), ("batch_select_indices", ([0, 1],), {}), ("repeat", (a,), {}),
        ("batch_repeat_interleave", (1,), {}), ("reserve", (a,), {}), ("reserve", (60,), {}),
        ("append", (other,), {}), ("append", (other, a), {}), ("append", (other,), {"rope": ROPE}),
        ("append", (other,), {"at": b, "rope": "none"}), ("append", (None,), {}),
        ("reset", (), {}), ("compress", ("knorm",), {"keep": 0.5}), ("compress", ("knorm",), {"count": a}),
        ("compress", ("snapkv",), {"keep": 0.5}), ("compress", ("knorm",), {"keep": 0.8, "renumber": True}),
        ("compress", ("knorm",), {"keep": 0.8, "budget": "ada"}),
        ("compress", ("keydiff",), {"keep": 0.8, "attn_mask": rng.random((batch, length)) < 0.9}),
        ("compress", ("streaming",), {"keep": 0.5, "sinks": 9}), ("compress", ("no scorer",), {"keep": 0.5}),
    ]  # fmt: skip


def seen(cache):
    """Return what a refused call, and a question, may not change."""
    names = "stored_tokens", "nbytes", "positions", "rope_shifts"
    rows = [
        [layer.get_seq_length(), *(np.asarray(getattr(layer, name)).tolist() for name in names)]
        for layer in cache.layers
    ]
    stored = [layer.keys for layer in cache.layers]
    return rows, [None if keys is None else np.asarray(keys).tobytes() for keys in stored]


def check(target, cache, call, arguments, options):
    """Ask, then call; return whether the call was legal."""
    before = seen(cache)
    said = target.can(call, *arguments, **options)
    assert seen(cache) == before
    if said is None:
        getattr(target, call)(*arguments, **options)
        return True
    with pytest.raises((KvkitError, TypeError)) as error:
        getattr(target, call)(*arguments, **options)
    if not isinstance(error.value, TypeError):
        assert str(error.value) == said
    assert seen(cache) == before
    return False


@pytest.mark.filterwarnings("ignore:.*narrows")
@pytest.mark.parametrize("kinds", ALONE + MIXED, ids="-".join)
def test_can_is_none_exactly_if_the_call_succeeds(kinds):
    legal = asked = 0
    for seed in range(6):
        rng = np.random.default_rng(seed)
        cache = Cache([KINDS[kind]() for kind in kinds], rope=[None, ROPE, "none"][seed % 3])
        for _ in range(int(rng.integers(0, 4))):
            if cache.get_seq_length() + 6 < 40:
                grow(cache, int(rng.integers(1, 6)), rng)
        layers, batch = cache.layers, 2
        for _ in range(14):
            batch = max([layer.batch_size for layer in cache.layers], default=2)
            other = Cache([KINDS[kind]() for kind in kinds], rope=[None, ROPE, "none"][rng.integers(3)])
            if rng.random() < 0.9:
                grow(other, int(rng.integers(1, 6)), rng, batch or 2)
            chosen = calls(cache.get_seq_length(), batch, rng, other)
            call, arguments, options = chosen[rng.integers(len(chosen))]
            if call == "repeat" and batch > 4:
                continue
            asked += 1
            legal += check(cache, cache, call, arguments, options)
        for layer in cache.layers:
            for call, arguments, options in calls(layer.get_seq_length(), batch, rng, other.layers[-1]):
                if call != "compress" and (call, len(cache.layers)) != ("reset", 2):
                    check(layer, cache, call, arguments, options)
                    asked += 1
                    break
        assert layers is cache.layers
    assert 0 < legal < asked


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("latent", [0, 4])
def test_rows_in_pages(latent, states):
    """Blocks may be missing for a copy, which only the call finds."""
    legal = asked = 0
    for seed in range(8):
        rng = np.random.default_rng(seed)
        others = {1: StateLayer(checkpoint_every=2)} if states else {}
        cache = PagedCache(400, 4, 2, 1 if latent else 2, 8, np.float32, rope=[None, ROPE][seed % 2],
                           latent_dim=latent, others=others)  # fmt: skip
        for _ in range(seed % 4):
            for i, layer in enumerate(cache.layers):
                keys, values = rows_of(layer, 4, rng, 2)
                if not layer._has_rows:
                    cache.update({"s": np.ones((2, 3), np.float32)}, 4, i)
                else:
                    cache.update(*((keys[..., :4], values[..., :4]) if latent else (keys, values)), i)
        for _ in range(14):
            batch = cache.layers[0].batch_size or 2
            chosen = calls(cache.get_seq_length(), batch, rng, None)
            call, arguments, options = chosen[rng.integers(len(chosen))]
            if call in ("reserve", "repeat", "append") or "per_head" in options or options.get("budget"):
                continue
            named = call in ("crop", "reorder", "reorder_cache", "batch_select_indices", "reset",
                             "batch_repeat_interleave")  # fmt: skip
            asked += 1
            legal += check(cache if named else cache.rows, cache, call, arguments, options)
    assert 0 < legal < asked


def test_sequences_in_pages():
    cache = PagedCache(4, 4, 1, 1, 8, np.float32, rope=ROPE)
    seq, tokens = cache.blocks.add(), np.ones((12, 1, 8), np.float32)
    with cache.begin_step([(seq, 12)]) as step:
        step.update(tokens, tokens, 0)
    assert cache.can("compress", seq, "knorm", keep=0.5) is None
    assert "snapkv needs" in cache.can("compress", seq, "snapkv", keep=0.5)
    assert "end: expected" in cache.can("remove", seq, 5, 2)
    assert cache.can("remove", seq, begin=2, end=6, close=True) is None
    other = cache.blocks.fork(seq)
    assert cache.can("remove", other, 2, 6) is None  # but a copy needs a block, and none is free
    third = cache.blocks.add()
    with cache.begin_step([(third, 3)]) as step:
        step.update(tokens[:3], tokens[:3], 0)
    with pytest.raises(OutOfBlocksError):
        cache.remove(other, 2, 6)


def test_calls_that_a_layer_does_not_have():
    for target in Cache([]), DynamicLayer(), PagedCache(4, 4, 1, 1, 8, np.float32).layers[0]:
        with pytest.raises(KvkitError, match="call: expected one of remove, retain, shift, divide, flatten"):
            target.can("update")


def test_a_window_that_has_slid_names_the_call():
    layer = SlidingWindowLayer(4)
    layer.update(*np.ones((2, 1, 1, 9, 4), np.float32))
    for call, arguments in ("remove", (5,)), ("remove", (5, 9)), ("crop", (5,)), ("crop", (-4,)):
        with pytest.raises(
            KvkitError, match=f"^SlidingWindowLayer: expected a window of 4.* got {call} to 5$"
        ) as error:
            getattr(layer, call)(*arguments)
        assert isinstance(error.value, RuntimeError)
        assert layer.can(call, *arguments) == str(error.value)
