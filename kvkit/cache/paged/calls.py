"""Calls of a paged step, prepared for one layer and made again for the others."""

from kvkit import cpu
from kvkit.dynamic_batching.replay import MOST


class Calls(dict):
    """Prepared calls by their form, see `dynamic_batching.replay.form`; of one step, whose tables they read.

    Layers of a cache, and arrays of one form, differ in nothing but addresses. The arrays of a call have the
    names of the launch's owners; those that are None it does not have.
    """

    def __init__(self, store):
        self.store = store

    def __reduce__(self):
        return Calls, (self.store,)  # launches know addresses, which a copy does not have

    def keep(self, call, layer_idx, arrays, launch):
        """Keep the launch of a call, unless its form is None."""
        if call is not None:
            if len(self) >= MOST:
                self.clear()
            self[call] = Prepared(launch, self.addresses(layer_idx, arrays))

    def again(self, prepared, layer_idx, arrays):
        """Make a call that was kept, for another layer and other arrays."""
        prepared.run(self.addresses(layer_idx, arrays))

    def addresses(self, layer_idx, arrays):
        given = {name: cpu.launches.address(array) for name, array in arrays.items() if array is not None}
        return self.store.addresses[layer_idx] | given


class Prepared:
    """A launch, and what lies where from the addresses of its owners."""

    __slots__ = ("launch", "offsets")

    def __init__(self, launch, addresses):
        self.launch, self.offsets = launch, launch.offsets(addresses)

    def returns(self, owner):
        """Whether the call has an array of this name."""
        return any(name == owner for _, name, _ in self.offsets)

    def run(self, addresses):
        numbers = self.launch.numbers
        with cpu.launches.running:
            for place, owner, offset in self.offsets:
                numbers[place] = addresses[owner] + offset
            self.launch.run()
