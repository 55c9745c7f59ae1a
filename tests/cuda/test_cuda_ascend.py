"""`kvkit_cuda.ascend` where there is no device: its face, its suite in the simulator, its kernels' PTX."""

import inspect
import re

import pytest
from test_cuda import simulated
from test_cuda_ptx import CAPABILITIES, REGISTERS, assemble

from kvkit import ascend as twin
from kvkit_cuda import ascend
from kvkit_cuda.attend import bias
from kvkit_cuda.ground import device
from kvkit_cuda.moves import means, pieces

OPERATORS = (
    "reshape_and_cache",
    "paged_cache_load",
    "block_copy",
    "nd_to_nz",
    "nz_to_nd",
    "paged_attention",
)
TWIN = ("-p", "cuda_ascend_twin")
# A cache of 4 GiB, which is not copied for a test: `cuda_ascend.py` has it on the device.
OF_THE_HOST = "not test_offsets_of_more_than_32_bits"
# Threads of the host; heads and sizes at random, for each of which the simulator compiles for a minute; and
# how near operators are to each other, which with tensor cores they are by fewer bits.
OF_THE_CPU = "threads or random or gathered_rows"
FLOATS = ("float32", "float16", "bfloat16")
ERRORS = ("test_ascend_errors.py", "test_ascend_index_errors.py", "test_ascend_attention_errors.py")


def test_in_the_simulator():
    files = "cuda_ascend.py", "cuda_ascend_attention.py", "test_ascend_vectors.py", "test_ascend_limits.py"
    assert simulated(*TWIN, *files, "-m", "not slow", "-k", "not v15_attention") > 245


@pytest.mark.slow
def test_more_attention_in_the_simulator():
    assert simulated("cuda_ascend_attention.py", "-m", "slow") > 10
    assert simulated(*TWIN, "test_ascend_vectors.py", "-k", "v15_attention") > 2


@pytest.mark.slow
def test_errors_in_the_simulator():
    assert simulated(*TWIN, *ERRORS) > 750


@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "count"),
    [
        (("test_ascend.py", "test_ascend_blocks.py"), 35),
        (("test_ascend_means.py", "test_ascend_properties.py"), 55),
        (("test_ascend_views.py", "-k", OF_THE_HOST), 50),
        (("test_ascend_attention.py", "-k", f"not ({OF_THE_CPU})"), 110),
    ],
)
def test_the_suite_of_the_cpu_twin_in_the_simulator(files, count):
    assert simulated(*TWIN, *files) > count


@pytest.mark.parametrize("name", OPERATORS)
def test_the_twins_take_and_explain_the_same(name):
    cpu, cuda = (dict(inspect.signature(getattr(of, name)).parameters) for of in (twin, ascend))
    stream = cuda.pop("stream")
    assert (stream.kind, stream.default) == (inspect.Parameter.KEYWORD_ONLY, None)
    assert list(cpu.values()) == list(cuda.values())
    for argument in (*cuda, "stream"):
        assert re.search(rf"\b{argument}\b", inspect.getdoc(getattr(ascend, name)))


def test_all_of_the_twin_is_there():
    assert ascend.__all__ == sorted(twin.__all__)


def test_index_tensors_are_made_on_the_host():
    for name in set(ascend.__all__) - set(OPERATORS):
        assert getattr(ascend, name) is getattr(twin, name)


# Kernels

KERNELS = {f"move {size}": (pieces.walk, size, pieces.SIGNATURE) for size in (16, 8, 4, 2, 1)}
KERNELS["bias"] = (lambda _: bias.walk, None, bias.SIGNATURE)
KERNELS |= {f"mean {element}": (means.walk, element, means.SIGNATURE) for element in FLOATS}


QUICK = ("move 16", "move 1", "mean float16", "bias")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in KERNELS]
)
def test_kernel(name, tmp_path):
    """No spills, no float64, and moves of 16 bytes in one instruction."""
    walk, variant, signature = KERNELS[name]
    for text, capability in zip(
        device.ptx(walk(variant), signature, CAPABILITIES), CAPABILITIES, strict=True
    ):
        assert not re.search(r"\.f64|\.ftz|\.approx|div\.full|\.local\b|\bcall\b", text)
        if variant == 16:
            for access in (r"ld\.global\.nc", r"st\.global"):
                assert re.search(access + r"\.v(2\.\w64|4\.\w32)", text)
        if variant is None:
            assert "mul.rn.f32" in text
        if walk is means.walk:
            assert "div.rn.f32" in text
            assert not re.search(r"\bfma\.", text)
            assert len(re.findall(r"ld\.global\.nc", text)) > means.AHEAD  # of one element before the next
        frame, registers = assemble(text, capability, tmp_path)
        assert frame == [0, 0, 0]
        assert registers <= REGISTERS
