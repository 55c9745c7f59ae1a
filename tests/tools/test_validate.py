"""KVKIT_VALIDATE=1: operators refuse tables that they could read, and that cannot be meant."""

import numpy as np
import pytest

import kvkit
from kvkit.checks import index_tensors
from kvkit.errors import KvkitError

WRONG = {
    "P2": ([[0, 0, 4]], [12], [11], r"cachestarts\[0, 1\]: expected a page once in a sequence \(rule P2\)"),
    "P3": (
        [[0, 4], [4, 8]], [8, 8], [8, 7],
        r"cachestarts\[1, 0\]: expected pages shared only by .* \(rule P3\)",
    ),
    "P4": (
        [[0, 4], [0, 4]], [6, 5], [5, 5], r"cachestarts: expected new tokens in pages of one .* \(rule P4\)",
    ),
}  # fmt: skip


def append(table, kvlens, start_pos):
    """Append a token to each sequence that has one."""
    new = np.array(kvlens) - np.array(start_pos)
    key = np.ones((new.sum(), 1, 8), np.float32)
    return kvkit.dynamic_batching.key_value_cache(
        key, key, np.cumsum([0, *new]), np.cumsum([0, *kvlens]), np.array(table), np.array(start_pos),
        None, None, np.zeros((16, 1, 2, 1, 8), np.float32), cache_mode=1, page_size=4,
    )  # fmt: skip


@pytest.mark.parametrize("rule", WRONG)
def test_steps(monkeypatch, rule):
    *step, message = WRONG[rule]
    append(*step)  # an operator can do it: what is stored holds no other token
    monkeypatch.setattr(index_tensors, "VALIDATES", True)
    with pytest.raises(KvkitError, match=message):
        append(*step)
    append([[0, 4], [0, 8]], [8, 5], [7, 4])
    monkeypatch.setattr(index_tensors, "VALIDATES", False)
    append(*step)


def attend(table, lengths):
    cache, query = np.ones((6, 4, 1, 8), np.float32), np.ones((len(lengths), 1, 8), np.float32)
    return kvkit.ascend.paged_attention(query, cache, cache, np.array(table), np.array(lengths))


@pytest.mark.parametrize(
    ("table", "message"), [([[1, 1, -1], [2, 3, 1]], "rule P2"), ([[1, 2, -1], [2, 3, 1]], "rule P3")]
)
def test_tables_that_are_read(monkeypatch, table, message):
    attend(table, [8, 4])
    monkeypatch.setattr(index_tensors, "VALIDATES", True)
    with pytest.raises(KvkitError, match=message):
        attend(table, [8, 4])
    attend([[1, 2, 2], [1, 3, 1]], [8, 8])
