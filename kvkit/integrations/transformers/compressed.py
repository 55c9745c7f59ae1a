"""Define the layers of DeepSeek V4 in transformers, whose model pools tokens itself."""

from __future__ import annotations

from typing import Any

import torch

from kvkit.integrations.transformers.bridge import as_cast, to_numpy
from kvkit.integrations.transformers.layer import KvkitLayer
from kvkit.interop import numpy_to_tensor


class KvkitCompressedLayer(KvkitLayer):
    """Passes what a model of DeepSeek V4 pools on to a `PooledLayer`, under transformers' names."""

    @property
    def is_sliding(self) -> bool:
        """Return True: masks are those of the window."""
        return True

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Store projected tokens; return those of the windows that end, and the first window's position."""
        arrays = [to_numpy(each, *as_cast(x)) for each, x in (("kv", kv), ("gate", gate))]
        first, *windows = self.layer.store_tokens(name, *arrays)
        return *(numpy_to_tensor(x).to(kv.dtype) for x in windows), first  # type: ignore[return-value]

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Store pooled rows; return all of them."""
        rows = self.layer.store_rows(name, to_numpy("compressed", *as_cast(compressed)))
        return numpy_to_tensor(rows).to(compressed.dtype)

    def update_overlap_state(
        self, name: str, chunk_kv: torch.Tensor, chunk_gate: torch.Tensor, head_dim: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Store windows for the rows after them; return the one before these, or None."""
        parts = [to_numpy("chunk", *as_cast(x[..., :head_dim])) for x in (chunk_kv, chunk_gate)]
        before: Any = self.layer.store_overlap(name, *parts)
        return (None, None) if before is None else tuple(map(numpy_to_tensor, before))  # type: ignore
