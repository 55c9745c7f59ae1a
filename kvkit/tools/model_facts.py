"""Add facts of a model to a cache whose file lacks them: heads, rotary embedding, layers with a window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kvkit.errors import argument_error
from kvkit.files import Description
from kvkit.files.llama import HEADS
from kvkit.files.model_config import LayerShape, ModelShape, read_model
from kvkit.formats import FLOATS
from kvkit.tools.contents import contents_of
from kvkit.tools.source import SLIDING

ATTENTION = {"cache": ("full", "latent"), SLIDING: ("sliding",)}  # kinds of layers in each cache


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
    contents, shape = contents_of(source), read_model(model)
    arrays, metadata = dict(contents.arrays), dict(contents.metadata)
    description, two_caches = contents.description, SLIDING in metadata
    for name, kinds in ATTENTION.items():
        sliding = name == SLIDING
        if sliding and not two_caches:
            continue
        wanted_kinds = kinds if two_caches else sum(ATTENTION.values(), ())
        chosen = {number: layer for number, layer in zip(shape.numbers, shape.layers, strict=True)
                  if layer.kind in wanted_kinds}  # fmt: skip
        layers = list(chosen.values())
        own = Description(**metadata[SLIDING]) if sliding else contents.description
        if own.sizes.get("l", len(layers)) != len(layers):
            kind = "with a window" if sliding else "of attention"
            wanted = f"a model of {own.sizes['l']} layers {kind}, as the file has"
            raise argument_error("model", wanted, f"{shape.name}, which has {len(layers)}")
        arrays[f"{SLIDING}_layers" if sliding else "layers"] = np.array(list(chosen))
        own = with_shape(own, layers, shape, sliding)
        if sliding:
            metadata[SLIDING] = own.to_dict()
        else:
            description = own
    notes = tuple(note for note in contents.notes if note != HEADS)
    return replace(contents, arrays=arrays, metadata=metadata, description=description, notes=notes)


def with_shape(old: Description, layers: list[LayerShape], shape: ModelShape, sliding: bool) -> Description:
    """Return a description with the model's heads and rotary embedding; raise if layers differ in heads."""
    shapes = {(layer.heads, layer.key_dim, layer.value_dim or layer.key_dim) for layer in layers}
    if len(shapes) > 1:
        raise argument_error("model", "layers of one kind that have the same heads", sorted(shapes))
    [(heads, dim, values)] = shapes or {(1, 1, 1)}
    sizes = dict(old.sizes) | {"h": heads}
    if old.format in [str(one) for one in FLOATS]:
        sizes |= {"c": dim} | ({} if values == dim else {"v": values})
    base = (shape.sliding_rope_base if sliding else None) or shape.rope_base
    return replace(
        old, sizes=sizes, rope_base=old.rope_base or base, rope_pairs=old.rope_pairs or shape.rope_pairs,
        rope_dim=old.rope_dim or (None if shape.rope_dim in (None, dim) else shape.rope_dim),
    )  # fmt: skip
