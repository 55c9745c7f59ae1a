"""Calls of a plan that repeat: what one call has checked and prepared serves others of its form.

A decode step calls an operator for every layer with arrays of the same shapes, strides and types. The first
call is checked and prepared in full; a replay exchanges addresses, once it has seen that written arrays are
writeable and overlap nothing. Where it is not sure it leaves the call to the full checks.
"""

import numpy as np

from kvkit import cpu

MOST = 4096  # forms of calls that a plan remembers


def form(arrays, attributes):
    """What decides a call but for addresses; None if it cannot be replayed."""
    try:
        shapes = [
            None if array is None else (type(array), array.shape, array.strides, array.dtype)
            for array in arrays
        ]
        call = (*shapes, *attributes, *map(types, attributes))
        hash(call)
    except (AttributeError, TypeError):
        return None
    return call


def types(attribute):
    """Its type, and those of its members: True is 1, and 1.0 too, but they are not all legal."""
    return type(attribute), *map(type, attribute if isinstance(attribute, tuple) else ())


def is_pair(out):
    """Whether outputs are two arrays."""
    return isinstance(out, (tuple, list)) and len(out) == 2 and all(isinstance(a, np.ndarray) for a in out)


def unaligned(out):
    """Whether given outputs lie where a load may not write around the caches, which takes other code."""
    return None if out is None else any(cpu.launches.address(array) % 16 for array in out)


class Replays(dict):
    """The replays of a plan, by form."""

    def play(self, call, arrays):
        """Make the call of this form for `arrays`, if it is known; whether it was made."""
        replay = self.get(call)
        return replay is not None and replay.run([array for array in arrays if array is not None])

    def keep(self, call, inputs, written, launches):
        """Keep a call, with its arrays by name, for its next time."""
        if len(self) >= MOST:
            self.clear()
        written = {name: array for name, array in written.items() if array is not None}
        self[call] = Replay(inputs | written, len(written), launches)


class Replay:
    """A prepared call. Its arrays have the names of the launches' owners; the last `written` are written."""

    __slots__ = ("launches", "slots", "spans", "written")

    def __init__(self, arrays, written, launches):
        self.launches, self.written = launches, written
        names, base = list(arrays), {name: cpu.launches.address(array) for name, array in arrays.items()}
        self.slots = [
            (launch.numbers, place, names.index(owner), offset)
            for launch in launches
            for place, owner, offset in launch.offsets(base)
        ]
        self.spans = [span(array) for array in arrays.values()]

    def run(self, arrays):
        """Make the call for other arrays of the same form; False if it needs the full checks."""
        places = [cpu.launches.address(array) for array in arrays]
        ends = [(place + low, place + high) for place, (low, high) in zip(places, self.spans, strict=True)]
        for i in range(len(arrays) - self.written, len(arrays)):
            if not arrays[i].flags.writeable:
                return False
            low, high = ends[i]
            for j, (other_low, other_high) in enumerate(ends):
                if low < other_high and other_low < high and i != j:
                    return False
        with cpu.launches.running:
            for numbers, place, owner, offset in self.slots:
                numbers[place] = places[owner] + offset
            for launch in self.launches:
                launch.run()
        return True


def span(array):
    """The bytes from an array's address that its elements lie in."""
    if not array.size:
        return 0, 0
    reach = [stride * (size - 1) for stride, size in zip(array.strides, array.shape, strict=True)]
    return sum(min(0, far) for far in reach), sum(max(0, far) for far in reach) + array.itemsize
