"""What the processor can do, and what of it is used: KVKIT_CPU=avx512 leaves products in pairs out."""

import functools
import os

import numba
from llvmlite import binding

from kvkit.errors import wrong

KINDS = "avx512", "avx512bf16"


@functools.cache
def has_pairs():
    """Whether products of bfloat16 in pairs are there, and wanted."""
    most = os.environ.get("KVKIT_CPU") or KINDS[-1]
    if most not in KINDS:
        raise wrong("KVKIT_CPU", " or ".join(KINDS), repr(most))
    features = binding.get_host_cpu_features()
    if numba.config.CPU_NAME is not None:  # code is made for another one
        features = {name[1:]: name[0] == "+" for name in (numba.config.CPU_FEATURES or "").split(",") if name}
    return most == KINDS[-1] and bool(features.get("avx512f")) and bool(features.get("avx512bf16"))
