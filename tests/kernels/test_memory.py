"""Where arrays lie: views inside guarded buffers, outputs given by the caller, threads, streaming."""

import numba
import numpy as np
import pytest
import scenes
from scenes import MOVED, ODD_GROUPS, QUANTIZED, Formats, assert_all_same, check, first_quick

import kvkit
from kvkit.cpu.copy import pieces, transfer

FEW = [Formats("fp32", "fp16"), MOVED[-1], QUANTIZED[8], QUANTIZED[2], ODD_GROUPS[1]]
few_formats = pytest.mark.parametrize("formats", FEW, ids=str)


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


@few_formats
def test_any_number_of_threads(formats, rng, monkeypatch):
    """The work is cut into this many chunks a side, more than there are tokens too."""
    scene = long_scene(rng, formats, repeat=2)
    expected = scene.oracle()
    numba.get_num_threads()  # starts them
    monkeypatch.setattr(transfer, "SMALL_BYTES", 0)
    for threads in (1, 2, 3, 7, 5000):
        monkeypatch.setattr(numba, "get_num_threads", lambda threads=threads: threads)
        assert_all_same(scene.copy().results(), expected)


@pytest.mark.parametrize("formats", first_quick(FEW[::-1], 2), ids=str)
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


# Machine code that streams is compared by bytes in `test_rows.py`; this is about when it is asked for.
@pytest.mark.parametrize(
    "formats",
    [pytest.param(f, marks=[pytest.mark.slow] * (i % 3 != 0)) for i, f in enumerate(STREAMED)],
    ids=str,
)
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


@pytest.mark.parametrize("formats", STREAMED[::3], ids=str)
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


@pytest.mark.parametrize("offset", [0, 2, 16])
def test_streaming_of_pieces_into_any_address(offset, rng, monkeypatch):
    """Blocks are streamed into where every row begins at a multiple of 16 bytes, and nowhere else."""
    asked, rows = [], pieces.rows
    monkeypatch.setattr(pieces, "STREAM_BYTES", 0)
    monkeypatch.setattr(
        pieces, "rows", lambda *given, stream: asked.append(stream) or rows(*given, stream=stream)
    )
    key = rng.standard_normal((5, 2, 64)).astype(np.float16)
    buffer = np.zeros(6 * key[0].nbytes + 128, np.uint8)
    begin = -buffer.ctypes.data % 64 + offset
    cache = buffer[begin : begin + 6 * key[0].nbytes].view(np.float16).reshape(2, 3, 2, 64)
    kvkit.ascend.reshape_and_cache(key, None, cache, None, np.array([0, 1, 5, 4, 2]))
    np.testing.assert_array_equal(cache.reshape(6, 2, 64)[[0, 1, 5, 4, 2]], key)
    assert asked == [offset % 16 == 0]
