"""`kvkit_cuda.ascend.paged_attention`: against loops in float64."""

import numpy as np
import pytest
from ascend_attention_scenes import call_of, run
from attention_scenes import TOLERANCE, assert_near
from device_arrays import Array, contents

from kvkit.reference import ascend as oracle
from kvkit_cuda import ascend
from kvkit_cuda.calls import tables

TENSORS = ("query", "key_cache", "value_cache", "razor_offset", "sinks")
LENGTHS = (9, 0, 1, 40)
ALL = {"razor": True, "window": (20, 0), "softcap": 2.0, "sinks": True, "softmax_scale": 0.5}


def few_of(cases, quick):
    """All but one are slow."""
    return [case if case == quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def check(call, given, **more):
    """Check results against the loops, for arrays in any memory of the device."""
    output, lse = run(call, oracle.attend_blocks)
    results = run(call | given, ascend.paged_attention, return_lse=True, **more)
    assert_near(contents(results[0]), output, TOLERANCE[str(call["query"].dtype)])
    assert_near(contents(results[1]), lse, 2e-5, "lse")
    return results


def strided(rng, array, where):
    """Return the array in larger memory: elements apart, tokens backwards, or part of a fused projection."""
    if where == "apart":
        return np.repeat(array, 2, axis=-1)[..., ::2]
    if where == "backwards":
        return np.ascontiguousarray(array[::-1])[::-1]
    wide = np.concatenate([array, array], axis=1)
    return wide[:, array.shape[1] :]


@pytest.mark.parametrize("apart", [False, True], ids=["plain", "per_head"])
@pytest.mark.parametrize("where", few_of(["apart", "backwards", "fused"], "fused"))
def test_strided_arrays_of_the_device(where, apart, rng):
    """What attention cannot read or write where it lies is moved on the device."""
    call = call_of(rng, "float32", apart, (9, 0, 5), razor=True)
    given = {name: Array(strided(rng, call[name], where)) for name in TENSORS[:4]}
    batch, heads, dim = call["query"].shape
    out = np.zeros((batch, 2 * heads, dim), np.float32)[:, heads:], np.zeros((batch, heads, 2), np.float32)
    out = Array(out[0]), Array(np.ascontiguousarray(out[1][..., 0]))
    assert check(call, given, out=out) == out


@pytest.mark.slow
def test_a_context_in_parts(rng):
    """Of which each has a result of its own in device memory, until they are put together."""
    call = call_of(rng, "float32", False, (tables.LEAST_SPLIT + 9, 3), razor=True)
    check(call, {name: Array(call[name]) for name in TENSORS[:4]})


@pytest.mark.slow
def test_a_mean_counts_as_the_tokens_it_stands_for(rng):
    """One layer of a compressed cache, stored and attended to on the device."""
    lengths, mode = [30, 12], ascend.CompressType.KVHEAD_ROPE
    wins, offsets = ascend.razor_windows(lengths, 2, [0], sinks=2, recent=5)
    where = ascend.compressed_slots(lengths, 2, wins, offsets, compress_type=mode, block_size=4)
    packed = rng.standard_normal((42, 2, 32)).astype(np.float32)
    packed[3:20, 1] = packed[3, 1]  # equal keys, whose mean stands for each
    caches = [Array(np.zeros((where.num_blocks, 4, 1, 32), np.float32)) for _ in "kv"]
    windows = {"wins": wins, "seq_lens": lengths, "offset_index": offsets}
    ascend.reshape_and_cache(
        Array(packed), Array(packed), *caches, where.slot_mapping, compress_type=mode, **windows
    )
    query = rng.standard_normal((2, 4, 32)).astype(np.float32)
    razor_offset = where.razor_offset(32**-0.5)
    arguments = where.block_tables, where.context_lens
    got = ascend.paged_attention(Array(query), *caches, *arguments, razor_offset=Array(razor_offset))
    expected, _ = oracle.attend_blocks(
        query, *(cache.array for cache in caches), *arguments, razor_offset=razor_offset
    )
    assert_near(contents(got), expected, TOLERANCE["float32"])
