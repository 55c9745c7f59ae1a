"""Check the index tensors of a step, which say where tokens are packed and which rows they have."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from kvkit import checks
from kvkit.checks.arguments import ContextArguments, StepArguments
from kvkit.checks.masks import dynamic_mask, static_mask
from kvkit.checks.records import ENDLESS, CacheLayer, MaskPlace, StepIndex
from kvkit.checks.values import choice, integer
from kvkit.errors import KvkitError, argument_error
from kvkit.formats.elements import Element
from kvkit.interop import integers
from kvkit.layouts import pmx
from kvkit.layouts.grammar import Layout
from kvkit.typed import Array

INT64_MAX = np.iinfo(np.int64).max
NamedLength = tuple[str, int]  # the name of an array, and its length
# With KVKIT_VALIDATE=1 in the environment, operators also refuse tables that can be read but are wrong. It is
# read once: a look-up takes a microsecond of each call.
VALIDATES = os.environ.get("KVKIT_VALIDATE", "0") not in ("", "0")


def index(name: str, value: ArrayLike, ndim: int = 1, length: int | None = None) -> Array:
    """Copy an index tensor as int64, so that kernels read the checked numbers even if it changes later."""
    array = index_form(name, value, ndim)
    if length is not None and len(array) != length:
        raise argument_error(name, f"{length} entries", len(array))
    return array.astype(np.int64, order="C")


def index_form(name: str, value: ArrayLike, ndim: int) -> Array:
    """Return an index tensor as an array of the right dtype and number of axes, without reading elements."""
    return integers(name, value, ndim, as_index=True)


def check_static_room(batch: int, seqlen: int, start_pos: int, layer: CacheLayer) -> None:
    """Check that a static cache has room for `seqlen` new tokens of each sequence from `start_pos` on."""
    sequences, rows = layer.capacity
    if batch > sequences:
        raise argument_error("cache", f"room for {batch} sequences (MaxB)", sequences)
    if start_pos > rows - seqlen:
        wanted = f"room for {seqlen} new tokens in {rows} positions (MaxS)"
        raise argument_error("start_pos", wanted, start_pos)


def static_step(batch: int, seqlen: int, kvlen: int) -> StepIndex:
    """Return the step of sequences of one length, each of which begins at row 0 of its own part."""
    counts, zeros = np.arange(batch + 1), np.zeros((batch, 1), np.int64)
    return StepIndex(
        seqstarts=counts * seqlen, kvstarts=counts * kvlen, start_pos=zeros[:, 0] + (kvlen - seqlen),
        load_starts=zeros[:, 0], table=zeros, page_size=ENDLESS, tokens=batch * seqlen,
        context=batch * kvlen, rows=kvlen,
    )  # fmt: skip


def packed_tokens(name: str, array: Array) -> NamedLength | None:
    """Return the name and number of packed tokens; None if `array` is no array (another check reports it)."""
    return (name, len(array)) if isinstance(array, np.ndarray) and array.ndim == 3 else None


def checked_step(tokens: NamedLength | None, arguments: StepArguments) -> StepIndex:
    """Check every length and every row of a step, but for the size of the cache, which `check_room` checks.

    `tokens` is (name, length) of the array of packed tokens, None before it exists.
    """
    return check_step(read_step(tokens, arguments))


def read_step(
    tokens: NamedLength | None,
    arguments: StepArguments,
    read_table: Callable[[str, ArrayLike, int], Array] = index,
) -> StepIndex:
    """Return a step whose tensors have the right dtypes, shapes and totals; its other rules are not checked.

    `read_table` is `index`, or `index_form`, which reads no element.
    """
    paged, page_size = choice("cache_mode", arguments.cache_mode, (0, 1)), ENDLESS
    if paged:
        page_size = min(integer("page_size", arguments.page_size, 1), ENDLESS)
    limits = limit("max_seqlen", arguments.max_seqlen), limit("max_kvlen", arguments.max_kvlen)
    seqstarts, kvstarts = index("seqstarts", arguments.seqstarts), index("kvstarts", arguments.kvstarts)
    start_pos = index("start_pos", arguments.start_pos)
    try:
        table = read_table("cachestarts", arguments.cachestarts, 2 if paged else 1)
    except KvkitError as error:
        if isinstance(arguments.cachestarts, np.ma.MaskedArray):
            raise  # the mode has no part in it
        legal = "a page table [B, MaxP]" if paged else "offsets [B]; cache_mode=1 takes a page table"
        raise KvkitError(f"{error} (cache_mode {paged} takes {legal})") from None
    if not paged:
        table = table.reshape(-1, 1)
    batch = batch_of(seqstarts)
    for name, array, length in (
        ("kvstarts", kvstarts, batch + 1), ("start_pos", start_pos, batch), ("cachestarts", table, batch)
    ):  # fmt: skip
        if array.shape[0] != length:
            raise argument_error(name, f"{length} entries for {batch} sequences", array.shape[0])
    check_first_start(kvstarts)
    if tokens:
        check_last_start("seqstarts", seqstarts[-1], tokens)
    return StepIndex(
        seqstarts, kvstarts, start_pos, load_starts=np.zeros(batch, np.int64), table=table,
        page_size=page_size, tokens=int(seqstarts[-1]), context=int(kvstarts[-1]), rows=0, limits=limits,
    )  # fmt: skip


def check_step(step: StepIndex) -> StepIndex:
    """Check the rules of a step; return it with the number of rows that it needs."""
    step = step._replace(rows=scanned_rows(step, INT64_MAX))
    if VALIDATES:
        validate_step(step)
    return step


def packed_contexts(arguments: ContextArguments) -> StepIndex:
    """Check a step over packed keys: the context of sequence b begins at row kvstarts[b]."""
    seqstarts, kvstarts = index("seqstarts", arguments.seqstarts), index("kvstarts", arguments.kvstarts)
    batch = batch_of(seqstarts)
    if len(kvstarts) != batch + 1:
        raise argument_error("kvstarts", f"{batch + 1} entries for {batch} sequences", len(kvstarts))
    check_first_start(kvstarts)
    for name, starts, limit_name, caller_limit in (
        ("seqstarts", seqstarts, "max_seqlen", arguments.max_seqlen),
        ("kvstarts", kvstarts, "max_kvlen", arguments.max_kvlen),
    ):
        falls = starts[1:] < starts[:-1]
        if falls.any():
            entry = falls.argmax() + 1
            raise argument_error(name, f"never to decrease (entry {entry})", starts[entry])
        lengths, longest = starts[1:] - starts[:-1], limit(limit_name, caller_limit)
        if batch and lengths.max() > longest:
            b = int(lengths.argmax())
            raise argument_error(limit_name, f"at least {lengths[b]}, the length of sequence {b}", longest)
    table, zeros = kvstarts[:-1].reshape(-1, 1), np.zeros(batch, np.int64)
    tokens, context = int(seqstarts[-1]), int(kvstarts[-1])
    return StepIndex(
        seqstarts, kvstarts, start_pos=zeros, load_starts=zeros, table=table, page_size=ENDLESS,
        tokens=tokens, context=context, rows=context,
    )  # fmt: skip


def batch_of(seqstarts: Array) -> int:
    """Return the number of sequences, which is one less than the entries of seqstarts."""
    if not len(seqstarts):
        raise argument_error("seqstarts", "an entry for each sequence, and one more", "no entries")
    if seqstarts[0] != 0:
        raise argument_error("seqstarts", "to begin with 0", seqstarts[0])
    return len(seqstarts) - 1


def check_first_start(kvstarts: Array) -> None:
    """Check that packed contexts begin with 0, as `batch_of` checks for sequences."""
    if kvstarts[0] != 0:
        raise argument_error("kvstarts", "to begin with 0", kvstarts[0])


def check_last_start(starts: str, end: int, tokens: NamedLength) -> None:
    """Check that packed sequences, by the index tensor called `starts`, end with the array of tokens."""
    name, length = tokens
    if end != length:
        raise argument_error(starts, f"to end with the {length} tokens of {name}", end)


def check_room(step: StepIndex, tokens: NamedLength, layer: CacheLayer) -> None:
    """Check a step against the tokens of an array and the rows of a cache."""
    check_last_start("seqstarts", step.tokens, tokens)
    if step.rows > layer.capacity[1]:
        scanned_rows(step, layer.capacity[1])


def scanned_rows(step: StepIndex, rows: int) -> int:
    """Return how many rows a step needs in a cache of `rows` rows, or raise the error for a broken rule."""
    if not isinstance(step.table, np.ndarray):  # a table on a device, which checks may copy
        step = step._replace(table=np.asarray(step.table))
    verdict = checks.scan.scan_step(step, rows)
    if verdict[0] != checks.scan.FINE:
        raise checks.scan.step_error(verdict, step, rows)
    return verdict[1]


def stored_runs(step: StepIndex) -> int:
    """Return how many runs of rows a step stores; raise if its lengths are wrong. Its table is not read."""
    verdict = checks.scan.scan_lengths(step)
    if verdict[0] != checks.scan.FINE:
        raise checks.scan.step_error(verdict, step, 0)
    return verdict[1]


def limit(name: str, value: SupportsIndex | None) -> int:
    """Return a checked max_seqlen or max_kvlen; None means no limit."""
    return INT64_MAX if value is None else min(max(integer(name, value), -1), INT64_MAX)


# `Static` and `Packed` say how the sequences of a call lie in its arrays. Static and dynamic operators differ
# in nothing else: a static cache is offset mode with a stride between sequences.


@dataclass(frozen=True, slots=True)
class Static:
    """Sequences of one length, [B, S, ..], each with its own part of the cache."""

    start_pos: SupportsIndex = 0  # checked when it is used
    steps: StepIndex | None = None  # the step of the new tokens, if it is known already
    decoding: ClassVar[int] = 0
    axes: ClassVar[int] = 4  # of an array of tokens
    layouts: ClassVar[tuple[Layout, ...]] = pmx.STATIC

    def over_keys(self, query: Array, key: Array) -> StepIndex:
        """Return the step of queries that attend to a whole context."""
        batch, seqlen, *_ = query.shape
        return static_step(batch, seqlen, key.shape[1])

    def over_cache(self, name: str, tokens: Array, layer: CacheLayer) -> StepIndex:
        """Check that a layer has room for new tokens, in the array called `name`; return their step."""
        batch, seqlen, *_ = tokens.shape
        start = integer("start_pos", self.start_pos, 0)
        check_static_room(batch, seqlen, start, layer)
        return static_step(batch, seqlen, start + seqlen) if self.steps is None else self.steps

    def key_axes(self, query: Array) -> tuple[int | None, ...]:
        """Return the sizes of keys before heads, None where any is legal."""
        return query.shape[0], None

    def context_axes(self, steps: StepIndex) -> tuple[int, ...]:
        """Return the sizes of gathered keys before heads."""
        return len(steps.start_pos), steps.rows

    def mask(self, fmt: Element, attn_mask: Array | None, query: Array, steps: StepIndex) -> MaskPlace:
        """Return the checked mask's address and strides."""
        batch, seqlen, num_heads, _ = query.shape
        return static_mask(fmt, attn_mask, batch, num_heads, seqlen, steps.rows)


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences of any lengths, one after the other, [tokens, ..], which share a pool of rows."""

    steps: StepIndex  # checked, but not against arrays
    decoding: int = 0
    axes: ClassVar[int] = 3
    layouts: ClassVar[tuple[Layout, ...]] = pmx.DYNAMIC

    def tensors(self, operator: str) -> dict[str, object]:
        """Return the index tensors of the step that an operator takes, by name."""
        steps, paged = self.steps, self.steps.page_size != ENDLESS
        table = np.asarray(steps.table)
        tensors: dict[str, object] = {
            "seqstarts": steps.seqstarts, "kvstarts": steps.kvstarts, "start_pos": steps.start_pos,
            "cachestarts": table if paged else table[:, 0],
        }  # fmt: skip
        if "attention" in operator:
            tensors["decoding_batches"] = self.decoding
        return tensors | ({"cache_mode": 1, "page_size": steps.page_size} if paged else {})

    def over_keys(self, query: Array, key: Array) -> StepIndex:
        """Check that the step ends with the queries and the keys; return it."""
        check_last_start("seqstarts", self.steps.tokens, ("query", len(query)))
        check_last_start("kvstarts", self.steps.context, ("key", len(key)))
        return self.steps

    def over_cache(self, name: str, tokens: Array, layer: CacheLayer) -> StepIndex:
        """Check that the step ends with the tokens, and that a layer has its rows; return it."""
        check_room(self.steps, (name, len(tokens)), layer)
        return self.steps

    def key_axes(self, query: Array) -> tuple[int | None, ...]:
        """Return the sizes of keys before heads, None where any is legal."""
        return (None,)

    def context_axes(self, steps: StepIndex) -> tuple[int, ...]:
        """Return the sizes of gathered keys before heads."""
        return (steps.context,)

    def mask(self, fmt: Element, attn_mask: Array | None, query: Array, steps: StepIndex) -> MaskPlace:
        """Return the checked mask's address and strides."""
        return dynamic_mask(fmt, attn_mask, query.shape[1], steps.tokens, steps.context)


Sequences = Static | Packed


def packed_in_cache(tokens: NamedLength | None, arguments: StepArguments) -> Packed:
    """Check packed sequences in a cache; `tokens` is (name, length) of their array, None before it exists."""
    steps = checked_step(tokens, arguments)
    return Packed(steps, decoding_count(arguments.decoding_batches, steps))


def packed_with_keys(arguments: ContextArguments) -> Packed:
    """Check packed sequences whose keys are packed too."""
    steps = packed_contexts(arguments)
    return Packed(steps, decoding_count(arguments.decoding_batches, steps))


def decoding_count(decoding_batches: SupportsIndex, steps: StepIndex) -> int:
    """Return how many sequences ignore the causal mask."""
    return integer("decoding_batches", decoding_batches, 0, len(steps.start_pos))


def validate_table(table: Array, lengths: Array, blocks: int, page_size: int) -> None:
    """Check the rules of page tables for a call that reads pages, if the environment asks for it."""
    if VALIDATES:
        rules = checks.table_rules
        rules.check_tables("block_tables", rules.tables_in_use(table, lengths, blocks, page_size))


def validate_step(step: StepIndex) -> None:
    """Check the page table of a step, if it has one, and the pages that its new tokens are stored in."""
    if step.page_size == ENDLESS:
        return
    rules, size = checks.table_rules, step.page_size
    lengths = np.diff(step.kvstarts)
    table = np.asarray(step.table)
    tables = rules.tables_in_use(table, lengths, step.rows, size)
    columns = np.arange(table.shape[1])
    stored = (columns >= step.start_pos[:, None] // size) & (columns < rules.pages_of(lengths, size)[:, None])
    rules.check_tables("cachestarts", tables, table[stored & (np.diff(step.seqstarts) > 0)[:, None]])
