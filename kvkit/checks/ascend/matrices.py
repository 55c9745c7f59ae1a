"""Check conversions between matrices (ND) and groups of 32-byte columns of them (NZ)."""

from typing import NamedTuple, SupportsIndex

import numpy as np

from kvkit.checks.ascend.tensors import fractal
from kvkit.checks.outputs import Results
from kvkit.checks.values import DATA, checked_format, integer
from kvkit.errors import argument_error
from kvkit.formats import Element
from kvkit.typed import Array

FRACTAL_ROWS = 16  # NZ pads matrices to a multiple of so many rows


class MatrixCall(NamedTuple):
    """A checked conversion, but for its output."""

    source: Array  # [b, m, n], or in NZ [b, n/n0, m, n0]
    shape: tuple[int, ...]  # of the result
    results: Results


def checked_nd(x: Array) -> MatrixCall:
    """Check a call of `nd_to_nz`."""
    if isinstance(x, np.ndarray) and x.ndim == 2:
        x = x[None]  # [1, m, n]
    fmt = checked_format("x", x, DATA, 3)
    return matrix_call("x", x, "y", (len(x), *fractals(x.shape[1], x.shape[2], fmt)))


def checked_nz(y: Array, m: SupportsIndex, n: SupportsIndex) -> MatrixCall:
    """Check a call of `nz_to_nd`."""
    fmt = checked_format("y", y, DATA, 4)
    rows, columns = integer("m", m, 0), integer("n", n, 0)
    want = fractals(rows, columns, fmt)
    if y.shape[1:] != want:
        sizes = f"shape [b, {', '.join(map(str, want))}] for {rows} rows and {columns} columns"
        raise argument_error("y", sizes, y.shape)
    return matrix_call("y", y, "x", (len(y), rows, columns))


def matrix_call(name: str, source: Array, result: str, shape: tuple[int, ...]) -> MatrixCall:
    """Return a checked call from one array to another."""
    results = Results({result: (shape, source.dtype)}, [(name, source)], alone=True, contiguous_rows=False)
    return MatrixCall(source, shape, results)


def fractals(rows: int, columns: int, fmt: Element) -> tuple[int, int, int]:
    """Return a matrix's shape in NZ: groups of columns, rows up to a multiple of 16, columns of a group."""
    size = fractal(fmt)
    return -(-columns // size), -(-rows // FRACTAL_ROWS) * FRACTAL_ROWS, size
