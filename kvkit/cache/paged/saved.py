"""A paged cache in a file: the blocks in use, page tables, and what prefixes are found by.

Blocks keep their numbers. Arrays are ``blocks`` (the numbers), ``cache`` and ``scale`` ([layers, key|value,
block, row, head, dim], those blocks), ``sequences.I.block_table`` and ``sequences.I.token_ids``, and of the
published blocks, the first to be evicted first, ``published.blocks``, ``.hashes`` and ``.token_ids``.
"""

import numpy as np

from kvkit.cache.blocks.pool import HASH_BYTES
from kvkit.checks.words import wrong

ARRAYS = "cache", "scale"


def described(cache, sequences):
    """What a file says of a cache and some of its sequences, and the arrays in it."""
    allocator, rows = cache.blocks, cache._rows.sequences
    if allocator.open_step is not None:
        raise wrong("cache", "one whose steps have ended", "an open step")
    kept = [*rows, *sequences]
    for seq in kept:
        allocator._check(seq)
    if len(set(map(id, kept))) < len(kept):
        raise wrong("sequences", "each sequence once", "one twice")
    published = list(allocator._pool.published())
    blocks = {block for block, *_ in published}.union(*(seq.table for seq in kept))
    arrays: dict = {"blocks": np.array(sorted(blocks), np.int64)}
    arrays |= {
        name: array[:, :, arrays["blocks"]] for name, array in zip(ARRAYS, cache._store.blocks, strict=False)
    }
    for i, seq in enumerate(kept):
        arrays[f"sequences.{i}.block_table"] = np.array(seq.blocks, np.int64)
        arrays[f"sequences.{i}.token_ids"] = seq.token_ids
    hashes, ids = (b"".join(each[i] for each in published) for i in (1, 2))
    arrays["published.blocks"] = np.array([block for block, *_ in published], np.int64)
    arrays["published.hashes"] = np.frombuffer(hashes, np.uint8).reshape(-1, HASH_BYTES)
    arrays["published.token_ids"] = np.frombuffer(ids, "<i8").reshape(-1, allocator.page_size)
    said = [{"length": seq.length, "root": seq.chain[0].hex()} for seq in kept]
    return {"arguments": cache.describe(), "rows": len(rows), "sequences": said}, arrays


def made(about, arrays):
    """The cache of a file; KvkitError, KeyError, TypeError or ValueError if there can be none."""
    from kvkit.cache.paged.cache import PagedCache

    arguments = dict(about["arguments"])
    cache = PagedCache(**arguments | {"salt": bytes.fromhex(arguments["salt"])})
    blocks = arrays["blocks"]
    if not np.array_equal(blocks, np.intersect1d(blocks, np.arange(cache.blocks.num_blocks))):
        raise wrong("blocks", f"different ones of {cache.blocks.num_blocks}, in order", blocks)
    for name, array in zip(ARRAYS, cache._store.blocks, strict=False):
        here, found = array[:, :, blocks], arrays[name]
        if (found.dtype, found.shape) != (here.dtype, here.shape):
            raise wrong(name, f"{here.dtype} {here.shape}", f"{found.dtype} {found.shape}")
        array[:, :, blocks] = found
    hashes, ids = arrays["published.hashes"], arrays["published.token_ids"].astype("<i8")
    if (hashes.shape[1:], ids.shape[1:]) != ((HASH_BYTES,), (cache.blocks.page_size,)):
        raise wrong("published", "hashes, and ids of blocks", f"{hashes.shape}, {ids.shape}")
    numbers = arrays["published.blocks"].tolist()
    published = [
        (block, one.tobytes(), page.tobytes()) for block, one, page in zip(numbers, hashes, ids, strict=True)
    ]
    saved = [
        (
            said["length"],
            bytes.fromhex(said["root"]),
            arrays[f"sequences.{i}.block_table"],
            arrays[f"sequences.{i}.token_ids"],
        )
        for i, said in enumerate(about["sequences"])
    ]
    sequences = cache.blocks.restore(saved, published, set(blocks.tolist()))
    count = about["rows"]
    if len({seq.length for seq in sequences[:count]}) > 1:
        raise wrong("rows", "sequences of one length", [seq.length for seq in sequences[:count]])
    cache._rows.sequences, cache.sequences = sequences[:count], sequences[count:]
    return cache
