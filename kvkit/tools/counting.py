"""Compare two arrays in one pass: count differing elements and distances in ulps, find the largest error."""

import functools
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numba import types

from kvkit.formats import BY_DTYPE
from kvkit.formulas import numeric
from kvkit.runtime.jit import INDEX, address, callback, helper

# The distances in ulps of each bucket of a histogram.
BUCKETS = ["0", "1", *(f"{2 ** (i - 1)}-{2**i - 1}" for i in range(2, 34))]
Tolerances = tuple[float, float, int]  # atol, rtol, ulp
BITS_BY_FORMAT = {fmt.name: fmt.bits for fmt in BY_DTYPE.values()}
WORD_TYPES = {8: types.uint8, 16: types.uint16, 32: types.uint32}


class RowCounts(NamedTuple):
    """Holds how rows differ."""

    differing: np.ndarray  # elements of each row
    errors: np.ndarray  # the largest of each row, float32
    histogram: np.ndarray  # differing elements by distance, in BUCKETS

    @classmethod
    def zeros(cls, rows: int) -> "RowCounts":
        """Return the counts of equal rows."""
        histogram = np.zeros(len(BUCKETS), np.int64)
        return cls(np.zeros(rows, np.int64), np.zeros(rows, np.float32), histogram)


def form_of(dtype: np.dtype) -> str | None:
    """Return the name of the compiled pass for a dtype, None if there is none.

    It is the name of a float format; for elements that are stored in a byte, "integer" or "byte" (a float).
    """
    fmt = BY_DTYPE.get(dtype)
    if fmt is not None and fmt.significant and fmt.bits > 8:
        return fmt.name
    if dtype.itemsize != 1:
        return None
    return "integer" if is_integer(dtype) else "byte"


def is_integer(dtype: np.dtype) -> bool:
    """Return whether elements are integers, of any number of bits, or count as integers, as bool does."""
    return dtype.kind in "iubmM" or dtype.name.startswith(("int", "uint"))


@functools.cache
def sign_of(dtype: np.dtype) -> int:
    """Return the sign bit in the words of a float type; 0 for a type without negative numbers."""
    about = ml_dtypes.finfo(dtype)
    return 1 << (about.bits - 1) if about.min < 0 else 0


@helper
def distance(one: Any, two: Any, sign: Any) -> Any:
    """Return the distance in ulps between two words of a float type, whose sign bit may be 0 (`sign_of`)."""
    low = -(one - sign) if one >= sign else one
    high = -(two - sign) if two >= sign else two
    return abs(low - high)


@functools.cache
def compiled(form: str) -> Any:
    """Compile the pass over words [rows, elements]."""
    bits, integers = BITS_BY_FORMAT.get(form, 8), form == "integer"
    if form not in BITS_BY_FORMAT:  # elements of a byte: a table has the number of each code

        def number(word: Any, table: Any) -> Any:
            return table[word]
    else:
        widen = numeric.widening(form)

        def number(word: Any, table: Any) -> Any:
            return widen(word)

    number = helper(number)

    def compare(
        one: Any, two: Any, rows: Any, elements: Any, table: Any, sign: Any, atol: Any, rtol: Any, ulp: Any,
        counts: Any, errors: Any, histogram: Any,
    ) -> None:  # fmt: skip
        tolerant = atol > 0 or rtol > 0 or ulp > 0
        for i in range(rows):
            differing, largest = 0, np.float32(0)
            for j in range(i * elements, (i + 1) * elements):
                x, y = one[j], two[j]
                if x == y:
                    continue
                a, b = number(x, table), number(y, table)
                error = abs(a - b)
                apart = np.int64(error) if integers else distance(np.int64(x), np.int64(y), sign)
                if tolerant:
                    if a != a or b != b:
                        if a != a and b != b:
                            continue
                    elif apart <= ulp or (abs(a) < np.inf and error <= atol + rtol * abs(a)):
                        continue
                differing += 1
                if error > largest:
                    largest = error
                if error != error:
                    largest = np.float32(np.inf)
                bucket = 0  # becomes the number of bits of the distance
                while apart:
                    apart >>= 1
                    bucket += 1
                histogram[bucket] += 1
            counts[i], errors[i] = differing, largest

    words, floats = types.CPointer(WORD_TYPES[bits]), types.CPointer(types.float32)
    arrays = words, words, types.int64, types.int64, floats, types.int64
    tolerances, results = (types.float64, types.float64, types.int64), (INDEX, floats, INDEX)
    signature = types.void(*arrays, *tolerances, *results)
    return callback(compare, signature, key=form).ctypes


def count(one: np.ndarray, two: np.ndarray, atol: float, rtol: float, ulp: int) -> RowCounts:
    """Count the differences of two arrays [rows, elements].

    The histogram is all zeros without a compiled pass: for elements of 64 bits, or of two dtypes.
    """
    one, two = native(one), native(two)
    result = RowCounts.zeros(len(one))
    form = form_of(one.dtype) if one.dtype == two.dtype else None
    if form is not None:
        words = [np.ascontiguousarray(array) for array in (one, two)]
        table = np.zeros(0, np.float32)
        if form not in BITS_BY_FORMAT:
            table = np.arange(256, dtype=np.uint8).view(one.dtype).astype(np.float32)
        tolerances, results = (atol, rtol, ulp), map(address, result)
        sign = 0 if form == "integer" else sign_of(one.dtype)
        compiled(form)(*map(address, words), *one.shape, address(table), sign, *tolerances, *results)
        return result
    close = equal_elements(one, two, (atol, rtol, ulp))
    result.differing[:] = (~close).sum(axis=1)
    if one.size:
        with np.errstate(all="ignore"):
            error = errors_between(one, two)
            result.errors[:] = np.where(close, 0, np.nan_to_num(error, nan=np.inf)).max(axis=1)
    return result


def equal_elements(one: np.ndarray, two: np.ndarray, tolerances: Tolerances) -> Any:
    """Return a mask of the elements that have equal bits, or are within tolerances."""
    atol, rtol, ulp = tolerances
    alike = one.dtype == two.dtype and one.dtype.itemsize in (1, 2, 4, 8) and one.dtype.kind != "c"
    same = word_view(one) == word_view(two) if alike else one == two
    if not (atol or rtol or ulp):
        return same
    with np.errstate(all="ignore"):
        a, b = one.astype(np.float64), two.astype(np.float64)
        close = np.isfinite(a) & (errors_between(one, two) <= atol + rtol * np.abs(a))
        if ulp and alike:
            close |= (ulps_between(one, two) <= ulp) & ~np.isnan(a) & ~np.isnan(b)
    return same | close | (np.isnan(a) & np.isnan(b))


def errors_between(one: np.ndarray, two: np.ndarray) -> Any:
    """Return the absolute differences, float64; integers of one dtype are subtracted exactly."""
    if one.dtype == two.dtype and is_integer(one.dtype):
        return ulps_between(one, two).astype(np.float64)
    return np.abs(one.astype(np.float64) - two.astype(np.float64))


def ulps_between(one: np.ndarray, two: np.ndarray) -> Any:
    """Return the distances of integers, or of floats in ulps, uint64."""
    if is_integer(one.dtype):
        one, two = (x.astype(np.int16) if x.dtype.itemsize == 1 else x for x in (one, two))
        words = one.astype(np.uint64), two.astype(np.uint64)
        return np.where(one > two, words[0] - words[1], words[1] - words[0])
    one, two = native(one), native(two)
    words = word_view(one).astype(np.uint64), word_view(two).astype(np.uint64)
    sign = np.uint64(sign_of(one.dtype))
    low, high = (word & ~sign for word in words)
    apart = np.where(low > high, low - high, high - low)
    return np.where((words[0] ^ words[1]) & sign != 0, low + high, apart)


def word_view(array: np.ndarray) -> np.ndarray:
    """View elements as unsigned integers of their size."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").reshape(array.shape)


def native(array: np.ndarray) -> np.ndarray:
    """Return an array in the byte order of this machine."""
    return array.astype(array.dtype.newbyteorder("="), copy=False)
