"""Where arrays lie: views inside guarded buffers, outputs given by the caller, threads, streaming."""

import numba
import numpy as np
import pytest
import scenes
from scenes import MOVED, ODD_GROUPS, QUANTIZED, Formats, assert_all_same, check

from kvkit.cpu.copy import transfer

FEW = [Formats("fp32", "fp16"), MOVED[-1], QUANTIZED[8], QUANTIZED[2], ODD_GROUPS[1]]
few_formats = pytest.mark.parametrize("formats", FEW, ids=str)
dynamic_layouts = pytest.mark.parametrize("layout", range(4), ids="layout{}".format)
static_layouts = pytest.mark.parametrize("layout", range(2), ids="layout{}".format)
ARRAYS = ("current_key", "current_value", "cache", "scale")


def check_carved(poison, scene, offset=0, flips=None, names=(*ARRAYS, "out")):
    """The named arrays of the call lie in buffers of which no other byte may change."""
    expected, flips = scene.oracle(), flips or {}
    here = [name for name in ARRAYS if name in names and scene[name] is not None]
    moved = {name: poison.around(scene[name], offset, flips.get(name)) for name in here}
    out = tuple(map(poison.like, expected[:2]))
    if "out" in names:
        out = tuple(poison.around(array, offset, flips.get("out")) for array in out)
    carved = scene.copy().but(**moved)
    assert_all_same(carved.results(out=out), expected)
    for name in ("current_key", "current_value"):
        scenes.assert_same(carved[name], scene[name], name)


@few_formats
@dynamic_layouts
@pytest.mark.parametrize("repeat", [1, 2])
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "odd_address"])
def test_dynamic_guarded(formats, layout, repeat, offset, rng, poison):
    for mode in range(2):
        check_carved(poison, scenes.dynamic(rng, formats, layout, mode, repeat=repeat), offset)


@few_formats
@dynamic_layouts
@pytest.mark.parametrize("name", [*ARRAYS, "out"])
def test_one_guarded_array_among_contiguous_ones(formats, layout, name, rng, poison):
    check_carved(poison, scenes.dynamic(rng, formats, layout, 1), names=(name,))


@few_formats
@static_layouts
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "odd_address"])
def test_static_guarded(formats, layout, offset, rng, poison):
    check_carved(poison, scenes.static(rng, formats, layout, repeat=2), offset)


@few_formats
@dynamic_layouts
def test_dynamic_negative_strides(formats, layout, rng, poison):
    """Each outer axis in turn runs backwards, in cache and scale together and apart."""
    for axis in range(4):
        scene = scenes.dynamic(rng, formats, layout, 1)
        outer = min(axis, 1)
        check_carved(poison, scene, 1, {"cache": axis, "scale": axis, "out": outer, "current_key": outer})
        check_carved(poison, scene, 0, {"cache": axis})
        check_carved(poison, scene, 0, {"scale": axis})


@few_formats
@static_layouts
def test_static_negative_strides(formats, layout, rng, poison):
    for axis in range(5):
        scene = scenes.static(rng, formats, layout)
        outer = min(axis, 2)
        check_carved(poison, scene, 1, {"cache": axis, "scale": axis, "out": outer, "current_key": outer})


@few_formats
@dynamic_layouts
def test_cache_with_axes_in_another_order(formats, layout, rng):
    """The memory order of a view is free: a cache that lies in memory as another layout would."""
    scene = scenes.dynamic(rng, formats, layout, 1)
    expected = scene.oracle()
    for order in ((3, 2, 1, 0, 4), (1, 0, 3, 2, 4), (2, 3, 0, 1, 4)):
        moved = {
            name: np.ascontiguousarray(scene[name].transpose(order)).transpose(np.argsort(order))
            for name in ("cache", "scale")
            if scene[name] is not None
        }
        assert_all_same(scene.but(**moved).results(), expected)


@few_formats
def test_cache_and_scale_interleaved_in_one_buffer(formats, rng):
    """A row of codes and its scales side by side, as a record."""
    scene = scenes.dynamic(rng, formats, 0, 1, dim=24)
    expected = scene.oracle()
    parts = [a for a in (scene["cache"], scene["scale"]) if a is not None]
    width = sum(part.shape[-1] * part.itemsize for part in parts)
    records = np.zeros((*scene["cache"].shape[:-1], width), np.uint8)
    moved, at = [], 0
    for part in parts:
        size = part.shape[-1] * part.itemsize
        field = records[..., at : at + size].view(part.dtype)
        field[...] = part
        moved.append(field)
        at += size
    scene = scene.but(**dict(zip(("cache", "scale"), moved, strict=False)))
    assert_all_same(scene.results(), expected)


def test_kept_arrays_come_back(rng, poison):
    scene = scenes.static(rng, MOVED[0])
    out = tuple(map(poison.like, scene.oracle()[:2]))
    key, value = scene.run(out=list(out))
    assert key is out[0]
    assert value is out[1]


@few_formats
def test_outputs_may_be_parts_of_one_array(formats, rng, poison):
    scene = scenes.dynamic(rng, formats, 3, 0)
    expected = scene.oracle()
    both = np.stack([*map(poison.like, expected[:2])], axis=1)
    assert_all_same(scene.results(out=(both[:, 0], both[:, 1])), expected)


def test_key_of_an_earlier_call_may_be_the_next_current_key(rng):
    first = scenes.static(rng, MOVED[0], start=0, seqlen=3)
    key, value = first.run()
    check(first.but(current_key=key[:, 1:], current_value=value[:, 1:], start_pos=3))


# Threads and streaming

LONG = [(700, 100), (0, 0), (0, 333), (64, 0), (1, 1)]


def long_scene(rng, formats, **choices):
    dim = 128 if not formats.bit else 2 * max(formats.dims)
    return scenes.dynamic(rng, formats, 2, 1, lengths=LONG, page_size=64, dim=dim, **choices)


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 5000])
@few_formats
def test_any_number_of_threads(formats, threads, rng, monkeypatch):
    """The work is cut into this many chunks a side, more than there are tokens too."""
    scene = long_scene(rng, formats, repeat=2)
    numba.get_num_threads()  # starts them
    monkeypatch.setattr(transfer, "SMALL_BYTES", 0)
    monkeypatch.setattr(numba, "get_num_threads", lambda: threads)
    check(scene)


@few_formats
def test_more_than_a_megabyte_on_one_thread_and_on_all(formats, rng):
    repeat = 1 + 2**20 // (1200 * 2 * max(formats.dims))
    scene = long_scene(rng, formats, repeat=repeat)
    expected = scene.oracle()
    assert expected[0].nbytes > 2**20
    threads = numba.get_num_threads()
    assert_all_same(scene.copy().results(), expected)
    numba.set_num_threads(1)
    try:
        assert_all_same(scene.results(), expected)
    finally:
        numba.set_num_threads(threads)


STREAMED = [*MOVED, *(f for i, f in enumerate(QUANTIZED) if i % 5 == 0)]


@pytest.mark.parametrize("formats", STREAMED, ids=str)
def test_streaming(formats, rng, monkeypatch):
    """With every output taken for a large one: dims whose rows stay multiples of 16 bytes, and others."""
    asked = []
    rows = transfer.rows
    monkeypatch.setattr(transfer, "STREAM_BYTES", 0)
    monkeypatch.setattr(transfer, "rows", lambda *given: asked.append(given[-1]) or rows(*given))
    for dim in formats.dims:
        for repeat in (1, 2):
            check(scenes.dynamic(rng, formats, 3, 1, dim=dim, repeat=repeat))
            check(scenes.static(rng, formats, 0, dim=dim, repeat=repeat))
    assert True in asked


@pytest.mark.parametrize("formats", STREAMED[1::3], ids=str)
@pytest.mark.parametrize("offset", [0, 1, 2, 8, 16, 32])
def test_streaming_into_any_address(formats, offset, rng, monkeypatch):
    monkeypatch.setattr(transfer, "STREAM_BYTES", 0)
    scene = scenes.dynamic(rng, formats, 0, 1, dim=formats.dims[-1])
    expected = scene.oracle()
    buffers = [np.full(expected[0].nbytes + 128, 0xFF, np.uint8) for _ in range(2)]
    begins = [-buffer.ctypes.data % 64 + offset for buffer in buffers]
    out = tuple(
        buffer[begin : begin + expected[0].nbytes].view(expected[0].dtype).reshape(expected[0].shape)
        for buffer, begin in zip(buffers, begins, strict=True)
    )
    assert_all_same(scene.results(out=out), expected)
    for buffer, begin in zip(buffers, begins, strict=True):
        assert (buffer[:begin] == 0xFF).all()
        assert (buffer[begin + expected[0].nbytes :] == 0xFF).all()
