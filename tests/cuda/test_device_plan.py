"""`kvkit_cuda.paged_plan` has the results of `kvkit.paged_plan`, for layers in step after step."""

import numpy as np
import pytest
from attention_scenes import assert_near
from device_arrays import Array, contents
from pool_scenes import drawn

import kvkit
import kvkit_cuda
from kvkit.checks.contexts import Contexts
from kvkit_cuda.calls.tables import DeviceTables

PAGE, STARTS = 4, [0, 2, 2, 5]
TABLE = np.array([[5, 0, -1], [1, -7, -1], [3, 2, 4]])
LISTS = np.array([0, 2, 3, 6]), np.array([5, 0, 1, 3, 2, 4])
LONGER = np.array([0, 4, 5, 8]), np.array([5, 0, 9, 9, 1, 3, 2, 4])


@pytest.mark.parametrize(
    ("engine", "name", "tables"),
    [
        ("flash-attn", "float16", (TABLE, TABLE)),
        ("vLLM LBHNC", "e4m3", (LISTS, LONGER)),
        ("shared pages", "int8", (TABLE, TABLE)),
    ],
)
def test_steps_of_two_layers(engine, name, tables, rng):
    """An earlier plan is filled with later steps; each layer has a scale of its own."""
    scales = {"float16": [None, None], "e4m3": [0.5, 2.0], "int8": [0.02, 0.1]}[name]
    layers, plan = [drawn(rng, engine, name) for _ in range(2)], None
    for lengths, table in zip(([6, 0, 9], [7, 1, 10]), tables, strict=True):
        plan = kvkit_cuda.paged_plan(table, lengths, STARTS, page_size=PAGE, into=plan)
        expected_plan = kvkit.paged_plan(table, lengths, STARTS, page_size=PAGE)
        for pools, scale in zip(layers, scales, strict=True):
            how = {"layout": pools.layout, "key_scale": scale, "value_scale": scale}
            new = [rng.standard_normal((5, 2, 16)).astype(np.float16) for _ in range(2)]
            query = rng.standard_normal((5, 4, 16)).astype(np.float16)
            before = [memory.copy() for memory in pools.memory]
            expected_plan.paged_append(*new, *pools.given, **how)
            expected = expected_plan.paged_attention(query, *pools.given, **how)
            right = [memory.tobytes() for memory in pools.memory]
            for memory, old in zip(pools.memory, before, strict=True):
                memory[...] = old
            plan.paged_append(*new, *pools.given, **how)
            assert [memory.tobytes() for memory in pools.memory] == right
            found = plan.paged_attention(query, *pools.given, **how)
            assert_near(contents(found), expected, 2e-3 * max(1, abs(expected).max()))


def test_lists_of_pages_stay_lists_on_the_device():
    """A long context beside short ones takes the memory of its own pages; a plan has room for later steps."""
    starts = np.array([0, 1, 1001, 1002])
    kvstarts = np.array([0, 1, 4001, 4002])
    contexts = Contexts(np.arange(1002), starts, np.array([1, 4000, 1]), np.arange(4), 4, 1002, kvstarts)
    steps = contexts.steps((2, 2), 0)
    words = DeviceTables(steps, lasting=False).contents("table")
    np.testing.assert_array_equal(words, np.r_[3, 4, 1004, 2 * np.arange(1002)])
    lasting = DeviceTables(steps, lasting=True)
    np.testing.assert_array_equal(lasting.contents("table")[:1005], words)
    assert len(lasting.contents("table")) == 3 + lasting.room
    assert 2 * 1002 <= lasting.room < 2 * 1002 + 8


def test_plans_that_do_not_fit(rng):
    pools, query = drawn(rng, "flash-attn", "float16"), np.zeros((5, 4, 16), np.float16)
    plan = kvkit_cuda.paged_plan(TABLE, [6, 0, 9], STARTS, page_size=PAGE)
    plan.paged_attention(query, *pools.given)  # its tables have room for 3 pages a sequence
    for call, text in (
        (
            lambda: plan.paged_attention(query[1:], *pools.given),
            "query: expected the 5 tokens of the plan, got 4",
        ),
        (
            lambda: plan.paged_attention(query, *(p[:5] for p in pools.given)),
            "key_cache: expected at least the 6",
        ),
        (
            lambda: plan.paged_attention(query, *(p[:, :2] for p in pools.given)),
            "pages of 4 tokens, as the plan",
        ),
        (lambda: kvkit_cuda.paged_plan(TABLE, [6, 0, 9], page_size=PAGE, into=plan), "the same query_starts"),
        (
            lambda: kvkit_cuda.paged_plan(LONGER, [6, 0, 9], STARTS, page_size=PAGE, into=plan),
            "into: expected a plan with room for 4 pages a sequence, got 3",
        ),
        (
            lambda: kvkit_cuda.paged_plan([[0]], [1], page_size=PAGE, into=kvkit),
            "into: expected a plan of kvkit",
        ),
    ):
        with pytest.raises(kvkit.KvkitError, match=text):
            call()
    shared = kvkit_cuda.paged_plan([[1], [1]], [2, 2], page_size=PAGE)
    with pytest.raises(kvkit.KvkitError, match="a slot for one row only"):
        shared.paged_append(query[:2, :2], query[:2, :2], *map(Array, pools.given))
