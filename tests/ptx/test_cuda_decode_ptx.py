"""The kernels of decode compile without a device, for two generations, into what a GPU runs well."""

import itertools
import re

import pytest
from conftest import TARGETS
from ptx_texts import CACHES, SIZES, assemble, counted, texts_for

from kvkit_cuda.attention import decode, decode_forms

SHARED_MEMORY = 48 * 1024  # of a block, without asking for more
# Of a thread: with up to 8 rows 3 blocks of 128 threads share a multiprocessor, with more rows 2 of them.
REGISTERS = {8: 168, 16: 255}


def form(
    element="float16", cell=None, stored="{}", group=8, dim=128, value_dim=None, rows=4, weighs=False, unit=16
):
    return decode_forms.form(
        element, stored.format(element), cell, group, dim, value_dim or dim, rows, weighs, unit
    )


# Decode of usual models: heads of 128 and 64, groups of 4 and 1, codes with scales of either path.
QUICK = [
    form(),
    form("bfloat16", dim=64, rows=1, weighs=True),
    form(cell="float16", stored="int8"),
]
EVERY = [
    form("bfloat16", cell="float32", stored="int4", group=32, rows=16),
    *(
        form(element, *cache, weighs=weighs)
        for element in ("float16", "bfloat16")
        for cache in CACHES
        for weighs in (0, 1)
    ),
    *(form(dim=dim, rows=rows) for dim in SIZES for rows in (8, 16) if rows == 8 or dim <= decode_forms.DIM),
    *(form("bfloat16", "bfloat16", "int8", 16, dim) for dim in SIZES if dim % 32 == 0),  # scales in words
    form("bfloat16", "float16", "int4", 32, unit=4),
    *(form("float16", "float16", "int8", group, 240) for group in (24, 48, 80)),
    *(form(dim=dim, value_dim=value_dim) for dim, value_dim in ((192, 128), (64, 256), (256, 16))),
]


def check(form, folder, capabilities):
    texts = texts_for(decode.attend(form), decode.SIGNATURE, capabilities)
    short = {"float16": "f16", "bfloat16": "bf16"}[form.element]
    for text, capability in zip(texts, capabilities, strict=True):
        assert f"mma.sync.aligned.m16n8k16.row.col.f32.{short}.{short}.f32" in text
        assert "movmatrix.sync.aligned.m8n8.trans.b16" in text
        assert re.search(r"cp\.async\.cg\.shared\.global \[%r\d+\], \[%rd\d+\], 16;", text)
        assert f"cp.async.wait_group {form.stages - 1};" in text
        if form.keys.cell:
            if form.keys.unit == 4:
                assert re.search(r"cp\.async\.ca\.shared\.global \[%r\d+\], \[%rd\d+\], 4;", text)
        else:
            assert re.search(r"ld\.shared\.v(2\.\w64|4\.\w32)", text)
        assert not re.search(r"\.f64|\.local\b|\bcall\b", text)
        frame, registers = assemble(text, capability, folder)
        assert frame == [0, 0, 0], capability
        usual = max(form.keys.dim, form.values.dim) <= decode_forms.DIM
        assert registers <= (REGISTERS[form.rows] if usual else 255)
    assert form.shared_bytes <= SHARED_MEMORY


@pytest.mark.parametrize(
    "form", [*(pytest.param(made, marks=pytest.mark.slow) for made in QUICK[:-1]), QUICK[-1]], ids=str
)
def test_kernel(form, tmp_path, capabilities):
    check(form, tmp_path, capabilities)


@pytest.mark.slow
@pytest.mark.parametrize("form", dict.fromkeys(form for form in EVERY if form not in QUICK), ids=str)
def test_every_other_kernel(form, tmp_path):
    check(form, tmp_path, TARGETS)


def test_every_size_fits():
    for dim, value_dim, cache in itertools.product(SIZES, SIZES, CACHES):
        made = form("float16", *cache, dim=dim, value_dim=value_dim)
        assert made.shared_bytes <= SHARED_MEMORY
        assert made.stages >= 1


# Instructions of a GPU in the main loop, for a warp: 16 tokens, heads of 128, scales of 8 codes each.
LOOPS = {
    "float16": (None, "float16", 16, 300),
    "int8": ("float16", "int8", 16, 600),
    "int4": ("float16", "int4", 16, 445),
}


@pytest.mark.slow
@pytest.mark.perf
@pytest.mark.parametrize("stored", LOOPS)
def test_instructions(stored, tmp_path):
    cell, stored, expected, most = LOOPS[stored]
    kernel = decode.attend(form(cell=cell, stored=stored))
    products, instructions = counted(kernel, decode.SIGNATURE, tmp_path)
    assert products == expected
    assert instructions <= most
