"""`kvkit.tools.diff` names faults that engines have had, first and alone, or says that it found no cause."""

import numpy as np
import pytest
from planted_faults import FAULTS, judged

from kvkit.errors import KvkitError
from kvkit.tools import diff


@pytest.mark.parametrize("kind", FAULTS)
def test_planted_faults(kind):
    """Two of each kind; the module runs alone for hundreds."""
    for seed in (1, 4):
        first, alone, wrong, found = judged(kind, seed)
        assert first, str(found)
        assert alone, str(found)
        assert not wrong, str(found)
        assert ("no cause found" in str(found)) == (not kind)


def test_inputs_that_fit_nothing_are_refused():
    key, like = np.zeros((3, 4, 1, 16), np.float16), {"tokens": np.zeros((5, 2), np.float16)}
    with pytest.raises(KvkitError, match=r"like: expected floats .* got tokens \(5, 2\)"):
        diff({"key": key}, {"key": key + 1}, like=like)
