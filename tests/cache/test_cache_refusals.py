"""What caches of every kind refuse, in tables: the message, and that nothing has changed then."""

import numpy as np
import pytest
from cache_scenes import LAYERS, any_kind, append, cache_of, filled, state
from paged_scenes import refused
from quantized_cache_scenes import states

import kvkit
from kvkit import Rope
from kvkit.cache import (
    BlockAllocator,
    Cache,
    CapacityError,
    CompressedLayer,
    DynamicCache,
    DynamicLayer,
    GatedDeltaLayer,
    IndexedLayer,
    LatentLayer,
    OutOfBlocksError,
    PagedCache,
    PagedCompressedCache,
    QuantizedCache,
    QuantizedLayer,
    QuantSpec,
    SharedLayer,
    SlidingWindowLayer,
    StateLayer,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

TYPES = ["full_attention", "sliding_attention", "full_attention"]


def paged(**change):
    usual = {"num_blocks": 4, "page_size": 4, "num_layers": 1, "num_kv_heads": 1, "head_dim": 16}
    return lambda: PagedCache(**usual | {"dtype": np.float16} | change)


def updated(*new, **how):
    return lambda: QuantizedLayer(**how).update(*new)


CONSTRUCTORS = [  # the message's beginning, and who says it
    ("layer_types: expected 2 types (num_layers), got 3", lambda: DynamicCache(2, TYPES, 4)),
    ("window: expected a window for the sliding layers", lambda: DynamicCache(layer_types=TYPES)),
    ("layer_types[0]: expected full_attention or sliding_att", lambda: DynamicCache(layer_types=["full"])),
    *(("num_layers: expected an integer from", make) for make in (
        lambda: DynamicCache(-1), lambda: DynamicCache(2**31), lambda: QuantizedCache(num_layers=1025),
        lambda: StaticCache(8, 2**24), paged(num_layers=2**24))),
    ("window: expected at least 1", lambda: DynamicCache(window=0)),
    ("max_cache_len: expected at least 1", lambda: StaticCache(0, 1)),
    ("num_layers: expected an integer", lambda: StaticCache(8, "2")),
    ("layers[0]: expected a layer", lambda: Cache([DynamicLayer])),
    ("layers[1]: expected a layer of its own", lambda: Cache([DynamicLayer()] * 2)),
    ("layers[1]: expected a new SharedLayer, got one of another cache",
     lambda: Cache([DynamicLayer(), Cache([DynamicLayer(), SharedLayer(0)]).layers[1]])),
    ("others: expected a new SharedLayer, got one of another cache",
     paged(num_layers=2, others={1: Cache([DynamicLayer(), SharedLayer(0)]).layers[1]})),
    ("layers[0].of: expected the number of a layer", lambda: Cache([SharedLayer(0)])),
    ("layers[1].of: expected the number of a layer with rows of its own",
     lambda: Cache([StateLayer(), SharedLayer(0)])),
    ("SharedLayer: expected a cache with layer 0",
     lambda: SharedLayer(0).attend(np.ones((1, 1, 1, 4), "f4"))),
    *(("others: expected a StateLayer or SharedLayer by a number belo", paged(num_layers=4, others=others))
      for others in ({4: StateLayer()}, {0: DynamicLayer()}, {True: SharedLayer(0)})),
    ("others: ", paged(num_layers=3, others=[SharedLayer(0)])),
    ("others: expected fewer layers than num_layers, got 1", paged(others={0: StateLayer()})),
    ("rope: expected ", paged(num_layers=2, rope=[Rope(8)])),
    ("layers[0]: expected weights and a rope",
     lambda: PagedCompressedCache([CompressedLayer(8, 4, ratio=4)], 4, 1, dtype=np.float32)),
    ("dtype: expected float32, float16 or bfloat16",
     lambda: PagedCompressedCache([CompressedLayer(8, 4)], 4, 1, dtype=np.int8)),
    ("max_cache_len: expected at least 1", lambda: StaticLayer(0)),
    ("max_cache_len: expected an integer", lambda: StaticLayer(2.5)),
    ("max_cache_len: expected at most 1099511627776 tokens, got 46", lambda: StaticCache(2**62, 1)),
    ("window: expected at least 1", lambda: SlidingWindowLayer(0)),
    ("window: expected an integer", lambda: SlidingWindowLayer(None)),
    ("window: expected at least 1", lambda: StaticSlidingWindowLayer(4, 0)),
    ("format: expected a format that `kvkit list formats`", lambda: QuantSpec("uint3")),
    ("format: expected options among gN, for kivi_key4, got 'g0'", lambda: QuantSpec("kivi4:g0")),
    ("format: expected int8, int4, int2,", lambda: QuantSpec("e4m3:token")),
    ("format: expected int8, int4, int2,", lambda: QuantSpec("int8:bfloat16")),
    ("format: expected a format that `kvkit list formats`", lambda: QuantSpec("fp6")),
    ("past_key_values: expected (keys, values) of each", lambda: DynamicCache.from_legacy_cache(None)),
    ("past_key_values[0]: expected (keys, values)", lambda: DynamicCache.from_legacy_cache([(1, 2, 3)])),
    ("layer_types: expected the type of each layer", lambda: DynamicCache(layer_types=5)),
    ("layer_types: expected the type of each", lambda: DynamicCache(layer_types="full_attention")),
    ("layer_types[0]: expected full", lambda: DynamicCache(layer_types=[["full_attention"]])),
    ("layer_types: expected 2 types", lambda: DynamicCache(2, (each for each in ["full_attention"]))),
    ("slot_dtype: expected int64, or int32", lambda: BlockAllocator(4, 4, slot_dtype="nonsense")),
    ("call: expected one of remove", lambda: DynamicLayer()._plan("crop")),
    ("head_dim: expected a multiple of 48", lambda: QuantSpec("e4m3:g48").bytes_per_token(64)),
    ("head_dim: expected a multiple of 48", lambda: QuantSpec("uint4:g48").bytes_per_token(64)),
    ("head_dim: expected at least 1", lambda: QuantSpec("q4_0").bytes_per_token(-1)),
    ("format: expected a format such as 'int8:g32', ", lambda: QuantSpec(8)),
    ("rotation: expected hadamard, llama.cpp, vllm, or hadamard:N", lambda: QuantSpec("kivi4+qr")),
    ("key: expected", lambda: QuantizedLayer(key=4)),
    ("format: expected a format such as 'int4:g32' or 'kivi4', got int 8 (a number of layers",
     lambda: QuantizedCache(8)),
    ("sink: expected", lambda: QuantizedLayer(sink=-1)),
    ("residual_length: expected", lambda: QuantizedLayer(residual_length=1.5)),
    ("read_back: expected", lambda: QuantizedLayer(read_back="yes")),
    ("sink: expected", lambda: QuantizedCache(num_layers=2, sink=-1)),
    ("value: expected a head size that groups of 64", updated(*states(1), value=QuantSpec("kivi4:g64"))),
    ("key: expected", updated(*states(1, dims=(6, 32)), key=QuantSpec("uint2:channel"))),
    ("key: expected a head size that groups of 64 divide, got 80",
     updated(*states(1, dims=(80, 80)), key=QuantSpec("uint4:g64"))),
    ("key: expected a head size that groups of 32 divide, got 48",
     updated(*states(2, dims=(48, 48)), key=QuantSpec("q8_0"), value=QuantSpec("q8_0"))),
    *(("num_layers: expected the number of layers, for the mix int8@0/int4",
       lambda name=name: QuantizedCache(**{name: "int8@0/int4"})) for name in ("format", "key")),
    ("format: expected layers from -4 to 3, got 7", lambda: QuantizedCache("int8@7/int4", num_layers=4)),
    ("format: expected int8, int4", lambda: QuantizedCache("int8@0/nvfp4", num_layers=4)),
    ("format: expected a format for layer 1", lambda: QuantizedCache(value="int8@0", num_layers=2)),
    *(("format: expected a format of one layer", lambda make=make: make("int8@0/int4"))
      for make in (QuantSpec, QuantizedLayer)),
    *(("format: expected None or ds_mla (`kvkit study` shows", lambda name=name: LatentLayer(format=name))
      for name in ("int8:g64", "ds_v4")),
    ("format: expected rows of 512 + 64, for ds_mla, got (32, 8)", lambda: LatentLayer(32, 8, "ds_mla")),
    ("latent: expected an empty LatentLayer without a format",
     lambda: IndexedLayer(LatentLayer(512, 64, "ds_mla"))),
    ("latent_dim: expected 0, because quant_bit, quant_format or several heads are given",
     paged(num_kv_heads=2, latent_dim=8)),
    ("latent_dim: expected an integer from 0 to 15", paged(latent_dim=16)),
    *((text, lambda change=change: CompressedLayer(**{"dim": 8, "rope_dim": 4, "ratio": 4} | change))
      for text, change in (
          ("index_dim: expected both", {"index_dim": 8}),
          ("index_dim: expected both", {"index_dim": 8, "index_topk": 2, "ratio": 0}),
          ("ratio: expected", {"ratio": -1}), ("rope_dim: expected", {"rope_dim": 9}),
          ("format: expected", {"format": "ds_v4"}))),
    *((text, lambda sizes=sizes: GatedDeltaLayer(*sizes)) for text, sizes in (
        ("conv_channels: expected 2 * key heads * 8 + 24", (4, 8, 6, 55, 4)),
        ("conv_channels: expected 2 * key heads * 8 + 24, key heads dividing 4, got 72", (4, 8, 6, 72, 4)),
        ("num_heads: expected at least 1", (0, 8, 6, 56, 4)),
        ("conv_width: expected an integer", (4, 8, 6, 56, 9)))),
    ("kind: expected 'gdn' or 'kda', got", lambda: GatedDeltaLayer(4, 8, 6, 56, 4, kind="gdn2")),
    ("num_blocks: expected", paged(num_blocks=0)),
    ("page_size: expected", paged(page_size=0)),
    ("num_layers: expected", paged(num_layers=0)),
    ("num_kv_heads: expected", paged(num_kv_heads=0)),
    ("head_dim: expected", paged(head_dim=0)),
    ("dtype: expected", paged(dtype=np.int8)),
    ("dtype: expected", paged(dtype="no type")),
    ("quant_bit: expected", paged(quant_bit=2)),
    ("quant_bit: expected", paged(quant_bit=8, quant_format="e4m3")),
    ("quant_group: expected", paged(quant_bit=8, quant_group=5)),
    ("quant_group: expected", paged(quant_bit=4, quant_group=1)),
    ("quant_group: expected", paged(quant_bit=8, quant_group=0)),
    ("scale_dtype: expected", paged(quant_bit=8, scale_dtype=np.int8)),
    ("quant_format: expected", paged(quant_format="e4m3fn")),
    ("scale: expected", paged(quant_format="e4m3", scale=[1, 0])),
    ("scale: expected 'found', a number,", paged(quant_format="e4m3", scale="head")),
    ("scale: expected 'found', a number,", paged(quant_format="e4m3", scale="2")),
    ("scale: expected", paged(quant_format="q8_0", scale=1.0)),
    ("cache_layout: expected", paged(cache_layout=4)),
    ("salt: expected", paged(salt="model")),
    ("num_blocks: expected", lambda: BlockAllocator(0, 4)),
    ("num_blocks: expected", lambda: BlockAllocator(4.0, 4)),
    ("page_size: expected", lambda: BlockAllocator(4, 0)),
    ("identity: expected", lambda: BlockAllocator(4, 4, identity="model")),
    ("slot_dtype: expected", lambda: BlockAllocator(2**20, 2**12)),
    ("slot_dtype: expected", lambda: BlockAllocator(4, 4, slot_dtype=np.int16)),
]  # fmt: skip


@pytest.mark.parametrize(
    "make",
    [
        *LAYERS.values(), lambda: LatentLayer(8, 4),
        lambda: CompressedLayer(8, 4, window=6), lambda: GatedDeltaLayer(2, 4, 4, 16, 4),
    ],
)  # fmt: skip
def test_a_whole_layer_or_cache_is_no_array(make):
    """The line in the message gives an array, where the layer has tokens."""
    made = make()
    layer = made.layers[0] if isinstance(made, PagedCache) else made
    cache = made if isinstance(made, PagedCache) else Cache([made])
    for whole in (layer, cache):
        with pytest.raises(
            kvkit.KvkitError, match=r"^array: expected one array, as .*, got a whole "
        ) as told:
            np.asarray(whole)
        assert whole in [np.zeros(2), np.float32(1), whole]  # it compares with arrays by identity
    if type(made) in (DynamicLayer, StaticLayer, SlidingWindowLayer):
        append(layer, 1, 2)
        line = str(told.value).partition(" as ")[2].partition(", got")[0]
        assert np.asarray(eval(line)).dtype == np.float32


@pytest.mark.parametrize(("message", "make"), CONSTRUCTORS, ids=[message for message, _ in CONSTRUCTORS])
def test_constructors(message, make):
    assert refused(make).startswith(message)


def of_updates(key, value):
    """Yield (words of the message, arguments) of wrong updates of a float16 cache [2, 3, 5, ...]."""
    yield "key_states: expected a numpy array, got list", (key.tolist(), value)
    yield "key_states: expected 4 axes", (key[0], value[0])
    yield "value_states: expected 4 axes", (key, value[0])
    yield "key_states: expected dtype", (key.astype(np.float64), value)
    yield "value_states: expected the dtype of key_states", (key, value.astype(np.float32))
    for wrong in (value[:1], value[:, :2], value[:, :, :1]):
        yield "value_states: expected shape", (key, wrong)
    for change in (lambda x: x[:1], lambda x: x[:, :1], lambda x: x.astype(np.float32)):
        yield (
            "[2, 3, q, ",
            (change(key), change(value)),
        )
    yield "key_states: expected ", (key[..., :0], value[..., :0])
    yield "[2, 3, q, ", (key[..., :3], value)
    yield "[2, 3, q, ", (key, value[..., :3])
    for positions in ([5], [5, 7], [6, 7], [-1, 0], [5.0, 6.0], [[5, 6]], []):
        yield "cache_position: expected", (key, value, positions)


OTHERS = [
    ("query_length: expected at least 0", "get_mask_sizes", -1, 0),
    ("length: expected an integer", "crop", 1.5),
    ("length: expected at ", "crop", -6),
    ("indices: expected", "reorder", []),
    ("indices: expected rows ", "reorder", [0, 2]),
    ("indices: expected rows ", "reorder", [-1]),
    ("indices: expected integers", "reorder", [0.5]),
    ("indices: expected", "reorder", [[0]]),
    ("repeats: expected at least 1", "repeat", 0),
    ("repeats: expected an integer", "repeat", 1.5),
    *(("layer_idx: expected", "get_mask_sizes", 1, layer) for layer in (1, -1, 1.5, "0", None)),
]  # fmt: skip


def of_attention(size):
    """Yield (words of the message, arguments, options) of wrong attention after 5 tokens."""
    query = np.ones((2, 6, 2, size), np.float16)
    for wrong in (query.tolist(), query.astype(np.float64), query[0], query[:1], query[:, :4], query[:, :0],
                  query[..., : size // 2], np.ones((2, 6, 6, size), np.float16), None):  # fmt: skip
        yield "query: expected ", (wrong, 0), {}
    masks = [[True] * 5] * 2, np.ones((2, 5)), np.ones((2, 4), bool), np.ones((3, 5), bool)
    for mask in (*masks, np.ones((2, 2, 5), bool), np.ones((2, 6, 3, 5), bool), 1):
        yield "mask: expected", (query, 0, mask), {}
    yield "attn_mask: expected dtype", (query, 0, np.ones((2, 6, 2, 5), np.float64)), {}
    for scale in (np.nan, True, np.ones(2), "1"):
        yield "softmax_scale: expected a finite number", (query, 0), {"softmax_scale": scale}
    yield "softcap: expected 0", (query, 0), {"softcap": -1.0}
    yield "softcap: expected a finite number", (query, 0), {"softcap": True}
    yield "sinks: expected shape (6,)", (query, 0), {"sinks": np.zeros(2, np.float32)}
    yield "sinks: expected a numpy array", (query, 0), {"sinks": 1}
    yield "return_lse: expected", (query, 0), {"return_lse": "yes"}


@pytest.mark.parametrize("kind", LAYERS)
def test_calls(kind):
    """Of every method, in a cache that already has tokens; the same calls before are other errors."""
    size = 8 if kind == "paged" else 4
    key, value = np.ones((2, 3, 2, size), np.float16), np.ones((2, 3, 2, 8), np.float16)
    cache = cache_of(kind)
    assert ": expected stored tokens (call update before attend)" in refused(cache.attend, key, 0)
    cache = filled(kind, dims=(size, 8))
    before = state(cache)
    calls = [(says, cache.update, (*given[:2], 0, *given[2:]), {}) for says, given in of_updates(key, value)]
    calls += [(says, getattr(cache, name), given, {}) for says, name, *given in OTHERS]
    calls += [(says, cache.attend, given, options) for says, given, options in of_attention(size)]
    if kind != "static":
        calls.append(("cache_position: expected", cache.update, (key, value, 0, [4, 5]), {}))
    for message, call, given, options in calls:
        said = refused(call, *given, **options)
        assert message in said, said
        assert state(cache) == before, message


@any_kind
def test_no_memory_leaves_a_cache_as_it_was(kind, monkeypatch):
    cache = filled(kind, dims=(4, 8))
    before = state(cache)
    new = [np.ones((2, 3, 60, dim), np.float16) for dim in (4, 8)]
    real, left = np.zeros, 1  # the keys find memory, the values do not

    def zeros(*arguments, **more):
        nonlocal left
        left -= 1
        if left < 0:
            raise MemoryError
        return real(*arguments, **more)

    calls = [lambda: cache.repeat(2), lambda: cache.reorder([1])]
    calls += [lambda: cache.update(*new, 0)] if kind != "static" else []
    calls += [lambda: cache.reserve(60)] if kind in ("dynamic", "sliding") else []
    for call in calls:
        left = 1
        with monkeypatch.context() as patch:
            patch.setattr("kvkit.cache.stores.memory.np.zeros", zeros)
            with pytest.raises(MemoryError):
                call()
        assert left < 0
        assert state(cache) == before


def test_a_full_layer_says_so():
    layer = StaticLayer(4)
    append(layer, 1, 2, 3)
    for call in (lambda: append(layer, 4, 5), lambda: layer.reserve(2)):
        with pytest.raises(CapacityError) as error:
            call()
        wanted = "StaticLayer: expected room for 2 new tokens after 3 (max_cache_len 4), got 1"
        assert str(error.value) == wanted
    layer.reserve(1)
    assert append(layer, 4) == [1, 2, 3, 4]
    with pytest.raises(CapacityError):
        StaticLayer(3).reserve(4)


def test_the_largest_allocator():
    assert BlockAllocator(2**19, 2**12).available == 2**19


def test_queries_whose_window_has_left():
    layer, query = SlidingWindowLayer(4), np.ones((1, 1, 2, 1), np.float32)
    append(layer, *range(300))
    layer.attend(query)
    layer._release_undo()
    layer.attend(query[:, :, :1])
    assert "query: expected queries of the last tokens, whose windows Sliding" in refused(layer.attend, query)


def test_a_crop_without_recording_says_what_to_do():
    layer = SlidingWindowLayer(4)
    append(layer, 1, 2, 3, 4, 5, 6)
    with pytest.raises(
        RuntimeError, match=r"^SlidingWindowLayer: expected .* activate_past_recording\(\).*got crop to 5"
    ):
        layer.crop(-1)
    assert append(layer, 7) == [4, 5, 6, 7]


def test_no_room_in_blocks_leaves_a_cache_as_it_was():
    cache = PagedCache(4, 2, 1, 1, 1, np.float32)
    tokens = np.ones((6, 1, 3, 1), np.float32)
    with pytest.raises(OutOfBlocksError):
        cache.update(tokens, tokens, 0)  # the first update, too
    cache.update(tokens[:2], tokens[:2], 0)
    before = state(cache)
    for call in (lambda: cache.update(tokens[:2, :, :2], tokens[:2, :, :2], 0), lambda: cache.reserve(2)):
        with pytest.raises(OutOfBlocksError):
            call()
        assert state(cache) == before
    inside = cache.cache[0, 0, 0, :2].reshape(2, 1, 1, 1)
    assert "overlap" in refused(cache.update, inside, tokens[:2, :, :1], 0)
    cache.reserve(1)
    cache.update(tokens[:2, :, :1], tokens[:2, :, :1], 0)
    assert cache.get_seq_length() == 4
    assert issubclass(OutOfBlocksError, kvkit.KvkitError)


def test_masks_of_other_names_and_integers():
    cache, states = DynamicCache(), np.ones((1, 1, 2, 4), np.float32)
    cache.update(states, states, 0)
    with pytest.raises(TypeError, match=r"[Dd]id you mean '?attn_mask"):
        cache.attend(states, 0, attention_mask=None)
    with pytest.raises(TypeError, match=r"[Dd]id you mean '?attn_mask"):
        kvkit.multi_head_attention(states, states, states, attention_mask=None)
    with pytest.raises(kvkit.KvkitError, match=r"got int64: mask.astype\(bool\), if 0 hides a key"):
        cache.attend(states, 0, attn_mask=np.ones((1, 2), np.int64))
