"""The kernels of the position operators compile without a device, into what a GPU runs well."""

import re

import pytest
from conftest import TARGETS
from ptx_texts import REGISTERS, assemble, texts_for

from kvkit_cuda.positions import alibi, angles, index, rotary

FLOATS = ("float32", "float16", "bfloat16")
MASKS = (None, "bool", *FLOATS)
QUICK = {
    "angles": (angles.compute_table, angles.SIGNATURE),
    "look up": (angles.look_up, angles.LOOK_UP),
    "position index": (index.write_positions, index.SIGNATURE),
    "rotary float32 4": (rotary.rotate_tokens("float32", 4), rotary.SIGNATURE),
    "rotary float16 8": (rotary.rotate_tokens("float16", 8), rotary.SIGNATURE),
    "rotary halves 8": (rotary.rotate_tokens("float16", 8, True), rotary.SIGNATURE),
    "rotary bfloat16 2": (rotary.rotate_tokens("bfloat16", 2), rotary.SIGNATURE),
    "alibi float32 None 4": (alibi.write_mask("float32", None, 4), alibi.SIGNATURE),
    "alibi bfloat16 float16 8": (alibi.write_mask("bfloat16", "float16", 8), alibi.SIGNATURE),
    "alibi float16 bool 1": (alibi.write_mask("float16", "bool", 1), alibi.SIGNATURE),
}
OTHERS = [("rotary", element, span) for element in FLOATS for span in (rotary.widest(element), 2)]
OTHERS += [("rotary", element, span, True) for element in FLOATS for span in (rotary.widest(element), 1)]
OTHERS += [("alibi", e, mask, span) for e in FLOATS for mask in MASKS for span in (rotary.widest(e), 1)]
OTHERS = [variant for variant in OTHERS if " ".join(map(str, variant)) not in QUICK]


def check(name, walk, signature, folder, capabilities):
    """No spills, no float64 but in the angles, no fused sums, and 16 bytes in one instruction."""
    wide = name.endswith((" 4", " 8"))
    for text, capability in zip(texts_for(walk, signature, capabilities), capabilities, strict=True):
        assert (".f64" in text) is (name == "angles")
        assert not re.search(r"\.ftz|\.approx|div\.full|\.local\b|\bcall\b", text)
        assert not re.search(r"fma\.\w+\.f32", text)
        assert ("mul.rn.f32" in text) is name.startswith(("rotary", "alibi"))
        for access in (r"ld\.global", r"ld\.global\.nc", r"st\.global"):
            if wide and (name.startswith("rotary") or access.startswith("st")):
                assert re.search(access + r"\.v(2\.\w64|4\.\w32)", text)
        frame, registers = assemble(text, capability, folder)
        assert frame == [0, 0, 0]
        assert registers <= REGISTERS


@pytest.mark.parametrize("name", QUICK)
def test_kernel(name, tmp_path, capabilities):
    check(name, *QUICK[name], tmp_path, capabilities)


@pytest.mark.slow
@pytest.mark.parametrize("variant", OTHERS, ids=str)
def test_every_other_kernel(variant, tmp_path):
    module = rotary if variant[0] == "rotary" else alibi
    kernel = rotary.rotate_tokens if module is rotary else alibi.write_mask
    check(" ".join(map(str, variant)), kernel(*variant[1:]), module.SIGNATURE, tmp_path, TARGETS)
