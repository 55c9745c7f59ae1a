"""The processor's vector instructions that kernels may use.

KVKIT_CPU names the newest instructions that kernels use: avx512, avx512vnni, avx512bf16 or amx.
"""

import ctypes
import errno
import functools
import os
import sys

import numba
from llvmlite import binding

from kvkit.errors import argument_error
from kvkit.runtime.processor import this_processor

# Kinds of instructions, the newest last, and the CPU features that each needs besides those before it.
KINDS = {
    "avx512": (),
    "avx512vnni": ("avx512bw", "avx512vl", "avx512vnni"),
    "avx512bf16": ("avx512bf16",),
    "amx": ("avx512bf16", "amx-tile", "amx-bf16", "amx-int8"),
}
LOOKUPS = {"lookups": ("avx512vbmi",)}  # of bytes in tables: what 8-bit floats need in tiles, beside pairs
# Linux: request the permission for a part of the processor's state, which is that of tiles.
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA = 158, 0x1023, 18
INSTRUCTIONS, MEMORY = "instructions", "memory"  # what multiplies tiles


@functools.cache
def has_integers():
    """Return whether kernels may multiply 8-bit codes with AVX-512 VNNI."""
    return has("avx512vnni")


@functools.cache
def has_pairs():
    """Return whether kernels may multiply bfloat16 pairs with AVX-512 BF16."""
    return has("avx512bf16")


@functools.cache
def has_slow_pairs():
    """Return whether full tiles of floats are faster than of pairs: as Intel's processors multiply both."""
    return this_processor().vendor == "GenuineIntel"


@functools.cache
def tiles():
    """Return what multiplies tiles: the processor's "instructions", "memory", or None if nothing does.

    The first call asks Linux for the permission to use tiles (AMX), which the process keeps. After it,
    threads cannot set a small signal stack any more, so ask only where tiles would be used.
    KVKIT_TILES=memory is for tests: it takes kernels over tiles where the processor has none.
    """
    form = os.environ.get("KVKIT_TILES")
    if form and form != MEMORY:
        raise argument_error("KVKIT_TILES", MEMORY, repr(form))
    return form or (INSTRUCTIONS if tiles_obstacle() is None else None)


@functools.cache
def tiles_obstacle():
    """Return why the processor multiplies no tiles, in words; None if it does, which this asks Linux for."""
    if not has("amx"):
        return f"KVKIT_CPU={os.environ['KVKIT_CPU']}" if features_of("amx") else "this CPU has none"
    if not sys.platform.startswith("linux"):
        return "only used on Linux"
    libc = ctypes.CDLL(None, use_errno=True)
    if not libc.syscall(*map(ctypes.c_long, (ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA))):
        return None
    error = ctypes.get_errno()
    if error == errno.ENOSPC:
        return "not permitted, because a thread has a signal stack that is too small to save them"
    return f"not permitted: {os.strerror(error)}"


@functools.cache
def has(kind):
    """Return whether the processor has a kind of instructions, and KVKIT_CPU allows it."""
    kinds = [*KINDS]
    most = os.environ.get("KVKIT_CPU") or kinds[-1]
    if most not in kinds:
        raise argument_error("KVKIT_CPU", " or ".join(kinds), repr(most))
    return kinds.index(kind) <= kinds.index(most) and features_of(kind)


def features_of(kind):
    """Return whether the processor has the features that a kind of instructions needs."""
    features = binding.get_host_cpu_features()
    if numba.config.CPU_NAME is not None:  # Numba was told to compile for another CPU
        features = {name[1:]: name[0] == "+" for name in (numba.config.CPU_FEATURES or "").split(",") if name}
    return all(features.get(name) for name in ("avx512f", *(KINDS | LOOKUPS)[kind]))
