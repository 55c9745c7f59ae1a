"""The kernels of decode compile without a device, for two generations, into what a GPU runs well."""

import itertools
import re

import pytest
from test_cuda_prefill_ptx import SHARED_MEMORY, SIZES
from test_cuda_ptx import CAPABILITIES, assemble

from kvkit_cuda import decode, device

# Of a thread, so that 4 or 3 blocks of 128 threads share a multiprocessor, or it makes no difference to them.
REGISTERS = {8: 128, 16: 168}


def form(element="float16", cell=None, stored="{}", group=8, dim=128, value_dim=None, rows=4, weighs=False):
    return decode.form(element, stored.format(element), cell, group, dim, value_dim or dim, rows, weighs)


# Decode of usual models: heads of 128 and 64, groups of 4 and 1; then each size, and each number of rows.
QUICK = [form(), form("bfloat16", dim=64, rows=1, weighs=True)]
EVERY = [
    *(form(element, weighs=weighs) for element in ("float16", "bfloat16") for weighs in (0, 1)),
    *(form(dim=dim, rows=rows) for dim in SIZES for rows in (8, 16) if rows == 8 or dim <= decode.DIM),
    *(form(dim=dim, value_dim=value_dim) for dim, value_dim in ((192, 128), (64, 256), (256, 16))),
]


def check(form, folder):
    texts = device.ptx(decode.attend(form), decode.SIGNATURE, CAPABILITIES)
    short = {"float16": "f16", "bfloat16": "bf16"}[form.element]
    for text, capability in zip(texts, CAPABILITIES, strict=True):
        assert f"mma.sync.aligned.m16n8k16.row.col.f32.{short}.{short}.f32" in text
        assert "movmatrix.sync.aligned.m8n8.trans.b16" in text
        assert re.search(r"cp\.async\.cg\.shared\.global \[%r\d+\], \[%rd\d+\], 16,", text)
        assert f"cp.async.wait_group {2 * form.stages - 1};" in text
        assert re.search(r"ld\.shared\.v(2\.\w64|4\.\w32)", text)
        assert not re.search(r"\.f64|\.local\b|\bcall\b", text)
        frame, registers = assemble(text, capability, folder)
        assert frame == [0, 0, 0], form
        assert registers <= (REGISTERS[form.rows] if form.keys.dim <= decode.DIM else 255)
    assert form.shared_bytes <= SHARED_MEMORY


@pytest.mark.parametrize("form", QUICK, ids=str)
def test_kernel(form, tmp_path):
    check(form, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("form", dict.fromkeys(form for form in EVERY if form not in QUICK), ids=str)
def test_every_other_kernel(form, tmp_path):
    check(form, tmp_path)


def test_every_size_fits():
    for dim, value_dim in itertools.product(SIZES, SIZES):
        assert form(dim=dim, value_dim=value_dim).shared_bytes <= SHARED_MEMORY
