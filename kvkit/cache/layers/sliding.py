"""Define the layers that store a sliding window of tokens."""

from __future__ import annotations

import warnings
from typing import Any

from kvkit.cache.layers.dynamic import StaticLayer
from kvkit.cache.layers.layer import Layer, window_slack
from kvkit.checks.values import integer


class SlidingWindowLayer(Layer):
    """A layer for sliding-window attention that stores the last W - 1 tokens.

    The next token attends to these tokens and itself. `update` returns all tokens that the new tokens attend
    to, which may be more than W.

    Parameters
    ----------
    window : int
        W, how many tokens a query attends to, itself included.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.cache import SlidingWindowLayer
    >>> layer, tokens = SlidingWindowLayer(4), np.arange(6, dtype=np.float32).reshape(1, 1, 6, 1)
    >>> keys, values = layer.update(tokens, tokens)
    >>> keys.shape[2], layer.keys.ravel(), layer.get_mask_sizes(1)
    (6, array([3., 4., 5.], dtype=float32), (4, 3))
    """

    window: int

    def __init__(self, window: int) -> None:
        self.window = self.model_window = integer("window", window, 1)
        super().__init__()

    def _describe(self) -> dict[str, Any]:
        return {"sliding_window": self.model_window}

    def _returned(self, length: int, new: int) -> tuple[int, int]:
        return max(0, length - self.window + 1), length + new

    def _stored_from(self, length: int) -> int:
        return max(0, length - self.window + 1)

    _croppable_to = _stored_from

    def _capacity(self, rows: int) -> int:
        grown = super()._capacity(rows)
        return grown if self._record_past else min(grown, rows + window_slack(self.window))

    def get_max_length(self) -> int:
        return self.window

    activate_past_recording = Layer._set_past_recording


class StaticSlidingWindowLayer(StaticLayer):
    """A layer of fixed size for sliding-window attention that stores the last W tokens.

    Until the window is full, `update` returns the whole window, with zeros in the unused rows.

    Parameters
    ----------
    max_cache_len, window : int
        W is the smaller of the two. If that is ``max_cache_len``, a warning is issued.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.cache import StaticSlidingWindowLayer
    >>> layer, tokens = StaticSlidingWindowLayer(8, 4), np.arange(1, 6, dtype=np.float32).reshape(1, 1, 5, 1)
    >>> layer.update(tokens[:, :, :3], tokens[:, :, :3])[0].ravel()
    array([1., 2., 3., 0.], dtype=float32)
    >>> layer.update(tokens[:, :, 3:], tokens[:, :, 3:])[0].ravel(), layer.keys.ravel()
    (array([1., 2., 3., 4., 5.], dtype=float32), array([2., 3., 4., 5.], dtype=float32))
    """

    window: int
    _croppable = False

    def __init__(self, max_cache_len: int, window: int) -> None:
        super().__init__(max_cache_len)
        self.model_window = integer("window", window, 1)
        self.window = min(self.max_cache_len, self.model_window)
        if self.window < self.model_window:
            message = f"max_cache_len {self.window} narrows the sliding window of {self.model_window}"
            warnings.warn(message, stacklevel=2)

    def _describe(self) -> dict[str, Any]:
        return {"max_cache_len": self.max_cache_len, "sliding_window": self.model_window}

    def _returned(self, length: int, new: int) -> tuple[int, int]:
        if length + new <= self.window:
            return 0, self.window
        return max(0, length - self.window + 1), length + new

    def _stored_from(self, length: int) -> int:
        return max(0, length - self.window)

    def _croppable_to(self, length: int) -> int:
        return max(0, length - self.window + 1)

    def _may_start(self, start: int) -> bool:
        return False

    def _check_room(self, length: int, new: int) -> None:
        pass  # never full: new tokens overwrite the oldest

    def _capacity(self, rows: int) -> int:
        return max(self.window, rows) + window_slack(self.window)

    def get_max_length(self) -> int:
        return self.window
