"""Define `KVView`, which an update of a quantized or paged layer returns."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from kvkit.errors import argument_error
from kvkit.typed import Array, States


class KVView:
    """Stands for the keys or values that a step attends to; ``numpy.asarray`` decodes them to an array.

    A view is valid until the layer changes; then `numpy.asarray` raises a KvkitError.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.cache import QuantizedLayer
    >>> layer, tokens = QuantizedLayer(), np.ones((1, 2, 3, 32), np.float32)
    >>> keys, values = layer.update(tokens, tokens)
    >>> keys, np.asarray(keys).sum()
    (<KVView of float32, shape (1, 2, 3, 32)>, np.float32(192.0))
    """

    __slots__ = ("_changes", "_side", "dtype", "shape")

    def __init__(self, side: Any) -> None:
        self._side, self._changes = side, side.changes
        self.shape, self.dtype = side.shape, side.dtype

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise argument_error("copy", "True or None, because a KVView makes a new array", False)
        if self._side.changes != self._changes:
            raise argument_error("KVView", "one that the layer's latest update returned", "an older one")
        array = self._side.read()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"<KVView of {self.dtype}, shape {self.shape}>"


class LayerSide:
    """Gives a `KVView` the keys (`side` 0) or values (1) of a layer that decodes both at once."""

    def __init__(self, layer: Any, side: int, dtype: np.dtype[Any], dim: int) -> None:
        self._layer, self._side = layer, side
        self.shape, self.dtype = (*layer._shape[:3], dim), dtype

    @property
    def changes(self) -> Any:
        return self._layer._changes

    def read(self) -> States:
        return self._layer._stored()[self._side]


def views_of(layer: Any, dtype: np.dtype[Any], dims: tuple[int, int]) -> tuple[KVView, KVView]:
    """Return views of a layer's keys and values; `dims` are their head sizes."""
    keys, values = (KVView(LayerSide(layer, side, dtype, dim)) for side, dim in enumerate(dims))
    return keys, values
