"""What the processor can do, and what of it is used: KVKIT_CPU=avx512 leaves products in pairs out."""

import functools
import os

from llvmlite import binding

from kvkit.errors import KvkitError

KINDS = "avx512", "avx512bf16"


@functools.cache
def has_pairs():
    """Whether products of bfloat16 in pairs are there, and wanted."""
    most = os.environ.get("KVKIT_CPU") or KINDS[-1]
    if most not in KINDS:
        raise KvkitError(f"KVKIT_CPU: expected {' or '.join(KINDS)}, got {most!r}")
    features = binding.get_host_cpu_features()
    return most == KINDS[-1] and bool(features.get("avx512f")) and bool(features.get("avx512bf16"))
