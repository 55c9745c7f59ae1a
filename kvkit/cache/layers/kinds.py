"""Describe layers for files, and make them from their descriptions."""

from collections.abc import Mapping
from typing import Any

from kvkit.cache.layers.chunked import ChunkedLayer, StaticChunkedLayer
from kvkit.cache.layers.compressed import CompressedLayer
from kvkit.cache.layers.dynamic import DynamicLayer, StaticLayer
from kvkit.cache.layers.gated_delta import GatedDeltaLayer
from kvkit.cache.layers.latent import IndexedLayer, LatentLayer
from kvkit.cache.layers.pooled import PooledLayer
from kvkit.cache.layers.positions import describe_rotation, restored_rotation
from kvkit.cache.layers.quant_spec import CodeSpec
from kvkit.cache.layers.quantized import QuantizedLayer
from kvkit.cache.layers.shared import SharedLayer
from kvkit.cache.layers.sliding import SlidingWindowLayer, StaticSlidingWindowLayer
from kvkit.cache.layers.state import StateLayer
from kvkit.cache.paged.ragged import RaggedLayer

LAYER_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        ChunkedLayer, CompressedLayer, DynamicLayer, GatedDeltaLayer, IndexedLayer, LatentLayer,
        PooledLayer, QuantizedLayer, RaggedLayer, SharedLayer, SlidingWindowLayer, StateLayer,
        StaticChunkedLayer, StaticLayer, StaticSlidingWindowLayer,
    )
}  # fmt: skip


OLD_ARGUMENTS = {"rope_dtype"}  # of layers in older files, which changes no row that a layer still reads
WORDS_OF_FILES = {
    "heads": "num_heads",
    "sliding_window": "window",
}  # arguments whose names in files are older


def describe_layer(layer: Any) -> dict[str, Any]:
    """Describe a layer's class, arguments and rotation for a file, for `make_layer`."""
    rope = {} if layer.rope is None else {"rope": describe_rotation(layer.rope)}
    return {"kind": type(layer).__name__, "arguments": layer._describe(), **rope}


def make_layer(about: Mapping[str, Any]) -> Any:
    """Make an empty layer from its description in a file."""
    arguments = {
        WORDS_OF_FILES.get(name, name): restored(x)
        for name, x in about["arguments"].items()
        if name not in OLD_ARGUMENTS
    }
    layer = LAYER_KINDS[about["kind"]](**arguments)
    layer.rope = restored_rotation(about.get("rope"))
    return layer


def restored(argument: Any) -> Any:
    """Return an argument of a layer from its description: a layer, a `CodeSpec`, or the value itself."""
    if not isinstance(argument, dict):
        return argument
    return make_layer(argument) if "kind" in argument else CodeSpec(**argument)
