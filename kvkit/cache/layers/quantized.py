"""The quantized layer: old tokens as codes, first and recent ones as they came."""

import math
from dataclasses import asdict, replace

from kvkit import attention
from kvkit.cache.layers.codes import PARTS, Side
from kvkit.cache.layers.layer import Layer
from kvkit.cache.layers.quant_spec import QuantSpec
from kvkit.cache.stores.coded import SIDES, CodeStore, MappedCodeStore, planned
from kvkit.cache.stores.memory import geometry
from kvkit.check import describe, integer, wrong

SPEC = QuantSpec()


def fitting(spec, dim, by_default):
    """A spec for a head size: groups of who has said nothing of them divide it."""
    fits = not by_default or spec.axis == "channel"
    return spec if fits else replace(spec, group=math.gcd(spec.group, dim))


class QuantizedLayer(Layer):
    """A layer that keeps old tokens as codes; the first ones and the recent ones stay as they came.

    A token is encoded once, from its original, when it leaves the window. What is stored depends on the
    tokens, not on how they were split into updates.

    In float16 and bfloat16 the arrays of a view are rounded to that dtype. `attend` reads codes as float32
    products with their scales, however many queries there are: a score of s may differ by 2^-11 s, for
    bfloat16 2^-8 s, from that of the arrays.

    Parameters
    ----------
    key, value : QuantSpec
        How keys and values are coded. If not given, groups along a token are of 32, or of as many as divide
        both that and the head size.
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

    _in_memory, _in_files = CodeStore, MappedCodeStore

    def __init__(self, key=SPEC, value=SPEC, residual_length=128, sink=4, read_back=False):
        specs = []
        for name, spec, axis in (("key", key, "channel"), ("value", value, "token")):
            if not isinstance(spec, QuantSpec):
                raise wrong(name, "a QuantSpec", describe(spec))
            specs.append(replace(spec, axis=spec.axis or axis))
        self.specs, self._by_default = tuple(specs), (key is SPEC, value is SPEC)
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

    def _empty_store(self, given):
        batch, heads, *dims, fmt = given
        self.specs = tuple(map(fitting, self.specs, dims, self._by_default))
        sides = [
            Side(name, spec, (batch, heads, 0, dim), fmt.dtype, self.sink, self.residual_length)
            for name, spec, dim in zip(("key", "value"), self.specs, dims, strict=True)
        ]
        return CodeStore(given, sides, self.read_back)

    def _make_room(self, given, end, keep):
        new, store = end - self._length, self._store
        if self._new_store is CodeStore:
            store = store or self._empty_store(given)
        elif store is None or not store.fits(new):
            self._move(given, new, keep, view=False)
            store = self._store
        store.make_room(new)
        self._store = store

    def _move(self, given, capacity, keep, indices=None, view=True):
        """Take a store in another file, with room for `capacity` more tokens and, or not, the latest view."""
        source = self._store or self._empty_store(given)
        self._before = self._before if view else self._length
        super()._move(given, planned(source, given.batch, capacity, view), keep, indices)

    def reserve(self, query_length):
        new, store = integer("query_length", query_length, 0), self._store
        if isinstance(store, MappedCodeStore) and not store.fits(new):
            self._move(store.geometry, new, 0)
        super().reserve(new)

    reserve.__doc__ = Layer.reserve.__doc__

    def _shorten(self, length):
        if self._store is not None:
            self._store.crop(length)
        super()._shorten(length)

    def _take_back(self, length):
        self._store.take_back(length)
        super()._shorten(length)

    def _take(self, indices):
        if self._store is None:
            return
        if self._new_store is CodeStore:
            self._store, self._call = self._store.taken(indices), None
        else:
            self._move(self._store.geometry._replace(batch=len(indices)), 0, 0, indices, view=False)

    def _stored(self):
        return self._store.stored()

    def _arrays(self):
        if self._store is not None:
            self._store.see_stored()  # from now on, as a loaded layer does
        sides = zip(SIDES, self._store.sides, strict=True) if self._store else ()
        return {f"{name}.{part}": array for name, side in sides for part, array in side.arrays().items()}

    def _fill(self, arrays, length):
        split = [
            {part: arrays[f"{name}.{part}"] for part in PARTS if f"{name}.{part}" in arrays} for name in SIDES
        ]
        key, value = (held["tail"][:, :, :0] for held in split)
        given = geometry(key, value, None)
        store = self._empty_store(given)
        for side, held in zip(store.sides, split, strict=True):
            side.fill(held, length)
        self._store, self._length, self._before = store, length, length

    def activate_past_recording(self):
        """From now on nothing is coded until the next `crop`, so that drafts can be taken back whole."""
        self._record_past()

    @property
    def nbytes(self):
        """Bytes of what is stored, without room to grow."""
        return sum(side.nbytes for side in self._store.sides) if self._store else 0
