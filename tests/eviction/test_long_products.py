"""Products in tiles are those of `numpy.matmul`."""

import numpy as np
import pytest

from kvkit.eviction.products import ONE_THREAD, long_product, product

SHAPES = [
    ((1, 1, 1), (1, 1, 1)), ((3, 200, 128), (3, 128, 300)), ((70, 128), (128, 33)), ((300, 128), (128, 1)),
    ((1, 256), (256, 700)), ((2, 1, 5, 64), (4, 64, 65)), ((3, 7, 9000), (3, 9000, 5)),
    ((2, 0, 8), (2, 8, 3)), ((64, 400000), (400000, 2)), ((2, 3, 0), (2, 0, 4)),
]  # fmt: skip


@pytest.mark.parametrize(("left", "right"), SHAPES, ids=str)
def test_products(rng, left, right):
    """Any shapes, also columns that lie side by side, give the product; sums may be in float64."""
    left = rng.standard_normal(left).astype(np.float32)
    right = rng.standard_normal(right).astype(np.float32)
    by_columns = np.ascontiguousarray(right.swapaxes(-1, -2)).swapaxes(-1, -2)
    wanted = np.matmul(left.astype(np.float64), right.astype(np.float64))
    atol = 1e-5 * max(left.shape[-1], 1) ** 0.5
    for other in (right, by_columns):
        np.testing.assert_allclose(product(left, other), wanted, atol=atol)
        if left.ndim == right.ndim and left.shape[:-2] == right.shape[:-2]:
            np.testing.assert_allclose(long_product(left, other, np.float64), wanted, atol=atol)


def test_tiles_are_small(monkeypatch, rng):
    """No product that BLAS sees has more multiplications than it runs on one thread."""
    seen, matmul = [], np.matmul

    def counting(left, right, out):
        seen.append(left.shape[-2] * left.shape[-1] * right.shape[-1])
        return matmul(left, right, out=out)

    monkeypatch.setattr(np, "matmul", counting)
    for rows, depth, columns in rng.integers(1, 400, (20, 3)):
        product(np.ones((rows, depth), np.float32), np.ones((depth, columns), np.float32))
    assert max(seen) <= ONE_THREAD
