"""What kvkit_cuda asks of a driver, by way of numba-cuda: a stand-in counts it, orders it and refuses."""

import ctypes
import gc
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import scenes
import stand_in
from device_arrays import Array, Capsule
from numba import cuda, types
from scenes import Formats, assert_all_same, first_quick

import kvkit
import kvkit_cuda
from kvkit.checks import caches
from kvkit.formats.elements import BY_NAME
from kvkit.runtime import disk_cache
from kvkit_cuda import warm
from kvkit_cuda.calls import arrays, attention
from kvkit_cuda.device_runtime import compiled, device, host, memory
from kvkit_cuda.positions import index

HALF = Formats("fp16", "fp16")


def test_the_host_reads_no_memory_of_the_device_and_kernels_no_other():
    there = cuda.to_device(np.arange(8, dtype=np.float32))
    assert there.copy_to_host().tolist() == list(range(8))
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [(*(int(end, 16) for end in words[0].split("-")), words[1]) for words in maps]
    place = host.address(there)
    (rights,) = [rights for begin, end, rights in spans if begin <= place < end]
    assert rights == "---p"


@pytest.mark.slow
def test_kernels_that_were_compiled_without_a_driver_are_loaded(tmp_path, monkeypatch):
    """By `kvkit warm` for the compute capability that the driver's devices have; sizes that no other has."""
    monkeypatch.setenv("KVKIT_CACHE_DIR", str(tmp_path))
    how = ["--formats", "bfloat16", "--data", "bfloat16", "--head-dim", "48", "--queries", "3"]
    command = [sys.executable, "-P", "-m", "kvkit_cli", "warm", "--backend", "cuda", "--capability", "9.0"]
    done = subprocess.run([*command, *how], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "0 loaded, 5 compiled" in done.stdout
    assert "for compute capability 9.0" in done.stdout
    before = dict(compiled.counts)
    with stand_in.idle():
        warm.warm("bfloat16", data="bfloat16", dim=48, queries=3)
    assert compiled.counts["compiled"] == before["compiled"]
    assert compiled.counts["loaded"] > before["loaded"]


def test_numpy_arrays_are_copied_there_and_back(rng):
    scene = scenes.static(rng, HALF)
    expected = scene.oracle()
    assert_all_same(scene.results(), expected)


def test_arrays_of_the_device_stay_there(rng):
    scene = scenes.static(rng, HALF)
    expected = scene.oracle()
    names = "current_key", "current_value", "cache"
    given = {name: cuda.to_device(scene[name]) for name in names}
    stand_in.counts()
    key, value = scene.but(**given).run()
    assert stand_in.counts().get("waits", 0) == 0
    assert_all_same((key.copy_to_host(), value.copy_to_host(), given["cache"].copy_to_host(), None), expected)


def test_angles_are_numbers_of_floats(rng):
    query, key = (rng.standard_normal((1, 3, 1, 8)).astype(np.float32) for _ in range(2))
    expected = kvkit.rotary_position_embedding(query, key, 5, theta=123.0, interleaved=True)
    found = kvkit_cuda.rotary_position_embedding(query, key, 5, theta=123.0, interleaved=True)
    assert all((a == b).all() for a, b in zip(found, expected, strict=True))


# A plan of a step: decoding for sequences whose contexts differ, one of them in two parts

HEADS, KV_HEADS, DIM, PAGE = 2, 1, 32, 16
SIZES = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "num_layer": 2}
LENGTHS = 258, 3


class Model:
    """Decodes a token a step in two layers, on the device and on the CPU."""

    LAUNCHES, CALLS, MICROSECONDS = 6, 2, 40  # of a step; of one call of a plan that repeats

    def __init__(self, rng, lengths=LENGTHS, columns=24):
        self.rng, self.lengths = rng, np.array(lengths)
        self.table = np.arange(len(lengths) * columns).reshape(len(lengths), columns) * PAGE
        shape = self.table.size * PAGE, 2, 2, KV_HEADS, DIM
        self.cache = (rng.standard_normal(shape) * 0.5).astype(np.float16)
        self.there = cuda.to_device(self.cache)
        self.new, self.out = [], []
        for heads in (HEADS, KV_HEADS, KV_HEADS):
            self.new.append(cuda.to_device(np.zeros((len(lengths), heads, DIM), np.float16)))
        for _ in range(2):
            self.out.append(cuda.to_device(np.zeros((len(lengths), HEADS, DIM), np.float16)))

    def step(self):
        """Return the index tensors of a plan."""
        counts = np.arange(len(self.lengths) + 1)
        kvstarts = np.r_[0, np.cumsum(self.lengths + 1)]
        return {
            "seqstarts": counts, "kvstarts": kvstarts, "cachestarts": self.table, "start_pos": self.lengths,
            "cache_mode": 1, "page_size": PAGE,
        }  # fmt: skip

    def plan(self, **more):
        return kvkit_cuda.dynamic_batching.plan(**self.step(), **more)

    def run(self, plan, stream=None):
        """Run both layers on the device."""
        for layer, out in enumerate(self.out):
            plan.multi_head_cache_attention(
                *self.new, self.there, **SIZES, layer_idx=layer, out=out, stream=stream
            )

    def check(self):
        """Check that the device has the CPU's results; then go to the next token."""
        new = [array.copy_to_host() for array in self.new]
        plan = kvkit.dynamic_batching.plan(**self.step())
        for layer, out in enumerate(self.out):
            expected = plan.multi_head_cache_attention(*new, self.cache, **SIZES, layer_idx=layer)
            found = out.copy_to_host().astype(np.float32)
            assert np.abs(found - expected.astype(np.float32)).max() < 2e-3
        assert (self.there.copy_to_host() == self.cache).all()
        self.lengths = self.lengths + 1

    def tokens(self):
        """New tokens."""
        for array in self.new:
            array.copy_to_device(self.rng.standard_normal(array.shape).astype(np.float16))


class PagedModel(Model):
    """Decodes a token a step in a layer over pages of int8, on the device and on the CPU."""

    LAUNCHES, CALLS, MICROSECONDS = 5, 3, 20  # tokens, twice attention and merge
    HEADS, KV_HEADS = 4, 2
    LENGTHS = 261, 4, 1  # with the new tokens; the first one is split
    HOW: ClassVar[dict] = {"layout": "b kv n h c", "key_scale": 0.02, "value_scale": 0.01}
    ROPE = kvkit.Rope(32, scaling={"rope_type": "linear", "factor": 2})

    def __init__(self, rng):
        self.rng, self.lengths = rng, np.array(self.LENGTHS)
        self.table = rng.permutation(3 * 34).reshape(3, 34)
        self.pool = rng.integers(-127, 128, (self.table.size, 2, PAGE, self.KV_HEADS, DIM), np.int8)
        self.there, self.new = cuda.to_device(self.pool), []
        for heads in (self.HEADS, self.KV_HEADS, self.KV_HEADS):
            self.new.append(cuda.to_device(np.zeros((3, heads, DIM), np.float16)))
        self.out = cuda.to_device(np.zeros((3, self.HEADS, DIM), np.float16))

    def plan(self, **more):
        return kvkit_cuda.paged_plan(self.table, self.lengths, page_size=PAGE, **more)

    def run(self, plan, stream=None):
        """Append and attend on the device; the pool is given once and twice."""
        query, key, value = self.new
        plan.paged_append(key, value, self.there, None, **self.HOW, rope=self.ROPE, stream=stream)
        for both in (self.there, None):
            plan.paged_attention(query, self.there, both, **self.HOW, out=self.out, stream=stream)

    def check(self):
        query, key, value = (array.copy_to_host() for array in self.new)
        plan = kvkit.paged_plan(self.table, self.lengths, page_size=PAGE)
        plan.paged_append(key, value, self.pool, None, **self.HOW, rope=self.ROPE)
        expected = plan.paged_attention(query, self.pool, None, **self.HOW).astype(np.float32)
        assert np.abs(self.out.copy_to_host().astype(np.float32) - expected).max() < 2e-3
        assert (self.there.copy_to_host() == self.pool).all()
        self.lengths = self.lengths + 1


@pytest.fixture
def model(rng, request):
    model = getattr(request, "param", Model)(rng)
    model.tokens()
    return model


any_model = pytest.mark.parametrize("model", [Model, PagedModel], indirect=True)


@any_model
def test_a_planned_call_is_launches_and_nothing_else(model):
    plan = model.plan()
    model.run(plan)  # the first call of each form, which copies tables
    model.check()
    model.tokens()
    stand_in.counts()
    plan = model.plan(into=plan)
    assert stand_in.counts().keys() == {"copies"}
    model.run(plan)
    assert stand_in.counts() == {"launches": model.LAUNCHES}
    model.check()


@any_model
def test_a_captured_graph_computes_the_next_token(model):
    stream = cuda.stream()
    plan = model.plan(stream=stream)
    model.run(plan, stream)
    with stand_in.captured(stream) as graph:
        model.run(plan, stream)
    (replay,) = graph
    for grown in (0, 260):  # then another sequence is split
        model.lengths[1] += grown
        model.tokens()
        plan = model.plan(into=plan, stream=stream)
        replay(stream)
        stream.synchronize()
        model.check()


@pytest.mark.parametrize("model", [PagedModel], indirect=True)
def test_a_smaller_pool_is_refused_in_a_call_that_repeats(model):
    plan = model.plan()
    model.run(plan)
    model.table[0, 20] = 3 * 34
    model.lengths[0] = 21 * PAGE
    plan = model.plan(into=plan)
    with pytest.raises(kvkit.KvkitError, match="at least the 103 pages that the plan names"):
        model.run(plan)


def scratch_of(plan):
    """Return the addresses of the workspace of a plan's prepared calls."""
    repeats = plan.step.calls.values()
    return {int(numbers[at]) for repeat in repeats for numbers, at in repeat.scratch_words}


def test_who_replays_a_graph_is_named(model):
    """Nothing else would let the replay come after the next step's tables."""
    stream = cuda.stream()
    plan = model.plan()
    model.run(plan, stream)
    with stand_in.captured(stream):
        model.run(plan, stream)
    with pytest.raises(kvkit.KvkitError, match="stream: expected the one that replays the plan's graph"):
        model.plan(into=plan)
    with (
        cuda.gpus[1],
        pytest.raises(kvkit.KvkitError, match="into: expected a plan whose graph is of device 1"),
    ):
        model.plan(into=plan, stream=cuda.stream())


def test_graphs_of_two_streams_share_no_scratch(rng):
    """Neither with each other nor with calls that are not captured."""
    found = []
    for _ in range(2):
        model, stream = Model(rng), cuda.stream()
        plan = model.plan()
        model.run(plan)
        before = scratch_of(plan)
        with stand_in.captured(stream):
            model.run(plan, stream)
        captured = scratch_of(plan)
        model.run(plan)
        found += [captured, scratch_of(plan)]
        assert captured <= before
    assert len(set.union(*found)) == 3  # of either graph, and the last one of other calls
    assert found[0] != found[2]


def test_the_default_streams_of_threads_are_streams_of_their_own(model):
    """They share no scratch, and each comes after the tables."""
    plan, places, outs = model.plan(), [], []
    model.run(plan, new_stream())
    both, one = threading.Barrier(2), threading.Lock()

    def run():
        with one:  # the plan's prepared calls know the scratch of the latest thread
            model.run(plan, host.PER_THREAD_DEFAULT)
            places.append(scratch_of(plan))
        outs.append([out.copy_to_host(stream=cuda.per_thread_default_stream()) for out in model.out])
        both.wait(600)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = places
    assert len(first) == len(second) == 1
    assert first != second
    expected = [out.copy_to_host() for out in model.out]
    model.check()
    for found in outs:
        assert np.array_equal(found, expected)


def test_threads_ask_the_driver_at_once(model):
    """One launches kernels while others allocate, copy there and back, and give memory back."""
    plan, wrong = model.plan(), []

    def launch():
        for _ in range(3):
            model.run(plan, host.PER_THREAD_DEFAULT)
            wrong.append(not all(out.copy_to_host().any() for out in model.out))

    def copy(size):
        given, stream = np.arange(size, dtype=np.float32), cuda.per_thread_default_stream()
        for _ in range(100):
            there = cuda.to_device(given, stream=stream)
            wrong.append(not np.array_equal(there.copy_to_host(stream=stream), given))

    threads = [threading.Thread(target=launch)]
    threads += [threading.Thread(target=copy, args=(size,)) for size in (1000, 5000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 203
    assert not any(wrong)
    model.check()


def test_a_capture_that_nothing_was_prepared_for(model):
    """It is refused, and spoils nothing."""
    plan, stream = model.plan(), cuda.stream()
    with (
        pytest.raises(kvkit.KvkitError, match="stream: expected a call of this form"),
        stand_in.captured(stream),
    ):
        model.run(plan, stream)
    model.run(plan)
    model.check()


@pytest.mark.parametrize("there", [(True, False), (True, True), (False, True)], ids=str)
def test_a_page_table_takes_the_place_of_one_on_the_device(model, there):
    """Whether it lies there itself or not."""
    places = iter(there)

    def step():
        given = model.step()
        return given | {"cachestarts": cuda.to_device(model.table) if next(places) else model.table}

    plan = kvkit_cuda.dynamic_batching.plan(**step())
    model.run(plan)
    model.check()
    model.tokens()
    model.table[:, 0] = model.table[::-1, 0]
    plan = kvkit_cuda.dynamic_batching.plan(**step(), into=plan)
    model.run(plan)
    model.check()


def test_tables_that_did_not_arrive_are_copied_again(model, monkeypatch):
    plan, upload = model.plan(), host.upload
    monkeypatch.setattr(host, "upload", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.run(plan)
    monkeypatch.setattr(host, "upload", upload)
    model.run(plan)
    model.check()


def test_threads_share_a_plan_from_its_first_call(model, monkeypatch):
    """One asks for tables while they are copied for another."""
    plan, upload = model.plan(), host.upload
    stream, found = cuda.stream(), []
    other = threading.Thread(target=lambda: found.extend(plan.step.tables.of(("seqstarts",), stream)))

    def slowly(*given):
        monkeypatch.setattr(host, "upload", upload)
        other.start()
        other.join(0.5)
        return upload(*given)

    monkeypatch.setattr(host, "upload", slowly)
    model.run(plan)
    other.join()
    assert found == plan.step.tables.of(("seqstarts",), stream)
    model.check()


def test_a_step_is_followed_from_another_device(rng):
    """The tables of each device are filled on a stream of that."""
    model = Model(rng)
    with cuda.gpus[1]:
        model.there = cuda.to_device(model.cache)
        model.new = [cuda.to_device(array.copy_to_host()) for array in model.new]
        model.out = [cuda.to_device(array.copy_to_host()) for array in model.out]
    plan = None
    for _ in range(3):
        with cuda.gpus[1]:
            model.tokens()
        plan = model.plan(into=plan)
        model.run(plan)
        with cuda.gpus[1]:
            model.check()


class Wrapped:
    """Stands for a stream of another library."""

    def __init__(self):
        self.stream = cuda.stream()

    def __cuda_stream__(self):
        return 0, int(self.stream.handle)


@pytest.mark.parametrize("kind", [cuda.stream, Wrapped])
def test_streams_live_until_their_tables_are_filled_again(kind, model):
    """An event is recorded on each of them then."""
    plan, stream = model.plan(), kind()
    gone = weakref.ref(stream)
    model.run(plan)
    model.run(plan, stream)
    del stream
    gc.collect()
    assert gone() is not None
    plan = model.plan(into=plan)
    gc.collect()
    assert gone() is None


@pytest.mark.perf
@any_model
def test_a_planned_call_takes_few_microseconds_of_the_host(model, microsecond):
    """CPU time of a process that waits for nothing: of the best of some tries, for others run beside it."""
    times, until, most = [], time.perf_counter() + 10, model.MICROSECONDS * microsecond
    with stand_in.idle():
        plan = model.plan()
        model.run(plan)
        while not times or (min(times) > most and time.perf_counter() < until):
            begin = time.process_time()
            for _ in range(50):
                model.run(plan)
            times.append((time.process_time() - begin) / (50 * model.CALLS))
    assert min(times) <= most


# What comes after what

APART = 1  # of the default stream: what it does waits for nobody


def new_stream(flags=APART):
    handle = ctypes.c_void_p()
    cuda.current_context()
    assert stand_in.driver.cuStreamCreate(ctypes.byref(handle), flags) == 0
    return cuda.external_stream(handle.value)


class Given:
    """Stands for an array of another library that names its stream, and its type as protocols can."""

    def __init__(self, array, stream=None, dtype=None):
        self.array, self.dtype = array, np.dtype(dtype or array.dtype)
        named = {"stream": stream and int(stream.handle), "typestr": self.dtype.str}
        self.__cuda_array_interface__ = array.__cuda_array_interface__ | named


class Tensor(Capsule):
    """Stands for a tensor of torch, which is passed on after the work of its current stream."""

    __module__ = "torch"
    current: ClassVar[dict] = {}  # stream, by device
    is_cuda, requires_grad = True, False

    def __init__(self, array, dtype=None):
        dtype = np.dtype(dtype or array.dtype)
        super().__init__(arrays.addressed(host.address(array), array.shape, None, dtype))
        self.there, self.shape, self.dtype = array, array.shape, f"torch.{dtype}"
        self.device = SimpleNamespace(index=host.device_of(host.address(array)))
        self.tensor.device[1] = self.device.index

    def __dlpack_device__(self):
        return self.CUDA, self.device.index

    def __dlpack__(self, stream=None, **versions):
        host.wait_for(int(self.current[self.device.index].handle), host.stream(stream))
        return super().__dlpack__()

    def __bool__(self):
        raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")

    def data_ptr(self):
        return host.address(self.there)

    def stride(self):
        return ()

    def view(self, dtype):
        return Tensor(self.there, dtype)

    def new_empty(self, shape, dtype):
        return Tensor(cuda.device_array(shape, dtype))


class Derived(Tensor):
    """Stands for a tensor of a package that derives its class from torch's."""

    __module__ = "another.tensors"

    @property
    def __cuda_array_interface__(self):
        return self.there.__cuda_array_interface__


@pytest.fixture
def torch(monkeypatch):
    """Return a module with as much of torch as kvkit_cuda uses."""

    def current_stream(device):
        return SimpleNamespace(cuda_stream=int(Tensor.current[device.index].handle))

    own = SimpleNamespace(current_stream=current_stream)
    types = {name: getattr(np, name) for name in ("float16", "int8", "int16")}
    found = SimpleNamespace(__name__="torch", __version__="2.0", cuda=own, **types)
    monkeypatch.setitem(sys.modules, "torch", found)
    streams = {}
    for i in range(stand_in.DEVICES):
        with cuda.gpus[i]:
            streams[i] = new_stream()
    monkeypatch.setattr(Tensor, "current", streams)
    return found


def late(array, stream):
    """Return a copy on the device that is complete only when the stream has come so far."""
    there = cuda.device_array(array.shape, array.dtype)
    host.fill(there, [array.view(np.uint8)], stream)
    return there


NEW = "current_key", "current_value"


def test_an_array_that_names_its_stream(rng):
    """The call comes after that stream; the host does not wait for it."""
    scene, producer = scenes.static(rng, HALF), new_stream()
    expected = scene.oracle()
    for order in (1, 0):
        new = {name: Given(late(scene[name], producer), producer if order else None) for name in NEW}
        cache = cuda.to_device(scene["cache"])
        stand_in.counts()
        own = new_stream()
        key, _ = scene.but(**new, cache=cache).run(stream=own)
        assert "waits" not in stand_in.counts()
        found = key.copy_to_host(stream=own)
        assert (found == expected[0]).all() == bool(order)  # without an order it comes before


@pytest.mark.parametrize("kind", [Tensor, Derived])
@pytest.mark.parametrize("own", [False, True])
def test_tensors_of_torch_are_in_the_order_of_its_current_stream(own, kind, torch, rng):
    scene = scenes.static(rng, HALF)
    expected, current = scene.oracle(), Tensor.current[0]
    new = {name: kind(late(scene[name], current)) for name in NEW}
    cache = kind(late(scene["cache"], current))
    stand_in.counts()
    stream = new_stream() if own else None
    key, value = scene.but(**new, cache=cache).run(stream=stream)
    assert "waits" not in stand_in.counts()
    found = [each.there.copy_to_host(stream=stream or current) for each in (key, value, cache)]
    assert_all_same((*found, None), expected)


def test_calls_of_a_plan_that_repeat_are_in_order_too(torch, rng):
    model = Model(rng, (5,))
    model.tokens()
    cuda.synchronize()
    current, out = Tensor.current[0], [Tensor(array) for array in model.out]
    model.out, model.new = out, [Tensor(array) for array in model.new]
    model.there = Tensor(model.there)
    plan = model.plan(stream=current)
    model.run(plan)
    current.synchronize()
    before = [array.there.copy_to_host() for array in out]
    for stream in (None, new_stream()):
        for array in out:
            array.there.copy_to_device(np.zeros(array.shape, np.float16))
        new = [array.there.copy_to_host() for array in model.new]
        model.new = [Tensor(late(array, current)) for array in new]
        stand_in.counts()
        model.run(plan, stream)
        assert stand_in.counts().keys() <= {"launches", "events", "allocations" if stream else ""}  # scratch
        found = [array.there.copy_to_host(stream=stream or current) for array in out]
        assert all((a == b).all() for a, b in zip(found, before, strict=True))


def test_tensors_that_require_a_gradient_are_refused(torch, rng):
    scene = scenes.static(rng, HALF)
    key = Tensor(cuda.to_device(scene["current_key"]))
    key.requires_grad = True
    with pytest.raises(
        kvkit.KvkitError, match=r"^current_key: expected a tensor without a gradient \(tensor.det"
    ):
        scene.but(current_key=key).run()


# Floats of 8 bits, which protocols have no name for, or one that nobody reads


def of_bytes(kind, array):
    """Return the array on the device with its type, late on the current stream if it is torch's."""
    words = array.view(f"i{array.itemsize}")
    if kind is Tensor:
        return Tensor(late(words, Tensor.current[0]), array.dtype)
    return Given(cuda.to_device(words), dtype=array.dtype)


def back(array):
    if isinstance(array, Tensor):
        return array.there.copy_to_host(stream=Tensor.current[0])
    return getattr(array, "array", array).copy_to_host()


# Each library with one format, or one of them, with others in the slow suite.
EIGHTS = [(Tensor, "e4m3"), (Given, "e5m2"), (Tensor, "e5m2"), (Given, "e4m3")]


@pytest.mark.parametrize(("kind", "name"), first_quick(EIGHTS))
def test_pools_of_floats_of_8_bits(kind, name, torch, rng):
    new = [rng.standard_normal((5, 1, 32)).astype(np.float16) for _ in range(2)]
    pools = [np.zeros((3, 4, 1, 32), BY_NAME[name].dtype) for _ in range(2)]
    query = rng.standard_normal((1, 2, 32)).astype(np.float16)
    slots, how = [8, 9, 10, 11, 4], {"layout": "b n h c"}
    there = [of_bytes(kind, pool) for pool in pools]
    there_new = [of_bytes(kind, array) for array in new]
    kvkit.paged_append(*new, *pools, slots, **how)
    expected = kvkit.paged_attention(query, *pools, [[2, 1]], [5], **how)
    assert kvkit_cuda.paged_append(*there_new, *there, slots, **how) == tuple(there)
    assert all(back(one).tobytes() == other.tobytes() for one, other in zip(there, pools, strict=True))
    got = kvkit_cuda.paged_attention(of_bytes(kind, query), *there, [[2, 1]], [5], **how)
    assert np.abs(back(got).astype(np.float32) - expected.astype(np.float32)).max() < 2e-3


@pytest.mark.parametrize(("kind", "name"), first_quick(EIGHTS, 2))
def test_caches_of_floats_of_8_bits(kind, name, torch, rng):
    new = [rng.standard_normal((1, 2, 1, 16)).astype(np.float16) for _ in range(2)]
    cache = np.zeros((1, 1, 2, 4, 1, 16), BY_NAME[name].dtype)
    there, there_new = of_bytes(kind, cache), [of_bytes(kind, array) for array in new]
    expected = kvkit.key_value_cache(*new, 0, cache, quant_format=name)
    got = kvkit_cuda.key_value_cache(*there_new, 0, there, quant_format=name)
    for one, other in zip((*got, there), (*expected, cache), strict=True):
        assert back(one).tobytes() == other.tobytes()


def test_bytes_that_are_no_floats_are_refused(torch):
    """As are floats of 8 bits that nothing but DLPack passes on."""
    query = cuda.to_device(np.zeros((1, 2, 32), np.float16))
    pool = cuda.to_device(np.zeros((3, 4, 1, 32), np.uint8))
    capsule = Capsule(arrays.addressed(host.address(pool), pool.shape, None, BY_NAME["e4m3"].dtype))
    remedy = r"torch.as_tensor\(array\).view\(torch.float8_e4m3fn\) of another$"
    for given, text in ((Given(pool), rf"uint8: .* {remedy}"), (capsule, "Capsule .Unsupported dtype")):
        with pytest.raises(kvkit.KvkitError, match=rf"^key_cache: expected .*, got {text}"):
            kvkit_cuda.paged_attention(query, given, given, [[2, 1]], [5], layout="b n h c")


# Devices


def on(device, array):
    with cuda.gpus[device]:
        return cuda.to_device(array)


@pytest.mark.parametrize("kind", ["numba", "interface", "torch"])
def test_a_call_runs_where_its_arrays_lie(kind, torch, rng):
    scene, make = scenes.static(rng, HALF), {"numba": lambda x: x, "interface": Given, "torch": Tensor}[kind]
    expected = scene.oracle()
    given = {name: make(on(1, scene[name])) for name in (*NEW, "cache")}
    key, value = scene.but(**given).run()
    assert host.current() == 0
    key, value, cache = (getattr(each, "there", each) for each in (key, value, given["cache"]))
    cache = getattr(cache, "array", cache)
    assert host.device_of(host.address(key)) == 1
    with cuda.gpus[1]:
        cuda.synchronize()
        assert_all_same((key.copy_to_host(), value.copy_to_host(), cache.copy_to_host(), None), expected)


def test_arrays_of_two_devices_are_refused(rng):
    scene = scenes.static(rng, HALF)
    given = {name: on(name == "cache", scene[name]) for name in (*NEW, "cache")}
    words = "^cache: expected an array of device 0, where current_key lies, got one of device 1$"
    with pytest.raises(kvkit.KvkitError, match=words):
        scene.but(**given).run()
    words = r"^current_value: expected an array in the memory of a CUDA device, got address 0x\w+ of none$"
    with pytest.raises(kvkit.KvkitError, match=words):
        scene.but(current_value=Array(scene["current_value"])).run()


def test_a_plan_serves_the_device_of_a_calls_arrays(rng):
    model = Model(rng, (5,))
    model.tokens()
    plan = model.plan()
    model.run(plan)
    first = [array.copy_to_host() for array in model.out]
    names = [array.copy_to_host() for array in (*model.new, model.there, *model.out)]
    *model.new, model.there, one, other = (on(1, array) for array in names)
    model.out = [one, other]
    for _ in range(2):
        model.run(plan)
        assert host.current() == 0
        with cuda.gpus[1]:
            assert all((a.copy_to_host() == b).all() for a, b in zip(model.out, first, strict=True))


def test_a_kernel_is_chosen_for_all_steps_that_may_follow(model, monkeypatch):
    """By the rows of the cache and of the page table: those of decode hold row numbers in 32 bits."""
    chosen: list = []
    monkeypatch.setattr(caches, "check_apart", lambda *_: None)  # a cache of 128 GiB is all memory
    for kernel in attention.KERNELS:
        monkeypatch.setattr(kernel, "prepare", lambda *_, name=kernel.__name__: chosen.append(name) or [])
    model.lengths = np.array((5, 3))
    for rows, page, name in ((2**30, PAGE, "decode"), (2**31, PAGE, "plain"), (2**30, 2**30, "plain")):
        shape = rows, *model.there.shape[1:]
        cache = Array(arrays.addressed(host.address(model.there), shape, None, model.there.dtype))
        step = model.step() | {"page_size": page, "cachestarts": np.array([[0, 64], [32, 64]])}
        plan = kvkit_cuda.dynamic_batching.plan(**step)
        with stand_in.idle():
            plan.multi_head_cache_attention(*model.new, cache, **SIZES, layer_idx=0)
        assert chosen.pop() == f"kvkit_cuda.attention.{name}", (rows, page)


# Shared memory


def test_more_shared_memory_than_48_kib_is_asked_for(monkeypatch):
    """As the driver has it: of each kernel on each device, before a launch that takes more."""
    size = device.SHARED_MEMORY
    place, write, read = (
        memory.dynamic(size),
        memory.store(8, 8, memory.SHARED),
        memory.load(8, 8, space=memory.SHARED),
    )

    def last(out):
        at = place() + size - 8
        write(at, np.uint64(2026), np.uint64(0))
        out[0] = np.int64(read(at)[0])

    kernel = device.kernel(last, types.void(types.int64[::1]))
    for which in range(2):
        with cuda.gpus[which]:
            out = cuda.to_device(np.zeros(1, np.int64))
            launch = host.Launch(kernel, (1, 1), 1, host.stream(None), (out,), shared=size)
            with monkeypatch.context() as patched:
                patched.setattr(host, "allow_shared", lambda *_: None)
                with pytest.raises(kvkit_cuda.DeviceError, match="expected the driver to take a launch"):
                    launch()
            for run in (launch, lambda launch=launch: launch.prepared().start(launch.stream.handle)):
                run()
                assert out.copy_to_host() == [2026]
                out.copy_to_device(np.zeros(1, np.int64))


SHARED = """
import ctypes
ctypes.CDLL({!r}, mode=ctypes.RTLD_GLOBAL)
import numpy as np
from numba import cuda, types
from kvkit_cuda.device_runtime import device, host
kernel = device.kernel(lambda out: None, types.void(types.int64[::1]))
assert cuda.get_current_device().MAX_SHARED_MEMORY_PER_BLOCK_OPTIN == device.shared_memory()
out, most = cuda.to_device(np.zeros(1, np.int64)), device.shared_memory()
host.Launch(kernel, (1, 1), 1, host.stream(None), (out,), shared=most)()
try:
    host.Launch(kernel, (1, 1), 1, host.stream(None), (out,), shared=most + 1)()
except host.DeviceError:
    print(most)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "most"), [("80", 163), ("86", 99), ("90", 227), ("100", 227), ("120", 99)]
)
def test_a_block_has_the_shared_memory_of_its_device(capability, most):
    """Kernels are chosen for what a driver allows on each device, and no more is taken."""
    environment = os.environ | {"STAND_IN_CAPABILITY": capability}
    script = SHARED.format(stand_in.driver._name)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == [str(most * 1024)], done.stderr


# What is missing


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            {"DRIVER": "12040"},
            "a driver for CUDA 13, got one for CUDA 12.4: update it to 580 or later, or pip",
        ),
        ({"DEVICES": "0"}, "an NVIDIA GPU, got a driver that shows none: see what nvidia-smi says"),
        ({"CAPABILITY": "75"}, "compute capability 8.0 or later, got Stand-in 0, of 7.5"),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else "",
)
def test_what_a_machine_lacks_is_said(setting, words):
    environment = os.environ | {f"STAND_IN_{name}": value for name, value in setting.items()}
    script = f"""
import ctypes
import gc
import os
import subprocess
ctypes.CDLL({stand_in.driver._name!r}, mode=ctypes.RTLD_GLOBAL)
import kvkit_cuda
try:
    kvkit_cuda.alibi_slope(num_heads=4)
except kvkit_cuda.DeviceError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout.startswith(f"kvkit_cuda: expected {words}"), done.stderr


# Kernels on disk


def test_kernels_are_kept(tmp_path, monkeypatch):
    """Under all that they come from; what does not fit is compiled again."""
    monkeypatch.setenv("KVKIT_CACHE_DIR", str(tmp_path))

    def made(key=None):
        before = dict(compiled.counts)
        kernel = device.kernel(index.write_positions, index.SIGNATURE, key)
        (text,) = (each.library.get_asm_str() for each in kernel.overloads.values())
        (what,) = (name for name in before if compiled.counts[name] > before[name])
        return what, text

    what, text = made()
    assert what == "compiled"
    assert made() == ("loaded", text)
    assert made("another")[0] == "compiled"
    (one, other) = sorted(tmp_path.glob("*/*.bin"), key=lambda path: path.stat().st_mtime_ns)
    one.write_bytes(other.read_bytes())  # under another's name
    assert made()[0] == "compiled"
    disk_cache.save(one, b"no pickle")
    assert made()[0] == "compiled"
    monkeypatch.setattr(device, "capability", lambda: (8, 0))
    assert made()[0] == "compiled"


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["float16", "int4"])
def test_kernels_are_compiled_ahead(cache):
    """Whatever a model's calls need afterwards is there."""
    with stand_in.idle():
        warm.warm(cache, dim=32, queries=2)
        assert warm.warm(cache, dim=32, queries=2) == compiled.counts
        before = compiled.counts["compiled"]
        warm.warm(cache, dim=32, queries=1)
    assert compiled.counts["compiled"] == before


@pytest.mark.slow
def test_kernels_are_compiled_ahead_by_the_command_line(tmp_path):
    """In a process of its own, which says how many and where; the next one loads them."""
    library = Path(stand_in.driver._name)
    environment = os.environ | {"LD_LIBRARY_PATH": str(library.parent), "KVKIT_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "kvkit_cli", "warm", "--backend", "cuda", "--formats", "float16"]

    def said(*more):
        done = subprocess.run([*command, *more], env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        kept = [path.parent for path in tmp_path.rglob("kvkit_cuda*.bin")]
        return done.stdout, set(kept), len(kept)

    how = "--head-dim", "32", "--queries", "2"
    out, (folder,), count = said(*how)
    expected = rf"1/1 kernels for a cache of float16: 0 loaded, {count} compiled, \d+\.\d s"
    assert re.fullmatch(rf"{expected}\nfor Stand-in 0; compile cache {folder}: {count} files, .*\n", out)
    out, *_ = said(*how)
    assert f": {count} loaded, 0 compiled, " in out
    assert said(*how, "-q") == ("", {folder}, count)
