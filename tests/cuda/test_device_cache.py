"""The cache operators of kvkit_cuda, against the oracle and the CPU twin, and arrays of every kind."""

import sys
import types

import numpy as np
import pytest
import scenes
from device_arrays import Array, Capsule, OnTheHost, contents, moved
from numba import cuda
from scenes import Formats, assert_all_same, assert_same

import kvkit
import kvkit_cuda
from kvkit.checks import values
from kvkit.interop import as_numpy
from kvkit.runtime import call_log
from kvkit.tools import vectors
from kvkit.tools.vectors import packs
from kvkit_cuda.copy import transfer
from kvkit_cuda.device_runtime import host

# Both chunk sizes of a move, a conversion, and codes whose groups are part of a chunk, one, several, or odd.
FEW = [
    Formats("fp32", "fp16", dims=(6, 40)),
    Formats("int8", "int8", dims=(17, 128)),
    Formats("bf16", "int8", "fp32", 8, 16, (32,)),
    Formats("fp32", "int8", "fp16", 4, 2, (6,)),
    Formats("fp16", "uint8", "bf16", 4, 40, (40,)),
]
HALF, CODES = FEW[0], FEW[2]


def check(scene):
    """Check that results have the bits of the oracle and of the CPU, and that inputs do not change."""
    before, twin = scene.copy(), scene.copy()
    by_cpu = *twin.run(kvkit), twin["cache"], twin["scale"]
    expected, got = scene.oracle(), scene.results()
    assert_all_same(got, expected)
    assert_all_same(got, by_cpu)
    for name in ("current_key", "current_value"):
        assert_same(scene[name], before[name], name)


# Values


@pytest.mark.parametrize("threads", [4, 64])
def test_any_number_of_threads(threads, rng, monkeypatch):
    monkeypatch.setattr(transfer, "THREADS", threads)
    check(scenes.dynamic(rng, CODES, 3, 1, heads=3, lengths=[(3, 4), (0, 0), (9, 2)]))


@pytest.mark.slow
def test_a_large_group(rng, monkeypatch):
    """Half a warp tells each other of a group; a whole warp; more threads than that look for themselves."""
    monkeypatch.setattr(transfer, "THREADS", 32)
    for group in (64, 128, 256):
        formats = Formats("fp32", "int8", "fp16", 8, group, (256,))
        check(scenes.static(rng, formats, batch=1, start=1, seqlen=1, heads=1))


# Arrays

TENSORS = ("current_key", "current_value", "cache", "scale")


def fail(array):
    raise array.error


class Refusing(Capsule):
    """Stands for a tensor whose interface fails, as JAX's does for bfloat16."""

    error, dtype = RuntimeError, None
    __cuda_array_interface__ = property(fail)


class Old(Refusing):
    error, __module__ = KeyError, "torch"


class Wrong(Old):
    """Stands for a tensor that claims to be float16, as torch 2.5 does."""

    @property
    def __cuda_array_interface__(self):
        return Array(self.array.view(np.float16)).__cuda_array_interface__


@pytest.mark.parametrize("kind", [Refusing, Old, Wrong])
def test_dlpack_knows_better_what_bfloat16_is(kind, rng):
    scene = scenes.static(rng, Formats("bf16", "bf16"))
    expected = scene.oracle()
    given = {name: kind(scene[name]) for name in ("current_key", "current_value", "cache")}
    key, value = scene.but(**given).run()
    assert_all_same((contents(key), contents(value), given["cache"].array, None), expected)


def test_an_array_that_nothing_passes_on():
    array = type("Failing", (), {"error": RuntimeError("no"), "__cuda_array_interface__": property(fail)})
    with pytest.raises(RuntimeError, match=r"^no$"):
        host.interface(array())


def test_results_are_cupys(rng, monkeypatch):
    cupy = types.ModuleType("cupy")
    cupy.empty = lambda shape, dtype: cupy.ndarray(np.empty(shape, dtype))
    cupy.ndarray = type(
        "ndarray", (Array,), {"__module__": "cupy", "dtype": property(lambda self: self.array.dtype)}
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    scene = scenes.static(rng, HALF)
    expected = scene.oracle()
    key, value = scene.but(current_key=cupy.ndarray(scene["current_key"])).run()
    assert type(key) is type(value) is cupy.ndarray
    assert_all_same((key.array, value.array, scene["cache"], None), expected)


def test_strided_arrays_of_the_device(rng, monkeypatch):
    """Parts of larger arrays, backwards, and rows in pieces, which are copied before numpy reads them."""

    def in_one_piece(array):
        assert array.strides[-1] == array.itemsize
        return array

    monkeypatch.setattr(values, "one_piece", in_one_piece)
    scene = scenes.static(rng, HALF, dim=40)
    expected = scene.oracle()
    wide = np.repeat(scene["current_key"], 2, axis=-1)[..., ::2]
    flipped = np.ascontiguousarray(scene["current_value"][:, ::-1])[:, ::-1]
    cache = np.zeros((*scene["cache"].shape[:-1], 50), scene["cache"].dtype)[..., 5:45]
    cache[...] = scene["cache"]
    key, value = scene.but(current_key=Array(wide), current_value=Array(flipped), cache=Array(cache)).run()
    assert type(key) is type(value) is type(cuda.device_array(1))
    assert_all_same((contents(key), contents(value), cache, None), expected)


@pytest.mark.parametrize(
    ("name", "place", "span"),
    [
        ("current_key", {}, 4), ("current_key", {"elements": 1}, 1), ("current_value", {"elements": 3}, 1),
        ("current_value", {"elements": 4}, 4), ("current_key", {"dim": 2}, 1), ("cache", {"elements": 4}, 4),
        ("cache", {"elements": 2}, 1), ("cache", {"dim": 1}, 1), ("cache", {"dim": 4}, 4),
    ],
)  # fmt: skip
def test_accesses_are_aligned(name, place, span, rng, monkeypatch):
    """A device refuses 16 bytes that do not begin at a multiple of 16; 4 elements of the cache are 8 here."""
    spans, compiled = {}, transfer.compiled

    def watched(direction, *variant):
        spans[direction] = variant[3]
        return compiled(direction, *variant)

    monkeypatch.setattr(transfer, "compiled", watched)
    scene = scenes.static(rng, HALF, dim=40)
    expected = scene.oracle()
    given = {
        n: moved(scene[n], **(place if n == name else {})) for n in ("current_key", "current_value", "cache")
    }
    key, value = scene.but(**given).run()
    assert_all_same((contents(key), contents(value), given["cache"].array, None), expected)
    assert spans == {"store": span, "load": span if name == "cache" else 4}


# Errors


def test_a_tensor_that_numpy_cannot_take(rng):
    odd = type("Odd", (OnTheHost,), {"__dlpack__": unsupported})
    refused(scenes.static(rng, HALF).but(current_key=odd(None)), "current_key", "Odd .no such type")


@pytest.mark.parametrize("formats", [HALF, Formats("bf16", "bf16")], ids=str)
def test_tensors_of_torch_on_the_host(formats, rng):
    """They change in place, and results are tensors, too."""
    torch = pytest.importorskip("torch")
    scene = scenes.static(rng, formats)
    expected, given = scene.oracle(), {}
    for name in TENSORS[:3]:
        bits = torch.from_numpy(scene[name].view(np.int16 if scene[name].itemsize == 2 else np.int32).copy())
        given[name] = bits.view(getattr(torch, scene[name].dtype.name))
    key, value = scene.but(**given).run()
    assert type(key) is type(value) is torch.Tensor
    assert_all_same((*map(as_numpy, (key, value, given["cache"])), None), expected)


def unsupported(self, **more):
    raise BufferError("no such type")


def refused(scene, name, text, **more):
    before = {n: contents(scene[n]).tobytes() for n in ("cache", "scale") if scene[n] is not None}
    with pytest.raises(kvkit.KvkitError, match=text) as error:
        scene.run(**more)
    assert str(error.value).startswith(f"{name}: expected ")
    assert all(contents(scene[n]).tobytes() == bytes_ for n, bytes_ in before.items())


def test_what_an_array_of_the_device_may_not_be(rng):
    scene = scenes.static(rng, CODES)
    cache, key = scene["cache"], scene["current_key"]
    place = cache.__array_interface__["data"][0]
    refused(scene.but(cache=Array(cache, data=(place, True))), "cache", "a read-only one")
    refused(scene.but(cache=Array(cache, mask=Array(cache))), "cache", "without a mask")
    odd = np.zeros(key.nbytes + 1, np.uint8)[1:].view(key.dtype).reshape(key.shape)
    refused(scene.but(current_key=Array(odd)), "current_key", "multiples of their size")
    apart = tuple(stride + 1 for stride in key.strides[:-1])
    refused(scene.but(current_key=Array(key, strides=(*apart, 2))), "current_key", "multiples of their size")
    refused(
        scene.but(cache=Array(cache), current_key=Array(cache.view(np.float32))),
        "current_key",
        "5|4 axes|dtype",
    )
    refused(scene.but(current_key=Array(key.astype(np.float64))), "current_key", "dtype")


def test_arrays_of_the_device_that_overlap(rng):
    scene = scenes.static(rng, HALF, dim=6)
    shape, size = scene["current_key"].shape, scene["current_key"].size
    inside = scene["cache"].reshape(-1)[: 2 * size].view(np.float32).reshape(shape)
    refused(
        scene.but(cache=Array(scene["cache"]), current_key=Array(inside)), "cache", "apart from current_key"
    )
    key = Array(np.empty((2, 5, 2, 6), np.float32))
    refused(scene, "out (key)", "apart from out .value.", out=(key, key))
    inside = scene["cache"].reshape(-1)[: 4 * 60].view(np.float32).reshape(2, 5, 2, 6)
    refused(
        scene.but(cache=Array(scene["cache"])), "out (value)", "apart from cache", out=(key, Array(inside))
    )


# Streams


class Named:
    def __init__(self, **names):
        vars(self).update(names)


def test_streams(monkeypatch):
    """Whoever makes a stream, its address counts, and it stays alive; that of None is the legacy default."""
    monkeypatch.setattr(cuda, "external_stream", lambda address: Named(address=address))
    monkeypatch.setattr(cuda, "legacy_default_stream", lambda: "default")
    of_core = Named(__cuda_stream__=lambda: (0, 9))
    for given, expected in ((7, 7), (Named(cuda_stream=5), 5), (Named(ptr=6), 6), (of_core, 9), (0, 1)):
        stream = host.stream(given)
        assert stream.address == expected
        assert host.SIMULATED or stream.owner == given
    of_numba = Named(handle=3, synchronize=print)
    assert host.stream(of_numba) is of_numba
    assert host.stream(Named(handle=0, synchronize=print)) == host.stream(None) == "default"
    for given in ("0", True, 1.0, [1]):
        with pytest.raises(kvkit.KvkitError, match=r"^stream: expected"):
            host.stream(given)


def test_the_stream_of_a_producer_is_waited_for(rng, monkeypatch):
    waited = []
    monkeypatch.setattr(host, "wait_for", lambda producer, stream: waited.append(producer))
    scene = scenes.static(rng, HALF)
    expected = scene.oracle()
    key = Array(scene["current_key"], stream=77)
    key, _ = scene.but(current_key=key, current_value=Array(scene["current_value"], stream=None)).run()
    assert waited == [77]
    assert_same(contents(key), expected[0])


def test_the_callers_memory_is_read_before_a_call_returns(rng, monkeypatch):
    """Copies from pinned memory go on behind the host."""
    finished = []
    monkeypatch.setattr(host, "finish", finished.append)
    scene, names = scenes.static(rng, HALF), ("current_key", "current_value", "cache")
    for i in range(len(names)):
        scene.but(**{name: Array(scene[name]) for name in names if name != names[i]}).run()
        assert len(finished) == i + 1


def test_no_call_waits_for_tables(rng, monkeypatch):
    finished = []
    monkeypatch.setattr(host, "finish", finished.append)
    for scene in (scenes.static(rng, HALF), scenes.dynamic(rng, HALF, 0, 1)):
        names = ("current_key", "current_value", "cache")
        scene.but(**{name: Array(scene[name]) for name in names}).run()
    index = {name: scene[name] for name in ("seqstarts", "kvstarts", "cachestarts", "start_pos")}
    step = kvkit_cuda.dynamic_batching.plan(**index, cache_mode=1, page_size=scene.attributes["page_size"])
    heads, dim = scene["current_key"].shape[1:]
    cache, keys = Array(np.zeros((1, 1 << 12, 2, heads, dim), np.float16)), Array(scene["current_key"])
    step.key_value_cache(keys, keys, cache, cache_layout=1)
    assert not finished


def test_calls_are_dumped_with_what_lies_on_the_device(monkeypatch, tmp_path, capfd, rng):
    monkeypatch.setattr(call_log, "level", 10)
    monkeypatch.setenv("KVKIT_LOG_FOLDER", str(tmp_path / "log"))
    new = rng.standard_normal((3, 1, 8), np.float32)
    step = kvkit_cuda.dynamic_batching.plan([0, 3], [0, 3], np.array([[4]]), [0], cache_mode=1, page_size=4)
    cache = cuda.to_device(np.zeros((16, 1, 2, 1, 8), np.float32))
    step.key_value_cache(cuda.to_device(new), new, cache)
    monkeypatch.setattr(call_log, "level", 0)
    [folder] = packs.manifests(tmp_path / "log")
    given = packs.arguments(folder, packs.manifest(folder)["cases"][0])
    assert given["current_key"].tobytes() == new.tobytes()
    assert not given["cache"].any()  # as it was before the call
    assert [case.status for case in vectors.replay(folder).cases] == ["ran"]
    assert "no dump" not in capfd.readouterr().err
