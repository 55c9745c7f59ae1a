"""How many instructions of a GPU the main loops of attention take, for a warp."""

import pytest
import test_cuda_decode_ptx
import test_cuda_prefill_ptx
from sass import main_loop
from test_cuda_ptx import assemble

from kvkit_cuda.attention import decode, prefill
from kvkit_cuda.device_runtime import device

pytestmark = [pytest.mark.slow, pytest.mark.perf]
CAPABILITY = 9, 0
DECODE = {
    "float16": (None, "float16", 16, 300),
    "int8": ("float16", "int8", 16, 600),
    "int4": ("float16", "int4", 16, 445),
}


def counted(kernel, signature, folder):
    (text,) = device.ptx(kernel, signature, [CAPABILITY])
    assemble(text, CAPABILITY, folder)
    return main_loop(folder / "kernel.cubin")


def test_prefill(tmp_path):
    """32 rows, 32 tokens, heads of 128."""
    form = test_cuda_prefill_ptx.form()
    products, instructions = counted(prefill.attend(form), prefill.SIGNATURE, tmp_path)
    assert products == 128
    assert instructions <= 500


@pytest.mark.parametrize("stored", DECODE)
def test_decode(stored, tmp_path):
    """16 tokens, heads of 128, scales of 8 codes each."""
    cell, stored, expected, most = DECODE[stored]
    form = test_cuda_decode_ptx.form(cell=cell, stored=stored)
    products, instructions = counted(decode.attend(form), decode.SIGNATURE, tmp_path)
    assert products == expected
    assert instructions <= most
