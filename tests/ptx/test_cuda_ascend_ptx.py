"""The kernels of `kvkit_cuda.ascend` compile without a device, into what a GPU runs well."""

import re

import pytest
from ptx_texts import REGISTERS, assemble, texts_for

from kvkit_cuda.attention import bias
from kvkit_cuda.copy import means, pieces

FLOATS = ("float32", "float16", "bfloat16")
KERNELS = {f"move {size}": (pieces.copy_pieces, (size,), pieces.SIGNATURE) for size in (16, 8, 4, 2, 1)}
CODES = {"given": ("float16", "e4m3", "float32", 8, True), "found": ("bfloat16", "int8", "float16", 8, False)}
KERNELS |= {
    f"codes {name}": (pieces.copy_pieces, variant, pieces.SIGNATURE) for name, variant in CODES.items()
}
KERNELS["bias"] = (lambda _: bias.copy_bias, None, bias.SIGNATURE)
KERNELS |= {f"mean {element}": (means.average_rows, element, means.SIGNATURE) for element in FLOATS}
QUICK = ("move 16", "codes found", "mean float16", "bias")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in KERNELS]
)
def test_kernel(name, tmp_path, capabilities):
    """No spills, no float64, and moves of 16 bytes in one instruction."""
    walk, variant, signature = KERNELS[name]
    for text, capability in zip(texts_for(walk(variant), signature, capabilities), capabilities, strict=True):
        assert not re.search(r"\.f64|\.ftz|\.approx|div\.full|\.local\b|\bcall\b", text)
        if variant == (16,):
            for access in (r"ld\.global\.nc", r"st\.global"):
                assert re.search(access + r"\.v(2\.\w64|4\.\w32)", text)
        if variant is None:
            assert "mul.rn.f32" in text
        if walk is means.average_rows:
            assert "div.rn.f32" in text
            assert not re.search(r"\bfma\.", text)
            assert len(re.findall(r"ld\.global\.nc", text)) > means.AHEAD  # of one element before the next
        frame, registers = assemble(text, capability, tmp_path)
        assert frame == [0, 0, 0]
        assert registers <= REGISTERS
