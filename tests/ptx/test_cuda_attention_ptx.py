"""Every kernel of attention on CUDA compiles without a device, for two generations: no spills, wide loads."""

import re

import pytest
from conftest import TARGETS
from ptx_texts import CODES, MOVED, assemble, texts_for

from kvkit.checks.records import Context
from kvkit_cuda.attention import forms, merge, params, plain

FLOATS = ("float32", "float16", "bfloat16")


def form(packed, stored, cell, rows, dim=128, group=8, free=0, **more):
    """The form that a call takes whose arrays are aligned."""
    context = Context(packed, stored, cell, group, 2, dim, dim, (), 0, 0, **more)
    record = params.AttentionParams(free=free)
    return forms.form_of(record, context, rows)


FORMATS = [formats for formats in MOVED + CODES if formats[0] != "int8"]
FORMS = {form(*formats, rows) for formats in FORMATS for rows in (1, 2, 4, 8)}
FORMS |= {
    form(stored, stored, None, rows, dim)
    for stored in FLOATS
    for rows in (1, 8)
    for dim in (64, 256, 17, 576)
}
FORMS |= {
    form(*formats, rows, 128, group)
    for formats in (("float16", "int8", "float16"), ("bfloat16", "int4", "float32"))
    for rows in (1, 8)
    for group in (4, 128)
}
PAGES = form("float16", "float16", None, 4, free=1)
FORMS |= {
    PAGES,
    form("float16", "int8", "float32", 4, free=1, as_loaded=False),
    form("float16", "e4m3", "float32", 4, group=0),
    form("bfloat16", "e5m2", None, 8),
    form("float16", "q8_0", None, 4),
    form("bfloat16", "q4_0", None, 1),
    form("float32", "bfloat16", None, 8, free=1, as_loaded=False, value_stored="float32"),
    form("float16", "float16", None, 8, 72, free=1, as_loaded=False, elements=(32, 32)),
}
BITS = {"float32": 32, "int8": 8, "int4": 4, "e4m3": 8, "e5m2": 8}  # others have 16
# Decode of a usual model: heads of 128, groups of 4. Registers of a thread, given by 8, on the target that
# takes most (of pages 12.0, with 222); two blocks of 128 threads share a multiprocessor up to 255.
QUICK = {form("float16", "float16", None, 4): 200, form("float16", "int8", "float16", 4): 255, PAGES: 224}


def check(kernel, signature, folder, capabilities):
    """Its PTX, and the most registers of a thread."""
    most = 0
    texts = texts_for(kernel, signature, capabilities)
    for text, capability in zip(texts, capabilities, strict=True):
        assert ".target sm_{}{}\n".format(*capability) in text
        assert not re.search(r"\.f64|\.local\b|\bcall\b", text)
        frame, registers = assemble(text, capability, folder)
        assert frame == [0, 0, 0], capability
        most = max(most, registers)
    return texts, most


def check_form(made, folder, capabilities):
    texts, registers = check(plain.attend(made), plain.SIGNATURE, folder, capabilities)
    for text in texts:
        *sides, cell_bits = (BITS.get(element, 16) for element in (made.stored, made.values, made.cell))
        bits = 0 if made.blocks else max(sides)  # whose bytes lie anywhere
        wide = re.findall(r"ld\.global\.nc\.v(?:2\.\w64|4\.\w32)", text)
        assert (128 in (made.span * bits, made.cells * cell_bits)) == bool(wide)
        assert "fma.rn.f32" in text
        assert ("shfl.sync.bfly" in text) == (made.lanes > 1)
    return registers


@pytest.mark.parametrize(
    "made", [PAGES, *(pytest.param(made, marks=pytest.mark.slow) for made in QUICK if made != PAGES)], ids=str
)
def test_kernel(made, tmp_path, capabilities):
    assert made in FORMS
    assert made.span * {"float16": 16, "int8": 8}[made.stored] == 128
    assert check_form(made, tmp_path, capabilities) <= QUICK[made]


@pytest.mark.slow
@pytest.mark.parametrize("made", sorted(FORMS - set(QUICK), key=str), ids=str)
def test_every_other_kernel(made, tmp_path):
    check_form(made, tmp_path, TARGETS)


@pytest.mark.parametrize(
    "packed", ["float16", *(pytest.param(name, marks=pytest.mark.slow) for name in FLOATS[::2])]
)
def test_merge(packed, tmp_path, capabilities):
    _, registers = check(merge.merge_splits(packed), merge.SIGNATURE, tmp_path, capabilities)
    assert registers <= 64
    _, registers = check(merge.merge_states(packed), merge.STATES, tmp_path, capabilities)
    assert registers <= 128
