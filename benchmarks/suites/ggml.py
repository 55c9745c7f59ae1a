"""Run llama.cpp's attention as a peer: `ggml_flash_attn_ext` of ggml's library, through ctypes.

ik_llama.cpp has the operator of the same name, with kernels of its own, in a library that has all of ggml. It
gets an operator for each sequence, whose context is filled up and masked as the kernels for one stream ask.
"""

import ctypes
import functools
import importlib.util
import os
from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np

from benchmarks.suites.cache_operators import DTYPES
from benchmarks.suites.memory import sets
from benchmarks.suites.other_libraries import Peer, installed
from benchmarks.suites.problem import DIM

TYPES = {"float32": 0, "float16": 1, "bfloat16": 30, "int8": 8, "int4": 2}  # as ggml.h numbers them
NAMES = {"int8": "Q8_0", "int4": "Q4_0"}  # ggml's names of code formats
BLOCK = 32  # codes that share a float16 scale


class Package(NamedTuple):
    """Says what a package of ggml has."""

    libraries: dict[str, int]  # {path in its folder: how it is loaded}, the last one has all functions
    has_pool: bool  # whether threads wait in a pool of the backend; otherwise they are OpenMP's
    apart: bool  # whether each sequence needs an operator of its own


IK = "ik_llama_cpp"
PACKAGES = {
    "libggml": Package(
        {"lib64/libggml-base.so": ctypes.RTLD_GLOBAL, "lib64/libggml-cpu.so": ctypes.DEFAULT_MODE},
        has_pool=True,
        apart=False,
    ),
    # by its own symbols, if both libraries are loaded
    IK: Package({"lib/libggml.so": os.RTLD_DEEPBIND}, has_pool=False, apart=True),
}
IK_TYPES = "float16", "int8"  # of the kernels of its wheel, which stop the process at others
TOKENS, ROWS = 32, 16  # ik_llama.cpp's contexts and masks are multiples of
POOL = 2**12  # bytes, enough for `ggml_threadpool_params`
OVERHEAD = 2**20  # bytes, enough for a graph and tensors without their elements
FACTS = "amx_int8", "avx512_vnni", "avx512", "avx2", "neon"


class Memory(ctypes.Structure):
    """Describes the C struct `ggml_init_params`."""

    _fields_ = (("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("empty", ctypes.c_bool))


@functools.cache
def library(package):
    """Return the library of ggml in a package, and a backend with as many threads as kvkit has."""
    folder, at, count = package_folder(package), ctypes.c_void_p, ctypes.c_int
    libraries, has_pool, _ = PACKAGES[package]
    ggml = [ctypes.CDLL(str(folder / path), mode) for path, mode in libraries.items()][-1]
    pool = ("ggml_threadpool_params_init", at, count), ("ggml_threadpool_new", at)
    for name, *arguments in (
        ("ggml_init", Memory),
        ("ggml_new_tensor", at, count, count, ctypes.POINTER(ctypes.c_int64)),
        ("ggml_get_data", at),
        ("ggml_flash_attn_ext", at, at, at, at, at, *[ctypes.c_float] * 3),
        ("ggml_new_graph", at),
        ("ggml_build_forward_expand", at, at),
        ("ggml_backend_cpu_init",),
        ("ggml_backend_cpu_set_n_threads", at, count),
        ("ggml_backend_graph_compute", at, at),
        *((*pool, ("ggml_backend_cpu_set_threadpool", at, at)) if has_pool else ()),
    ):
        function = getattr(ggml, name)
        function.argtypes, function.restype = arguments, at
    threads, params = numba.get_num_threads(), ctypes.create_string_buffer(POOL)
    backend = ggml.ggml_backend_cpu_init()
    ggml.ggml_backend_cpu_set_n_threads(backend, threads)
    if has_pool:
        ggml.ggml_threadpool_params_init(params, threads)
        ggml.ggml_backend_cpu_set_threadpool(backend, ggml.ggml_threadpool_new(params))
    return ggml, backend


def package_folder(package):
    """Return the folder of a package without an import, which would load its library otherwise."""
    return Path(importlib.util.find_spec(package).submodule_search_locations[0])


def ggml_peer(problem, kind, package="libggml"):
    """Return attention over packed keys and values of the type of a cache; None without the package."""
    if not installed(package):
        return None
    ggml, backend = library(package)
    halves = [stored(problem, half, kind) for half in range(2)]
    size = sum(half.nbytes for half in halves)
    turns = [graph(problem, halves, kind, ggml, PACKAGES[package].apart) for _ in range(sets(size))]

    def run(i):
        ggml.ggml_backend_graph_compute(backend, turns[i % len(turns)][0])

    def output():
        run(0)
        return np.concatenate(turns[0][1])

    vectors = next((fact for fact in FACTS if getattr(ggml, f"ggml_cpu_has_{fact}", bool)()), "no vectors")
    # Values of float16 are summed in float16, and queries that meet codes become codes of 8 bits.
    precision = "float32" if kind == "float32" else "bfloat16"
    return Peer(run, output, precision, f"{NAMES.get(kind, kind)}, {vectors}")


def stored(problem, half, kind):
    """Return keys or values as ggml stores them, bytes [sequences, heads, tokens, bytes]."""
    if not problem.quant:
        return problem.context()[half].astype(DTYPES[kind])
    codes = problem.stored[half]
    if problem.quant == 4:  # low nibbles hold the first half of a block, and code 8 is 0
        numbers = np.stack([codes << 4 >> 4, codes >> 4], -1).reshape(*codes.shape[:3], -1, 2, BLOCK // 2)
        numbers = (numbers + 8).view(np.uint8)
        codes = numbers[..., 0, :] | numbers[..., 1, :] << 4
    blocks = codes.view(np.uint8).reshape(*codes.shape[:3], -1, BLOCK * problem.quant // 8)
    scales = np.full((*blocks.shape[:-1], 1), problem.step, np.float16).view(np.uint8)
    return np.concatenate([scales, blocks], -1)


def graph(problem, halves, kind, ggml, apart):
    """Return prepared operators: their address and their outputs `[B, S, H, D]`, in memory of their own.

    All sequences have one operator, or one each if they are `apart`.
    """
    query = np.ascontiguousarray(problem.query.transpose(0, 2, 1, 3))
    future = np.triu(np.full((problem.new, problem.length), -np.inf, np.float16), problem.past + 1)
    if apart:
        more = -problem.length % TOKENS
        halves = [
            np.pad(half, [(0, more if axis == 2 else 0) for axis in range(half.ndim)]) for half in halves
        ]
        rows = (0, -problem.new % ROWS)
        future = np.pad(future, (rows, (0, more)), constant_values=np.float16(-np.inf))
    count = 1 if apart else problem.batch  # sequences of an operator
    masked = apart or problem.new > 1  # otherwise the only query sees all tokens
    room = OVERHEAD + masked * future.nbytes  # for an operator
    tokens = 2 * query.nbytes + sum(half.nbytes for half in halves)
    memory = np.zeros(tokens + -(-problem.batch // count) * room, np.uint8)
    context = ggml.ggml_init(Memory(memory.nbytes, memory.ctypes.data, False))
    compute_graph, outputs = ggml.ggml_new_graph(context), []

    def tensor(array, kind, shape):
        sizes = (ctypes.c_int64 * len(shape))(*shape[::-1])
        made = ggml.ggml_new_tensor(context, TYPES[kind], len(shape), sizes)
        ctypes.memmove(ggml.ggml_get_data(made), array.ctypes.data, array.nbytes)
        return made

    for b in range(0, problem.batch, count):
        queries = query[b : b + count]
        sides = [tensor(half[b : b + count], kind, (count, *half.shape[1:3], DIM)) for half in halves]
        mask = tensor(future, "float16", future.shape) if masked else None
        at = tensor(queries, "float32", queries.shape), *sides, mask
        result = ggml.ggml_flash_attn_ext(context, *at, DIM**-0.5, 0, 0)
        ggml.ggml_build_forward_expand(compute_graph, result)
        begin = ggml.ggml_get_data(result) - memory.ctypes.data
        output = memory[begin : begin + queries.nbytes].view(np.float32)
        outputs.append(output.reshape(count, *problem.query.shape[1:]))
    return compute_graph, outputs
