"""What must not change a result: threads, pages, the batch around a sequence, chunks."""

import attention_scenes as scenes
import numba
import numpy as np
import pytest
from attention_scenes import FP16, FP32, INT8
from hypothesis import given
from hypothesis import strategies as st
from scenes import assert_same
from strides import strided
from surroundings import with_threads

from kvkit.reference.cache import DYNAMIC_LAYOUTS
from kvkit.tools.vectors.draws import poison

# Threads


LENGTHS = {
    "decoding": [(700, 1), (5, 1), (0, 1), (2000, 1), (64, 1)],
    "one_long_context": [(9000, 1)],
    "prefill": [(0, 150), (0, 70)],
    "chunks": [(1200, 40), (3, 1), (0, 0), (600, 3)],
}


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one core")
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize(
    ("kind", "options"), [("dynamic", {}), *(("dynamic_cache", {"layout": layout}) for layout in (0, 3))]
)
def test_threads_change_no_bit(kind, options, lengths, rng):
    """Contexts that are split included."""
    for formats in (FP32, FP16, INT8):
        call = getattr(scenes, kind)(rng, formats, lengths, heads=8, kv_heads=4, **options)
        first = with_threads(1, call.copy().run, return_lse=True)
        for count in range(2, numba.config.NUMBA_NUM_THREADS + 1):
            for got, expected in zip(
                with_threads(count, call.copy().run, return_lse=True), first, strict=True
            ):
                assert_same(got, expected)


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one core")
@pytest.mark.parametrize("kind", ["static", "static_cache"])
def test_threads_change_no_bit_of_a_static_call(kind, rng):
    for past, seqlen, batch in ((3000, 1, 1), (900, 1, 7), (500, 90, 2)):
        call = getattr(scenes, kind)(rng, FP16, past, seqlen, batch)
        for got, expected in zip(
            with_threads(2, call.copy().run, return_lse=True),
            with_threads(1, call.copy().run, return_lse=True),
            strict=True,
        ):
            assert_same(got, expected)


# Pages


def by_row(call, name):
    """Return the array with axes in the order of `DYNAMIC_LAYOUTS[0]`."""
    axes = DYNAMIC_LAYOUTS[call.attributes["cache_layout"]].split()
    return call[name].transpose([axes.index(axis) for axis in DYNAMIC_LAYOUTS[0].split()])


def moved(rng, call, rows):
    """Return the call with its pages elsewhere, in a cache of `rows` rows of poison."""
    table, page_size = call["cachestarts"], call.attributes["page_size"]
    places, pages = {}, list(rng.permutation(rows // page_size))
    for b, kvlen in enumerate(np.diff(call["kvstarts"])):
        for p in range(-(-kvlen // page_size)):
            places.setdefault(int(table[b, p]), page_size * pages.pop())
    new_table = table.copy()
    arrays = {}
    for name in ("cache", "scale"):
        if call[name] is None:
            continue
        old = by_row(call, name)
        new = poison(rng, (rows, *old.shape[1:]), old.dtype)
        for source, target in places.items():
            count = min(page_size, len(old) - source)
            new[target : target + count] = old[source : source + count]
        axes = DYNAMIC_LAYOUTS[call.attributes["cache_layout"]].split()
        order = [DYNAMIC_LAYOUTS[0].split().index(axis) for axis in axes]
        arrays[name] = np.ascontiguousarray(new.transpose(order))
    for b, kvlen in enumerate(np.diff(call["kvstarts"])):
        for p in range(-(-kvlen // page_size)):
            new_table[b, p] = places[int(table[b, p])]
    return call.but(cachestarts=new_table, **arrays)


seeds = st.integers(0, 2**32 - 1).map(np.random.default_rng)
lengths_of = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 6)), max_size=5)


@given(seeds, st.sampled_from([FP32, INT8]), lengths_of, st.integers(1, 20), st.integers(0, 3))
def test_the_order_of_pages_is_free(rng, formats, lengths, page_size, layout):
    call = scenes.dynamic_cache(rng, formats, lengths, layout=layout, page_size=page_size, dim=16)
    pages = sum(-(-sum(n) // page_size) for n in lengths) + 2
    other = moved(rng, call, pages * page_size)
    for got, expected in zip(other.run(return_lse=True), call.run(return_lse=True), strict=True):
        assert_same(got, expected)


def test_pages_of_long_contexts_may_lie_anywhere(rng):
    for formats in (FP32, INT8):
        call = scenes.dynamic_cache(rng, formats, [(3000, 1), (1800, 1)], page_size=16, layout=3)
        assert_same(moved(rng, call, 5000).run(), call.run())


# The oracle on whatever hypothesis finds


@pytest.mark.parametrize("kind", ["dynamic", "dynamic_cache"])
def test_results_keep_no_index_tensor(kind, rng):
    """Index tensors of any strides give the same, and may change afterwards."""
    call = getattr(scenes, kind)(rng, FP16, [(30, 1), (4, 5)])
    expected = call.copy().run()
    names = ("seqstarts", "kvstarts", "cachestarts", "start_pos")
    other = call.but(**{name: strided(call[name]) for name in names if name in call.inputs})
    got = other.run()
    for name in names:
        if name in other.inputs:
            other[name][...] = -1
    assert_same(got, expected)
