"""Check contexts in pages: their block tables, their lengths, and where each sequence's queries begin."""

from typing import Any, NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from kvkit import checks
from kvkit.checks import index_tensors
from kvkit.checks.index_tensors import index, index_form, validate_table
from kvkit.checks.records import StepIndex
from kvkit.checks.values import integer
from kvkit.errors import argument_error, describe
from kvkit.typed import Array

INT32_MAX = np.iinfo(np.int32).max
BlockTables = ArrayLike | tuple[ArrayLike, ArrayLike]


class Contexts(NamedTuple):
    """Checked contexts in pages. A context ends with the tokens of its queries.

    Their pages are a table [B, M] of int64, or with `table_starts` a list, in which those of sequence b begin
    at ``table_starts[b]``. A list keeps the caller's dtype, int64 or int32.
    """

    table: Array
    table_starts: Array | None
    lengths: Array  # [B]
    starts: Array  # [B + 1]: where the queries of each sequence begin
    page_size: int
    blocks: int  # pools have at least as many pages
    kvstarts: Array  # [B + 1]: where contexts would begin, one after the other

    def tensors(self, operator: str) -> dict[str, object]:
        """Return the index tensors that an operator takes, by name."""
        if "attention" not in operator:
            return {"slot_mapping": self.new_slots(), "positions": self.new_positions()}
        table, starts = self.table, self.table_starts
        tables = table if starts is None else (starts, table)
        return {"block_tables": tables, "context_lens": self.lengths, "query_starts": self.starts}

    def new_positions(self) -> Array:
        """Return the positions of the new tokens, which are the last tokens of each context."""
        starts = self.starts
        positions: Array = np.arange(starts[-1]) - np.repeat(starts[1:] - self.lengths, np.diff(starts))
        return positions

    def new_slots(self) -> Array:
        """Return the slots of the new tokens; raise if a context is shorter than its new tokens."""
        counts, lengths = np.diff(self.starts), self.lengths
        short = np.flatnonzero(lengths < counts)
        if short.size:
            b = short[0]
            wanted = f"at least {counts[b]}, as lengths include the new tokens"
            raise argument_error(f"context_lens[{b}]", wanted, lengths[b])
        return self.slots(np.repeat(np.arange(len(lengths)), counts), self.new_positions())

    def slots(self, sequence: Any, positions: Array) -> Array:
        """Return the slots of positions of one sequence, or of a sequence for each position."""
        page, offset = np.divmod(positions, self.page_size)
        if self.table_starts is None:
            pages = self.table[sequence, page]
        else:
            pages = self.table[self.table_starts[sequence] + page]
        slots: Array = pages.astype(np.int64) * self.page_size + offset
        return slots

    def steps(
        self, pages: tuple[int, int], rows: int, *, same_rows: bool = True, overwrite: bool = False
    ) -> StepIndex:
        """Return the step of the queries in pools of `rows` rows, with row ids in place of pages.

        The pages of keys and of values are so many row ids apart. They share a table unless this differs, or
        their rows do (`same_rows`). `overwrite` says that the table of the contexts may become the step's.
        """
        (page, value_page), table, value_table = pages, self.table, None
        if table.itemsize == 4 and max(self.blocks, 1) * max(abs(page), abs(value_page)) > INT32_MAX:
            table = table.astype(np.int64)
        if not same_rows or page != value_page:
            value_table = table * table.dtype.type(value_page)
        table = np.multiply(table, table.dtype.type(page), out=table if overwrite else None)
        return StepIndex(
            seqstarts=self.starts, kvstarts=self.kvstarts, start_pos=self.lengths, load_starts=self.lengths,
            table=table, table_starts=self.table_starts, value_table=value_table, page_size=self.page_size,
            tokens=int(self.starts[-1]), context=int(self.kvstarts[-1]), rows=rows,
        )  # fmt: skip


def checked_contexts(
    block_tables: BlockTables,
    context_lens: ArrayLike,
    query_starts: ArrayLike | None,
    blocks: int,
    page_size: int,
    tokens: int | None,
) -> Contexts:
    """Check contexts in a pool of `blocks` pages; `tokens` counts the queries, None if it is unknown."""
    lengths = index("context_lens", context_lens)
    table, table_starts, largest, kvstarts = checked_table(block_tables, lengths, blocks, page_size)
    starts = checked_starts(query_starts, len(lengths), tokens)
    return Contexts(table, table_starts, lengths, starts, page_size, largest + 1, kvstarts)


def checked_plan(
    block_tables: BlockTables,
    context_lens: ArrayLike,
    query_starts: ArrayLike | None,
    page_size: SupportsIndex,
) -> Contexts:
    """Check the contexts of a plan, before its pools are known."""
    size = integer("page_size", page_size, 1, 2**31)  # so that sums of lengths fit int64
    return checked_contexts(block_tables, context_lens, query_starts, INT32_MAX, size, None)


def check_planned(planned: Contexts, name: str, tokens: int, pool_name: str, pool: Array) -> None:
    """Check that a plan has as many tokens, and that a pool has the plan's pages."""
    blocks, page_size = pool.shape[:2]
    if tokens != planned.starts[-1]:
        raise argument_error(name, f"the {planned.starts[-1]} tokens of the plan", tokens)
    if page_size != planned.page_size:
        raise argument_error(pool_name, f"pages of {planned.page_size} tokens, as the plan", page_size)
    if blocks < planned.blocks:
        raise argument_error(pool_name, f"at least the {planned.blocks} pages that the plan names", blocks)


def checked_starts(
    query_starts: ArrayLike | None,
    batch: int,
    tokens: int | None,
    names: tuple[str, str] = ("query", "context_lens"),
) -> Array:
    """Return where the queries of each sequence begin; without `query_starts` each sequence has one query.

    `names` are the arguments that the numbers of tokens and of sequences come from. `tokens` is None for a
    plan, which does not know them.
    """
    if query_starts is None:
        if tokens not in (batch, None):
            wanted = f"{batch} tokens, one for each of {names[1]} (or query_starts)"
            raise argument_error(names[0], wanted, tokens)
        return np.arange(batch + 1)
    starts = index("query_starts", query_starts, length=batch + 1)
    if starts[0] != 0:
        raise argument_error("query_starts", "to begin with 0", starts[0])
    falls = np.flatnonzero(starts[1:] < starts[:-1])
    if len(falls):
        entry = falls[0] + 1
        raise argument_error("query_starts", f"never to decrease (entry {entry})", starts[entry])
    if tokens not in (starts[-1], None):
        raise argument_error("query_starts", f"to end with the {tokens} tokens of {names[0]}", starts[-1])
    return starts


def checked_table(
    block_tables: BlockTables, lengths: Array, blocks: int, page_size: int
) -> tuple[Array, Array | None, int, Array]:
    """Check the pages of contexts, from a table [B, M] or (indptr, indices), as `Contexts` has them.

    Return (table, table_starts, the largest page in use, kvstarts). Entries after a context's last page are
    ignored.
    """
    if isinstance(block_tables, tuple):
        if len(block_tables) != 2:
            wanted = "[B, M], or a tuple (indptr, indices)"
            raise argument_error("block_tables", wanted, describe(block_tables))
        starts = index("block_tables", block_tables[0], length=len(lengths) + 1)
        table = index_form("block_tables", block_tables[1], 1).copy()  # int32 stays int32: half the memory
    else:
        starts, table = None, index("block_tables", block_tables, 2)
        if len(table) != len(lengths):
            raise argument_error("block_tables", f"{len(lengths)} rows, one for each length", len(table))
    scan = checks.scan
    verdict, kvstarts = scan.scan_contexts(lengths, table, starts, blocks, page_size)
    if verdict[0] != scan.FINE:
        raise scan.contexts_error(verdict, lengths, table, starts, blocks)
    if index_tensors.VALIDATES:
        rows = table
        if starts is not None:
            at = starts[:-1, None] + np.arange(-(-lengths // page_size).max(initial=0))
            rows = table.take(at, mode="clip") if len(table) else np.zeros(at.shape)
        validate_table(rows.astype(np.int64, copy=False), lengths, blocks, page_size)
    return table, starts, verdict[-1], kvstarts
