"""Formulas of one thread for the scores of a tile: products, masks and the online softmax.

Arrays are registers: queries and sums [rows, span] from a place on, weights [tokens, rows], and [rows]. All
loops have constant bounds. Those over tokens, here, and over pieces, in `plain`, say `while`: for compute
capability 10.0 and later NVVM unrolls some loops over a `range` not, and registers become memory.
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
    """Add the products of a chunk of a key with the queries to the scores of a token."""

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
    """(s, m, l, alpha, shrink): s [tokens, rows] becomes p = e^(s - m) shrink; m, l and alpha are new."""

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
def shrink(rows, span):
    """Multiply the sums of a chunk by the factors of their rows."""

    @shared
    def shrink(sums, place, factor):
        for r in range(rows):
            for i in range(span):
                sums[place + r * span + i] *= factor[r]

    return shrink


@functools.cache
def add(rows, span):
    """Add a chunk of a value times its weights to the sums; one without weight is absent, even if NaN."""

    @shared
    def add(elements, sums, place, weights, first):
        for r in range(rows):
            weight = weights[first + r]
            if weight != np.float32(0):
                for i in range(span):
                    sums[place + r * span + i] += weight * elements[i]

    return add


@shared
def part_of(weight, factor, shrink):
    """Return the factor of the sums of a split."""
    return weight * factor / shrink


@shared
def with_part(whole, x, share):
    """Add a split's share to a sum, unless the split has no weight."""
    return whole + x * share if share != np.float32(0) else whole


@shared
def number(kind, address):
    """Return a number of one of the types of masks: False is -inf, True is 0."""
    if kind == FLOAT32:
        return read_float(address)
    if kind == FLOAT16:
        return read_half(address)
    if kind == BFLOAT16:
        return read_bfloat16(address)
    return np.float32(0) if read_byte(address) != np.float32(0) else numeric.MINUS_INF


@shared
def leaning(score, slope, distance):
    return score + numeric.alibi_bias(numeric.float_of(np.uint32(slope)), distance)


@shared
def masked(score, kind, address):
    return numeric.add_bias(score, number(kind, address))
