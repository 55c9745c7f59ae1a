"""Formulas of one thread for the scores of a tile: products, masks and the online softmax.

    m' = max(m, s), alpha = e^(m - m'), p = e^(s - m')
    l = alpha l + sum p, o = alpha o + p v

Arrays are registers: q and o [rows, span] of a chunk from `place` on, s and p [tokens, rows] (a token's from
`first` on), m and l [rows]. A thread has chunks of `span` elements. All loops
have constant bounds. Loops over tokens, and over pieces in `plain`, use `while`: for compute capability 10.0
and later NVVM does not unroll some loops over a `range`, and registers become memory.
"""

import functools

import numpy as np

from kvkit.formats import MASKS
from kvkit.formulas import numeric
from kvkit.runtime.jit import shared
from kvkit_cuda.copy import chunks

READ = {name: chunks.read(name) for name in ("float32", "float16", "bfloat16", "int8")}
read_float, read_half, read_bfloat16, read_byte = READ.values()
apply_softcap = numeric.apply_softcap
FLOAT32, FLOAT16, BFLOAT16, BOOL = MASKS.values()


@functools.cache
def multiply(rows, span):
    """Return f(elements, q, place, s, first), which adds q times a chunk of a key to a token's scores."""

    @shared
    def multiply(elements, queries, place, scores, first):
        for r in range(rows):
            total = scores[first + r]
            for i in range(span):
                total += queries[place + r * span + i] * elements[i]
            scores[first + r] = total

    return multiply


@functools.cache
def update_softmax(rows, tokens):
    """Return f(s, m, l, alpha, shrink), which updates m and l, and replaces s by p = e^(s - m) shrink."""

    @shared
    def update_softmax(s, m, l, alpha, shrink):
        for r in range(rows):
            m_old = m[r]
            t = 0
            while t < tokens:
                m[r] = max(m[r], s[t * rows + r])
                t += 1
            alpha[r] = numeric.weight(m_old, m[r])
            l[r] *= alpha[r]
            t = 0
            while t < tokens:
                weight = numeric.weight(s[t * rows + r], m[r])
                l[r] += weight
                s[t * rows + r] = weight * shrink
                t += 1

    return update_softmax


@functools.cache
def rescale(rows, span):
    """Return f(sums, place, alpha), which multiplies the sums of a chunk by alpha of their rows."""

    @shared
    def rescale(sums, place, alpha):
        for r in range(rows):
            for i in range(span):
                sums[place + r * span + i] *= alpha[r]

    return rescale


@functools.cache
def add(rows, span):
    """Return f(elements, sums, place, p, first), which adds p v; weights of 0 add nothing, even for NaN."""

    @shared
    def add(elements, sums, place, weights, first):
        for r in range(rows):
            weight = weights[first + r]
            if weight != np.float32(0):
                for i in range(span):
                    sums[place + r * span + i] += weight * elements[i]

    return add


@shared
def split_factor(weight, factor, shrink):
    """Return the factor of a split's sums, whose weights were multiplied by `shrink`."""
    return weight * factor / shrink


@shared
def add_split(whole, x, share):
    """Add a split's share to a sum, unless the split has no weight."""
    return whole + x * share if share != np.float32(0) else whole


@shared
def read_number(kind, address):
    """Read a number of one of the types of masks as float32; of booleans, False is -inf and True is 0."""
    if kind == FLOAT32:
        return read_float(address)
    if kind == FLOAT16:
        return read_half(address)
    if kind == BFLOAT16:
        return read_bfloat16(address)
    return np.float32(0) if read_byte(address) != np.float32(0) else numeric.MINUS_INF


@shared
def add_alibi(score, slope, distance):
    return score + numeric.alibi_bias(numeric.float_of(np.uint32(slope)), distance)


@shared
def add_mask(score, kind, address):
    return numeric.add_bias(score, read_number(kind, address))
