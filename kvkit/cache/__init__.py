"""Caches for a generation loop: growing, of fixed size, sliding, quantized, and in shared blocks."""

from kvkit.cache.blocks.allocator import BlockAllocator, OutOfBlocksError
from kvkit.cache.blocks.sequence import Sequence
from kvkit.cache.blocks.step import Step
from kvkit.cache.caches import Cache
from kvkit.cache.compression import CompressionReport
from kvkit.cache.constructors import DynamicCache, QuantizedCache, StaticCache
from kvkit.cache.from_configuration import from_config
from kvkit.cache.layers.chunked import ChunkedLayer, StaticChunkedLayer
from kvkit.cache.layers.compressed import CompressedLayer
from kvkit.cache.layers.dynamic import DynamicLayer, StaticLayer
from kvkit.cache.layers.gated_delta import GatedDeltaLayer
from kvkit.cache.layers.latent import IndexedLayer, LatentLayer
from kvkit.cache.layers.quant_spec import QuantSpec
from kvkit.cache.layers.quantized import QuantizedLayer
from kvkit.cache.layers.shared import SharedLayer
from kvkit.cache.layers.sliding import SlidingWindowLayer, StaticSlidingWindowLayer
from kvkit.cache.layers.state import StateLayer
from kvkit.cache.loading import load
from kvkit.cache.paged.cache import PagedCache
from kvkit.cache.paged.compressed import PagedCompressedCache
from kvkit.cache.paged.layer import PagedLayer
from kvkit.cache.paged.ragged import RaggedLayer
from kvkit.cache.paged.step import PagedStep
from kvkit.cache.state_pool import StatePool
from kvkit.cache.stores.view import KVView
from kvkit.errors import CapacityError
from kvkit.runtime.lazy_imports import lazy_names

__all__ = [
    "BlockAllocator", "Cache", "CapacityError", "ChunkedLayer", "CompressedLayer", "CompressionReport",
    "DynamicCache", "DynamicLayer", "GatedDeltaLayer", "IndexedLayer", "KVView", "LatentLayer",
    "OutOfBlocksError", "PagedCache", "PagedCompressedCache", "PagedLayer", "PagedStep", "QuantSpec",
    "QuantizedCache", "QuantizedLayer", "RaggedLayer", "Sequence", "SharedLayer", "SlidingWindowLayer",
    "StateLayer", "StatePool", "StaticCache", "StaticChunkedLayer", "StaticLayer",
    "StaticSlidingWindowLayer", "Step", "from_config", "load",
]  # fmt: skip
# What an attribute that is not here was named before, or is named elsewhere
__getattr__ = lazy_names(__name__, {}, __all__, renamed={"Report": "CompressionReport"})[0]
__dir__ = __all__.copy  # modules are not listed
