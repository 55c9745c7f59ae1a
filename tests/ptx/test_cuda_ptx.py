"""Every kernel of kvkit_cuda compiles without a device, for two generations, into what a GPU runs well."""

import re

import pytest
from conftest import TARGETS
from ptx_texts import CODES, FAMILIES, FLOATS, MOVED, REGISTERS, assemble, retargeted, target, texts_for

from kvkit.formats import BY_NAME
from kvkit.formats.elements import BLOCKS, FLOATS8
from kvkit_cuda.copy import chunks, transfer
from kvkit_cuda.device_runtime import device

VARIANTS = [
    (direction, *formats, span(formats))
    for formats in MOVED + CODES
    for direction in ("store", "load")
    for span in (lambda f: chunks.widest(f[0], f[1]), lambda f: chunks.smallest(f[1]))
]
VARIANTS += [
    (direction, packed, stored, cell, span, given)
    for stored, cell, given, span in (
        ("e4m3", None, False, 8), ("e5m2", None, False, 1), ("e4m3", "float32", False, 8),
        ("e4m3", "float32", True, 8), ("e5m2", "float16", True, 1),
    )
    for packed in ("float16", "bfloat16")
    for direction in ("store", "load")
] + [
    (direction, packed, stored, None, 32, False)
    for stored in ("q8_0", "q4_0")
    for packed in ("float16", "float32")
    for direction in ("store", "load")
]  # fmt: skip
# Each function of each format once, in each chunk size.
QUICK = [
    ("store", "float32", "float16", None, 4),
    ("load", "bfloat16", "float32", None, 1),
    ("load", "int8", "int8", None, 16),
    ("store", "float16", "int8", "float32", 8),
    ("store", "bfloat16", "int4", "float16", 2),
    ("load", "float16", "int4", "bfloat16", 8),
    ("load", "float32", "int8", "float16", 1),
    ("store", "float16", "e4m3", "float32", 8, True),
    ("store", "float16", "q4_0", None, 32, False),
]


def check(variant, folder, capabilities):
    direction, packed, stored, cell, span, *_ = variant
    texts = texts_for(transfer.copy_tokens(*variant), transfer.SIGNATURE, capabilities)
    for text, capability in zip(texts, capabilities, strict=True):
        assert ".target sm_{}{}\n".format(*capability) in text
        assert ".f64" not in text
        assert not re.search(r"\.ftz|\.approx|div\.full|\.local\b|\bcall\b", text)
        if span == chunks.widest(packed, stored) and not BY_NAME[stored].block:
            sides = (packed, stored) if direction == "store" else (stored, packed)
            for side, access in zip(sides, ("ld.global.nc", "st.global"), strict=True):
                if chunks.access(side, span)[0] == 16:
                    assert re.search(access.replace(".", r"\.") + r"\.v(2\.\w64|4\.\w32)", text)
        if cell and direction == "store":
            assert "div.rn.f32" in text
            assert variant[-1] is True or "shfl.sync.bfly" in text
        frame, registers = assemble(text, capability, folder)
        assert frame == [0, 0, 0]
        assert registers <= REGISTERS


@pytest.mark.parametrize("variant", QUICK, ids=str)
def test_kernel(variant, tmp_path, capabilities):
    assert variant in VARIANTS
    check(variant, tmp_path, capabilities)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant not in QUICK], ids=str)
def test_every_other_kernel(variant, tmp_path):
    check(variant, tmp_path, TARGETS)


def test_families(tmp_path):
    """What is compiled for one compute capability of a family is what is compiled for each.

    numba-cuda asks for features of the very device from 9.0 on, as in sm_90a: they change nothing.
    """
    kernel = transfer.copy_tokens("load", "int8", "int8", None, 16)
    launched = [(*each, "a") for each in TARGETS if each >= (9, 0)]
    every = TARGETS + launched
    texts = dict(zip(every, device.ptx(kernel, transfer.SIGNATURE, every), strict=True))
    for each, text in texts.items():
        first = max(first for first in FAMILIES if first <= each)
        assert text == retargeted(texts[first], each)
    for each in launched:
        assert f".target {target(each)}\n" in texts[each]
        assert assemble(texts[each], each, tmp_path) == assemble(texts[each[:2]], each[:2], tmp_path)


def test_all_variants_are_known():
    """A format that is new to the package is new to these tests."""
    assert len(set(VARIANTS)) == len(VARIANTS) == 2 * 2 * (10 + 18) + 2 * 2 * 5 + 2 * 2 * 2
    assert set(chunks.ENCODE) == {*FLOATS, *map(str, FLOATS8), "int8"}
    assert {name for variant in VARIANTS for name in variant[1:3]} == {*chunks.DECODE, *map(str, BLOCKS)}
