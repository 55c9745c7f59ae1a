"""Define `PagedLatentLayer`, the layer of a paged cache of latent rows (MLA)."""

from __future__ import annotations

from kvkit.cache.layers.latent import joined_query
from kvkit.cache.paged.layer import Batch, PagedLayer
from kvkit.checks.values import positive_number
from kvkit.runtime.locks import LayerLock
from kvkit.typed import Array, Attended


class PagedLatentLayer(PagedLayer):
    """A layer of latent rows in the blocks of a `PagedCache`, for a batch of sequences of one length.

    As in `LatentLayer`, `update` takes the two parts of rows, [B, 1, q, latent_dim] and [B, 1, q, rope_dim],
    and `attend` takes absorbed queries. `key_cache` is a pool that `kvkit.mla_attention` takes.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.cache import PagedCache
    >>> cache = PagedCache(
    ...     8, 16, num_layers=1, num_kv_heads=1, head_dim=576, dtype=np.float16, latent_dim=512)
    >>> layer, rng = cache.layers[0], np.random.default_rng(0)
    >>> latent, kpe = (rng.standard_normal((1, 1, 20, dim)).astype(np.float16) for dim in (512, 64))
    >>> keys, values = layer.update(latent, kpe)
    >>> keys.shape, values.shape, layer.nbytes, layer.key_cache.shape
    ((1, 1, 20, 576), (1, 1, 20, 512), 23040, (8, 16, 1, 576))
    >>> q_latent, q_pe = np.ones((1, 16, 1, 512), np.float16), np.ones((1, 16, 1, 64), np.float16)
    >>> layer.attend(q_latent, q_pe, softmax_scale=192**-0.5).shape
    (1, 16, 1, 512)
    """

    def __init__(self, rows: Batch, layer_idx: int, lock: LayerLock) -> None:
        super().__init__(rows, layer_idx, lock)
        self.latent_dim, self.rope_dim = self._store.latent_dim, self._store.rope_dim

    @property
    def value_cache(self) -> Array:
        return self.key_cache[..., : self.latent_dim]

    def attend(  # type: ignore[override]  # a query has two parts, and a scale is required
        self,
        q_latent: Array,
        q_pe: Array | None = None,
        attn_mask: Array | None = None,
        *,
        softmax_scale: float,
        sinks: Array | None = None,
        return_lse: bool = False,
    ) -> Attended:
        """Attend with absorbed queries of the last tokens, see `LatentLayer.attend`."""
        return super().attend(
            joined_query(q_latent, q_pe, self.rope_dim), attn_mask,
            softmax_scale=positive_number("softmax_scale", softmax_scale), sinks=sinks, return_lse=return_lse,
        )  # fmt: skip
