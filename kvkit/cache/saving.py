"""Save a cache in one .npz file that describes itself; see `kvkit.files.npz` for the form of such files.

The metadata's ``description`` has the layout, if there is one. Its ``cache`` has the version, the dtype and
shape of every array, a sha256 over this description and the bytes of all arrays, and one of these two:

    layers      for a `Cache`: the kind of each layer, how many tokens its updates had and, if it is known,
                ``rope``, the rotation of its keys. The arrays of layer I are ``layers.I.keys`` and
                ``layers.I.values``, for a quantized layer ``layers.I.keys.codes`` and so on, see
                `kvkit.cache.stores.codes.PARTS`. A layer without tokens has no arrays
                A recurrent state has ``layers.I.checkpoints`` (positions) and ``layers.I.states.NAME``
                [versions, B, ...]: the state at each checkpoint, then the present one.
                A layer whose rows were removed or moved (version 2) also has ``layers.I.positions`` and
                ``layers.I.rope_shifts``. A layer whose heads keep different tokens (version 2) has
                ``layers.I.lengths`` [B, Hkv]; in its other arrays the tokens of a head follow those of the
                head before: keys and values are [tokens, D]
    paged       for a `PagedCache`: its arguments (a rope for each layer), the number of rows, and its
                sequences. Its arrays are ``blocks`` (the numbers of the blocks in use, which loading keeps),
                ``cache`` and ``scale`` ([layers, key|value, block, row, head, dim] of these blocks),
                ``sequences.I.block_table`` and ``sequences.I.token_ids``. A sequence whose tokens were
                removed or moved (version 2) also has ``sequences.I.positions``, ``.rope_shifts`` and
                ``.segments`` (where all but the last segment end). Published blocks have
                ``published.blocks``, ``.hashes`` and ``.token_ids``, in the order of eviction
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from kvkit.cache.blocks.pool import HASH_BYTES
from kvkit.cache.layers import kinds
from kvkit.cache.layers.positions import describe_rotation
from kvkit.errors import argument_error
from kvkit.files import Description, members, npz
from kvkit.typed import Array, FilePath

VERSION = 1
MOVED_VERSION = 2  # of a file with removed or moved rows, which also has positions and rope shifts
PAGED_ARRAYS = "cache", "scale"
PLAIN, PAGED, LATENT = "l kv | b h n c", "| l kv b n h c", "| l 1 b n 1 c"  # layouts


def save(cache: Any, path: FilePath, compress: str | None = None) -> None:
    """Write a `Cache` to a file."""
    layers: list[dict[str, Any]] = []
    arrays: dict[str, Array] = {}
    for i, layer in enumerate(cache.layers):
        state = {"length": layer.get_seq_length(), "record_past": layer._record_past}
        layers.append(kinds.describe_layer(layer) | state)
        own = layer._arrays() | layer._moves()
        arrays |= {f"layers.{i}.{name}": array for name, array in own.items()}
    plain = all(name.endswith((".keys", ".values")) for name in arrays)
    line = PLAIN if plain and len(arrays) == 2 * len(layers) > 0 else None
    version = MOVED_VERSION if any(layer._was_moved for layer in cache.layers) else VERSION
    write_file(path, {"version": version, "layers": layers}, arrays, line, compress)


def save_paged(cache: Any, path: FilePath, sequences: Iterable[Any], compress: str | None = None) -> None:
    """Write a `PagedCache` to a file: its published blocks, its rows and these sequences."""
    allocator, rows = cache.blocks, cache.rows.sequences
    if allocator.open_step is not None:
        raise argument_error("cache", "a cache without an open step", "an open step")
    saved = [*rows, *sequences]
    for seq in saved:
        allocator._check(seq)
    if len(set(map(id, saved))) < len(saved):
        raise argument_error("sequences", "each sequence once", "one twice")
    published = list(allocator._published())
    blocks = {item.block for item in published}.union(*(seq._table for seq in saved))
    numbers = np.array(sorted(blocks), np.int64)
    pools = zip(PAGED_ARRAYS, cache.store.blocks, strict=False)  # there may be no scales
    arrays = {"blocks": numbers} | {name: pool[:, :, numbers] for name, pool in pools}
    for i, seq in enumerate(saved):
        arrays[f"sequences.{i}.block_table"] = np.array(seq.blocks, np.int64)
        arrays[f"sequences.{i}.token_ids"] = seq.token_ids
        if seq._intact is not None:
            arrays[f"sequences.{i}.positions"] = seq.positions
            arrays[f"sequences.{i}.rope_shifts"] = seq.rope_shifts
            arrays[f"sequences.{i}.segments"] = np.array(seq._borders, np.int64)
    hashes, ids = (b"".join(getattr(item, name) for item in published) for name in ("digest", "token_ids"))
    arrays["published.blocks"] = np.array([item.block for item in published], np.int64)
    arrays["published.hashes"] = np.frombuffer(hashes, np.uint8).reshape(-1, HASH_BYTES)
    arrays["published.token_ids"] = np.frombuffer(ids, "<i8").reshape(-1, allocator.page_size)
    described = [{"length": seq.length, "root": seq._chain[0].hex(), **moves_of(seq)} for seq in saved]
    about = {"arguments": cache._describe(), "rows": len(rows), "sequences": described}
    version = MOVED_VERSION if any(seq._intact is not None for seq in saved) else VERSION
    line = LATENT if cache.store.latent_dim else PAGED
    write_file(path, {"version": version, "paged": about}, arrays, line, compress)


def moves_of(seq: Any) -> dict[str, Any]:
    """Describe the removed and moved tokens of a sequence for a file; {} without any."""
    if seq._intact is None:
        return {}
    ropes = [describe_rotation(rope) for rope in seq._ropes or ()]
    return {"next_position": seq.next_position, "intact": seq._intact, "rope": ropes}


def write_file(
    path: FilePath, about: Mapping[str, Any], arrays: Mapping[str, Array], line: str | None,
    compress: str | None,
) -> None:  # fmt: skip
    """Write a file with its description; `line` is the layout of its arrays, None if they have none."""
    about = {**about, "arrays": {name: array_form(array) for name, array in arrays.items()}}
    layout = {} if line is None else {"description": Description(line).to_dict()}
    metadata = layout | {"cache": about | {"fingerprint": hash_contents(about, arrays)}}
    npz.write(path, arrays, metadata, compress=compress)


def array_form(array: Array) -> list[Any]:
    return [array.dtype.name, *array.shape]


def hash_contents(about: Mapping[str, Any], arrays: Mapping[str, Array]) -> str:
    """Return the sha256 of the description and of the bytes of all arrays, in the order of their names."""
    total = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(arrays):
        for chunk in members.iterate_bytes(arrays[name]):
            total.update(chunk)
    return total.hexdigest()
