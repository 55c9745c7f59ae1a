"""Random legal calls of `reshape_and_cache` against plain loops: every byte of the caches' memory."""

import numpy as np
import pytest
from ascend_scenes import (
    DTYPES,
    FLOATS,
    any_bits,
    check,
    compressed_call,
    dtypes_of,
    every_dtype,
    finite,
    plain_call,
    seeds,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkit.reference.ascend import KVHEAD, OMNI, ROPE

every_mode = pytest.mark.parametrize("mode", [KVHEAD, ROPE, OMNI], ids=["kvhead", "rope", "omni"])


# Data


# A slot for each token


@settings(max_examples=120)
@given(seeds, dtypes_of, st.sampled_from([1, 2]))
def test_nd(rng, dtype, count):
    check(rng, *plain_call(rng, [dtype] * count))


@settings(max_examples=120)
@given(seeds, dtypes_of, st.sampled_from([1, 2]))
def test_nz(rng, dtype, count):
    check(rng, *plain_call(rng, [dtype] * count, "NZ"), cache_format="NZ")


@given(seeds, st.sampled_from(["float16", "bfloat16"]))
def test_nz_of_int8_keys_and_other_values(rng, name):
    check(rng, *plain_call(rng, [DTYPES["int8"], DTYPES[name]], "NZ"), cache_format="NZ")


@every_dtype
def test_one_element(dtype):
    """The smallest cache there is."""
    rng = np.random.default_rng(1)
    for _ in range(5):
        check(rng, *any_bits(rng, (4, 1, 1, 1), dtype)[:2], *any_bits(rng, (2, 1, 1, 1, 1), dtype), [0])


# Runs


counts = st.sampled_from([1, 2, 2])


@settings(max_examples=120)
@given(seeds, dtypes_of, counts, st.sampled_from(["copy", "skip"]))
def test_kvhead(rng, dtype, count, empty_window):
    arrays, keywords = compressed_call(rng, dtype, KVHEAD, count, empty_window)
    check(rng, *arrays, **keywords)


@settings(max_examples=120)
@given(seeds, dtypes_of, counts)
def test_omni(rng, dtype, count):
    arrays, keywords = compressed_call(rng, dtype, OMNI, count)
    check(rng, *arrays, **keywords)


@settings(max_examples=120)
@given(seeds, st.sampled_from(list(FLOATS.values())), counts)
def test_rope(rng, dtype, count):
    arrays, keywords = compressed_call(rng, dtype, ROPE, count)
    check(rng, *arrays, **keywords)


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=str)
def test_rope_moves_every_bit_that_it_does_not_average(dtype):
    """NaN payloads before and behind the mean stay."""
    rng = np.random.default_rng(2)
    key = any_bits(rng, (20, 2, 32), dtype)
    key[5:12] = finite(rng, (7, 2, 32), dtype)
    cache, more = any_bits(rng, (5, 8, 1, 32), dtype), {"wins": [7, 6], "offset_index": [5, 6]}
    check(rng, key, None, cache, None, [3, 19], compress_type=ROPE, seq_lens=[20], **more)


@every_mode
def test_an_empty_run_may_begin_behind_the_cache(mode):
    """And share its slot with another run."""
    rng = np.random.default_rng(3)
    key, cache = finite(rng, (2, 1, 32), np.float16), any_bits(rng, (1, 2, 1, 32), np.float16)
    more = {"seq_lens": [1, 1], "compress_type": mode}
    if mode == KVHEAD:
        more |= {"wins": [0, 0], "empty_window": "skip"}
        check(rng, key, None, cache, None, [2, 2], **more)
    elif mode == OMNI:
        check(rng, key, None, cache, None, [1, 2], wins=[1, 1], offset_index=[0, 0], **more)
        check(rng, key, None, cache, None, [1, 1], wins=[1, 1], offset_index=[-1, 0], **more)
    else:
        check(rng, key, None, cache, None, [1, 0], wins=[1, 1], offset_index=[0, 0], **more)
