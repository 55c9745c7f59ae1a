"""Every line against its engine's own index formula: bijective, as a view, and through conversion."""

import engine_caches
import numpy as np
import pytest
from engine_caches import NAMES, SPLIT

from kvkit import layouts
from kvkit.layouts import NAMED

every = pytest.mark.parametrize("name", NAMES)


def test_every_line_has_a_formula():
    joined = {"vllm-dsa-indexer", "flashmla-ds-v4", "openvino-u8", "openvino-u4"}  # codes beside scales
    assert set(NAMED) - set(NAMES) == joined


@pytest.mark.parametrize("name", [name for name in NAMES if name not in SPLIT])
@pytest.mark.parametrize("changes", [{}, {"H": 1}, {"N": 1}, {"H": 32}, {"B": 1, "L": 1}], ids=str)
def test_a_view_has_the_engines_elements(name, changes):
    sizes = engine_caches.sizes_for(name, **changes)
    data = engine_caches.values(sizes, engine_caches.kinds_of(name))
    arrays = engine_caches.filled(name, sizes, data)
    kv = layouts.view(arrays, name, sizes=engine_caches.said(name, sizes))
    for layer in range(sizes["L"]):
        for kind in range(data.shape[1]):
            found = (kv.keys, kv.values)[kind][layer]
            rows = np.stack(found) if isinstance(found, tuple) else found
            assert np.array_equal(rows.reshape(data[layer, kind].shape), data[layer, kind])


@every
def test_conversion_writes_the_engines_bytes(name):
    sizes = engine_caches.sizes_for(name)
    kinds = engine_caches.kinds_of(name)
    data = engine_caches.values(sizes, kinds)
    plain = [
        [data[layer, kind] for kind in range(2)] if kinds == 2 else data[layer, 0]
        for layer in range(sizes["L"])
    ]
    line = "l kv | b n h c" if kinds == 2 else "l | b n h c"
    there = layouts.convert(plain, line, name, verify=True)
    expected = engine_caches.filled(name, sizes, data)
    known = {"b": sizes["B"], "n": sizes["N"]}
    out = engine_caches.empty(engine_caches.engine_layouts.make(**sizes)[name])
    to_sizes = known if "b" in engine_caches.axes_of(name) else None
    assert layouts.convert(plain, line, name, out=out, to_sizes=to_sizes) is out
    assert engine_caches.same(out, expected)
    back = layouts.convert(out, name, line, sizes=engine_caches.said(name, sizes), to_sizes=known)
    assert engine_caches.same(back, plain)
    assert b"".join(engine_caches.flat(there)) == b"".join(engine_caches.flat(expected))
