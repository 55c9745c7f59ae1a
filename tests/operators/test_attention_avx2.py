"""The same attention where the CPU has no vectors of 64 bytes."""

import os
import platform
import subprocess
import sys

import llvmlite.binding
import pytest

FEATURES = "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+sse4.2,+popcnt"
SCRIPT = """
import numpy as np
import attention_scenes as scenes
from kvkit.runtime.jit import cpu_target
from kvkit.tools.vectors.calls import static_mask

assert "haswell" in cpu_target.target_context.codegen().magic_tuple()
rng = np.random.default_rng(0)
{calls}
print("near enough")
"""
CALLS = {
    "floats": """
scenes.check(scenes.dynamic_cache(rng, scenes.FP16, [(0, 40), (700, 1), (9, 5)], heads=8, kv_heads=2, dim=80))
scenes.check(scenes.dynamic(rng, scenes.BF16, is_alibi=True, dim=17, value_dim=5))
call = scenes.static(rng, scenes.FP32, 70, 9, window=(40, -1), softcap=3.0, sinks=np.ones(4, np.float32))
scenes.check(call.but(attn_mask=static_mask(rng, call, (4, 9), pad=3)))
""",
    "caches": """
scenes.check(scenes.dynamic_cache(rng, scenes.INT8, [(0, 40), (700, 1), (9, 5)], heads=8, kv_heads=2, dim=80))
""",
    "codes": """
for bits, group, cell in ((4, 2, "fp16"), (4, 32, "fp32"), (4, 64, "bf16"), (8, 128, "bf16")):
    formats = scenes.Formats("fp32", "int8", cell, bits, group)
    scenes.check(scenes.dynamic_cache(rng, formats, [(60, 1), (9, 2)], heads=8, kv_heads=4, dim=128))
""",
}


def has_avx2():
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return x86 and llvmlite.binding.get_host_cpu_features().get("avx2", False)


@pytest.mark.skipif(not has_avx2(), reason="needs a CPU with AVX2")
@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_avx2(name):
    variables = {
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": FEATURES,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(calls=CALLS[name])],
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "near enough\n"), done.stderr
