"""Write sequence states and sessions of llama.cpp, from arrays under the names of `kvkit.files.llama`.

llama.cpp accepts a file whose version, numbers of layers and streams, types and rows match its context.
"""

import struct
from collections.abc import Iterator, Mapping

import numpy as np

from kvkit.files.contents import Contents
from kvkit.files.errors import file_error
from kvkit.files.llama import (
    BLOCK_TYPES,
    CACHE_NAMES,
    EXTRAS,
    FLOATING,
    OF_CELL,
    RECURRENT,
    SEQUENCE,
    SESSION,
    TITLES,
    join_streams,
)
from kvkit.files.paths import check_target, name_in_errors
from kvkit.files.replace import replacing
from kvkit.typed import Array, FilePath

SUFFIX = ".bin"
VERSION = 3  # of sequence states that did not come from llama.cpp
OUTPUTS = (("outputs", "<I"), ("logits", "<Q"), ("embeddings", "<Q"))  # (name, type of its length in a file)


def write(path: FilePath, contents: Contents) -> None:
    """Write the contents of a session or sequence state to a file. An existing file is replaced."""
    check_target(path)
    try:
        pieces = list(pieces_of(join_streams(contents)))
    except (KeyError, ValueError, IndexError) as error:
        raise file_error(path, f"no state of llama.cpp can be made of these arrays ({error})") from None
    with name_in_errors(path), replacing(path) as file:
        for piece in pieces:
            file.write(piece)


def pieces_of(contents: Contents) -> Iterator[bytes]:
    """Yield the bytes of a file, a piece at a time."""
    arrays, metadata = contents.arrays, contents.metadata
    session = contents.kind == TITLES[SESSION]
    magic, version = SEQUENCE, metadata.get("version", VERSION)
    if session:
        magic, version = SESSION, metadata["version"]
    tokens = np.asarray(arrays.get("token_ids", ()), "<i4")
    yield struct.pack("<III", magic, version, len(tokens)) + tokens.tobytes()
    if session:
        text = metadata["architecture"].encode()
        yield struct.pack("<I", len(text)) + text
    for name, code in OUTPUTS:
        if name in arrays:
            yield struct.pack(code, len(arrays[name])) + arrays[name].tobytes()
    line = contents.description.layout or ""
    for name in CACHE_NAMES:
        if f"{name}_cells.positions" in arrays:
            sliding = name != CACHE_NAMES[0]
            format = metadata["sliding"].get("format") if sliding else contents.description.format
            fields, streams = EXTRAS[magic, version], metadata.get("streams", 1)
            yield from pieces_of_cache(arrays, name, fields, streams, ";" in line, format or "")
    if f"{RECURRENT}_cells.positions" in arrays:
        cells = {what: arrays[f"{RECURRENT}_cells.{what}"] for what in OF_CELL}
        own = np.arange(len(cells["positions"]))
        yield struct.pack("<I", len(own)) + bytes_of_cells(cells, own, ())
        yield struct.pack("<II", 0, metadata["recurrent_layers"])
        layers = rows_by_layer(arrays, RECURRENT)
        for part in (0, 1):
            for layer in layers:
                yield bytes_of_rows(layer[part], own, "float32", False)


def pieces_of_cache(
    arrays: Mapping[str, Array], name: str, extra: tuple[str, ...], streams: int, transposed: bool,
    format: str,
) -> Iterator[bytes]:  # fmt: skip
    """Yield the bytes of one cache, whose cells may have the `extra` fields."""
    cells = {what.split(".", 1)[1]: x for what, x in arrays.items() if what.startswith(f"{name}_cells.")}
    stream_of_cells = cells.get("stream", np.zeros(len(cells["positions"]), np.int32))
    fields = tuple(field for field in extra if field in cells)
    if fields and fields != extra:
        raise ValueError(f"cells have {', '.join(fields)} and not {', '.join(extra)}")
    layers = rows_by_layer(arrays, name)
    yield struct.pack("<I", streams)
    for number in range(streams):
        own = np.flatnonzero(stream_of_cells == number)
        yield struct.pack("<I", len(own)) + bytes_of_cells(cells, own, fields)
        if not len(own):
            continue
        yield struct.pack("<II", transposed, len(layers))
        formats = format.split("/") if "/" in format else [format, format]
        for kv, side_format in enumerate(formats):
            for layer in layers:
                if kv < len(layer):  # not so for values of MLA, which has none
                    yield bytes_of_rows(layer[kv][0], own, side_format, bool(kv) and transposed)


def rows_by_layer(arrays: Mapping[str, Array], name: str) -> list[list[Array]]:
    """Return [keys] or [keys, values] of each layer."""
    layers: list[list[Array]] = []
    while f"{name}.{len(layers)}.0" in arrays or f"{name}.{len(layers)}" in arrays:
        place = f"{name}.{len(layers)}"
        layers.append([arrays[place]] if place in arrays else [arrays[f"{place}.{kv}"] for kv in (0, 1)])
    return layers


def bytes_of_cells(cells: Mapping[str, Array], own: Array, fields: tuple[str, ...]) -> bytes:
    """Return the bytes of the cells with the numbers `own`."""
    starts, pieces = cells["sequence_starts"], []
    for cell in own:
        ids = cells["sequences"][starts[cell] : starts[cell + 1]]
        numbers = [cells["positions"][cell], len(ids), *(cells[field][cell] for field in fields), *ids]
        pieces.append(np.array(numbers, "<i4").tobytes())
    return b"".join(pieces)


def bytes_of_rows(rows: Array, own: Array, format: str, transposed: bool) -> bytes:
    """Return the bytes of the cells `own` of a layer: rows [cells, elements], or transposed ones."""
    kind, size = type_of(rows.dtype, format)
    if transposed:
        head = struct.pack("<iII", kind, rows.dtype.itemsize, len(rows))
        return head + np.ascontiguousarray(rows[:, own]).tobytes()
    if size and rows.shape[1] % size:
        raise ValueError(f"rows of {rows.shape[1]} bytes of {format}")
    return struct.pack("<iQ", kind, rows.shape[1] * rows.dtype.itemsize) + rows[own].tobytes()


def type_of(dtype: np.dtype, format: str) -> tuple[int, int]:
    """Return (number of a ggml type, bytes of its blocks or 0 for floats)."""
    for number, known in FLOATING.items():
        if dtype == known:
            return number, 0
    for number, (name, size) in BLOCK_TYPES.items():
        if name == format and dtype == np.uint8:
            return number, size
    raise ValueError(f"{dtype} of format {format or 'unknown'}")
