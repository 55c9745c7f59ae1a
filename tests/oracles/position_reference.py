"""Oracle of the position operators: loops in the words of the specification, legal inputs only.

Angles are float32, as specified, everything after them float64. The result of a rotary operator is not
rounded to the type of its inputs.
"""

import math

import numpy as np

f32 = np.float32


def slope(h, num_heads):
    power = 2 ** math.floor(math.log2(num_heads))
    exponent = -8 * (h + 1) / power if h < power else -4 * (2 * (h - power) + 1) / power
    return f32(2.0**exponent)


def pad16(count):
    return 16 * math.ceil(count / 16)


def number(x):
    """A mask's element as float32."""
    if isinstance(x, np.bool_):
        return f32(0) if x else f32(-np.inf)
    return f32(x)


def bias(h, num_heads, i, j, n, m):
    distance = j - (m - n + i)
    return slope(h, num_heads) * f32(distance) if distance <= 0 else f32(-np.inf)


def alibi_mask(n, m, mask, num_heads, dtype):
    four_axes = mask is not None and mask.ndim == 4
    batches = mask.shape[0] if four_axes else 1
    result = np.full((batches, num_heads, n, pad16(m)), -np.inf, np.float32)
    if mask is not None:
        mask = np.broadcast_to(mask, (batches, num_heads, n, mask.shape[-1]))
    for b, h, i, j in np.ndindex(batches, num_heads, n, m):
        result[b, h, i, j] = bias(h, num_heads, i, j, n, m)
        if mask is not None:
            result[b, h, i, j] += number(mask[b, h, i, j])
    return (result if four_axes else result[0]).astype(dtype)


def dynamic_alibi_mask(seqstarts, kvstarts, mask, num_heads, dtype):
    tokens, keys = seqstarts[-1], kvstarts[-1]
    result = np.zeros((num_heads, tokens, pad16(keys)), np.float32)
    for b in range(len(seqstarts) - 1):
        n, m = seqstarts[b + 1] - seqstarts[b], kvstarts[b + 1] - kvstarts[b]
        for h, i, j in np.ndindex(num_heads, n, m):
            result[h, seqstarts[b] + i, kvstarts[b] + j] = bias(h, num_heads, i, j, n, m)
    if mask is not None:
        mask = np.broadcast_to(mask, (num_heads, tokens, mask.shape[-1]))
        for h, i, j in np.ndindex(num_heads, tokens, keys):
            result[h, i, j] += number(mask[h, i, j])
    return result.astype(dtype)


def rotated(x, t, end, rotary_dim, theta, longest, kind, factor, interleaved, cos, sin):
    """One token's heads [heads, Dh], turned, in float64."""
    dims = rotary_dim or x.shape[-1]
    if kind == "dynamic" and end > longest and dims > 2:
        theta = theta * (factor * end / longest - (factor - 1)) ** (dims / (dims - 2))
    place = f32(t) / f32(factor) if kind == "linear" else f32(t)
    out = x.astype(np.float64)
    for h in range(x.shape[0]):
        for i in range(dims // 2):
            if cos is None:
                angle = float(place * f32(theta ** (-2 * i / dims)))
                cosine, sine = math.cos(angle), math.sin(angle)
            else:
                cosine, sine = float(cos[t, i]), float(sin[t, i])
            one, other = (2 * i, 2 * i + 1) if interleaved else (i, dims // 2 + i)
            out[h, one] = float(x[h, one]) * cosine - float(x[h, other]) * sine
            out[h, other] = float(x[h, other]) * cosine + float(x[h, one]) * sine
    return out


DEFAULTS = {
    "rotary_dim": 0,
    "theta": 1e4,
    "bypass_key": False,
    "max_position_embeddings": 2048,
    "scaling_type": "",
    "scaling_factor": 1.0,
    "interleaved": True,
    "cos": None,
    "sin": None,
}


def turn_all(arrays, places, attrs):
    """Every (token index, position, end of its sequence) of both arrays."""
    a = {**DEFAULTS, **attrs}
    settings = (
        a["rotary_dim"],
        a["theta"],
        a["max_position_embeddings"],
        a["scaling_type"],
        a["scaling_factor"],
        a["interleaved"],
        a["cos"],
        a["sin"],
    )
    results = []
    for array, still in zip(arrays, (False, a["bypass_key"]), strict=True):
        out = array.astype(np.float64)
        for at, t, end in () if still else places:
            out[at] = rotated(array[at], t, end, *settings)
        results.append(out)
    return results


def rotary(query, key, start_pos, pad_len=None, **attrs):
    batch, seqlen = query.shape[:2]
    pads = [0] * batch if pad_len is None else [int(pad) for pad in pad_len]
    places = [
        ((b, s), start_pos + s - pads[b], start_pos + seqlen - pads[b])
        for b in range(batch)
        for s in range(seqlen)
    ]
    return turn_all((query, key), places, attrs)


def dynamic_rotary(query, key, seqstarts, start_pos, max_seqlen, **attrs):
    places = []
    for b, first in enumerate(map(int, start_pos)):
        n = int(seqstarts[b + 1] - seqstarts[b])
        places += [((int(seqstarts[b]) + i,), first + i, first + n) for i in range(n)]
    return turn_all((query, key), places, attrs)
