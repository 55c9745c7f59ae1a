"""Random calls over arrays of the device, of any strides: the CPU twin's bits."""

import numpy as np
import pytest
import random_calls
from calls import arrays_of
from device_arrays import KINDS, contents
from scenes import assert_same

import kvkit

GENERATORS = [
    getattr(random_calls, name) for name in ("append", "rotary", "bias", "reshape", "blocks", "matrices")
]


def on_device(rng):
    """Return a kind of array of the device; only its interface tells strides and read-only memory."""

    def wrap(array):
        plain = array.flags.c_contiguous and array.flags.writeable and array.size
        kind = random_calls.one(rng, list(KINDS) if plain else ["interface"])
        return KINDS[kind](array)

    return wrap


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("generator", GENERATORS, ids=lambda each: each.__name__)
def test_the_bits_of_the_cpu(generator, part):
    first, count = (4, 10) if generator is random_calls.append else (10, 20)
    for seed in range(first if part else 0, count if part else first):
        rng = np.random.default_rng([seed, 4])
        call = generator(rng)
        twin = call.copy()
        expected = arrays_of(twin.run(kvkit))
        given, checks = random_calls.moved(rng, call, on_device(rng))
        for i, (got, right) in enumerate(zip(arrays_of(given.run()), expected, strict=True)):
            if right is not None:
                assert_same(contents(got), right, (seed, i))
        for array in call.operator.inputs:
            if isinstance(call.inputs.get(array.name), np.ndarray) and array.inout:
                assert_same(contents(given[array.name]), twin[array.name], (seed, array.name))
        for untouched in checks:
            untouched()
