"""The layers of a `KvkitCache`, as transformers uses them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin

from kvkit.interop import tensor_of


class KvkitLayer(CacheLayerMixin):
    """Pass transformers' calls on to a layer of a kvkit cache, by its number."""

    is_compileable = False
    supports_early_init = False

    def __init__(self, owner: Any, layer_idx: int) -> None:
        self._owner, self._layer_idx = owner, layer_idx

    @property
    def layer(self) -> Any:
        """The layer of kvkit's cache."""
        return self._owner.cache.layers[self._layer_idx]

    # Tokens come

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the first update decides."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new keys and values, as `KvkitCache.update` does."""
        return self._owner.update(key_states, value_states, self._layer_idx, *args, **kwargs)

    def offload(self) -> None:
        """Do nothing: kvkit's cache was told where its layers lie."""

    def prefetch(self) -> None:
        """Do nothing: kvkit's cache fetches the next layer itself."""

    # What is there

    @property
    def is_initialized(self) -> bool:
        """Whether there has been an update."""
        return self.get_seq_length() > 0

    @property
    def is_sliding(self) -> bool:
        """Whether old tokens leave the layer."""
        return self.layer.window is not None

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can go back, by any number of recorded tokens."""
        return self.layer.croppable

    @property
    def record_past(self) -> bool:
        """Whether what would be dropped is kept until the next `crop`."""
        return self.layer.record_past

    @record_past.setter
    def record_past(self, value: bool) -> None:
        if value:
            self.layer.activate_past_recording()
        elif self.layer.record_past:
            self.layer.stop_past_recording()

    @property
    def batch_size(self) -> int:
        """The number of rows of the batch. There is no such attribute before the first update."""
        if not self.layer.batch_size:
            raise AttributeError("batch_size: there are no keys yet")
        return self.layer.batch_size

    @property
    def keys(self) -> torch.Tensor | None:
        """Stored keys [B, Hkv, stored, D], None before the first update."""
        return None if self.layer.keys is None else tensor_of(self.layer.keys)

    @property
    def values(self) -> torch.Tensor | None:
        """Stored values [B, Hkv, stored, D], None before the first update."""
        return None if self.layer.values is None else tensor_of(self.layer.values)

    @property
    def positions(self) -> np.ndarray:
        """The positions of stored tokens, in the order of the keys."""
        return self.layer.positions

    @property
    def rope_shifts(self) -> np.ndarray:
        """The rope shifts of stored keys: rows (first row, row behind the last one, shift)."""
        return self.layer.rope_shifts

    @property
    def stored_tokens(self) -> int:
        """The number of stored tokens."""
        return self.layer.stored_tokens

    def get_seq_length(self) -> int:
        return self._owner.get_seq_length(self._layer_idx)

    def get_max_length(self) -> int:
        return self._owner.get_max_length(self._layer_idx)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.get_mask_sizes(query_length, self._layer_idx)

    # Tokens go, and the batch changes

    def crop(self, tokens_to_remove: int) -> None:
        self.layer.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.layer.reorder(np.asarray(beam_idx))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.layer.select(np.asarray(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.layer.repeat(repeats)

    def reset(self) -> None:
        self.layer.reset()

    def activate_past_recording(self) -> None:
        self.layer.activate_past_recording()
