"""Keys and values of any file that `inspect` knows, layer by layer, as floats: codes are decoded when read.

`opened` takes a path, arrays by name, `kvkit.files.Contents` or a cache object, and finds what lies there:

    arrays by a layout      as `kvkit.layouts.view` has them, with the tables beside them: the sequences' rows
    codes among those       of the format that the file names: scales and minima are arrays of the same layout
    a saved `Cache`         of quantized layers: a layer is restored when it is asked for
    a cache object          its layers

A `Side` reads a slice of its tokens, so nobody needs a layer as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvkit import files
from kvkit.cache import loading
from kvkit.checks.words import describe, wrong
from kvkit.files import Contents, llama
from kvkit.formats import BY_DTYPE, FLOATS, NAMED, decode, named
from kvkit.formats.elements import FLOATS8
from kvkit.formats.known import Format
from kvkit.tools.inspecting import pages_of, taken, viewed

BESIDE = "scale", "scales", "minima"  # names of arrays beside codes, of their layout
ORDER = "the file has no tables: all blocks are taken for sequences"


@dataclass(frozen=True)
class Side:
    """Keys or values of a layer: `read` gives a slice of its tokens, floats [tokens, heads, dim]."""

    read: Callable[[slice], np.ndarray]
    tokens: int
    heads: int
    dim: int
    bits: int  # of an element, as a float


@dataclass(frozen=True)
class Layer:
    """Keys and values of the tokens of all sequences, one behind the other.

    `queries` are those of the last tokens of each sequence, [tokens, query heads, dim], where they are known.
    """

    name: str
    key: Side
    value: Side
    starts: list[int]  # where sequences begin among the tokens, and their number
    queries: list[np.ndarray] | None = None


@dataclass(frozen=True)
class Layers:
    """What was opened: `layer(i)` of `count`; the format of its codes, None of floats; what to know of it."""

    name: str
    count: int
    layer: Callable[[int], Layer]
    format: str | None = None
    notes: tuple[str, ...] = ()


def opened(source: Any, layout: str | None = None, sizes: Mapping[str, int] | None = None) -> Layers:
    """The layers of a file, of arrays by name, or of a cache object.

    Parameters
    ----------
    source : path, mapping of arrays, Contents, or cache
        A file that `kvkit.tools.inspect` knows, what is in one, or a cache of `kvkit.cache`.
    layout : str, optional
        How the cache lies, if its file does not say so.
    sizes : mapping, optional
        Of the axes l, b, n, h, c that shapes do not tell.

    Returns
    -------
    Layers
        Nothing has been decoded.

    Raises
    ------
    KvkitError
        If there is no cache, if its layout or its format is not known, or if both contradict its arrays.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit import files, formats
    >>> from kvkit.tools.reading import opened
    >>> x = np.ones((5, 2, 64), np.float32)  # tokens, heads, elements
    >>> codes = formats.encode(x, "q8_0")["codes"]
    >>> said = files.Description("l kv | b n h c", format="q8_0")
    >>> found = opened(files.Contents({"cache": [[codes[None]] * 2]}, {}, description=said))
    >>> found.format, found.layer(0).key.read(slice(3, 5)).shape
    ('q8_0', (2, 2, 64))
    """
    if not isinstance(source, (Contents, Mapping)) and hasattr(source, "layers"):
        return of_cache(source)
    contents = source if isinstance(source, Contents) else taken(source)
    name = contents.kind if isinstance(source, (Contents, Mapping)) else str(source)
    about = contents.metadata.get("cache")
    if contents.cache is None and isinstance(about, dict) and isinstance(about.get("layers"), list):
        return of_saved(name, contents, about["layers"])
    return of_layout(name, contents, layout or contents.description.layout, sizes)


def of_cache(cache: Any) -> Layers:
    """The layers of a cache object."""
    if not len(cache.layers) or not cache.layers[0].batch_size:
        raise wrong("source", "a cache that has tokens", "an empty one")
    said = [layer.describe() for layer in cache.layers if hasattr(layer, "describe")]
    format = worded(said) if said else paged_format(cache.describe())
    count = len(cache.layers)
    return Layers(type(cache).__name__, count, lambda i: of_states(i, cache.layers[i]), format)


def of_saved(name: str, contents: Contents, about: list[Any]) -> Layers:
    """A file of `Cache.save`, whose layers are restored one at a time."""

    def layer(i):
        return of_states(i, loading.restored(name, i, about[i], contents.arrays))

    try:
        format = worded([said["arguments"] for said in about])
    except (AttributeError, KeyError, TypeError) as error:
        raise wrong(name, "a description of every layer", f"{type(error).__name__} ({error})") from None
    return Layers(name, len(about), layer, format, contents.notes)


def worded(layers: Sequence[Mapping[str, Any]]) -> str | None:
    """The formats of layers' keys and values, as their constructors are told of them."""
    specs = [each[side] for each in layers for side in ("key", "value") if side in each]
    found = [
        spec.get("format") or f"{'u' if spec.get('scheme') == 'asym' else ''}int{spec['bits']}"
        for spec in specs
    ]
    return " and ".join(dict.fromkeys(found)) or None


def of_states(i: int, layer: Any) -> Layer:
    """A layer of a cache, whose keys and values are [batch, heads, tokens, dim]."""
    if layer.batch_size == 0:
        raise wrong("source", "layers that have tokens", f"none in layer {i}")
    keys, values = (np.asarray(side).swapaxes(1, 2) for side in layer.stored())
    starts = list(range(0, keys.shape[0] * keys.shape[1] + 1, keys.shape[1]))
    return Layer(f"layer {i}", of_floats("keys", list(keys)), of_floats("values", list(values)), starts)


def of_layout(name: str, contents: Contents, layout: str | None, sizes: Mapping[str, int] | None) -> Layers:
    """The cache of a file, as its layout says; of tables the rows that sequences have."""
    cache = contents.cache
    if cache is None or layout is None:
        wanted = "an array 'cache' and its layout, or keys and values by name (key/value, keys/values)"
        raise wrong("source", wanted, ", ".join(list(contents.arrays)[:8]))
    known = dict(contents.description.sizes) | dict(sizes or {})
    views, lengths = viewed(cache, layout, known)
    if views is None:
        raise wrong("layout", "one whose content is not split (kvkit convert makes one)", layout)
    parts = {"codes": views}
    for beside in BESIDE:
        if (found := files.nested(contents.arrays, beside)) is not None:
            own = {axis: count for axis, count in known.items() if axis not in "cv"}
            parts["scale" if beside != "minima" else beside] = viewed(found, layout, own)[0]
    pages = pages_of(contents, lengths.get("n"))
    rows = None if pages is None else pages[1].rows()
    coded = {each.dtype for side in (views.keys, views.values) for each in leaves(side)} - floats()
    format = format_of(contents, coded) if coded else None
    notes = tuple(note for note in contents.notes if note != llama.HEADS)

    def side(which, i):
        arrays = {part: getattr(found, which)[i] for part, found in parts.items()}
        own = format if leaves(arrays["codes"])[0].dtype in coded else None
        arrays = arrays if own else {"codes": arrays["codes"]}
        if isinstance(arrays["codes"], tuple) or rows is None:
            sequences = [dict(zip(arrays, each, strict=True)) for each in zip(*arrays.values(), strict=True)]
            return of_sequences(which, sequences, own)
        size = arrays["codes"].shape[1]

        def taken(part):
            at = rows[part] // size, rows[part] % size
            return {name: array[at] for name, array in arrays.items()}

        return made(taken, len(rows), own, which)

    def layer(i):
        key, value = side("keys", i), side("values", i)
        starts = pages[1].starts() if pages else np.cumsum([0, *map(len, views.keys[i])])
        return Layer(f"layer {i}", key, value, starts.tolist())

    if pages is None and len(views.keys[0]) > 1 and "cache" not in contents.metadata:
        notes = (*notes, ORDER)
    return Layers(name, len(views.keys), layer, None if format is None else str(format), notes)


def leaves(found: Any) -> list[np.ndarray]:
    return list(files.flat({"": found if isinstance(found, np.ndarray) else list(found)}).values())


def floats() -> set[np.dtype]:
    return {one.dtype for one in FLOATS}


def format_of(contents: Contents, dtypes: set[np.dtype]) -> Format:
    """What the codes of a file are: it says so, or they are floats of 8 bits."""
    about = contents.metadata.get("cache")
    told = contents.description.format
    if isinstance(about, dict) and isinstance(paged := about.get("paged"), dict):
        told = paged_format(paged["arguments"])
    elif told is None and isinstance(types := contents.metadata.get("types"), list):
        coded = [each for each in types if each not in map(str, FLOATS)]
        told = coded[0] if len(coded) == 1 else None
    by_dtype = {one.dtype: one.name for one in FLOATS8}
    if told is None or told.split(":")[0] not in NAMED:
        told = by_dtype.get(min(dtypes, key=str), told) if len(dtypes) == 1 else told
    if told is None:
        raise wrong("format", "one that the file names, for its codes", ", ".join(map(str, dtypes)))
    found = named(told)
    if found.along == "tokens" or (found.find != "given" and found.per in ("tensor", "head", "channel")):
        raise wrong("format", "one whose tokens are decoded each for itself", told)
    return found


def paged_format(about: Mapping[str, Any]) -> str | None:
    """The format of a `PagedCache`, by what its constructor is told."""
    bits = about.get("quant_bit")
    return about.get("quant_format") or (f"int{bits}:g{about.get('quant_group')}" if bits else None)


def of_floats(name: str, sequences: Sequence[np.ndarray]) -> Side:
    """Sequences of floats [tokens, heads, dim], one behind the other."""
    return of_sequences(name, [{"codes": array} for array in sequences], None)


def of_sequences(name: str, sequences: Sequence[Mapping[str, np.ndarray]], format: Format | None) -> Side:
    """The same of codes and what is beside them: arrays [tokens, heads, ...] by name."""
    starts = np.cumsum([0, *(len(one["codes"]) for one in sequences)]).tolist()

    def taken(part):
        begin, end, _ = part.indices(starts[-1])
        pieces = [
            {part: array[max(begin - start, 0) : end - start] for part, array in one.items()}
            for one, start, stop in zip(sequences, starts, starts[1:], strict=False)
            if start < end and begin < stop
        ] or [{part: array[:0] for part, array in sequences[0].items()}]
        if len(pieces) == 1:
            return pieces[0]
        return {part: np.concatenate([piece[part] for piece in pieces]) for part in pieces[0]}

    return made(taken, starts[-1], format, name)


def made(
    taken: Callable[[slice], Mapping[str, np.ndarray]], tokens: int, format: Format | None, name: str
) -> Side:
    """A side whose arrays, of a slice of the tokens, are floats or codes of a format."""

    def read(part):
        arrays = dict(taken(part))
        if format is None:
            return arrays["codes"]
        if "minima" in arrays:
            arrays[format.beside or "minima"] = arrays.pop("minima")
        return decode(arrays, format)

    one = read(slice(0))
    if one.dtype not in floats():
        raise wrong(
            name, "float32, float16 or bfloat16, or codes of a format that the file names", describe(one)
        )
    _, heads, dim = one.shape
    return Side(read, tokens, heads, dim, BY_DTYPE[one.dtype].bits if format is None else 16)
