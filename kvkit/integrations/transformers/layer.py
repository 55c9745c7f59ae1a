"""Define the layers of a `KvkitCache`, with the interface of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin

from kvkit.cache.base import NoArray
from kvkit.interop import numpy_to_tensor


class KvkitLayer(NoArray, CacheLayerMixin):
    """Passes transformers' calls on to one layer of a kvkit cache."""

    is_compileable = False
    supports_early_init = False
    _an_array = "layer.layer.keys"

    def __init__(self, owner: Any, layer_idx: int) -> None:
        self._owner, self._layer_idx = owner, layer_idx

    @property
    def layer(self) -> Any:
        """Return the layer of kvkit's cache."""
        return self._owner.cache.layers[self._layer_idx]

    # Adding tokens

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the first update decides dtype and shape."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new keys and values, see `KvkitCache.update`."""
        return self._owner.update(key_states, value_states, self._layer_idx, *args, **kwargs)

    def offload(self) -> None:
        """Do nothing: the cache of kvkit offloads and prefetches its layers itself."""

    prefetch = offload

    # Sizes and positions

    @property
    def is_initialized(self) -> bool:
        """Return whether the layer has been updated."""
        return self.get_seq_length() > 0

    @property
    def is_sliding(self) -> bool:
        """Return whether the layer has a window, which old tokens leave."""
        return self.layer.window is not None

    @property
    def is_croppable(self) -> bool:
        """Return whether `crop` can drop recorded tokens one by one."""
        return self.layer._croppable

    @property
    def record_past(self) -> bool:
        """Return whether past tokens are kept until the next `crop`."""
        return self.layer._record_past

    @record_past.setter
    def record_past(self, value: bool) -> None:
        if value:
            self.layer.activate_past_recording()
        elif self.layer._record_past:
            self.layer._stop_past_recording()

    @property
    def batch_size(self) -> int:
        """Return the number of rows of the batch; before the first update raise AttributeError."""
        if not self.layer.batch_size:
            raise AttributeError("batch_size: there are no keys yet")
        return self.layer.batch_size

    @property
    def keys(self) -> torch.Tensor | None:
        """Return the stored keys [B, Hkv, stored, D], None before the first update."""
        return None if self.layer.keys is None else numpy_to_tensor(self.layer.keys)

    @property
    def values(self) -> torch.Tensor | None:
        """Return the stored values [B, Hkv, stored, D], None before the first update."""
        return None if self.layer.values is None else numpy_to_tensor(self.layer.values)

    @property
    def positions(self) -> np.ndarray:
        """Return the positions of stored tokens, one for each row of the keys."""
        return self.layer.positions

    @property
    def rope_shifts(self) -> np.ndarray:
        """Return the rope shifts of stored keys: [pieces, 3] of (first row, end row, shift)."""
        return self.layer.rope_shifts

    @property
    def stored_tokens(self) -> int:
        """Return the number of stored tokens."""
        return self.layer.stored_tokens

    def get_seq_length(self) -> int:
        return self._owner.get_seq_length(self._layer_idx)

    def get_max_length(self) -> int:
        return self._owner.get_max_length(self._layer_idx)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.get_mask_sizes(query_length, self._layer_idx)

    # Removing tokens and changing the batch

    def crop(self, tokens_to_remove: int) -> None:
        self.layer.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.layer.reorder(np.asarray(beam_idx))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.layer.reorder(np.asarray(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.layer.repeat(repeats)

    def reset(self) -> None:
        self.layer.reset()

    def activate_past_recording(self) -> None:
        self.layer.activate_past_recording()
