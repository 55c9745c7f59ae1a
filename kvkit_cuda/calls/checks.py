"""The check of `kvkit` for each operator: its checked call, of arrays and attributes by name.

Checks see arrays of the device as `calls.arrays` shows them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvkit.checks import merge, paged, positions, sequences, slots
from kvkit.checks.ascend import attention, blocks, matrices, reshape, tensors
from kvkit.checks.attention import checked_attention, checked_cache_attention
from kvkit.checks.key_value_cache import checked_key_value_cache
from kvkit.checks.outputs import Results

ZEROS = -1  # the source row of what is not there


@dataclass(frozen=True, slots=True)
class Slopes:
    """A checked call of `alibi_slope`."""

    results: Results


@dataclass(frozen=True, slots=True)
class Moves:
    """A checked call that moves rows between arrays in blocks; see `moves.pieces`."""

    sources: list[np.ndarray]  # [blocks, rows, heads or groups, dim]
    targets: list[np.ndarray]  # likewise, unless they are results
    pieces: np.ndarray  # [.., 3]: source row, target row, count
    results: Results | None = None
    place: Callable | None = None  # a result as such an array
    means: np.ndarray | None = None  # pieces of which the target gets the mean,
    averaged: str | None = None  # of this format


def static(start_pos, *, checked, **given):
    return checked(sequences.Static(start_pos), **given)


def packed(**given):
    return checked_attention(sequences.with_keys(given), **given)


def slopes(num_heads):
    return Slopes(positions.slopes(num_heads))


def position_index(sequences, **index):
    if isinstance(sequences, np.ndarray):  # its elements are not read
        sequences = np.broadcast_to(np.zeros((), sequences.dtype), sequences.shape)
    return positions.position_index(sequences, **index)


def stored(key, **given):
    call = reshape.checked(key, **given)
    found = call.pieces
    source = found[:, slots.HEAD] * len(key) + found[:, slots.TOKEN]
    pieces, mean = stacked(source, found[:, slots.SLOT], found[:, slots.COUNT]), found[:, slots.MEAN] == 1
    tokens = [  # as one block; compressed, a block for each head
        tokens.transpose(1, 0, 2)[:, :, None] if call.mode else tokens[None] for tokens in call.tokens
    ]
    return Moves(tokens, call.caches, pieces[~mean], means=pieces[mean], averaged=call.averaged)


def swapped(source, target, pairs):
    blocks_from, blocks_to = paged.checked_swap(source, target, pairs)
    return Moves([source], [target], stacked(blocks_from, blocks_to, 1))


def loaded(**given):
    call = blocks.checked_load(**given)
    found = blocks.pieces_of(call)
    token, count = found[:, slots.TOKEN], found[:, slots.COUNT]
    begins, ends = np.append(0, token + count), np.append(token, call.tokens)
    pieces = [stacked(found[:, slots.SLOT], token, count), stacked(ZEROS, begins, ends - begins)]

    def place(array, source):
        return array.reshape(1, call.tokens, *source.shape[2:])

    return Moves(call.caches, [], np.concatenate(pieces), call.results, place)


def copied(key_cache, value_cache, **index):
    caches = blocks.named(key_cache, value_cache)
    src, dst = blocks.checked_copy(caches, **index)
    arrays = [cache for _, cache in caches]
    return Moves(arrays, arrays, stacked(src, dst, 1))  # of blocks


def to_nz(x):
    call = matrices.checked_nd(x)
    each, rows, whole = np.arange(call.shape[0]), call.source.shape[1], call.shape[2]
    pieces = stacked(each * rows, each * whole, rows), stacked(ZEROS, each * whole + rows, whole - rows)

    def place(y, _):
        return tensors.rows(y, "NZ")

    return Moves([call.source[:, :, None]], [], np.concatenate(pieces), call.results, place)


def to_nd(y, m, n):
    call = matrices.checked_nz(y, m, n)
    each = np.arange(call.shape[0])
    pieces = stacked(each * y.shape[2], each * call.shape[1], call.shape[1])

    def place(x, _):
        return x[:, :, None]

    return Moves([tensors.rows(y, "NZ")], [], pieces, call.results, place)


def stacked(source, target, count):
    """Pieces of so many rows each."""
    return np.stack(np.broadcast_arrays(source, target, count), axis=1)


# Where there is a step of sequences in a cache, it comes first.
CHECKED: dict[str, Callable] = {
    "key_value_cache": partial(static, checked=checked_key_value_cache),
    "multi_head_attention": partial(checked_attention, sequences.Static()),
    "multi_head_cache_attention": partial(static, checked=checked_cache_attention),
    "merge_attention_states": merge.checked,
    "paged_attention": paged.checked,
    "paged_append": paged.checked_append,
    "swap_blocks": swapped,
    "rotary_position_embedding": positions.static_turn,
    "alibi_slope": slopes,
    "alibi_mask": positions.static_alibi,
    "dynamic_batching.key_value_cache": checked_key_value_cache,
    "dynamic_batching.multi_head_attention": packed,
    "dynamic_batching.multi_head_cache_attention": checked_cache_attention,
    "dynamic_batching.position_index": position_index,
    "dynamic_batching.rotary_position_embedding": positions.dynamic_turn,
    "dynamic_batching.alibi_mask": positions.dynamic_alibi,
    "ascend.reshape_and_cache": stored,
    "ascend.paged_cache_load": loaded,
    "ascend.block_copy": copied,
    "ascend.paged_attention": attention.checked,
    "ascend.nd_to_nz": to_nz,
    "ascend.nz_to_nd": to_nd,
}
