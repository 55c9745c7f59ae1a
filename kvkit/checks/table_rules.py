"""Check rules P1 to P4 of `kvkit check`, which all page tables must obey, in one pass.

Operators refuse tables that they cannot read. A table that can be read may still be wrong: if two sequences
write to one page, each reads tokens of the other. With KVKIT_VALIDATE=1 in the environment every operator
that takes a table checks these rules too.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numba import types

from kvkit.errors import argument_error
from kvkit.runtime.jit import INDEX, Integers, address, compiled, helper
from kvkit.typed import Array

OUTSIDE, TWICE, FOREIGN = range(3)  # the rule that a hit breaks: P1, P2 or P3
# The fields of a hit. OTHER is the other sequence with the page, and OTHER_COLUMN where it has the page.
HIT_FIELDS = RULE, SEQUENCE, COLUMN, PAGE, OTHER, OTHER_COLUMN = range(6)
HIT = len(HIT_FIELDS)
NO_PAGES = np.zeros(0, np.int64)
NO_PLACEHOLDER = np.iinfo(np.int64).min  # an id that no table has
UNKNOWN = -1  # in place of the page in front: it is a placeholder, or wrong
NONE = -2  # in place of the page in front: there is none
POOL = 2**22  # a pass has workspace for every page of pools up to this size
WORKSPACE = 5  # numbers of workspace for each page
INT = types.int64


@compiled(INT(INDEX, INT, INDEX, INT, INT, INDEX, INDEX, *[INDEX] * WORKSPACE))
def scan_tables(
    starts: Integers, batch: int, ids: Integers, pages: int, placeholder: int, owners: Integers, hits:
    Integers, owner: Integers, column: Integers, in_front: Integers, last: Integers, last_column: Integers,
) -> int:  # fmt: skip
    """Write the hits (broken rules) of tables that follow each other to `hits`; return their number.

    Sequences may share a page only if their tables are equal up to its column::

        sequence 0    4 2 7
        sequence 1    4 1 2    4 is shared. 2 is FOREIGN: it is in column 1 of sequence 0
        sequence 2    5 2      2 is FOREIGN: in sequence 0 it follows page 4

    So it is enough to compare a page's column and the page before it, which has been checked by then; after a
    placeholder all earlier columns are compared. `owners` counts the sequences of each page. The workspace
    has for each page its first sequence, `owner`, with its `column` and the page `in_front` of it there; and
    the `last` sequence so far that has it, in the column `last_column`.
    """
    for page in range(pages):
        owner[page] = last[page] = -1
    count = 0
    for b in range(batch):
        previous = NONE
        for c in range(starts[b + 1] - starts[b]):
            page = ids[starts[b] + c]
            if page == placeholder:
                previous = UNKNOWN
                continue
            rule, other, other_column = -1, -1, -1
            if page < 0 or page >= pages:
                rule, previous = OUTSIDE, UNKNOWN
            else:
                if last[page] == b:
                    rule, other, other_column = TWICE, b, last_column[page]
                else:
                    owners[page] += 1
                    if owner[page] < 0:
                        owner[page], column[page], in_front[page] = b, c, previous
                    elif column[page] != c or not begin_alike(
                        ids, starts[owner[page]], starts[b], c, in_front[page], previous, placeholder, pages
                    ):
                        rule, other, other_column = FOREIGN, owner[page], column[page]
                    elif in_front[page] == UNKNOWN:  # this sequence may know the page in front
                        owner[page], in_front[page] = b, previous
                    last[page], last_column[page] = b, c
                previous = page
            if rule >= 0:
                at = count * HIT
                hits[at + RULE], hits[at + SEQUENCE], hits[at + COLUMN] = rule, b, c
                hits[at + PAGE], hits[at + OTHER], hits[at + OTHER_COLUMN] = page, other, other_column
                count += 1
    return count


@helper
def begin_alike(
    ids: Integers, a: int, b: int, columns: int, a_previous: int, b_previous: int, placeholder: int,
    pages: int,
) -> bool:  # fmt: skip
    """Return whether two tables, which begin at `a` and `b` in `ids`, have equal first columns.

    A placeholder may stand for any page, and wrong ids are reported elsewhere. `a_previous` and `b_previous`
    are the pages in front of the next column.
    """
    if a_previous != UNKNOWN and b_previous != UNKNOWN:
        return a_previous == b_previous
    for c in range(columns):
        page, other = ids[a + c], ids[b + c]
        known = page != placeholder and other != placeholder
        if known and page != other and 0 <= page < pages and 0 <= other < pages:
            return False
    return True


@dataclass(frozen=True)
class Tables:
    """The entries of page tables that are in use, one sequence after the other, and the legal page ids.

    `placeholder` is an id that stands for no page, and may occur anywhere.
    """

    starts: Array
    ids: Array
    num_blocks: int
    placeholder: int | None = None

    @cached_property
    def scanned(self) -> tuple[Array, Any]:
        """Return the hits [hits, HIT_FIELDS], and the number of sequences of each page, by page."""
        hits = np.empty((len(self.ids), HIT), np.int64)
        ids, pool, used = self.ids, self.num_blocks, None
        placeholder = NO_PLACEHOLDER if self.placeholder is None else self.placeholder
        if pool > POOL + 8 * len(ids):  # a huge pool: replace pages by their ranks among the pages in use
            legal = (ids >= 0) & (ids < pool) & (ids != placeholder)
            used, ranks = np.unique(ids[legal], return_inverse=True)
            ids, pool = np.where(ids == placeholder, NO_PLACEHOLDER, -1), len(used)
            ids[legal], placeholder = ranks, NO_PLACEHOLDER
        owners, workspace = np.zeros(pool, np.int64), np.empty((WORKSPACE, pool), np.int64)
        count = scan_tables.code.ctypes(
            address(self.starts), len(self.starts) - 1, address(ids), pool, placeholder,
            address(owners), address(hits), *(address(workspace) + 8 * pool * i for i in range(WORKSPACE)),
        )  # fmt: skip
        hits = hits[:count]
        hits[:, PAGE] = self.ids[self.starts[hits[:, SEQUENCE]] + hits[:, COLUMN]]  # ids again, not ranks
        return hits, owners if used is None else dict(zip(used.tolist(), owners.tolist(), strict=True))

    def hits(self, rule: int) -> Array:
        """Return the hits of a rule, [hits, HIT_FIELDS]."""
        hits, _ = self.scanned
        chosen: Array = hits[hits[:, RULE] == rule]
        return chosen

    def shared(self, pages: Array) -> Array:
        """Return which of the pages several sequences have, each once."""
        _, owners = self.scanned
        pages = np.unique(pages[(pages >= 0) & (pages < self.num_blocks)])
        of_huge_pool = isinstance(owners, dict)
        counts = [owners.get(page, 0) for page in pages.tolist()] if of_huge_pool else owners[pages]
        return pages[np.greater(counts, 1)]

    def owners(self, page: int) -> list[int]:
        """Return the sequences that have a page."""
        sequences = np.searchsorted(self.starts, np.flatnonzero(self.ids == page), "right") - 1
        return list(map(int, np.unique(sequences)))


def pages_of(lengths: Array, page_size: int) -> Array:
    """Return how many pages contexts of these lengths need."""
    return -(-np.maximum(lengths, 0) // page_size)


def tables_in_use(table: Array, lengths: Array, num_blocks: int, page_size: int) -> Tables:
    """Return the `Tables` of rows [sequences, columns]: the entries that lengths need."""
    counts = np.minimum(pages_of(lengths, page_size), table.shape[1])
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    ids = table[np.arange(table.shape[1]) < counts[:, None]].astype(np.int64, copy=False)
    return Tables(starts, ids, num_blocks)


def check_tables(name: str, tables: Tables, written: Array = NO_PAGES) -> None:
    """Raise if the tables in argument `name` break a rule; `written` are the pages that get tokens."""
    hits, _ = tables.scanned
    if len(hits):
        rule, b, c, page, other, other_column = hits[0].tolist()
        wanted = (
            f"a page from 0 to {tables.num_blocks - 1} (rule P1)",
            "a page once in a sequence (rule P2)",
            "pages shared only by sequences that begin alike (rule P3)",
        )[rule]
        where = "" if rule == OUTSIDE else f", which sequence {other} has in column {other_column}"
        raise argument_error(f"{name}[{b}, {c}]", wanted, f"page {page}{where}")
    shared = tables.shared(written)
    if len(shared):
        owners = ", ".join(map(str, tables.owners(shared[0])))
        got = f"page {shared[0]}, which sequences {owners} have"
        raise argument_error(name, "new tokens in pages of one sequence (rule P4)", got)
