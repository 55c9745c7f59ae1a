"""Cases of `kvkit.cache`: B=1, 8 key heads, 32 query heads, Dh=128, float16."""

import shutil
import tempfile
import weakref

import numpy as np

from benchmarks.suites.measuring import Case, Work
from benchmarks.suites.memory import plain_read, sets
from benchmarks.suites.other_libraries import installed
from kvkit.cache import DynamicCache, DynamicLayer, PagedCache, QuantizedCache

HEADS, QUERY_HEADS, DIM, PAST, PAGE = 8, 32, 128, 8192, 128
LAYERS = 16  # attended to one after the other, so that threads are awake, as in a model
MAKERS = {  # number of layers -> a cache
    "float16": DynamicCache,
    "int8": lambda layers: QuantizedCache("int8:g32", num_layers=layers),
    "int4, keys by channel": lambda layers: QuantizedCache("kivi4", num_layers=layers),
    "int2, keys by channel": lambda layers: QuantizedCache("kivi2", num_layers=layers),
    "paged": lambda layers: PagedCache(PAST // PAGE + 8, PAGE, layers, HEADS, DIM, np.float16),
    "offloaded": DynamicCache,
}


def states(tokens, heads=HEADS):
    return np.random.default_rng(0).standard_normal((1, heads, tokens, DIM), np.float32).astype(np.float16)


def append(past):
    """Prepare an append to a layer, beside one to an empty layer and beside concatenation."""

    def prepare():
        first, new = states(past), states(1)

        def appending(start):
            layer = DynamicLayer()
            layer.update(start, start)
            return lambda i: layer.update(new, new)

        beside = {"at 0": appending(first[:, :, :0])} if past else {}
        peer, form = concatenation(first, new)
        return Work(appending(first), beside=beside | {"torch": peer}, forms={"torch": form} if peer else {})

    return prepare


def concatenation(first, new):
    """Return an append to transformers' `DynamicCache`, or the concatenation that it does."""
    if not installed("torch"):
        return None, ""
    import torch

    first, new = torch.from_numpy(first), torch.from_numpy(new)
    if installed("transformers"):
        from transformers import DynamicCache as Peer

        cache = Peer()
        cache.update(first, first, 0)
        return lambda i: cache.update(new, new, 0), "transformers DynamicCache"
    sides = [first, first.clone()]

    def run(i):
        for side in (0, 1):
            sides[side] = torch.cat([sides[side], new], -2)
        return sides

    return run, "torch.cat"


def decode(kind):
    """Prepare an append and attention, beside a read of the stored bytes and beside float16 in memory."""

    def prepare():
        run, count, size = decoding(kind)
        beside = {"read": plain_read([[np.ones(size // 8)] for _ in range(count)], size)}
        if kind != "float16":
            beside["float16"], *_ = decoding("float16")
        return Work(run, size, beside=beside)

    return prepare


def decoding(kind):
    """Return (a function of the round, the layers it rotates through, the bytes of a layer)."""
    past, new, query = states(PAST), states(1), states(1, QUERY_HEADS)
    probe = MAKERS[kind](1)
    probe.update(past, past, 0)
    size = stored_bytes(probe, 0)
    count = sets(size)
    cache = MAKERS[kind](count)
    if kind == "offloaded":
        folder = tempfile.mkdtemp()
        weakref.finalize(cache, shutil.rmtree, folder, ignore_errors=True)
        cache.offload(folder)
    for tokens in (past, new):  # layers grow with the second
        for layer in range(count):
            cache.update(tokens, tokens, layer)

    def run(i):
        cache.update(new, new, i % count)
        cache.attend(query, i % count)

    return run, count, size


def stored_bytes(cache, layer):
    """Return the bytes of the keys and values of all tokens in a layer."""
    if isinstance(cache, QuantizedCache):
        return sum(array.nbytes for array in cache.layers[layer]._arrays().values())
    return 2 * HEADS * DIM * cache.get_seq_length() * 2


CASES = [
    *(
        Case(f"append a token after {past:,}", append(past), {"at 0": 0.8} if past else {}, calls=calls)
        for past, calls in ((0, 50), (32768, 10))  # torch copies all earlier tokens
    ),
    *(
        Case(f"decode {kind}", decode(kind), goals, calls=LAYERS)
        for kind, goals in (
            ("float16", {"read": 0.75}),
            ("int8", {"float16": 1}),
            ("int4, keys by channel", {"float16": 1}),
            ("int2, keys by channel", {"float16": 1}),
            ("paged", {"float16": 0.9}),
            ("offloaded", {"float16": 0.8}),
        )
    ),
]
