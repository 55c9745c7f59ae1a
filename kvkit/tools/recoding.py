"""Convert the numbers of a cache to another format, layer by layer, for `convert`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvkit import files
from kvkit.errors import argument_error
from kvkit.files.contents import CACHE
from kvkit.files.paths import check_target, name_in_errors
from kvkit.formats import BY_NAME, FLOATS
from kvkit.formats.known import ALIASES
from kvkit.formats.schemes import Coded, formats_named
from kvkit.tools.readers import LATENT_LISTS, LISTS, LayerReader, SideReader, open_one
from kvkit.tools.rope_pairs import PairOrder
from kvkit.tools.source import LATENT_LINE, LINE, SLIDING, CacheSource, in_file

ENCODED_TOKENS = 2048  # tokens encoded at a time
NewForm = Any  # the new format: `Coded`, or an `Element` of floats


@dataclass(frozen=True)
class Recoded:
    """Holds the result of `recode`."""

    arrays: dict[str, Any]  # {} if they were written to a file
    description: files.Description
    metadata: dict[str, Any]
    before: str  # the old format
    bytes: int  # the size of the new arrays


def recode(
    source: CacheSource, target: str | os.PathLike[str] | None, format: str, from_format: str | None = None,
    rotation: str | None = None, pairs: PairOrder | None = None,
    progress: Callable[[int, int], object] | None = None, compress: str | None = None,
) -> Recoded:  # fmt: skip
    """Convert the caches of a file to a format; perhaps undo a rotation, and reorder elements of keys."""
    format = ALIASES.get(format, format)
    floats = format in map(str, FLOATS)
    forms: list[Any] = [BY_NAME[format]] * 2 if floats else [Coded(f.name, f) for f in formats_named(format)]
    if target is not None:
        check_target(target)
    folder = None if target is None else Path(target).parent
    readers = {name: open_one(each, from_format, rotation) for name, each in source.caches.items()}
    total = sum(array.nbytes for array in source.arrays.values())
    count, finished = sum(reader.count for reader in readers.values()), 0  # layers
    new_arrays: dict[str, Any] = {}
    described: dict[str, files.Description] = {}
    facts: dict[str, Any] = {} if rotation is None else {"rotation": "none", "rotation_blocks": None}
    facts |= {} if pairs is None else {"rope_pairs": pairs.target}
    for name, cache in source.caches.items():
        layers = []
        for i in range(readers[name].count):
            layer = readers[name].layer(i)
            layer = replace(layer, starts=layer.starts[: 1 + (cache.paged.get("rows") or len(layer.starts))])
            lengths = np.diff(layer.starts).tolist()
            if not lengths or 0 in lengths:
                got = ", ".join(map(str, lengths)) or "none"
                raise argument_error("source", "sequences that all have tokens", got)
            if pairs is not None:
                layer = replace(layer, key=pairs.reordered(layer.key))
            # Formats of latent rows have an uncoded rotary tail. Others encode keys and values apart.
            latent = layer.value_dim is not None and (floats or forms[0].format.tail > 0)
            with nullcontext() if target is None else name_in_errors(target):
                arrays = encode_layer(i, layer, forms, folder, latent)
            new_arrays |= in_file(name, arrays)
            layers.append(layer)
            finished += 1
            if progress is not None:
                progress(total * finished // count, total)
        one_length = len(lengths_of(layers[-1])) == 1
        lines = (LATENT_LISTS, LATENT_LINE) if latent else (LISTS, LINE)
        described[name] = replace(
            cache.contents.description, layout=lines[one_length],
            sizes=sizes_of_layers(layers, floats, latent), format=format, tables=None,
            **facts,
        )  # fmt: skip
        new_arrays |= in_file(name, cache.places_of_tokens | cache.numbers_to_write)
    before = readers[CACHE].format or str(layer.value.read(slice(0)).dtype)
    size = sum(array.nbytes for array in new_arrays.values())
    if not source.saved:
        for name, each in source.caches.items():
            new_arrays |= in_file(name, each.other_arrays((CACHE, *each.scales), tables=False))
    metadata = source.carried_metadata(described.get(SLIDING), rotation)
    if target is not None:
        files.write(target, new_arrays, described[CACHE], metadata=metadata, compress=compress)
        new_arrays = {}
    return Recoded(new_arrays, described[CACHE], metadata, before, size)


def lengths_of(layer: LayerReader) -> set[int]:
    """Return the distinct lengths of the sequences."""
    return set(np.diff(layer.starts).tolist())


def encode_layer(
    i: int, layer: LayerReader, forms: Sequence[NewForm], folder: Path | None, latent: bool
) -> dict[str, np.ndarray]:
    """Encode a layer to {name: array} in the layout LINE or LISTS; arrays are mapped from files of `folder`.

    Latent rows are one array for keys and values, in the layout LATENT_LINE or LATENT_LISTS.
    """
    encoded = {}
    lengths = np.diff(layer.starts).tolist()
    for kv, side in enumerate([layer.key] if latent else [layer.key, layer.value]):
        number = f"{i}" if latent else f"{i}.{kv}"
        sequences = [
            encode_sequence(side, start, length, forms[kv])
            for start, length in zip(layer.starts, lengths, strict=False)
        ]
        for part in sequences[0]:
            name = CACHE if part == "codes" else part
            if len(set(lengths)) > 1:
                for b, one in enumerate(sequences):
                    encoded[f"{name}.{b}.{number}"] = join_pieces(one[part], 1, folder)[0]
                continue
            pieces = [piece for one in sequences for piece in one[part]]
            encoded[f"{name}.{number}"] = join_pieces(pieces, len(sequences), folder)
    return {name: array[..., 0, :] for name, array in encoded.items()} if latent else encoded


def sizes_of_layers(layers: Sequence[LayerReader], floats: bool, latent: bool) -> dict[str, int]:
    """Return {axis: size} of all layers that all share; without the content (c) if it is encoded."""
    last = layers[-1]
    lengths = set().union(*map(lengths_of, layers))
    sizes = {"l": len(layers), "b": len(last.starts) - 1}
    sizes |= {"n": min(lengths)} if len(lengths) == 1 else {}
    heads, dims = (
        {(getattr(x.key, name), getattr(x.value, name)) for x in layers} for name in ("heads", "dim")
    )
    if len(heads) == 1 and not latent:
        sizes["h"] = last.value.heads
    if len(dims) == 1 and floats:
        sizes |= {"c": last.key.dim} | ({} if last.value.dim == last.key.dim else {"v": last.value.dim})
    return sizes


def encode_sequence(side: SideReader, start: int, count: int, form: NewForm) -> dict[str, list[np.ndarray]]:
    """Encode a sequence, some tokens at a time; return {part: pieces of its array}."""
    step = max(ENCODED_TOKENS // form.step, 1) * form.step if isinstance(form, Coded) else ENCODED_TOKENS
    parts = [slice(i, min(i + step, start + count)) for i in range(start, start + count, step)]
    if not isinstance(form, Coded):
        return {"codes": [side.read(part).astype(form.dtype) for part in parts]}
    if count % form.step:
        raise argument_error("source", f"a multiple of {form.step} tokens, for {form.name}", count)
    form = form.over(side.read(part) for part in parts)
    shared = () if form.extremes is None else form.shared
    found = {} if form.format.whole else {"whole": [np.asarray(np.float32(1))]}  # `encode` does not return it
    for part in parts:
        for name, array in form.encode(side.read(part)).items():
            if name in shared:
                found[name] = [array]
            elif name != "rest":
                found.setdefault(name, []).append(array)
    return found


def join_pieces(pieces: Sequence[np.ndarray], count: int, folder: Path | None) -> np.ndarray:
    """Join the pieces of `count` sequences to one array, mapped from a file: a cache may exceed the memory.

    The file has no name, so the system deletes it with the process.
    """
    shape = pieces[0].shape
    if len(pieces) > count:
        shape = sum(map(len, pieces)) // count, *shape[1:]
    if folder is None or not pieces[0].size:
        return np.concatenate(pieces, axis=None).reshape(count, *shape)
    with tempfile.TemporaryFile(dir=folder) as file:
        for piece in pieces:
            file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
        file.flush()
        return np.memmap(file, pieces[0].dtype, "r", shape=(count, *shape))
