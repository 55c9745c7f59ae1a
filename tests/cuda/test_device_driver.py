"""What kvkit_cuda asks of a driver, by way of numba-cuda: a stand-in counts it, orders it and refuses."""

import time
from pathlib import Path

import numpy as np
import pytest
import scenes
import stand_in
from numba import cuda
from scenes import Formats, assert_all_same

import kvkit
import kvkit_cuda
from kvkit_cuda.ground import host

HALF = Formats("fp16", "fp16")


def test_the_host_reads_no_memory_of_the_device_and_kernels_no_other():
    there = cuda.to_device(np.arange(8, dtype=np.float32))
    assert there.copy_to_host().tolist() == list(range(8))
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [(*(int(end, 16) for end in words[0].split("-")), words[1]) for words in maps]
    place = host.address(there)
    (rights,) = [rights for begin, end, rights in spans if begin <= place < end]
    assert rights == "---p"


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


# A plan of a step: decoding for sequences whose contexts differ, one of them in two parts

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 32, 16
SIZES = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "num_layer": 2}
LENGTHS = 300, 9


class Model:
    """Two layers of a model that decodes a token a step, beside the same on the CPU."""

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
        """The index tensors of a plan."""
        counts = np.arange(len(self.lengths) + 1)
        kvstarts = np.r_[0, np.cumsum(self.lengths + 1)]
        return {
            "seqstarts": counts, "kvstarts": kvstarts, "cachestarts": self.table, "start_pos": self.lengths,
            "cache_mode": 1, "page_size": PAGE,
        }  # fmt: skip

    def run(self, plan, stream=None):
        """Both layers on the device."""
        for layer, out in enumerate(self.out):
            plan.multi_head_cache_attention(
                *self.new, self.there, **SIZES, layer_idx=layer, out=out, stream=stream
            )

    def check(self):
        """What the device has now is what the CPU computes of the same; then comes the next token."""
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


@pytest.fixture
def model(rng):
    model = Model(rng)
    model.tokens()
    return model


def test_a_planned_call_is_launches_and_nothing_else(model):
    plan = kvkit_cuda.dynamic_batching.plan(**model.step())
    model.run(plan)  # the first call of each form, which copies tables
    model.check()
    model.tokens()
    stand_in.counts()
    for _ in range(2):
        plan = kvkit_cuda.dynamic_batching.plan(**model.step(), into=plan)
        asked = stand_in.counts()
        assert asked.keys() <= {"copies", "events"}, asked
        model.run(plan)
        assert stand_in.counts() == {"launches": 6}
        model.check()
        model.tokens()
        stand_in.counts()


def test_a_captured_graph_computes_the_next_token(model):
    stream = cuda.stream()
    plan = kvkit_cuda.dynamic_batching.plan(**model.step(), stream=stream)
    model.run(plan, stream)
    with stand_in.captured(stream) as graph:
        model.run(plan, stream)
    (replay,) = graph
    for grown in (1, 30):  # of which the second has another part
        model.tokens()
        plan = kvkit_cuda.dynamic_batching.plan(**model.step(), into=plan, stream=stream)
        replay(stream)
        stream.synchronize()
        model.check()
        model.lengths += grown


def test_a_planned_call_takes_40_microseconds_of_the_host(model):
    """CPU time of a process that waits for nothing; the least of some tries, for others run beside it."""
    plan, times = kvkit_cuda.dynamic_batching.plan(**model.step()), []
    model.run(plan)
    with stand_in.idle():
        model.run(plan)
        for _ in range(20):
            begin = time.process_time()
            for _ in range(50):
                model.run(plan)
            times.append((time.process_time() - begin) / 100)
    assert min(times) <= 40e-6, min(times)
