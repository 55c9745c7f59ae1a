"""Run ONNX `LinearAttention` and `CausalConvWithState` (opset 27) on kvkit's kernels for recurrent states.

Nodes return the states after their tokens; kvkit's operators change them in place, so they get a copy.
"""

from __future__ import annotations

import numpy as np
from onnx.reference.op_run import OpRun

from kvkit.errors import argument_error, describe
from kvkit.recurrent import causal_conv, gated_delta_rule
from kvkit.typed import Array


def by_heads(name: str, array: Array, heads: int) -> Array:
    """Return [B, T, heads * dim] as [B, T, heads, dim]."""
    if not isinstance(array, np.ndarray) or array.ndim != 3:
        raise argument_error(name, "3 axes, [B, T, heads * dim]", describe(array))
    if heads < 1 or array.shape[2] % heads:
        raise argument_error(name, f"a last axis of {heads} heads", f"shape {array.shape}")
    return array.reshape(*array.shape[:2], heads, -1)


class LinearAttention(OpRun):
    """Computes the ONNX operator `LinearAttention` in float32, for float32, float16 and bfloat16 inputs."""

    def _run(
        self,
        query: Array,
        key: Array,
        value: Array,
        past_state: Array | None = None,
        decay: Array | None = None,
        beta: Array | None = None,
        *,
        q_num_heads: int = 0,
        kv_num_heads: int = 0,
        scale: float | None = None,
        update_rule: str = "gated_delta",
        chunk_size: int = 64,
    ) -> tuple[Array, ...]:
        if q_num_heads < 1 or kv_num_heads < 1 or q_num_heads % kv_num_heads:
            raise argument_error("q_num_heads", f"a multiple of kv_num_heads, {kv_num_heads}", q_num_heads)
        q = by_heads("query", query, q_num_heads)
        k, v = by_heads("key", key, kv_num_heads), by_heads("value", value, kv_num_heads)
        g = None if decay is None else by_heads("decay", decay, kv_num_heads)
        if g is not None and g.shape[-1] == 1:
            g = g[..., 0]
        if beta is not None and beta.shape[-1] == 1:
            beta = np.broadcast_to(beta, (*beta.shape[:-1], kv_num_heads))
        shape = len(query), kv_num_heads, q.shape[3], v.shape[3]
        if past_state is not None and past_state.shape != shape:
            raise argument_error("past_state", f"shape {shape}", describe(past_state))
        kept = query.dtype if past_state is None else past_state.dtype
        state = np.zeros(shape, np.float32) if past_state is None else past_state.astype(np.float32)
        output, state = gated_delta_rule(
            q, k, v, g=g, beta=beta, state=state, scale=scale or None, rule=update_rule,
            chunk=min(max(chunk_size, 1), 256),
        )  # fmt: skip
        return output.reshape(*query.shape[:2], -1), state.astype(kept)


class CausalConvWithState(OpRun):
    """Computes the ONNX operator `CausalConvWithState`; sums are float32."""

    def _run(
        self,
        input: Array,
        weight: Array,
        bias: Array | None = None,
        past_state: Array | None = None,
        *,
        activation: str = "none",
    ) -> tuple[Array, ...]:
        if not isinstance(input, np.ndarray) or input.ndim != 3:
            raise argument_error("input", "3 axes, [B, channels, T]", describe(input))
        if weight.ndim != 3 or weight.shape[1] != 1:
            raise argument_error("weight", "shape [channels, 1, taps]", describe(weight))
        batch, channels, tokens = input.shape
        shape = batch, channels, weight.shape[2] - 1
        if past_state is not None and past_state.shape != shape:
            raise argument_error("past_state", f"shape {shape}", describe(past_state))
        state = np.zeros(shape, input.dtype) if past_state is None else past_state.copy()
        rows = np.swapaxes(input, 1, 2).reshape(-1, channels)
        starts = np.arange(batch + 1) * tokens
        silu = None if activation == "none" else activation
        output, state = causal_conv(rows, weight[:, 0], bias, state=state, starts=starts, activation=silu)
        return np.ascontiguousarray(np.swapaxes(output.reshape(batch, tokens, channels), 1, 2)), state
