"""The index tensors of a step: checked once, then where each sequence's tokens are packed and lie."""

import numpy as np

from kvkit import checks
from kvkit.checks import validation
from kvkit.checks.records import Steps
from kvkit.checks.values import choice, integer
from kvkit.errors import KvkitError, argument_error
from kvkit.layouts.places import ENDLESS

INT64_MAX = np.iinfo(np.int64).max
AXES = {1: "axis", 2: "axes"}


def index(name, value, ndim=1, length=None):
    """A copy of an index tensor as int64: kernels trust what was checked, whoever changes the original."""
    array = of_form(name, value, ndim)
    if length is not None and len(array) != length:
        raise argument_error(name, f"{length} entries", len(array))
    return array.astype(np.int64, order="C")


def of_form(name, value, ndim):
    """An index tensor of the right type and number of axes, whose elements nobody has read."""
    try:
        array = np.asarray(value)
    except ValueError:
        raise argument_error(name, f"{ndim} {AXES[ndim]}", "rows of different lengths") from None
    if array.size == 0 and not isinstance(value, np.ndarray):
        array = array.astype(np.int64)  # numpy takes [] for floats
    if array.dtype != np.int64 and array.dtype != np.int32:
        raise argument_error(name, "integers of dtype int64 or int32", array.dtype)
    if array.ndim != ndim:
        raise argument_error(name, f"{ndim} {AXES[ndim]}", f"shape {array.shape}")
    return array


def has_room(batch, seqlen, start_pos, cache):
    """Check that a cache with a part for each sequence has rows for new tokens from a position on."""
    sequences, rows = cache.capacity
    if batch > sequences:
        raise argument_error("cache", f"room for {batch} sequences (MaxB)", sequences)
    if start_pos > rows - seqlen:
        raise argument_error(
            "start_pos", f"room for {seqlen} new tokens in {rows} positions (MaxS)", start_pos
        )


def equal(batch, seqlen, kvlen):
    """Sequences of one length as packed ones, each from row 0 of a part of its own."""
    counts, zeros = np.arange(batch + 1), np.zeros((batch, 1), np.int64)
    first, sizes = zeros[:, 0], (batch * seqlen, batch * kvlen, kvlen)
    return Steps(counts * seqlen, counts * kvlen, first + (kvlen - seqlen), first, zeros, ENDLESS, *sizes)


def dynamic(tokens, **index_tensors):
    """Check every length and every row of a step, but for the size of the cache: see `fits`.

    `tokens` is (name, length) of an array of packed tokens, or None if there is none yet.
    """
    return checked(unchecked(tokens, **index_tensors))


def unchecked(
    tokens,
    *,
    seqstarts,
    kvstarts,
    cachestarts,
    start_pos,
    max_seqlen,
    max_kvlen,
    cache_mode,
    page_size,
    take=index,
):
    """A step of the right types, shapes and totals. `take` makes its table: `index`, or `of_form`, which
    reads nothing.
    """
    seqstarts, kvstarts = index("seqstarts", seqstarts), index("kvstarts", kvstarts)
    start_pos = index("start_pos", start_pos)
    mode = choice("cache_mode", cache_mode, (0, 1))
    try:
        table = take("cachestarts", cachestarts, mode + 1)
    except KvkitError as error:
        other = "offsets [B]; cache_mode=1 takes a page table" if mode == 0 else "a page table [B, MaxP]"
        raise KvkitError(f"{error} (cache_mode {mode} takes {other})") from None
    if mode == 0:
        table, page_size = table.reshape(-1, 1), ENDLESS
    else:
        page_size = min(integer("page_size", page_size, 1), ENDLESS)
    batch = seqstarts.shape[0] - 1
    for name, array, length in (
        ("seqstarts", seqstarts, max(batch, 0) + 1),
        ("kvstarts", kvstarts, batch + 1),
        ("start_pos", start_pos, batch),
        ("cachestarts", table, batch),
    ):
        if array.shape[0] != length:
            raise argument_error(name, f"{length} entries for {max(batch, 0)} sequences", array.shape[0])
    begin_with_0(seqstarts, kvstarts)
    if tokens:
        ends_with("seqstarts", seqstarts[-1], tokens)
    limits = hint("max_seqlen", max_seqlen), hint("max_kvlen", max_kvlen)
    return Steps(
        seqstarts, kvstarts, start_pos, np.zeros(batch, np.int64), table, page_size,
        int(seqstarts[-1]), int(kvstarts[-1]), 0, limits,
    )  # fmt: skip


def checked(step):
    """The step with the rows that it needs, if it breaks no rule."""
    step = step._replace(rows=scanned(step, INT64_MAX))
    validation.step(step)
    return step


def packed(seqstarts, kvstarts, max_seqlen, max_kvlen):
    """A step over keys that are packed themselves: sequence b's context begins at row kvstarts[b]."""
    seqstarts, kvstarts = index("seqstarts", seqstarts), index("kvstarts", kvstarts)
    batch = seqstarts.shape[0] - 1
    if batch < 0:
        raise argument_error("seqstarts", "1 entries for 0 sequences", 0)
    if kvstarts.shape[0] != batch + 1:
        raise argument_error("kvstarts", f"{batch + 1} entries for {batch} sequences", kvstarts.shape[0])
    begin_with_0(seqstarts, kvstarts)
    for name, starts, limit_name, limit in (
        ("seqstarts", seqstarts, "max_seqlen", max_seqlen),
        ("kvstarts", kvstarts, "max_kvlen", max_kvlen),
    ):
        falls = starts[1:] < starts[:-1]
        if falls.any():
            entry = falls.argmax() + 1
            raise argument_error(name, f"never to decrease (entry {entry})", starts[entry])
        lengths, limit = starts[1:] - starts[:-1], hint(limit_name, limit)
        if batch and lengths.max() > limit:
            b = int(lengths.argmax())
            raise argument_error(limit_name, f"at least {lengths[b]}, the length of sequence {b}", limit)
    table, zeros = kvstarts[:-1].reshape(-1, 1), np.zeros(batch, np.int64)
    tokens, context = int(seqstarts[-1]), int(kvstarts[-1])
    return Steps(seqstarts, kvstarts, zeros, zeros, table, ENDLESS, tokens, context, context)


def begin_with_0(seqstarts, kvstarts):
    for name, starts in (("seqstarts", seqstarts), ("kvstarts", kvstarts)):
        if starts[0] != 0:
            raise argument_error(name, "to begin with 0", starts[0])


def ends_with(starts, end, tokens):
    """Check that packed sequences end where an array does."""
    name, length = tokens
    if end != length:
        raise argument_error(starts, f"to end with the {length} tokens of {name}", end)


def fits(step, tokens, cache):
    """Check a step against the tokens of an array and the rows of a cache."""
    ends_with("seqstarts", step.tokens, tokens)
    if step.rows > cache.capacity[1]:
        scanned(step, cache.capacity[1])


def scanned(step, rows):
    """How many rows of a cache with `rows` a step needs, or the error for the first rule it breaks."""
    if not isinstance(step.table, np.ndarray):
        step = step._replace(table=np.asarray(step.table))
    found = checks.scan.scan(step, rows)
    if found[0]:
        raise broken_rule(
            found, step.seqstarts, step.start_pos, step.table, step.page_size, rows, step.limits
        )
    return found[1]


def stored_runs(step):
    """How many runs of rows a step stores, or the error for what its lengths break; its table is not read."""
    found = checks.scan.scan_lengths(step)
    if found[0]:
        raise broken_rule(found, step.seqstarts, step.start_pos, step.table, step.page_size, 0, step.limits)
    return found[1]


def hint(name, value):
    """max_seqlen or max_kvlen: None knows no limit."""
    return INT64_MAX if value is None else min(max(integer(name, value), -1), INT64_MAX)


def broken_rule(found, seqstarts, start_pos, table, page_size, rows, limits):
    """The error for what `scan` found."""
    scan = checks.scan
    rule, b, one, two = found
    if rule == scan.STARTS:
        return argument_error(("seqstarts", "kvstarts")[one], f"never to decrease (entry {b + 1})", two)
    if rule == scan.LENGTHS:
        if start_pos[b] < 0:
            return argument_error("start_pos", f"at least 0 for sequence {b}", start_pos[b])
        need = f"start_pos + new tokens = {start_pos[b]} + {one} for sequence {b}"
        return argument_error("kvstarts", f"a length of {need}", two)
    if rule == scan.HINT:
        return argument_error(
            ("max_seqlen", "max_kvlen")[one], f"at least {two}, the length of sequence {b}", limits[one]
        )
    if rule == scan.PAGES:
        need = f"{one} pages for the {two} tokens of sequence {b} (page_size {page_size})"
        return argument_error("cachestarts", need, table.shape[1])
    # Page tables of other engines hold the numbers of pages.
    pages = (
        "" if page_size == ENDLESS else f" (a page begins at its number * page_size, which is {page_size})"
    )
    if rule == scan.ROW:
        entry = f"cachestarts[{b}]" if page_size == ENDLESS else f"cachestarts[{b}, {one // page_size}]"
        start = table[b, 0 if page_size == ENDLESS else one // page_size]
        wanted = "rows from 0 on" if rows == INT64_MAX else f"rows within the {rows} of the cache"
        return argument_error(entry, wanted, f"{start}: position {one} is in row {two}{pages}")
    if rule == scan.STORED_TWICE:
        who = f"sequence {b} stores twice" if b == one else f"sequences {b} and {one} both store"
        return argument_error("cachestarts", "rows stored once", f"row {two}, which {who}{pages}")
    return argument_error(
        "cachestarts",
        "stored rows that hold no other token",
        f"row {two}, which sequence {b} stores and sequence {one} has as a past token{pages}",
    )
