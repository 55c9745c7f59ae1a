"""Cases of `kvkit.ascend`: 4,096 tokens, H=8, Dh=128, float16, blocks of 128 rows."""

import numpy as np

import kvkit
from benchmarks.suites.cache_operators import DIM, SETS, H
from benchmarks.suites.measuring import Case, Work
from benchmarks.suites.memory import plain_copy

TOKENS, BLOCK_SIZE, BATCH = 4096, 128, 64
GROUP = 16  # elements in a group of NZ


def packed(tokens, sets=SETS):
    """Return keys and values of each set [sets, 2, tokens, heads, dim]."""
    one = np.random.default_rng(0).standard_normal((2, tokens, H, DIM), np.float32).astype(np.float16)
    return np.stack([one] * sets)


def caches(blocks, sets=SETS, cache_format="ND"):
    shape = (
        (blocks, BLOCK_SIZE, H, DIM)
        if cache_format == "ND"
        else (blocks, H * DIM // GROUP, BLOCK_SIZE, GROUP)
    )
    return np.ones((sets, 2, *shape), np.float16)


def scattered(unit):
    """Return slots of all tokens; runs of `unit` tokens are in random order."""
    order = np.random.default_rng(0).permutation(TOKENS // unit)
    return (order[:, None] * unit + np.arange(unit)).ravel().astype(np.int32)


def scatter(unit, cache_format):
    """Prepare `reshape_and_cache` with rotating sets of data, so that all come from memory."""

    def prepare():
        data, slots = packed(TOKENS), scattered(unit)
        stores = caches(TOKENS // BLOCK_SIZE, cache_format=cache_format)

        def run(i):
            kvkit.ascend.reshape_and_cache(
                *data[i % SETS], *stores[i % SETS], slots, cache_format=cache_format
            )

        moved = 2 * data[0].nbytes
        return Work(run, moved, beside={"copy": plain_copy(moved)})

    return prepare


def decode():
    """Prepare the append of a token to each of `BATCH` sequences, which have separate blocks."""
    (data,), (store,) = packed(BATCH, 1), caches(BATCH, 1)
    slots = (np.arange(BATCH) * BLOCK_SIZE + 17).astype(np.int32)
    return Work(lambda i: kvkit.ascend.reshape_and_cache(*data, *store, slots))


def compress():
    """Prepare RazorAttention: one head in eight keeps all tokens, others 4 sinks and a fifth."""
    data, lengths = packed(TOKENS), [TOKENS]
    mode = kvkit.ascend.CompressType.KVHEAD_ROPE
    wins, offsets = kvkit.ascend.razor_windows(lengths, H, [0], recent=0)
    where = kvkit.ascend.compressed_slots(lengths, H, wins, offsets, compress_type=mode)
    stores = np.ones((SETS, 2, where.num_blocks, BLOCK_SIZE, 1, DIM), np.float16)
    windows = {"wins": wins, "seq_lens": np.array(lengths), "offset_index": offsets}

    def run(i):
        kvkit.ascend.reshape_and_cache(
            *data[i % SETS], *stores[i % SETS], where.slot_mapping, compress_type=mode, **windows
        )

    kept = int(where.context_lens.sum()) * 2 * DIM * stores.itemsize
    moved = data[0].nbytes + kept
    return Work(run, moved, beside={"copy": plain_copy(moved)})


CASES = [
    *(
        Case(
            f"ascend scatter float16, {cache_format}, {name} in random order",
            scatter(unit, cache_format),
            {"copy": goal},
        )
        for cache_format, name, unit, goal in (
            ("ND", "blocks", BLOCK_SIZE, 0.8),
            ("ND", "slots", 1, 0.8),
            ("NZ", "blocks", BLOCK_SIZE, 0.6),
            ("NZ", "slots", 1, 0.5),
        )
    ),
    Case("ascend compress float16, KVHEAD_ROPE", compress),
    Case("ascend append a token, 64 sequences", decode, calls=50),
]
