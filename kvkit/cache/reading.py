"""Read the layers and blocks of a saved cache. `kvkit.cache.saving` describes the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvkit.cache.base import SAVED
from kvkit.cache.blocks.pool import HASH_BYTES, Published
from kvkit.cache.blocks.sequence import Moves, SavedSequence
from kvkit.cache.layers import kinds
from kvkit.cache.layers.positions import RowPositions, check_rotation, restored_rotation
from kvkit.cache.saving import MOVED_VERSION, PAGED_ARRAYS, VERSION, array_form, hash_contents
from kvkit.cache.stores.allocation import Allocate, in_memory
from kvkit.checks import index_tensors
from kvkit.errors import KvkitError, argument_error, brief, describe
from kvkit.files import npz
from kvkit.typed import Array, FilePath

Paged = TypeVar("Paged")  # a `PagedCache`
SavedContents = tuple[dict[str, Any], dict[str, Array]]  # of a file: (description of the cache, its arrays)
MAX_QUOTE = 160  # characters of a file's metadata in an error message


def saved_path(directory: FilePath) -> Path:
    """Return the path of the cache that `close` has saved in a folder."""
    path = Path(directory) / SAVED
    if not path.is_file():
        older = (Path(directory) / "cache.json").exists()
        found = f"{directory}, offloaded by an older version" if older else f"{directory}, without it"
        raise argument_error("directory", f"a folder with {SAVED}, which close(keep=True) writes", found)
    return path


def read_layers(path: FilePath, contents: SavedContents, allocate: Allocate = in_memory) -> list[Any]:
    """Return the layers of a saved `Cache`; those without a window have arrays from `allocate`."""
    about, arrays = contents
    if not isinstance(about.get("layers"), list):
        wanted = "a `Cache`" if "paged" in about else "a description of every layer"
        raise load_error(
            path, wanted, "a PagedCache (PagedCache.open)" if "paged" in about else sorted(about)
        )
    layers = enumerate(about["layers"])
    return [restore_layer(path, i, layer, arrays, allocate) for i, layer in layers]


def read_paged(path: FilePath, contents: SavedContents, make: Callable[..., Paged]) -> Paged:
    """Return a saved `PagedCache`, which `make` makes of its arguments."""
    about, arrays = contents
    if "paged" not in about:
        raise load_error(path, "a PagedCache", "a Cache (Cache.open)")
    try:
        return restore_paged(about["paged"], arrays, make)
    except (KvkitError, AttributeError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise load_error(path, "a valid description of a paged cache", error) from None


def read_file(path: FilePath) -> SavedContents:
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


def restore_layer(
    path: FilePath,
    number: int,
    about: dict[str, Any],
    arrays: Mapping[str, Array],
    allocate: Allocate = in_memory,
) -> Any:
    """Build one layer and fill it with the file's arrays."""
    begin = f"layers.{number}."
    arrays = {name.removeprefix(begin): array for name, array in arrays.items() if name.startswith(begin)}
    try:
        layer = kinds.make_layer(about)
        if layer.window is None:
            layer._lie_in(allocate)
        layer._load(arrays, about["length"])
        layer._record_past = about["record_past"]
    except (KvkitError, AttributeError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise load_error(path, f"a valid layer {number}", error) from None
    return layer


def restore_paged(about: Mapping[str, Any], arrays: Mapping[str, Array], make: Callable[..., Paged]) -> Paged:
    """Build a paged cache and fill it with the file's arrays."""
    arguments = dict(about["arguments"])
    ropes = [restored_rotation(rope) for rope in arguments.get("rope") or ()]
    cache: Any = make(**arguments | {"salt": bytes.fromhex(arguments["salt"]), "rope": ropes or None})
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
    sequences = cache.blocks._restore(saved, published, set(blocks.tolist()))
    count = about["rows"]
    if len({(seq.positions.tobytes(), seq.rope_shifts.tobytes()) for seq in sequences[:count]}) > 1:
        wanted = "sequences with equal positions"
        raise argument_error("rows", wanted, [seq.length for seq in sequences[:count]])
    cache.rows.sequences, cache.sequences = sequences[:count], sequences[count:]
    return cache


def restore_moves(i: int, about: Mapping[str, Any], arrays: Mapping[str, Array], cache: Any) -> Moves:
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
