"""What the static and the dynamic position operators share: their checks, and the launches."""

from dataclasses import dataclass

import numpy as np

from kvkit import attention, check, cpu, steps
from kvkit.check import describe, integer, wrong
from kvkit.formats import BY_DTYPE, BY_NAME, FLOATS, Format

# Rotary position embedding


@dataclass(frozen=True, slots=True)
class Turn:
    """A checked call of `rotary_position_embedding`, but for its outputs."""

    fmt: Format
    query: np.ndarray
    key: np.ndarray
    starts: np.ndarray  # of sequences, among the tokens
    first: np.ndarray  # positions
    turned: int  # elements of a head
    bypass_key: bool
    scaling: tuple  # see `scaling`


def packed(name, tokens, seqstarts, start_pos, max_seqlen):
    """(seqstarts, start_pos) of packed sequences, checked; `name` is an array of that many tokens."""
    starts, first = steps.index("seqstarts", seqstarts, 1), steps.index("start_pos", start_pos, 1)
    batch = starts.shape[0] - 1
    if batch < 0:
        raise wrong("seqstarts", "1 entries for 0 sequences", 0)
    if first.shape[0] != batch:
        raise wrong("start_pos", f"{batch} entries for {batch} sequences", first.shape[0])
    if starts[0] != 0:
        raise wrong("seqstarts", "to begin with 0", starts[0])
    limit = steps.hint("max_seqlen", max_seqlen)
    rule, b, length = cpu.rotary.compiled_scan()(starts, first, limit)
    if rule == cpu.rotary.STARTS:
        raise wrong("seqstarts", f"never to decrease (entry {b + 1})", starts[b + 1])
    if rule == cpu.rotary.FIRST:
        raise wrong("start_pos", f"at least 0 for sequence {b}", first[b])
    if rule == cpu.rotary.LAST:
        end = f"at most {steps.INT64_MAX - length} for sequence {b} of {length} tokens"
        raise wrong("start_pos", end, first[b])
    if rule == cpu.rotary.HINT:
        raise wrong("max_seqlen", f"at least {length}, the length of sequence {b}", limit)
    if starts[-1] != tokens:
        raise wrong("seqstarts", f"to end with the {tokens} tokens of {name}", starts[-1])
    return starts, first


def queries_and_keys(query, key, ndim):
    """The format of both, which may differ in their heads only."""
    fmt = check.tensor("query", query, FLOATS, ndim)
    if check.tensor("key", key, FLOATS, ndim) is not fmt:
        raise wrong("key", f"the dtype of query, {fmt}", key.dtype)
    if key.shape[:-2] != query.shape[:-2] or key.shape[-1] != query.shape[-1]:
        wanted = ", ".join(map(str, (*query.shape[:-2], "any", query.shape[-1])))
        raise wrong("key", f"shape ({wanted}), as query has", key.shape)
    for name, array in (("query", query), ("key", key)):
        if min(array.shape[-2:]) < 1:
            raise wrong(name, "at least one head and one element a head", f"shape {array.shape}")
    return fmt


def turned_elements(rotary_dim, dim):
    """How many elements of a head turn."""
    turned = integer("rotary_dim", rotary_dim, 0, dim) or dim
    if turned % 2:
        raise wrong("rotary_dim", "an even number of elements, which turn in pairs", turned)
    return turned


def positive(name, value):
    number = attention.number(name, value)
    if number <= 0:
        raise wrong(name, "a positive number", number)
    return number


def scaling(theta, max_position_embeddings, scaling_type, scaling_factor):
    """(theta, divisor of positions, longest, factor): sequences that end beyond `longest` turn slower."""
    theta, factor = positive("theta", theta), positive("scaling_factor", scaling_factor)
    longest = min(integer("max_position_embeddings", max_position_embeddings, 1), steps.INT64_MAX)
    if not isinstance(scaling_type, str) or scaling_type not in ("", "linear", "dynamic"):
        raise wrong("scaling_type", "'', 'linear' or 'dynamic'", describe(scaling_type))
    if scaling_type == "dynamic":
        return theta, 1.0, longest, factor
    return theta, factor if scaling_type == "linear" else 1.0, steps.INT64_MAX, 1.0


def turn_call(
    fmt,
    query,
    key,
    starts,
    first,
    *,
    rotary_dim,
    theta,
    bypass_key,
    max_position_embeddings,
    scaling_type,
    scaling_factor,
):
    """A `Turn` of tokens that are checked, with attributes that are not."""
    turned = turned_elements(rotary_dim, query.shape[-1])
    slower = scaling(theta, max_position_embeddings, scaling_type, scaling_factor)
    bypass_key = attention.flag("bypass_key", bypass_key)
    return Turn(fmt, query, key, starts, first, turned, bypass_key, slower)


def rotate(call, out):
    """Turn checked queries and keys into new arrays, or into `out`, which may be the inputs themselves."""
    outputs = out
    if out is None:
        outputs = np.empty(call.query.shape, call.fmt.dtype), np.empty(call.key.shape, call.fmt.dtype)
    else:
        check_outputs(out, call)
    if call.starts[-1]:
        moves = tuple(zip(map(check.one_piece, (call.query, call.key)), outputs, strict=True))
        tokens = call.starts, call.first
        cpu.launches.start(
            cpu.rotary.prepare(
                call.fmt.name, moves, *tokens, call.turned, call.bypass_key, call.scaling, out is None
            )
        )
    return tuple(outputs)


def check_outputs(out, call):
    """Check arrays that are given for the results: each may be its own input, exactly."""
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise wrong("out", "a tuple of 2 arrays (query, key)", describe(out))
    inputs = ("query", call.query), ("key", call.key)
    for array, own in zip(out, inputs, strict=True):
        name, old = own
        attention.given([(f"out ({name})", array, old.shape, call.fmt)])
        in_place = np.may_share_memory(array, old) and same_place(array, old)
        check.apart(f"out ({name})", array, [pair for pair in inputs if pair is not own or not in_place])
    check.apart("out (query)", out[0], [("out (key)", out[1])])


def same_place(a, b):
    """Whether equal indices of two arrays of one shape are one place."""
    return a is b or (a.strides == b.strides and a.ctypes.data == b.ctypes.data)


# ALiBi


@dataclass(frozen=True, slots=True)
class Mask:
    """A checked call of `alibi_mask`, but for its output."""

    fmt: Format
    shape: tuple[int, ...]
    starts: np.ndarray  # of sequences, among the queries
    kvstarts: np.ndarray  # and among the keys
    added: np.ndarray | None  # another mask
    element: str | None  # its format, or "bool"
    place: tuple[int, ...]  # where it lies: address, strides (batch, head, row)
    padding: float


def mask_format(data_type):
    fmt = BY_NAME.get(data_type) if isinstance(data_type, str) else None
    if fmt not in FLOATS:
        raise wrong("data_type", " or ".join(f.name for f in FLOATS), describe(data_type))
    return fmt


def given_mask(mask):
    """(mask, its format) for the checks of attention: rows in one piece; any float format, or boolean."""
    if mask is None:
        return None, None
    if not isinstance(mask, np.ndarray):
        raise wrong("attn_mask", "a numpy array", describe(mask))
    fmt = BY_DTYPE.get(mask.dtype)
    if fmt not in FLOATS and mask.dtype != np.bool_:
        raise wrong("attn_mask", f"dtype {' or '.join(f.name for f in FLOATS)} or bool", mask.dtype)
    return (check.one_piece(mask) if mask.ndim > 1 else mask), fmt


def mask_call(fmt, shape, starts, kvstarts, added, seen, padding, named):
    """A `Mask`; `added` as checked for attention in `seen`. `named` bounds the size."""
    check.holdable(named, shape, fmt, "a mask")
    address, _, *strides, _, _ = seen
    element = None if not address else "bool" if added.dtype == np.bool_ else BY_DTYPE[added.dtype].name
    return Mask(fmt, shape, starts, kvstarts, added, element, (address, *strides), padding)


def check_mask_output(out, call):
    """Check an array that is given for the mask."""
    attention.given([("out", out, call.shape, call.fmt)])
    check.apart("out", out, attention.named(attn_mask=call.added))


def alibi(call, out):
    """Write a mask."""
    if out is None:
        out = np.empty(call.shape, call.fmt.dtype)
    else:
        check_mask_output(out, call)
    target = out if out.ndim == 4 else out[None]
    if out.size:
        tokens = call.starts, call.kvstarts
        cpu.launches.start(
            cpu.alibi.prepare(target, call.fmt.name, *tokens, call.place, call.element, call.padding)
        )
    return out


def padded(columns):
    """The columns of an ALiBi mask: a multiple of 16."""
    return -(-columns // 16) * 16
