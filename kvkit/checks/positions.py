"""The checked calls of the position operators."""

from typing import NamedTuple

import numpy as np

from kvkit import checks
from kvkit.checks import index_tensors
from kvkit.checks.index_tensors import INT64_MAX, index
from kvkit.checks.masks import dynamic_mask, static_mask
from kvkit.checks.outputs import Results
from kvkit.checks.tensors import filled, holdable, named, one_piece, tensor
from kvkit.checks.values import flag, integer, positive
from kvkit.errors import argument_error, describe
from kvkit.formats import BY_DTYPE, BY_NAME, FLOATS, Element

# Rotary position embedding


class Turn(NamedTuple):
    """A checked call of `rotary_position_embedding`, but for its outputs."""

    fmt: Element
    query: np.ndarray
    key: np.ndarray
    starts: np.ndarray  # of sequences, among the tokens
    first: np.ndarray  # positions
    turned: int  # elements of a head
    bypass_key: bool
    scaling: tuple  # see `scaling`
    results: Results
    halves: bool  # whether both halves of what turns are pairs, not neighbours
    tables: tuple[np.ndarray, np.ndarray] | None  # cosines and sines [positions, pairs], if they are given


def static_turn(query, key, start_pos, pad_len, **attributes):
    """The checked call of `rotary_position_embedding` for sequences of one length."""
    fmt = queries_and_keys(query, key, 4)
    return turn(fmt, query, key, *static_positions(query, start_pos, pad_len), **attributes)


def dynamic_turn(query, key, seqstarts, start_pos, max_seqlen, **attributes):
    """The same of packed sequences."""
    fmt = queries_and_keys(query, key, 3)
    return turn(fmt, query, key, *dynamic_positions(query, seqstarts, start_pos, max_seqlen), **attributes)


def static_positions(query, start_pos, pad_len):
    """(starts, first positions) of sequences of one length, checked."""
    batch, seqlen = query.shape[:2]
    first = np.full(batch, integer("start_pos", start_pos, 0, INT64_MAX - seqlen))
    if pad_len is not None:
        padding = index("pad_len", pad_len)
        if padding.shape[0] != batch:
            raise argument_error("pad_len", f"{batch} entries for {batch} sequences", padding.shape[0])
        if batch and padding.min() < 0:
            b = int(padding.argmin())
            raise argument_error("pad_len", f"at least 0 for sequence {b}", padding[b])
        first -= padding
    return np.arange(batch + 1) * seqlen, first


def dynamic_positions(query, seqstarts, start_pos, max_seqlen):
    """The same of packed ones."""
    return packed("query", len(query), seqstarts, start_pos, max_seqlen)


def turn(fmt, query, key, starts, first, *, rotary_dim, bypass_key, interleaved, cos, sin, **scales):
    """A `Turn` of tokens that are checked, with attributes that are not."""
    turned = turned_elements(rotary_dim, query.shape[-1])
    slower, bypass_key = scaling(**scales), flag("bypass_key", bypass_key)
    tables, halves = given_tables(cos, sin, turned, starts, first), not flag("interleaved", interleaved)
    pair = named(query=query, key=key)
    forms = {name: (array.shape, fmt.dtype) for name, array in pair}
    results = Results(forms, [*pair, *named(cos=cos, sin=sin)], in_place=True)
    return Turn(fmt, query, key, starts, first, turned, bypass_key, slower, results, halves, tables)


def given_tables(cos, sin, turned, starts, first):
    """Checked cosines and sines of all positions of some tokens; None if they are to be computed."""
    if cos is None and sin is None:
        return None
    for name, table in (("cos", cos), ("sin", sin)):
        tensor(name, table, FLOATS, 2)
        if table.shape[1] != turned // 2:
            raise argument_error(name, f"{turned // 2} columns, one for each pair", f"shape {table.shape}")
    if sin.shape != cos.shape:
        raise argument_error("sin", f"the shape of cos, {cos.shape}", sin.shape)
    lengths = np.diff(starts)
    ends, there = first + lengths, lengths > 0
    if there.any() and first[there].min() < 0:
        raise argument_error("cos", "a row for each position", f"position {first[there].min()}")
    if there.any() and ends[there].max() > len(cos):
        raise argument_error("cos", f"{ends[there].max()} rows, one for each position", len(cos))
    return cos, sin


def packed(name, tokens, seqstarts, start_pos, max_seqlen):
    """(seqstarts, start_pos) of packed sequences, checked; `name` is an array of that many tokens."""
    starts, first = index("seqstarts", seqstarts), index("start_pos", start_pos)
    batch = starts.shape[0] - 1
    if batch < 0:
        raise argument_error("seqstarts", "1 entries for 0 sequences", 0)
    if first.shape[0] != batch:
        raise argument_error("start_pos", f"{batch} entries for {batch} sequences", first.shape[0])
    if starts[0] != 0:
        raise argument_error("seqstarts", "to begin with 0", starts[0])
    limit = index_tensors.hint("max_seqlen", max_seqlen)
    rule, b, length = checks.position_scan.scan(starts, first, limit)
    if rule == checks.position_scan.STARTS:
        raise argument_error("seqstarts", f"never to decrease (entry {b + 1})", starts[b + 1])
    if rule == checks.position_scan.FIRST:
        raise argument_error("start_pos", f"at least 0 for sequence {b}", first[b])
    if rule == checks.position_scan.LAST:
        end = f"at most {INT64_MAX - length} for sequence {b} of {length} tokens"
        raise argument_error("start_pos", end, first[b])
    if rule == checks.position_scan.HINT:
        raise argument_error("max_seqlen", f"at least {length}, the length of sequence {b}", limit)
    if starts[-1] != tokens:
        raise argument_error("seqstarts", f"to end with the {tokens} tokens of {name}", starts[-1])
    return starts, first


def queries_and_keys(query, key, ndim):
    """The format of both, which may differ in their heads only."""
    fmt = tensor("query", query, FLOATS, ndim)
    if tensor("key", key, FLOATS, ndim) is not fmt:
        raise argument_error("key", f"the dtype of query, {fmt}", key.dtype)
    if key.shape[:-2] != query.shape[:-2] or key.shape[-1] != query.shape[-1]:
        wanted = ", ".join(map(str, (*query.shape[:-2], "any", query.shape[-1])))
        raise argument_error("key", f"shape ({wanted}), as query has", key.shape)
    for name, array in (("query", query), ("key", key)):
        filled(name, array)
    return fmt


def turned_elements(rotary_dim, dim):
    """How many elements of a head turn."""
    turned = integer("rotary_dim", rotary_dim, 0, dim) or dim
    if turned % 2:
        raise argument_error("rotary_dim", "an even number of elements, which turn in pairs", turned)
    return turned


def scaling(theta, max_position_embeddings, scaling_type, scaling_factor):
    """(theta, divisor of positions, longest, factor): sequences that end beyond `longest` turn slower."""
    theta, factor = positive("theta", theta), positive("scaling_factor", scaling_factor)
    longest = min(integer("max_position_embeddings", max_position_embeddings, 1), INT64_MAX)
    if not isinstance(scaling_type, str) or scaling_type not in ("", "linear", "dynamic"):
        raise argument_error("scaling_type", "'', 'linear' or 'dynamic'", describe(scaling_type))
    if scaling_type == "dynamic":
        return theta, 1.0, longest, factor
    return theta, factor if scaling_type == "linear" else 1.0, INT64_MAX, 1.0


# Indices


class Index(NamedTuple):
    """A checked call of `position_index`, but for its output."""

    starts: np.ndarray  # of sequences, among the tokens
    first: np.ndarray  # positions
    results: Results


def position_index(sequences, seqstarts, start_pos, max_seqlen):
    """The checked call."""
    tokens = index("sequences", sequences)
    starts, first = packed("sequences", len(tokens), seqstarts, start_pos, max_seqlen)
    form = (len(tokens),), np.dtype(np.int64)
    return Index(starts, first, Results({"positions": form}, [], alone=True))


# ALiBi


class Mask(NamedTuple):
    """A checked call of `alibi_mask`, but for its output."""

    fmt: Element
    shape: tuple[int, ...]
    starts: np.ndarray  # of sequences, among the queries
    kvstarts: np.ndarray  # and among the keys
    added: np.ndarray | None  # another mask
    element: str | None  # its format, or "bool"
    place: tuple[int, ...]  # where it lies: address, strides (batch, head, row)
    padding: float
    results: Results


def static_alibi(seqlen_q, seqlen_kv, attn_mask, *, num_heads, data_type):
    """The checked call of `alibi_mask` for sequences of one length."""
    seqlen, kvlen = integer("seqlen_q", seqlen_q, 0, 2**62), integer("seqlen_kv", seqlen_kv, 0, 2**62)
    num_heads, fmt = heads(num_heads), mask_format(data_type)
    mask, mask_fmt = given_mask(attn_mask)
    batches = mask.shape[:1] if mask is not None and mask.ndim == 4 and mask.size else ()
    batch = batches[0] if batches else 1
    seen = static_mask(mask_fmt, mask, batch, num_heads, seqlen, kvlen)
    shape = (*batches, num_heads, seqlen, padded(kvlen))
    return alibi(fmt, shape, np.array([0, seqlen]), np.array([0, kvlen]), mask, seen, -np.inf, "seqlen_kv")


def dynamic_alibi(seqstarts, kvstarts, attn_mask, *, num_heads, data_type):
    """The same of packed sequences."""
    steps = index_tensors.packed(seqstarts, kvstarts, None, None)
    num_heads, fmt = heads(num_heads), mask_format(data_type)
    mask, mask_fmt = given_mask(attn_mask)
    seen = dynamic_mask(mask_fmt, mask, num_heads, steps.tokens, steps.context)
    shape = num_heads, steps.tokens, padded(steps.context)
    return alibi(fmt, shape, steps.seqstarts, steps.kvstarts, mask, seen, 0, "kvstarts")


def heads(num_heads):
    return integer("num_heads", num_heads, 1, 2**31)


def slopes(num_heads):
    """What `alibi_slope` gives."""
    return Results({"slopes": ((heads(num_heads),), np.dtype(np.float32))}, [], alone=True)


def mask_format(data_type):
    fmt = BY_NAME.get(data_type) if isinstance(data_type, str) else None
    if fmt not in FLOATS:
        raise argument_error("data_type", " or ".join(f.name for f in FLOATS), describe(data_type))
    return fmt


def given_mask(mask):
    """(mask, its format) for the checks of attention: rows in one piece; any float format, or boolean."""
    if mask is None:
        return None, None
    if not isinstance(mask, np.ndarray):
        raise argument_error("attn_mask", "a numpy array", describe(mask))
    fmt = BY_DTYPE.get(mask.dtype)
    if fmt not in FLOATS and mask.dtype != np.bool_:
        raise argument_error("attn_mask", f"dtype {' or '.join(f.name for f in FLOATS)} or bool", mask.dtype)
    return (one_piece(mask) if mask.ndim > 1 else mask), fmt


def alibi(fmt, shape, starts, kvstarts, added, seen, padding, bound):
    """A `Mask`; `added` as checked for attention in `seen`. What is named `bound` bounds the size."""
    holdable(bound, shape, fmt, "a mask")
    address, _, *strides, _, _ = seen
    element = None if not address else "bool" if added.dtype == np.bool_ else BY_DTYPE[added.dtype].name
    results = Results({"mask": (shape, fmt.dtype)}, named(attn_mask=added), alone=True)
    return Mask(fmt, shape, starts, kvstarts, added, element, (address, *strides), padding, results)


def padded(columns):
    """The columns of an ALiBi mask: a multiple of 16."""
    return -(-columns // 16) * 16
