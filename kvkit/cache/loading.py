"""Load a cache from the file that it was saved in; `saving` describes the file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvkit.cache.blocks.pool import HASH_BYTES
from kvkit.cache.caches import Cache
from kvkit.cache.layers import kinds
from kvkit.cache.paged.cache import PagedCache
from kvkit.cache.saving import PAGED_ARRAYS, VERSION, array_form, hash_contents
from kvkit.errors import KvkitError, argument_error, brief, describe
from kvkit.files import npz
from kvkit.typed import Array, FilePath

LONGEST = 160  # characters of what a file says, in an error


def load(path: FilePath) -> Cache | PagedCache:
    """Load the cache that `Cache.save` or `PagedCache.save` wrote, in memory.

    Parameters
    ----------
    path : path
        A .npz file.

    Returns
    -------
    Cache or PagedCache
        As it was, bit for bit. Of quantized layers attention sees what is stored.

    Raises
    ------
    KvkitError
        If the file is damaged or of another version, or if its arrays are not what it says.

    Examples
    --------
    >>> import os, tempfile, numpy as np
    >>> from kvkit.cache import DynamicCache, load
    >>> cache, tokens = DynamicCache(), np.ones((1, 2, 3, 4), np.float32)
    >>> keys, values = cache.update(tokens, tokens, 0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "prefix.npz")
    ...     cache.save(path)
    ...     again = load(path)
    >>> again.get_seq_length(), bool((again.layers[0].keys == keys).all())
    (3, True)
    """
    about, arrays = read_file(path)
    if "paged" in about:
        try:
            return restore_paged(about["paged"], arrays)
        except (KvkitError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise load_error(path, "a paged cache that kvkit has", error) from None
    if not isinstance(about.get("layers"), list):
        raise load_error(path, "a description of every layer", sorted(about))
    return Cache([restore_layer(path, i, said, arrays) for i, said in enumerate(about["layers"])])


def read_file(path: FilePath) -> tuple[dict[str, Any], dict[str, Array]]:
    """Read (description of a cache, its arrays) from a file, and check that they agree."""
    contents = npz.read(path)
    about = contents.metadata.get("cache")
    if not isinstance(about, dict) or about.get("version") != VERSION:
        found = about.get("version") if isinstance(about, dict) else "none"
        raise load_error(path, f"a cache of version {VERSION}", found)
    expected, said = about.pop("fingerprint", None), about.get("arrays")
    if not isinstance(said, dict):
        raise load_error(path, "a description of every array", said)
    found = {name: array_form(array) for name, array in contents.arrays.items()}
    for name in said | found:
        if found.get(name) != said.get(name):
            raise load_error(path, f"{name} as it is described, {said.get(name)}", found.get(name))
    if hash_contents(about, contents.arrays) != expected:
        raise load_error(path, f"contents with the fingerprint {expected}", "others")
    return about, contents.arrays


def restore_layer(path: FilePath, number: int, about: dict[str, Any], arrays: Mapping[str, Array]) -> Any:
    """Return a layer with its tokens."""
    begin = f"layers.{number}."
    arrays = {name.removeprefix(begin): array for name, array in arrays.items() if name.startswith(begin)}
    try:
        layer = kinds.make_layer(about)
        if arrays or about["length"]:
            layer.fill(arrays, about["length"])
        layer.record_past = about["record_past"]
    except (KvkitError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise load_error(path, f"a layer {number} that kvkit has", error) from None
    return layer


def restore_paged(about: Mapping[str, Any], arrays: Mapping[str, Array]) -> PagedCache:
    """Return the paged cache of a file; KvkitError, KeyError, TypeError or ValueError if there is none."""
    arguments = dict(about["arguments"])
    cache = PagedCache(**arguments | {"salt": bytes.fromhex(arguments["salt"])})
    blocks = arrays["blocks"]
    if not np.array_equal(blocks, np.intersect1d(blocks, np.arange(cache.blocks.num_blocks))):
        raise argument_error(
            "blocks", f"different ones of {cache.blocks.num_blocks}, in order", describe(blocks)
        )
    for name, array in zip(PAGED_ARRAYS, cache.store.blocks, strict=False):
        here, found = array[:, :, blocks], arrays[name]
        if (found.dtype, found.shape) != (here.dtype, here.shape):
            raise argument_error(name, f"{here.dtype} {here.shape}", f"{found.dtype} {found.shape}")
        array[:, :, blocks] = found
    hashes, ids = arrays["published.hashes"], arrays["published.token_ids"].astype("<i8")
    if (hashes.shape[1:], ids.shape[1:]) != ((HASH_BYTES,), (cache.blocks.page_size,)):
        raise argument_error("published", "hashes, and ids of blocks", f"{hashes.shape}, {ids.shape}")
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
        raise argument_error("rows", "sequences of one length", [seq.length for seq in sequences[:count]])
    cache.rows.sequences, cache.sequences = sequences[:count], sequences[count:]
    return cache


def load_error(path: FilePath, expected: object, got: object) -> KvkitError:
    return argument_error(str(path), brief(expected, LONGEST), brief(got, LONGEST), npz.FileError)
