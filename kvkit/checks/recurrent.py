"""Check calls of the operators on recurrent states: the gated delta rule and the short convolution."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np

from kvkit.checks import index_tensors
from kvkit.checks.arguments import (
    ConvArguments,
    DeltaArguments,
    GateArguments,
    PromptArguments,
    ReplayArguments,
)
from kvkit.checks.index_tensors import index
from kvkit.checks.outputs import Results
from kvkit.checks.values import (
    check_apart,
    check_array,
    check_not_empty,
    check_writeable,
    checked_format,
    finite_number,
    flag,
    integer,
    named_arrays,
    one_piece,
    positive_number,
    text,
)
from kvkit.errors import argument_error, describe
from kvkit.formats import FLOATS, Element
from kvkit.formats.elements import BFLOAT16, FLOAT32
from kvkit.typed import Array

STATE_FORMATS = FLOAT32, BFLOAT16  # the formats of states
LAYOUTS = "KV", "VK"
DELTA_RULES = {  # {rule: (whether it has g, whether it has beta)}
    "linear": (False, False), "gated": (True, False), "delta": (False, True), "gated_delta": (True, True),
}  # fmt: skip
KINDS, ACTIVATIONS = ("gdn", "kda"), ("silu", "swish")
MOST_CHUNK = 256
WIDEST_CONV = 8


class GateCall(NamedTuple):
    """A checked call of `delta_gates`."""

    a: Array  # float32 [rows, heads] or [rows, heads, dk]
    b: Array | None  # float32 [.., heads]
    rates: Array  # float32, of the last axes of a
    biases: Array
    bound: float | None
    double_beta: bool
    results: Results


class DeltaCall(NamedTuple):
    """A checked call of the gated delta rule, as kernels read it."""

    fmt: Element  # of q, k and v
    q: Array  # [tokens, heads of q, dk]
    k: Array  # [tokens, heads of k, dk]
    v: Array  # [tokens, heads, dv]
    g: Array | None  # float32 [tokens, heads] or [tokens, heads, dk]: logarithms of decays
    beta: Array | None  # float32 [tokens, heads]
    gates: GateCall | None  # if g and beta are raw
    state: Array  # [slots, heads, ..]
    state_format: Element
    begins: Array  # int64 [N]: the first token of each sequence
    ends: Array
    reads: Array  # int64 [N]: the slot that a sequence reads; -1 for none
    writes: Array  # `reads` itself, or the slots that sequences write
    numbers: Array  # float32: scale, norm_eps
    norm: bool
    transposed: bool  # whether states are "VK"
    shape: tuple[int, ...]  # of the output
    results: Results

    @property
    def by_channel(self) -> bool:
        """Return whether each channel of a key has a decay of its own."""
        return self.g is not None and self.g.ndim == 3


class ConvCall(NamedTuple):
    """A checked call of the causal convolution."""

    fmt: Element
    x: Array  # [tokens, channels]
    weight: Array  # float32 [width, channels]
    bias: Array  # float32 [channels]
    state: Array  # [slots, channels, width - 1]
    starts: Array
    slots: Array
    silu: bool
    results: Results


class ReplayCall(NamedTuple):
    """A checked call of `gated_delta_replay`."""

    state: Array
    state_format: Element
    capsule: Array  # [N, rows, numbers of a token]
    channels: int  # decays of a head
    keys: int  # heads of keys
    accepted: Array
    slots: Array
    transposed: bool
    zero: Array  # float32


def checked_tokens(call: DeltaArguments, ndim: int) -> Element:
    """Check q, k and v; return their format."""
    fmt = checked_format("q", call.q, FLOATS, ndim)
    for name, array in (("k", call.k), ("v", call.v)):
        if checked_format(name, array, FLOATS, ndim) is not fmt:
            raise argument_error(name, f"the dtype of q, {fmt}", array.dtype)
        if array.shape[: ndim - 2] != call.q.shape[: ndim - 2]:
            wanted = f"the tokens of q, {call.q.shape[: ndim - 2]}"
            raise argument_error(name, wanted, f"shape {array.shape}")
    for name, array in (("q", call.q), ("k", call.k), ("v", call.v)):
        check_not_empty(name, array)
    if call.k.shape[-1] != call.q.shape[-1]:
        raise argument_error("k", f"heads of {call.q.shape[-1]} elements, as q has", f"shape {call.k.shape}")
    queries, heads = call.q.shape[-2], call.v.shape[-2]
    if queries % heads and heads % queries:
        wanted = f"a multiple or a divisor of the {queries} heads of q"
        raise argument_error("v", wanted, f"{heads} heads")
    if call.k.shape[-2] != min(queries, heads):
        wanted = f"{min(queries, heads)} heads, the fewer of q and v"
        raise argument_error("k", wanted, f"{call.k.shape[-2]} heads")
    return fmt


def flat(array: Array) -> Array:
    """Return [N, T, heads, dim] as [N * T, heads, dim], in one piece along the last axis."""
    array = array.reshape(-1, *array.shape[2:]) if array.ndim == 4 else array
    return one_piece(array)


def checked_number_array(name: str, array: Any, shape: tuple[int, ...], fmt: Element) -> Array:
    """Return an array of g or beta as float32; it has the format of q, or float32."""
    formats = (FLOAT32,) if fmt is FLOAT32 else (FLOAT32, fmt)
    checked_format(name, array, formats, len(shape))
    if array.shape != shape:
        raise argument_error(name, f"shape {shape}", array.shape)
    return np.ascontiguousarray(array, np.float32)


def checked_gates(call: DeltaArguments, fmt: Element) -> tuple[Array | None, Array | None]:
    """Return g and beta as float32 [tokens, heads(, dk)]; raw if there are `gates`."""
    tokens, heads, dk = call.v.shape[:-2], call.v.shape[-2], call.k.shape[-1]
    g, beta = call.g, call.beta
    if call.rule is not None:
        has_g, has_beta = DELTA_RULES[text("rule", call.rule, tuple(DELTA_RULES))]
        for array_name, array, needed in (("g", g, has_g), ("beta", beta, has_beta)):
            if (array is not None) != needed:
                what = "an array" if needed else "None"
                raise argument_error(array_name, f"{what} for rule {call.rule!r}", describe(array))
    if g is not None:
        check_array("g", g)
        shape = (*tokens, heads, dk) if g.ndim > len(tokens) + 1 else (*tokens, heads)
        g = checked_number_array("g", g, shape, fmt).reshape(-1, *shape[len(tokens) :])
    if beta is not None:
        beta = checked_number_array("beta", beta, (*tokens, heads), fmt).reshape(-1, heads)
    if call.gates is None and index_tensors.VALIDATES and g is not None:
        if np.isnan(g).any():
            raise argument_error("g", "numbers", "NaN")
        if (g > 0).any():
            wanted = "logarithms of decays, which are at most 0 (np.log of e^g)"
            raise argument_error("g", wanted, f"{float(g.max())}")
    return g, beta


def checked_spans(call: DeltaArguments) -> tuple[Array, Array]:
    """Return where each sequence begins and ends among the tokens."""
    tokens = call.v.shape[:-2]
    if len(tokens) == 2:
        if call.starts is not None:
            raise argument_error("starts", "None for tokens [N, T, ..]", describe(call.starts))
        begins = np.arange(tokens[0], dtype=np.int64) * tokens[1]
        if call.lengths is None:
            return begins, begins + tokens[1]
        lengths = index("lengths", call.lengths, 1, tokens[0])
        if len(lengths) and (lengths.min() < 0 or lengths.max() > tokens[1]):
            got = f"{int(lengths.min())} to {int(lengths.max())}"
            raise argument_error("lengths", f"numbers from 0 to {tokens[1]}", got)
        return begins, begins + lengths
    if call.lengths is not None:
        raise argument_error("lengths", "None for packed tokens [T, ..]", describe(call.lengths))
    if call.starts is None:
        return np.zeros(1, np.int64), np.full(1, tokens[0], np.int64)
    starts = checked_starts(call.starts, tokens[0])
    return starts[:-1].copy(), starts[1:].copy()


def checked_starts(starts: Any, tokens: int) -> Array:
    """Return where packed sequences begin: from 0, never falling, to the number of tokens."""
    checked = index("starts", starts)
    if not len(checked) or checked[0] != 0:
        got = "no entries" if not len(checked) else int(checked[0])
        raise argument_error("starts", "to begin with 0", got)
    if (np.diff(checked) < 0).any():
        raise argument_error("starts", "numbers that do not fall", describe(starts))
    if checked[-1] != tokens:
        raise argument_error("starts", f"to end with the {tokens} tokens", int(checked[-1]))
    return checked


def checked_slots(name: str, indices: Any, sequences: int, slots: int, written: bool = True) -> Array:
    """Return the slot of each sequence, -1 for none; a slot that is written may be named once."""
    checked = index(name, indices, 1, sequences)
    wrong = np.flatnonzero((checked < -1) | (checked >= slots))
    if len(wrong):
        raise argument_error(name, f"slots from 0 to {slots - 1}, or -1", int(checked[wrong[0]]))
    used = np.sort(checked[checked >= 0])
    twice = used[1:][np.diff(used) == 0]
    if written and len(twice):
        raise argument_error(name, "each slot once", f"slot {int(twice[0])} twice")
    return checked


def checked_places(call: DeltaArguments, sequences: int, slots: int) -> tuple[Array, Array]:
    """Return the slots that sequences read and write; one array if they are the same."""
    if call.state_indices is None:
        if call.out_state_indices is not None:
            raise argument_error("state_indices", "an array beside out_state_indices", "None")
        if slots != sequences:
            raise argument_error("state", f"{sequences} states, one for each sequence", slots)
        reads = np.arange(sequences, dtype=np.int64)
        return reads, reads
    moves = call.out_state_indices is not None
    reads = checked_slots("state_indices", call.state_indices, sequences, slots, written=not moves)
    if not moves:
        return reads, reads
    writes = checked_slots("out_state_indices", call.out_state_indices, sequences, slots)
    if ((reads < 0) != (writes < 0)).any():
        raise argument_error("out_state_indices", "-1 where state_indices is -1", describe(writes))
    for n in np.flatnonzero(writes >= 0).tolist():
        others = np.delete(reads, n)
        if (others == writes[n]).any():
            got = f"slot {int(writes[n])}"
            raise argument_error("out_state_indices", "slots that no other sequence reads", got)
    return reads, writes


def checked_state(state: Any, inner: tuple[int, ...], formats: tuple[Element, ...]) -> Element:
    """Check states [slots, ..]: each slot in one piece, any distance between slots; return their format."""
    fmt = checked_format("state", state, formats, len(inner) + 1)
    if state.shape[1:] != inner:
        raise argument_error("state", f"states of shape {inner}", f"shape {state.shape}")
    size: int = state.itemsize
    steps: list[int] = []
    for count in reversed(inner):
        steps.insert(0, size)
        size *= count
    wrong = [at for at, count in enumerate(inner) if count > 1 and state.strides[at + 1] != steps[at]]
    if wrong and state.size:
        got = f"strides {state.strides}"
        raise argument_error("state", "states whose elements are in one piece", got)
    check_writeable("state", state)
    return fmt


def checked_delta(call: DeltaArguments) -> DeltaCall:
    """Check a call of `gated_delta_step` or `gated_delta_rule`."""
    check_array("q", call.q)
    ndim = 4 if call.q.ndim == 4 and not call.one_token else 3
    fmt = checked_tokens(call, ndim)
    layout = text("state_layout", call.state_layout, LAYOUTS)
    heads, dk, dv = call.v.shape[-2], call.k.shape[-1], call.v.shape[-1]
    g, beta = checked_gates(call, fmt)
    if call.one_token:
        begins = np.arange(len(call.v), dtype=np.int64)
        ends = begins + 1
    else:
        begins, ends = checked_spans(call)
    inner = (heads, dk, dv) if layout == "KV" else (heads, dv, dk)
    state: Any = call.state
    if state is None and not call.one_token:
        if call.state_indices is not None:
            raise argument_error("state", "a pool of states beside state_indices", "None")
        state = np.zeros((len(begins), *inner), np.float32)
    inputs = named_arrays(q=call.q, k=call.k, v=call.v, g=call.g, beta=call.beta)
    state_format = checked_state(state, inner, STATE_FORMATS)
    reads, writes = checked_places(call, len(begins), len(state))
    check_apart("state", state, inputs)
    flag("norm", call.norm)
    eps = positive_number("norm_eps", call.norm_eps)
    scale = dk**-0.5 if call.scale is None else finite_number("scale", call.scale)
    shape = (*call.v.shape[:-2], max(heads, call.q.shape[-2]), dv)
    out_dtype = FLOAT32.dtype if getattr(call.out, "dtype", None) == np.float32 else fmt.dtype
    results = Results({"output": (shape, out_dtype)}, [*inputs, ("state", state)], alone=True)
    gates = None
    if call.gates is not None:  # g and beta are raw: a [tokens, heads(, dk)] and b [tokens, heads]
        if g is None:
            raise argument_error("g", "an array beside gates", "None")
        pair = call.gates
        if not isinstance(pair, (tuple, list, np.ndarray)) or len(pair) != 2:  # an array: its two rows
            raise argument_error("gates", "a pair (a_log, dt_bias)", describe(pair))
        gates = gate_call(g, beta, ("gates[0]", pair[0]), ("gates[1]", pair[1]))
    numbers, q, k, v = np.array([scale, eps], np.float32), flat(call.q), flat(call.k), flat(call.v)
    return DeltaCall(
        fmt, q, k, v, g, beta, gates, state=state, state_format=state_format, begins=begins, ends=ends,
        reads=reads, writes=writes, numbers=numbers, norm=bool(call.norm), transposed=layout == "VK",
        shape=shape, results=results,
    )  # fmt: skip


def gate_call(
    a: Array, b: Array | None, a_log: tuple[str, Any], dt_bias: tuple[str, Any], bound: float | None = None,
    double: bool = False,
) -> GateCall:  # fmt: skip
    """Return the record of gates; a is float32 [rows, heads(, dk)], and parameters are (name, array)."""
    inner = a.shape[1:]
    for (name, array), shape in ((a_log, inner[:1]), (dt_bias, inner)):
        checked_format(name, array, FLOATS, len(shape))
        if array.shape != shape:
            raise argument_error(name, f"shape {shape}", array.shape)
    logs = a_log[1].astype(np.float32).reshape(-1, *[1] * (len(inner) - 1))
    rates = np.ascontiguousarray(np.broadcast_to(np.exp(logs), inner))
    forms = {name: (x.shape, FLOAT32.dtype) for name, x in named_arrays(g=a, beta=b)}
    biases = dt_bias[1].astype(np.float32, order="C")
    return GateCall(a, b, rates, biases, bound, double, Results(forms, []))


def checked_delta_gates(call: GateArguments) -> GateCall:
    """Check a call of `delta_gates`."""
    kind = text("kind", call.kind, KINDS)
    check_array("a", call.a)
    fmt = checked_format("a", call.a, FLOATS, max(call.a.ndim, 2 + (kind == "kda")))
    outer = call.a.shape[: call.a.ndim - (kind == "kda")]
    if checked_format("b", call.b, FLOATS, len(outer)) is not fmt:
        raise argument_error("b", f"the dtype of a, {fmt}", call.b.dtype)
    if call.b.shape != outer:
        raise argument_error("b", f"shape {outer}", call.b.shape)
    if not min(call.a.shape[len(outer) - 1 :]):
        raise argument_error("a", "at least one head and one element a head", f"shape {call.a.shape}")
    bound = None if call.lower_bound is None else finite_number("lower_bound", call.lower_bound)
    if bound is not None and bound >= 0:
        raise argument_error("lower_bound", "a number below 0", bound)
    double = flag("double_beta", call.double_beta)
    a, b = (np.ascontiguousarray(each, np.float32) for each in (call.a, call.b))
    a = a.reshape(-1, *call.a.shape[len(outer) - 1 :])
    gates = gate_call(a, b, ("a_log", call.a_log), ("dt_bias", call.dt_bias), bound, double)
    inputs = named_arrays(a=call.a, b=call.b, a_log=call.a_log, dt_bias=call.dt_bias)
    forms = {"g": (call.a.shape, FLOAT32.dtype), "beta": (call.b.shape, FLOAT32.dtype)}
    return gates._replace(results=Results(forms, inputs))


def capsule_size(heads: int, keys: int, dk: int, dv: int, channels: int) -> int:
    """Return the numbers of a token in a capsule: decays, keys and errors of all heads."""
    return heads * channels + keys * dk + heads * dv


def capsule_parts(size: int, heads: int, dk: int, dv: int) -> tuple[int, int]:
    """Return (decays of a head, heads of keys) of a capsule with `size` numbers a token; (0, 0) for none."""
    for channels in (1, dk):
        keys, rest = divmod(size - heads * (channels + dv), dk)
        if keys > 0 and not rest and heads % keys == 0:
            return channels, keys
    return 0, 0


def checked_replay(call: ReplayArguments) -> ReplayCall:
    """Check a call of `gated_delta_replay`."""
    layout = text("state_layout", call.state_layout, LAYOUTS)
    fmt = checked_format("state", call.state, STATE_FORMATS, 4)
    checked_state(call.state, call.state.shape[1:], STATE_FORMATS)
    _, heads, dk, dv = call.state.shape
    dk, dv = (dk, dv) if layout == "KV" else (dv, dk)
    if not min(heads, dk, dv):
        raise argument_error("state", "at least one head and one element a head", f"shape {call.state.shape}")
    checked_format("capsule", call.capsule, (FLOAT32,), 3)
    sequences, rows, size = call.capsule.shape
    channels, keys = capsule_parts(size, heads, dk, dv)
    if not keys:
        forms = f"{heads} * (1 or {dk} + {dv}) + Hk * {dk} numbers a token, where Hk divides {heads}"
        raise argument_error("capsule", forms, f"shape {call.capsule.shape}")
    accepted = index("accepted", call.accepted, 1, sequences)
    if len(accepted) and (accepted.min() < 0 or accepted.max() > rows):
        got = f"{int(accepted.min())} to {int(accepted.max())}"
        raise argument_error("accepted", f"numbers from 0 to {rows}", got)
    if call.state_indices is None and len(call.state) != sequences:
        raise argument_error("state", f"{sequences} states, one for each sequence", len(call.state))
    slots = np.arange(sequences, dtype=np.int64)
    if call.state_indices is not None:
        slots = checked_slots("state_indices", call.state_indices, sequences, len(call.state))
    check_apart("state", call.state, [("capsule", call.capsule)])
    capsule, zero = np.ascontiguousarray(call.capsule), np.zeros(1, np.float32)
    return ReplayCall(
        call.state, fmt, capsule, channels, keys, accepted=accepted, slots=slots, transposed=layout == "VK",
        zero=zero,
    )  # fmt: skip


def checked_conv(call: ConvArguments) -> ConvCall:
    """Check a call of `causal_conv` or `causal_conv_update`."""
    fmt = checked_format("x", call.x, FLOATS, 2)
    tokens, channels = call.x.shape
    if not channels:
        raise argument_error("x", "at least one channel", f"shape {call.x.shape}")
    if checked_format("weight", call.weight, FLOATS, 2) not in (fmt, FLOAT32):
        raise argument_error("weight", f"the dtype of x, {fmt}, or float32", call.weight.dtype)
    if call.weight.shape[0] != channels or not 1 <= call.weight.shape[1] <= WIDEST_CONV:
        wanted = f"shape ({channels}, 1 to {WIDEST_CONV})"
        raise argument_error("weight", wanted, call.weight.shape)
    width, bias = call.weight.shape[1], np.zeros(channels, np.float32)
    if call.bias is not None:
        if checked_format("bias", call.bias, FLOATS, 1) not in (fmt, FLOAT32):
            raise argument_error("bias", f"the dtype of x, {fmt}, or float32", call.bias.dtype)
        if call.bias.shape != (channels,):
            raise argument_error("bias", f"shape {(channels,)}", call.bias.shape)
        bias = call.bias.astype(np.float32)
    activation = call.activation is not None and bool(text("activation", call.activation, ACTIVATIONS))
    if call.one_token:
        starts = np.arange(tokens + 1, dtype=np.int64)
    else:
        starts = np.array([0, tokens]) if call.starts is None else checked_starts(call.starts, tokens)
    sequences, state = len(starts) - 1, cast(Any, call.state)
    if state is None and not call.one_token:
        if call.state_indices is not None:
            raise argument_error("state", "a pool of states beside state_indices", "None")
        state = np.zeros((sequences, channels, width - 1), fmt.dtype)
    checked_state(state, (channels, width - 1), (fmt,))
    inputs = named_arrays(x=call.x, weight=call.weight, bias=call.bias)
    check_apart("state", state, inputs)
    slots = np.arange(sequences, dtype=np.int64)
    if call.state_indices is not None:
        slots = checked_slots("state_indices", call.state_indices, sequences, len(state))
    elif len(state) != sequences:
        raise argument_error("state", f"{sequences} states, one for each sequence", len(state))
    results = Results({"output": (call.x.shape, fmt.dtype)}, [*inputs, ("state", state)], alone=True)
    weight = np.ascontiguousarray(call.weight.astype(np.float32).T)
    return ConvCall(
        fmt, one_piece(call.x), weight, bias, state, starts=starts, slots=slots, silu=activation,
        results=results,
    )  # fmt: skip


class PromptCall(NamedTuple):
    """A checked call of `gated_delta_rule`."""

    delta: DeltaCall
    chunk: int
    return_states: bool
    capsule_rows: int

    @property
    def results(self) -> Results:
        return self.delta.results


def checked_prompt(call: DeltaArguments, prompt: PromptArguments) -> PromptCall:
    """Check a call of `gated_delta_rule`."""
    chunk = integer("chunk", prompt.chunk, 1, MOST_CHUNK)
    keeps = flag("return_states", prompt.return_states)
    delta = checked_delta(call)
    return PromptCall(delta, chunk, keeps, checked_rows(delta, prompt.return_capsule, keeps))


def checked_rows(call: DeltaCall, rows: Any, return_states: bool) -> int:
    """Return the rows of a capsule: 0, or at least the tokens of the longest sequence."""
    count = integer("return_capsule", rows, 0, 2**20)
    longest = int((call.ends - call.begins).max(initial=0))
    if count and return_states:
        raise argument_error("return_capsule", "0 beside return_states", count)
    if count and count < longest:
        raise argument_error("return_capsule", f"at least the {longest} tokens of a sequence", count)
    (heads, dv), (keys, dk) = call.v.shape[1:], call.k.shape[1:]
    if count and call.by_channel:
        size = capsule_size(heads, keys, dk, dv, dk)
        if capsule_parts(size, heads, dk, dv) != (dk, keys):  # so many heads that it could be another
            raise argument_error("return_capsule", f"0 for {heads} heads of v and {keys} of k", count)
    return count
