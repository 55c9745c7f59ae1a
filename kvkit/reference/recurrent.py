"""Define recurrent states: the gated delta rule (GDN, KDA and their kin) and the short causal convolution.

One token of a value head, whose state S is [dk, dv]:
S <- diag(e^g) S      delta = beta (v - S'k)      S <- S + k delta'      o = scale S'q
"""

import math
from typing import Any

import numpy as np
from numpy import ndarray as Array

__all__ = [
    "causal_conv", "causal_conv_update", "delta_gates", "gated_delta_replay", "gated_delta_rule",
    "gated_delta_step",
]  # fmt: skip


def softplus(x: float) -> float:
    """Return log(1 + e^x)."""
    return x + math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x))


def sigmoid(x: float) -> float:
    """Return 1 / (1 + e^-x)."""
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def delta_gates(
    a: Array, b: Array, a_log: Array, dt_bias: Array, *, kind: str = "gdn", lower_bound: Any = None,
    double_beta: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    """Return g [.., Hv] or [.., Hv, dk], the logarithms of decays, and beta [.., Hv], the gate of writing."""
    g, beta = np.zeros(a.shape), np.zeros(b.shape)
    for at in np.ndindex(*a.shape):
        head = at[-2] if kind == "kda" else at[-1]
        bias = dt_bias[at[-2:]] if kind == "kda" else dt_bias[head]
        x, rate = float(a[at]) + float(bias), math.exp(float(a_log[head]))
        g[at] = -rate * softplus(x) if lower_bound is None else float(lower_bound) * sigmoid(rate * x)
    for at in np.ndindex(*b.shape):
        beta[at] = sigmoid(float(b[at])) * (2 if double_beta else 1)
    return g, beta


def normed(x: Array, eps: float) -> Array:
    """Return a vector divided by its length; eps is inside the root."""
    return x / math.sqrt(float(np.sum(x * x)) + eps)


def run_sequence(tokens: dict[str, Any], state: Array, out: Array, **options: Any) -> list[Any]:
    """Run the rule over the tokens of one sequence; state [Hv, dk, dv] and out [T, heads, dv] change.

    Return (state, decays, keys, deltas) after each token.
    """
    q, k, v, g, beta = (tokens[name] for name in ("q", "k", "v", "g", "beta"))
    scale, norm, eps = options["scale"], options["norm"], options["norm_eps"]
    heads, dk = state.shape[:2]
    kept = []
    for t in range(len(v)):
        deltas, decays = np.zeros(v.shape[1:]), []
        keys = [normed(x, eps) if norm else x for x in k[t]]
        queries = [normed(x, eps) if norm else x for x in q[t]]
        for j in range(heads):
            key = keys[j * len(keys) // heads]
            decay = np.ones(dk) if g is None else np.exp(np.broadcast_to(g[t, j], dk))
            decayed = decay[:, None] * state[j]
            error = v[t, j] if beta is None else beta[t, j] * (v[t, j] - key @ decayed)
            state[j] = decayed + np.outer(key, error)
            deltas[j] = error
            decays.append(decay if g is not None and g.ndim == 3 else decay[:1])
        for i in range(out.shape[1]):
            query, j = queries[i * len(queries) // out.shape[1]], i * heads // out.shape[1]
            out[t, i] = scale * (query @ state[j])
        kept.append((state.copy(), np.array(decays), np.array(keys), deltas))
    return kept


def gated_delta_rule(
    q: Array, k: Array, v: Array, *, g: Any = None, beta: Any = None, state: Any = None, starts: Any = None,
    lengths: Any = None, state_indices: Any = None, norm: bool = False, norm_eps: float = 1e-6,
    scale: Any = None, state_layout: str = "KV", gates: Any = None, rule: Any = None, chunk: int = 64,
    return_states: bool = False, return_capsule: int = 0, out_state_indices: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Run the rule over packed sequences [T, heads, dim], or over [N, T, heads, dim]; change the states.

    Return (out, state), and the states after each token or the capsule. With a capsule states do not change.
    """
    if gates is not None:
        a, b = np.asarray(g), np.asarray(beta if beta is not None else np.zeros(v.shape[:-1]))
        kind = "kda" if a.ndim == v.ndim else "gdn"
        g, gate = delta_gates(a, b, *gates, kind=kind)
        beta = gate if beta is not None else None
    shape = v.shape
    if v.ndim == 4:
        batch, length = shape[:2]
        spans = [(n * length, n * length + int(length if lengths is None else lengths[n]))
                 for n in range(batch)]  # fmt: skip
    else:
        starts = [0, len(v)] if starts is None else starts
        spans = [(int(starts[n]), int(starts[n + 1])) for n in range(len(starts) - 1)]
    tokens: dict[str, Any] = {}
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)):
        flat = None if x is None else x.reshape(-1, *x.shape[v.ndim - 2 :]).astype(np.float64)
        tokens[name] = flat
    heads, dk, dv = shape[-2], k.shape[-1], shape[-1]
    scale = dk**-0.5 if scale is None else float(scale)
    if state is None:
        sizes = (dk, dv) if state_layout == "KV" else (dv, dk)
        state = np.zeros((len(spans), heads, *sizes), np.float32)
    out = np.zeros((len(tokens["v"]), max(heads, q.shape[-2]), dv))
    rows = return_capsule or len(tokens["v"])
    states, capsule = [], []
    options = {"scale": scale, "norm": norm, "norm_eps": norm_eps}
    for n, (begin, end) in enumerate(spans):
        slot = n if state_indices is None else int(state_indices[n])
        target = slot if out_state_indices is None else int(out_state_indices[n])
        part = {name: None if x is None else x[begin:end] for name, x in tokens.items()}
        kept: list[Any] = []
        if slot >= 0:
            inner: Array = np.array(state[slot], np.float64)
            inner = inner if state_layout == "KV" else np.swapaxes(inner, 1, 2).copy()
            kept = run_sequence(part, inner, out[begin:end], **options)
            if not return_capsule:
                state[target] = inner if state_layout == "KV" else np.swapaxes(inner, 1, 2)
        after = np.zeros((end - begin, heads, dk, dv))
        if kept:
            after[:] = [each[0] for each in kept]
        states.append(after if state_layout == "KV" else np.swapaxes(after, 2, 3))
        size = heads * (dk if g is not None and g.ndim == v.ndim else 1) + k.shape[-2] * dk + heads * dv
        records = np.zeros((rows, size))
        for t, (_, *parts) in enumerate(kept[:rows]):
            records[t] = np.concatenate([part.ravel() for part in parts])
        capsule.append(records)
    out = out.reshape(*shape[:-2], *out.shape[1:])
    if return_states:
        return out, state, padded_states(states, shape, lengths)
    if return_capsule:
        return out, state, np.array(capsule)
    return out, state


def padded_states(states: list[Array], shape: tuple[int, ...], lengths: Any) -> Array:
    """Return the states after each token, [T, ..] or [N, T, ..] with zeros after a sequence's length."""
    if len(shape) == 3:
        return np.concatenate(states) if states else np.zeros((0, 0, 0, 0))
    filled = np.zeros((shape[0], shape[1], *states[0].shape[1:])) if states else np.zeros((0, 0, 0, 0, 0))
    for n, each in enumerate(states):
        filled[n, : len(each)] = each
    return filled


def gated_delta_step(q: Array, k: Array, v: Array, state: Array, **options: Any) -> Array:
    """Run the rule over one token of each sequence; return the output [N, heads, dv]. States change."""
    starts = range(len(v) + 1)
    out: Array = gated_delta_rule(q, k, v, state=state, starts=starts, **options)[0]
    return out


def gated_delta_replay(
    state: Array, capsule: Any, accepted: Any, *, state_indices: Any = None, state_layout: str = "KV"
) -> Array:
    """Move states on by the accepted tokens of a capsule: S <- e^g S + k delta'."""
    _, heads, dk, dv = state.shape
    dk, dv = (dk, dv) if state_layout == "KV" else (dv, dk)
    size = capsule.shape[2]
    # Decays of heads, or of channels: a capsule whose size fits both is one of heads.
    fits = [(size - heads * (each + dv)) / dk for each in (1, dk)]
    legal = [0 < keys == int(keys) and heads % int(keys) == 0 for keys in fits]
    channels, keys = (1, int(fits[0])) if legal[0] else (dk, int(fits[1]))
    for n, count in enumerate(accepted):
        slot = n if state_indices is None else int(state_indices[n])
        for t in range(int(count) if slot >= 0 else 0):
            numbers = np.asarray(capsule[n, t], np.float64)
            decay = numbers[: heads * channels].reshape(heads, channels)
            key = numbers[heads * channels :][: keys * dk].reshape(keys, dk)
            delta = numbers[size - heads * dv :].reshape(heads, dv)
            for j in range(heads):
                inner = state[slot, j] if state_layout == "KV" else state[slot, j].T
                inner[...] = decay[j][:, None] * inner + np.outer(key[j * keys // heads], delta[j])
    return state


def causal_conv(
    x: Array, weight: Array, bias: Any = None, *, state: Any = None, starts: Any = None,
    state_indices: Any = None, activation: Any = "silu",
) -> tuple[Array, Array]:  # fmt: skip
    """Return y_t = bias + sum of weight[j] x[t - K + 1 + j] for each channel, and the last K - 1 inputs.

    States [N or slots, channels, K - 1] change in place.
    """
    channels, width = weight.shape
    starts = [0, len(x)] if starts is None else starts
    if state is None:
        state = np.zeros((len(starts) - 1, channels, width - 1), x.dtype)
    out = np.zeros(x.shape)
    for n in range(len(starts) - 1):
        slot = n if state_indices is None else int(state_indices[n])
        begin, end = int(starts[n]), int(starts[n + 1])
        if slot < 0:
            continue
        for c in range(channels):
            inputs = [*state[slot, c], *x[begin:end, c]]
            for t in range(end - begin):
                y = 0.0 if bias is None else float(bias[c])
                for j in range(width):
                    y += float(weight[c, j]) * float(inputs[t + j])
                out[begin + t, c] = y * sigmoid(y) if activation is not None else y
            state[slot, c] = inputs[len(inputs) - (width - 1) :]
    return out, state


def causal_conv_update(
    x: Array, weight: Array, bias: Any = None, *, state: Array, state_indices: Any = None,
    activation: Any = "silu",
) -> Array:  # fmt: skip
    """Return the convolution of one token of each sequence, x [N, channels]; states change in place."""
    options = {"state": state, "state_indices": state_indices, "activation": activation}
    return causal_conv(x, weight, bias, starts=range(len(x) + 1), **options)[0]
