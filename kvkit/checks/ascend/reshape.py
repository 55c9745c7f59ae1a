"""The checked call of new keys and values into slots of a cache in blocks."""

from typing import NamedTuple

import numpy as np

from kvkit import checks
from kvkit.checks.ascend import tensors
from kvkit.checks.index_tensors import index
from kvkit.checks.pools import broken_rule, plain_pieces
from kvkit.checks.tensors import DATA, filled, tensor
from kvkit.checks.values import choice, text
from kvkit.errors import argument_error, describe
from kvkit.formats import BY_DTYPE, INT8
from kvkit.operators.compression import NEEDED, CompressType

WINDOWS = ("copy", "skip")


DIM_STEP = 32  # a head's size in compressed modes is a multiple


class Call(NamedTuple):
    """A checked call of `reshape_and_cache`."""

    mode: CompressType
    tokens: list[np.ndarray]  # as given
    caches: list[np.ndarray]  # [blocks, rows, heads or groups, dim]
    pieces: np.ndarray  # see `checks.slots`
    averaged: str | None  # the format of means, if there can be some


def checked(
    key, value, key_cache, value_cache, slot_mapping, *, compress_type, cache_format, empty_window, **windows
):
    """The checked call; `windows` are its arguments for compressed modes."""
    mode = compression(compress_type)
    text("cache_format", cache_format, tensors.FORMATS)
    text("empty_window", empty_window, WINDOWS)
    for name, given in windows.items():
        if (given is not None) != (name in NEEDED[mode]):
            raise argument_error(
                name, f"{'an array' if given is None else 'None'} for {mode.name}", describe(given)
            )
    if mode and cache_format == "NZ":
        raise argument_error("cache_format", f"'ND' for {mode.name}", "'NZ'")
    given = tensors.pairs("key", key, value, key_cache, value_cache)
    caches = views(given, mode, cache_format)
    blocks, block_size = tensors.same_blocks(
        [(name, view) for (_, _, name, _), view in zip(given, caches, strict=True)]
    )
    if mode:
        pieces = compressed_pieces(key, blocks * block_size, slot_mapping, mode, windows, empty_window)
    else:
        pieces = plain_pieces(len(key), blocks * block_size, slot_mapping)
    written, read = [(name, array) for *_, name, array in given], [(name, array) for name, array, *_ in given]
    tensors.caches_apart(written, read)
    averaged = BY_DTYPE[key.dtype].name if mode is CompressType.KVHEAD_ROPE else None
    return Call(mode, [tokens for _, tokens, _, _ in given], caches, pieces, averaged)


def compression(compress_type):
    if isinstance(compress_type, CompressType):
        return compress_type
    if isinstance(compress_type, str):
        legal = " or ".join(f"ascend.CompressType.{mode.name}" for mode in CompressType)
        raise argument_error("compress_type", f"{legal}, or its number", describe(compress_type))
    return CompressType(choice("compress_type", compress_type, tuple(map(int, CompressType))))


def views(given, mode, cache_format):
    """The caches as [blocks, rows, heads or groups, dim], checked against their tokens."""
    caches, formats = [], []
    first = given[0][1]
    for name, array, cache_name, cache in given:
        fmt = tensor(name, array, DATA, 3)
        filled(name, array)
        if array.shape[:2] != first.shape[:2]:
            raise argument_error(
                name, f"{first.shape[0]} tokens and {first.shape[1]} heads, as key", array.shape
            )
        cache_fmt, view = tensors.cache(cache_name, cache, cache_format, written=True)
        if cache_fmt is not fmt:
            raise argument_error(cache_name, f"the dtype of {name}, {fmt}", cache_fmt)
        if mode:
            check_compressed(name, array, first, fmt, mode)
            want = (1, array.shape[2])
        elif cache_format == "NZ":
            want = groups(name, array, fmt)
        else:
            want = array.shape[1:]
        if view.shape[2:] != want:
            sizes = f"{want[0]} {'groups' if cache_format == 'NZ' else 'heads'} of {want[1]} elements"
            raise argument_error(cache_name, sizes, f"shape {cache.shape}")
        caches.append(view)
        formats.append(fmt)
    tensors.same_types(formats, cache_format)
    return caches


def check_compressed(name, array, first, fmt, mode):
    dim = array.shape[2]
    if dim % DIM_STEP:
        raise argument_error(name, f"a head size that is a multiple of {DIM_STEP}, for {mode.name}", dim)
    if dim != first.shape[2]:
        raise argument_error(name, f"the head size of key, {first.shape[2]}, for {mode.name}", dim)
    if mode is CompressType.KVHEAD_ROPE and fmt is INT8:
        raise argument_error(name, "floats, which have a mean, for KVHEAD_ROPE", fmt)


def groups(name, array, fmt):
    """(groups, elements of one) of a token's row in NZ."""
    _, heads, dim = array.shape
    size = tensors.fractal(fmt)
    if heads * dim % size:
        raise argument_error(
            name, f"num_head * head size to be a multiple of {size}, for NZ of {fmt}", heads * dim
        )
    return heads * dim // size, size


def compressed_pieces(key, capacity, slot_mapping, mode, windows, empty_window):
    """The pieces of a run for each sequence and head."""
    tokens, heads, _ = key.shape
    lengths = index("seq_lens", windows["seq_lens"])
    if len(lengths) and lengths.min() < 1:
        b = int(lengths.argmin())
        raise argument_error(f"seq_lens[{b}]", "at least 1", lengths[b])
    if sum(lengths.tolist()) != tokens:
        raise argument_error("seq_lens", f"a sum of {tokens}, the tokens of key", sum(lengths.tolist()))
    runs = len(lengths) * heads
    slots = index("slot_mapping", slot_mapping, length=runs)
    wins = index("wins", windows["wins"], length=runs)
    offsets = wins
    if windows["offset_index"] is not None:
        offsets = index("offset_index", windows["offset_index"], length=runs)
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    (rule, one, two, three), pieces = checks.slots.compressed(
        mode, empty_window == "copy", slots, wins, offsets, starts, heads, capacity
    )
    if rule:
        raise broken_rule(rule, one, two, three, capacity)
    return pieces[:one]
