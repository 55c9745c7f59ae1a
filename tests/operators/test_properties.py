"""What must hold whatever the oracle says: hypothesis draws the scenes."""

import ml_dtypes
import numpy as np
import scenes
from hypothesis import given
from hypothesis import strategies as st
from scenes import DTYPES, DYNAMIC_AXES, MOVED, ODD_GROUPS, QUANTIZED, STATIC_AXES, assert_all_same
from surroundings import carve

CHOSEN = [MOVED[0], MOVED[1], MOVED[-1], *QUANTIZED[2::5], ODD_GROUPS[1]]
formats_of = st.sampled_from(CHOSEN)
quantized_of = st.sampled_from(QUANTIZED + ODD_GROUPS)
seeds = st.integers(0, 2**32 - 1).map(np.random.default_rng)
layouts, page_sizes, repeats = st.integers(0, 3), st.integers(1, 9), st.integers(1, 3)
lengths_of = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), max_size=6)


def arrays_of(scene):
    return {name: scene[name] for name in ("cache", "scale") if scene[name] is not None}


def assert_same(got, expected):
    """Sequences of arrays, by bits."""
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        scenes.assert_same(a, b, i)


def put_rows(scene, target, rows_from, rows_to):
    """Copy cache and scale rows of one dynamic scene into another, layouts apart."""
    for name in arrays_of(scene):
        source, sink = (by_row(s, name) for s in (scene, target))
        sink[rows_to] = source[rows_from]


def by_row(scene, name):
    """The array with axes in the order row, layer, kv, head, dim."""
    axes = DYNAMIC_AXES[scene.attrs["cache_layout"]].split()
    return scene[name].transpose([axes.index(axis) for axis in DYNAMIC_AXES[0].split()])


def roomy(rng, scene, rows):
    """The scene with an equal cache and scale of `rows` rows and other contents."""
    dim = scene["current_key"].shape[-1]
    layout = scene.attrs["cache_layout"]
    other = scenes.dynamic(rng, scene.formats, layout, 0, lengths=[(rows, 0)], dim=dim)
    return scene.but(**arrays_of(other))


def used_rows(scene):
    """The row of each token of each context, in the order of the outputs."""
    page_size, mode = scene.attrs["page_size"], scene.attrs["cache_mode"]
    rows = []
    for b, (first, last) in enumerate(zip(scene["kvstarts"][:-1], scene["kvstarts"][1:], strict=True)):
        for t in range(last - first):
            start = scene["cachestarts"][b, t // page_size] if mode else scene["cachestarts"][b]
            rows.append(start + (t % page_size if mode else t))
    return np.array(rows, np.int64)


@given(seeds, formats_of, lengths_of, page_sizes, layouts)
def test_paged_and_contiguous_agree(rng, formats, lengths, page_size, layout):
    paged = scenes.dynamic(rng, formats, layout, 1, lengths=lengths, page_size=page_size)
    total, starts = int(paged["kvstarts"][-1]), 1 + paged["kvstarts"][:-1]
    flat = roomy(rng, paged, total).but(cache_mode=0, cachestarts=starts)
    rows, flat_rows = used_rows(paged), used_rows(flat)
    put_rows(paged, flat, rows, flat_rows)
    assert_same(paged.run(), flat.run())
    for name in arrays_of(flat):
        scenes.assert_same(by_row(paged, name)[rows], by_row(flat, name)[flat_rows], name)


@given(seeds, formats_of, lengths_of, page_sizes, layouts)
def test_the_order_of_pages_is_free(rng, formats, lengths, page_size, layout):
    """Pages permuted in the cache and in the table: the same outputs, and the same rows afterwards."""
    scene = scenes.dynamic(rng, formats, layout, 1, lengths=lengths, page_size=page_size)
    table, rows = scene["cachestarts"].copy(), used_rows(scene)
    legal = (table >= 0) & (table < by_row(scene, "cache").shape[0])
    begins = np.unique(table[legal])
    table[legal] = page_size * rng.permutation(len(begins))[np.searchsorted(begins, table[legal])]
    moved = roomy(rng, scene, page_size * len(begins) + 1).but(cachestarts=table)
    moved_rows = used_rows(moved)
    put_rows(scene, moved, rows, moved_rows)
    assert_same(moved.run(), scene.run())
    for name in arrays_of(scene):
        scenes.assert_same(by_row(moved, name)[moved_rows], by_row(scene, name)[rows], name)


@given(seeds, formats_of, lengths_of, st.integers(0, 1), layouts, repeats)
def test_all_layouts_agree(rng, formats, lengths, mode, layout, repeat):
    first = scenes.dynamic(rng, formats, 0, mode, lengths=lengths, repeat=repeat)
    order = [DYNAMIC_AXES[0].split().index(axis) for axis in DYNAMIC_AXES[layout].split()]
    arrays = {name: array.transpose(order).copy() for name, array in arrays_of(first).items()}
    second = first.but(**arrays, cache_layout=layout)
    assert_same(second.run(), first.run())
    assert_same(arrays_of(second).values(), [array.transpose(order) for array in arrays_of(first).values()])


@given(seeds, formats_of, st.lists(st.integers(1, 5), min_size=1, max_size=5), page_sizes, st.integers(0, 1))
def test_appending_in_chunks_equals_appending_at_once(rng, formats, chunks, page_size, mode):
    total = sum(chunks)
    whole = scenes.dynamic(rng, formats, 1, mode, lengths=[(0, total)], page_size=page_size)
    parts = whole.copy()
    done = 0
    for size in chunks:
        step = parts.but(
            current_key=whole["current_key"][done : done + size],
            current_value=whole["current_value"][done : done + size],
            seqstarts=np.array([0, size]),
            kvstarts=np.array([0, done + size]),
            start_pos=np.array([done]),
        )
        outputs = step.run()
        done += size
    assert_all_same((*outputs, parts["cache"], parts["scale"]), whole.results())


@given(seeds, formats_of, st.integers(0, 4), st.integers(0, 9), st.integers(0, 5), st.integers(0, 1), repeats)
def test_static_equals_dynamic(rng, formats, batch, start, seqlen, layout, repeat):
    """Sequences of a static cache one behind the other are a dynamic cache."""
    scene = scenes.static(rng, formats, layout, batch=batch, start=start, seqlen=seqlen, repeat=repeat)
    axes = STATIC_AXES[layout].split()
    order = [axes.index(axis) for axis in ("sequence", *DYNAMIC_AXES[0].split())]

    def flat(name):
        array = scene[name].transpose(order)
        return array.reshape(-1, *array.shape[2:])

    counts, packed = np.arange(batch + 1), scene["current_key"].shape[2:]
    dynamic = scenes.dynamic(rng, formats, 0, 0, repeat=repeat).but(
        current_key=scene["current_key"].reshape(-1, *packed),
        current_value=scene["current_value"].reshape(-1, *packed),
        seqstarts=counts * seqlen,
        kvstarts=counts * (start + seqlen),
        cachestarts=counts[:-1] * scene["cache"].shape[axes.index("row")],
        start_pos=np.full(batch, start),
        max_seqlen=None,
        max_kvlen=None,
        **{name: flat(name) for name in arrays_of(scene)},
    )
    assert_same((x.reshape(-1, *x.shape[2:]) for x in scene.run()), dynamic.run())
    assert_same(arrays_of(dynamic).values(), map(flat, arrays_of(scene)))


@given(seeds, quantized_of)
def test_quantization_error(rng, formats):
    """At most half a step, and the roundings of quotient, stored scale, product and result."""
    scene = scenes.static(rng, formats, start=0, seqlen=5)
    small = np.clip(scene["current_key"].astype(np.float64), -3e4, 3e4).astype(DTYPES[formats.t1])
    key, _ = scene.but(current_key=small).run()
    groups = small.astype(np.float64).reshape(-1, formats.group)
    largest = np.abs(groups).max(axis=1, keepdims=True)
    t1, t3 = (ml_dtypes.finfo(DTYPES[t]) for t in (formats.t1, formats.t3))
    eps1, eps3 = float(t1.eps), float(t3.eps)
    step = np.maximum(largest / {8: 127, 4: 7}[formats.bit], 1e-5) * (1 + eps1)
    roundings = (eps1 + eps3) * (largest + step) + 64 * float(t3.smallest_subnormal)
    error = np.abs(key.astype(np.float64).reshape(groups.shape) - groups)
    assert (error <= step / 2 + roundings).all()


@given(seeds, formats_of, lengths_of, st.integers(0, 1), layouts)
def test_loads_change_nothing(rng, formats, lengths, mode, layout):
    lengths = [(start_pos, 0) for start_pos, _ in lengths]
    scene = scenes.dynamic(rng, formats, layout, mode, lengths=lengths)
    before = scene.copy()
    first = scene.run()
    assert_same(arrays_of(scene).values(), arrays_of(before).values())
    assert_same(scene.run(), first)


@given(seeds, formats_of, layouts, st.integers(0, 31), st.integers(1, 3), st.sampled_from([None, 0, 1, 2, 3]))
def test_caches_of_any_strides(rng, formats, layout, offset, margin, flip):
    scene = scenes.dynamic(rng, formats, layout, 1, lengths=[(4, 2), (0, 3), (7, 0)])
    expected = scene.oracle()
    views = {name: carve(array, offset, flip, margin) for name, array in arrays_of(scene).items()}
    assert_all_same(scene.but(**{name: view for name, (view, _) in views.items()}).results(), expected)
    for _, untouched in views.values():
        untouched()


@given(seeds, formats_of, layouts, repeats)
def test_repeated_heads_are_equal(rng, formats, layout, repeat):
    scene = scenes.dynamic(rng, formats, layout, 0)
    once = scene.copy().run()
    assert_same(scene.but(num_repeat=repeat).run(), [np.repeat(x, repeat, axis=1) for x in once])
