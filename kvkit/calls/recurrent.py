"""Run checked calls on recurrent states."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvkit import cpu
from kvkit.checks.recurrent import ConvCall, DeltaCall, GateCall, ReplayCall, capsule_size
from kvkit.typed import Array, Pair

FEW = 16  # tokens of the longest sequence below which a prompt runs token by token


def compute_gates(call: GateCall, out: Any = None) -> tuple[Array, ...]:
    """Return g, and beta if there is a raw b, of checked raw gates, as float32."""
    results = call.results.arrays(out)
    g, *beta = written = [np.ascontiguousarray(each) for each in results]  # copies of an `out` with gaps
    cpu.launches.start(cpu.recurrent.gates.prepare_gates(call, g, beta[0] if beta else None))
    for result, array in zip(results, written, strict=True):
        if result is not array:
            result[...] = array
    return results


def run_delta(
    call: DeltaCall, out: Array | None, chunk: int = 1, keep_states: bool = False, capsule_rows: int = 0
) -> tuple[Array, Any]:
    """Run the rule; return the output, and the states after each token, the capsule or None."""
    (output,) = call.results.arrays(out)
    if call.gates is not None:
        g, *beta = compute_gates(call.gates)
        call = call._replace(g=g, beta=beta[0] if beta else None, gates=None)
    flat = output.reshape(-1, *output.shape[-2:])
    copied = not np.may_share_memory(flat, output) and output.size > 0  # axes of `out` that do not join
    kept = len(call.v), *call.state.shape[1:]
    states = np.zeros(kept, call.state.dtype) if keep_states else None
    capsule = None
    if capsule_rows:
        (heads, dv), (keys, dk) = call.v.shape[1:], call.k.shape[1:]
        size = capsule_size(heads, keys, dk, dv, dk if call.by_channel else 1)
        capsule = np.zeros((len(call.begins), capsule_rows, size), np.float32)
    longest = int((call.ends - call.begins).max(initial=0))
    if len(call.v) > int((call.ends - call.begins).sum()):
        flat[...] = 0  # rows behind `lengths`
    recurrent, in_chunks = cpu.recurrent, states is None and capsule is None and chunk > 1 and longest >= FEW
    # Chunks divide decays by each other: no g may be above 0.
    if in_chunks and (call.g is None or not call.g.size or not float(call.g.max()) > 0):
        launch = recurrent.chunks.prepare_chunks(call, flat, chunk)
    else:
        launch = recurrent.tokens.prepare_tokens(call, flat, states, capsule)
    cpu.launches.start(launch)
    if copied:
        output[...] = flat.reshape(output.shape)
    return output, states if states is not None else capsule


def replay(call: ReplayCall) -> None:
    """Move states on by the accepted tokens of a capsule."""
    cpu.launches.start(cpu.recurrent.replay.prepare_replay(call))


def convolve(call: ConvCall, out: Array | None = None) -> Pair:
    """Run the convolution; return the output and the states."""
    (output,) = call.results.arrays(out)
    cpu.launches.start(cpu.recurrent.convolution.prepare_convolution(call, output))
    return output, call.state
