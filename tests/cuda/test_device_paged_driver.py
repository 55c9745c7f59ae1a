"""A plan for pages asks a driver for launches alone, also in graphs, and takes little time of the host."""

import time

import numpy as np
import pytest
import stand_in
from numba import cuda

import kvkit
import kvkit_cuda

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 32, 16
HOW = {"layout": "b kv n h c", "key_scale": 0.02, "value_scale": 0.01}
ROPE = kvkit.Rope(32, scaling={"rope_type": "linear", "factor": 2})
LENGTHS = 261, 4, 1  # with the new tokens; the first one is split


class Model:
    """Decodes a token a step in a layer over pages of int8, on the device and on the CPU."""

    def __init__(self, rng):
        self.rng, self.lengths = rng, np.array(LENGTHS)
        self.table = rng.permutation(3 * 34).reshape(3, 34)
        self.pool = rng.integers(-127, 128, (self.table.size, 2, PAGE, KV_HEADS, DIM), np.int8)
        self.there, self.new = cuda.to_device(self.pool), []
        for heads in (HEADS, KV_HEADS, KV_HEADS):
            self.new.append(cuda.to_device(np.zeros((3, heads, DIM), np.float16)))
        self.out = cuda.to_device(np.zeros((3, HEADS, DIM), np.float16))
        self.tokens()

    def tokens(self):
        """New tokens."""
        for array in self.new:
            array.copy_to_device(self.rng.standard_normal(array.shape).astype(np.float16))

    def plan(self, **more):
        return kvkit_cuda.paged_plan(self.table, self.lengths, page_size=PAGE, **more)

    def run(self, plan, stream=None):
        """Append and attend on the device; the pool is given once and twice."""
        query, key, value = self.new
        plan.paged_append(key, value, self.there, None, **HOW, rope=ROPE, stream=stream)
        for both in (self.there, None):
            plan.paged_attention(query, self.there, both, **HOW, out=self.out, stream=stream)

    def check(self):
        """Check that the device has the CPU's results; then go to the next token."""
        query, key, value = (array.copy_to_host() for array in self.new)
        plan = kvkit.paged_plan(self.table, self.lengths, page_size=PAGE)
        plan.paged_append(key, value, self.pool, None, **HOW, rope=ROPE)
        expected = plan.paged_attention(query, self.pool, None, **HOW).astype(np.float32)
        assert np.abs(self.out.copy_to_host().astype(np.float32) - expected).max() < 2e-3
        assert (self.there.copy_to_host() == self.pool).all()
        self.lengths = self.lengths + 1


@pytest.fixture
def model(rng):
    return Model(rng)


def test_calls_that_repeat_are_launches_and_nothing_else(model):
    plan = model.plan()
    model.run(plan)  # the first call of each form, which copies tables
    model.check()
    model.tokens()
    stand_in.counts()
    plan = model.plan(into=plan)
    assert stand_in.counts().keys() == {"copies"}
    model.run(plan)
    assert stand_in.counts() == {"launches": 5}  # tokens, twice attention and merge
    model.check()


def test_a_captured_graph_computes_the_next_token(model):
    """Also once other sequences are split than when it was captured."""
    stream = cuda.stream()
    plan = model.plan(stream=stream)
    model.run(plan, stream)
    with stand_in.captured(stream) as graph:
        model.run(plan, stream)
    (replay,) = graph
    for grown in (0, 260):
        model.lengths[1] += grown
        model.tokens()
        plan = model.plan(into=plan, stream=stream)
        replay(stream)
        stream.synchronize()
        model.check()


def test_a_smaller_pool_is_refused_in_a_call_that_repeats(model):
    plan = model.plan()
    model.run(plan)
    model.table[0, 20] = 3 * 34
    model.lengths[0] = 21 * PAGE
    plan = model.plan(into=plan)
    with pytest.raises(kvkit.KvkitError, match="at least the 103 pages that the plan names"):
        model.run(plan)


@pytest.mark.perf
def test_a_planned_call_takes_20_microseconds_of_the_host(model, microsecond):
    """CPU time of a process that waits for nothing: of the best of some tries, for others run beside it."""
    times, until = [], time.perf_counter() + 10
    with stand_in.idle():
        plan = model.plan()
        model.run(plan)
        while not times or (min(times) > 20 * microsecond and time.perf_counter() < until):
            begin = time.process_time()
            for _ in range(50):
                model.run(plan)
            times.append((time.process_time() - begin) / 150)
    print(f"{1e6 * min(times):.1f} µs")
    assert min(times) <= 20 * microsecond
