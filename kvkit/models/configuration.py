"""Read what the layers of a model keep, and how they rotate keys, from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from kvkit.errors import argument_error, describe
from kvkit.models.description import LayerShape, ModelShape, RopeWords
from kvkit.models.kinds import layer_count, layer_kinds, own_index_keys, shared_sources
from kvkit.models.known import known_model
from kvkit.models.rotations import latent_scale, layer_rotations
from kvkit.models.sizes import KEY_HEADS, STATE_WORDS, layer_shape
from kvkit.models.words import Words, shown, text_words

DEEP = "entries that are nested less deeply"
CONFIG = "a configuration: a mapping, or an object with its entries"


def entries_of(config: Any) -> Mapping[str, Any]:
    """Return the entries of a configuration: a mapping, one of transformers, or any object's attributes."""
    if isinstance(config, Mapping):
        return config
    if isinstance(config, (str, PathLike)):
        if (known := known_model(str(config))) is None:
            hint = f" (json.loads(Path({str(config)!r}).read_text()) reads a file)"
            raise argument_error("config", CONFIG, describe(str(config)) + hint)
        return known
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    if hasattr(config, "to_dict"):
        found = dict(config.to_dict())
        listed = getattr(config, "layer_types", None)  # some are computed, and not in the dict
        return found if listed is None else {"layer_types": list(listed)} | found
    try:
        return dict(vars(config))
    except TypeError:
        raise argument_error("config", CONFIG, describe(config)) from None


def read_layers(config: Any) -> ModelShape:
    """Read what each layer of a model keeps.

    Parameters
    ----------
    config : mapping, PreTrainedConfig or object with attributes
        The entries of a config.json.

    Raises
    ------
    KvkitError
        If an entry is missing or wrong, if two disagree, or if one of a known kind was not used.
    """
    entries = entries_of(config)
    try:
        words = text_words(entries)
        return model_shape(words, entries)
    except RecursionError:
        raise argument_error("config", DEEP, "a very deep one") from None


def model_shape(words: Words, entries: Mapping[str, Any]) -> ModelShape:
    """Return what the layers of a model keep, by the entries of its language model."""
    count = layer_count(words)
    types = layer_kinds(words, count)
    if words.model_type == "granitemoehybrid" and not any(each.kind == "state" for each in types):
        words.use(*STATE_WORDS)  # its small models have these entries, and no such layers
    sources = shared_sources(words, types)
    own_index = [True] * count
    if any(each.kind == "indexed" for each in types) or "index_head_dim" in words:
        own_index = own_index_keys(words, count)
    shapes: dict[tuple[str, bool], LayerShape] = {}
    listed = any(isinstance(words.entries.get(name), (list, tuple)) for name in KEY_HEADS)
    alike = not listed and not BY_LAYER & words.entries.keys()
    layers = []
    for i, each in enumerate(types):
        key = each.kind, own_index[i]
        if key not in shapes or not alike:
            shapes[key] = layer_shape(words, each.kind, i, count, own_index[i])
        source = sources[i]
        layers.append(shapes[key] if source is None else LayerShape("shared", source=source))
    has_rows = any(layer.num_kv_heads for layer in layers)
    if not has_rows:
        words.use("num_key_value_heads", "head_dim", "v_head_dim")
    words.check_unused(rotations=False)
    longest = words.count(
        "max_position_embeddings", "n_positions", "model_max_length", "max_seq_len", default=0
    )
    name = entries.get("_name_or_path") or words.model_type or "model"
    return ModelShape(name if isinstance(name, str) else "model", tuple(layers), longest)


BY_LAYER = {"per_layer_config", "block_configs"}  # entries that change the sizes of single layers


def read_ropes(config: Any, *, expanded: bool = False) -> list[RopeWords | str]:
    """Read how each layer of a model rotates its keys: the arguments of a `kvkit.Rope`, or "none".

    Parameters
    ----------
    config : mapping, PreTrainedConfig or object with attributes
    expanded : bool
        For latent attention: whether keys are [qk_nope_head_dim, qk_rope_head_dim], and not the rows
        [latent, rotated].
    """
    entries = entries_of(config)
    try:
        words = text_words(entries)
        count = layer_count(words)
        types = layer_kinds(words, count)
        ropes = layer_rotations(words, types, shared_sources(words, types), expanded)
        words.check_unused(rotations=True)
        return ropes
    except RecursionError:
        raise argument_error("config", DEEP, "a very deep one") from None


def read_latent_scale(config: Any) -> float:
    """Read the scale of scores of a model with latent attention (MLA).

    Raises
    ------
    KvkitError
        If the model has no latent attention.
    """
    try:
        words = text_words(entries_of(config))
        if not words.value("kv_lora_rank"):
            wanted = "the configuration of a model with latent attention (MLA)"
            raise words.error("kv_lora_rank", wanted, shown(words.value("kv_lora_rank")))
        return latent_scale(words)
    except RecursionError:
        raise argument_error("config", DEEP, "a very deep one") from None
