"""Make caches in files and folders, fill and compare them, interrupt their changes, damage their files."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
from quantized_cache_scenes import OPTIONS

import kvkit
from kvkit.cache import (
    Cache,
    DynamicLayer,
    QuantizedLayer,
    SlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
    saving,
)
from kvkit.files import npz

SOURCES = str(Path(kvkit.cache.__file__).parent)
DIMS = 4, 8  # which groups of codes divide


def full_disk(*arguments):
    raise OSError(28, "No space left on device")


def run(script, *arguments):
    """Run a script in a process of its own."""
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def four_layers():
    return [DynamicLayer(), SlidingWindowLayer(4), StaticLayer(20), StaticSlidingWindowLayer(20, 4)]


def five_layers():
    """Return the four layers and a quantized one."""
    return [*four_layers(), QuantizedLayer(**OPTIONS | {"residual_length": 2})]


def random(dtype, count, seed=0, dims=(4, 6)):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((2, 3, count, dim)).astype(dtype) for dim in dims]


def fill(cache, dtype=np.float32, counts=(6, 1, 1), dims=(4, 6)):
    for seed, count in enumerate(counts):
        for i in range(len(cache)):
            cache.update(*random(dtype, count, seed + i, dims), i)
    return cache


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def bits(side):
    return None if side is None else (side.dtype, side.shape, side.tobytes())


def assert_same(one, other):
    """Check that two caches have the same layers with the same tokens."""
    assert len(one) == len(other)
    for a, b in zip(one.layers, other.layers, strict=True):
        assert type(a) is type(b)
        assert (a.get_seq_length(), a._describe(), a._record_past) == (
            b.get_seq_length(), b._describe(), b._record_past,
        )  # fmt: skip
        assert bits(a.keys) == bits(b.keys)
        assert bits(a.values) == bits(b.values)


def assert_alike_from_now_on(one, other, dtype, dims=(4, 6)):
    """Check that updates, attention and crops of two caches give the same bytes."""
    for i in range(len(one)):
        for seed, count in enumerate((1, 3, 1, 1)):
            new = random(dtype, count, 50 + seed, dims)
            for a, b in zip(one.update(*new, i), other.update(*new, i), strict=True):
                assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
            query = random(dtype, count, 90 + seed)[0]
            assert one.attend(query, i).tobytes() == other.attend(query, i).tobytes()
    assert_same(one, other)


# Ends of processes


def filled(dtype=np.float32, counts=(6, 1)):
    return fill(Cache(four_layers()), dtype, counts)


def changed(path, change):
    """Write a file again after a change of its arrays and of what it says of the cache."""
    contents = npz.read(path)
    arrays = {name: array.copy() for name, array in contents.arrays.items()}
    about = json.loads(json.dumps(contents.metadata["cache"]))
    about = change(arrays, about) or about
    npz.write(path, arrays, {"cache": about})


def sealed(about, arrays):
    """Set the arrays and the checksum in a sidecar, as if it had been written with these contents."""
    about["arrays"] = {name: [array.dtype.name, *array.shape] for name, array in arrays.items()}
    del about["fingerprint"]
    about["fingerprint"] = saving.hash_contents(about, arrays)
