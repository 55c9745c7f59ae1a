"""Cases of growing contexts: 32 query heads of 128 elements, 8 key heads if a case does not name them.

All caches are parts of one memory. All elements of the memory and of new
tokens are equal, so outputs equal that element whatever the weights.
"""

import functools

import click
import numba
import numpy as np

import kvkit
from benchmarks.suites.attention import token_bytes
from benchmarks.suites.cache_operators import index_tensors
from benchmarks.suites.measuring import Case, Work
from benchmarks.suites.memory import plain_read, sets
from benchmarks.suites.problem import DIM, GROUPS, Problem
from kvkit.cache import DynamicLayer

HEADS, QUERY_HEADS, PAGE = 8, 32, 16
LENGTHS = 2**10, 2**13, 2**16, 2**18, 2**20  # tokens of one sequence
SEQUENCES, EACH = (1, 4, 16, 64, 256), 2**12  # of so many tokens each
FLAT_FROM = 2**13  # tokens in all, from which on cost should be proportional
MOST = LENGTHS[-1]  # tokens in the memory
MANY = 2**16  # fewest tokens of a round, by repeated steps, so that threads stay awake
THREADS = sorted({1, numba.config.NUMBA_NUM_THREADS})
CODE, SCALE = 127, 0.125  # integer products take values up to 16, others are multiplied as floats
NUMBER = CODE * SCALE  # of every element; new ones get the same code and scale
GROUP = GROUPS[8]


@functools.lru_cache(maxsize=1)
def memory(kind, tokens):
    """Return (elements of keys and values, their scales) for this many tokens."""
    if kind == "int8":
        size = 2 * HEADS * DIM
        return np.full((tokens, size), CODE, np.int8), np.full((tokens, size // GROUP), SCALE, np.float16)
    return np.full((tokens, 2 * HEADS * DIM), NUMBER, kind), None


def windows(kind, tokens, size, heads=HEADS):
    """Yield caches of this many tokens and bytes, with scales, enough to rotate through."""
    rows = tokens * heads // HEADS  # of the memory, for each cache
    arrays = memory(kind, max(MOST, rows))
    for i in range(min(sets(size), len(arrays[0]) // rows)):
        yield [
            None if array is None else array[i * rows : (i + 1) * rows].reshape(1, 2, heads, tokens, -1)
            for array in arrays
        ]


def decode(kind, batch, tokens, most, workers, heads=HEADS, page=0):
    """Prepare a step over `batch` sequences of `tokens` tokens, beside a read and the largest step."""

    def prepare():
        run, size, read = step(kind, batch, tokens, heads, page)
        steps = max(1, MANY // (batch * tokens))
        run, read = repeated(steps, run), repeated(steps, read)
        beside, shares = {"read": read}, {"": 1 / steps, "read": 1 / steps}
        if batch * tokens >= FLAT_FROM and most != (batch, tokens):
            beside["the largest"], whole, _ = step(kind, *most)
            shares["the largest"] = size / whole
        beside = {name: with_threads(workers, function) for name, function in beside.items()}
        return Work(with_threads(workers, run), size, beside=beside, shares=shares)

    return prepare


def repeated(count, function):
    """Return a function of the round that calls another one `count` times."""

    def run(i):
        for j in range(count):
            function(i * count + j)

    return run


def with_threads(count, function):
    """Return a function of the round that runs on `count` threads."""

    def run(i):
        before = numba.get_num_threads()
        numba.set_num_threads(count)
        try:
            function(i)
        finally:
            numba.set_num_threads(before)

    return run


def step(kind, batch, tokens, heads=HEADS, page=0):
    """Return (a checked function of the round, the bytes that it reads, a plain read of as many bytes)."""
    task = Problem(batch, 1, tokens - 1, heads, 8 if kind == "int8" else 0, QUERY_HEADS)
    size = batch * tokens * token_bytes(task, kind)
    turns = [*windows(kind, batch * tokens, size, heads)]
    query, new = (np.full((batch, count, DIM), NUMBER, np.float16) for count in (QUERY_HEADS, heads))
    attributes = {
        "num_heads": QUERY_HEADS, "num_kv_heads": heads, "head_dim": DIM, "cache_layout": 3,
        "quant_bit": task.quant, "quant_group": GROUP, "decoding_batches": batch,
        "cache_mode": int(page > 0), "page_size": page or 1,
    }  # fmt: skip
    where, out = index_tensors(int(page > 0), tokens - 1, 1, batch, page), np.empty_like(query)

    def run(i):
        cache, scale = turns[i % len(turns)]
        kvkit.dynamic_batching.multi_head_cache_attention(
            query, new, new, cache=cache, scale=scale, out=out, **where, **attributes
        )

    run(0)
    if not np.allclose(out, NUMBER):
        name = f"{kind}, {batch} sequences of {tokens}"
        raise click.ClickException(f"{name}: outputs are {out.min()} to {out.max()}, not {NUMBER}")
    return run, size, plain_read([[one for one in turn if one is not None] for turn in turns], size)


def append(past):
    """Prepare an append to a layer, beside one to the shortest layer."""

    def prepare():
        new = np.ones((1, HEADS, 1, DIM), np.float16)

        def appending(tokens):
            layer, start = DynamicLayer(), np.ones((1, HEADS, tokens, DIM), np.float16)
            layer.update(start, start)
            layer.update(new, new)  # the layer grows here
            return lambda i: layer.update(new, new)

        return Work(
            appending(past), beside={"the fewest": appending(LENGTHS[0])} if past > LENGTHS[0] else {}
        )

    return prepare


def plan(tokens):
    """Prepare the check of one sequence's step over pages in random order, beside four checks of a fourth."""

    def prepare():
        def planning(tokens):
            where = index_tensors(1, tokens - 1, 1, 1, PAGE)
            return lambda i: kvkit.dynamic_batching.plan(**where, cache_mode=1, page_size=PAGE)

        return Work(planning(tokens), beside={"4 fourths": planning(tokens // 4)}, shares={"4 fourths": 4})

    return prepare


def goals(tokens, largest):
    return {"the largest": 0.85} if FLAT_FROM <= tokens < largest else {}


GROWING = [
    *((workers, [(1, length) for length in LENGTHS]) for workers in THREADS),
    (THREADS[-1], [(count, EACH) for count in SEQUENCES]),
]

CASES = [
    *(
        Case(
            f"decode {kind}, {batch} x {tokens:,} tokens, {workers} threads",
            decode(kind, batch, tokens, most, workers),
            goals(batch * tokens, most[0] * most[1]),
        )
        for workers, sizes in GROWING
        for kind in ("float16", "int8")
        for most in sizes[-1:]
        for batch, tokens in sizes
    ),
    *(
        Case(
            f"append after {past:,} tokens",
            append(past),
            {"the fewest": 0.85} if past > LENGTHS[0] else {},
            calls=50,
        )
        for past in LENGTHS[:-1]
    ),
    *(
        Case(
            f"plan over {tokens:,} tokens in pages of {PAGE}",
            plan(tokens),
            {"4 fourths": 0.85},
            calls=10,
        )
        for tokens in LENGTHS
    ),
]
