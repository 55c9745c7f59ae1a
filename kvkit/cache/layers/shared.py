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

    attributes = Layer.attributes.extended("source", "window", "takes_window", "croppable", "why_kept")

    def __init__(self, of: int) -> None:
        self.of = integer("of", of, 0)
        self.source: Any = None  # until this layer is in a cache
        super().__init__()

    def describe(self) -> dict[str, Any]:
        return {"of": self.of}

    def connect(self, layers: Sequence[BaseLayer], number: int) -> None:
        wanted = "the number of a layer with rows of its own"
        if self.of is None or self.of == number or self.of >= len(layers):
            raise argument_error(f"{self.name}.of", wanted, self.of)
        if layers[self.of].of is not None or not layers[self.of].has_rows:
            raise argument_error(f"{self.name}.of", wanted, describe(layers[self.of]))
        self.source = layers[self.of]
        self.source.is_shared = True
        self.window, self.takes_window = self.source.window, self.source.takes_window
        self.croppable, self.why_kept = self.source.croppable, f"it reads the rows of layer {self.of}"

    def _refuse(self, call: str) -> NoReturn:
        raise argument_error(self.name, f"{call} of layer {self.of}, whose rows it reads", call)

    def update(
        self, key_states: Array, value_states: Array, cache_position: ArrayLike | None = None
    ) -> tuple[States, States]:
        self._refuse("update")

    def plan_join(self, other: Any, at: SupportsIndex | None = None, rope: Any = None) -> NoReturn:
        self._refuse("append")

    check_append = plan_join

    def plan(self, call: str, *arguments: Any, **options: Any) -> Any:
        self._refuse(call)

    # Sizes and positions of the layer that it reads

    def attend(  # type: ignore[override]  # takes the options of the layer that it reads
        self, *query: Array, **options: Any
    ) -> Attended:
        if self.source is None:
            raise argument_error(self.name, f"a cache with layer {self.of}", "a layer that is in none")
        return self.source.attend(*query, **options)

    def get_seq_length(self) -> int:
        return 0 if self.source is None else self.source.get_seq_length()

    def get_max_length(self) -> int:
        return -1 if self.source is None else self.source.get_max_length()

    def get_mask_sizes(self, query_length: SupportsIndex) -> tuple[int, int]:
        return (self if self.source is None else self.source).get_mask_sizes(query_length)

    @property
    def batch_size(self) -> int:
        return 0 if self.source is None else self.source.batch_size

    @property
    def stored_tokens(self) -> int:
        return 0 if self.source is None else self.source.stored_tokens

    @property
    def positions(self) -> Array:
        return super().positions if self.source is None else self.source.positions

    @property
    def rope_shifts(self) -> Array:
        return super().rope_shifts if self.source is None else self.source.rope_shifts

    def stored(self) -> tuple[States, States]:
        return self.source.stored()

    @property
    def nbytes(self) -> int:
        return 0

    def __repr__(self) -> str:
        return f"<{self.name}: the rows of layer {self.of}>"

    def length_after_crop(self, length: int, call: str = "crop") -> int:
        return 0 if self.source is None else self.source.length_after_crop(length, call)

    # Calls that change all layers of a cache

    def crop(self, *arguments: Any, **options: Any) -> None:
        """Do nothing: the call changes the layer that this one reads."""

    # What these calls would refuse: nothing
    check_crop = check_reorder = check_repeat = check_reserve = crop
    load = reserve = repeat = batch_repeat_interleave = crop
    reorder = select = reorder_cache = batch_select_indices = _take_rows = crop
