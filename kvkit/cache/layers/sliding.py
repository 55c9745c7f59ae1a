"""The layers that keep a window of tokens."""

from __future__ import annotations

import warnings
from typing import Any

from kvkit.cache.layers.dynamic import StaticLayer
from kvkit.cache.layers.layer import Layer, window_slack
from kvkit.checks.values import integer


class SlidingWindowLayer(Layer):
    """A layer for sliding-window attention: W - 1 tokens are kept, all that a next one can see beside itself.

    An update returns all that its tokens can see, also when they are more than a window.

    Parameters
    ----------
    sliding_window : int
        W, how many tokens a query sees, itself included.

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

    def __init__(self, sliding_window: int) -> None:
        self.window = self.sliding_window = integer("sliding_window", sliding_window, 1)
        super().__init__()

    def describe(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        return {"sliding_window": self.sliding_window}

    def _returned(self, length: int, new: int) -> tuple[int, int]:
        return max(0, length - self.window + 1), length + new

    def _stored_from(self, length: int) -> int:
        return max(0, length - self.window + 1)

    _croppable_to = _stored_from

    def _capacity(self, rows: int) -> int:
        grown = super()._capacity(rows)
        return grown if self.record_past else min(grown, rows + window_slack(self.window))

    def get_max_length(self) -> int:
        return self.window

    def activate_past_recording(self) -> None:
        """From now on keep tokens that have left the window until the next `crop`, which may then go back."""
        self._record_past()


class StaticSlidingWindowLayer(StaticLayer):
    """A layer of fixed size for sliding-window attention: the last W' = min(W, max_cache_len) tokens.

    Until the window is full an update returns all of it, zeros where no token is yet.

    Parameters
    ----------
    max_cache_len, sliding_window : int
        The window is the smaller of both; a warning says so if that is not ``sliding_window``.

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
    croppable = False

    def __init__(self, max_cache_len: int, sliding_window: int) -> None:
        super().__init__(max_cache_len)
        self.sliding_window = integer("sliding_window", sliding_window, 1)
        self.window = min(self.max_cache_len, self.sliding_window)
        if self.window < self.sliding_window:
            message = f"max_cache_len {self.window} narrows the sliding window of {self.sliding_window}"
            warnings.warn(message, stacklevel=2)

    def describe(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        return {"max_cache_len": self.max_cache_len, "sliding_window": self.sliding_window}

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

    def check_room(self, length: int, new: int) -> None:
        pass  # old tokens make room

    def _capacity(self, rows: int) -> int:
        return max(self.window, rows) + window_slack(self.window)

    def get_max_length(self) -> int:
        return self.window
