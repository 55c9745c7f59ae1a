"""What the checks of `kvkit` say of each operator: its checked call, of arrays and attributes by name, and
what that gives back. They see arrays of the device as `calls.arrays` shows them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvkit import attention, check, layout, merge, positions, steps
from kvkit import launch as moves
from kvkit.ascend import attention as paged
from kvkit.ascend import blocks, matrices, reshape, tensors
from kvkit.cpu import slots
from kvkit.dynamic_batching import attention as dynamic_attention
from kvkit.dynamic_batching import positions as dynamic_positions
from kvkit.dynamic_batching.plan import checked_cache_attention
from kvkit.formats import FLOAT32, Format
from kvkit.static import attention as static_attention
from kvkit.static import positions as static_positions
from kvkit_cuda.calls.results import Results

# Checked calls


@dataclass(frozen=True, slots=True)
class Append:
    """A checked call of `key_value_cache`."""

    fmt: Format
    current_key: np.ndarray
    current_value: np.ndarray
    layer: check.Cache
    steps: steps.Steps
    repeat: int
    shape: tuple[int, ...]  # of the results


@dataclass(frozen=True, slots=True)
class Plain:
    """A checked call of which there is no more to know than its numbers and shapes."""

    fmt: Format
    shape: tuple[int, ...]
    arrays: tuple = ()
    numbers: tuple = ()


ZEROS = -1  # the source row of what is not there


@dataclass(frozen=True, slots=True)
class Moves:
    """A checked call that moves rows between arrays in blocks; see `moves.pieces`."""

    sources: list[np.ndarray]  # [blocks, rows, heads or groups, dim]
    targets: list[np.ndarray]  # likewise, unless they are results
    pieces: np.ndarray  # [.., 3]: source row, target row, count
    shapes: list[tuple[int, ...]] | tuple = ()  # of results
    formats: list[Format] | tuple = ()
    place: Callable | None = None  # a result as such an array
    means: np.ndarray | None = None  # pieces of which the target gets the mean,
    averaged: str | None = None  # of this format
    given: object = None  # for the check of results


def static_append(current_key, current_value, start_pos, cache, scale, *, num_repeat, **attributes):
    fmt, current_key, current_value = check.current(current_key, current_value, 4)
    batch, seqlen, heads, dim = current_key.shape
    repeat = check.integer("num_repeat", num_repeat, 1)
    layer = check.cache_layer(fmt, heads, dim, cache, scale, layout.STATIC, **attributes)
    past = check.integer("start_pos", start_pos, 0)
    shape = batch, past + seqlen, heads * repeat, dim
    return Append(
        fmt, current_key, current_value, layer, steps.static(batch, seqlen, past, layer), repeat, shape
    )


def dynamic_append(step, current_key, current_value, cache, scale, *, num_repeat, **attributes):
    fmt, current_key, current_value = check.current(current_key, current_value, 3)
    tokens, heads, dim = current_key.shape
    repeat = check.integer("num_repeat", num_repeat, 1)
    layer = check.cache_layer(fmt, heads, dim, cache, scale, layout.DYNAMIC, **attributes)
    steps.fits(step.steps, ("current_key", tokens), layer)
    shape = step.steps.context, heads * repeat, dim
    return Append(fmt, current_key, current_value, layer, step.steps, repeat, shape)


def dynamic_cache_attention(step, **arguments):
    return checked_cache_attention(step.steps, step.decoding, **arguments)


def merged(outputs, lses):
    fmt, outputs, lses = merge.checked(outputs, lses)
    return Plain(fmt, outputs[0].shape, (outputs, lses))


def slope(num_heads):
    return Plain(FLOAT32, (check.integer("num_heads", num_heads, 1, 2**31),))


def position_index(sequences, **index):
    if isinstance(sequences, np.ndarray):  # its elements are not read
        sequences = np.broadcast_to(np.zeros((), sequences.dtype), sequences.shape)
    starts, first = dynamic_positions.checked_index(sequences, **index)
    return Plain(None, (int(starts[-1]),), numbers=(starts, first))  # type: ignore[arg-type]


def stored(
    key, value, key_cache, value_cache, slot_mapping, compress_type, cache_format, empty_window, **runs
):
    call = reshape.checked(
        key, value, key_cache, value_cache, slot_mapping, compress_type, runs, cache_format, empty_window
    )
    found = call.pieces
    source = found[:, slots.HEAD] * len(key) + found[:, slots.TOKEN]
    pieces, mean = stacked(source, found[:, slots.SLOT], found[:, slots.COUNT]), found[:, slots.MEAN] == 1
    tokens = [  # as one block; compressed, a block for each head
        tokens.transpose(1, 0, 2)[:, :, None] if call.mode else tokens[None] for tokens in call.tokens
    ]
    return Moves(tokens, call.caches, pieces[~mean], means=pieces[mean], averaged=call.averaged)


def loaded(**arguments):
    call = blocks.checked_load(**arguments)
    found = blocks.pieces_of(call)
    token, count = found[:, slots.TOKEN], found[:, slots.COUNT]
    begins, ends = np.append(0, token + count), np.append(token, call.tokens)
    pieces = [stacked(found[:, slots.SLOT], token, count), stacked(ZEROS, begins, ends - begins)]

    def place(array, source):
        return array.reshape(1, call.tokens, *source.shape[2:])

    return Moves(call.caches, [], np.concatenate(pieces), call.shapes, call.formats, place, given=call)


def copied(key_cache, value_cache, **index):
    caches = blocks.named(key_cache, value_cache)
    src, dst = blocks.checked_copy(caches, **index)
    caches = [cache for _, cache in caches]
    return Moves(caches, caches, stacked(src, dst, 1))  # of blocks


def to_nz(x):
    matrix, fmt, shape = matrices.checked_nd(x)
    each, rows, whole = np.arange(shape[0]), matrix.shape[1], shape[2]
    pieces = stacked(each * rows, each * whole, rows), stacked(ZEROS, each * whole + rows, whole - rows)

    def place(y, _):
        return tensors.rows(y, "NZ")

    return Moves([matrix[:, :, None]], [], np.concatenate(pieces), [shape], [fmt], place, given=matrix)


def to_nd(y, m, n):
    fmt, shape = matrices.checked_nz(y, m, n)
    each = np.arange(shape[0])
    pieces = stacked(each * y.shape[2], each * shape[1], shape[1])

    def place(x, _):
        return x[:, :, None]

    return Moves([tensors.rows(y, "NZ")], [], pieces, [shape], [fmt], place, given=y)


def stacked(source, target, count):
    """Pieces of so many rows each."""
    return np.stack(np.broadcast_arrays(source, target, count), axis=1)


CHECKED: dict[str, Callable] = {
    "key_value_cache": static_append,
    "multi_head_attention": static_attention.checked_attention,
    "multi_head_cache_attention": static_attention.checked_cache_attention,
    "merge_attention_states": merged,
    "rotary_position_embedding": static_positions.checked_turn,
    "alibi_slope": slope,
    "alibi_mask": static_positions.checked_mask,
    "dynamic_batching.key_value_cache": dynamic_append,
    "dynamic_batching.multi_head_attention": dynamic_attention.checked_attention,
    "dynamic_batching.multi_head_cache_attention": dynamic_cache_attention,
    "dynamic_batching.position_index": position_index,
    "dynamic_batching.rotary_position_embedding": dynamic_positions.checked_turn,
    "dynamic_batching.alibi_mask": dynamic_positions.checked_mask,
    "ascend.reshape_and_cache": stored,
    "ascend.paged_cache_load": loaded,
    "ascend.block_copy": copied,
    "ascend.paged_attention": paged.checked,
    "ascend.nd_to_nz": to_nz,
    "ascend.nz_to_nd": to_nd,
}

# Results of a checked call, of its `arrays` as checks see them


def of_append(call, arrays, out, return_lse):
    def refuse(out):
        moves.check_outputs(out, call.fmt, call.shape, layer=call.layer, **arrays)

    if out is None:
        refuse(None)  # what an append writes may overlap, and outputs be too large
    return Results(out, ("out (key)", "out (value)"), [(call.shape, call.fmt.dtype)] * 2, refuse)


def of_attention(call, arrays, out, return_lse):
    wants_lse = attention.flag("return_lse", return_lse)
    inputs = call.inputs + getattr(call, "written", [])
    forms = [(call.shape, call.fmt.dtype), (call.shape[:-1], np.dtype(np.float32))][: 1 + wants_lse]

    def refuse(out):
        attention.outputs(out, call.shape, call.fmt, wants_lse, inputs)

    return Results(out, ("out", "out (lse)") if wants_lse else "out", forms, refuse)


def of_merge(call, arrays, out, return_lse):
    forms = [(call.shape, call.fmt.dtype), (call.shape[:-1], np.dtype(np.float32))]

    def refuse(out):
        merge.check_given(out, call.shape, call.fmt, *call.arrays)

    return Results(out, ("out (attn_output)", "out (lse)"), forms, refuse)


def of_turn(call, arrays, out, return_lse):
    forms = [(array.shape, call.fmt.dtype) for array in (call.query, call.key)]
    return Results(out, ("out (query)", "out (key)"), forms, lambda out: positions.check_outputs(out, call))


def of_mask(call, arrays, out, return_lse):
    forms = [(call.shape, call.fmt.dtype)]
    return Results(out, "out", forms, lambda out: positions.check_mask_output(out, call))


def of_slope(call, arrays, out, return_lse):
    forms = [(call.shape, call.fmt.dtype)]
    return Results(out, "out", forms, lambda out: attention.given([("out", out, call.shape, call.fmt)]))


def of_index(call, arrays, out, return_lse):
    forms = [(call.shape, np.dtype(np.int64))]
    return Results(out, "out", forms, lambda out: dynamic_positions.check_index_output(out, *call.shape))


def of_load(call, arrays, out, return_lse):
    forms = [(shape, fmt.dtype) for shape, fmt in zip(call.shapes, call.formats, strict=True)]
    if isinstance(out, (tuple, list)):
        out = out[: len(forms)]  # behind keys alone there may be anything
    names = tuple(f"out ({name})" for name in blocks.RESULTS[: len(forms)])
    absent = len(blocks.RESULTS) - len(forms)
    return Results(out, names, forms, lambda out: blocks.outputs(out, call.given), absent)


def of_matrices(call, arrays, out, return_lse):
    (shape,), (fmt,) = call.shapes, call.formats
    forms = [(shape, fmt.dtype)]
    return Results(out, "out", forms, lambda out: matrices.result(out, shape, fmt, call.given))
