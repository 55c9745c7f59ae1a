"""Add facts of a model to a cache whose file lacks them: heads, rotary embedding, layers with a window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kvkit.errors import KvkitError, argument_error
from kvkit.files import Description
from kvkit.files.llama import NO_HEADS
from kvkit.files.model_config import read_entries
from kvkit.formats import FLOATS
from kvkit.models.configuration import read_layers, read_ropes
from kvkit.models.description import LayerShape, RopeWords
from kvkit.tools.contents import contents_of
from kvkit.tools.source import SLIDING

# {cache in a file: the kinds of layers that it has}
ATTENTION = {"cache": ("full", "latent", "both"), SLIDING: ("window", "chunk")}


def with_model(source: Any, model: Any) -> Any:
    """Complete the description of a source from the configuration of its model.

    Parameters
    ----------
    source : path, mapping of arrays, or Contents
        A cache, such as a state of llama.cpp, whose file does not have the number of heads.
    model : path or None
        A GGUF file, a config.json, or a folder with one; None returns the source unchanged.

    Raises
    ------
    KvkitError
        If the model has other layers than the cache.
    """
    if model is None:
        return source
    contents, entries = contents_of(source), read_entries(model)
    shape, ropes = read_layers(entries), known_ropes(entries)
    arrays, metadata = dict(contents.arrays), dict(contents.metadata)
    description, two_caches = contents.description, SLIDING in metadata
    for name, kinds in ATTENTION.items():
        sliding = name == SLIDING
        if sliding and not two_caches:
            continue
        wanted_kinds = kinds if two_caches else sum(ATTENTION.values(), ())
        chosen = {i: layer for i, layer in enumerate(shape.layers) if layer.kind in wanted_kinds}
        layers = list(chosen.values())
        own = Description(**metadata[SLIDING]) if sliding else contents.description
        if own.sizes.get("l", len(layers)) != len(layers):
            kind = "with a window" if sliding else "of attention"
            wanted = f"a model of {own.sizes['l']} layers {kind}, as the file has"
            raise argument_error("model", wanted, f"{shape.name}, which has {len(layers)}")
        arrays[f"{SLIDING}_layers" if sliding else "layers"] = np.array(list(chosen))
        own = with_shape(own, layers, [ropes[i] for i in chosen])
        if sliding:
            metadata[SLIDING] = own.to_dict()
        else:
            description = own
    notes = tuple(note for note in contents.notes if note != NO_HEADS)
    return replace(contents, arrays=arrays, metadata=metadata, description=description, notes=notes)


def known_ropes(entries: Any) -> list[RopeWords | None]:
    """Return how each layer rotates its keys, or None where that is unknown or nothing is rotated."""
    try:
        ropes = read_ropes(entries)
    except KvkitError:  # as of GPT-2: what a file needs most, heads and layers, does not depend on it
        return [None] * len(read_layers(entries).layers)
    stated = "rope_interleaved" in entries  # only headers of GGUF files say which elements are pairs
    return [
        None if isinstance(rope, str) else replace(rope, interleaved=rope.interleaved if stated else None)
        for rope in ropes
    ]


def key_heads(model: Any) -> int | None:
    """Return the key heads of a model's attention layers; None without a model, or if layers differ."""
    layers = () if model is None else read_layers(read_entries(model)).layers
    heads = {layer.num_kv_heads for layer in layers if layer.kind in sum(ATTENTION.values(), ())}
    return heads.pop() if len(heads) == 1 else None


def with_shape(old: Description, layers: list[LayerShape], ropes: list[RopeWords | None]) -> Description:
    """Return a description with the model's heads and rotary embedding; raise if layers differ in heads."""
    shapes = {(layer.num_kv_heads, layer.key_dim, layer.value_dim or layer.key_dim) for layer in layers}
    if len(shapes) > 1:
        raise argument_error("model", "layers of one kind that have the same heads", sorted(shapes))
    [(heads, dim, values)] = shapes or {(1, 1, 1)}
    sizes = dict(old.sizes) | {"h": heads}
    if old.format in [str(one) for one in FLOATS]:
        sizes |= {"c": dim} | ({} if values == dim else {"v": values})
    rope = next((rope for rope in ropes if rope is not None), None)
    if rope is None:
        return replace(old, sizes=sizes)
    pairs = None if rope.interleaved is None else "interleaved" if rope.interleaved else "halves"
    return replace(
        old, sizes=sizes, rope_base=old.rope_base or rope.theta, rope_pairs=old.rope_pairs or pairs,
        rope_dim=old.rope_dim or (None if rope.rotary_dim == dim else rope.rotary_dim),
    )  # fmt: skip
