"""Oracle of `kvkit.ascend`: plain loops after its specification, for legal inputs only.

Caches change in place, as the package's do. Tokens move as slices of one type, which keeps every bit.
"""

import math
from fractions import Fraction

import numpy as np

UNDEFINED, KVHEAD, ROPE, OMNI = range(4)


def reshape_and_cache(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    *,
    compress_type=UNDEFINED,
    wins=None,
    seq_lens=None,
    offset_index=None,
    cache_format="ND",
    empty_window="copy",
):
    """Keys, then values, each token or each run on its own."""
    for tokens, cache in ((key, key_cache), (value, value_cache)):
        if tokens is None:
            continue
        if compress_type != UNDEFINED:
            store_runs(tokens, cache, slot_mapping, compress_type, wins, seq_lens, offset_index, empty_window)
        elif cache_format == "NZ":
            store_groups(tokens, cache, slot_mapping)
        else:
            store_tokens(tokens, cache, slot_mapping)
    return key_cache, value_cache


def store_tokens(tokens, cache, slots):
    rows = cache.shape[1]
    for t, s in enumerate(slots):
        if s >= 0:
            for h in range(tokens.shape[1]):
                cache[s // rows, s % rows, h, :] = tokens[t, h, :]


def store_groups(tokens, cache, slots):
    """NZ: element c of a row, counted through its heads, is element c % n0 of group c // n0."""
    _, _, rows, n0 = cache.shape
    dim = tokens.shape[2]
    for t, s in enumerate(slots):
        if s >= 0:
            for c in range(tokens.shape[1] * dim):
                cache[s // rows, c // n0, s % rows, c % n0] = tokens[t, c // dim, c % dim]


def store_runs(tokens, cache, slots, mode, wins, seq_lens, offsets, empty_window):
    heads, rows, first = tokens.shape[1], cache.shape[1], 0
    for b, n in enumerate(seq_lens):
        for h in range(heads):
            i = b * heads + h
            if slots[i] < 0:
                continue
            offset = -1 if offsets is None else offsets[i]
            run = run_of(tokens[first : first + n, h], mode, wins[i], offset, empty_window)
            for k, row in enumerate(run):
                s = slots[i] + k
                cache[s // rows, s % rows, 0, :] = row
        first += n


def run_of(x, mode, w, o, empty_window):
    """The rows that are stored of a head of a sequence, x [n, D]."""
    n = len(x)
    if mode == KVHEAD:
        if w == 0:
            return list(x) if empty_window == "copy" else []
        return list(x[n - w :])
    if o == -1 or w == 0:
        return list(x)
    middle = [mean(x[o : o + w])] if mode == ROPE else []
    return [*x[:o], *middle, *x[o + w :]]


def mean(rows):
    """Token by token in float32, divided once, rounded once to the type of the rows."""
    result = np.empty(rows.shape[1], rows.dtype)
    with np.errstate(all="ignore"):
        for c in range(rows.shape[1]):
            total = np.float32(0)
            for r in range(rows.shape[0]):
                total = np.float32(total + np.float32(rows[r, c]))
            result[c] = np.float32(total / np.float32(rows.shape[0]))
    return result


# The mean in whole numbers, without any float arithmetic of the machine

PRECISION = {  # bits of a significand, lowest and highest exponent of its leading bit
    "float32": (24, -126, 127),
    "float16": (11, -14, 15),
    "bfloat16": (8, -126, 127),
}


def rounded(x, element):
    """A fraction to the nearest number of a type, ties to even; infinity (a float) behind the last one."""
    bits, lowest, highest = PRECISION[element]
    if x == 0:
        return Fraction(0)
    size, exponent = abs(x), 0
    while size >= 2:
        size, exponent = size / 2, exponent + 1
    while size < 1:
        size, exponent = size * 2, exponent - 1
    unit = Fraction(2) ** (max(exponent, lowest) - bits + 1)
    whole = x / unit
    floor = whole.numerator // whole.denominator
    rest = whole - floor
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and floor % 2):
        floor += 1
    result = floor * unit
    if abs(result) >= Fraction(2) ** (highest + 1):
        return math.copysign(math.inf, x)
    return result


def exact_mean(numbers, element):
    """(number, is negative) of the mean of finite numbers of a type, as a float or an exact fraction."""
    total = Fraction(0)
    for number in numbers:
        total = rounded(total + Fraction(float(number)), "float32")
        if isinstance(total, float):
            return total, total < 0  # finite numbers do not lead back
    quotient = rounded(total / len(numbers), "float32")
    return rounded(quotient, element), total < 0


# The neighbours


def paged_cache_load(cache, block_tables, lengths, seq_starts=None, nz=False):
    """[tokens, heads, dim] of an ND cache, [tokens, C] of an NZ cache."""
    rows = cache.shape[2 if nz else 1]
    shape = (cache.shape[1] * cache.shape[3],) if nz else cache.shape[2:]
    out = np.zeros((sum(lengths), *shape), cache.dtype)
    token = 0
    for b, length in enumerate(lengths):
        for j in range(length):
            m = j // rows + (0 if seq_starts is None else seq_starts[b] // rows)
            block = block_tables[b][m] if m < len(block_tables[b]) else -1
            if 0 <= block < len(cache):
                if nz:
                    for g in range(cache.shape[1]):
                        out[token, g * cache.shape[3] : (g + 1) * cache.shape[3]] = cache[block, g, j % rows]
                else:
                    out[token] = cache[block, j % rows]
            token += 1
    return out


def block_copy(cache, src, dst, cum_sum):
    before, first = cache.copy(), 0
    for i, end in enumerate(cum_sum):
        for d in dst[first:end]:
            cache[d] = before[src[i]]
        first = end


def nd_to_nz(x):
    """x [b, m, n]."""
    b, m, n = x.shape
    n0 = 32 // x.dtype.itemsize
    y = np.zeros((b, math.ceil(n / n0), 16 * math.ceil(m / 16), n0), x.dtype)
    for i, r, c in np.ndindex(x.shape):
        y[i, c // n0, r, c % n0] = x[i, r, c]
    return y


def paged_attention(
    query,
    key_cache,
    value_cache,
    block_tables,
    context_lens,
    *,
    razor_offset=None,
    softmax_scale=None,
    window=(-1, -1),
    softcap=0.0,
    sinks=None,
):
    """(attn_output, lse) in float64; the offset of a row counts in full, whatever caps its score."""
    batch, heads, dim = query.shape
    rows, apart = key_cache.shape[1], len(context_lens) // batch  # entries of a sequence
    scale = 1 / math.sqrt(dim) if softmax_scale is None else softmax_scale
    output, lse = np.zeros((batch, heads, value_cache.shape[3])), np.full((batch, heads), -np.inf)
    for b in range(batch):
        for a in range(heads):
            i = b * apart + a // (heads // apart)
            head = 0 if apart > 1 else a // (heads // key_cache.shape[2])
            length, scores, values = int(context_lens[i]), [], []
            for j in range(length):
                if 0 <= window[0] < length - 1 - j:
                    continue
                block, row = block_tables[i][j // rows], j % rows
                score = scale * float(
                    np.dot(query[b, a].astype(float), key_cache[block, row, head].astype(float))
                )
                if softcap:
                    score = softcap * math.tanh(score / softcap)
                if razor_offset is not None:
                    score += scale * float(razor_offset[block, row])
                scores.append(score)
                values.append(value_cache[block, row, head].astype(float))
            terms = scores if sinks is None else [*scores, float(sinks[a])]
            if not terms:
                continue
            top = max(terms)
            total = sum(math.exp(term - top) for term in terms)
            lse[b, a] = top + math.log(total)
            for score, value in zip(scores, values, strict=True):
                output[b, a] += math.exp(score - top) / total * value
    return output, lse
