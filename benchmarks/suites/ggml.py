"""Run llama.cpp's attention as a peer: `ggml_flash_attn_ext` of ggml's library, through ctypes."""

import ctypes
import functools
from pathlib import Path

import numba
import numpy as np

from benchmarks.suites.cache_operators import DTYPES
from benchmarks.suites.memory import sets
from benchmarks.suites.other_libraries import Peer, installed
from benchmarks.suites.problem import DIM

TYPES = {"float32": 0, "float16": 1, "bfloat16": 30, "int8": 8, "int4": 2}  # as ggml.h numbers them
NAMES = {"int8": "Q8_0", "int4": "Q4_0"}  # ggml's names of code formats
BLOCK = 32  # codes that share a float16 scale
POOL = 2**12  # bytes, enough for `ggml_threadpool_params`
OVERHEAD = 2**20  # bytes, enough for a graph and tensors without their elements
FACTS = "amx_int8", "avx512_vnni", "avx512", "avx2", "neon"


class Memory(ctypes.Structure):
    """Describes the C struct `ggml_init_params`."""

    _fields_ = (("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("empty", ctypes.c_bool))


@functools.cache
def library():
    """Return ggml's library, and a backend with its own waiting threads."""
    import libggml

    folder = Path(libggml.__file__).parent / "lib64"
    ctypes.CDLL(str(folder / "libggml-base.so"), ctypes.RTLD_GLOBAL)
    ggml, at, count = ctypes.CDLL(str(folder / "libggml-cpu.so")), ctypes.c_void_p, ctypes.c_int
    for name, *arguments in (
        ("ggml_init", Memory),
        ("ggml_new_tensor", at, count, count, ctypes.POINTER(ctypes.c_int64)),
        ("ggml_get_data", at),
        ("ggml_flash_attn_ext", at, at, at, at, at, *[ctypes.c_float] * 3),
        ("ggml_new_graph", at),
        ("ggml_build_forward_expand", at, at),
        ("ggml_threadpool_params_init", at, count),
        ("ggml_threadpool_new", at),
        ("ggml_backend_cpu_init",),
        ("ggml_backend_cpu_set_n_threads", at, count),
        ("ggml_backend_cpu_set_threadpool", at, at),
        ("ggml_backend_graph_compute", at, at),
    ):
        function = getattr(ggml, name)
        function.argtypes, function.restype = arguments, at
    threads, pool = numba.get_num_threads(), ctypes.create_string_buffer(POOL)
    ggml.ggml_threadpool_params_init(pool, threads)
    backend = ggml.ggml_backend_cpu_init()
    ggml.ggml_backend_cpu_set_n_threads(backend, threads)
    ggml.ggml_backend_cpu_set_threadpool(backend, ggml.ggml_threadpool_new(pool))
    return ggml, backend


def ggml_peer(problem, kind):
    """Return attention over packed keys and values of the type of a cache; None without libggml."""
    if not installed("libggml"):
        return None
    ggml, backend = library()
    halves = [stored(problem, half, kind) for half in range(2)]
    turns = [graph(problem, halves, kind) for _ in range(sets(sum(half.nbytes for half in halves)))]

    def run(i):
        ggml.ggml_backend_graph_compute(backend, turns[i % len(turns)][0])

    def output():
        run(0)
        return turns[0][1]

    vectors = next((fact for fact in FACTS if getattr(ggml, f"ggml_cpu_has_{fact}")()), "no vectors")
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


def graph(problem, halves, kind):
    """Return a prepared operator: its address and its output `[B, S, H, D]`, in memory of its own."""
    ggml, _ = library()
    query = np.ascontiguousarray(problem.query.transpose(0, 2, 1, 3))
    future = np.triu(np.full((problem.new, problem.length), -np.inf, np.float16), problem.past + 1)
    arrays = [query, *halves, *([future] if problem.new > 1 else [])]
    kinds = ["float32", kind, kind, "float16"]
    lengths = [query.shape, *[(*half.shape[:3], DIM) for half in halves], future.shape]
    memory = np.zeros(2 * query.nbytes + sum(array.nbytes for array in arrays) + OVERHEAD, np.uint8)
    context = ggml.ggml_init(Memory(memory.nbytes, memory.ctypes.data, False))
    tensors = []
    for array, kind, shape in zip(arrays, kinds, lengths, strict=False):
        sizes = (ctypes.c_int64 * len(shape))(*shape[::-1])
        tensors.append(ggml.ggml_new_tensor(context, TYPES[kind], len(shape), sizes))
        ctypes.memmove(ggml.ggml_get_data(tensors[-1]), array.ctypes.data, array.nbytes)
    query, key, value, mask = (*tensors, None)[:4]
    result = ggml.ggml_flash_attn_ext(context, query, key, value, mask, DIM**-0.5, 0, 0)
    compute_graph = ggml.ggml_new_graph(context)
    ggml.ggml_build_forward_expand(compute_graph, result)
    begin = ggml.ggml_get_data(result) - memory.ctypes.data
    output = memory[begin : begin + arrays[0].nbytes].view(np.float32).reshape(problem.query.shape)
    return compute_graph, output
