"""Run a few lines in a warp, and check calls, for the suites of kernels for tensor cores."""

import attention_scenes
import ml_dtypes
import numpy as np
import pytest
from attention_scenes import FP16
from numba import cuda, types

import kvkit
from kvkit_cuda.device_runtime import device, host

slow = pytest.mark.slow
elements = pytest.mark.parametrize("element", ["float16", "bfloat16"])
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
U32, F32 = types.Array(types.uint32, 2, "C"), types.Array(types.float32, 2, "C")
ONE = {"batch": 1, "heads": 2, "kv_heads": 1, "dim": 16}


def run(kernel, *signature, arrays):
    """Run a kernel in one warp; return its arrays."""
    there = [cuda.to_device(array) for array in arrays]
    host.launch(device.kernel(kernel, types.void(*signature)), (1, 1), (32, 1), host.stream(None), there)
    return [array.copy_to_host() for array in there]


def word(pair):
    """Return two 16-bit elements as a word, the first one in the low half."""
    low, high = (int(np.asarray(x).view(np.uint16)) for x in pair)
    return low | high << 16


def forms_taken(module, monkeypatch):
    """Return a list that gets the forms of a module's kernels which calls choose from now on."""
    forms, compiled = [], module.compiled
    monkeypatch.setattr(module, "compiled", lambda form: forms.append(form) or compiled(form))
    return forms


def check(call, taken, usual=True):
    """Check results against the oracle and the CPU, and that `taken` has a kernel."""
    output, lse = attention_scenes.check(call, usual)
    twin, twin_lse = call.run(kvkit, return_lse=True)
    tolerance = attention_scenes.TOLERANCE[str(output.dtype)]
    attention_scenes.assert_near(output, twin.astype(np.float64), tolerance, "beside the twin, output")
    attention_scenes.assert_near(lse, twin_lse.astype(np.float64), tolerance, "beside the twin, lse")
    assert taken
    return output


def static(rng, formats=FP16, past=20, seqlen=10, **options):
    return attention_scenes.static(rng, formats, past, seqlen, **ONE | options)
