"""Define `SchemedLayer`, which encodes old tokens by schemes: classes with `encode` and `decode`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from kvkit.cache.base import one_call_at_a_time
from kvkit.cache.layers.layer import Layer
from kvkit.cache.layers.positions import Rearrangement, check_codes
from kvkit.cache.layers.quant_spec import QuantSpec
from kvkit.cache.stores.memory import Geometry
from kvkit.cache.stores.schemed import SchemedSide, SchemedStore
from kvkit.cache.stores.span import Span
from kvkit.cache.stores.view import KVView
from kvkit.checks.values import flag, integer
from kvkit.errors import argument_error
from kvkit.typed import Array, Attended, States


class SchemedLayer(Layer):
    """A layer that encodes old tokens by schemes, `QuantSpec.group` tokens at a time.

    It works as a `QuantizedLayer`, but up to `group` more recent tokens stay unquantized. Each call of
    `attend` decodes the whole layer, so it serves to try a scheme with a model, not for speed. A crop inside
    a group keeps the group's codes and ignores the tokens after the crop. The layer can be neither saved nor
    offloaded.

    Parameters
    ----------
    key, value : QuantSpec
        Specs whose `format` is a scheme.
    residual_length, sink, read_back
        As in `QuantizedLayer`.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.cache import QuantizedCache, QuantSpec
    >>> spec = QuantSpec(format="mxfp4", group=16)
    >>> cache = QuantizedCache(1, spec, spec, residual_length=8, sink=0)
    >>> tokens = np.ones((1, 2, 40, 64), np.float16)
    >>> keys, values = cache.update(tokens, tokens, 0)
    >>> cache.attend(tokens[:, :, :1], 0).shape, round(2 * tokens.nbytes / cache.layers[0].nbytes, 1)
    ((1, 2, 1, 64), 2.4)
    """

    def __init__(
        self,
        key: QuantSpec,
        value: QuantSpec,
        residual_length: int = 128,
        sink: int = 4,
        read_back: bool = False,
    ) -> None:
        self.specs, self._schemes = (key, value), (key.schemes()[0], value.schemes()[1])
        self.residual_length = integer("residual_length", residual_length, 0)
        self.sink = integer("sink", sink, 0)
        self.read_back = flag("read_back", read_back)
        super().__init__()

    def describe(self) -> dict[str, Any]:
        formats = " and ".join(repr(spec.format) for spec in self.specs)
        wanted = "a layer that can be saved"
        raise argument_error(self.name, wanted, f"one with schemes {formats}, which cannot")

    def _empty_sides(self, geometry: Geometry) -> Iterator[SchemedSide]:
        batch, heads, *dims, fmt = geometry[:5]
        for spec, scheme, dim in zip(self.specs, self._schemes, dims, strict=True):
            empty = np.empty((batch, heads, 0, dim), fmt.dtype)
            yield SchemedSide(
                str(spec.format), scheme, spec.group, self.sink, self.residual_length, sinks=empty, tail=empty
            )

    def _append(
        self, key_states: Array, value_states: Array, cache_position: ArrayLike | None
    ) -> tuple[States, States]:
        geometry = self._geometry_of(key_states, value_states)
        new, before = key_states.shape[2], self.span.length
        if cache_position is not None:
            self._first_new(cache_position, new)
        sides = self._empty_sides(geometry) if self.store is None else self.store.sides
        longer = [side.appended(x) for side, x in zip(sides, (key_states, value_states), strict=True)]
        sides = longer if self.record_past else [side.with_old_encoded() for side in longer]
        self._keep(sides, Span(before + new, before=before), geometry, None if self.read_back else longer)
        key, value = self.store.attended
        return KVView(key), KVView(value)

    def _keep(self, sides: Any, span: Span, geometry: Geometry, attended: Any = None) -> None:
        """Store these sides; until the next change attention reads the sides `attended`, if there are any."""
        self._set_store(SchemedStore(geometry, sides, attended or sides), span)

    @one_call_at_a_time
    def attend(  # type: ignore[override]  # takes the options of `Layer.attend`
        self, query: Array, attention_mask: Array | None = None, **options: Any
    ) -> Attended:
        store = self.store
        if store is not None:
            store.keys, store.values = (side.read() for side in store.attended)
        try:
            return super().attend(query, attention_mask, **options)
        finally:
            self._attention.forget()
            if store is not None:
                store.keys = store.values = None

    @one_call_at_a_time
    def release_undo(self) -> None:
        """Free the unquantized rows of the tokens that the latest update encoded."""
        if self.store is not None:
            self.store.attended = self.store.sides

    def stored(self) -> tuple[States, States]:
        return tuple(side.read() for side in self.store.sides)

    @property
    def nbytes(self) -> int:
        return sum(side.nbytes for side in self.store.sides) if self.store else 0

    def _make_room(self, geometry: Geometry, end: int, keep: int) -> None:
        pass  # an update makes new sides

    def _check_movable(self, call: str, plan: Rearrangement) -> None:
        check_codes(self.name, call, plan)

    def _shorten(self, span: Span) -> None:
        if self.store is not None:
            sides = [side.cropped(span.length).with_old_encoded() for side in self.store.sides]
            self._keep(sides, span, self.store.geometry)

    def _take_rows(self, indices: Array) -> None:
        if self.store is not None:
            geometry = self.store.geometry._replace(batch=len(indices))
            sides = [side.select_rows(indices) for side in self.store.sides]
            self._keep(sides, self.span.without_undo(), geometry)

    activate_past_recording = Layer.set_past_recording
