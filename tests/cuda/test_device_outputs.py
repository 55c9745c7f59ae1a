"""What is wrong with outputs of the device is said with the CPU's names; see `test_refusals.py`."""

import pytest
from calls import CALLS, arrays_of, like, with_outputs
from device_arrays import Array
from refusals import refused

import kvkit


@pytest.mark.parametrize("name", ["static cache of floats", "cache of floats"])
def test_what_is_wrong_first_is_said_first(name):
    """That the cache overlaps its tokens, before what is wrong with results."""
    call = CALLS[name]()
    tokens = call["current_key"]
    call = call.but(current_key=call["cache"].reshape(-1)[: tokens.size].reshape(tokens.shape))
    refused(call, "cache:", out=7)
    refused(call, "cache:")
    refused(call, "cache:", num_repeat=2**61)


@with_outputs
def test_arrays_of_the_device_have_the_same_names(make, more):
    """Also where only they can be wrong."""
    call, labels = make(), set()
    results = call.copy().run(kvkit, **more)
    there = arrays_of(results)
    for i, result in enumerate(there):

        def among(wrong, i=i):
            return like(results, [*there[:i], wrong, *there[i + 1 :]])

        label = refused(call, "out", out=among(result[..., None]), **more).partition(": ")[0]
        with pytest.raises(kvkit.KvkitError) as error:
            call.run(out=among(Array(result, mask=Array(result))), **more)
        assert str(error.value) == f"{label}: expected an array without a mask, got one with a mask"
        labels.add(label)
    assert len(labels) == len(there)
