"""Load a saved cache. `kvkit.cache.saving` describes the file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvkit.cache.blocks.pool import HASH_BYTES, Published
from kvkit.cache.blocks.sequence import Moves, SavedSequence
from kvkit.cache.caches import Cache
from kvkit.cache.layers import kinds
from kvkit.cache.layers.positions import RowPositions, check_rotation, restored_rotation
from kvkit.cache.paged.cache import PagedCache
from kvkit.cache.saving import MOVED_VERSION, PAGED_ARRAYS, VERSION, array_form, hash_contents
from kvkit.checks import index_tensors
from kvkit.errors import KvkitError, argument_error, brief, describe
from kvkit.files import npz
from kvkit.typed import Array, FilePath

MAX_QUOTE = 160  # characters of a file's metadata in an error message


def load(path: FilePath) -> Cache | PagedCache:
    """Load into memory a cache that `Cache.save` or `PagedCache.save` wrote.

    Parameters
    ----------
    path : path
        A .npz file.

    Returns
    -------
    Cache or PagedCache
        A cache with the same stored bits. Quantized layers attend to codes wherever they have them.

    Raises
    ------
    KvkitError
        If the file is damaged or of another version, or if its arrays do not match its description.

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
    if os.path.isdir(path):
        wanted = "a file of `save` (Cache.open opens a folder of `offload`)"
        raise argument_error("path", wanted, path, npz.FileError)
    about, arrays = read_file(path)
    if "paged" in about:
        try:
            return restore_paged(about["paged"], arrays)
        except (KvkitError, AttributeError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise load_error(path, "a valid description of a paged cache", error) from None
    if not isinstance(about.get("layers"), list):
        raise load_error(path, "a description of every layer", sorted(about))
    return Cache([restore_layer(path, i, layer, arrays) for i, layer in enumerate(about["layers"])])


def read_file(path: FilePath) -> tuple[dict[str, Any], dict[str, Array]]:
    """Read (description of a cache, its arrays) from a file, and check that they agree."""
    contents = npz.read(path)
    about = contents.metadata.get("cache")
    if not isinstance(about, dict) or about.get("version") not in (VERSION, MOVED_VERSION):
        version = about.get("version") if isinstance(about, dict) else "none"
        wanted = f"a file of cache.save, of version {VERSION} or {MOVED_VERSION}"
        raise load_error(path, wanted, version)
    fingerprint, described = about.pop("fingerprint", None), about.get("arrays")
    if not isinstance(described, dict):
        raise load_error(path, "a description of every array", described)
    loaded = {name: array_form(array) for name, array in contents.arrays.items()}
    for name in described | loaded:
        if loaded.get(name) != described.get(name):
            expected = f"{name} with the described dtype and shape, {described.get(name)}"
            raise load_error(path, expected, loaded.get(name))
    if (actual := hash_contents(about, contents.arrays)) != fingerprint:
        raise load_error(path, f"contents with the fingerprint {fingerprint}", actual)
    return about, contents.arrays


def restore_layer(path: FilePath, number: int, about: dict[str, Any], arrays: Mapping[str, Array]) -> Any:
    """Build one layer and fill it with the file's arrays."""
    begin = f"layers.{number}."
    arrays = {name.removeprefix(begin): array for name, array in arrays.items() if name.startswith(begin)}
    try:
        layer = kinds.make_layer(about)
        layer.load(arrays, about["length"])
        layer.record_past = about["record_past"]
    except (KvkitError, AttributeError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise load_error(path, f"a valid layer {number}", error) from None
    return layer


def restore_paged(about: Mapping[str, Any], arrays: Mapping[str, Array]) -> PagedCache:
    """Build a paged cache and fill it with the file's arrays."""
    arguments = dict(about["arguments"])
    ropes = [restored_rotation(rope) for rope in arguments.get("rope") or ()]
    cache = PagedCache(**arguments | {"salt": bytes.fromhex(arguments["salt"]), "rope": ropes or None})
    blocks = arrays["blocks"]
    if not np.array_equal(blocks, np.intersect1d(blocks, np.arange(cache.blocks.num_blocks))):
        wanted = f"distinct block ids below {cache.blocks.num_blocks}, ascending"
        raise argument_error("blocks", wanted, describe(blocks))
    for name, array in zip(PAGED_ARRAYS, cache.store.blocks, strict=False):  # there may be no scales
        target, loaded = array[:, :, blocks], arrays[name]
        if (loaded.dtype, loaded.shape) != (target.dtype, target.shape):
            raise argument_error(name, f"{target.dtype} {target.shape}", f"{loaded.dtype} {loaded.shape}")
        array[:, :, blocks] = loaded
    hashes, ids = arrays["published.hashes"], arrays["published.token_ids"].astype("<i8")
    if (hashes.shape[1:], ids.shape[1:]) != ((HASH_BYTES,), (cache.blocks.page_size,)):
        expected = f"hashes of {HASH_BYTES} bytes, and token ids of whole blocks"
        raise argument_error("published", expected, f"{hashes.shape}, {ids.shape}")
    block_ids = arrays["published.blocks"].tolist()
    published = [
        Published(block, digest.tobytes(), token_ids.tobytes())
        for block, digest, token_ids in zip(block_ids, hashes, ids, strict=True)
    ]
    saved = [
        SavedSequence(
            metadata["length"],
            bytes.fromhex(metadata["root"]),
            arrays[f"sequences.{i}.block_table"],
            arrays[f"sequences.{i}.token_ids"],
            restore_moves(i, metadata, arrays, cache) if "intact" in metadata else None,
        )
        for i, metadata in enumerate(about["sequences"])
    ]
    sequences = cache.blocks.restore(saved, published, set(blocks.tolist()))
    count = about["rows"]
    if len({(seq.positions.tobytes(), seq.rope_shifts.tobytes()) for seq in sequences[:count]}) > 1:
        wanted = "sequences with equal positions"
        raise argument_error("rows", wanted, [seq.length for seq in sequences[:count]])
    cache.rows.sequences, cache.sequences = sequences[:count], sequences[count:]
    return cache


def restore_moves(i: int, about: Mapping[str, Any], arrays: Mapping[str, Array], cache: PagedCache) -> Moves:
    """Check the moved tokens of a sequence in a file; return them."""
    positions, shifts, ends = (
        arrays[f"sequences.{i}.{name}"] for name in ("positions", "rope_shifts", "segments")
    )
    rows = RowPositions.restored(positions, shifts, about["next_position"], about["length"])
    ropes = [restored_rotation(rope) for rope in about["rope"]]
    if ropes and len(ropes) != len(cache.layers):
        raise argument_error("rope", f"one for each of {len(cache.layers)} layers", len(ropes))
    for rope in ropes if rows.shifted else ():
        check_rotation(rope)
    return Moves(rows, index_tensors.index("segments", ends).tolist(), about["intact"], ropes or None)


def load_error(path: FilePath, expected: object, got: object) -> KvkitError:
    """Return the error of a file whose contents are invalid."""
    return argument_error(str(path), brief(expected, MAX_QUOTE), brief(got, MAX_QUOTE), npz.FileError)
