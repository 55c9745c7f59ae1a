"""kvkit_cuda where there is no device: its face, and its suite in the simulator, in a process of its own."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvkit
import kvkit_cuda
from kvkit import KvkitError

TESTS = Path(__file__).parents[1]
TWINS = [
    (getattr(twin, name), getattr(module, name))
    for twin, module in ((kvkit, kvkit_cuda), (kvkit.dynamic_batching, kvkit_cuda.dynamic_batching))
    for name in module.__all__
    if inspect.isfunction(getattr(module, name))
]
# The errors of the CPU twin; one of them interrupts that twin's own launches.
ERRORS = ("test_errors.py", "test_index_errors.py", "test_memory_errors.py")
NOT_THE_TWIN = "not test_nothing_is_stored_if_the_load_cannot_be_prepared"
# Simulated threads compute as numpy does, which warns of infinity.
KERNELS = ("kvkit_cuda.attend.plain", "kvkit_cuda.attend.merge")
QUIET = [word for kernel in KERNELS for word in ("-W", f"ignore::RuntimeWarning:{kernel}")]


def passed(*arguments, **environment):
    """Run pytest in a process of its own; every test that it finds passes, and this is how many there are."""
    arguments = [str(next(TESTS.rglob(word))) if word.endswith(".py") else word for word in arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = done.stdout.splitlines()[-1]
    assert re.match(r"\d+ passed", summary), summary
    assert "skipped" not in summary
    return int(summary.split()[0])


def simulated(*arguments):
    """The same in the CUDA simulator."""
    return passed(*QUIET, *arguments, NUMBA_ENABLE_CUDASIM="1")


def test_in_the_simulator():
    assert simulated("cuda_simulated.py", "cuda_outputs.py", "-m", "not slow") > 80


def test_attention_in_the_simulator():
    assert simulated("-p", "cuda_twin", "cuda_attention.py", "-m", "not slow") > 30


@pytest.mark.slow
def test_every_format_in_the_simulator():
    assert simulated("cuda_simulated.py", "-m", "slow") > 50


@pytest.mark.slow
def test_attention_of_every_format_in_the_simulator():
    assert simulated("-p", "cuda_twin", "cuda_attention.py", "-m", "slow") > 50


@pytest.mark.slow
def test_attention_suites_of_the_cpu_twin_in_the_simulator():
    assert simulated("-p", "cuda_twin", "test_attention_errors.py", "test_attention_vectors.py") > 1100


def test_errors_in_the_simulator():
    assert simulated("-p", "cuda_twin", *ERRORS, "-k", NOT_THE_TWIN) > 500


@pytest.mark.slow
def test_the_suite_of_the_cpu_twin_in_the_simulator():
    assert simulated("-p", "cuda_twin", "test_key_value_cache.py", "test_properties.py") > 800


@pytest.mark.parametrize("twins", TWINS, ids=lambda twins: f"{twins[0].__module__}.{twins[0].__name__}")
def test_the_twins_take_and_explain_the_same(twins):
    cpu, cuda = (dict(inspect.signature(function).parameters) for function in twins)
    own = {"stream": None} | ({"check": True} if twins[0] is kvkit.dynamic_batching.plan else {})
    for name, default in own.items():
        parameter = cuda.pop(name)
        assert (parameter.kind, parameter.default) == (inspect.Parameter.KEYWORD_ONLY, default)
    assert list(cpu.values()) == list(cuda.values())
    for name in (*cuda, *own):
        assert re.search(rf"\b{name}\b", inspect.getdoc(twins[1]))


def test_the_twins_have_the_same_names():
    assert kvkit_cuda.__all__ == kvkit.__all__
    for module in ("ascend", "dynamic_batching"):
        assert getattr(kvkit_cuda, module).__all__ == getattr(kvkit, module).__all__


SCRIPT = """
import sys
import kvkit_cuda
assert not [name for name in sys.modules if name.startswith(("numba", "cuda"))]
import numpy as np
new = np.ones((1, 3, 2, 8), np.float32)
cache = np.zeros((1, 1, 2, 16, 2, 8), np.float16)
steps = [0, 3], [0, 3], [0], [0], 3, 3
calls = [
    (kvkit_cuda.key_value_cache, (new, new, 0, cache)),
    (kvkit_cuda.dynamic_batching.key_value_cache, (new[0], new[0], *steps, cache[0])),
    (kvkit_cuda.multi_head_attention, (new, new, new)),
    (kvkit_cuda.multi_head_cache_attention, (new, new, new, 0, cache)),
    (kvkit_cuda.dynamic_batching.plan, steps[:4]),
    (kvkit_cuda.merge_attention_states, ([new], [new[..., 0]])),
]
for operator, arguments in calls:
    sizes = {"num_heads": 2, "head_dim": 8} if operator.__name__.startswith("multi") else {}
    try:
        operator(*arguments, **sizes)
    except kvkit_cuda.DeviceError as error:
        print(error)
assert not cache.any()
"""


def test_without_a_device():
    """Importing needs no Numba; a call needs a device, and says how to get one."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    messages = done.stdout.splitlines()
    assert len(messages) == 6
    for message in messages:
        assert message.startswith("kvkit_cuda: expected an NVIDIA GPU")
        assert "pip install 'kvkit-kernels[cuda]'" in message
    assert issubclass(kvkit_cuda.DeviceError, KvkitError)
