"""Keys and values of any file that `inspect` knows, layer by layer, as floats: codes are decoded when read.

`opened` takes a path, arrays by name, `kvkit.files.Contents` or a cache object, and finds what lies there:

    arrays by a layout      as `kvkit.layouts.view` has them, with the tables beside them: the sequences' rows
    codes among those       of the format that the file names: arrays of the same layout are beside them
    codes by `convert`      what `kvkit.formats.encode` returns, for each layer, side and b
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
from kvkit.errors import argument_error, describe
from kvkit.files import Contents, llama
from kvkit.files.arrays import BESIDE
from kvkit.formats import BY_DTYPE, FLOATS, NAMED, decode
from kvkit.formats.elements import FLOATS8
from kvkit.formats.known import Format
from kvkit.formats.schemes import Coded, formats_named
from kvkit.layouts.views import KV
from kvkit.tools.inspecting import TABLES, pages_of, taken, viewed

LINE = "l kv | b n h c"  # of codes, and of what `encode` returns beside them, as `convert` writes them
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


def opened(
    source: Any,
    layout: str | None = None,
    sizes: Mapping[str, int] | None = None,
    from_format: str | None = None,
) -> Layers:
    """The layers of a file, of arrays by name, or of a cache object.

    Parameters
    ----------
    source : path, mapping of arrays, Contents, or cache
        A file that `kvkit.tools.inspect` knows, what is in one, or a cache of `kvkit.cache`.
    layout : str, optional
        How the cache lies, if its file does not say so.
    sizes : mapping, optional
        Of the axes l, b, n, h, c that shapes do not tell.
    from_format : str, optional
        What codes are, if their file does not say so.

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
    return of_layout(name, contents, layout or contents.description.layout, sizes, from_format)


def of_cache(cache: Any) -> Layers:
    """The layers of a cache object."""
    if not len(cache.layers) or not cache.layers[0].batch_size:
        raise argument_error("source", "a cache that has tokens", "an empty one")
    said = [layer.describe() for layer in cache.layers if hasattr(layer, "describe")]
    format = worded(said) if said else paged_format(cache.describe())
    count = len(cache.layers)
    return Layers(type(cache).__name__, count, lambda i: of_states(i, cache.layers[i]), format)


def of_saved(name: str, contents: Contents, about: list[Any]) -> Layers:
    """A file of `Cache.save`, whose layers are restored one at a time."""
    if not about:
        raise argument_error("source", "a cache that has tokens", "an empty one")

    def layer(i):
        return of_states(i, loading.restored(name, i, about[i], contents.arrays))

    try:
        format = worded([said["arguments"] for said in about])
    except (AttributeError, KeyError, TypeError) as error:
        raise argument_error(
            name, "a description of every layer", f"{type(error).__name__} ({error})"
        ) from None
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
        raise argument_error("source", "layers that have tokens", f"none in layer {i}")
    keys, values = (np.asarray(side).swapaxes(1, 2) for side in layer.stored())
    starts = list(range(0, keys.shape[0] * keys.shape[1] + 1, keys.shape[1]))
    return Layer(f"layer {i}", of_floats("keys", list(keys)), of_floats("values", list(values)), starts)


def of_layout(
    name: str,
    contents: Contents,
    layout: str | None,
    sizes: Mapping[str, int] | None,
    from_format: str | None,
) -> Layers:
    """The cache of a file, as its layout says; of tables the rows that sequences have."""
    cache = contents.cache
    if cache is None or layout is None:
        wanted = "an array 'cache' and its layout, or keys and values by name (key/value, keys/values)"
        raise argument_error("source", wanted, ", ".join(list(contents.arrays)[:8]))
    coded = {each.dtype for each in leaves(cache)} - {one.dtype for one in FLOATS}
    told = format_said(contents, from_format, coded) if coded else None
    formats = formats_named(told) if told else None
    known = dict(contents.description.sizes) | dict(sizes or {})
    beside = {
        part: found
        for name, part in BESIDE.items()
        if formats and (found := files.nested(contents.arrays, name)) is not None
    }
    if formats and layout == LINE and not any(name.startswith(TABLES) for name in contents.arrays):
        parts, pages = as_encoded({"codes": cache} | beside), None
    else:
        views, lengths = viewed(cache, layout, known)
        if views is None:
            raise argument_error("layout", "one whose content is not split (kvkit convert makes one)", layout)
        for one in formats or ():
            if one.along == "tokens" or (one.find != "given" and one.per in ("tensor", "head", "channel")):
                raise argument_error("format", "one whose tokens are decoded each for itself", told)
        own = {axis: count for axis, count in known.items() if axis not in "cv"}
        parts = {"codes": views} | {part: viewed(found, layout, own)[0] for part, found in beside.items()}
        pages = pages_of(contents, lengths.get("n"))
    if formats and isinstance(scale := paged(contents).get("arguments", {}).get("scale"), list):
        parts["scale"] = KV(*np.swapaxes(np.asarray(scale, np.float32), 0, 1))  # of each head
    codes, rows = parts["codes"], None if pages is None else pages[1].rows()

    def side(which, i):
        arrays = {part: getattr(found, which)[i] for part, found in parts.items()}
        own = formats and formats[which == "values"]
        if leaves(arrays["codes"])[0].dtype not in coded:
            arrays, own = {"codes": arrays["codes"]}, None
        if isinstance(arrays["codes"], tuple) or rows is None:
            sequences = [dict(zip(arrays, each, strict=True)) for each in zip(*arrays.values(), strict=True)]
            return of_sequences(which, sequences, own)
        size = arrays["codes"].shape[1]

        def read(part):
            at = rows[part] // size, rows[part] % size
            some = {part: x[at] if x.ndim > 1 else x for part, x in arrays.items()}
            return decode(some, own) if own else some["codes"]

        return made(which, read, len(rows), own)

    def layer(i):
        key, value = side("keys", i), side("values", i)
        if key.tokens != value.tokens:
            raise argument_error("values", f"{key.tokens} tokens, as keys have", value.tokens)
        starts = pages[1].starts() if pages else np.cumsum([0, *map(len, codes.keys[i])])
        starts *= key.tokens // max(starts[-1], 1)  # a row of codes may have several tokens
        return Layer(f"layer {i}", key, value, starts.tolist())

    notes = tuple(note for note in contents.notes if note != llama.HEADS)
    if pages is None and len(codes.keys[0]) > 1 and "cache" not in contents.metadata:
        notes = (*notes, ORDER)
    format = " and ".join(dict.fromkeys(map(str, formats or ()))) or None
    return Layers(name, len(codes.keys), layer, format, notes)


def as_encoded(parts: Mapping[str, Any]) -> dict[str, KV]:
    """Codes and what is beside them as LINE has them, without views: their other axes are the format's."""
    found, shapes = {}, set()
    try:
        for part, cache in parts.items():
            keys, values = zip(*(map(np.asarray, pair) for pair in cache), strict=True)
            found[part] = KV(keys, values)
            shapes |= {(len(keys), len(array)) for array in keys + values}
        fits = len(shapes) == 1 and {array.ndim for array in leaves(parts["codes"])} == {4}
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise argument_error(
            "cache", f"arrays as '{LINE}' has them, and as many b of {', '.join(parts)}", "others"
        )
    return found


def leaves(found: Any) -> list[np.ndarray]:
    return list(files.flat({"": found if isinstance(found, np.ndarray) else list(found)}).values())


def format_said(contents: Contents, told: str | None, dtypes: set[np.dtype]) -> str:
    """What the codes of a file are: somebody says so, or they are floats of 8 bits."""
    if told is not None:
        return told
    told = paged_format(paged(contents).get("arguments", {})) or contents.description.format
    if told is None and isinstance(types := contents.metadata.get("types"), list):
        coded = [each for each in types if each not in map(str, FLOATS)]
        told = coded[0] if len(coded) == 1 else None
    if len(dtypes) == 1 and (told is None or told.split(":")[0] not in NAMED):
        told = {one.dtype: one.name for one in FLOATS8}.get(min(dtypes, key=str), told)
    if told is None:
        raise argument_error(
            "from_format", "one that the file names, for its codes", ", ".join(map(str, dtypes))
        )
    return told


def paged(contents: Contents) -> Mapping[str, Any]:
    """What a file of `PagedCache.save` says of it; nothing of other files."""
    about = contents.metadata.get("cache")
    found = about.get("paged") if isinstance(about, dict) else None
    return found if isinstance(found, dict) else {}


def paged_format(about: Mapping[str, Any]) -> str | None:
    """The format of a `PagedCache`, by what its constructor is told."""
    bits = about.get("quant_bit")
    return about.get("quant_format") or (f"int{bits}:g{about.get('quant_group')}" if bits else None)


def of_floats(name: str, sequences: Sequence[np.ndarray]) -> Side:
    """Sequences of floats [tokens, heads, dim], one behind the other."""
    return of_sequences(name, [{"codes": array} for array in sequences], None)


def of_sequences(name: str, sequences: Sequence[Mapping[str, np.ndarray]], format: Format | None) -> Side:
    """The same of codes and what is beside them: arrays [tokens, heads, ...] by name."""
    if not sequences:
        raise argument_error(name, "a sequence or more", "none")
    each = in_row(format)
    starts = np.cumsum([0, *(len(one["codes"]) * each for one in sequences)]).tolist()

    def read(part):
        begin, end, _ = part.indices(starts[-1])
        pieces = [
            decoded(one, max(begin - start, 0), min(end, stop) - start, format)
            for one, start, stop in zip(sequences, starts, starts[1:], strict=False)
            if start < end and begin < stop
        ] or [decoded(sequences[0], 0, 0, format)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    return made(name, read, starts[-1], format)


def in_row(format: Format | None) -> int:
    """Tokens in a row of codes."""
    return 8 // format.code.bits if format is not None and format.along == "tokens" else 1


def decoded(arrays: Mapping[str, np.ndarray], begin: int, end: int, format: Format | None) -> np.ndarray:
    """Some tokens of a sequence; what shares a scale is decoded together."""
    if format is None:
        return arrays["codes"][begin:end]
    step = Coded(format.name, format).step
    low, high = begin // step * step, -(-end // step) * step
    per = format.per or ("token" if not format.asks and np.ndim(arrays.get("scale", 0)) > 1 else "tensor")
    beside = {"group": 1, "token": 1, "channel": format.group}.get(per, 0)
    cut = {}
    for part, array in arrays.items():
        tokens = {"codes": in_row(format), "whole": 0}.get(part, beside) if array.ndim else 0
        cut[part] = array[low // tokens : high // tokens] if tokens else array
    return decode(cut, format)[begin - low : end - low]


def made(name: str, read: Callable[[slice], np.ndarray], tokens: int, format: Format | None) -> Side:
    """A side that is read so; of its tokens none are read here."""
    one = read(slice(0))
    if BY_DTYPE.get(one.dtype) not in FLOATS:
        raise argument_error(
            name, "float32, float16 or bfloat16, or codes of a format that the file names", describe(one)
        )
    _, heads, dim = one.shape
    return Side(read, tokens, heads, dim, BY_DTYPE[one.dtype].bits if format is None else 16)
