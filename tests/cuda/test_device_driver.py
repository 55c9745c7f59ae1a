"""What kvkit_cuda asks of a driver, by way of numba-cuda: a stand-in counts it, orders it and refuses."""

from pathlib import Path

import attention_scenes
import numpy as np
import pytest
import scenes
import stand_in
from attention_scenes import FP16
from numba import cuda
from scenes import Formats, assert_all_same

import kvkit
import kvkit_cuda
from kvkit_cuda.ground import device

HALF = Formats("fp16", "fp16")


def test_the_host_reads_no_memory_of_the_device_and_kernels_no_other():
    there = cuda.to_device(np.arange(8, dtype=np.float32))
    assert there.copy_to_host().tolist() == list(range(8))
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [(*(int(end, 16) for end in words[0].split("-")), words[1]) for words in maps]
    place = device.address(there)
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


def test_work_is_done_as_late_as_it_may():
    """Streams wait for the default one, unless they are apart, and for events."""
    apart = device.stream(new_stream(1))
    there = cuda.to_device(np.zeros(4, np.float32))
    launch = stand_in.driver.cuMemsetD8Async
