"""What operators of positions must give, in plain numpy."""

import itertools
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16)
import numpy as np


def slopes(heads):
    """ALiBi's, of each head."""
    power = 2 ** int(np.log2(heads))
    first = [2.0 ** (-8.0 * (h + 1) / power) for h in range(power)]
    return np.array(first + [2.0 ** (-4.0 * (2 * h + 1) / power) for h in range(heads - power)])


def alibi_slope(inputs, attributes):
    return (slopes(attributes["num_heads"]),)


def up(count):
    """To a multiple of 16."""
    return -(-count // 16) * 16


def biases(heads, n, m):
    """[heads, n, m]: slopes times distances, -inf behind a query's own position."""
    distance = np.arange(m) - (m - n + np.arange(n))[:, None]
    return np.where(distance > 0, -np.inf, slopes(heads)[:, None, None] * distance)


def alibi_mask(inputs, attributes):
    """Of sequences of one length, behind whose keys is -inf."""
    heads, n, m = attributes["num_heads"], inputs["seqlen_q"], inputs["seqlen_kv"]
    whole, mask = biases(heads, n, m), inputs.get("attn_mask")
    if mask is not None:
        mask = mask[..., :m]
        whole = whole + (np.where(mask, 0, -np.inf) if mask.dtype == bool else mask.astype(np.float64))
    result = np.full((*whole.shape[:-1], up(m)), -np.inf)
    result[..., :m] = whole
    return (result,)


def dynamic_alibi_mask(inputs, attributes):
    """Of packed sequences: blocks on the diagonal, zeros elsewhere."""
    q, k, heads = inputs["seqstarts"], inputs["kvstarts"], attributes["num_heads"]
    result = np.zeros((heads, q[-1], up(k[-1])))
    for b in range(len(q) - 1):
        block = biases(heads, q[b + 1] - q[b], k[b + 1] - k[b])
        result[:, q[b] : q[b + 1], k[b] : k[b + 1]] = block
    return (result,)


def position_index(inputs, attributes):
    starts = inputs["seqstarts"]
    counts = starts[1:] - starts[:-1]
    spans = [first + np.arange(n) for first, n in zip(inputs["start_pos"], counts, strict=True)]
    return (np.concatenate(spans),)


def turned(x, at, end, inputs, attributes):
    """The tokens x [tokens, heads, content] of a sequence that ends at `end`, at positions `at`."""
    dims = attributes.get("rotary_dim") or x.shape[-1]
    theta, longest = attributes.get("theta", 1e4), attributes.get("max_position_embeddings", 2048)
    factor, kind = attributes.get("scaling_factor", 1.0), attributes.get("scaling_type", "")
    if kind == "dynamic" and end > longest:
        theta *= (factor * end / longest - (factor - 1)) ** (dims / (dims - 2))
    angle = np.outer(at / (factor if kind == "linear" else 1), theta ** (-np.arange(0, dims, 2) / dims))
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    if "cos" in inputs:
        cos, sin = (inputs[name][at][:, None].astype(np.float64) for name in ("cos", "sin"))
    out = x.astype(np.float64)
    neighbours = slice(0, dims, 2), slice(1, dims, 2)
    halves = slice(0, dims // 2), slice(dims // 2, dims)
    one, two = neighbours if attributes.get("interleaved", True) else halves
    first, second = out[..., one].copy(), out[..., two].copy()
    out[..., one], out[..., two] = first * cos - second * sin, second * cos + first * sin
    return out


def rotary_position_embedding(inputs, attributes):
    """(query, key), turned."""
    spans: list[Any]
    if "seqstarts" in inputs:
        starts = inputs["seqstarts"]
        spans = [slice(*pair) for pair in itertools.pairwise(starts)]
        lengths, firsts = starts[1:] - starts[:-1], inputs["start_pos"]
    else:
        batch, length = inputs["query"].shape[:2]
        spans, lengths = list(range(batch)), [length] * batch
        firsts = inputs["start_pos"] - inputs.get("pad_len", np.zeros(batch, np.int64))
    results = []
    for name in ("query", "key"):
        x = inputs[name].astype(np.float64)
        if name == "query" or not attributes.get("bypass_key"):
            for span, n, first in zip(spans, lengths, firsts, strict=True):
                x[span] = turned(x[span], first + np.arange(n), first + n, inputs, attributes)
        results.append(x)
    return tuple(results)
