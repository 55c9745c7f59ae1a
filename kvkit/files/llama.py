"""Read sessions and sequence states that llama.cpp saves.

A file has, in this order and without alignment, in little-endian numbers:

    magic number, version, token ids       a session also has the model's architecture
    outputs of the last batch              only in older sessions
    a cache, or two                        two if some layers have a window; none if all layers are recurrent
    a recurrent memory                     if layers are recurrent

A cell is the place of a token, which several sequences may share. Its numbers have 4 bytes each:

    position | count of sequences | in some models: x, y (the place in an image), token id | the sequences

A cache has streams. A stream has the cells in use, then rows for these cells: keys of all layers, then
values, which may be transposed. A recurrent memory has a cell for each sequence, then the last inputs of each
layer's convolution, then each layer's state. The source is llama.cpp@3514e9f, src/llama-kv-cache.cpp.

A file does not say whether it has outputs, whether cells have places in an image, or whether there are values
(MLA has none). All combinations are tried; the one that consumes every byte is right. Unknown versions are
refused.
"""

import itertools
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from kvkit.errors import brief
from kvkit.files import mapping
from kvkit.files.contents import Contents, name_arrays
from kvkit.files.description import Description
from kvkit.files.errors import file_error
from kvkit.typed import Array, FilePath

SESSION, SEQUENCE = 0x6767736E, 0x67677371
MAGICS = {struct.pack("<I", SESSION): SESSION, struct.pack("<I", SEQUENCE): SEQUENCE}
TITLES = {SESSION: "session of llama.cpp", SEQUENCE: "state of a sequence of llama.cpp"}
EXTRAS = {  # {(magic, version): numbers that cells may have beside position and sequences}
    (SESSION, 9): ("x", "y"),
    (SEQUENCE, 2): ("x", "y"),
    (SESSION, 10): ("x", "y", "token"),
    (SEQUENCE, 3): ("x", "y", "token"),
}
FLOATING = {0: np.dtype("<f4"), 1: np.dtype("<f2"), 30: np.dtype(ml_dtypes.bfloat16)}  # {number: dtype}
BLOCK_TYPES = {  # {ggml's number: (name, bytes of 32 elements)}
    2: ("q4_0", 18), 3: ("q4_1", 20), 6: ("q5_0", 22), 7: ("q5_1", 24), 8: ("q8_0", 34), 20: ("iq4_nl", 18),
    39: ("ggml_mxfp4", 17),
}  # fmt: skip
BLOCK_SIZE = 32  # elements of a block
MOST_LAYERS = 10_000  # the most streams, and layers of all streams; larger numbers mean other bytes
CACHE_NAMES = "cache", "sliding"  # names of the caches in a file
RECURRENT = "recurrent"
OF_CELL = "positions", "sequences", "sequence_starts"
LINES = {  # {(whether there are several streams, whether values are transposed): layout}
    (False, False): "l kv | b n (h c)",
    (False, True): "l kv | b n (h c) ; b (h c) n",
    (True, False): "b l kv | n (h c)",
    (True, True): "b l kv | n (h c) ; (h c) n",
}
# Notes for the user.
ROTATED_NOTE = (
    "since April 2026 llama.cpp rotates keys and values (Hadamard) before it quantizes them, if heads have a "
    "multiple of 64 elements and LLAMA_ATTN_ROT_DISABLE is not set; the file does not say whether it did"
)
NO_HEADS = "the file does not say how many heads a row has: give sizes={'h': N}"
STATES_NOTE = (
    "recurrent layers have a state and no rows of tokens: for each of recurrent_cells, recurrent.I.0 has the "
    "last inputs of the convolution of the I-th recurrent layer, recurrent.I.1 the layer's state"
)


class Unfit(Exception):
    """Says that the bytes do not fit the combination that is tried."""


class ByteReader:
    """Reads the bytes of a file in order; raises `Unfit` beyond their end."""

    def __init__(self, data: Array) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> Array:
        """Return the next `count` bytes."""
        if not 0 <= count <= len(self.data) - self.at:
            raise Unfit(f"{count} bytes at {self.at} reach beyond its end at {len(self.data)}")
        self.at += count
        return self.data[self.at - count : self.at]

    def array(self, dtype: DTypeLike, *shape: int) -> Array:
        """Return the next elements as an array, without a copy."""
        dtype = np.dtype(dtype)
        count = dtype.itemsize
        for size in shape:  # Python's integers do not overflow
            count *= size
        return self.take(count).view(dtype).reshape(shape)

    def number(self, dtype: str = "<u4") -> int:
        """Return the next number."""
        return int(self.array(dtype, 1)[0])

    @property
    def ended(self) -> bool:
        """Return whether all bytes have been read."""
        return self.at == len(self.data)


@dataclass(frozen=True)
class CellCache:
    """Holds one cache of a file."""

    cells: list[Any]  # for each stream {name: array}, or None for a stream without cells
    rows: list[Any]  # for each stream arrays [layer][kv], or [layer] without values, or None
    types: tuple[set[int], set[int]]  # ggml's numbers of the types of keys, and of values
    transposed: bool  # whether values are

    @property
    def format(self) -> str | None:
        """Return the types of keys and values as a name such as q8_0/q4_0; None if layers differ."""
        names = [type_name(min(side)) for side in self.types if len(side) == 1]
        if len(names) != sum(map(bool, self.types)):
            return None
        return "/".join(dict.fromkeys(names)) or None

    @property
    def rotation(self) -> str | None:
        """Return "none" for floats; None (unknown) for codes, which may be rotated."""
        return "none" if set().union(*self.types) <= FLOATING.keys() else None


@dataclass(frozen=True)
class RecurrentMemory:
    """Holds the recurrent memory of a file."""

    cells: dict[str, Array]  # one cell for each sequence
    rows: list[list[Array]]  # for each recurrent layer [convolution inputs, state], arrays [cells, numbers]
    layers: int  # the number of all layers of the model


def read(path: FilePath) -> Contents:
    """Read the arrays of a session or sequence state, with their description.

    The names are ``cache.LAYER.KV`` (``cache.STREAM.LAYER.KV`` if there are several streams),
    ``cache_cells.positions`` and so on, and ``token_ids``. The second cache is called ``sliding`` instead of
    ``cache``. A recurrent memory is ``recurrent.LAYER.PART``. Block formats are arrays of bytes.
    """
    with open(path, "rb") as file:
        data, mapped = mapping.map_file(file)
    source, magic = ByteReader(data), SESSION
    try:
        magic = source.number()
        version = source.number()
        if (magic, version) not in EXTRAS:
            known = " and ".join(str(number) for kind, number in EXTRAS if kind == magic)
            what = f"a {TITLES[magic]} of version {version}, but kvkit knows {known}"
            raise file_error(path, what, "save it with a llama.cpp that writes one of these versions")
        arrays = {"token_ids": source.array("<i4", source.number())}
        metadata: dict[str, Any] = {"version": version}
        if magic == SESSION:
            metadata["architecture"] = brief(source.take(source.number()).tobytes().decode(errors="replace"))
        caches, recurrent, outputs = read_memory(source, EXTRAS[magic, version], magic == SESSION)
        arrays |= outputs
    except Unfit as error:
        what = f"a {TITLES[magic]}, but damaged, or with a kind of memory that kvkit cannot read ({error})"
        raise file_error(path, what) from None
    for name, cache in zip(CACHE_NAMES, caches, strict=False):
        arrays |= name_cache_arrays(name, cache)
    notes = [NO_HEADS] if any(cache.rows for cache in caches) else []
    types = set().union(*(side for cache in caches for side in cache.types))
    if any(number not in FLOATING for number in types):
        notes.append(ROTATED_NOTE)
    if recurrent is not None:
        arrays |= {f"{RECURRENT}_cells.{what}": array for what, array in recurrent.cells.items()}
        for layer, parts in enumerate(recurrent.rows):
            arrays |= name_arrays(parts, f"{RECURRENT}.{layer}")
        notes.append(STATES_NOTE)
        metadata["recurrent_layers"] = recurrent.layers
    described = describe_cache(caches[0]) if caches else Description()
    metadata["types"] = sorted(map(type_name, types))
    if len(caches) > 1:
        metadata["sliding"] = describe_cache(caches[1]).to_dict()
    if any(len(cache.cells) > 1 for cache in caches):
        metadata["streams"] = len(caches[0].cells)
    return Contents(arrays, metadata, mapped, TITLES[magic], described, tuple(notes))


def read_memory(
    source: ByteReader, extra: tuple[str, ...], session: bool
) -> tuple[list[CellCache], RecurrentMemory | None, dict[str, Array]]:
    """Return (caches, recurrent memory, outputs) by the first combination that consumes the file.

    If none does, raise the error of the combination that read most.
    """
    begin, errors = source.at, []  # [(bytes read, error)]
    outputs_or_none = (True, False) if session else (False,)
    for has_outputs, fields, has_values in itertools.product(outputs_or_none, ((), extra), (True, False)):
        source.at = begin
        caches: list[CellCache] = []
        try:
            outputs = {} if not has_outputs else {  # of the last batch, saved until 2026
                "outputs": source.array("<i4", source.number()),
                "logits": source.array("<f4", source.number("<u8")),
                "embeddings": source.array("<f4", source.number("<u8")),
            }  # fmt: skip
            while not source.ended:
                at = source.at
                try:
                    if len(caches) == len(CACHE_NAMES):
                        raise Unfit(f"{len(source.data) - source.at} bytes are left over")
                    caches.append(read_cache(source, fields, has_values))
                except Unfit as error:  # no cache is here: the rest must be a recurrent memory
                    errors.append((source.at, error))
                    source.at = at
                    return caches, read_recurrent(source), outputs
            return caches, None, outputs
        except Unfit as error:
            errors.append((source.at, error))
    raise max(errors, key=lambda pair: pair[0])[1]


def read_cache(source: ByteReader, fields: tuple[str, ...], has_values: bool) -> CellCache:
    """Read one cache, whose cells have these further fields."""
    streams, transposed = source.number(), False
    cells: list[Any] = []
    rows: list[Any] = []
    types: tuple[set[int], set[int]] = set(), set()
    if not 1 <= streams <= min(MOST_LAYERS, (len(source.data) - source.at) // 4):
        raise Unfit(f"{streams} streams")
    for _ in range(streams):
        count = source.number()
        cells.append(read_cells(source, count, fields) if count else None)
        if not count:
            rows.append(None)
            continue
        flag, layers = source.number(), source.number()
        if flag > 1 or layers + sum(len(stream or ()) for stream in rows) > MOST_LAYERS:
            raise Unfit(f"{layers} layers, and values transposed: {flag}")
        transposed = bool(flag)
        keys = [read_rows(source, count, types[0]) for _ in range(layers)]
        read_side = read_columns if transposed else read_rows
        values = [read_side(source, count, types[1]) for _ in range(layers)] if has_values else []
        rows.append([list(pair) for pair in zip(keys, values, strict=True)] if has_values else keys)
    return CellCache(cells, rows, types, transposed)


def read_cells(source: ByteReader, count: int, fields: tuple[str, ...]) -> dict[str, Array]:
    """Read cells as arrays.

    They are "positions", "sequences" (of all cells), "sequence_starts" (where those of each cell begin), and
    the further fields.
    """
    numbers, begin = 2 + len(fields), source.at  # position, count of sequences, fields
    try:  # the usual case: each cell has one sequence
        table = source.array("<i4", count, numbers + 1)
        if not (table[:, 1] == 1).all():
            raise Unfit("cells of several sequences")
        ids, starts = table[:, -1].copy(), np.arange(count + 1, dtype=np.int64)
    except Unfit:
        source.at = begin
        if 4 * count * numbers > len(source.data) - begin:
            raise Unfit(f"{count} cells") from None
        table = np.empty((count, numbers), "<i4")
        sequences = []
        for cell in range(count):
            table[cell] = source.array("<i4", numbers)
            sequences.append(source.array("<i4", int(table[cell, 1].view("<u4"))))
        ids = np.concatenate(sequences)
        starts = np.concatenate([[0], np.cumsum(list(map(len, sequences)))])
    if (table[:, 0] < 0).any() or (ids < 0).any():
        raise Unfit("positions or sequences below 0")
    cells = {"positions": table[:, 0].copy(), "sequences": ids, "sequence_starts": starts}
    return cells | {name: table[:, 2 + i].copy() for i, name in enumerate(fields)}


def read_recurrent(source: ByteReader) -> RecurrentMemory:
    """Read a recurrent memory, which is the last part of a file.

    The file has the number of all layers of the model, but no arrays for layers with attention. So arrays are
    read to the end of the file.
    """
    count = source.number()
    if not 0 < count <= MOST_LAYERS:
        raise Unfit(f"{count} cells of a recurrent memory")
    positions, ids, starts = [], [], [0]
    for _ in range(count):
        positions.append(source.number("<i4"))
        ids.append(source.array("<i4", source.number()))
        starts.append(starts[-1] + len(ids[-1]))
    flag, layers = source.number(), source.number()
    if flag or not 0 < layers <= MOST_LAYERS:
        raise Unfit(f"{layers} layers, and states transposed: {flag}")
    rows: list[Array] = []
    while not source.ended:
        rows.append(read_rows(source, count, set())[0])
    if len(rows) % 2 or len(rows) > 2 * layers:
        raise Unfit(f"{len(rows)} arrays of a recurrent memory of {layers} layers")
    parts = np.array(positions, "<i4"), np.concatenate(ids), np.array(starts)
    cells = dict(zip(OF_CELL, parts, strict=True))
    convolutions, states = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    pairs = [list(pair) for pair in zip(convolutions, states, strict=True)]
    return RecurrentMemory(cells, pairs, layers)


def read_rows(source: ByteReader, count: int, types: set[int]) -> Array:
    """Read a layer's rows [1, cells, elements] ([1, cells, bytes] of blocks); add their type to `types`."""
    number, size = source.number("<i4"), source.number("<u8")
    types.add(number)
    check_type(number)
    if number in FLOATING:
        if size % FLOATING[number].itemsize:
            raise Unfit(f"rows of {size} bytes of {type_name(number)}")
        return source.array(FLOATING[number], 1, count, size // FLOATING[number].itemsize)
    if size % BLOCK_TYPES[number][1]:
        raise Unfit(f"rows of {size} bytes of {type_name(number)}")
    return source.array(np.uint8, 1, count, size)


def read_columns(source: ByteReader, count: int, types: set[int]) -> Array:
    """Read a layer's transposed values [1, elements, cells]; add their type to `types`."""
    number, size, elements = source.number("<i4"), source.number(), source.number()
    types.add(number)
    check_type(number)
    if number not in FLOATING or size != FLOATING[number].itemsize:
        raise Unfit(f"columns of {type_name(number)}, {size} bytes each")
    return source.array(FLOATING[number], 1, elements, count)


def check_type(number: int) -> None:
    """Raise unless kvkit knows a ggml type."""
    if number not in FLOATING and number not in BLOCK_TYPES:
        raise Unfit(f"elements of the unknown type {number}")


def type_name(number: int) -> str:
    """Return the name of a ggml type."""
    return FLOATING[number].name if number in FLOATING else BLOCK_TYPES[number][0]


def name_cache_arrays(name: str, cache: CellCache) -> dict[str, Array]:
    """Return {name: array} of a cache; names have the stream if there are several."""
    arrays = {}
    used = [i for i, rows in enumerate(cache.rows) if rows is not None]
    several = len(cache.rows) > 1
    for stream in used:
        begin = f"{name}.{stream}" if several else name
        for layer, sides in enumerate(cache.rows[stream]):
            for place, array in name_arrays(sides, f"{begin}.{layer}").items():
                arrays[place] = array[0] if several else array
        cells = f"{name}_cells.{stream}" if several else f"{name}_cells"
        arrays |= {f"{cells}.{what}": array for what, array in cache.cells[stream].items()}
    return arrays


def describe_cache(cache: CellCache) -> Description:
    """Describe a cache. The number of heads stays open: the file does not have it."""
    used = [rows for rows in cache.rows if rows is not None]
    several = len(cache.rows) > 1
    if not used:
        return Description()
    sizes = {"l": len(used[0]), "b": len(cache.rows)}
    if not several:
        sizes["n"] = len(cache.cells[0]["positions"])
    line = LINES[several, cache.transposed]
    has_values = used[0] and isinstance(used[0][0], list)
    if not has_values:
        line = LINES[several, False].replace(" kv", "")
    return Description(line, sizes, cache.format, "cells", rope_applied=True, rotation=cache.rotation)


def join_streams(contents: Contents) -> Contents:
    """Join the streams of a session: rows and cells of all streams, one stream after the other."""
    line = contents.description.layout or ""
    if contents.kind not in TITLES.values() or not line.startswith("b l"):
        return contents
    streams = {}
    for name in CACHE_NAMES:
        found = (re.fullmatch(rf"{name}_cells\.(\d+)\.positions", array) for array in contents.arrays)
        streams[name] = sorted(int(match[1]) for match in found if match)
    begins = tuple(f"{name}{end}." for name in CACHE_NAMES if streams[name] for end in ("", "_cells"))
    arrays = {name: array for name, array in contents.arrays.items() if not name.startswith(begins)}
    transposed = ";" in line
    for name, numbers in streams.items():
        arrays |= join_cache(contents.arrays, name, numbers, transposed)
    has_values = any(name.startswith("cache.0.") for name in arrays)
    line = LINES[False, transposed] if has_values else LINES[False, False].replace(" kv", "")
    metadata = dict(contents.metadata)
    if "sliding" in metadata:
        metadata["sliding"] = metadata["sliding"] | {"layout": line, "sizes": {}}
    sizes = {"l": contents.description.sizes["l"], "b": 1, "n": len(arrays["cache_cells.positions"])}
    described = replace(contents.description, layout=line, sizes=sizes)
    return replace(contents, arrays=arrays, metadata=metadata, description=described)


def join_cache(
    arrays: Mapping[str, Array], name: str, numbers: list[int], transposed: bool
) -> dict[str, Array]:
    """Return the joined arrays of a cache whose streams have these numbers."""
    joined: dict[str, Array] = {}
    if not numbers:
        return joined
    begin = f"{name}.{numbers[0]}."
    for place in (full.removeprefix(begin) for full in arrays if full.startswith(begin)):  # LAYER.KV
        parts = [arrays[f"{name}.{stream}.{place}"] for stream in numbers]
        cell_axis = 1 if transposed and place.endswith(".1") else 0
        joined[f"{name}.{place}"] = (parts[0] if len(parts) == 1 else np.concatenate(parts, cell_axis))[None]
    begin = f"{name}_cells.{numbers[0]}."
    for what in (full.removeprefix(begin) for full in arrays if full.startswith(begin)):
        parts = [arrays[f"{name}_cells.{stream}.{what}"] for stream in numbers]
        if what == "sequence_starts":  # each stream counts from 0; all but the first drop that 0
            before = np.cumsum([0, *(part[-1] for part in parts)])
            parts = [part[i > 0 :] + before[i] for i, part in enumerate(parts)]
        joined[f"{name}_cells.{what}"] = np.concatenate(parts)
    counts = [len(arrays[f"{name}_cells.{stream}.positions"]) for stream in numbers]
    joined[f"{name}_cells.stream"] = np.repeat(np.array(numbers, np.int32), counts)
    return joined
