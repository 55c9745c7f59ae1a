"""Cases of attention: 32 query heads, Dh=128.

Decoding appends a token to each of B=8 sequences of 8,192 past ones, 2,048 if there are 32 key heads, and
attends to all. Its bounds are beside it: a plain read, and its multiplications alone. Outputs of kvkit and
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
from benchmarks.suites.products import instructions, plain_products
from kvkit.formats.elements import BY_NAME, STORED
from kvkit.layouts import pmx
from kvkit.runtime.arrays import zeros

B, PAST, PREFILL, CHUNK, PAGE = 8, 8192, 2048, 512, 128
BITS = {"int8": 8, "int4": 4}  # codes whose scales are an array
BLOCKS = {"q8_0": "int8", "q4_0": "int4"}  # blocks of ggml, and the same codes
MINIFLOAT, HEAD_SCALE = "e4m3", 0.5


def decode(kind, group, num_kv_heads, place, number, page=PAGE):
    """Prepare a step of decoding, as users call it, beside a read, its multiplications and the peers."""

    def prepare():
        codes, past = BLOCKS.get(kind, kind), PAST * 8 // max(8, num_kv_heads)
        task = problem(
            B, 1, past, num_kv_heads, BITS.get(codes, 0), 32, kind == MINIFLOAT, group, kind == "q4_0"
        )
        run, beside = from_cache(task, kind, place, number, page)
        peers = {} if kind == MINIFLOAT else {"ggml": task.peer(ggml.ggml_peer, codes)}
        if codes in ggml.IK_TYPES:
            peers["ik_llama.cpp"] = task.peer(ggml.ggml_peer, codes, ggml.IK)
        if kind not in ("bfloat16", MINIFLOAT):
            peers["onnxruntime"] = task.peer(other_libraries.onnxruntime_peer, codes)
        if not (task.quant or kind == MINIFLOAT):
            types, forms = other_libraries.TYPES, ("enable_gqa", "expanded heads", "folded")
            peers["torch"] = task.peer(other_libraries.torch_peer, types, forms)
            peers["FlexAttention"] = task.peer(other_libraries.flex_peer)
            pages = page if place == "pages" else PAGE
            peers["vLLM"] = task.peer(other_libraries.vllm_peer, types, pages)
        beside.pop("pieces", None)
        keys = task.batch * task.length * task.num_kv_heads * DIM
        beside["products"] = plain_products(instructions(kind, task.group, keys))
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
            kvkit.multi_head_attention(query, key, value, num_heads=task.num_heads, head_dim=DIM, out=out)

        run(0)
        task.check("kvkit", out, kind)
        peers = {
            "torch": task.peer(other_libraries.torch_peer),
            "torch same type": task.peer(other_libraries.torch_peer, (kind,)),
        }
        peers["onnxruntime"] = task.peer(other_libraries.onnxruntime_peer, kind)
        peers["ggml"] = task.peer(ggml.ggml_peer, kind)
        return work(task, run, "", {"matmul": matmul(task.operations)}, peers)

    return prepare


def work(task, run, kind, beside, peers):
    """Return the work of a case: its function, those beside it, and the peers that are installed."""
    moved = 0 if "matmul" in beside else B * task.length * token_bytes(task, kind)
    beside = beside | {name: peer and peer.run for name, peer in peers.items()}
    forms = {name: peer.form for name, peer in peers.items() if peer}
    return Work(run, moved, task.operations, beside, forms)


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

    data = DTYPES[data or ("float16" if kind in BITS or kind in STORED else kind)]
    attributes = {"num_heads": task.num_heads, "num_kv_heads": task.num_kv_heads, "head_dim": DIM}
    attributes |= {
        "cache_layout": number,
        "quant_bit": BITS.get(kind, 0),
        "quant_group": task.coded if task.quant else 8,
        "quant_format": kind if kind in STORED else None,
    }
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
    sizes = {
        "b": task.batch,
        "l": 1,
        "kv": 2,
        "n": rows * (1 if static else task.batch),
        "h": task.num_kv_heads,
    }
    shape = tuple(sizes[axis] for axis in order.axes[:-1])
    stored = task.stored
    if kind in BLOCKS:
        halves = [ggml.stored(task, half, kind) for half in range(2)]
        stored = np.stack([half.reshape(*half.shape[:-2], -1) for half in halves])
    elif kind == MINIFLOAT:
        stored = (stored / np.float16(HEAD_SCALE)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    element = BY_NAME[kind].dtype if kind not in STORED else np.dtype(np.uint8)
    cache = zeros((*shape, stored.shape[-1]), element)
    scale = np.full((*shape, DIM // task.coded), task.step, np.float16) if kind in BITS else None
    axes = "l", *(["b"] if static else []), "kv", "n", "h", "c"
    view = cache.transpose([order.at[axis] for axis in axes])[0]
    position = np.arange(task.past)
    for b in range(task.batch):
        past = tokens_first(stored[:, b, :, : task.past])
        if static:
            view[b][:, position] = past
        elif starts.ndim == 1:
            view[:, starts[b] + position] = past
        else:
            view[:, starts[b, position // page] + position % page] = past
    return cache, np.full((2, task.num_kv_heads), HEAD_SCALE, np.float32) if kind == MINIFLOAT else scale


def copied(cache):
    """Return a copy that begins at a cache line."""
    copy = zeros(cache.shape, cache.dtype)
    copy[:] = cache
    return copy


def tokens_first(array):
    """Turn [..., heads, tokens, dim] into [..., tokens, heads, dim]."""
    return np.ascontiguousarray(array.swapaxes(-3, -2))


def token_bytes(task, kind):
    """Return the bytes of the keys and values of one token in a cache, with their scales."""
    scales = DIM // task.coded * 2 if kind in BITS else 0
    return 2 * task.num_kv_heads * (BY_NAME[kind].bytes(DIM) + scales)


def calls(kind, group, num_kv_heads):
    """Return how many steps of a case read some 256 MiB, which takes long enough to be timed."""
    bits = BY_NAME[kind].bits + (16 / group if group else 0)
    return max(1, round(2**28 / (B * PAST * 2 * min(num_kv_heads, 8) * DIM * bits / 8)))


FORMATS = {  # (kind, group): the least shares of a read: in layout 3, and elsewhere
    **{(kind, 0): (0.9, 0.85) for kind in ("float16", "bfloat16", "float32")},
    **{("int8", group): (0.75, 0.75) for group in (8, 32)},
    ("e4m3", 0): (0.75, 0.75),
    ("q8_0", 32): (0.75, 0.75),
    **{(kind, 32): (0.6, 0.6) for kind in ("int4", "q4_0")},
}
PLACES = {"layout 3": ("offsets", 3), "layout 0": ("offsets", 0), "pages of 16": ("pages", 3, 16)}
# kvkit is to be at least as fast
PEERS = {"ik_llama.cpp": 1, "torch": 1, "FlexAttention": 1, "vLLM": 1, "onnxruntime": 1, "ggml": 1}
DECODE = [
    Case(
        f"decode {kind}{f' in groups of {group}' if kind in BITS else ''}, {heads} kv heads, {name}",
        decode(kind, group, heads, *place),
        {"read": least[name != "layout 3"]} | PEERS,
        calls(kind, group, heads),
    )
    for heads in (32, 8, 4)
    for (kind, group), least in FORMATS.items()
    for name, place in PLACES.items()
]

HEADLINES = {  # of README's picture
    f"decode {name}, layout 3" if "pages" not in name else f"decode {name}"
    for name in (
        "float32, 8 kv heads", "float16, 8 kv heads", "float16, 8 kv heads, pages of 16",
        "int8 in groups of 32, 8 kv heads", "int4 in groups of 32, 8 kv heads",
    )
}  # fmt: skip
# In these a peer was ahead.
AHEAD = {f"decode float32, 32 kv heads, {place}" for place in ("layout 0", "pages of 16")}
RIVALS = [case for case in DECODE if case.name in HEADLINES | AHEAD]

CASES = [
    *(
        Case(
            f"pages of {page}, float16, layout {number}",
            paged("float16", number, page),
            {"contiguous": 0.9},
        )
        for number, page in ((0, 16), (0, 128), (1, 16), (2, 16), (3, 16), (3, 64), (3, 128))
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
