"""Choose the distances of prefetches by measurement, for processors that nobody measured: `kvkit warm`.

A decoding step over a small cache that was flushed from all caches stands for any size. One thread runs it,
timed by its own clock, which other processes do not advance. Candidates run in turn with today's distances, A
B A C A ..; a ratio is a time to the mean of its two neighbours.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numba
import numpy as np

from kvkit import dynamic_batching
from kvkit.cpu import prefetching
from kvkit.cpu.cold import flush
from kvkit.cpu.prefetching import KB, Distance, Distances
from kvkit.runtime import arrays

SECONDS = 3.0  # for four questions, and for one of them again if times differed too much
SIZE, KV_HEADS, SEQUENCES, DIM = 8 * 2**20, 16, 2, 128  # bytes of the cache, and its shape
PAGE_ROWS = 16  # tokens of the short pages
MARGIN = 0.97  # a candidate must take less than this share of the time
SPREAD = 0.15  # of today's times, between quartiles, above which the machine is too busy to choose
FEWEST, DROP_AFTER, BEHIND = 5, (5, 10), 0.04  # rounds; rounds after which losers, so far behind, are dropped
FIELD_OF_ROWS = {1: "one_row", 4: "four_rows", 8: "eight_rows"}  # of distances, by query rows
Probe = Callable[[], object]


class Question(NamedTuple):
    """A question to the machine: which of some distances decodes fastest with these rows and pages."""

    rows: int  # query rows of a key head
    page: int  # tokens of a page; 0 without pages
    candidates: list[Distances]


class Timings(NamedTuple):
    """Seconds of today's distances, and the ratios of candidates to them, {candidate: ratios}."""

    today: list[float]
    ratios: dict[Distances, list[float]]


def obstacle() -> str:
    """Return why distances cannot be measured or kept here; "" if they can."""
    if not prefetching.is_tuning():
        return f"{prefetching.TUNE}=off"
    if prefetching.tuned_file() is None:
        return "no compiled code is kept"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"caches are not flushed on {platform.machine()}"
    if time.get_clock_info("thread_time").resolution > 1e-6:
        return "threads have no clock of their own"
    return ""


def tune(seconds: float = SECONDS) -> str:
    """Measure this machine's distances, unless they are kept, and keep them; return what was done."""
    reason = obstacle()
    if reason:
        return f"not measured: {reason}"
    default, _ = prefetching.of_this_machine()
    if prefetching.load(default) is not None:
        return "already measured"
    grid = [Distance(size * KB, near) for near in (False, True) for size in (2, 3, 4, 8, 16)]
    pages = [(touched, twice) for touched in (0, 8 * KB) for twice in (0, 4 * KB)]
    questions = [  # each candidate differs from `default` in the fields of its question
        *(Question(rows, 0, [with_field(default, field, each) for each in grid])
          for rows, field in FIELD_OF_ROWS.items()),
        Question(1, PAGE_ROWS, [default._replace(touched_run=t, short_run=s) for t, s in pages]),
    ]  # fmt: skip
    found, again = default, True
    for question in questions:
        best = answer(question, found, seconds / 5)
        if best is None and again:
            best, again = answer(question, found, seconds / 5), False
        if best is None:
            return "not chosen, because times differ too much now: ask again when the machine is idle"
        found = best
    prefetching.save(found)
    return describe(found)


def describe(distances: Distances) -> str:
    """Return the distances as text."""
    words = [
        f"{name} {distance.bytes / KB:g} KB into {'L1' if distance.near else 'L2'}"
        for name, distance in (
            ("1 row", distances.one_row), ("4 rows", distances.four_rows), ("8 rows", distances.eight_rows),
        )
    ]  # fmt: skip
    if distances.touched_run:
        words.append("short pages touched early")
    if distances.short_run:
        words.append("short pages prefetched twice")
    return ", ".join(words)


def answer(question: Question, today: Distances, seconds: float) -> Distances | None:
    """Return the best distances for a question; None if times differ too much to choose."""
    candidates = [merged(today, candidate, question) for candidate in question.candidates]
    candidates = [candidate for candidate in dict.fromkeys(candidates) if candidate != today]
    return choice(measure(question, today, candidates, seconds), today)


def merged(today: Distances, candidate: Distances, question: Question) -> Distances:
    """Return today's distances with the fields that the question asks for."""
    if question.page:
        return today._replace(touched_run=candidate.touched_run, short_run=candidate.short_run)
    field = FIELD_OF_ROWS[question.rows]
    return with_field(today, field, getattr(candidate, field))


def with_field(distances: Distances, field: str, distance: Distance) -> Distances:
    """Return the distances with another one in a field."""
    changed: dict[str, Any] = {field: distance}
    return distances._replace(**changed)


def choice(timings: Timings, today: Distances) -> Distances | None:
    """Return the distances that are clearly fastest, else today's; None if today's times differ too much."""
    if len(timings.today) < FEWEST:
        return None
    low, middle, high = statistics.quantiles(timings.today, n=4, method="inclusive")
    if high - low > SPREAD * middle:
        return None
    fair = {candidate: ratios for candidate, ratios in timings.ratios.items() if len(ratios) >= FEWEST}
    best = min(fair, key=lambda candidate: statistics.median(fair[candidate]), default=today)
    if best == today:
        return today
    quartiles = statistics.quantiles(fair[best], n=4, method="inclusive")
    return best if quartiles[1] < MARGIN and quartiles[2] < 1 else today


def measure(question: Question, today: Distances, candidates: Sequence[Distances], seconds: float) -> Timings:
    """Time decoding steps in turn, on one thread, until the seconds are over."""
    threads = numba.get_num_threads()
    numba.set_num_threads(1)
    try:
        cache, step_with = decoding_step(question)
        steps = {distances: step_with(distances) for distances in (today, *candidates)}

        def timed(distances: Distances) -> float:
            flush.code.ctypes(cache.ctypes.data, cache.nbytes)
            begin = time.thread_time()
            steps[distances]()
            return time.thread_time() - begin

        return take_turns(timed, today, list(candidates), seconds)
    finally:
        numba.set_num_threads(threads)


def take_turns(
    timed: Callable[[Distances], float], today: Distances, alive: list[Distances], seconds: float
) -> Timings:
    """Time candidates in turn with today's distances; drop those that are behind the best."""
    end, timings, rounds = time.perf_counter() + seconds, Timings([timed(today)], {}), 0
    while time.perf_counter() < end and alive:
        for candidate in alive:
            own, before = timed(candidate), timings.today[-1]
            timings.today.append(timed(today))
            ratio = 2 * own / (before + timings.today[-1])
            timings.ratios.setdefault(candidate, []).append(ratio)
        rounds += 1
        if rounds in DROP_AFTER:
            medians = {candidate: statistics.median(timings.ratios[candidate]) for candidate in alive}
            best = min(medians.values())
            alive = [candidate for candidate in alive if medians[candidate] < best + BEHIND]
    return timings


def decoding_step(question: Question) -> tuple[np.ndarray, Callable[[Distances], Probe]]:
    """Return a float16 cache, and f(distances), which prepares a decoding step over it."""
    rng, tokens = np.random.default_rng(0), SIZE // (SEQUENCES * KV_HEADS * DIM * 4)
    cache = arrays.zeros((1, 2, KV_HEADS, SEQUENCES * tokens, DIM), np.float16)
    heads, starts = KV_HEADS * question.rows, np.arange(SEQUENCES + 1) * tokens
    query = rng.standard_normal((SEQUENCES, heads, DIM)).astype(np.float16)
    new, out = np.zeros((SEQUENCES, KV_HEADS, DIM), np.float16), np.empty_like(query)
    where: dict[str, Any] = {
        "seqstarts": np.arange(SEQUENCES + 1),
        "kvstarts": starts,
        "cachestarts": starts[:-1],
    }
    if question.page:
        pages = rng.permutation(SEQUENCES * tokens // question.page) * question.page
        where |= {"cachestarts": pages.reshape(SEQUENCES, -1)}
        where |= {"cache_mode": 1, "page_size": question.page}
    sizes: dict[str, Any] = {"num_heads": heads, "num_kv_heads": KV_HEADS, "head_dim": DIM, "cache_layout": 3}

    def step_with(distances: Distances) -> Probe:
        plan = dynamic_batching.plan(**where, start_pos=np.full(SEQUENCES, tokens - 1))

        def step() -> object:
            return plan.multi_head_cache_attention(query, new, new, cache, None, out=out, **sizes)

        with prefetching.using(distances):
            step()  # prepares the call
        return step

    return cache, step_with
