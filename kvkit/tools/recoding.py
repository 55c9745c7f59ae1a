"""`convert` with a format: the numbers of a cache coded again, a layer at a time."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from kvkit import files
from kvkit.cache import load
from kvkit.checks.words import describe, wrong
from kvkit.files import Contents, Description
from kvkit.files.arrays import CACHE
from kvkit.files.paths import check_target
from kvkit.formats import BY_NAME, decode, encode
from kvkit.formats.elements import BY_DTYPE, FLOATS, FLOATS8
from kvkit.formats.schemes import Coded, formats_named
from kvkit.tools.inspecting import viewed

LINE = "l kv | b n h c"
BESIDE = "scale", "minimum", "zero", "whole"
SOME = 2048  # tokens that are encoded at a time
FLOAT8 = {element.dtype: element.name for element in FLOATS8}


def recoded(source, contents, target, format, from_format, from_layout, sizes, progress):
    """(arrays unless they are written, description, the format that was, bytes) of a cache coded again."""
    coded = None if format in map(str, FLOATS) else formats_named(format)
    if target is not None:
        check_target(target)
    layers, count, said, kept, before = layers_of(source, contents, from_format, from_layout, sizes)
    made, size = {}, sum(array.nbytes for array in contents.arrays.values())
    with tempfile.TemporaryDirectory(dir=None if target is None else Path(target).parent) as folder:
        for i in range(count):
            for side, x in enumerate(layers(i)):  # [b, n, h, c]
                if coded is None:
                    parts = {"codes": np.asarray(x, BY_NAME[format].dtype)}
                else:
                    each = [encoded(rows, coded[side]) for rows in x]
                    parts = {name: np.stack([arrays[name] for arrays in each]) for name in each[0]}
                for name, array in parts.items():
                    name = f"{CACHE if name == 'codes' else name}.{i}.{side}"
                    made[name] = array if target is None else on_disk(array, Path(folder) / name)
            if progress is not None:
                progress(size * (i + 1) // count, size)
        sizes = dict(zip("lbnh", (count, *x.shape[:3]), strict=True))
        if coded is None:
            sizes["c"] = x.shape[3]
        said = Description(**vars(said) | {"layout": LINE, "sizes": sizes, "format": format})
        total = sum(array.nbytes for array in made.values())
        if target is not None:
            files.write(target, kept | made, said)
            kept = made = {}
    return kept | made, said, before, total


def encoded(rows, format):
    """What `encode` gives, of some tokens at a time where no scale is found from all."""
    scheme = Coded(str(format), format)
    step = len(rows) if scheme.whole else max(SOME // scheme.step, 1) * scheme.step
    pieces = [
        encode(np.ascontiguousarray(rows[i : i + step]), format)
        for i in range(0, max(len(rows), 1), max(step, 1))
    ]
    if len(pieces) == 1:
        return pieces[0]
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def on_disk(array, path):
    """The array in a file of its own, so that a whole cache need not fit into memory."""
    if not array.size:
        return array
    array.tofile(path)
    return np.memmap(path, array.dtype, "r", shape=array.shape)


def layers_of(source, contents, from_format, from_layout, sizes):
    """(keys and values [b, n, h, c] of a layer by its number, layers, description, other arrays, format)."""
    saved = contents.metadata.get("cache")
    if isinstance(saved, dict) and ("paged" in saved or contents.cache is None):
        if isinstance(source, Contents):
            raise wrong("source", "the path of a cache that kvkit has saved", "what is in it")
        cache = load(source)
        if not len(cache.layers) or not cache.layers[0].batch_size:
            raise wrong("source", "a cache that has tokens", "an empty one, or one of sequences alone")

        def states(i):
            layer = cache.layers[i]
            return [np.asarray(side).swapaxes(1, 2) for side in (layer.keys, layer.values)]

        return states, len(cache.layers), Description(), {}, type(cache).__name__
    said, cache = contents.description, contents.cache
    line = from_layout or said.layout
    if cache is None or line is None:
        raise wrong("source", "a cache and its layout", ", ".join([*contents.arrays][:8]) or "none")
    pairs = cache  # as LINE has it, where keys and values may be packed along their tokens
    if line != LINE:
        known = {axis: count for axis, count in {**said.sizes, **(sizes or {})}.items() if axis in "lbnh"}
        views, _ = viewed(cache, line, known)
        if views is None:
            raise wrong("from_layout", "one whose content is not split (convert the layout first)", line)
        pairs = list(zip(views.keys, views.values, strict=True))
    before = from_format or said.format
    both = None if before is None or before in map(str, FLOATS) else formats_named(before)
    beside = {name: found for name in BESIDE if (found := files.nested(contents.arrays, name)) is not None}

    def sides(i):
        return [
            numbers(codes, both and both[side], {name: found[i][side] for name, found in beside.items()})
            for side, codes in enumerate(pairs[i])
        ]

    used = (CACHE, *beside)
    kept = {name: x for name, x in contents.arrays.items() if name.partition(".")[0] not in used}
    dtype = pairs[0][0].dtype
    return sides, len(pairs), said, kept, str(dtype) if BY_DTYPE.get(dtype) in FLOATS else before


def numbers(codes, format, beside):
    """Numbers of codes [b, n, h, c]; of floats, the same."""
    if isinstance(codes, tuple):
        raise wrong("source", "sequences in one array", "an array of each")
    if BY_DTYPE.get(codes.dtype) in FLOATS:
        return codes
    format = format or FLOAT8.get(codes.dtype)
    if format is None:
        raise wrong("from_format", "what these codes are, by a name of kvkit.formats.NAMED", describe(codes))
    rows = (
        {"codes": np.ascontiguousarray(each)} | {name: array[b] for name, array in beside.items()}
        for b, each in enumerate(codes)
    )
    return np.stack([decode(arrays, format) for arrays in rows])
