"""The position operators of kvkit_cuda where there is no device: their face, the simulator, PTX."""

import inspect
import re

import pytest
from test_cuda import simulated
from test_cuda_ptx import CAPABILITIES, REGISTERS, assemble

import kvkit
import kvkit_cuda
from kvkit_cuda.ground import device
from kvkit_cuda.positions import alibi, angles, index, rotary

TWIN = ("-p", "cuda_positions_twin")
# What those look at is the CPU's: its vectors and its threads, its formulas, what a call costs.
OF_THE_CPU = "plain or both_forms or threads or microseconds or same_bits or cosines"
FLOATS = ("float32", "float16", "bfloat16")
TWINS = [
    (getattr(kvkit, name), getattr(kvkit_cuda, name))
    for name in ("alibi_slope", "alibi_mask", "rotary_position_embedding")
] + [
    (getattr(kvkit.dynamic_batching, name), getattr(kvkit_cuda.dynamic_batching, name))
    for name in ("position_index", "alibi_mask", "rotary_position_embedding")
]


def test_in_the_simulator():
    assert simulated("cuda_positions.py", "-m", "not slow") > 60


@pytest.mark.slow
def test_every_format_in_the_simulator():
    assert simulated("cuda_positions.py", "-m", "slow") > 10


@pytest.mark.slow
def test_errors_in_the_simulator():
    assert simulated(*TWIN, "test_position_errors.py") > 300


@pytest.mark.slow
@pytest.mark.parametrize(("part", "count"), [("rotary", 70), ("not rotary", 60)])
def test_the_suite_of_the_cpu_twin_in_the_simulator(part, count):
    assert simulated(*TWIN, "test_positions.py", "-k", f"{part} and not ({OF_THE_CPU})") > count


@pytest.mark.parametrize("twins", TWINS, ids=lambda twins: f"{twins[0].__module__}.{twins[0].__name__}")
def test_the_twins_take_and_explain_the_same(twins):
    cpu, cuda = (dict(inspect.signature(function).parameters) for function in twins)
    stream = cuda.pop("stream")
    assert (stream.kind, stream.default) == (inspect.Parameter.KEYWORD_ONLY, None)
    assert list(cpu.values()) == list(cuda.values())
    for name in (*cuda, "stream"):
        assert re.search(rf"\b{name}\b", inspect.getdoc(twins[1]))


# Kernels

MASKS = (None, "bool", *FLOATS)
QUICK = {
    "angles": (angles.walk, angles.SIGNATURE),
    "position index": (index.walk, index.SIGNATURE),
    "rotary float32 4": (rotary.walk("float32", 4), rotary.SIGNATURE),
    "rotary float16 8": (rotary.walk("float16", 8), rotary.SIGNATURE),
    "rotary bfloat16 2": (rotary.walk("bfloat16", 2), rotary.SIGNATURE),
    "alibi float32 None 4": (alibi.walk("float32", None, 4), alibi.SIGNATURE),
    "alibi bfloat16 float16 8": (alibi.walk("bfloat16", "float16", 8), alibi.SIGNATURE),
    "alibi float16 bool 1": (alibi.walk("float16", "bool", 1), alibi.SIGNATURE),
}
OTHERS = [("rotary", element, span) for element in FLOATS for span in (rotary.widest(element), 2)]
OTHERS += [("alibi", e, mask, span) for e in FLOATS for mask in MASKS for span in (rotary.widest(e), 1)]
OTHERS = [variant for variant in OTHERS if " ".join(map(str, variant)) not in QUICK]


def check(name, walk, signature, folder):
    """No spills, no float64 but in the angles, no fused sums, and 16 bytes in one instruction."""
    wide = name.endswith((" 4", " 8"))
    for text, capability in zip(device.ptx(walk, signature, CAPABILITIES), CAPABILITIES, strict=True):
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
def test_kernel(name, tmp_path):
    check(name, *QUICK[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("variant", OTHERS, ids=str)
def test_every_other_kernel(variant, tmp_path):
    module = rotary if variant[0] == "rotary" else alibi
    check(" ".join(map(str, variant)), module.walk(*variant[1:]), module.SIGNATURE, tmp_path)
