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
from kvkit.checks.records import ENDLESS, Context, MaskPlace, StepIndex
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
    array = integers(name, value, ndim, as_index=True)
    if length is not None and len(array) != length:
        raise argument_error(name, f"{length} entries", len(array))
    return array.astype(np.int64, order="C")


def index_form(name: str, value: ArrayLike, ndim: int) -> Array:
    """Return an index tensor as an array of the right dtype and number of axes, without reading elements."""
    return integers(name, value, ndim, as_index=True)


def static_step(batch: int, seqlen: int, kvlen: int) -> StepIndex:
    """Return the step of sequences of one length, each of which begins at row 0 of its own part."""
    counts, zeros = np.arange(batch + 1), np.zeros((batch, 1), np.int64)
    return StepIndex(
        seqstarts=counts * seqlen, kvstarts=counts * kvlen, start_pos=zeros[:, 0] + (kvlen - seqlen),
        load_starts=zeros[:, 0], table=zeros, page_size=ENDLESS, tokens=batch * seqlen,
        context=batch * kvlen, rows=kvlen,
    )  # fmt: skip


def read_step(
    tokens: tuple[str, object] | None,
    arguments: StepArguments,
    read_table: Callable[[str, ArrayLike, int], Array] = index,
) -> StepIndex:
    """Return a step whose tensors have the right dtypes, shapes and totals; its other rules are not checked.

    `tokens` is (name, array) of the packed tokens, None before they exist; another check reports what is no
    array of them. `read_table` is `index`, or `index_form`, which reads no element.
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
    batch = batch_of(seqstarts, kvstarts)
    for name, array, length in (
        ("start_pos", start_pos, batch), ("cachestarts", table, batch)
    ):  # fmt: skip
        if array.shape[0] != length:
            raise argument_error(name, f"{length} entries for {batch} sequences", array.shape[0])
    label, packed = tokens or ("", None)
    if isinstance(packed, np.ndarray) and packed.ndim == Packed.axes:
        check_last_start("seqstarts", seqstarts[-1], (label, len(packed)))
    return StepIndex(
        seqstarts, kvstarts, start_pos, load_starts=np.zeros(batch, np.int64), table=table,
        page_size=page_size, tokens=int(seqstarts[-1]), context=int(kvstarts[-1]), rows=0, limits=limits,
    )  # fmt: skip


def check_step(step: StepIndex, rows: int = INT64_MAX) -> StepIndex:
    """Check every length and row of a step in a cache of `rows` rows; return it with the rows that it needs.

    Its table may be on a device.
    """
    verdict = checks.scan.scan_step(step, rows)
    if verdict[0] != checks.scan.FINE:
        raise checks.scan.step_error(verdict, step._replace(table=np.asarray(step.table)), rows)
    step = step._replace(rows=verdict[1])
    if VALIDATES:
        validate_step(step)
    return step


def packed_contexts(arguments: ContextArguments) -> StepIndex:
    """Check a step over packed keys: the context of sequence b begins at row kvstarts[b]."""
    seqstarts, kvstarts = index("seqstarts", arguments.seqstarts), index("kvstarts", arguments.kvstarts)
    batch = batch_of(seqstarts, kvstarts)
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


def batch_of(seqstarts: Array, kvstarts: Array | None = None) -> int:
    """Return the number of sequences, which is one less than the entries of both; both begin with 0."""
    batch = len(seqstarts) - 1
    if batch < 0:
        raise argument_error("seqstarts", "an entry for each sequence, and one more", "no entries")
    if seqstarts[0] != 0:
        raise argument_error("seqstarts", "to begin with 0", seqstarts[0])
    if kvstarts is not None and len(kvstarts) != batch + 1:
        raise argument_error("kvstarts", f"{batch + 1} entries for {batch} sequences", len(kvstarts))
    if kvstarts is not None and kvstarts[0] != 0:
        raise argument_error("kvstarts", "to begin with 0", kvstarts[0])
    return batch


def check_last_start(starts: str, end: int, tokens: NamedLength) -> None:
    """Check that packed sequences, by the index tensor called `starts`, end with the array of tokens."""
    name, length = tokens
    if end != length:
        raise argument_error(starts, f"to end with the {length} tokens of {name}", end)


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

    def over_cache(self, name: str, tokens: Array, layer: Context) -> StepIndex:
        """Check that a layer has room for new tokens, in the array called `name`; return their step."""
        batch, seqlen, *_ = tokens.shape
        start = integer("start_pos", self.start_pos, 0)
        sequences, rows = layer.capacity
        if batch > sequences:
            raise argument_error("cache", f"room for {batch} sequences (MaxB)", sequences)
        if start > rows - seqlen:
            wanted = f"room for {seqlen} new tokens in {rows} positions (MaxS)"
            raise argument_error("start_pos", wanted, start)
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
    start_pos: ClassVar[int] = 0  # `steps` have that of each sequence
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

    def over_cache(self, name: str, tokens: Array, layer: Context) -> StepIndex:
        """Check that the step ends with the tokens, and that a layer has its rows; return it."""
        check_last_start("seqstarts", self.steps.tokens, (name, len(tokens)))
        if self.steps.rows > layer.capacity[1]:
            check_step(self.steps, layer.capacity[1])  # raises
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


def packed_in_cache(tokens: tuple[str, object] | None, arguments: StepArguments) -> Packed:
    """Check packed sequences in a cache; `tokens` is (name, array) of them, None before they exist."""
    steps = check_step(read_step(tokens, arguments))
    return Packed(steps, integer("decoding_batches", arguments.decoding_batches, 0, len(steps.start_pos)))


def packed_with_keys(arguments: ContextArguments) -> Packed:
    """Check packed sequences whose keys are packed too."""
    steps = packed_contexts(arguments)
    return Packed(steps, integer("decoding_batches", arguments.decoding_batches, 0, len(steps.start_pos)))


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
