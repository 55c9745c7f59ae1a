"""The kernels of prefill compile without a device, for two generations, into what a GPU runs well."""

import itertools
import re

import pytest
from conftest import TARGETS
from ptx_texts import CACHES, SIZES, assemble, counted, texts_for

from kvkit_cuda.attention import prefill
from kvkit_cuda.device_runtime import device, memory

REGISTERS, GRAIN = 64 * 1024, 8 * 32  # of a multiprocessor; those of a warp are given by so many


def form(element="float16", cell=None, stored="{}", dim=128, value_dim=None, weighs=False):
    return prefill.form(element, stored.format(element), cell, dim, value_dim or dim, weighs)


# Each tile of rows and tokens, each element, and each kind of cache.
QUICK = [form(), form(cell="float16", stored="int4", weighs=True)]
EVERY = [
    form("bfloat16", "float32", "int8", 256),
    *(
        form(element, *cache, weighs=weighs)
        for element in ("float16", "bfloat16")
        for cache in CACHES
        for weighs in (0, 1)
    ),
    *(form(dim=dim, weighs=weighs) for dim in SIZES for weighs in (0, 1)),
    *(form("bfloat16", "bfloat16", "int8", dim) for dim in SIZES),
    *(form(dim=dim, value_dim=value_dim) for dim, value_dim in ((192, 128), (64, 256), (256, 16))),
]


def check(form, folder, capabilities):
    texts = texts_for(prefill.attend(form), prefill.SIGNATURE, capabilities)
    short = {"float16": "f16", "bfloat16": "bf16"}[form.element]
    for text, capability in zip(texts, capabilities, strict=True):
        assert f"mma.sync.aligned.m16n8k16.row.col.f32.{short}.{short}.f32" in text
        assert "ldmatrix.sync.aligned.m8n8.x4.shared.b16" in text
        assert "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16" in text
        assert re.search(r"cp\.async\.cg\.shared\.global \[%r\d+\], \[%rd\d+\], 16;", text)
        assert re.search(r"st\.global\.v(2\.\w64|4\.\w32)", text)
        if form.cell:
            wide = r"v2\.\w32|\w64" if form.stored == "int4" else r"v2\.\w64|v4\.\w32"
            assert re.search(rf"ld\.global\.nc\.({wide})", text)
            assert re.search(r"st\.shared\.v(2\.\w64|4\.\w32)", text)
        assert not re.search(r"\.f64|\.local\b|\bcall\b", text)
        frame, registers = assemble(text, capability, folder)
        assert frame == [0, 0, 0], capability
        assert (registers * 32 + -registers * 32 % GRAIN) * prefill.WARPS <= REGISTERS


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
    for dim, value_dim in itertools.product(SIZES, SIZES):
        for cell, weighs in itertools.product((None, "float16"), (0, 1)):
            stored = "int4" if cell else "float16"
            made = form(cell=cell, stored=stored, dim=dim, value_dim=value_dim, weighs=weighs)
            assert made.shared_bytes <= device.SHARED_MEMORY
            assert not made.stage_bytes % memory.LINE


def test_every_device_has_the_shared_memory():
    """CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": KiB of a block."""
    most = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
    assert set(most) == set(TARGETS)
    assert min(most.values()) * 1024 == device.SHARED_MEMORY


@pytest.mark.slow
@pytest.mark.perf
def test_instructions(tmp_path):
    """Of a GPU in the main loop, for a warp: 32 rows, 32 tokens, heads of 128."""
    products, instructions = counted(prefill.attend(form()), prefill.SIGNATURE, tmp_path)
    assert products == 128
    assert instructions <= 500
