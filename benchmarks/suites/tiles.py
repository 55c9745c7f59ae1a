"""Cases of tiles (AMX): prompts, latent rows, and decoding with several query rows a key head.

A prompt has 2,048 tokens and 32 query heads of 128. Its variants stand beside the plain prompt, whose time is
scaled to their operations; "pairs" is the same call without tiles, which processors without them run.
"""

import ml_dtypes
import numpy as np

import kvkit
from benchmarks.suites import attention, ggml, latent, other_libraries
from benchmarks.suites.cache_operators import DTYPES
from benchmarks.suites.measuring import Case, Work
from benchmarks.suites.memory import plain_read, sets
from benchmarks.suites.problem import DIM, problem
from kvkit.calls.prepared import forget_all
from kvkit.cpu import machine
from kvkit.runtime.arrays import zeros

TOKENS, HEADS, WINDOW = 2048, 32, 1024
B, PAST = attention.B, attention.PAST


def without_tiles(run):
    """Return the function of the round as it runs without tiles, which prepares its call anew."""

    def other(i):
        choose, machine.tiles = machine.tiles, lambda: None
        forget_all()
        try:
            return run(i)
        finally:
            machine.tiles = choose
            forget_all()

    return other


def prompt_arrays(kind, num_kv_heads):
    """Return (problem, query, key, value) of a prompt in a type, at cache lines."""
    task = problem(1, TOKENS, 0, num_kv_heads)
    arrays = (task.query, *map(attention.tokens_first, task.context()))
    aligned = []
    for array in arrays:
        aligned.append(zeros(array.shape, DTYPES[kind]))
        aligned[-1][...] = array.astype(DTYPES[kind])
    return task, *aligned


def attend(query, key, value, *mask, **options):
    """Return a function of the round that attends to a prompt."""
    sizes = {"num_heads": HEADS, "num_kv_heads": key.shape[2], "head_dim": DIM}
    out = np.empty_like(query)
    if options.get("return_lse"):
        out = out, np.empty(query.shape[:3], np.float32)
    return lambda i: kvkit.multi_head_attention(query, key, value, *mask, **sizes, **options, out=out)


def prompt(kind):
    """Prepare a prompt beside the same without tiles, and the peers."""

    def prepare():
        task, *arrays = prompt_arrays(kind, HEADS)
        run = attend(*arrays)
        task.check("kvkit", np.asarray(run(0)), kind)
        peers = {
            "torch": task.peer(other_libraries.torch_peer),
            "torch same type": task.peer(other_libraries.torch_peer, (kind,)),
            "onnxruntime": task.peer(other_libraries.onnxruntime_peer, kind),
            "ggml": task.peer(ggml.ggml_peer, kind),
            "vLLM": task.peer(other_libraries.vllm_peer) if kind == "bfloat16" else None,
        }
        return attention.work(
            task, run, "", {"matmul": attention.matmul(task.operations), "pairs": without_tiles(run)}, peers
        )

    return prepare


def variant(num_kv_heads=HEADS, share=1.0, **options):
    """Prepare a prompt with other arguments beside the plain one, of `share` of its operations."""

    def prepare():
        task, *arrays = prompt_arrays("bfloat16", num_kv_heads)
        _, *plain = prompt_arrays("bfloat16", HEADS)
        rng, given, mask = np.random.default_rng(0), dict(options), ()
        if given.pop("mask", False):
            mask = (rng.standard_normal((TOKENS, TOKENS), np.float32).astype(ml_dtypes.bfloat16),)
        if given.pop("sinks", False):
            given["sinks"] = np.zeros(HEADS, np.float32)
        return Work(
            attend(*arrays, *mask, **given), operations=int(task.operations * share),
            beside={"plain": attend(*plain)}, shares={"plain": share},
        )  # fmt: skip

    return prepare


def cached(kind, place, number, page=attention.PAGE):
    """Prepare a prompt that a cache takes first, beside one that a cache of bfloat16 takes, in order."""

    def prepare():
        bits = attention.BITS.get(kind, 0)
        task = problem(1, TOKENS, 0, HEADS, bits, HEADS, kind == attention.MINIFLOAT, 32 if bits else 0)
        run, _ = attention.from_cache(task, kind, place, number, page, "bfloat16")
        plain, _ = attention.from_cache(problem(1, TOKENS, 0, HEADS), "bfloat16", "offsets", 3)
        return Work(run, operations=task.operations, beside={"plain": plain})

    return prepare


def rows(heads):
    """Prepare a step over latent rows, beside a read of them and the same without tiles."""

    def prepare():
        row = latent.normal(latent.LATENT + latent.ROPE).astype(ml_dtypes.bfloat16)
        shape = latent.BATCH * latent.CONTEXT // latent.PAGE, latent.PAGE, len(row)
        size = int(np.prod(shape)) * row.itemsize
        pools = [zeros(shape, row.dtype) for _ in range(sets(size))]
        for pool in pools:
            pool[...] = row
        run = latent.step(heads, pools, None)
        operations = 2 * heads * latent.BATCH * latent.CONTEXT * (len(row) + latent.LATENT)
        beside = {"read": plain_read([[pool] for pool in pools], size), "pairs": without_tiles(run)}
        return Work(run, size, operations, beside)

    return prepare


def decode(num_kv_heads, place, number, page=attention.PAGE, kind="bfloat16"):
    """Prepare a step of decoding beside a read, the same without tiles, and torch."""

    def prepare():
        task = problem(B, 1, PAST, num_kv_heads)
        run, beside = attention.from_cache(task, kind, place, number, page)
        forms = ("enable_gqa", "folded")
        torch = task.peer(other_libraries.torch_peer, (kind,), forms)
        beside = {"read": beside["read"], "pairs": without_tiles(run)}
        return attention.work(task, run, kind, beside, {"torch": torch})

    return prepare


SEEN = WINDOW / TOKENS * (2 - WINDOW / TOKENS)  # the share of pairs that a window of WINDOW leaves, nearly
PLACES = {
    "layout 3": (0.95, "offsets", 3), "layout 0": (0.85, "offsets", 0),
    "pages of 128": (0.85, "pages", 3, 128), "pages of 16": (0.7, "pages", 3, 16),
}  # fmt: skip
CASES = [
    Case("prompt, bfloat16", prompt("bfloat16"), {"torch same type": 1.6, "vLLM": 1, "pairs": 5}),
    Case("prompt, float16", prompt("float16"), {"pairs": 2}),
    Case("prompt, 8 key heads", variant(8), {"plain": 0.85}),
    Case(f"prompt, window of {WINDOW}", variant(share=SEEN, window=(WINDOW, 0)), {"plain": 0.85}),
    Case("prompt, lse and sinks", variant(return_lse=True, sinks=True), {"plain": 0.85}),
    Case("prompt, mask", variant(mask=True), {"plain": 0.85}),
    Case("prompt, pages of 16", cached("bfloat16", "pages", 3, 16), {"plain": 0.85}),
    Case("prompt, pages of 128", cached("bfloat16", "pages", 3, 128), {"plain": 0.85}),
    Case("prompt, int8 in groups of 32", cached("int8", "offsets", 3), {"plain": 0.6}),
    Case("prompt, e4m3", cached("e4m3", "offsets", 3), {"plain": 0.6}),
    *(Case(f"latent rows, {heads} heads", rows(heads), goals) for heads, goals in (
        (16, {"read": 0.9}), (64, {"pairs": 6.7}), (128, {"pairs": 8.7}),
    )),
    *(
        Case(f"decode {HEADS // heads} rows, {name}", decode(heads, *place), {"read": goal})
        for heads in (8, 4, 2)
        for name, (goal, *place) in PLACES.items()
    ),
    Case("decode 16 rows of float16, layout 3", decode(2, "offsets", 3, kind="float16"), {"read": 0.95}),
]  # fmt: skip
