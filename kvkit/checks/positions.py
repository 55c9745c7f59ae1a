"""Check calls of the position operators: rotary embedding, position indices, ALiBi."""

from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import ArrayLike

from kvkit import checks
from kvkit.checks.arguments import ContextArguments, PackedPositions, RotaryArguments, StaticPositions
from kvkit.checks.index_tensors import INT64_MAX, batch_of, index, index_form, limit, packed_contexts
from kvkit.checks.masks import dynamic_mask, static_mask
from kvkit.checks.outputs import Results
from kvkit.checks.records import MaskPlace
from kvkit.checks.values import (
    check_array,
    check_not_empty,
    check_size,
    checked_format,
    flag,
    integer,
    named_arrays,
    one_piece,
    positive_number,
)
from kvkit.errors import argument_error, describe
from kvkit.formats import BY_DTYPE, BY_NAME, FLOATS, Element
from kvkit.typed import Array

Starts = tuple[Array, Array]  # where each sequence begins among the tokens, and its first position
FLOAT_OR = " or ".join(fmt.name for fmt in FLOATS)
MOST_HEADS = 2**16  # whose slopes are computed one by one

# Rotary position embedding


class RotaryScaling(NamedTuple):
    """The base of the angles, and how it or the positions are scaled."""

    theta: float
    divisor: float = 1.0  # of positions
    longest: int = INT64_MAX  # contexts longer than this scale theta ("dynamic")
    factor: float = 1.0  # by which they scale it


class RotationCall(NamedTuple):
    """A checked call of `rotary_position_embedding`, but for its outputs."""

    fmt: Element
    query: Array
    key: Array
    starts: Array  # [B + 1], where sequences begin among the tokens
    first: Array  # [B], their first positions
    rotated: int  # elements of a head that are rotated
    bypass_key: bool  # whether keys are copied, not rotated
    scaling: RotaryScaling
    results: Results
    halves: bool  # whether pairs are an element of the first half and one of the second, not neighbours
    tables: tuple[Array, Array] | None  # cosines and sines [positions, pairs], if they are given


def checked_rotation(
    query: Array, key: Array, where: StaticPositions | PackedPositions, arguments: RotaryArguments
) -> RotationCall:
    """Check a call of `rotary_position_embedding`."""
    fmt = queries_and_keys(query, key, 4 if isinstance(where, StaticPositions) else 3)
    starts, first = positions_of(query, where)
    dim = query.shape[-1]
    rotated = integer("rotary_dim", arguments.rotary_dim, 0, dim) or dim
    if rotated % 2:
        raise argument_error("rotary_dim", "an even number of elements, which rotate in pairs", rotated)
    theta, scaling_type = positive_number("theta", arguments.theta), arguments.scaling_type
    factor = positive_number("scaling_factor", arguments.scaling_factor)
    longest = min(integer("max_position_embeddings", arguments.max_position_embeddings, 1), INT64_MAX)
    if not isinstance(scaling_type, str) or scaling_type not in ("", "linear", "dynamic"):
        raise argument_error("scaling_type", "'', 'linear' or 'dynamic'", describe(scaling_type))
    if scaling_type == "dynamic":
        scaling = RotaryScaling(theta, longest=longest, factor=factor)
    else:
        scaling = RotaryScaling(theta, divisor=factor if scaling_type == "linear" else 1.0)
    bypass_key = flag("bypass_key", arguments.bypass_key)
    cos, sin = arguments.cos, arguments.sin
    tables = angle_tables(cos, sin, rotated, starts, first)
    if arguments.interleaved is None:
        wanted = "False for Llama, Qwen and most models (or Rope.from_config(config).rotate), True for PMX"
        raise argument_error("interleaved", wanted, "None")
    halves = not flag("interleaved", arguments.interleaved)
    arrays = named_arrays(query=query, key=key)
    forms = {name: (array.shape, fmt.dtype) for name, array in arrays}
    results = Results(forms, [*arrays, *named_arrays(cos=cos, sin=sin)], in_place=True)
    return RotationCall(
        fmt, query, key, starts, first, rotated, bypass_key,
        scaling=scaling, results=results, halves=halves, tables=tables,
    )  # fmt: skip


def positions_of(query: Array, where: StaticPositions | PackedPositions) -> Starts:
    """Check where the sequences of queries begin, and their first positions."""
    if isinstance(where, PackedPositions):
        return packed_positions("query", len(query), where)
    batch, seqlen = query.shape[:2]
    first = np.full(batch, integer("start_pos", where.start_pos, 0, INT64_MAX - seqlen))
    if where.pad_len is not None:
        padding = index("pad_len", where.pad_len)
        if padding.shape[0] != batch:
            raise argument_error("pad_len", f"{batch} entries for {batch} sequences", padding.shape[0])
        if batch and padding.min() < 0:
            b = int(padding.argmin())
            raise argument_error("pad_len", f"at least 0 for sequence {b}", padding[b])
        first -= padding
    return np.arange(batch + 1) * seqlen, first


def angle_tables(
    cos: Array | None, sin: Array | None, rotated: int, starts: Array, first: Array
) -> tuple[Array, Array] | None:
    """Check the caller's cosines and sines [positions, pairs]; return None if there are none."""
    if cos is None and sin is None:
        return None
    cos, sin = cast(Array, cos), cast(Array, sin)  # if only one is None, `checked_format` refuses it
    for name, table in (("cos", cos), ("sin", sin)):
        checked_format(name, table, FLOATS, 2)
        if table.shape[1] != rotated // 2:
            raise argument_error(name, f"{rotated // 2} columns, one for each pair", f"shape {table.shape}")
    if sin.shape != cos.shape:
        raise argument_error("sin", f"the shape of cos, {cos.shape}", sin.shape)
    has_tokens = np.diff(starts) > 0
    first, ends = first[has_tokens], (first + np.diff(starts))[has_tokens]
    if first.min(initial=0) < 0:
        raise argument_error("cos", "a row for each position", f"position {first.min()}")
    if ends.max(initial=0) > len(cos):
        raise argument_error("cos", f"{ends.max()} rows, one for each position", len(cos))
    return cos, sin


def packed_positions(name: str, tokens: int, where: PackedPositions) -> Starts:
    """Check where packed sequences begin; the array called `name` has `tokens` tokens."""
    starts, first = index("seqstarts", where.seqstarts), index("start_pos", where.start_pos)
    batch = batch_of(starts)
    if len(first) != batch:
        raise argument_error("start_pos", f"{batch} entries for {batch} sequences", len(first))
    scan, longest = checks.position_scan, limit("max_seqlen", where.max_seqlen)
    rule, b, length = scan.scan_positions(starts, first, longest)
    if rule == scan.STARTS:
        raise argument_error("seqstarts", f"never to decrease (entry {b + 1})", starts[b + 1])
    if rule == scan.FIRST:
        raise argument_error("start_pos", f"at least 0 for sequence {b}", first[b])
    if rule == scan.LAST:
        end = f"at most {INT64_MAX - length} for sequence {b} of {length} tokens"
        raise argument_error("start_pos", end, first[b])
    if rule == scan.HINT:
        raise argument_error("max_seqlen", f"at least {length}, the length of sequence {b}", longest)
    if starts[-1] != tokens:
        raise argument_error("seqstarts", f"to end with the {tokens} tokens of {name}", starts[-1])
    return starts, first


def queries_and_keys(query: Array, key: Array, ndim: int) -> Element:
    """Check queries and keys, whose numbers of heads may differ; return their format."""
    fmt = checked_format("query", query, FLOATS, ndim)
    if checked_format("key", key, FLOATS, ndim) is not fmt:
        raise argument_error("key", f"the dtype of query, {fmt}", key.dtype)
    if key.shape[:-2] != query.shape[:-2] or key.shape[-1] != query.shape[-1]:
        wanted = ", ".join(map(str, (*query.shape[:-2], "any", query.shape[-1])))
        raise argument_error("key", f"shape ({wanted}), as query has", key.shape)
    for name, array in (("query", query), ("key", key)):
        check_not_empty(name, array)
    return fmt


# Indices


class PositionCall(NamedTuple):
    """A checked call of `position_index`, but for its output."""

    starts: Array  # [B + 1], where sequences begin among the tokens
    first: Array  # [B], their first positions
    results: Results


def checked_position_index(sequences: ArrayLike, where: PackedPositions) -> PositionCall:
    """Check a call of `position_index`."""
    tokens = index_form("sequences", sequences, 1)
    starts, first = packed_positions("sequences", len(tokens), where)
    form = (len(tokens),), np.dtype(np.int64)
    return PositionCall(starts, first, Results({"positions": form}, [], alone=True))


# ALiBi


class AlibiCall(NamedTuple):
    """A checked call of `alibi_mask`, but for its output."""

    fmt: Element
    shape: tuple[int, ...]
    starts: Array  # [B + 1], where sequences begin among the queries
    kvstarts: Array  # [B + 1], where they begin among the keys
    added: Array | None  # the caller's mask, which is added
    element: str | None  # the format of `added`, or "bool"
    place: tuple[int, ...]  # (address, and byte strides of batch, head and row) of `added`
    padding: float  # the number in columns after the keys, -inf or 0
    results: Results


def checked_static_alibi(
    seqlen_q: Any, seqlen_kv: Any, attn_mask: Array | None, num_heads: int, data_type: str
) -> AlibiCall:
    """Check a call of `alibi_mask` for sequences of one length."""
    seqlen, kvlen = integer("seqlen_q", seqlen_q, 0, 2**62), integer("seqlen_kv", seqlen_kv, 0, 2**62)
    num_heads, fmt = head_count(num_heads), mask_format(data_type)
    mask, mask_fmt = given_mask(attn_mask)
    # Only a given mask with an axis of sequences gives the result one.
    batches = mask.shape[:1] if mask is not None and mask.ndim == 4 and mask.size else ()
    batch = batches[0] if batches else 1
    place = static_mask(mask_fmt or fmt, mask, batch, num_heads, seqlen, kvlen, one_column=False)
    shape = (*batches, num_heads, seqlen, padded_columns(kvlen))
    check_size("seqlen_kv", shape, fmt, "a mask")
    starts = np.array([0, seqlen]), np.array([0, kvlen])
    return alibi_call(fmt, shape, starts, mask, place, padding=-np.inf)


def checked_dynamic_alibi(
    seqstarts: ArrayLike, kvstarts: ArrayLike, attn_mask: Array | None, num_heads: int, data_type: str
) -> AlibiCall:
    """Check a call of `alibi_mask` for packed sequences."""
    steps = packed_contexts(ContextArguments(seqstarts, kvstarts, 0, None, None))
    num_heads, fmt = head_count(num_heads), mask_format(data_type)
    mask, mask_fmt = given_mask(attn_mask)
    place = dynamic_mask(mask_fmt or fmt, mask, num_heads, steps.tokens, steps.context, one_column=False)
    shape = num_heads, steps.tokens, padded_columns(steps.context)
    check_size("kvstarts", shape, fmt, "a mask")
    return alibi_call(fmt, shape, (steps.seqstarts, steps.kvstarts), mask, place, padding=0)


def head_count(num_heads: Any) -> int:
    """Return a checked number of heads."""
    return integer("num_heads", num_heads, 1, MOST_HEADS)


class SlopeCall(NamedTuple):
    """A checked call of `alibi_slope`, but for its output."""

    results: Results


def checked_slopes(num_heads: Any) -> SlopeCall:
    """Check a call of `alibi_slope`."""
    return SlopeCall(Results({"slopes": ((head_count(num_heads),), np.dtype(np.float32))}, [], alone=True))


def mask_format(data_type: object) -> Element:
    """Return the format that a mask is written in."""
    fmt = BY_NAME.get(data_type) if isinstance(data_type, str) else None
    if fmt is None or fmt not in FLOATS:
        raise argument_error("data_type", FLOAT_OR, describe(data_type))
    return fmt


def given_mask(mask: Array | None) -> tuple[Array | None, Element | None]:
    """Return a mask of floats or booleans, with contiguous rows, and its format (None for booleans)."""
    if mask is None:
        return None, None
    check_array("attn_mask", mask)
    fmt = BY_DTYPE.get(mask.dtype)
    if fmt not in FLOATS and mask.dtype != np.bool_:
        raise argument_error("attn_mask", f"dtype {FLOAT_OR} or bool", mask.dtype)
    return (one_piece(mask) if mask.ndim > 1 else mask), fmt


def alibi_call(
    fmt: Element, shape: tuple[int, ...], starts: Starts, added: Array | None, place: MaskPlace,
    padding: float,
) -> AlibiCall:  # fmt: skip
    """Return a checked call that adds the mask `added`, at `place`; `starts` are of queries and of keys."""
    element = None
    if added is not None and place.address:
        element = "bool" if added.dtype == np.bool_ else BY_DTYPE[added.dtype].name
    where = place.address, place.sequence, place.head, place.row
    results = Results({"mask": (shape, fmt.dtype)}, named_arrays(attn_mask=added), alone=True)
    return AlibiCall(fmt, shape, *starts, added, element, place=where, padding=padding, results=results)


def padded_columns(columns: int) -> int:
    """Return the number of columns of an ALiBi mask: `columns` up to a multiple of 16."""
    return -(-columns // 16) * 16
