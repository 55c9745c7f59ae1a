"""Make the layers of kvkit that the config of a model of transformers asks for.

The types of layers come from transformers and not from `kvkit.models`. That reads published configurations,
and refuses the defaults of 33 of 189 types of models (BART, GPT-Neo, LFM2), whose layers transformers knows:
what `generate` runs must not depend on it. `tests/integrations/test_transformers_models.py` compares the
layers of both for every type of model that `kvkit.models` reads.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from transformers.cache_utils import get_layer_types_and_kwargs

from kvkit.cache import Cache, IndexedLayer, LatentLayer, SharedLayer, StateLayer
from kvkit.cache.layers.pooled import PooledLayer
from kvkit.errors import argument_error
from kvkit.integrations.transformers import recurrent

LAYER_TYPES = {  # {type of a layer in transformers: the type that kvkit makes}
    "full_attention": "full_attention",
    "sliding_attention": "sliding_attention",
    "chunked_attention": "chunked_attention",
    "indexed_attention": "full_attention",
    "linear_attention": "linear_attention",
    "conv": "conv",
    "hybrid": "full_attention",  # its recurrent state is in a layer of its own, after all others
    "hybrid_sliding": "sliding_attention",
    "dummy": "full_attention",  # it has no keys; a `SharedLayer` takes its place
}
V4 = "deepseek_v4"  # a type of model, which pools tokens itself
HYBRID = "hybrid", "hybrid_sliding"


def has_compressed_rows(config: Any) -> bool:
    """Return whether a model pools tokens into rows (DeepSeek V4)."""
    return bool(config.get_text_config(decoder=True).model_type == V4)


def geometry(config: Any, kind: str) -> dict[str, Any]:
    """Return the arguments of a kind of cache that a model's config determines."""
    config = config.get_text_config(decoder=True)
    names, arguments = get_layer_types_and_kwargs(config)
    if has_compressed_rows(config):
        if kind != "dynamic":
            raise argument_error("kind", "'dynamic' for a model with compressed rows", repr(kind))
        return {"num_layers": len(names)}
    for i, name in enumerate(names):
        if name not in LAYER_TYPES:
            raise argument_error("config", f"layers of {', '.join(LAYER_TYPES)}", f"{name} in layer {i}")
        if name == "indexed_attention" and (kind != "dynamic" or not latent_sizes(config)):
            wanted = "'dynamic' for a model with indexed attention, over latent rows"
            raise argument_error("kind", wanted, f"{kind!r}, layer {i}")
    if kind == "paged":
        latent = latent_sizes(config)
        others: dict[int, Any] = {}  # layers that have a state, or read the rows of another layer
        for i, name in enumerate(names):
            if LAYER_TYPES[name] in ("linear_attention", "conv"):
                others[i] = state_layer(config, name)
            elif name == "dummy":
                others[i] = SharedLayer(source_of(config, names, i))
        count = len(names) + sum(name in HYBRID for name in names)
        others |= {i: StateLayer() for i in range(len(names), count)}
        sizes = {"num_layers": count, "latent_dim": latent[0] if latent else 0, "others": others}
        return {name: value for name, value in sizes.items() if value}
    windows = {each["sliding_window"] for each in arguments if "sliding_window" in each}
    if len(windows) > 1:
        raise argument_error("config", "one size of window", f"{sorted(windows)}")
    return {
        "num_layers": len(names),
        "layer_types": [LAYER_TYPES[name] for name in names],
        "window": min(windows, default=None),
    }


def make_cache(make: Callable[..., Any], config: Any, kind: str, options: dict[str, Any], drafts: int) -> Any:
    """Make a cache of a kind, with the model's recurrent, latent and shared layers."""
    if config is None or kind == "paged":
        return make(**options)
    config = config.get_text_config(decoder=True)
    names, _ = get_layer_types_and_kwargs(config)
    if has_compressed_rows(config):
        of_cache = {name: options[name] for name in ("offload", "rope") if name in options}
        sizes, pooled = (config.head_dim, config.qk_rope_head_dim, config.sliding_window), []
        for name in names:  # layers of DeepSeek V4, whose model pools tokens itself
            ratio, index = config.compress_rates.get(name, 0), name == "compressed_sparse_attention"
            index_dim, topk = (config.index_head_dim, config.index_topk) if index else (None, None)
            pooled.append(PooledLayer(*sizes, ratio, index_dim, topk, drafts))
        return Cache(pooled, **of_cache)
    latent = latent_sizes(config) if kind == "dynamic" else None
    if not latent and not {"dummy", "linear_attention", *HYBRID}.intersection(names):
        return make(**options)
    of_cache = {name: options.pop(name) for name in ("offload", "rope") if name in options}
    layers = make(**options).layers
    for i, name in enumerate(names):
        if name == "dummy":
            layers[i] = SharedLayer(source_of(config, names, i))
        elif name == "linear_attention":
            layers[i] = state_layer(config, name)
        elif latent and LAYER_TYPES[name] == "full_attention":
            row = LatentLayer(*latent)
            layers[i] = IndexedLayer(row, config.index_head_dim) if name == "indexed_attention" else row
    layers += [StateLayer() for name in names if name in HYBRID]
    return Cache(layers, **of_cache)


def state_layer(config: Any, name: str) -> StateLayer:
    """Return a layer for the state of a model's layer of some type."""
    layer = recurrent.delta_layer(config) if name == "linear_attention" else None
    return StateLayer() if layer is None else layer


def source_of(config: Any, names: list[str], layer_idx: int) -> int:
    """Return the number of the layer that a layer without rows reads, or takes its length from."""
    modes = getattr(config, "kv_sharing_modes", None)
    if modes is not None and modes[layer_idx] == "reuse":
        kinds = config.layer_types
        return max(i for i, mode in enumerate(modes) if mode == "store" and kinds[i] == kinds[layer_idx])
    with_rows = [i for i, name in enumerate(names) if name not in ("dummy", "linear_attention", "conv")]
    if not with_rows:
        found = f"none, and no state in layer {layer_idx}"
        raise argument_error("config", "a layer with attention", found)
    return with_rows[0]


def latent_sizes(config: Any) -> tuple[int, int] | None:
    """Return (latent_dim, rope_dim) of a model that stores latent rows; None for other models."""
    sizes = getattr(config, "kv_lora_rank", None), getattr(config, "qk_rope_head_dim", None)
    if not all(sizes):
        return None
    path = type(config).__module__.replace(".configuration_", ".modeling_")
    try:
        model = importlib.import_module(path)
    except ImportError:
        return None
    # Other models with these sizes expand the rows before an update, and store keys and values.
    expands_later = any(hasattr(part, "expand_kv") for part in vars(model).values())
    return sizes if expands_later else None  # type: ignore[return-value]
