"""Predict the attention of later queries from statistics of queries before rotation."""

from typing import Any

import numpy as np

from kvkit.checks.values import finite_number, flag, integer, text
from kvkit.errors import argument_error, describe
from kvkit.eviction.arithmetic import mean_of_groups, norms, protected
from kvkit.eviction.inputs import Inputs, softmax_in_place
from kvkit.eviction.scorers import scorer
from kvkit.rope import Rope
from kvkit.typed import Array


@scorer("queries", "values")
def expected(
    inputs: Inputs, *, rope: Rope, now: int | None = None, future: int = 512, sinks: int = 4,
    covariance: bool = True, vnorm: bool = True, eps: float = 0.0,
) -> Array:  # fmt: skip
    """score = mean over the group of softmax(m k / sqrt(D) + k C k / 2D) * |v| (arXiv 2510.00636).

    m and C are the mean and covariance of the queries before rotation, without the first `sinks`; both are
    rotated by the mean rotation of the `future` positions from `now` on. The first `sinks` tokens stay.
    """
    rope = checked_rope(rope, inputs.keys.shape[3])
    future, eps = integer("future", future, 1), finite_number("eps", eps)
    sinks, covariance = integer("sinks", sinks, 0, inputs.tokens - 1), flag("covariance", covariance)
    queries, keys = inputs.queries[:, :, sinks:], inputs.keys[:, :, sinks:]
    if not queries.shape[2]:
        raise argument_error("queries", f"more than the {sinks} of the sinks", inputs.queries.shape[2])
    dim, group = keys.shape[3], queries.shape[1] // inputs.heads
    now = integer("now", inputs.tokens if now is None else now, 0)
    angles = np.arange(now, now + future)[:, None] * rope.frequencies
    cosines, sines = (part.mean(0) * rope.attention_factor for part in (np.cos(angles), np.sin(angles)))
    first, second = (np.arange(dim)[part] for part in rope.pairs())
    rotation = np.eye(dim)  # the mean of the rotation matrices of the positions
    rotation[first, first] = rotation[second, second] = cosines
    rotation[first, second], rotation[second, first] = -sines, sines
    weights = np.empty((*queries.shape[:2], keys.shape[2]), np.float32)
    for b, q in np.ndindex(queries.shape[:2]):  # q: a query head
        mean, k = queries[b, q].mean(0, dtype=np.float64), keys[b, q // group]
        scores = k @ (rotation @ mean / dim**0.5).astype(np.float32)
        if covariance:
            centred = queries[b, q] - mean
            spread = rotation @ (centred.T @ centred / len(centred)) @ rotation.T
            scores += np.einsum("sd,sd->s", k @ spread.astype(np.float32), k) / np.float32(2 * dim)
        weights[b, q] = softmax_in_place(scores)
    result = mean_of_groups(weights, inputs.heads)
    if flag("vnorm", vnorm):
        result = (result + eps) * norms(inputs.values[:, :, sinks:])
    return protected(result, first=sinks) if sinks else result


@scorer("queries")
def triattention(
    inputs: Inputs, *, rope: Rope, now: int | None = None, offsets: Any = None, reduce: str = "mean"
) -> Array:
    """score = mean over offsets o of sum Re(E[q] e^(i (now + o) w) k*) + sum (E|q| - |E q|) |k|.

    A pair of elements is a complex number: of keys as stored, of queries q before rotation; w are the
    frequencies (arXiv 2604.04921). `now` is the position of the next token. `reduce` takes the "mean" or
    "max" over the group.
    """
    rope = checked_rope(rope, inputs.keys.shape[3])
    now = integer("now", inputs.tokens if now is None else now, 0)
    offsets = 2 ** np.arange(17) if offsets is None else np.asarray(offsets)
    if offsets.dtype.kind not in "iu" or offsets.ndim != 1 or not len(offsets):
        raise argument_error("offsets", "a list of integers", describe(offsets))
    first, second = rope.pairs()
    queries, keys = (side[..., first] + 1j * side[..., second] for side in (inputs.queries, inputs.keys))
    mean, size = queries.mean(2, dtype=np.complex128), np.abs(queries).mean(2, dtype=np.float64)
    later = np.exp(1j * (now + offsets)[:, None] * rope.frequencies).mean(0)  # [pairs]
    heads, group = inputs.heads, queries.shape[1] // inputs.heads
    mean, size = (each.reshape(len(each), heads, group, -1) for each in (mean, size))  # [B, Hkv, G, pairs]
    result = np.einsum("bhgf,bhsf->bhgs", (mean * later), keys.conj()).real
    result += (size - np.abs(mean)) @ np.abs(keys).swapaxes(2, 3)
    return result.mean(2) if text("reduce", reduce, ("mean", "max")) == "mean" else result.max(2)


def checked_rope(rope: Any, dim: int) -> Rope:
    """Return the rotation of keys; raise if it is unknown or of more than `dim` elements."""
    if not isinstance(rope, Rope) or rope.end > dim:
        raise argument_error("rope", f"a kvkit.Rope of at most {dim} elements", describe(rope))
    return rope
