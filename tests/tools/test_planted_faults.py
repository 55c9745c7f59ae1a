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


def test_a_background_explains_nothing():
    """A lost token beside rows that were never written is lost, not moved."""
    key = np.zeros((3, 4, 1, 16), np.float16)
    key[0] = np.random.default_rng(0).standard_normal((4, 1, 16))
    got = key.copy()
    got[0, 3] = 0
    assert [cause.name for cause in diff({"key": key}, {"key": got}).causes] == ["old bytes: not written"]


def test_words_of_index_tensors():
    tables = np.arange(12, dtype=np.int32).reshape(2, 6)
    got = tables.copy()
    got[0, 3] = 7
    said = str(diff({"block_tables": tables}, {"block_tables": got}))
    assert "first: sequence 0, entry 3: expected 3, got 7" in said
    assert "wrong id in a block table (entry 3 of sequence 0: 7 for 3)" in said
    assert "element" not in said.split("\n", 1)[1]
    [cause] = diff({"slot_mapping": tables[0]}, {"slot_mapping": tables[0] + 1}).causes
    assert (cause.name, cause.detail) == ("indices off by a constant", "6 entries +1")


def test_inputs_that_fit_nothing_are_refused():
    key, like = np.zeros((3, 4, 1, 16), np.float16), {"tokens": np.zeros((5, 2), np.float16)}
    with pytest.raises(KvkitError, match=r"like: expected floats .* got tokens \(5, 2\)"):
        diff({"key": key}, {"key": key + 1}, like=like)


def test_axes_of_arrays_that_are_named_by_layer():
    """What the caller says of axes counts more than what names imply."""
    key = np.random.default_rng(0).standard_normal((2, 3, 4, 1, 16)).astype(np.float16)
    sides = {"present.0.key": key, "present.0.value": key + 1}
    got = {name: x.copy() for name, x in sides.items()}
    got["present.0.key"][1, 2, 3] = 0
    [array] = diff(sides, got, axes="l b n h c").arrays
    assert array.name == "present.0.key"
    assert "layer 1" in str(array)
