"""The face of kvkit_cuda: the names, arguments and words of kvkit; what it says where there is no device."""

import inspect
import os
import re
import subprocess
import sys

import pytest

import kvkit
import kvkit_cuda
from kvkit import KvkitError
from kvkit.operators import OPERATORS

MODULES = [(kvkit, kvkit_cuda)] + [
    (getattr(kvkit, name), getattr(kvkit_cuda, name)) for name in ("ascend", "dynamic_batching")
]
TWINS = [
    (getattr(twin, name), getattr(module, name))
    for twin, module in MODULES
    for name in module.__all__
    if inspect.isfunction(getattr(module, name)) and getattr(module, name) is not getattr(twin, name)
]


@pytest.mark.parametrize("twins", TWINS, ids=lambda twins: f"{twins[0].__module__}.{twins[0].__name__}")
def test_the_twins_take_and_explain_the_same(twins):
    cpu, cuda = (dict(inspect.signature(function).parameters) for function in twins)
    of_plans = {kvkit.dynamic_batching.plan: {"check": True, "into": None}, kvkit.paged_plan: {"into": None}}
    own = {"stream": None} | of_plans.get(twins[0], {})
    for name, default in own.items():
        parameter = cuda.pop(name)
        assert (parameter.kind, parameter.default) == (inspect.Parameter.KEYWORD_ONLY, default)
    assert list(cpu.values()) == list(cuda.values())
    for name in (*cuda, *own):
        assert re.search(rf"\b{name}\b", inspect.getdoc(twins[1]))


def test_the_twins_have_the_same_names():
    alone = {"Rope", "mla_scale", *kvkit.CACHES, *kvkit.TOOLS}
    for twin, module in MODULES:
        assert set(module.__all__) | alone == set(twin.__all__) | alone  # what the CPU alone has


def test_only_what_makes_index_tensors_is_the_cpus():
    operators = {name.removeprefix("ascend.") for name in OPERATORS if name.startswith("ascend.")}
    for name in kvkit.ascend.__all__:
        same = getattr(kvkit_cuda.ascend, name) is getattr(kvkit.ascend, name)
        assert same is (name not in operators)
    assert len(TWINS) == len(OPERATORS) + 2  # and the plans of a step and of pages


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
        assert message.startswith(
            "kvkit_cuda: expected an NVIDIA GPU and its driver, got no driver (libcuda): "
        )
        assert "install NVIDIA's driver" in message
    assert issubclass(kvkit_cuda.DeviceError, KvkitError)
