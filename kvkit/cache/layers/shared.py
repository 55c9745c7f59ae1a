"""Define `SharedLayer`, which has no rows of its own and reads those of another layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, SupportsIndex

from numpy.typing import ArrayLike

from kvkit.cache.base import BaseLayer
from kvkit.cache.layers.layer import Layer
from kvkit.checks.values import integer
from kvkit.errors import argument_error, describe
from kvkit.typed import Array, Attended, States


class SharedLayer(Layer):
    """A layer that attends to the rows of another layer, as the last layers of Gemma 3n and 4 do.

    It stores no tokens and takes no memory. Tokens are added and removed in the layer that it reads. Calls of
    a cache that change all layers skip it.

    Parameters
    ----------
    of : int
        The number of the layer that it reads, which must have rows of its own.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.cache import Cache, DynamicLayer, SharedLayer
    >>> cache, states = Cache([DynamicLayer(), SharedLayer(of=0)]), np.ones((1, 1, 3, 2), np.float32)
    >>> keys, values = cache.update(states, states, 0)
    >>> cache.attend(states[:, :, -1:], 1).ravel(), cache.get_seq_length(1), cache.layers[1].nbytes
    (array([1., 1.], dtype=float32), 3, 0)
    """

    _attributes = Layer._attributes.extended("_source", "window", "_takes_window", "_croppable", "_why_kept")

    def __init__(self, of: int) -> None:
        self._of = integer("of", of, 0)
        self._source: Any = None  # until this layer is in a cache
        super().__init__()

    def _describe(self) -> dict[str, Any]:
        return {"of": self._of}

    def _connect(self, layers: Sequence[BaseLayer], number: int) -> None:
        wanted = "the number of a layer with rows of its own"
        if self._of is None or self._of == number or self._of >= len(layers):
            raise argument_error(f"{self.name}.of", wanted, self._of)
        if layers[self._of]._of is not None or not layers[self._of]._has_rows:
            raise argument_error(f"{self.name}.of", wanted, describe(layers[self._of]))
        self._source = layers[self._of]
        self._source._is_shared = True
        self.window, self._takes_window = self._source.window, self._source._takes_window
        self._croppable, self._why_kept = self._source._croppable, f"it reads the rows of layer {self._of}"

    def _refuse(self, call: str) -> NoReturn:
        raise argument_error(self.name, f"{call} of layer {self._of}, whose rows it reads", call)

    def update(
        self, key_states: Array, value_states: Array, cache_position: ArrayLike | None = None
    ) -> tuple[States, States]:
        self._refuse("update")

    def _plan_join(self, other: Any, at: SupportsIndex | None = None, rope: Any = None) -> NoReturn:
        self._refuse("append")

    _check_append = _plan_join

    def _plan(self, call: str, *arguments: Any, **options: Any) -> Any:
        self._refuse(call)

    # Sizes and positions of the layer that it reads

    def attend(  # type: ignore[override]  # takes the options of the layer that it reads
        self, *query: Array, **options: Any
    ) -> Attended:
        if self._source is None:
            raise argument_error(self.name, f"a cache with layer {self._of}", "a layer that is in none")
        return self._source.attend(*query, **options)

    def get_seq_length(self) -> int:
        return 0 if self._source is None else self._source.get_seq_length()

    def get_max_length(self) -> int:
        return -1 if self._source is None else self._source.get_max_length()

    def get_mask_sizes(self, query_length: SupportsIndex) -> tuple[int, int]:
        return (self if self._source is None else self._source).get_mask_sizes(query_length)

    @property
    def batch_size(self) -> int:
        return 0 if self._source is None else self._source.batch_size

    @property
    def stored_tokens(self) -> int:
        return 0 if self._source is None else self._source.stored_tokens

    @property
    def positions(self) -> Array:
        return super().positions if self._source is None else self._source.positions

    @property
    def rope_shifts(self) -> Array:
        return super().rope_shifts if self._source is None else self._source.rope_shifts

    def _stored(self) -> tuple[States, States]:
        return self._source._stored()

    @property
    def nbytes(self) -> int:
        return 0

    def __repr__(self) -> str:
        return f"<{self.name}: the rows of layer {self._of}>"

    def _length_after_crop(self, length: int, call: str = "crop") -> int:
        return 0 if self._source is None else self._source._length_after_crop(length, call)

    # Calls that change all layers of a cache

    def crop(self, *arguments: Any, **options: Any) -> None:
        """Do nothing: the call changes the layer that this one reads."""

    # What these calls would refuse: nothing
    _check_crop = _check_reorder = _check_repeat = _check_reserve = crop
    _load = reserve = repeat = batch_repeat_interleave = crop
    reorder = reorder_cache = batch_select_indices = _take_rows = crop
