"""`convert` with a format: the numbers of a cache coded again, a layer at a time."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvkit import files
from kvkit.errors import argument_error
from kvkit.files.arrays import BESIDE, CACHE
from kvkit.files.paths import check_target
from kvkit.formats import BY_NAME, FLOATS
from kvkit.formats.schemes import Coded, formats_named
from kvkit.tools.inspecting import TABLES
from kvkit.tools.reading import LINE, opened, paged

SOME = 2048  # tokens that are encoded at a time


def recoded(contents, target, format, from_format, from_layout, sizes, progress):
    """(arrays unless they are written, description, the format that was, bytes) of a cache coded again."""
    floats = format in map(str, FLOATS)
    forms = [BY_NAME[format]] * 2 if floats else [Coded(one.name, one) for one in formats_named(format)]
    if target is not None:
        check_target(target)
    found = opened(contents, from_layout, sizes, from_format)
    made, size = {}, sum(array.nbytes for array in contents.arrays.values())
    with tempfile.TemporaryDirectory(dir=None if target is None else Path(target).parent) as folder:
        for i in range(found.count):
            layer = found.layer(i)
            starts = layer.starts[: 1 + paged(contents).get("rows", len(layer.starts))]
            lengths = np.diff(starts).tolist()
            if len({*lengths, 0}) != 2:
                raise argument_error(
                    "source", "sequences of one length", ", ".join(map(str, lengths)) or "none"
                )
            for kv, side in enumerate((layer.key, layer.value)):
                each = [encoded(side, start, lengths[0], forms[kv]) for start in starts[:-1]]
                for part in each[0]:
                    name = f"{CACHE if part == 'codes' else part}.{i}.{kv}"
                    pieces = [piece for one in each for piece in one[part]]
                    made[name] = in_one(pieces, len(each), target and Path(folder) / name)
            if progress is not None:
                progress(size * (i + 1) // found.count, size)
        named = {"l": found.count, "b": len(lengths), "n": lengths[0], "h": side.heads}
        if floats:
            named |= {"c": layer.key.dim} | ({} if side.dim == layer.key.dim else {"v": side.dim})
        said = replace(contents.description, layout=LINE, sizes=named, format=format, tables=None)
        before, total = found.format or str(side.read(slice(0)).dtype), sum(x.nbytes for x in made.values())
        if "cache" not in contents.metadata:
            old = CACHE, *BESIDE
            kept = {name: x for name, x in contents.arrays.items() if name.partition(".")[0] not in old}
            made |= {name: x for name, x in kept.items() if not name.startswith(TABLES)}
        if target is not None:
            files.write(target, made, said)
            made = {}
    return made, said, before, total


def encoded(side, start, count, form):
    """What `encode` returns of a sequence, in pieces: it is read some tokens at a time."""
    step = max(SOME // form.step, 1) * form.step if isinstance(form, Coded) else SOME
    parts = [slice(i, min(i + step, start + count)) for i in range(start, start + count, step)]
    if not isinstance(form, Coded):
        return {"codes": [side.read(part).astype(form.dtype) for part in parts]}
    if count % form.step:
        raise argument_error("source", f"a multiple of {form.step} tokens, for {form.name}", count)
    form = form.over(side.read(part) for part in parts)
    shared = () if form.ends is None else form.shared
    found = {} if form.format.whole else {"whole": [np.asarray(np.float32(1))]}  # which `encode` leaves out
    for part in parts:
        for name, array in form.encode(side.read(part)).items():
            if name in shared:
                found[name] = [array]
            elif name != "rest":
                found.setdefault(name, []).append(array)
    return found


def in_one(pieces, count, path):
    """Pieces of so many sequences as one array; in a file, so that a whole cache need not fit into memory."""
    shape = pieces[0].shape
    if len(pieces) > count:
        shape = sum(map(len, pieces)) // count, *shape[1:]
    if path is None or not pieces[0].size:
        return np.concatenate(pieces, axis=None).reshape(count, *shape)
    with open(path, "wb") as file:
        for piece in pieces:
            piece.tofile(file)
    return np.memmap(path, pieces[0].dtype, "r", shape=(count, *shape))
