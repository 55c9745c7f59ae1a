"""Cases of attention: 32 query heads, Dh=128.

Decoding appends a token to each of B=8 sequences of 8,192 past ones and attends to all. Outputs of kvkit and
its peers are compared with float64 numpy before they are measured.
"""

import ml_dtypes
import numpy as np

import kvkit
from benchmarks.suites import ggml, other_libraries
from benchmarks.suites.cache_operators import DTYPES, index_tensors
from benchmarks.suites.measuring import Case, Work
from benchmarks.suites.memory import plain_read, read_of_pieces, sets
from benchmarks.suites.problem import DIM, problem
from kvkit.layouts import pmx
from kvkit.runtime.arrays import zeros

B, PAST, PREFILL, CHUNK, PAGE = 8, 8192, 2048, 512, 128
BITS = {"int8": 8, "int4": 4}
MINIFLOAT, HEAD_SCALE = "e4m3", 0.5


def decode(kind, place, number, kv_heads=8, group=0):
    """Prepare a step of decoding, as users call it, beside the peers."""

    def prepare():
        task = problem(B, 1, PAST, kv_heads, BITS.get(kind, 0), 32, group)
        run, beside = from_cache(task, kind, place, number)
        peers = {} if task.quant else torch_peers(task, kind)
        if kind != "bfloat16":
            peers["onnxruntime"] = task.peer(other_libraries.onnxruntime_peer, kind)
        peers["ggml"] = task.peer(ggml.ggml_peer, kind)
        return work(task, run, kind, beside, peers)

    return prepare


def paged(kind, number, page):
    """Prepare a step of decoding from pages in random order, beside one from rows in order."""

    def prepare():
        task = problem(B, 1, PAST, 8)
        contiguous, _ = from_cache(task, kind, "offsets", number)
        run, beside = from_cache(task, kind, "pages", number, page)
        return work(task, run, kind, beside | {"contiguous": contiguous}, {})

    return prepare


def minifloats(kv_heads):
    """Prepare a step of decoding from floats of 8 bits with a scale for each head, beside float16."""

    def prepare():
        task = problem(B, 1, PAST, kv_heads, 0, 32, True)
        wider, _ = from_cache(task, "float16", "offsets", 3)
        run, beside = from_cache(task, MINIFLOAT, "offsets", 3)
        return work(task, run, MINIFLOAT, beside | {"float16": wider}, {})

    return prepare


def chunk(kind, data):
    """Prepare attention of a chunk of one sequence to its past in a cache and to itself."""

    def prepare():
        task = problem(1, CHUNK, PAST, 8, BITS.get(kind, 0))
        run, _ = from_cache(task, kind, "offsets", 3, data=data)
        peers = {
            "torch": task.peer(other_libraries.torch_peer, (data,)),
            "onnxruntime": task.peer(other_libraries.onnxruntime_peer, kind),
            "ggml": task.peer(ggml.ggml_peer, kind),
        }
        return work(task, run, kind, {"matmul": matmul(task.operations)}, peers)

    return prepare


def prefill(kind):
    """Prepare attention of one sequence to itself, without a cache."""

    def prepare():
        task = problem(1, PREFILL, 0, 32)
        query = task.query.astype(DTYPES[kind])
        key, value = (tokens_first(x).astype(DTYPES[kind]) for x in task.context())
        out = np.empty_like(query)

        def run(i):
            kvkit.multi_head_attention(query, key, value, num_heads=task.heads, head_dim=DIM, out=out)

        run(0)
        task.check("kvkit", out, kind)
        peers = torch_peers(task, kind)
        peers["onnxruntime"] = task.peer(other_libraries.onnxruntime_peer, kind)
        peers["ggml"] = task.peer(ggml.ggml_peer, kind)
        return work(task, run, "", {"matmul": matmul(task.operations)}, peers)

    return prepare


def work(task, run, kind, beside, peers):
    moved = 0 if "matmul" in beside else B * task.length * token_bytes(task, kind)
    beside = beside | {name: peer and peer.run for name, peer in peers.items()}
    forms = {name: peer.form for name, peer in peers.items() if peer}
    return Work(run, moved, task.operations, beside, forms)


def torch_peers(task, kind):
    """Return torch's peers: its fastest form, the same type, and folded query heads."""
    peers = {
        "torch": task.peer(other_libraries.torch_peer),
        "torch same type": task.peer(other_libraries.torch_peer, (kind,)),
    }
    if task.new == 1 and task.group > 1:
        peers["torch folded"] = task.peer(other_libraries.torch_peer, other_libraries.TYPES, ("folded",))
    return peers


def matmul(operations):
    """Return a function of the round: numpy's float32 matrix product with this many operations."""
    left = np.ones((2048, 2048), np.float32)
    right = np.ones((2048, operations // (2 * left.size)), np.float32)
    out = np.empty_like(right)
    return lambda i: np.matmul(left, right, out=out)


def from_cache(task, kind, place, number, page=PAGE, data=None):
    """Return (a checked function of the round that rotates through caches, the reads beside it)."""
    order = (pmx.STATIC if place == "static" else pmx.DYNAMIC)[number]
    where = index_tensors(int(place == "pages"), task.past, task.new, task.batch, page)
    cache, scale = filled(task, kind, order, where["cachestarts"], page)
    size = task.batch * task.length * token_bytes(task, kind)
    turns = [(cache, scale)]
    turns += [(copied(cache), scale if scale is None else scale.copy()) for _ in range(1, sets(size))]

    data = DTYPES[data or ("float16" if task.quant or kind == MINIFLOAT else kind)]
    attributes = {"num_heads": task.heads, "num_kv_heads": task.kv_heads, "head_dim": DIM}
    attributes |= {
        "cache_layout": number,
        "quant_bit": task.quant,
        "quant_group": task.coded if task.quant else 8,
    }
    attributes |= {"quant_format": kind} if kind == MINIFLOAT else {}
    arrays = [array.astype(data) for array in (task.query, *map(tokens_first, task.context(task.past)))]
    if place == "static":
        call, where = kvkit.multi_head_cache_attention, {"start_pos": task.past}
    else:
        call = kvkit.dynamic_batching.multi_head_cache_attention
        where |= {"decoding_batches": task.batch if task.new == 1 else 0}
        attributes |= {"cache_mode": int(place == "pages"), "page_size": page}
        arrays = [array.reshape(-1, *array.shape[2:]) for array in arrays]
    out = np.empty_like(arrays[0])

    def run(i):
        cache, scale = turns[i % len(turns)]
        call(*arrays, cache=cache, scale=scale, out=out, **where, **attributes)

    run(0)
    task.check("kvkit", out.reshape(task.query.shape), data.__name__)
    beside = {"read": plain_read([[array for array in turn if array is not None] for turn in turns], size)}
    if place == "pages":
        piece = page * cache.strides[order.at["n"]]
        beside["pieces"] = read_of_pieces([[cache] for cache, _ in turns], piece)
    return run, beside


def filled(task, kind, order, starts, page):
    """Return a cache that holds a problem's past tokens, and its scale."""
    static = "b" in order.axes
    rows = -(-task.length // page) * page
    sizes = {"b": task.batch, "l": 1, "kv": 2, "n": rows * (1 if static else task.batch), "h": task.kv_heads}
    shape = tuple(sizes[axis] for axis in order.axes[:-1])
    coded = kind == MINIFLOAT
    element = np.int8 if task.quant or coded else DTYPES[kind]
    cache = zeros((*shape, task.stored.shape[-1]), element)
    scale = np.full((*shape, DIM // task.coded), task.step, np.float16) if task.quant else None
    axes = "l", *(["b"] if static else []), "kv", "n", "h", "c"
    view = cache.transpose([order.at[axis] for axis in axes])[0]
    position = np.arange(task.past)
    for b in range(task.batch):
        past = tokens_first(task.stored[:, b, :, : task.past])
        if coded:
            past = (past / HEAD_SCALE).astype(ml_dtypes.float8_e4m3fn).view(np.int8)
        if static:
            view[b][:, position] = past
        elif starts.ndim == 1:
            view[:, starts[b] + position] = past
        else:
            view[:, starts[b, position // page] + position % page] = past
    if coded:
        return cache.view(np.uint8), np.full((2, task.kv_heads), HEAD_SCALE, np.float32)
    return cache, scale


def copied(cache):
    copy = zeros(cache.shape, cache.dtype)
    copy[:] = cache
    return copy


def tokens_first(array):
    """Turn [..., heads, tokens, dim] into [..., tokens, heads, dim]."""
    return np.ascontiguousarray(array.swapaxes(-3, -2))


def token_bytes(task, kind):
    """Return the bytes of the keys and values of one token in a cache, with their scales."""
    if task.quant:
        return 2 * task.kv_heads * (DIM * task.quant // 8 + DIM // task.coded * 2)
    return 2 * task.kv_heads * DIM * (1 if kind == MINIFLOAT else np.dtype(DTYPES[kind]).itemsize)


PLACES = [("static", 0), ("static", 1), *(("offsets", number) for number in range(4))]
DECODE = [
    *((kind, *place, 8, {"read": 0.75, "torch": 3}) for kind in ("float16", "bfloat16") for place in PLACES),
    *(("float32", *place, 8, {"read": 0.8, "onnxruntime": 3}) for place in (PLACES[2], PLACES[5])),
    *(("int8", *place, 8, {"onnxruntime": 2.2}) for place in (PLACES[2], PLACES[5])),
    *(("int4", *place, 8, {"onnxruntime": 3}) for place in (PLACES[2], PLACES[5])),
    *(("float16", *place, 32, {"read": 0.75}) for place in (PLACES[2], PLACES[5])),
    *(("float16", *place, 4, {"read": 0.45}) for place in (PLACES[2], PLACES[5])),
]

CODES = [  # (kind, group, key heads, goals)
    *(("int8", group, 8, {"read": 0.6}) for group in (8, 32, 128)),
    ("int4", 32, 8, {}),
    *(("int8", group, heads, {}) for heads in (4, 1) for group in (8, 32)),
    *(("int4", 32, heads, {}) for heads in (4, 1)),
]

CASES = [
    *(
        Case(
            f"decode {kind} in groups of {group}, {heads} kv heads, layout 3, offsets",
            decode(kind, "offsets", 3, heads, group),
            goals,
        )
        for kind, group, heads, goals in CODES
    ),
    *(
        Case(
            f"decode {kind}, {heads} kv heads, layout {number}, {place}",
            decode(kind, place, number, heads),
            goals,
        )
        for kind, place, number, heads, goals in DECODE
    ),
    *(
        Case(
            f"pages of {page}, float16, layout {number}",
            paged("float16", number, page),
            {"contiguous": 0.9},
        )
        for number, page in ((0, 16), (0, 128), (1, 16), (2, 16), (3, 16), (3, 64), (3, 128))
    ),
    *(
        Case(
            f"decode {MINIFLOAT}, a scale for each of {heads} kv heads, layout 3, offsets",
            minifloats(heads),
            {"read": 0.55, "float16": 1},
        )
        for heads in (8, 32)
    ),
    *(
        Case(f"prefill {kind}, 2,048 tokens, 32 kv heads", prefill(kind), {"torch same type": 1.3})
        for kind in ("float32", "bfloat16")
    ),
    Case(
        "prefill float32 from int8, 512 tokens after 8,192, 8 kv heads",
        chunk("int8", "float32"),
        {"torch": 1.5},
    ),
]
