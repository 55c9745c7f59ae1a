"""One pass over two arrays of one type: which elements differ, by how many ulps, and how far at most."""

import functools

import numpy as np
from numba import types

from kvkit import numeric
from kvkit.formats import BY_DTYPE
from kvkit.jit import helper, kernel

BUCKETS = 34  # distances of 0, of 1, of 2 and 3, of 4 to 7, ...
WORDS = {8: types.uint8, 16: types.uint16, 32: types.uint32}


def form_of(dtype):
    """What decides the pass over a dtype: the name of a float format, or "byte"; None if there is no pass."""
    fmt = BY_DTYPE.get(dtype)
    if fmt is not None and fmt.significant and fmt.bits > 8:
        return fmt.name
    return "byte" if dtype.itemsize == 1 else None


def numbers_of_bytes(dtype):
    """The numbers that the 256 bytes of a dtype are."""
    return np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)


@helper
def distance(one, two, sign):
    """How many numbers of a float type are between two of its words."""
    low = -(one - sign) if one >= sign else one
    high = -(two - sign) if two >= sign else two
    return abs(low - high)


@functools.cache
def compiled(form):
    """The pass over words [rows, elements]; the number of those that differ."""
    bits = 8 if form == "byte" else BY_DTYPE_BITS[form]
    sign = np.int64(1 << (bits - 1))
    if form == "byte":

        def number(word, table):
            return table[word]
    else:
        widen = numeric.widening(form)

        def number(word, table):
            return widen(word)

    number = helper(number)

    def count(one, two, table, atol, rtol, ulp, counts, errors, histogram):
        total = 0
        tolerant = atol > 0 or rtol > 0 or ulp > 0
        for i in range(one.shape[0]):
            differing, largest = 0, np.float32(0)
            for j in range(one.shape[1]):
                x, y = one[i, j], two[i, j]
                if x == y:
                    continue
                a, b = number(x, table), number(y, table)
                error = abs(a - b)
                apart = distance(np.int64(x), np.int64(y), sign)
                if tolerant and (apart <= ulp or (a != a and b != b) or error <= atol + rtol * abs(a)):
                    continue
                differing += 1
                if error > largest:
                    largest = error
                if error != error:
                    largest = np.float32(np.inf)
                bucket = 0
                while apart:
                    apart >>= 1
                    bucket += 1
                histogram[bucket] += 1
            counts[i], errors[i] = differing, largest
            total += differing
        return total

    word = types.Array(WORDS[bits], 2, "C", readonly=True)
    floats, integers = types.Array(types.float32, 1, "C"), types.Array(types.int64, 1, "C")
    numbers = types.float64, types.float64, types.int64
    signature = types.int64(word, word, floats, *numbers, integers, floats, integers)
    return kernel(count, signature, key=form)


BY_DTYPE_BITS = {fmt.name: fmt.bits for fmt in BY_DTYPE.values()}


def count(one, two, atol, rtol, ulp):
    """(differing elements of each row, largest errors of each, histogram) of arrays [rows, elements], any
    types.
    """
    rows = len(one)
    counts, errors = np.zeros(rows, np.int64), np.zeros(rows, np.float32)
    histogram = np.zeros(BUCKETS, np.int64)
    form = form_of(one.dtype) if one.dtype == two.dtype else None
    if form is not None:
        word = f"u{one.dtype.itemsize}"
        words = [as_words(array, word) for array in (one, two)]
        table = numbers_of_bytes(one.dtype) if form == "byte" else np.zeros(1, np.float32)
        compiled(form)(*words, table, atol, rtol, ulp, counts, errors, histogram)
        return counts, errors, histogram
    with np.errstate(all="ignore"):
        wide = [array.astype(np.float64) for array in (one, two)]
        error = np.abs(wide[0] - wide[1])
        close = (
            (wide[0] == wide[1])
            | (np.isnan(wide[0]) & np.isnan(wide[1]))
            | (error <= atol + rtol * np.abs(wide[0]))
        )
    counts[:] = (~close).sum(axis=1)
    if one.size:
        errors[:] = np.where(close, 0, np.nan_to_num(error, nan=np.inf)).max(axis=1)
    return counts, errors, histogram


def as_words(array, word):
    array = np.ascontiguousarray(array).view(word)
    array = array.view()
    array.flags.writeable = False
    return array
