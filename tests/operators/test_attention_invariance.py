"""What must not change a result: threads, pages, the batch around a sequence, chunks, being run again."""

import attention_scenes as scenes
import numba
import numpy as np
import pytest
from attention_scenes import FP16, FP32, INT8, KINDS, TOLERANCE, any_kind, assert_near, check
from hypothesis import given
from hypothesis import strategies as st
from scenes import DYNAMIC_AXES, assert_same
from strides import strided

CACHED = ("static_cache", "dynamic_cache")
kinds = pytest.mark.parametrize("kind", KINDS)
cached_formats = pytest.mark.parametrize("formats", [FP32, FP16, INT8], ids=str)


# Threads


def with_threads(count, call):
    before = numba.get_num_threads()
    numba.set_num_threads(count)
    try:
        return call.copy().run(return_lse=True)
    finally:
        numba.set_num_threads(before)


LENGTHS = {
    "decoding": [(700, 1), (5, 1), (0, 1), (2000, 1), (64, 1)],
    "one_long_context": [(9000, 1)],
    "prefill": [(0, 150), (0, 70)],
    "chunks": [(1200, 40), (3, 1), (0, 0), (600, 3)],
}


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one core")
@pytest.mark.parametrize("kind", ["dynamic", "dynamic_cache"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("layout", [0, 3], ids="layout{}".format)
def test_threads_change_no_bit(kind, lengths, layout, rng):
    """Contexts that are split included."""
    for formats in (FP32, FP16, INT8):
        options = {"layout": layout} if kind == "dynamic_cache" else {}
        call = getattr(scenes, kind)(rng, formats, lengths, heads=8, kv_heads=4, **options)
        first = with_threads(1, call)
        for count in range(2, numba.config.NUMBA_NUM_THREADS + 1):
            for got, expected in zip(with_threads(count, call), first, strict=True):
                assert_same(got, expected)


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one core")
@pytest.mark.parametrize("kind", ["static", "static_cache"])
def test_threads_change_no_bit_of_a_static_call(kind, rng):
    for past, seqlen, batch in ((3000, 1, 1), (900, 1, 7), (500, 90, 2)):
        call = getattr(scenes, kind)(rng, FP16, past, seqlen, batch)
        for got, expected in zip(with_threads(2, call), with_threads(1, call), strict=True):
            assert_same(got, expected)


@kinds
def test_the_same_bits_every_time(kind, rng):
    call = any_kind(kind, rng, FP16, 1500, 3)
    first = call.run(return_lse=True)
    for _ in range(5):
        for got, expected in zip(call.run(return_lse=True), first, strict=True):
            assert_same(got, expected)


# The batch around a sequence


def alone(call, b):
    """The call with sequence b only; of a cache, with all of it."""
    rows, columns = slice(*call["seqstarts"][b : b + 2]), slice(*call["kvstarts"][b : b + 2])
    tokens = {n: call[n][rows] for n in ("query", "current_key", "current_value") if n in call.inputs}
    context = {n: call[n][columns] for n in ("key", "value") if n in call.inputs}
    starts = {n: np.array([0, s.stop - s.start]) for n, s in (("seqstarts", rows), ("kvstarts", columns))}
    index = {n: call[n][b : b + 1] for n in ("cachestarts", "start_pos") if n in call.inputs}
    decoding = int(b < call["decoding_batches"])
    return call.copy().but(**tokens, **context, **starts, **index, decoding_batches=decoding), rows


@pytest.mark.parametrize("kind", ["dynamic", "dynamic_cache"])
@cached_formats
def test_a_sequence_alone(kind, formats, rng):
    call = getattr(scenes, kind)(rng, formats, [(1, 1), (800, 1), (0, 7), (90, 40)], decoding=2)
    together = call.copy().run(return_lse=True)
    for b in range(4):
        one, rows = alone(call, b)
        got = one.run(return_lse=True)
        for array, whole, tolerance in zip(got, together, (TOLERANCE[str(got[0].dtype)], 2e-5), strict=True):
            assert_near(array, whole[rows], tolerance)


@pytest.mark.parametrize("kind", ["static", "static_cache"])
def test_static_equals_dynamic(kind, rng):
    """Sequences of one length, packed one after the other; each cache of one layer is a pool of rows."""
    for past, seqlen in ((40, 1), (5, 9)):
        call = getattr(scenes, kind)(rng, FP32, past, seqlen, batch=3)
        counts = np.arange(4)
        inputs = {
            n: a.reshape(-1, *a.shape[2:])
            if n not in ("cache", "attn_mask") and isinstance(a, np.ndarray)
            else a
            for n, a in call.copy().inputs.items()
        }
        inputs["seqstarts"], inputs["kvstarts"] = counts * seqlen, counts * (past + seqlen)
        attrs = dict(call.attrs)
        if kind == "static":
            order = "query key value seqstarts kvstarts decoding_batches max_seqlen max_kvlen attn_mask"
        else:
            order = (
                "query current_key current_value seqstarts kvstarts cachestarts start_pos decoding_batches"
                " max_seqlen max_kvlen cache scale attn_mask"
            )
            cache = inputs["cache"].transpose(0, 3, 1, 2, 4, 5)
            inputs["cache"] = cache.reshape(-1, *cache.shape[2:])
            inputs["cachestarts"] = counts[:-1] * cache.shape[1]
            inputs["start_pos"] = np.full(3, past)
        inputs |= {"decoding_batches": 0, "max_seqlen": None, "max_kvlen": None}
        packed = scenes.Call(
            kind.replace("static", "dynamic"), {name: inputs[name] for name in order.split()}, attrs
        )
        assert_near(packed.run().reshape(call["query"].shape), call.run(), TOLERANCE["float32"])


# Pages


def by_row(call, name):
    """The array with axes in the order row, layer, kv, head, dim."""
    axes = DYNAMIC_AXES[call.attrs["cache_layout"]].split()
    return call[name].transpose([axes.index(axis) for axis in DYNAMIC_AXES[0].split()])


def moved(rng, call, rows):
    """The call with its pages elsewhere, in a cache of `rows` rows of poison."""
    table, page_size = call["cachestarts"], call.attrs["page_size"]
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
        new = scenes.poison(rng, (rows, *old.shape[1:]), old.dtype)
        for source, target in places.items():
            count = min(page_size, len(old) - source)
            new[target : target + count] = old[source : source + count]
        axes = DYNAMIC_AXES[call.attrs["cache_layout"]].split()
        order = [DYNAMIC_AXES[0].split().index(axis) for axis in axes]
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


# Chunks


@pytest.mark.parametrize("kind", CACHED)
@cached_formats
def test_a_prompt_in_chunks(kind, formats, rng):
    """The last rows come out the same whether the prompt is written at once or piece by piece."""
    total = 50
    whole = any_kind(kind, rng, formats, 0, total) if kind == "static_cache" else scenes.dynamic_cache(
        rng, formats, [(0, total)], page_size=7)  # fmt: skip
    parts, expected = whole.copy(), whole.run(return_lse=True)
    outputs, done = [], 0
    for size in (1, 20, 7, 1, 21):
        chunk = {
            n: parts[n][..., done : done + size, :, :] for n in ("query", "current_key", "current_value")
        }
        if kind == "static_cache":
            step = parts.but(**chunk, start_pos=done)
        else:
            starts = {"seqstarts": np.array([0, size]), "kvstarts": np.array([0, done + size])}
            step = parts.but(**chunk, **starts, start_pos=np.array([done]))
        outputs.append(step.run(return_lse=True))
        done += size
    assert done == total
    for i, axis in enumerate((-3, -2)):
        got = np.concatenate([output[i] for output in outputs], axis)
        assert_near(got, expected[i], 2 * TOLERANCE[str(whole["query"].dtype)])
    for name in ("cache", "scale"):
        if whole[name] is not None:
            assert_same(parts[name], whole[name], name)


# The oracle on whatever hypothesis finds


@given(seeds, lengths_of, st.sampled_from([1, 2, 5]), st.booleans(), st.booleans(), st.data())
def test_any_lengths(rng, lengths, group, causal, alibi, data):
    decoding = data.draw(st.integers(0, len(lengths)))
    window = data.draw(st.sampled_from([(-1, -1), (3, -1), (0, 2)]))
    options = {"is_causal": causal, "is_alibi": alibi, "window": window, "decoding": decoding}
    check(scenes.dynamic_cache(rng, FP32, lengths, 2 * group, 2, 8, mode=0, **options))
    shrunk = [(past - seqlen // 2, seqlen) for past, seqlen in lengths]
    check(scenes.dynamic(rng, FP32, shrunk, 2 * group, 2, 8, **options))


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
