"""Read the keys and values of any cache as floats, layer by layer, and decode codes on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvkit import files, layouts
from kvkit.cache import reading
from kvkit.errors import argument_error, describe
from kvkit.files import llama
from kvkit.files.contents import BESIDE, nested
from kvkit.formats import BY_DTYPE, FLOATS, decode, rotate
from kvkit.formats.elements import BFLOAT16
from kvkit.formats.known import Format
from kvkit.formats.rotations import Rotation, rotation_named
from kvkit.formats.schemes import Coded, formats_named
from kvkit.layouts.views import KV
from kvkit.tools.names import some_names
from kvkit.tools.queries import (
    MASK_NAMES,
    SCALE,
    find_mask,
    find_queries,
    only_rows,
    queries_of_tokens,
    scale_of_scores,
)
from kvkit.tools.source import (
    LATENT_LINE,
    LINE,
    PACKED,
    TABLE_PREFIXES,
    CacheSource,
    check_pages_in_pool,
    ds_v4_as_rows,
    format_of_paged,
    leaves,
    notes_that_hold,
)

LISTS, LATENT_LISTS = "b l kv | n h c", "b l | n c"  # LINE and LATENT_LINE, if sequences differ in length
LLAMA_ROTATION = "llama.cpp"  # it rotates only heads of a multiple of 64 elements
LATENT_VALUE = 512  # elements of a latent row that are its value, by default
NO_TABLES = "the file has no page tables: each block is read as a sequence"


@dataclass(frozen=True)
class SideReader:
    """Reads the keys or the values of a layer: ``read(slice)`` returns floats [tokens, heads, dim]."""

    read: Callable[[slice], np.ndarray]
    tokens: int
    heads: int
    dim: int
    bits: int  # bits of an element before quantization


@dataclass(frozen=True)
class LayerReader:
    """Reads the keys and values of a layer. Sequences follow one another."""

    name: str
    key: SideReader
    value: SideReader
    starts: list[int]  # the first token of each sequence, then the number of tokens
    queries: list[np.ndarray] | None = None  # of the last tokens of each sequence, [tokens, query heads, dim]
    value_dim: int | None = None  # how many elements of a latent row are its value
    scale: float | None = None  # the factor of scores; None: dim ** -0.5
    no_queries: str = "none"  # what the source has instead of queries, for errors

    @property
    def sides(self) -> dict[str, SideReader]:
        """Return {name: reader} of keys and values, or of latent rows."""
        return {"latent": self.key} if self.value_dim else {"keys": self.key, "values": self.value}

    def only(self, mask: np.ndarray) -> LayerReader:
        """Return a reader of the tokens for which a mask is true."""
        if len(mask) != self.key.tokens:
            raise argument_error("attn_mask", f"{self.key.tokens} tokens, as {self.name} has", len(mask))
        rows, starts = np.flatnonzero(mask), np.array(self.starts)

        def tokens_of(side: SideReader) -> SideReader:
            return replace(side, read=only_rows(side.read, rows), tokens=len(rows))

        queries = self.queries and queries_of_tokens(self.queries, mask, starts)
        counts = np.append(0, np.cumsum(mask))[starts].tolist()
        return replace(
            self, key=tokens_of(self.key), value=tokens_of(self.value), starts=counts, queries=queries
        )


@dataclass(frozen=True)
class CacheReader:
    """Reads the layers of a cache: ``layer(i)`` for i from 0 to `count` - 1."""

    name: str
    count: int
    layer: Callable[[int], LayerReader]
    format: str | None = None  # the format of codes; None for floats
    notes: tuple[str, ...] = ()
    numbers: tuple[int, ...] | None = None  # of the layers in the model; None if they are not known
    mask: Callable[[], np.ndarray | None] = lambda: None  # which tokens are no padding; None without a mask

    def without_padding(self) -> CacheReader:
        """Return a reader of the tokens that the file's mask keeps."""
        mask = self.mask()
        if mask is None:
            return self
        note = f"a mask hides {np.count_nonzero(~mask):,} of {len(mask):,} tokens: padding is not counted"
        return replace(self, layer=lambda i: self.layer(i).only(mask), notes=(note, *self.notes))

    @property
    def places(self) -> tuple[Sequence[int], int | None]:
        """Return (numbers of layers, how many layers the model has; None if some are not in the source)."""
        numbers = range(self.count) if self.numbers is None else self.numbers
        return numbers, self.count if sorted(numbers) == list(range(self.count)) else None


def open_cache(
    source: Any, layout: str | None = None, sizes: Mapping[str, int] | None = None,
    from_format: str | None = None, rotation: str | None = None,
) -> CacheReader:  # fmt: skip
    """Open the layers of a file, of named arrays, or of a cache object, without decoding them.

    The layers of a second cache, which have a window, follow the layers of the first.

    Parameters
    ----------
    source : CacheSource, any of its sources, or a cache of `kvkit.cache`
    layout, sizes
        See `CacheSource`.
    from_format : str, optional
        The format of codes, if their file does not name it.
    rotation : str, optional
        The rotation of the stored keys and values, which is undone.

    Raises
    ------
    KvkitError
        If there is no cache, if its layout or format is unknown, or if these contradict its arrays.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit import files, formats
    >>> from kvkit.tools.readers import open_cache
    >>> x = np.ones((5, 2, 64), np.float32)  # tokens, heads, elements
    >>> codes = formats.encode(x, "q8_0")["codes"]
    >>> described = files.Description("l kv | b n h c", format="q8_0")
    >>> opened = open_cache(files.Contents({"cache": [[codes[None]] * 2]}, {}, description=described))
    >>> opened.format, opened.layer(0).key.read(slice(3, 5)).shape
    ('q8_0', (2, 2, 64))
    """
    if not isinstance(source, (CacheSource, files.Contents, Mapping)) and is_own(source):
        if not len(source.layers) or not source.layers[0].batch_size:
            raise argument_error("source", "a cache that has tokens", "an empty cache")
        arguments = [layer._describe() for layer in source.layers if hasattr(layer, "_describe")]
        format = format_of_layers(arguments) if arguments else format_of_paged(source._describe())
        kind, count = type(source).__name__, len(source.layers)
        return CacheReader(kind, count, lambda i: open_states(i, source.layers[i]), format)
    opened = source if isinstance(source, CacheSource) else CacheSource(source, layout, sizes)
    if opened.cache is None and (latent := nested(opened.arrays, "latent")) is not None:
        # [layers, tokens, dim] or a list of layers: a cache of one sequence
        of_layers = [each[:, 0] if each.ndim == 3 and each.shape[1] == 1 else each for each in latent]
        for each in of_layers:
            if each.ndim != 2:
                wanted = "[layers, tokens, dim], or a list of [tokens, dim]"
                raise argument_error("latent", wanted, describe(each))
        name = opened.name
        arrays: dict[str, Any] = {
            each: x for each, x in opened.arrays.items() if each.partition(".")[0] != "latent"
        }
        arrays |= {"cache": [each[None] for each in of_layers]}
        opened = CacheSource(arrays, layout or LATENT_LINE, sizes)
        opened.name = name
    first, *others = [open_one(each, from_format, rotation) for each in opened.caches.values()]
    return first if not others else join_readers(first, others[0])


def open_one(
    source: CacheSource, from_format: str | None = None, rotation: str | None = None,
    rows: np.ndarray | None = None,
) -> CacheReader:  # fmt: skip
    """Open the layers of one cache of a file, perhaps only some rows of its pool."""
    if source.cache is None and isinstance(about := source.saved.get("layers"), list):
        return open_saved(source, about)
    source = with_bfloat16(ds_v4_as_rows(source, from_format), from_format)
    return open_arrays(source, from_format, rotation, rows)


def join_readers(first: CacheReader, second: CacheReader) -> CacheReader:
    """Join the readers of two caches; the layers of the second follow."""

    def layer(i: int) -> LayerReader:
        if i < first.count:
            return first.layer(i)
        found = second.layer(i - first.count)
        return found if second.numbers is not None else replace(found, name=f"sliding {found.name}")

    names = [format for format in (first.format, second.format) if format]
    format = " and ".join(dict.fromkeys(names)) or None
    notes = dict.fromkeys((*first.notes, *second.notes))
    numbers = None if first.numbers is None or second.numbers is None else first.numbers + second.numbers
    count = first.count + second.count
    return CacheReader(first.name, count, layer, format, tuple(notes), numbers, first.mask)


def is_own(source: Any) -> bool:
    """Return whether a source is a cache object of kvkit."""
    layers = getattr(source, "layers", None)
    return layers is not None and all(hasattr(layer, "_stored") for layer in layers)


def open_saved(source: CacheSource, about: list[Any]) -> CacheReader:
    """Open a file of `Cache.save`; layers are restored one at a time."""
    if not about:
        raise argument_error("source", "a cache that has tokens", "an empty cache")

    def layer(i: int) -> LayerReader:
        return open_states(i, reading.restore_layer(source.name, i, about[i], source.arrays))

    try:
        format = format_of_layers([entry["arguments"] for entry in about])
    except (AttributeError, KeyError, TypeError) as error:
        wanted = "a description of every layer"
        raise argument_error(source.name, wanted, f"{type(error).__name__} ({error})") from None
    others = [name for name in source.arrays if not name.startswith("layers.")]
    notes = *source.contents.notes, *[f"not read: {some_names(others)}"] * bool(others)
    return CacheReader(
        source.name, len(about), layer, format, notes,
        mask=lambda: find_mask(source.arrays, np.array(layer(0).starts), packed=False),
    )  # fmt: skip


def format_of_layers(layers: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the formats of keys and values, by the arguments of the layers' constructors."""
    specs = [each[side] for each in layers for side in ("key", "value") if side in each]
    unsigned = ["u" if spec.get("scheme") == "asym" else "" for spec in specs]
    names = (spec.get("format") or f"{u}int{spec['bits']}" for spec, u in zip(specs, unsigned, strict=True))
    return " and ".join(dict.fromkeys(names)) or None


def open_states(i: int, layer: Any) -> LayerReader:
    """Open a layer object, whose keys and values are [batch, heads, tokens, dim]."""
    if layer.batch_size == 0:
        raise argument_error("source", "layers that have tokens", f"none in layer {i}")
    keys, values = (np.asarray(side).swapaxes(1, 2) for side in layer._stored())
    starts = list(range(0, keys.shape[0] * keys.shape[1] + 1, keys.shape[1]))
    key = open_sequences("keys", [{"codes": array} for array in keys], None)
    value = open_sequences("values", [{"codes": array} for array in values], None)
    return LayerReader(f"layer {i}", key, value, starts)


def open_arrays(
    source: CacheSource, from_format: str | None = None, rotation: str | None = None,
    rows: np.ndarray | None = None,
) -> CacheReader:  # fmt: skip
    """Open the cache of a source by its layout. With block tables, only the rows of sequences are read.

    `rows` are rows of a pool to read instead; where sequences are arrays of their own, all rows are read.
    """
    code_dtypes, notes_on_floats = dtypes_of_codes(source)
    format_name = source.format_of(code_dtypes, from_format) if code_dtypes else None
    formats = formats_of_sides(format_name) if format_name else None
    if rotation is not None and source.contents.description.rotation == "none":
        raise argument_error("rotation", "none, as the file says", rotation)
    undone = rotation_named(rotation)
    parts, pages = view_parts(source, format_name, formats)
    codes, numbers = parts["codes"], source.layer_numbers or []
    if not (numbered := len(numbers) == len(codes.keys)):
        numbers = list(range(len(codes.keys)))
    if rows is None and pages is not None:
        rows = pages.rows()  # of the pool, one sequence after another
    given = source.sequence_starts if pages is None else pages.starts()
    starts = np.array(np.cumsum([0, *map(len, codes.keys[0])]) if given is None else given)
    latent = source.layout is not None and "kv" not in layouts.parse(source.layout).names

    def side(which: str, i: int) -> SideReader:
        arrays = {part: getattr(found, which)[i] for part, found in parts.items()}
        format = formats[which == "values"] if formats else None
        if leaves(arrays["codes"])[0].dtype not in code_dtypes:  # one side of a cache may be floats
            arrays, format = {"codes": arrays["codes"]}, None
        reader = open_side(which, arrays, rows, format)
        rotated = format is not None or source.contents.kind not in llama.TITLES.values()  # llama.cpp: codes
        return undo_rotation(reader, undone, which == "values") if undone and rotated else reader

    named = source.layer_names, source.layout
    beside = find_queries(source.arrays, *named, len(codes.keys), starts, lambda: side("keys", 0))
    queries, notes = beside.layers, beside.notes
    no_queries = "none" if queries or not notes else notes[0]
    scale = scale_of_scores(source.arrays, latent and queries is not None) if queries else None
    packed = pages is not None or source.sequence_starts is not None

    def layer(i: int) -> LayerReader:
        key = side("keys", i)
        value = key if latent else side("values", i)
        value_dim = source.sizes.get("v", min(key.dim, LATENT_VALUE)) if latent else None
        if key.tokens != value.tokens:
            raise argument_error("values", f"{key.tokens} tokens, as keys have", value.tokens)
        own = starts
        if pages is None and not source.sequence_starts:  # layers may differ in length
            own = np.cumsum([0, *map(len, codes.keys[i])])
        own_starts = own * (key.tokens // max(own[-1], 1))  # a row of codes may have several tokens
        own_queries = queries[i] if queries else None
        return LayerReader(
            f"layer {numbers[i]}", key, value, own_starts.tolist(), own_queries, value_dim, scale,
            no_queries=no_queries,
        )  # fmt: skip

    notes = (*notes, *notes_on_floats, *notes_that_hold(source.notes, undone is not None))
    notes = (*notes, *source.unread((*beside.names, *MASK_NAMES, *[SCALE] * bool(queries))))
    if pages is None and len(codes.keys[0]) > 1 and not source.saved:
        notes = (*notes, NO_TABLES)
    format = " and ".join(dict.fromkeys(map(str, filter(None, formats or ())))) or None
    return CacheReader(
        source.name, len(codes.keys), layer, format, notes, tuple(numbers) if numbered else None,
        mask=lambda: find_mask(source.arrays, starts, packed),
    )  # fmt: skip


def formats_of_sides(text: str) -> tuple[Format | None, Format | None]:
    """Return (format of keys, format of values), None for floats, of a name such as float16/q8_0."""
    names = text.split("/") if "/" in text else [text, text]
    found = [None if name in map(str, FLOATS) else formats_named(name)[i] for i, name in enumerate(names)]
    return found[0], found[1]


def undo_rotation(side: SideReader, rotation: Rotation, value: bool) -> SideReader:
    """Return a reader that rotates heads back."""
    if rotation.name == LLAMA_ROTATION and side.dim % 64:
        return side
    rotation.size(side.dim, value)
    return replace(side, read=lambda part: rotate(side.read(part), rotation, what="output", value=value))


def view_parts(source: CacheSource, name: str | None, formats: Any) -> tuple[dict[str, KV], Any]:
    """Return (views of codes and scales, pages of the block tables) for codes of the format `name`."""
    has_tables = any(name.startswith(TABLE_PREFIXES) for name in source.arrays)
    if formats and str(source.layout) in (LINE, LISTS) and not has_tables:  # as `convert` writes codes
        scales = {BESIDE[name]: arrays for name, arrays in source.scales.items()}
        return encoded_parts({"codes": source.require_cache()} | scales, str(source.layout)), None
    kv = source.require_view()
    for one in filter(None, formats or ()):
        by_token = one.rule == "given" or source.scales_inside or one.per not in ("tensor", "head", "channel")
        if one.along == "tokens" or not by_token:
            raise argument_error(source.format_argument, "a format that encodes each token by itself", name)
    convention, pages = source.block_tables() or ("", None)
    if pages is not None and not isinstance(kv.keys[0], tuple):
        check_pages_in_pool(convention, pages, kv.keys[0].shape[0] * kv.keys[0].shape[1])
    return {"codes": kv} | (source.scale_views if formats else {}), None if convention == PACKED else pages


def encoded_parts(parts: Mapping[str, Any], line: str) -> dict[str, KV]:
    """Return {part: views} of codes and scales in the layout LINE or LISTS, whose rows are encoded."""
    found, shapes = {}, set()
    try:
        for part, cache in parts.items():
            if line == LISTS:
                layers = zip(*cache, strict=True)
                sides = [[tuple(np.asarray(pair[kv]) for pair in layer) for kv in (0, 1)] for layer in layers]
                found[part] = KV(*(tuple(side) for side in zip(*sides, strict=True)))
                shapes |= {(len(sides), len(cache))}
                continue
            keys, values = zip(*(map(np.asarray, pair) for pair in cache), strict=True)
            found[part] = KV(*(tuple(map(tuple, side)) for side in (keys, values)))
            shapes |= {(len(keys), len(array)) for array in keys + values}
        axes = {array.ndim for array in leaves(parts["codes"])}
        fits = len(shapes) == 1 and axes == {3 if line == LISTS else 4}
    except (TypeError, ValueError):
        fits = False
    if not fits:
        wanted = f"arrays of the layout '{line}', and an equal number of blocks of {', '.join(parts)}"
        raise argument_error("cache", wanted, "others")
    return found


def open_side(
    name: str, arrays: Mapping[str, Any], rows: np.ndarray | None, format: Format | None
) -> SideReader:
    """Return a reader of the rows `rows`, or of one block after another if `rows` is None."""
    if isinstance(arrays["codes"], tuple) or rows is None:
        blocks = len(arrays["codes"])  # scales without rows are the same for all blocks
        by_block = [x if isinstance(x, tuple) or x.ndim > 1 else (x,) * blocks for x in arrays.values()]
        sequences = [dict(zip(arrays, each, strict=True)) for each in zip(*by_block, strict=True)]
        return open_sequences(name, sequences, format)
    size = arrays["codes"].shape[1]

    def read(part: slice) -> np.ndarray:
        block, row = rows[part] // size, rows[part] % size  # rows may share a scale
        some = {part: x[block, row * x.shape[1] // size] if x.ndim > 1 else x for part, x in arrays.items()}
        return decode(some, format) if format else some["codes"]

    return side_reader(name, read, len(rows), format)


def open_sequences(
    name: str, sequences: Sequence[Mapping[str, np.ndarray]], format: Format | None
) -> SideReader:
    """Return a reader of sequences of codes and scales, arrays [tokens, heads, ...], in order."""
    if not sequences:
        raise argument_error(name, "a sequence or more", "none")
    each = tokens_in_row(format)
    starts = np.cumsum([0, *(len(one["codes"]) * each for one in sequences)]).tolist()

    def read(part: slice) -> np.ndarray:
        begin, end, _ = part.indices(starts[-1])
        pieces = [
            decode_tokens(one, max(begin - start, 0), min(end, stop) - start, format)
            for one, start, stop in zip(sequences, starts, starts[1:], strict=False)
            if start < end and begin < stop
        ] or [decode_tokens(sequences[0], 0, 0, format)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    return side_reader(name, read, starts[-1], format)


def tokens_in_row(format: Format | None) -> int:
    """Return how many tokens one row of an array of codes encodes."""
    return 8 // format.code.bits if format is not None and format.along == "tokens" else 1


def decode_tokens(
    arrays: Mapping[str, np.ndarray], begin: int, end: int, format: Format | None
) -> np.ndarray:
    """Decode tokens begin..end of a sequence. Tokens that share a scale are decoded together."""
    if format is None:
        return arrays["codes"][begin:end]
    step = Coded(format.name, format).step
    low, high = begin // step * step, -(-end // step) * step
    by_token = not format.needs_scale and np.ndim(arrays.get("scale", 0)) > 1
    per = format.per or ("token" if by_token else "tensor")
    with_one_scale = {"group": 1, "token": 1, "channel": format.group}.get(per, 0)  # tokens; 0 means all
    tokens_of_row = {"codes": tokens_in_row(format), "whole": 0}
    cut = {}
    for part, array in arrays.items():
        tokens = tokens_of_row.get(part, with_one_scale) if array.ndim else 0
        cut[part] = array[low // tokens : high // tokens] if tokens else array
    return decode(cut, format)[begin - low : end - low]


def dtypes_of_codes(source: CacheSource) -> tuple[set[np.dtype], tuple[str, ...]]:
    """Return (the dtypes of a cache that are not read as floats, notes on those that are)."""
    dtypes = {each.dtype for each in leaves(source.require_cache())}
    codes = {dtype for dtype in dtypes if BY_DTYPE.get(plain_dtype(dtype)) not in FLOATS}
    wide = any(plain_order(dtype) == np.float64 for dtype in dtypes)
    return codes, ("float64 is read as float32",) * wide


def plain_order(dtype: np.dtype) -> np.dtype:
    """Return a dtype in the machine's order of bytes."""
    return dtype.newbyteorder("=") if dtype.kind == "f" else dtype


def plain_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype that floats are read as: float32 for float64, in the machine's order of bytes."""
    plain = plain_order(dtype)
    return np.dtype(np.float32) if plain == np.float64 else plain


def with_bfloat16(source: CacheSource, from_format: str | None) -> CacheSource:
    """Return a source with arrays of 16-bit integers as bfloat16, if no format is named and they look so.

    numpy has no bfloat16, so many files have its bits. Nearly all magnitudes must lie between 2^-40 and 2^20:
    other integers are as good as never such numbers.
    """
    cache = None if source.cache is None else leaves(source.cache)
    if not cache or from_format or source.stated_format():
        return source
    if not all(each.dtype.kind in "iu" and each.dtype.itemsize == 2 and each.size for each in cache):
        return source
    bits = np.concatenate([each[(slice(1),) * (each.ndim - 2)].reshape(-1)[:4096] for each in cache])
    numbers = np.abs(bits.view(BFLOAT16.dtype).astype(np.float32))
    likely = (numbers == 0) | ((numbers > 2.0**-40) & (numbers < 2.0**20))
    if likely.mean() < 0.99 or not numbers.any():
        return source
    arrays = {
        name: x.view(BFLOAT16.dtype) if x.dtype.kind in "iu" and x.dtype.itemsize == 2 and x.ndim > 1 else x
        for name, x in source.arrays.items()
    }
    notes = *source.contents.notes, "integers of 16 bits are read as bfloat16"
    contents = replace(source.contents, arrays=arrays, notes=notes)
    arguments = source.layout_argument, source.format_argument
    found = CacheSource(contents, source.given_layout, source.given_sizes, arguments)
    found.name = source.name
    return found


def side_reader(
    name: str, read: Callable[[slice], np.ndarray], tokens: int, format: Format | None
) -> SideReader:
    """Return a reader with the sizes of what `read` returns; raise unless these are floats."""
    sample = read(slice(0))
    plain = plain_dtype(sample.dtype)
    if plain != sample.dtype:
        return side_reader(name, lambda part: read(part).astype(plain), tokens, format)
    if BY_DTYPE.get(sample.dtype) not in FLOATS:
        expected = "float32, float16 or bfloat16, or codes of a format that the file names"
        raise argument_error(name, expected, describe(sample))
    _, heads, dim = sample.shape
    return SideReader(read, tokens, heads, dim, BY_DTYPE[sample.dtype].bits if format is None else 16)
