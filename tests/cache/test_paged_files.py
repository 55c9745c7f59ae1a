"""Paged caches in files: blocks, tables and prefixes come back, in another process too."""

import os
import subprocess
import sys

import numpy as np
import pytest
from paged_scenes import DIM, HEADS, IDS, KINDS, LAYERS, P, paged, refused, run

from kvkit import Rope
from kvkit.cache import PagedCache, load


@pytest.fixture
def path(tmp_path):
    return tmp_path / "paged.npz"


def served(kind="float32", layout=3):
    """Return a cache of two live sequences that share blocks, and of a prefix that no sequence holds."""
    cache = paged(kind, layout)
    first, other = cache.blocks.add(IDS), cache.blocks.add([7, 8, 9, 10, 11])
    run(cache, (first, len(IDS)), (other, 5))
    branch = cache.blocks.fork(first)
    run(cache, (branch, 2), seed=1)
    cache.blocks.free(other)
    return cache, [first, branch]


@pytest.mark.parametrize(("kind", "layout"), [(kind, i % 4) for i, kind in enumerate(KINDS)])
def test_round_trip(path, kind, layout):
    cache, sequences = served(kind, layout)
    cache.save(path, sequences)
    again = load(path)
    assert isinstance(again, PagedCache)
    assert again._describe() == cache._describe()
    for one, two in zip(again.sequences, sequences, strict=True):
        assert (one.length, one.blocks, one._chain) == (two.length, two.blocks, two._chain)
        assert one.token_ids.tolist() == two.token_ids.tolist()
    assert again.blocks.references.tolist() == cache.blocks.references.tolist()
    assert again.blocks.available == cache.blocks.available
    both = [(cache, sequences), (again, again.sequences)]
    found = [some.blocks.add([7, 8, 9, 10, 12]) for some, _ in both]
    assert found[0].length == found[1].length == P
    assert found[0].blocks == found[1].blocks
    results = [
        run(some, *((seq, 1) for seq in (*live, new)), seed=2)
        for (some, live), new in zip(both, found, strict=True)
    ]
    assert results[0] == results[1]


@pytest.mark.parametrize("rope", [Rope(DIM), "none", [Rope(DIM), "none"]])
def test_a_file_says_how_keys_are_rotated(path, rope):
    ropes = rope if isinstance(rope, list) else [rope] * 2
    cache = PagedCache(4, P, len(ropes), HEADS, DIM, np.float32, rope=rope)
    cache.save(path)
    assert [each._ropes(each.rope) for each in (load(path), cache)] == [ropes, ropes]


def test_prefix_reuse_in_another_process(path):
    cache, sequences = served()
    for seq in sequences:
        cache.blocks.free(seq)
    cache.save(path)
    script = f"""
from paged_scenes import IDS, run
from kvkit.cache import load
cache = load({str(path)!r})
seq = cache.blocks.add(IDS)
print(seq.length, *(output.hex() for output in run(cache, (seq, len(IDS) - seq.length), seed=3)))
"""
    there = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=there)
    assert done.returncode == 0, done.stderr
    seq = cache.blocks.add(IDS)
    assert seq.length == 2 * P
    outputs = [output.hex() for output in run(cache, (seq, len(IDS) - seq.length), seed=3)]
    assert done.stdout.split() == [str(2 * P), *outputs]


def test_a_prefix_of_another_model_is_not_found(path):
    cache = PagedCache(8, P, LAYERS, HEADS, DIM, np.float32, salt=b"one")
    seq = cache.blocks.add(IDS, salt=b"adapter")
    run(cache, (seq, len(IDS)))
    cache.save(path)
    again = load(path)
    assert again.salt == b"one"
    assert again.blocks.add(IDS, salt=b"adapter").length == 2 * P
    assert again.blocks.add(IDS).length == 0


def test_only_blocks_in_use_are_in_a_file(path):
    cache = PagedCache(4096, P, LAYERS, HEADS, DIM, np.float32)
    cache.save(path)
    assert path.stat().st_size < 8192
    seq = cache.blocks.add([1, 2])
    run(cache, (seq, 2))
    cache.save(path)  # nothing is published, and nobody gives the sequence
    assert load(path).blocks.available == 4096


def test_what_cannot_be_saved(path):
    cache, (first, branch) = served()
    for sequences in ([first, first], [1], [paged().blocks.add()]):
        assert "seq" in refused(cache.save, path, sequences)
    step = cache.begin_step([(first, 1)])
    assert refused(cache.save, path).startswith("cache: expected a cache without an open step")
    step.abandon()
    cache.blocks.free(branch)
    assert "live sequence" in refused(cache.save, path, [branch])
    assert not path.exists()
