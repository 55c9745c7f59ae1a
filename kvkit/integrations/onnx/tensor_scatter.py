"""Compute ONNX `TensorScatter`, which writes new entries at an index of each sequence, in numpy.

It returns a copy, while kvkit's operators write in place.
"""

from __future__ import annotations

import numpy as np
from onnx.reference.op_run import OpRun

from kvkit.errors import argument_error
from kvkit.typed import Array


class TensorScatter(OpRun):
    """Computes a copy of a cache with `update` written into it (opset 24)."""

    def _run(
        self,
        past_cache: Array,
        update: Array,
        write_indices: Array | None = None,
        *,
        mode: str = "linear",
        axis: int = -2,
    ) -> tuple[Array]:
        ndim, batch = past_cache.ndim, past_cache.shape[0]
        if mode not in ("linear", "circular"):
            raise argument_error("mode", "linear or circular", mode)
        if not -ndim <= axis < ndim or axis % ndim == 0:
            raise argument_error("axis", f"an axis of {ndim}, other than the first", axis)
        axis %= ndim
        room, new = past_cache.shape[axis], update.shape[axis] if update.ndim == ndim else 0
        if update.shape != (*past_cache.shape[:axis], new, *past_cache.shape[axis + 1 :]) or new > room:
            wanted = f"the shape of past_cache, {past_cache.shape}, or less on axis {axis}"
            raise argument_error("update", wanted, update.shape)
        if update.dtype != past_cache.dtype:
            raise argument_error("update", f"the dtype of past_cache, {past_cache.dtype}", update.dtype)
        first = np.zeros(batch, np.int64) if write_indices is None else write_indices
        if first.shape != (batch,):
            raise argument_error("write_indices", f"shape ({batch},)", first.shape)
        index = first[:, None] + np.arange(new)
        if mode == "circular":
            index %= max(room, 1)
        elif ((first < 0) | (first > room - new)).any():
            raise argument_error("write_indices", f"indices from 0 to {room - new}", first)
        present = past_cache.copy()
        by_index = np.moveaxis(present, axis, 1)  # [batch, index, ...], a view
        by_index[np.arange(batch)[:, None], index] = np.moveaxis(update, axis, 1)
        return (present,)
