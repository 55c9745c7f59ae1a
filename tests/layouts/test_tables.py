"""Tables of every convention against plain loops."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkit import KvkitError
from kvkit.layouts import tables

GARBAGE = [-1, 0, 10**6, -(2**31), 2**40]


@st.composite
def batches(draw):
    """Draw (page size, lengths, blocks of each sequence); blocks of one sequence are distinct."""
    page_size = draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(0, 13), max_size=5))
    blocks = [draw(st.permutations(range(13)))[: -(-length // page_size)] for length in lengths]
    return page_size, lengths, blocks


def rows_of(page_size, lengths, blocks):
    """Return the row of every token, by loops."""
    rows = []
    for b, length in enumerate(lengths):
        for t in range(length):
            rows.append(blocks[b][t // page_size] * page_size + t % page_size)
    return rows


def block_table(blocks, width, draw=lambda i: GARBAGE[i % len(GARBAGE)]):
    return np.array(
        [[*each, *(draw(i) for i in range(width - len(each)))] for each in blocks], np.int64
    ).reshape(-1, width)


@settings(max_examples=30, deadline=None)
@given(batches())
def test_all_conventions(batch):
    page_size, lengths, blocks = batch
    width = max([len(each) for each in blocks], default=0) + 1
    expected = rows_of(*batch)
    pages = tables.from_blocks(block_table(blocks, width), lengths, page_size)
    assert pages.rows().tolist() == expected
    assert pages.starts().tolist() == [sum(lengths[:b]) for b in range(len(lengths) + 1)]

    table, again = tables.to_blocks(pages, padding=-7)
    assert again.tolist() == lengths
    for b, each in enumerate(blocks):
        assert table[b].tolist() == [*each, *[-7] * (table.shape[1] - len(each))]

    indptr = [sum(map(len, blocks[:b])) for b in range(len(blocks) + 1)]
    indices = [block for each in blocks for block in each]
    last = [length - page_size * (len(each) - 1) if each else 0
            for length, each in zip(lengths, blocks, strict=True)]  # fmt: skip
    assert tables.from_csr(indptr, [*indices, 99], last, page_size) == pages

    slots = tables.to_slots(pages, padding=-3)
    assert [row for b, length in enumerate(lengths) for row in slots[b, :length]] == expected
    assert all((slots[b, length:] == -3).all() for b, length in enumerate(lengths))
    assert tables.from_slots(slots, lengths).rows().tolist() == expected

    told = tables.to_tokens(pages)
    assert told[1].tolist() == [b for b, length in enumerate(lengths) for _ in range(length)]
    assert told[2].tolist() == [t for length in lengths for t in range(length)]
    if lengths:
        order = np.random.default_rng(0).permutation(len(expected))
        mixed = [np.append(each[order], extra) for each, extra in zip(told, (-1, 5, 77), strict=True)]
        assert tables.from_tokens(*mixed, batch=len(lengths)).rows().tolist() == expected

    if lengths and len(set(expected)) == len(expected):
        at, owners = np.full(80, -1), [set() for _ in range(80)]
        for row, sequence, position in zip(*map(np.ndarray.tolist, told), strict=True):
            at[row] = position
            owners[row].add(sequence)
        assert tables.from_cells(at, owners, batch=len(lengths)).rows().tolist() == expected
        if (new := [min(length, 2) for length in lengths]) and sum(new):
            step = [
                row
                for b, length in enumerate(lengths)
                for row in rows_of(page_size, lengths, blocks)[
                    sum(lengths[: b + 1]) - new[b] : sum(lengths[: b + 1])
                ]
            ]
            assert tables.slot_mapping(pages, new).tolist() == step


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=5), st.randoms())
def test_parts_of_a_batch(given_, random):
    lengths, pads = (list(each) for each in zip(*given_, strict=True))
    index = random.sample(range(8), len(lengths))
    pages = tables.from_batch(lengths, 14, batch_index=index, left_padding=pads)
    expected = [index[b] * 14 + pads[b] + t for b in range(len(lengths)) for t in range(lengths[b])]
    assert pages.rows().tolist() == expected


PAGES = tables.from_blocks([[3, 1], [2, 0]], [5, 3], 3)
REFUSED = {
    "page_size: expected a positive integer, got int 0": lambda: tables.from_blocks([[1]], [1], 0),
    "block_tables: expected 2 entries for the 4 tokens of sequence 0, got 1":
        lambda: tables.from_blocks([[1]], [4], 3),
    r"block_tables\[1, 1\]: expected at least 0, as sequence 1 has 4 tokens, got -1":
        lambda: tables.from_blocks([[1, -1], [2, -1]], [3, 4], 3),
    r"block_tables\[0, 0\]: expected at least 0, .*": lambda: tables.from_blocks([[2**62]], [1], 16),
    "block_tables: expected 2 entries, one a sequence, got 1": lambda: tables.from_blocks([[1]], [1, 1], 3),
    "block_tables: expected integers of 2 axes, got an array of float64":
        lambda: tables.from_blocks([[1.5]], [1], 3),
    "block_tables: expected integers of 2 axes, got rows":
        lambda: tables.from_blocks([[1, 2], [3]], [1, 1], 3),
    r"lengths\[1\]: expected at least 0, got -2": lambda: tables.from_blocks([[1], [1]], [1, -2], 3),
    "indptr: expected to begin with 0, got 1": lambda: tables.from_csr([1, 2], [0, 0], [1], 3),
    "indptr: expected never to decrease, got 1": lambda: tables.from_csr([0, 2, 1], [0, 0], [1, 1], 3),
    "indices: expected 3 entries, where indptr ends, got 2": lambda: tables.from_csr([0, 3], [0, 0], [1], 3),
    r"last_page_len\[0\]: expected from 1 to 3, got 4": lambda: tables.from_csr([0, 1], [0], [4], 3),
    r"last_page_len\[0\]: expected from 1 to 3, got 0": lambda: tables.from_csr([0, 1], [0], [0], 3),
    r"slots\[0, 1\]: expected at least 0, .*": lambda: tables.from_slots([[4, -1]], [2]),
    "positions: expected 1 after 0 in sequence 0, got 2": lambda: tables.from_tokens([5, 6], [0, 0], [0, 2]),
    "positions: expected 1 after 0 in sequence 0, got 0": lambda: tables.from_tokens([5, 6], [0, 0], [0, 0]),
    "sequences: expected numbers from 0 to 1, got 2": lambda: tables.from_tokens([5], [2], [0], batch=2),
    "sequences: expected 2 entries, one a slot, got 1": lambda: tables.from_tokens([5, 6], [0], [0, 1]),
    "sequences: expected 2 entries, one a cell, got 1": lambda: tables.from_cells([0, 1], [{0}]),
    "pages: expected pages that begin at multiples of 4 rows":
        lambda: tables.to_blocks(tables.BlockTable(np.array([[6]]), np.array([2]), 4)),
    r"lengths\[0\]: expected at most 3, in 5 rows after 2, got 4":
        lambda: tables.from_batch([4], 5, left_padding=[2]),
    r"batch_index\[0\]: expected 0 to \d+, got -1": lambda: tables.from_batch([4], 5, batch_index=[-1]),
    r"new\[1\]: expected at most the 3 tokens of the sequence, got 4":
        lambda: tables.slot_mapping(PAGES, [1, 4]),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message):
    with pytest.raises(KvkitError, match=message):
        REFUSED[message]()
