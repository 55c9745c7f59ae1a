"""Make the layers that a model needs from its configuration."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, SupportsIndex

from kvkit.cache.caches import Cache
from kvkit.cache.layers.chunked import ChunkedLayer
from kvkit.cache.layers.compressed import EPS, CompressedLayer, check_drafts
from kvkit.cache.layers.dynamic import DynamicLayer
from kvkit.cache.layers.gated_delta import GatedDeltaLayer
from kvkit.cache.layers.latent import IndexedLayer, LatentLayer
from kvkit.cache.layers.layer import Layer
from kvkit.cache.layers.shared import SharedLayer
from kvkit.cache.layers.sliding import SlidingWindowLayer
from kvkit.cache.layers.state import StateLayer
from kvkit.errors import KvkitError, argument_error
from kvkit.files.model_config import read_entries
from kvkit.models.configuration import read_layers
from kvkit.models.description import KINDS, DeltaShape, LayerShape
from kvkit.rope import NO_ROTATION, Rope
from kvkit.typed import FilePath

MADE = "full, window, chunk, latent, compressed, state, conv, both, shared, none"


def from_config(
    config: Any, *, rope: Any = None, drafts: SupportsIndex = 0, offload: FilePath | None = None
) -> Cache:
    """Make a growing cache with the layers of a model, by its configuration.

    Layers with a state beside their rows (Falcon-H1, Zamba 2) keep it in a `StateLayer` of its own; these
    stand behind all others, in order. States of the gated delta rule (Qwen3-Next, Kimi Linear) are in a
    `GatedDeltaLayer`, which can compute them. A layer that stores nothing, as an MLP, is a `SharedLayer`.

    Parameters
    ----------
    config : path, mapping or PreTrainedConfig
        A config.json of transformers, a folder that has one, a GGUF file, or a configuration.
    rope : Rope, "none" or list of them, optional
        How keys are rotated. None: as the configuration says, by `Rope.from_config`. Where it does not show
        it, layers do not know it, and calls that move keys ask for it.
    drafts : int
        How many of the last tokens `crop` can take back in layers with compressed rows (DeepSeek V4).
    offload : path, optional
        As in `Cache`.

    Returns
    -------
    Cache

    Raises
    ------
    KvkitError
        If the configuration cannot be read, or has layers of a kind for which there is no layer.

    Examples
    --------
    >>> from kvkit.cache import from_config
    >>> sizes = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    >>> types = ["sliding_attention", "full_attention"]
    >>> cache = from_config(sizes | {"layer_types": types, "sliding_window": 4096, "rope_theta": 1e6})
    >>> [type(layer).__name__ for layer in cache.layers], cache.layers[1].rope.theta
    (['SlidingWindowLayer', 'DynamicLayer'], 1000000.0)
    """
    entries = read_entries(config)
    shapes = read_layers(entries).layers
    pooled = "compressed" in [shape.kind for shape in shapes]
    taken_back = check_drafts(drafts, pooled)
    layers = compressed_layers(shapes, entries, taken_back) if pooled else []
    layers = layers or [layer_of(shape, i, shapes) for i, shape in enumerate(shapes)]
    ropes: Any = rope
    if rope is None:
        with suppress(KvkitError):  # where the configuration does not show how keys are rotated
            ropes = [
                NO_ROTATION if isinstance(layer, (SharedLayer, StateLayer)) else own
                for layer, own in zip(layers, Rope.from_config(entries), strict=True)
            ]
    beside = [StateLayer() for shape in shapes if shape.kind == "both"]
    if isinstance(ropes, list):
        ropes += [NO_ROTATION] * len(beside)
    return Cache([*layers, *beside], rope=ropes, offload=offload)


def layer_of(shape: LayerShape, number: int, shapes: tuple[LayerShape, ...]) -> Layer:
    """Make an empty layer of some shape."""
    kind = shape.kind
    if kind in ("state", "conv"):
        return StateLayer() if shape.delta is None else gated_delta_layer(shape.delta)
    if kind == "chunk" and shape.window is not None:
        return ChunkedLayer(shape.window)
    if kind == "latent":
        row = LatentLayer(shape.latent_dim, shape.key_dim - shape.latent_dim)
        return IndexedLayer(row, shape.index_dim) if shape.index_dim else row
    if kind in ("full", "window", "both") and not shape.index_dim:
        return DynamicLayer() if shape.window is None else SlidingWindowLayer(shape.window)
    if kind in ("shared", "none"):
        first = next((i for i, other in enumerate(shapes) if other.num_kv_heads), None)
        if first is not None:
            return SharedLayer(first if shape.source is None else shape.source)
    beside = " with index keys beside keys and values" if shape.index_dim else ""
    found = f"layer {number} of kind {kind}{beside}: {KINDS[kind]}"
    raise argument_error("config", f"layers of kinds that a cache has ({MADE})", found)


def gated_delta_layer(shape: DeltaShape) -> GatedDeltaLayer:
    """Make an empty layer of the gated delta rule."""
    sizes = shape.num_heads, shape.dk, shape.dv, shape.conv_channels, shape.conv_width
    return GatedDeltaLayer(*sizes, kind=shape.kind)


def compressed_layers(shapes: tuple[LayerShape, ...], entries: Any, drafts: int) -> list[Layer]:
    """Make the empty layers of DeepSeek V4, which get the weights of their compressors later."""
    topk = entries.get("index_topk")
    if topk is None and any(shape.index_dim for shape in shapes):
        wanted = "how many rows an indexer chooses (512 in V4-Flash, 1024 in V4-Pro)"
        raise argument_error("index_topk", wanted, "none")
    ropes: Any = Rope.from_config(entries)
    return [
        CompressedLayer(
            shape.key_dim, rope.rotary_dim, shape.window or 0, shape.ratio, shape.index_dim or None,
            index_topk=topk if shape.index_dim else None, drafts=drafts, eps=entries.get("rms_norm_eps", EPS),
        )
        for shape, rope in zip(shapes, ropes, strict=True)
    ]  # fmt: skip
