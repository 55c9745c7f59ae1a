"""The quantized layer: old tokens as codes, first and recent ones as they came."""

import copy
from dataclasses import asdict, replace

from kvkit import attention
from kvkit.cache.codes import PARTS, Side, parts
from kvkit.cache.layer import Layer
from kvkit.cache.quant_spec import QuantSpec
from kvkit.cache.quantized_view import KVView
from kvkit.cache.store import geometry
from kvkit.check import describe, integer, wrong

SPEC = QuantSpec()
SIDES = "keys", "values"


class CodeStore:
    """Keys and values of a layer as codes, in the place of a `Store`."""

    def __init__(self, geometry, specs, sink, residual, read_back):
        batch, heads, *dims, fmt = geometry
        self.geometry, self.read_back = geometry, read_back
        self.rooms: list = []  # of the update that is under way
        self.tables: list = []  # that attention reads
        self.sides = [
            Side(name, spec, (batch, heads, 0, dim), fmt.dtype, sink, residual)
            for name, spec, dim in zip(("key", "value"), specs, dims, strict=True)
        ]

    def make_room(self, new):
        self.rooms = [side.room(new) for side in self.sides]

    def write(self, row, key_states, value_states):
        states = key_states, value_states
        for side, new, room in zip(self.sides, states, self.rooms, strict=True):
            side.append(new, room)

    def commit(self, layer):
        """Encode what has left the window, unless past is recorded."""
        self.rooms = []
        if not layer.record_past:
            self.evict()

    def evict(self):
        for side in self.sides:
            side.evict()
            if self.read_back:
                side.read_back()

    def crop(self, length):
        for side in self.sides:
            side.grow(side.new_blocks(length))
        for side in self.sides:
            side.crop(length)
            side.evict()
            side.seen = side.coded

    def rows(self, begin, end):
        return tuple(KVView(side) for side in self.sides)

    def context(self, packed, begin, end):
        """All rows as attention reads them, with queries of the format `packed`."""
        batch, heads, *dims, _ = self.geometry
        self.tables = [side.described() for side in self.sides]
        forms = [side.format for side in self.sides]
        return parts().context(packed, batch, heads, tuple(dims), forms, self.tables)

    def begin_at(self, numbers, row):
        """Let prepared attention see what the latest view sees."""
        for side, table in zip(self.sides, self.tables, strict=True):
            side.described(table)

    def stored(self):
        return [side.stored() for side in self.sides]

    def taken(self, indices):
        """The same for other rows of the batch."""
        store = copy.copy(self)
        store.tables = []
        store.geometry = self.geometry._replace(batch=len(indices))
        store.sides = [side.taken(indices) for side in self.sides]
        return store

    def close(self):
        pass


class QuantizedLayer(Layer):
    """A layer that keeps old tokens as codes; the first ones and the recent ones stay as they came.

    A token is encoded once, from its original, when it leaves the window. What is stored depends on the
    tokens, not on how they were split into updates.

    Parameters
    ----------
    key, value : QuantSpec
        How keys and values are coded.
    residual_length : int
        So many recent tokens are not coded; where groups run along channels, up to a group more.
    sink : int
        So many first tokens are never coded.
    read_back : bool
        Whether a step sees what is stored after it, its own tokens included. If not, it sees as codes only
        what was so before.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.cache import QuantizedLayer, QuantSpec
    >>> layer = QuantizedLayer(value=QuantSpec(bits=8), residual_length=32)
    >>> prompt = np.random.default_rng(0).standard_normal((1, 2, 100, 64)).astype(np.float32)
    >>> keys, values = layer.update(prompt, prompt)
    >>> keys.shape, bool((np.asarray(keys) == prompt).all())
    ((1, 2, 100, 64), True)
    >>> keys, values = layer.update(prompt[:, :, :1], prompt[:, :, :1])
    >>> bool(0 < abs(np.asarray(keys)[:, :, :100] - prompt).max() < 0.3)
    True
    >>> layer.attend(prompt[:, :, :1]).shape
    (1, 2, 1, 64)
    """

    in_files = False

    def __init__(self, key=SPEC, value=SPEC, residual_length=128, sink=4, read_back=False):
        specs = []
        for name, spec, axis in (("key", key, "channel"), ("value", value, "token")):
            if not isinstance(spec, QuantSpec):
                raise wrong(name, "a QuantSpec", describe(spec))
            specs.append(replace(spec, axis=spec.axis or axis))
        self.specs = tuple(specs)
        self.residual_length = integer("residual_length", residual_length, 0)
        self.sink = integer("sink", sink, 0)
        self.read_back = attention.flag("read_back", read_back)
        super().__init__()

    def describe(self):
        """What the constructor takes."""
        key, value = map(asdict, self.specs)
        counts = {"residual_length": self.residual_length, "sink": self.sink, "read_back": self.read_back}
        return {"key": key, "value": value, **counts}

    # What the steps of `Layer` do here

    def _make_room(self, given, end, keep):
        if self._store is None:
            store = CodeStore(given, self.specs, self.sink, self.residual_length, self.read_back)
        else:
            store = self._store
        store.make_room(end - self._length)
        self._store = store

    def _shorten(self, length):
        if self._store is not None:
            self._store.crop(length)
        super()._shorten(length)

    def _take(self, indices):
        if self._store is not None:
            self._store, self._call = self._store.taken(indices), None

    def _stored(self):
        return self._store.stored()

    def _arrays(self):
        sides = zip(SIDES, self._store.sides, strict=True) if self._store else ()
        return {f"{name}.{part}": array for name, side in sides for part, array in side.arrays().items()}

    def _fill(self, arrays, length):
        split = [
            {part: arrays[f"{name}.{part}"] for part in PARTS if f"{name}.{part}" in arrays} for name in SIDES
        ]
        key, value = (held["tail"][:, :, :0] for held in split)
        given = geometry(key, value, None)
        store = CodeStore(given, self.specs, self.sink, self.residual_length, self.read_back)
        for side, held in zip(store.sides, split, strict=True):
            side.fill(held, length)
        self._store, self._length = store, length

    def activate_past_recording(self):
        """From now on nothing is coded until the next `crop`, so that drafts can be taken back whole."""
        self.record_past = True

    @property
    def nbytes(self):
        """Bytes of what is stored, without room to grow."""
        return sum(side.nbytes for side in self._store.sides) if self._store else 0
