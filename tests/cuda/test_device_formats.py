"""Caches of floats of 8 bits and of blocks on the device: the CPU's bits, and attention like the CPU's."""

import numpy as np
import pytest
from device_arrays import Array, contents
from quant_format_scenes import BAD, CASES, SLOW, bad_call, empty, normal

import kvkit
import kvkit_cuda

B, H, HEADS, D = 2, 2, 4, 64
cases = pytest.mark.parametrize(("name", "shared"), [*CASES, *SLOW])


def scene(name, shared, rng, tokens):
    """Arguments of a call, and the arrays that it changes."""
    cache, scale, how = empty(name, shared, rng)
    new = normal(rng, B, tokens, H, D), normal(rng, B, tokens, H, D)
    return new, cache, scale, how


def apart(array):
    """The same in memory where rows begin at odd addresses."""
    if array is None:
        return None
    memory = np.zeros(array.nbytes + 1, np.uint8)
    there = memory[1:].view(array.dtype).reshape(array.shape)
    there[...] = array
    return there


@cases
def test_stored_and_returned(name, shared, rng):
    new, cache, scale, how = scene(name, shared, rng, 2)
    new[0][0, 0, 0, :5] = 0, -60000, 1e-7, 3, -2
    if name.startswith("e") and not isinstance(shared, int):  # what is too large saturates
        new[1][0, 0, 0, :2] = np.inf, np.nan
    there, cells = apart(cache), None if scale is None else scale.copy()
    expected = kvkit.key_value_cache(*new, 3, cache, scale, **how)
    given = (Array(each) if each is not None else None for each in (there, cells))
    got = kvkit_cuda.key_value_cache(*new, 3, *given, **how)
    for one, other in zip(got, expected, strict=True):
        assert one.tobytes() == other.tobytes()
    assert there.tobytes() == cache.tobytes()
    assert scale is None or cells.tobytes() == scale.tobytes()


@cases
def test_attention(name, shared, rng):
    """Products in float32, by the kernel for any call."""
    new, cache, scale, how = scene(name, shared, rng, 3)
    kvkit.key_value_cache(*new, 0, cache, scale, **how)
    query, there = normal(rng, B, 1, HEADS, D), cache.copy()
    sizes = {"num_heads": HEADS, "num_kv_heads": H, "head_dim": D}
    arguments = query, *(each[:, :1] for each in new), 3
    expected = kvkit.multi_head_cache_attention(*arguments, cache, scale, **sizes, **how)
    got = kvkit_cuda.multi_head_cache_attention(*arguments, Array(there), scale, **sizes, **how)
    np.testing.assert_allclose(contents(got).astype(float), expected.astype(float), atol=2e-3)
    assert there.tobytes() == cache.tobytes()


@pytest.mark.slow
def test_a_plan_of_pages_repeats(rng):
    """Scales of heads, which the host reads, are those of each call."""
    caches = np.zeros((2, 2, 16, 1, 2, H, D), np.uint8)
    steps = np.array([0, 5]), np.array([0, 5]), np.array([[4, 12]]), np.array([0])
    new = normal(rng, 5, H, D), normal(rng, 5, H, D)
    for i in range(2):
        scale = rng.uniform(0.5, 2, (2, H)).astype(np.float32)
        given = [[*map(Array, new), Array(caches[1, i]), Array(scale)], [*new, caches[0, i], scale]]
        for package, arrays in zip((kvkit_cuda, kvkit), given, strict=True):
            step = package.dynamic_batching.plan(*steps, cache_mode=1, page_size=4)
            step.key_value_cache(*arrays, quant_format="e4m3")
    assert caches[0].any()
    assert caches[0].tobytes() == caches[1].tobytes()


@pytest.mark.parametrize("what", BAD)
def test_refused(what, rng):
    given, message = bad_call(what, rng)
    with pytest.raises(kvkit.KvkitError, match=message):
        kvkit_cuda.key_value_cache(**given)
