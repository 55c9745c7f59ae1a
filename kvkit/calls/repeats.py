"""Calls that repeat: what one call has checked and prepared serves others of its form.

Calls of one form differ in nothing but the addresses of their arrays. Such are those for the layers of a
model in one step, and those of a layer in one step after the other. The first is checked and prepared in
full, the others exchange addresses.
"""

import numpy as np

from kvkit import cpu

MOST = 4096  # forms of calls that are remembered


def form(arrays, attributes):
    """What decides a call but for addresses; None if it cannot be repeated.

    With their types: True is 1, and 1.0 too, but they are not all legal. So attributes that are tuples are
    given member by member as well, see `members`.
    """
    try:
        shapes = [
            None if array is None else (type(array), array.shape, array.strides, array.dtype)
            for array in arrays
        ]
        call = (*shapes, *attributes, *map(type, attributes))
        hash(call)
    except (AttributeError, TypeError):
        return None
    return call


def members(attribute):
    """What is in a tuple; of anything else nothing."""
    return attribute if isinstance(attribute, tuple) else ()


def is_pair(out):
    """Whether outputs are two arrays."""
    return isinstance(out, (tuple, list)) and len(out) == 2 and all(isinstance(a, np.ndarray) for a in out)


def unaligned(out):
    """Whether given outputs lie where a load may not write around the caches, which takes other code."""
    return None if out is None else any(cpu.launches.address(array) % 16 for array in out)


def addresses(arrays):
    """Where arrays lie, by name; those that are None lie nowhere."""
    address = cpu.launches.address
    return {name: address(array) for name, array in arrays.items() if array is not None}


class Repeats(dict):
    """Prepared calls, by their form."""

    def __init__(self, most=MOST):
        super().__init__()
        self.most = most

    def __reduce__(self):
        return Repeats, (self.most,)  # they know addresses, which a copy does not have

    def keep(self, call, prepared):
        """Keep a call for its next time."""
        if len(self) >= self.most:
            self.clear()
        self[call] = prepared


class Guarded:
    """A prepared call whose next arrays nobody has checked, but for their form.

    It is made again once it is seen that those that are `written`, the last so many of `arrays`, are
    writeable and overlap nothing; what lay in one place does so again, as the form says. Where that is not
    sure the call is left to the full checks; so is one for another step, by its number, if `attention`, the
    task of a launch, is not shared out as before. A cache has `room` rows.
    """

    __slots__ = ("_attention", "_launches", "_near", "_planned", "_step", "_written", "room")

    def __init__(self, launches, arrays, written, room=0, attention=None, step=None):
        self.room, self._step, self._attention = room, step, attention
        self._planned = None if attention is None else cpu.attention.prepare.planned(attention)
        places = addresses(arrays)
        self._launches = cpu.launches.Repeat(launches, places, tuple(arrays))
        there = [(i, places[name], *span(arrays[name])) for i, name in enumerate(arrays) if name in places]
        self._written = [i for i, *_ in there if i >= len(arrays) - written]
        self._near = []  # (one, other, distances between which lie those at which they overlap)
        for one, place, low, high in there:
            for other, other_place, other_low, other_high in there:
                if other < one in self._written and place != other_place:
                    self._near.append((one, other, low - other_high, high - other_low))

    def run(self, arrays, step=None):
        """Make the call for other arrays of the same form, in order; False if it needs the full checks."""
        address = cpu.launches.address
        places = [0 if array is None else address(array) for array in arrays]
        for i in self._written:
            if not arrays[i].flags.writeable:
                return False
        for one, other, least, most in self._near:
            if least < places[other] - places[one] < most:
                return False
        return self._launches.run(places, None if step == self._step else lambda: self._shared_out(step))

    def _shared_out(self, step):
        """Share the work of another step out; False if it takes another launch."""
        self._step = None
        cpu.attention.prepare.schedule(self._attention)
        if cpu.attention.prepare.planned(self._attention) != self._planned:
            return False
        self._step = step
        return True


def span(array):
    """The bytes from an array's address that its elements lie in."""
    if not array.size:
        return 0, 0
    reach = [stride * (size - 1) for stride, size in zip(array.strides, array.shape, strict=True)]
    return sum(min(0, far) for far in reach), sum(max(0, far) for far in reach) + array.itemsize
