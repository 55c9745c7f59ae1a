"""Check a call that stores new keys and values in slots of a cache in blocks."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvkit import checks
from kvkit.checks.arguments import BlockStore, Windows
from kvkit.checks.ascend import tensors
from kvkit.checks.ascend.tensors import TokensAndCache
from kvkit.checks.index_tensors import index
from kvkit.checks.pools import plain_pieces
from kvkit.checks.values import DATA, check_not_empty, checked_format, choice, text
from kvkit.errors import argument_error, describe
from kvkit.formats import BY_DTYPE, INT8
from kvkit.operators.compression import NEEDED, CompressType
from kvkit.typed import Array

EMPTY_WINDOWS = (
    "copy",
    "skip",
)  # what `empty_window` may say: whether a window of 0 tokens stores all, or nothing
DIM_STEP = 32  # head sizes of compressed modes are multiples of it


class ReshapeCall(NamedTuple):
    """A checked call of `reshape_and_cache`."""

    mode: CompressType
    tokens: list[Array]  # as given
    caches: list[Array]  # [blocks, rows, heads or groups, dim]
    pieces: Array  # [pieces, (token, head, slot, count, mean)], see `checks/slots.py`
    averaged: str | None  # the format of means of tokens, which KVHEAD_ROPE stores; None in other modes


def checked_reshape(call: BlockStore) -> ReshapeCall:
    """Check a call of `ascend.reshape_and_cache`."""
    key, mode = call.key, compression(call.compress_type)
    cache_format = text("cache_format", call.cache_format, tensors.FORMATS)
    text("empty_window", call.empty_window, EMPTY_WINDOWS)
    for name, window in zip(Windows._fields, call.windows, strict=True):
        if (window is not None) != (name in NEEDED[mode]):
            wanted = f"{'an array' if window is None else 'None'} for {mode.name}"
            raise argument_error(name, wanted, describe(window))
    if mode and cache_format == "NZ":
        raise argument_error("cache_format", f"'ND' for {mode.name}", "'NZ'")
    given = tensors.pairs("key", key, call.value, call.key_cache, call.value_cache)
    caches = cache_views(given, mode, cache_format)
    blocks, block_size = tensors.same_blocks(
        [(each.cache_name, view) for each, view in zip(given, caches, strict=True)]
    )
    if mode:
        pieces = compressed_pieces(call, mode, blocks * block_size)
    else:
        pieces = plain_pieces(len(key), blocks * block_size, call.slot_mapping)
    written = [(each.cache_name, each.cache) for each in given]
    tensors.caches_apart(written, [(each.name, each.tokens) for each in given])
    averaged = BY_DTYPE[key.dtype].name if mode is CompressType.KVHEAD_ROPE else None
    return ReshapeCall(mode, [each.tokens for each in given], caches, pieces, averaged)


def compression(compress_type: object) -> CompressType:
    """Return a checked mode of compression."""
    if isinstance(compress_type, CompressType):
        return compress_type
    if isinstance(compress_type, str) and compress_type in CompressType.__members__:
        return CompressType[compress_type]
    if isinstance(compress_type, str):
        legal = " or ".join(f"ascend.CompressType.{mode.name}" for mode in CompressType)
        raise argument_error("compress_type", f"{legal}, or its number", describe(compress_type))
    return CompressType(choice("compress_type", compress_type, tuple(map(int, CompressType))))


def cache_views(given: Sequence[TokensAndCache], mode: CompressType, cache_format: str) -> list[Array]:
    """Return the caches as [blocks, rows, heads or groups, dim], checked against their tokens."""
    caches, formats = [], []
    first = given[0].tokens
    for name, array, cache_name, cache in given:
        fmt = checked_format(name, array, DATA, 3)
        check_not_empty(name, array)
        if array.shape[:2] != first.shape[:2]:
            wanted = f"{first.shape[0]} tokens and {first.shape[1]} heads, as key"
            raise argument_error(name, wanted, array.shape)
        cache_fmt, view = tensors.cache_in_blocks(cache_name, cache, cache_format, written=True)
        if cache_fmt is not fmt:
            raise argument_error(cache_name, f"the dtype of {name}, {fmt}", cache_fmt)
        if mode:
            dim = array.shape[2]
            if dim % DIM_STEP:
                wanted = f"a head size that is a multiple of {DIM_STEP}, for {mode.name}"
                raise argument_error(name, wanted, dim)
            if dim != first.shape[2]:
                raise argument_error(name, f"the head size of key, {first.shape[2]}, for {mode.name}", dim)
            if mode is CompressType.KVHEAD_ROPE and fmt is INT8:
                raise argument_error(name, "floats, because KVHEAD_ROPE stores means", fmt)
            want = 1, dim
        elif cache_format == "NZ":
            _, heads, dim = array.shape
            size = tensors.fractal(fmt)
            if heads * dim % size:
                wanted = f"num_head * head size to be a multiple of {size}, for NZ of {fmt}"
                raise argument_error(name, wanted, heads * dim)
            want = heads * dim // size, size  # groups, and elements of a group
        else:
            want = array.shape[1:]
        if view.shape[2:] != want:
            sizes = f"{want[0]} {'groups' if cache_format == 'NZ' else 'heads'} of {want[1]} elements"
            raise argument_error(cache_name, sizes, f"shape {cache.shape}")
        caches.append(view)
        formats.append(fmt)
    tensors.same_types(formats, cache_format, [each.name for each in given])
    return caches


def compressed_pieces(call: BlockStore, mode: CompressType, capacity: int) -> Array:
    """Return the pieces of a compressed store, which writes one run of rows for each sequence and head."""
    tokens, heads, _ = call.key.shape
    windows = call.windows
    lengths = index("seq_lens", windows.seq_lens)
    if len(lengths) and lengths.min() < 1:
        b = int(lengths.argmin())
        raise argument_error(f"seq_lens[{b}]", "at least 1", lengths[b])
    if sum(lengths.tolist()) != tokens:
        raise argument_error("seq_lens", f"a sum of {tokens}, the tokens of key", sum(lengths.tolist()))
    runs = len(lengths) * heads
    slots = index("slot_mapping", call.slot_mapping, length=runs)
    wins = index("wins", windows.wins, length=runs)
    offsets = wins  # KVHEAD has none, and its pass reads none
    if windows.offset_index is not None:
        offsets = index("offset_index", windows.offset_index, length=runs)
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    return checks.slots.compressed_pieces(
        mode, call.empty_window == "copy", slots, wins, offsets, starts, heads=heads, capacity=capacity
    )
