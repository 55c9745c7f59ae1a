"""`kvkit.tools.diff` names faults that engines have had, first and alone, or says that it found no cause."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from planted_faults import COPIES, FAULTS, checked_copies, judged

from kvkit.tools import check

DATA = Path(__file__).parents[2] / "examples" / "data" / "smollm2_kv.npz"


@pytest.mark.parametrize("kind", FAULTS)
def test_planted_faults(kind):
    """Two of each kind; the module runs alone for hundreds."""
    for seed in (1, 4):
        first, alone, wrong, found = judged(kind, seed)
        assert first, str(found)
        assert alone, str(found)
        assert not wrong, str(found)
        assert ("no cause found" in str(found)) == (not kind)


@pytest.fixture(scope="module")
def dumps():
    """Return the cache of a language model for two texts: {side: [layers, tokens, heads, dim]} each."""
    data = np.load(DATA)
    ends = data["seqstarts"]
    return [{side: data[f"current_{side}"][:, a:b] for side in ("key", "value")} for a, b in pairwise(ends)]


@pytest.mark.parametrize("rule", [None, *COPIES])
def test_zeros_and_copies_are_found_and_nothing_else(dumps, rule):
    """In random pages, and in a model's cache without tables, with rows of zeros around it."""
    for seed in range(8):
        for dump in (None, *dumps):
            found = checked_copies(rule, seed, dump)
            legal = {"D2", "P6"} | ({"L3"} if rule == "D7" else set())  # which compares medians over heads
            assert found.rules - legal == ({rule} if rule else set()), (seed, str(found))


def test_sides_of_a_dump_without_tables_are_told_apart(dumps):
    for dump in dumps:
        arrays = {f"past_key_values.{i}.{name}": x.swapaxes(0, 1)[None]
                  for name, other in (("key", "value"), ("value", "key"))
                  for i, x in enumerate(dump[other])}  # fmt: skip
        assert check(arrays).rules == {"L3"}
