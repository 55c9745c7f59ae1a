"""Define `QuantizedLayer`, which stores old tokens as codes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from kvkit.cache.base import one_call_at_a_time
from kvkit.cache.layers.changes import whole
from kvkit.cache.layers.joining import Join
from kvkit.cache.layers.layer import Layer
from kvkit.cache.layers.positions import Rearrangement, check_codes
from kvkit.cache.layers.quant_spec import CodeSpec, QuantSpec, code_spec
from kvkit.cache.stores.coded import SIDES, CodeStore
from kvkit.cache.stores.codes import PARTS, CodedSide
from kvkit.cache.stores.memory import Geometry, check_geometry
from kvkit.cache.stores.span import Span
from kvkit.checks.values import flag, integer
from kvkit.errors import argument_error, describe
from kvkit.typed import Array, States

SideSpec = str | QuantSpec | CodeSpec | None  # how keys or values are stored; files have a `CodeSpec`


def side_spec(format: Any, name: str, given: SideSpec) -> CodeSpec:
    """Return how a side, "key" or "value", is stored: as given, or else by the format of both."""
    spec = format if given is None else given
    if isinstance(spec, CodeSpec):
        return spec
    is_value = name == "value"
    if isinstance(spec, QuantSpec):
        return spec.of_side(is_value)
    if given is not None and not isinstance(given, str):
        raise argument_error(name, "a format such as 'int8:g32', or a QuantSpec", describe(given))
    return code_spec(spec, is_value)


class QuantizedLayer(Layer):
    """A layer that stores old tokens as codes. The first tokens and the recent ones stay unquantized.

    A token is encoded once, when it leaves the window of recent tokens. The stored bytes depend on the
    tokens, not on how updates split them.

    `remove` moves codes as bytes and encodes nothing again. If tokens share scales, these stay until the last
    of the tokens is removed. A removed sink is not replaced.

    `update` returns `KVView`s, whose arrays are rounded to the layer's dtype. `attend` multiplies codes with
    scales in float32, without this rounding. So a score s may differ from one computed with such an array by
    2^-11 s for float16, and 2^-8 s for bfloat16.

    Parameters
    ----------
    format : str
        The format of codes, as of `QuantSpec`: ``"int4:g32"``, ``"kivi2"``, ``"fp8"``, or ``"q8_0/q4_0"`` for
        keys and values.
    key, value : str or QuantSpec, optional
        The formats of keys and of values, instead of `format`.
    residual_length : int
        How many recent tokens stay unquantized. If groups span tokens, it is up to `group` - 1 more.
    sink : int
        How many first tokens are never quantized.
    read_back : bool
        True: a step attends to the codes of the tokens that it encodes. False: it attends to these tokens
        unquantized, and to the codes of earlier ones.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.cache import QuantizedLayer
    >>> layer = QuantizedLayer(key="uint4:channel", value="uint8", residual_length=32)
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

    _reorders_in_place = False

    def __init__(
        self,
        format: str = "kivi4",
        *,
        key: SideSpec = None,
        value: SideSpec = None,
        residual_length: int = 128,
        sink: int = 4,
        read_back: bool = False,
    ) -> None:
        self.specs = tuple(side_spec(format, name, spec) for name, spec in (("key", key), ("value", value)))
        self.residual_length = integer("residual_length", residual_length, 0)
        self.sink = integer("sink", sink, 0)
        self.read_back = flag("read_back", read_back)
        super().__init__()

    def _describe(self) -> dict[str, Any]:
        key, value = ({name: x for name, x in asdict(spec).items() if x is not None} for spec in self.specs)
        counts = {"residual_length": self.residual_length, "sink": self.sink, "read_back": self.read_back}
        return {"key": key, "value": value, **counts}

    # Methods of `Layer`

    def _empty_store(self, geometry: Geometry) -> CodeStore:
        batch, heads, *dims, fmt = geometry[:5]
        self.specs = tuple(spec.fitted(dim) for spec, dim in zip(self.specs, dims, strict=True))
        sides = [
            CodedSide(
                name, spec, (batch, heads, 0, dim), fmt.dtype, self.sink, self.residual_length, self.allocate
            )
            for name, spec, dim in zip(("key", "value"), self.specs, dims, strict=True)
        ]
        return CodeStore(geometry, sides, self.read_back)

    @whole  # an update changes the counters of codes, too
    def _append(
        self, key_states: Array, value_states: Array, cache_position: ArrayLike | None
    ) -> tuple[States, States]:
        return super()._append(key_states, value_states, cache_position)

    def _make_room(self, geometry: Geometry, end: int, keep: int) -> None:
        new, store = end - self.span.length, self.store
        store = store or self._empty_store(geometry)
        store.make_room(new)
        self.store = store  # only now, because `make_room` may fail

    @one_call_at_a_time
    def _trim(self) -> None:
        """Move codes in memory to arrays without room for removed tokens."""
        if self.store is not None:
            self._set_store(self.store.select_rows(np.arange(self.batch_size)), self.span)

    def _check_movable(self, call: str, plan: Rearrangement) -> None:
        check_codes(self.name, call, plan)

    def _join_rows(self, plan: Join) -> None:
        store, theirs = self.store or self._empty_store(plan.source.store.geometry), plan.source.store
        self._set_store(store.joined(theirs, plan.row), self.span)

    def _shorten(self, span: Span) -> None:
        if self.store is not None:
            self.store.crop(span.length)
        super()._shorten(span)

    def _take_rows(self, indices: Array) -> None:
        if self.store is not None:
            self._set_store(self.store.select_rows(indices), self.span)

    @one_call_at_a_time
    @whole
    def _release_undo(self) -> None:
        """Free the unquantized rows of a long update; attention then reads their codes."""
        if self.store is not None and not self._record_past and self.store.is_large:
            self.store.release_undo()

    def _stored(self) -> tuple[States, States]:
        return self.store.stored()

    activate_past_recording = Layer._set_past_recording

    @property
    def nbytes(self) -> int:
        return sum(side.nbytes for side in self.store.sides) if self.store else 0

    # Files

    @property
    def _was_moved(self) -> bool:
        return super()._was_moved or (self.store is not None and self.store.lost_sinks > 0)

    def _arrays(self) -> dict[str, Array]:
        if self.store is not None:
            self.store.attend_to_codes()  # as a loaded layer will
        sides = zip(SIDES, self.store.sides, strict=True) if self.store else ()
        return {f"{name}.{part}": array for name, side in sides for part, array in side.arrays().items()}

    def _fill(self, arrays: Mapping[str, Array], length: int) -> None:
        split = [
            {part: arrays[f"{name}.{part}"] for part in PARTS if f"{name}.{part}" in arrays} for name in SIDES
        ]
        key, value = (held["tail"][:, :, :0] for held in split)
        store = self._empty_store(check_geometry(key, value, None))
        for side, held in zip(store.sides, split, strict=True):
            side.fill(held, length)
        self._set_store(store, Span(length, before=length))

    def _copy_store(self) -> None:
        if self.store is not None:
            self._set_store(self.store.copied(self.allocate), self.span)

    def _large_arrays(self) -> Iterable[Array]:
        sides = self.store.sides if self.store else ()
        return (array for side in sides for array in (side.tail, side.codes, side.cells))
