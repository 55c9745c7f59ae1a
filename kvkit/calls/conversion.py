"""Move caches from one layout to another, bit for bit.

In every layout the address of an element is the sum of offsets of its block, token, head and content. So it
is enough to compare two layouts for the content of one token. Bytes contiguous in both move together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from kvkit import cpu
from kvkit.errors import argument_error, describe
from kvkit.interop import in_kind_of
from kvkit.layouts.grammar import Layout
from kvkit.layouts.named import parse
from kvkit.layouts.shapes import axis_length, axis_offsets, check_sizes, inner_size, inner_sizes
from kvkit.layouts.tables import BlockTable, Index
from kvkit.layouts.views import Leaf, check_one_kind, iterate_leaves
from kvkit.typed import Array

TILE = 64  # tokens of a run that are transposed together, so that their cache lines stay near a core
PART_BYTES = 64 * 2**20  # bytes between two reports of progress
ROTARY = 64  # rotated elements at the end of a latent row, unless the caller says how many
SCRATCH_BYTES = 2**18  # bytes of each cache that are compared at a time
TablePair = tuple[BlockTable, BlockTable] | None
CacheRows = list[tuple["LayerRows", ...]]  # of each layer: rows of keys and of values, or joint rows of both
Moved = tuple[Index, Index] | None  # source row and target row of every token


@dataclass(frozen=True)
class LayerRows:
    """Keys or values of a layer: the address of each block, and offsets of tokens and content in a block."""

    arrays: tuple[Array, ...]  # which have the rows
    blocks: Index
    tokens: Index  # [tokens of a block]
    content: Index  # [heads, content]
    equidistant: int  # tokens begin at equal distances within groups of so many
    dtype: np.dtype[Any]

    @property
    def count(self) -> int:
        """Return the number of rows."""
        return len(self.blocks) * len(self.tokens)

    @property
    def step(self) -> int:
        """Return the bytes from token to token."""
        return int(self.tokens[1] - self.tokens[0]) if self.equidistant > 1 else 0


def convert(
    source: Any,
    from_layout: str | Layout,
    to_layout: str | Layout,
    *,
    sizes: Mapping[str, int] | None = None,
    to_sizes: Mapping[str, int] | None = None,
    tables: tuple[BlockTable, BlockTable] | None = None,
    out: Any = None,
    verify: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> Any:
    """Move a cache from one layout to another, bit for bit.

    Parameters
    ----------
    source : array, or nested lists of arrays
        A cache in `from_layout`, as `view` takes it. Elements of any type move as they are.
    from_layout, to_layout : str or Layout
        Lines, or names of `NAMED`; split ones too.
    sizes : dict, optional
        Lengths of the source's axes ``l b n h c`` that its shapes do not show. ``v`` is the content of values
        if it differs from ``c``; from whole latent rows to two planes it is the rotated part (64).
    to_sizes : dict, optional
        Blocks (``b``) and tokens of a block (``n``) of the target, where they differ from the source's; with
        `out`, the lengths that its shapes do not show.
    tables : pair of BlockTable, optional
        Where the tokens of sequences are in the source, and where they go in the target: see `tables`. Page
        sizes may differ from block sizes. None: every row keeps its place.
    out : array, or nested lists of arrays, optional, changed in place
        A cache in `to_layout`. Rows that get no token do not change; in new arrays they are 0.
    verify : bool
        Whether to read the target again and compare it with the source.
    progress : callable, optional
        Called with ``(bytes done, bytes in all)`` after every 64 MB or so.

    Returns
    -------
    array, or nested lists of arrays
        New arrays (tensors, if the source has tensors), or `out`. No other memory of a cache's size is used.

    Raises
    ------
    KvkitError
        If shapes, sizes, layouts or tables contradict each other; nothing has been written. With `verify`
        also if one of the caches was changed meanwhile.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit import layouts
    >>> layers = [(np.ones((1, 2, 5, 4)), np.zeros((1, 2, 5, 4)))]  # of Transformers: 1 sequence, 5 tokens
    >>> old = layouts.tables.from_batch([5], capacity=5)
    >>> new = layouts.tables.from_blocks([[2, 0]], [5], page_size=4)
    >>> [pool] = layouts.convert(layers, "hf", "vllm-lbnhc", tables=(old, new))
    >>> pool.shape  # blocks, tokens, heads, a key and a value
    (3, 4, 2, 8)
    >>> pool[2, 0, 0]
    array([1., 1., 1., 1., 0., 0., 0., 0.])
    """
    before, after = parse(from_layout), parse(to_layout)
    check_one_kind(before)
    check_one_kind(after)
    known = check_sizes("sizes", sizes)
    # One layout has whole latent rows, the other two planes: the latent part, and the rotated one as values.
    latent = ("kv" in before.names) != ("kv" in after.names)
    if latent and {"h", "s"} & {*before.names, *after.names}:
        expected = f"no axis kv, for the latent rows of '{before}'"
        if "kv" in before.names:
            expected = f"an axis kv, for the keys and values of '{before}'"
        raise argument_error("to_layout", expected, f"'{after}'")
    rotary = known.pop("v", ROTARY) if latent and "kv" in after.names else 0
    read = cache_rows(source, before, known, "source")
    if out is None:
        check_equal_heads(read)
    if rotary:
        read = split_rows(read, rotary, "source")
    rows = moved_rows(tables, read)
    wanted = target_sizes(read, rows, after, check_sizes("to_sizes", to_sizes), tables, out is None)
    if latent and not rotary:  # planes become whole rows
        wanted["c"] += wanted.pop("v", wanted["c"])
    target = new_arrays(after, wanted, [part.dtype for part in read[0]]) if out is None else out
    written = cache_rows(target, after, wanted, "out")
    if latent and not rotary:
        written = split_rows(written, read[0][1].content.shape[1], "out")
    check_compatible(read, written)
    runs = runs_between(rows, read, written)
    moves = [move for layer in zip(read, written, strict=True) for move in moves_of(*layer)]
    alive = (*arrays_of(read), *arrays_of(written))
    total, done = sum(move.row for move in moves) * int(runs[:, 2].sum()), 0
    for move in moves:
        for portion in portions(runs, PART_BYTES // move.row):
            cpu.launches.start(move.launch(portion, alive))
            if verify:
                move.compare(portion, alive)
            done += move.row * int(portion[:, 2].sum())
            if progress:
                progress(done, total)
    return target if out is not None else in_kind_of(source, target)


def cache_rows(arrays: Any, line: Layout, known: Mapping[str, int], name: str) -> CacheRows:
    """Return the addresses of a cache's blocks, tokens and content."""
    layers: dict[int, list[list[LayerRows]]] = {}
    for index, pair in iterate_leaves(arrays, line, known, name):
        sides = pair if "kv" in line.names else pair[:1]  # keys and values, or joint rows of both
        for which, leaf in enumerate(sides):
            for layer, part in enumerate(layers_of(leaf)):
                parts = layers.setdefault(index.get("l", layer), [[] for _ in sides])
                parts[which].append(part)
    joined = [tuple(map(joined_blocks, parts)) for _, parts in sorted(layers.items())]
    sizes = {(len(part.blocks), len(part.tokens)) for layer in joined for part in layer}
    if len(sizes) > 1:
        raise argument_error(
            name, "as many blocks and tokens in each layer", " and ".join(map(str, sorted(sizes)))
        )
    return joined


def arrays_of(cache: CacheRows) -> list[Array]:
    """Return the arrays of a cache, each once."""
    return list({id(array): array for layer in cache for part in layer for array in part.arrays}.values())


def check_equal_heads(read: CacheRows) -> None:
    """Check that one new cache can hold all layers: their heads, elements and types are equal."""
    shapes = dict.fromkeys(
        " and values of ".join(
            f"{' heads of '.join(map(str, part.content.shape))} elements of {part.dtype}"
            for part in {(part.content.shape, part.dtype): part for part in layer}.values()
        )
        for layer in read
    )
    if len(shapes) > 1:
        raise argument_error("source", "equal heads in each layer", ", ".join(shapes))


def split_rows(cache: CacheRows, rotary: int, name: str) -> CacheRows:
    """Return the latent rows of a cache in two parts: the latent one, and the rotated one at the end."""
    layers: CacheRows = []
    for (whole,) in cache:
        latent = whole.content.shape[1] - rotary
        if latent < 1:
            raise argument_error(name, f"rows of more than {rotary} elements", latent + rotary)
        parts = whole.content[:, :latent], whole.content[:, latent:]
        layers.append(tuple(replace(whole, content=part) for part in parts))
    return layers


def layers_of(leaf: Leaf) -> Iterator[LayerRows]:
    """Yield the rows of each layer of an array."""
    array, axes = leaf.array, leaf.axes
    inner = {axis.name: inner_size(axis, array.itemsize) for axis in axes if axis.inner}
    offsets = {  # of every layer, block, token, head and element
        name: axis_offsets(axes, array.strides, name, leaf.sizes.get(name, 1), inner)
        for name in ("l", "b", "n", "h", "c" if "c" in leaf.sizes else "s")
    }
    layers, blocks, tokens, heads, content = offsets.values()
    equidistant = inner.get("n", len(tokens))
    for layer in layers:
        first = array.ctypes.data + layer + blocks
        yield LayerRows((array,), first, tokens, heads[:, None] + content, equidistant, array.dtype)


def joined_blocks(parts: list[LayerRows]) -> LayerRows:
    """Join blocks that are separate arrays as the blocks of one layer."""
    first = parts[0]
    for each in parts[1:]:
        if not (np.array_equal(each.tokens, first.tokens) and np.array_equal(each.content, first.content)):
            raise argument_error("arrays", "blocks of equal shapes and strides", "others")
    arrays = tuple(array for each in parts for array in each.arrays)
    return replace(first, arrays=arrays, blocks=np.concatenate([each.blocks for each in parts]))


def moved_rows(tables: TablePair, read: CacheRows) -> Moved:
    """Return the source row and the target row of every token, by target row; None if rows keep their places.

    Sequences may share rows in the source. In the target they may share only rows of the same source row.
    """
    if tables is None:
        return None
    is_pair = isinstance(tables, (tuple, list)) and len(tables) == 2
    if not is_pair or not all(isinstance(table, BlockTable) for table in tables):
        wanted = "two BlockTables of kvkit.layouts.tables, of source and target"
        raise argument_error("tables", wanted, describe(tables))
    if not np.array_equal(tables[0].lengths, tables[1].lengths):
        raise argument_error("tables[1]", "the lengths of tables[0]", "others")
    source, target = (each.rows() for each in tables)
    check_rows("tables[0]", source, read, "source")
    order = np.argsort(target, kind="stable")
    source, target = source[order], target[order]
    is_shared = np.diff(target) == 0
    conflicts = is_shared & (np.diff(source) != 0)
    if conflicts.any():
        raise argument_error("tables[1]", "a row for each token", f"row {target[conflicts.argmax()]} for two")
    first = np.append(True, ~is_shared)[: len(target)]
    return source[first], target[first]


def check_rows(name: str, rows: Index, cache: CacheRows, whose: str) -> None:
    """Check that row ids are within a cache."""
    count = cache[0][0].count
    if len(rows) and (rows.min() < 0 or rows.max() >= count):
        row = int(rows.min() if rows.min() < 0 else rows.max())
        raise argument_error(name, f"rows within the {count} of {whose}", row)


def target_sizes(
    read: CacheRows, rows: Moved, line: Layout, given: Mapping[str, int], tables: TablePair, new: bool
) -> dict[str, int]:
    """Return the sizes of a target that follow from the source and the caller's sizes."""
    contents, page_size = [part.content.shape for part in read[0]], len(read[0][0].tokens)
    (heads, content), (_, value) = contents[0], contents[-1]
    sizes = {"l": len(read), "h": heads, "c": content, "s": content}
    for axis, size in (("l", len(read)), ("h", heads)):
        if size > 1 and axis not in line.names:
            wanted = f"an axis {axis}, as the source has {size} of them"
            if axis == "l":
                wanted += f": '{Layout(('l', *line.lists), line.axes, line.value_axes)}'"
            raise argument_error("to_layout", wanted, f"'{line}'")
    if value != content:
        if "kv" not in line.lists and "kv" in line.names:
            wanted = f"arrays of their own for values, of {value} elements"
            raise argument_error("to_layout", wanted, f"'{line}'")
        sizes["v"] = value
    for axis in ("l", "h", "c", "v", "s"):
        if given.get(axis, sizes.get(axis)) != sizes.get(axis):
            raise argument_error(f"to_sizes[{axis!r}]", f"{sizes.get(axis)}, as in the source", given[axis])
    sizes.update(given)
    if new:
        count = int(rows[1].max(initial=0)) + 1 if rows else read[0][0].count
        if "b" not in line.names:
            sizes.setdefault("n", count)
        sizes.setdefault("n", tables[1].page_size if tables else page_size)
        sizes.setdefault("b", -(-count // sizes["n"]))
    return sizes


def new_arrays(line: Layout, sizes: Mapping[str, int], dtypes: list[np.dtype[Any]]) -> Any:
    """Return arrays of zeros in a layout, in lists if it has such axes."""

    def nested(levels: Sequence[str], which: int) -> Any:
        if levels:
            level, *rest = levels
            count = 2 if level == "kv" else sizes[level]
            return [nested(rest, i if level == "kv" else which) for i in range(count)]
        groups, dtype = (line.value_groups if which else line.groups), dtypes[-1 if which else 0]
        lengths = {**sizes, "c": sizes["v"]} if which and "v" in sizes else sizes
        inner = inner_sizes(groups, dtype.itemsize)
        for axis, size in inner.items():
            if not size or lengths[axis] % size:
                wanted = f"a size of {axis} that {size} divides, for '{line}'"
                raise argument_error("to_layout", wanted, lengths[axis])
        shape = [math.prod(axis_length(axis, lengths, inner) for axis in group) for group in groups]
        return np.zeros(shape, dtype)

    return nested(line.lists, 0)


def check_compatible(read: CacheRows, written: CacheRows) -> None:
    """Check that one cache can be moved to another, and be written."""
    if len(read) != len(written):
        raise argument_error("out", f"{len(read)} layers", len(written))
    for layer, parts in enumerate(zip(read, written, strict=True)):
        for pair in zip(*parts, strict=True):
            wanted, got = (
                f"{' heads of '.join(map(str, part.content.shape))} elements of {part.dtype}" for part in pair
            )
            if wanted != got:
                raise argument_error("out", f"{wanted} in layer {layer}", got)
    sides = list(map(arrays_of, (read, written)))
    if not all(array.flags.writeable for array in sides[1]):
        raise argument_error("out", "arrays that can be written", "one that is read-only")
    places = np.concatenate([part.blocks + part.content[0, 0] for layer in written for part in layer])
    if len(np.unique(places)) < len(places):
        raise argument_error("out", "arrays apart from each other", "two in one place")
    reached = [0, 0]  # the end of the memory of either cache, as far as arrays are sorted through
    for first, end, which in sorted((*byte_bounds(array), i) for i in (0, 1) for array in sides[i]):
        if reached[1 - which] > first:
            raise argument_error("out", "memory apart from the source's", "arrays that share bytes with it")
        reached[which] = max(reached[which], end)


def runs_between(rows: Moved, read: CacheRows, written: CacheRows) -> Index:
    """Return runs [runs, (source row, target row, tokens)] of tokens at equal distances on both sides."""
    even = [min(part.equidistant for layer in cache for part in layer) for cache in (read, written)]
    if rows is None:
        count, sizes = read[0][0].count, [len(cache[0][0].tokens) for cache in (read, written)]
        if max(sizes) % min(sizes):
            wanted = f"tables, because neither of the block sizes {sizes[0]} and {sizes[1]} divides the other"
            raise argument_error("tables", wanted, "None")
        if count > written[0][0].count:
            raise argument_error("out", f"{count} rows, as source has", written[0][0].count)
        length = math.gcd(*even)
        first = np.arange(0, count, length)
        return np.stack([first, first, np.full(len(first), length)], axis=1)
    source, target = rows
    check_rows("tables[1]", target, written, "out")
    begins = (np.diff(source) != 1) | (np.diff(target) != 1)
    begins |= (source[1:] % even[0] == 0) | (target[1:] % even[1] == 0)
    first = np.append(0, np.flatnonzero(begins) + 1)[: len(source)]
    return np.stack([source[first], target[first], np.diff(np.append(first, len(source)))], axis=1)


def portions(runs: Index, tokens: int) -> Iterator[Index]:
    """Yield runs in portions of about `tokens` tokens."""
    ends = np.cumsum(runs[:, 2])
    first = 0
    while first < len(runs):
        done = ends[first - 1] if first else 0
        last = max(int(np.searchsorted(ends, done + max(tokens, 1), side="right")), first + 1)
        yield runs[first:last]
        first = last


def cut_runs(runs: Index, tokens: int) -> Index:
    """Cut runs into runs of at most `tokens` tokens."""
    pieces = -(-runs[:, 2] // tokens)
    if not len(runs) or pieces.max() == 1:
        return runs
    runs = np.repeat(runs, pieces, axis=0)  # one for each piece
    at = (np.arange(len(runs)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * tokens
    return np.stack([runs[:, 0] + at, runs[:, 1] + at, np.minimum(runs[:, 2] - at, tokens)], axis=1)


@dataclass(frozen=True)
class Move:
    """The move of a layer, or of its keys or values, from one cache to another."""

    read: LayerRows
    written: LayerRows
    chunks: Index  # [chunks, 2]: offsets of each chunk in a token of the source and of the target
    width: int  # bytes of a chunk

    @property
    def row(self) -> int:
        """Return the bytes of a token."""
        return len(self.chunks) * self.width

    def launch(self, runs: Index, alive: tuple[Array, ...]) -> Any:
        """Return the launch that copies runs."""
        steps = self.read.step, self.written.step
        gaps = np.diff(self.chunks[:, 1])
        by_chunk = len(gaps) == 0 or steps[1] < gaps.min()  # tokens lie nearer to each other than chunks
        if by_chunk and steps != (self.width, self.width):
            runs = cut_runs(runs, TILE)
        places = row_addresses(self.read, runs[:, 0]), row_addresses(self.written, runs[:, 1]), runs[:, 2]
        return cpu.copy.runs.prepare_runs(
            np.stack(places, axis=1), self.chunks, steps, self.width, by_chunk, alive
        )

    def compare(self, runs: Index, alive: tuple[Array, ...]) -> None:
        """Check that both caches have the same bytes in these runs."""
        tokens = max(1, SCRATCH_BYTES // self.row)
        packed = np.arange(len(self.chunks)) * self.width
        order = np.argsort(self.chunks[:, 0])
        lines = np.empty((2, tokens * self.row), np.uint8)  # packed rows of the source, of the target
        for portion in portions(cut_runs(runs, tokens), tokens):
            counts = portion[:, 2]
            at = (np.cumsum(counts) - counts) * self.row
            for which, part in enumerate((self.read, self.written)):
                places = row_addresses(part, portion[:, which]), lines[which].ctypes.data + at, counts
                chunks = np.stack([self.chunks[order, which], packed], axis=1)
                steps = part.step, self.row
                cpu.launches.start(
                    cpu.copy.runs.prepare_runs(
                        np.stack(places, axis=1), chunks, steps, self.width, False, (*alive, lines)
                    )
                )
            size = int(counts.sum()) * self.row
            if not np.array_equal(lines[0, :size], lines[1, :size]):
                raise argument_error(
                    "out", "the bytes of source", "others: something else has changed one of them"
                )


def row_addresses(part: LayerRows, rows: Index) -> Index:
    """Return the addresses of rows."""
    return part.blocks[rows // len(part.tokens)] + part.tokens[rows % len(part.tokens)]


def moves_of(read: tuple[LayerRows, ...], written: tuple[LayerRows, ...]) -> list[Move]:
    """Return the moves of a layer: one if a token's keys and values lie together in a cache, else two."""
    if len(read) == 2 and read[0].dtype == read[1].dtype:
        old, to = distance(read), distance(written)
        if old is not None and to is not None and (abs(old) < read[0].step or abs(to) < written[0].step):
            source, target = (  # offsets of the elements of a token's key, then of its value
                np.concatenate([keys.content.ravel(), values.content.ravel() + step])
                for (keys, values), step in ((read, old), (written, to))
            )
            return [Move(read[0], written[0], *chunks_of(source, target, read[0].dtype.itemsize))]
    return [
        Move(one, other, *chunks_of(one.content.ravel(), other.content.ravel(), one.dtype.itemsize))
        for one, other in zip(read, written, strict=True)
    ]


def distance(parts: tuple[LayerRows, ...]) -> int | None:
    """Return the bytes from a token's keys to its values; None if they are not the same for all tokens."""
    steps = parts[-1].blocks - parts[0].blocks
    even = np.array_equal(parts[-1].tokens, parts[0].tokens) and (steps == steps[0]).all()
    return int(steps[0]) if even else None


def chunks_of(source: Index, target: Index, itemsize: int) -> tuple[Index, int]:
    """Return chunks [chunks, 2] of elements that are contiguous on both sides, and the bytes of a chunk."""
    order = np.argsort(target, kind="stable")
    source, target = source[order], target[order]
    joined = (np.diff(source) == itemsize) & (np.diff(target) == itemsize)
    bounds = np.concatenate([[0], np.flatnonzero(~joined) + 1, [len(source)]])
    count = int(np.gcd.reduce(np.diff(bounds)))
    return np.ascontiguousarray(np.stack([source[::count], target[::count]], axis=1)), count * itemsize
