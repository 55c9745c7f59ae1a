"""The mean cosines of `rkv` are those of its definition."""

import numpy as np
import pytest

from kvkit.eviction import by_queries


@pytest.mark.parametrize("threshold", [-0.5, 0, 0.3, 0.5, 0.99])
@pytest.mark.parametrize("tokens", [1, 2, 31, 33, 100])
def test_mean_cosines(monkeypatch, tokens, threshold):
    """A search from the end in small blocks finds what the whole matrix of cosines says, in float64."""
    monkeypatch.setattr(by_queries, "SEARCHED", 16)
    rng = np.random.default_rng(tokens)
    keys = (rng.standard_normal((tokens, 8)) + rng.standard_normal(8)).astype(np.float32)
    units = keys.astype(np.float64) / np.linalg.norm(keys.astype(np.float64), axis=1)[:, None]
    cosines = units @ units.T
    np.fill_diagonal(cosines, 0)
    for row in range(tokens):
        alike = np.flatnonzero(cosines[row] > threshold)
        cosines[row, alike[-1] if len(alike) else 0] = 0
    np.testing.assert_allclose(by_queries.mean_cosines(keys, threshold), cosines.mean(0), atol=1e-6)
