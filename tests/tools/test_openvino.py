"""Blocks that OpenVINO's paged attention wrote: read by every tool, and coded again to the same bytes."""

import numpy as np
import openvino_blocks as scene
import pytest

from kvkit import formats
from kvkit.tools import check, convert, diff, inspect, study
from kvkit.tools.readers import open_cache
from kvkit.tools.source import CacheSource

LAYOUTS = {"f32": "openvino", "u8": "openvino-u8", "u4": "openvino-u4"}


@pytest.mark.parametrize("kind", scene.KINDS)
def test_blocks_are_read_by_every_tool(tmp_path, kind):
    arrays, layout, x = scene.written(kind), LAYOUTS[kind], scene.rows()
    layer = open_cache(arrays, layout).layer(0)
    step = 0 if kind == "f32" else (x.max() - x.min()) / (2 ** int(kind[1:]) - 1)
    for side, rows in zip((layer.key, layer.value), x, strict=True):
        assert np.abs(side.read(slice(None)) - rows).max() <= step
        np.testing.assert_array_equal(side.read(slice(30, 35)), side.read(slice(None))[30:35])
    found = inspect(arrays, layout=layout, stats=True)
    assert (found.use.lengths, found.sizes["n"], found.sizes["h"]) == (
        [scene.TOKENS],
        scene.PAGE,
        scene.HEADS,
    )
    assert study(CacheSource(arrays, layout), ["int8:g32"]).summary[0].bits == 8.5
    assert not check(arrays, layout=layout).found
    target = tmp_path / "floats.npz"
    done = convert(arrays, target, from_layout=layout, format="float32")
    assert done.format == {"f32": "float32"}.get(kind, f"openvino_key_{kind} and openvino_value_{kind}")
    with np.load(target) as floats:
        np.testing.assert_array_equal(floats["cache.0.0"][0], layer.key.read(slice(None)))
    assert diff(arrays, arrays, layout_a=layout, layout_b=layout).equal


@pytest.mark.parametrize("kind", ["u8", "u4"])
def test_the_engine_codes_as_the_formats_do(kind):
    source, x = CacheSource(scene.written(kind), LAYOUTS[kind]), scene.rows()
    parts = {"codes": source.kv} | source.scale_views
    for name, side, rows in (("key", "keys", x[0]), ("value", "values", x[1])):
        ours = formats.encode(rows[: scene.PAGE], f"openvino_{name}_{kind}")
        for part, kv in parts.items():  # of a full block; one that grew was coded twice
            np.testing.assert_array_equal(getattr(kv, side)[0][scene.TABLE[0]], ours[part])


@pytest.mark.peers
@pytest.mark.parametrize("kind", scene.KINDS)
def test_the_package_writes_these_bytes(kind):
    found = scene.written_by(pytest.importorskip("openvino"), kind)
    for name, array in scene.written(kind).items():
        np.testing.assert_array_equal(found[name], array)
