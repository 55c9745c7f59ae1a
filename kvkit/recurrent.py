"""Run recurrent states: the gated delta rule (GDN, KDA, ...) and the short convolution."""

from __future__ import annotations

from typing import Any

from numpy.typing import ArrayLike

from kvkit.calls.recurrent import compute_gates, convolve, replay, run_delta
from kvkit.calls.targets import CallTarget, operator
from kvkit.checks.arguments import (
    ConvArguments,
    DeltaArguments,
    GateArguments,
    PromptArguments,
    ReplayArguments,
)
from kvkit.checks.recurrent import (
    checked_conv,
    checked_delta,
    checked_delta_gates,
    checked_prompt,
    checked_replay,
)
from kvkit.typed import Array, Pair


@operator
def gated_delta_step(
    on: CallTarget,
    q: Array,
    k: Array,
    v: Array,
    state: Array,
    *,
    g: Array | None = None,
    beta: Array | None = None,
    state_indices: ArrayLike | None = None,
    out_state_indices: ArrayLike | None = None,
    norm: bool = False,
    norm_eps: float = 1e-6,
    scale: float | None = None,
    state_layout: str = "KV",
    gates: Pair | None = None,
    rule: str | None = None,
    out: Array | None = None,
) -> Array:
    """Run the gated delta rule over one token of each sequence; the states change in place.

    S <- diag(e^g) S;  delta = beta (v - S'k);  S <- S + k delta';  out = scale S'q, for each value head.

    Parameters
    ----------
    q, k : ndarray, shapes [N, Hq, dk] and [N, Hk, dk]
        float32, float16 or bfloat16. Hq is a multiple or a divisor of the heads of v, and Hk the smaller of
        both. Value head j reads heads j * Hk // Hv (consecutive heads share one).
    v : ndarray, shape [N, Hv, dv]
    state : ndarray, shape [N or slots, Hv, dk, dv] or [N or slots, Hv, dv, dk]
        float32 or bfloat16, in the order of `state_layout`. Slots may lie any distance apart.
    g : ndarray, shape [N, Hv] or [N, Hv, dk], optional
        Logarithms of decays, of heads (GDN) or of channels (KDA); float32 or the dtype of q. Not e^g.
    beta : ndarray, shape [N, Hv], optional
        The gate of writing, after its sigmoid. Without it, delta = v.
    state_indices : array_like of int, shape [N], optional
        The slot of each sequence; -1 for a row of padding, whose output is 0 and which touches no state.
    out_state_indices : array_like of int, shape [N], optional
        The slots to write, if they are not those to read.
    norm : bool
        Whether q and k are divided by sqrt(sum of x^2 + norm_eps) first.
    norm_eps : float
    scale : float, optional
        dk ** -0.5 if None.
    state_layout : str
        ``"KV"``, [dk, dv] (transformers, fla, ONNX), or ``"VK"``, [dv, dk] (FlashInfer, vLLM, onnxruntime).
        If dk = dv nothing else tells them apart.
    gates : tuple (a_log [Hv], dt_bias [Hv] or [Hv, dk]), optional
        Then g and beta are raw, and become those of `delta_gates`.
    rule : str, optional
        ``"linear"``, ``"gated"`` (with g), ``"delta"`` (with beta) or ``"gated_delta"``; by default what the
        call has.
    out : ndarray, optional
        An array for the result, in the dtype of q or float32; allocated if None.

    Returns
    -------
    output : ndarray, shape [N, max(Hq, Hv), dv]
        In the dtype of q, computed in float32 and rounded once.

    Raises
    ------
    KvkitError
        If an argument is wrong, or two sequences write one slot. Then nothing has been written.

    Notes
    -----
    This is the recurrent step of Qwen3-Next (a decay for each head) and Kimi Linear (for each channel), and
    does what FlashInfer's ``gated_delta_rule_decode_pretranspose`` and fla's ``fused_recurrent_kda`` do. All
    is computed in float32; a state of bfloat16 is rounded once a token.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> q, k, v = (np.array([[x]], np.float32) for x in ([1, 1], [1, 0], [2, 4]))
    >>> state = np.zeros((1, 1, 2, 2), np.float32)
    >>> g, beta = np.log(np.float32([[0.5]])), np.float32([[0.5]])
    >>> kvkit.gated_delta_step(q, k, v, state, g=g, beta=beta, scale=1.0)
    array([[[1., 2.]]], dtype=float32)
    >>> state[0, 0]
    array([[1., 2.],
           [0., 0.]], dtype=float32)
    """
    given = DeltaArguments(
        q, k, v, g=g, beta=beta, state=state, norm=norm, norm_eps=norm_eps, scale=scale,
        state_layout=state_layout, gates=gates, rule=rule, state_indices=state_indices,
        out_state_indices=out_state_indices, one_token=True, out=out,
    )  # fmt: skip
    return run_delta(on.check(checked_delta, given), out)[0]


@operator
def gated_delta_rule(
    on: CallTarget,
    q: Array,
    k: Array,
    v: Array,
    *,
    g: Array | None = None,
    beta: Array | None = None,
    state: Array | None = None,
    starts: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    state_indices: ArrayLike | None = None,
    norm: bool = False,
    norm_eps: float = 1e-6,
    scale: float | None = None,
    state_layout: str = "KV",
    gates: Pair | None = None,
    rule: str | None = None,
    chunk: int = 64,
    return_states: bool = False,
    return_capsule: int = 0,
    out: Array | None = None,
) -> tuple[Any, ...]:
    """Run the gated delta rule over prompts; the states change in place.

    Long sequences are computed in chunks, as matrix products in float32, short ones token by token. Both
    agree within rounding. See `gated_delta_step` for the rule and the arguments that are not listed here.

    Parameters
    ----------
    q, k : ndarray, shapes [T, Hq, dk] and [T, Hk, dk], or with two axes [N, T] in front
        float32, float16 or bfloat16; the tokens of all sequences, one after the other, or N sequences of T.
    v : ndarray, shape [T, Hv, dv] or [N, T, Hv, dv]
    g : ndarray, shape [T, Hv] or [T, Hv, dk] or [N, T, Hv] or [N, T, Hv, dk], optional
    beta : ndarray, shape [T, Hv] or [N, T, Hv], optional
    state : ndarray, shape [N or slots, Hv, dk, dv] or [N or slots, Hv, dv, dk], optional
        Initial states, which become the last ones. Zeros in new memory if None.
    starts : array_like of int, shape [N + 1], optional
        Where each packed sequence begins, from 0 to T; one sequence if None. Sequences may be empty: their
        states stay.
    lengths : array_like of int, shape [N], optional
        The tokens of each of N sequences; later rows are ignored, and 0 in the output.
    state_indices : array_like of int, shape [N], optional
        The slot of each sequence; -1 for none.
    norm, norm_eps, scale, state_layout, gates, rule
        As in `gated_delta_step`.
    chunk : int
        Tokens of a chunk, at most 256; 1 runs token by token.
    return_states : bool
        Whether to return the state after each token, too.
    return_capsule : int
        Rows of a capsule to return, at least the tokens of the longest sequence; 0 for none. With a capsule
        states stay as they were, until `gated_delta_replay` moves them on: drafts may be taken back.
    out : ndarray, optional
        An array for the output, in the dtype of q or float32; allocated if None.

    Returns
    -------
    output : ndarray, shape [T, max(Hq, Hv), dv] or [N, T, max(Hq, Hv), dv]
    state : ndarray
        `state` itself, or the new one.
    states : ndarray, shape [T, Hv, ..] or [N, T, Hv, ..]
        If `return_states`.
    capsule : ndarray of float32, shape [N, rows, numbers]
        If `return_capsule`. A token's numbers are e^g of all heads (and channels), keys after `norm`, and
        errors delta.

    Raises
    ------
    KvkitError
        If an argument is wrong. Then nothing has been written.

    Notes
    -----
    This is fla's ``chunk_gated_delta_rule`` and ``chunk_kda``, and ONNX's ``LinearAttention``. In a chunk g
    is cut off at -200, as e^-200 is 0 in float32; decays are differences of sums in twice the precision. A
    state of bfloat16 is rounded once, at the end of a call.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> k = np.array([[[1, 0]], [[0.6, 0.8]], [[0, 1]]], np.float32)
    >>> q = np.array([[[1, 1]], [[0, 1]], [[1, 0]]], np.float32)
    >>> v = np.array([[[2, 4]], [[1, 0]], [[-1, 2]]], np.float32)
    >>> g, beta = np.full((3, 1), np.log(0.5), np.float32), np.ones((3, 1), np.float32)
    >>> output, state = kvkit.gated_delta_rule(q, k, v, g=g, beta=beta, scale=1.0)
    >>> output[:, 0].round(4)
    array([[ 2.  ,  4.  ],
           [ 0.32, -0.96],
           [ 0.62,  0.64]], dtype=float32)
    """
    given = DeltaArguments(
        q, k, v, g=g, beta=beta, state=state, norm=norm, norm_eps=norm_eps, scale=scale,
        state_layout=state_layout, gates=gates, rule=rule, state_indices=state_indices, starts=starts,
        lengths=lengths, out=out,
    )  # fmt: skip
    call = on.check(checked_prompt, given, PromptArguments(chunk, return_states, return_capsule))
    output, more = run_delta(call.delta, out, call.chunk, call.return_states, call.capsule_rows)
    if call.return_states:
        more = more.reshape(*call.delta.shape[:-2], *more.shape[1:])
    state = call.delta.state
    return (output, state) if more is None else (output, state, more)


@operator
def gated_delta_replay(
    on: CallTarget,
    state: Array,
    capsule: Array,
    accepted: ArrayLike,
    *,
    state_indices: ArrayLike | None = None,
    state_layout: str = "KV",
) -> Array:
    """Move states on by the accepted tokens of a capsule, in place: S <- decay S + key delta'.

    A capsule of `gated_delta_rule` holds some 24 KB a token where a state holds 2 MB, so drafts that a model
    takes back cost no copies of states.

    Parameters
    ----------
    state : ndarray, shape [N or slots, Hv, dk, dv] or [N or slots, Hv, dv, dk]
        The states before the tokens of the capsule.
    capsule : ndarray, shape [N, rows, numbers]
        The capsule that `gated_delta_rule` returned.
    accepted : array_like of int, shape [N]
        How many tokens of each sequence to take, from the first on.
    state_indices : array_like of int, shape [N], optional
        The slot of each sequence; -1 for none.
    state_layout : str
        ``"KV"`` or ``"VK"``, as in `gated_delta_step`.

    Returns
    -------
    state : ndarray
        The array `state` itself.

    Raises
    ------
    KvkitError
        If an argument is wrong. Then nothing has been written.

    Notes
    -----
    Rows of a capsule have the numbers of onnxruntime's ``state_update`` of ``GatedDeltaNet``: it stores all
    decays of a request, then all keys, then all errors.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> q, k, v = np.random.default_rng(0).random((3, 4, 1, 8), np.float32)
    >>> drafts, state = np.float32(np.ones((4, 1))), np.zeros((1, 1, 8, 8), np.float32)
    >>> _, _, capsule = kvkit.gated_delta_rule(q, k, v, beta=drafts, state=state, norm=True, return_capsule=4)
    >>> state = kvkit.gated_delta_replay(state, capsule, [2])
    >>> _, two = kvkit.gated_delta_rule(q[:2], k[:2], v[:2], beta=drafts[:2], norm=True)
    >>> bool(np.allclose(state, two, atol=1e-6))
    True
    """
    given = ReplayArguments(state, capsule, accepted, state_indices, state_layout)
    replay(on.check(checked_replay, given))
    return state


@operator
def delta_gates(
    on: CallTarget,
    a: Array,
    b: Array,
    a_log: Array,
    dt_bias: Array,
    *,
    kind: str = "gdn",
    lower_bound: float | None = None,
    double_beta: bool = False,
    out: Pair | None = None,
) -> Pair:
    """Compute the gates g and beta of the delta rule from a model's raw gates.

    g = -e^a_log softplus(a + dt_bias), or with a bound lower_bound sigmoid(e^a_log (a + dt_bias)).
    beta = sigmoid(b), or twice that with `double_beta` (OLMo hybrid's allow_neg_eigval).

    Parameters
    ----------
    a : ndarray, shape [.., Hv], or [.., Hv, dk] for ``kind="kda"``
        float32, float16 or bfloat16.
    b : ndarray, shape [.., Hv]
    a_log : ndarray, shape [Hv]
        Files of llama.cpp store ``ssm_a`` = -e^a_log instead.
    dt_bias : ndarray, shape [Hv] or [Hv, dk]
    kind : str
        ``"gdn"``: a decay for each head. ``"kda"``: for each channel.
    lower_bound : float, optional
        The bound of g below 0 (GLM-5.3 and Bailing have -5).
    double_beta : bool
    out : tuple of ndarray, optional
        Arrays for g and beta; allocated if None.

    Returns
    -------
    g : ndarray of float32, like a
    beta : ndarray of float32, like b

    Raises
    ------
    KvkitError
        If an argument is wrong. Then nothing has been written.

    Notes
    -----
    These are the gates of Qwen3-Next (``"gdn"``) and Kimi Linear (``"kda"``). Arrays of 16 bits are widened
    first: transformers takes the sigmoid in the dtype of the model, which rounds beta to it.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> zero = np.zeros((1, 1), np.float32)
    >>> g, beta = kvkit.delta_gates(zero, zero, zero[0], zero[0])
    >>> g.round(4), beta
    (array([[-0.6931]], dtype=float32), array([[0.5]], dtype=float32))
    """
    given = GateArguments(a, b, a_log, dt_bias, kind, lower_bound, double_beta)
    g, beta = compute_gates(on.check(checked_delta_gates, given), out)
    return g, beta


@operator
def causal_conv(
    on: CallTarget,
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    state: Array | None = None,
    starts: ArrayLike | None = None,
    state_indices: ArrayLike | None = None,
    activation: str | None = "silu",
    out: Array | None = None,
) -> Pair:
    """Convolve each channel of packed sequences with a short causal filter; the states change in place.

    y_t = bias + sum over j of weight[j] x[t - K + 1 + j], then SiLU. Inputs before a sequence are its state.

    Parameters
    ----------
    x : ndarray, shape [T, C]
        float32, float16 or bfloat16; the tokens of all sequences, one after the other.
    weight : ndarray, shape [C, K]
        The last column is the token's own; float32 or the dtype of x, with K up to 8.
    bias : ndarray, shape [C], optional
    state : ndarray, shape [N or slots, C, K - 1], optional
        The last inputs of each sequence, the oldest first, in the dtype of x. Zeros in new memory if None.
        transformers keeps K columns: ``state[..., 1:]`` is the same, in one piece once it is copied.
    starts : array_like of int, shape [N + 1], optional
        Where each sequence begins, from 0 to T; one sequence if None.
    state_indices : array_like of int, shape [N], optional
        The slot of each sequence; -1 for none, whose output is 0.
    activation : str, optional
        ``"silu"`` (or ``"swish"``), or None.
    out : ndarray, optional
        An array for the output; allocated if None.

    Returns
    -------
    output : ndarray, shape [T, C]
        In the dtype of x; sums are float32.
    state : ndarray
        `state` itself, or the new one: raw inputs, before the activation.

    Raises
    ------
    KvkitError
        If an argument is wrong. Then nothing has been written.

    Notes
    -----
    This is causal-conv1d's ``causal_conv1d_fn`` and ONNX's ``CausalConvWithState``, with tokens in front of
    channels.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> x, weight = np.float32([[1], [2], [3]]), np.float32([[10, 1]])
    >>> output, state = kvkit.causal_conv(x, weight, activation=None)
    >>> output[:, 0], state[0]
    (array([ 1., 12., 23.], dtype=float32), array([[3.]], dtype=float32))
    """
    given = ConvArguments(x, weight, bias, state, state_indices, activation, starts, out=out)
    return convolve(on.check(checked_conv, given), out)


@operator
def causal_conv_update(
    on: CallTarget,
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    state: Array,
    state_indices: ArrayLike | None = None,
    activation: str | None = "silu",
    out: Array | None = None,
) -> Array:
    """Convolve one token of each sequence with a short causal filter; the states change in place.

    Parameters
    ----------
    x : ndarray, shape [N, C]
        float32, float16 or bfloat16: a token of each sequence.
    weight, bias : ndarray, shapes [C, K] and [C]
        As in `causal_conv`.
    state : ndarray, shape [N or slots, C, K - 1]
        The last inputs of each sequence, the oldest first, in the dtype of x.
    state_indices : array_like of int, shape [N], optional
        The slot of each sequence; -1 for a row of padding, whose output is 0 and which touches no state.
    activation : str, optional
        ``"silu"`` (or ``"swish"``), or None.
    out : ndarray, optional
        An array for the output; allocated if None.

    Returns
    -------
    output : ndarray, shape [N, C]

    Raises
    ------
    KvkitError
        If an argument is wrong. Then nothing has been written.

    Notes
    -----
    This is causal-conv1d's ``causal_conv1d_update``, of one token a sequence.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> x, state = np.float32([[3]]), np.float32([[[2]]])
    >>> kvkit.causal_conv_update(x, np.float32([[10, 1]]), state=state, activation=None), state
    (array([[23.]], dtype=float32), array([[[3.]]], dtype=float32))
    """
    given = ConvArguments(x, weight, bias, state, state_indices, activation, one_token=True, out=out)
    return convolve(on.check(checked_conv, given), out)[0]
