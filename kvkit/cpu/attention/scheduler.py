"""Attention over a cache where it lies: units of work, who does them, and the walk over a context.

A unit is one sequence, one key head (or all of them) and up to 256 query rows; a query row is one query
head of one token. Up to 8 are a narrow tile, which reads the cache in place where vectors fit its rows; more
are wide tiles of 32, which share keys and values widened into scratch. A long context is split into parts
whose length depends on the shapes only; whoever finishes a unit's last part merges all in order. So results
depend on neither threads nor luck.
"""

import functools

import numpy as np

from kvkit.cpu import memory
from kvkit.cpu.attention.epilogue import finish, merge
from kvkit.cpu.attention.online_softmax import visible
from kvkit.cpu.attention.params import TASK
from kvkit.cpu.attention.walk import place_queries, walk
from kvkit.cpu.attention.work_items import NARROW, TILES, WIDE, power_of_two, sequence, shape_of, units_of
from kvkit.cpu.launches import WORKER
from kvkit.runtime.jit import callback, helper

count_up, record = memory.count_up, memory.record(TASK)


def schedule(worker, task_at):
    """Count units, items, and items of split units; sets them, and which tiles there are, in the task."""
    task = record(task_at)
    work = np.int64(0)
    wide = np.int64(0)
    task.tiles = task.products = 0
    for b in range(task.batch):
        _, kvlen, query_rows = sequence(task, b)
        task.products += query_rows * kvlen * task.heads
        if query_rows > NARROW:
            task.tiles |= WIDE
            wide += task.heads * (-(-query_rows // WIDE))
        elif query_rows:
            task.tiles |= power_of_two(query_rows)
    task.unit_tiles = min(max(wide // task.most_parts, 1), TILES)
    task.part_tokens = 2**62
    for b in range(task.batch):
        seqlen, kvlen, query_rows = sequence(task, b)
        if query_rows and (query_rows <= NARROW or task.unit_tiles == 1):
            low, _ = visible(task, b, seqlen, kvlen, 0)
            _, high = visible(task, b, seqlen, kvlen, seqlen - 1)
            work += (high - low) * units_of(task, b)[0]
    even = -(-work // task.most_parts)
    task.part_tokens = max(task.least_part, -(-even // task.block) * task.block)
    task.units = task.items = task.parts = 0
    for b in range(task.batch):
        units, parts = units_of(task, b)
        task.units += units
        task.items += units * parts
        task.parts += units * parts if parts > 1 else 0


def work(worker, task_at):
    """Take items until none is left."""
    task = record(task_at)
    scratch = task.scratch + worker * task.scratch_bytes
    b = first_item = first_unit = first_part = np.int64(0)
    units, parts = units_of(task, 0)
    item = count_up(task.counters)
    while item < task.items:
        while item >= first_item + units * parts:
            first_item, first_unit = first_item + units * parts, first_unit + units
            first_part += units * parts if parts > 1 else 0
            b += 1
            units, parts = units_of(task, b)
        unit, part = (item - first_item) // parts, (item - first_item) % parts
        slots = task.partials + (first_part + unit * parts) * task.part_bytes if parts > 1 else 0
        attend(task, scratch, b, unit, part, parts, slots)
        if parts > 1 and count_up(task.counters + 8 * (1 + first_unit + unit)) == parts - 1:
            merge(task, scratch, b, unit, parts, slots)
        item = count_up(task.counters)


@helper
def attend(task, scratch, b, unit, part, parts, slots):
    """One part of a unit: its query rows over a range of its context."""
    seqlen, kvlen, query_rows = sequence(task, b)
    tile, tiles, row, head, by_head = shape_of(task, b, unit)
    low, _ = visible(task, b, seqlen, kvlen, row // task.group)
    last = min(query_rows, row + (tile if by_head else tile * tiles)) - 1
    _, high = visible(task, b, seqlen, kvlen, last // task.group)
    if parts > 1:
        low = min(low + part * task.part_tokens, high)  # query rows that see less may have nothing to do
        high = min(high, low + task.part_tokens)
    place_queries(task, scratch, b, tile, tiles, row, head, by_head)
    walk(task, scratch, b, low, high, tile, tiles, row, head, by_head, False)
    if not finish(task, scratch, b, tile, tiles, row, head, by_head, part, slots, False):
        walk(task, scratch, b, low, high, tile, tiles, row, head, by_head, True)
        finish(task, scratch, b, tile, tiles, row, head, by_head, part, slots, True)


@functools.cache
def code(function):
    """`schedule` or `work` as machine code."""
    return callback({"schedule": schedule, "work": work}[function], WORKER, function)
