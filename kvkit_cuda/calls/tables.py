"""The int64 tables of a step on the device: its index tensors, and what is made of them for attention."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvkit.index import visible_range
from kvkit_cuda.ground import device
from kvkit_cuda.positions.alibi import slope_bits

STEP = ("seqstarts", "kvstarts", "start_pos", "zeros", "table")
PARTS, LEAST_PART = 2048, 256  # a call's work is split into so many parts, of at least so many tokens


class Tables:
    """The tables of a step, by name, and scratch: copied to the device once, together, and kept there.

    Lasting ones serve calls on any stream, others only the one that they were copied on.
    """

    def __init__(self, steps, lasting, **there: object):
        self.steps, self.lasting = steps, lasting
        names = [name for name in STEP if name not in there]
        self.waiting: dict[object, np.ndarray] = {name: getattr(steps, name) for name in names}
        self.there: dict[object, object] = {name: there[name] for name in there}
        self.works: dict[object, Work] = {}
        self.scratch: dict[int, Any] = {}

    def of(self, names, stream):
        """Tables on the device; all that wait go there in one copy."""
        if not all(name in self.there for name in names):
            arrays = device.tables(tuple(self.waiting.values()), stream)
            if self.lasting:
                device.finish(stream)
            self.there |= dict(zip(self.waiting, arrays, strict=True))
            self.waiting = {}
        return [self.there[name] for name in names]

    def work(self, task, rows, most=0):
        """How a call of attention is shared out in tiles of so many rows; its tables wait with the others."""
        most = most or PARTS
        reach = task.decoding, task.causal, task.alibi, task.left, task.right
        key = rows, most, task.heads, task.group, *reach
        if key not in self.works:
            self.works[key] = work = shared_out(task, self.steps, rows, most, key)
            self.waiting |= {("items", key): work.items, ("slots", key): work.slots}
        slopes = "slopes", task.heads * task.group
        if slopes not in self.there:
            self.waiting[slopes] = slope_bits(slopes[1])
        return self.works[key]

    def memory(self, size, stream):
        """The address of so much device memory; the calls on a stream share it, one after the other."""
        if not size:
            return 0
        owner = device.number(stream)
        if owner not in self.scratch or self.scratch[owner].size < size:
            self.scratch[owner] = device.empty(size, np.uint8, stream)
        return device.address(self.scratch[owner])


@dataclass(frozen=True, slots=True)
class Work:
    """A unit is a sequence, a key head and a tile of rows (a row is a query head of a token), in parts.

    An item is a part of a unit; a slot holds the result of a part that is not all of its unit.
    """

    key: object
    part_tokens: int
    items: np.ndarray  # [B + 1]: before each sequence
    slots: np.ndarray  # likewise

    def names(self, task):
        return ("items", self.key), ("slots", self.key), ("slopes", task.heads * task.group)


def shared_out(task, steps, rows, most, key):
    """The work of a call. It depends on the shapes of the call only, so that results depend on no device."""
    seqlens, kvlens = np.diff(steps.seqstarts), np.diff(steps.kvstarts)
    units = -(-seqlens * task.group // rows) * task.heads
    lengths = enumerate(zip(seqlens.tolist(), kvlens.tolist(), strict=True))
    seen = np.array([span(task, b, *both) for b, both in lengths], np.int64)
    part_tokens = max(LEAST_PART, -(-int(np.dot(units, seen)) // most))
    parts = np.maximum(1, -(-seen // part_tokens))
    items, slots = units * parts, np.where(parts > 1, units * parts, 0)
    return Work(key, part_tokens, *(np.r_[0, np.cumsum(counts)] for counts in (items, slots)))


def span(task, b, seqlen, kvlen):
    """How many tokens the queries of a sequence see between them."""
    if not seqlen:
        return 0
    reach = task.left, task.right, task.alibi or (task.causal and b >= task.decoding)
    low, _ = visible_range.py_func(seqlen, kvlen, 0, *reach)
    _, high = visible_range.py_func(seqlen, kvlen, seqlen - 1, *reach)
    return max(high - low, 0)
