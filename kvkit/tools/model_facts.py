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
    several = SLIDING in metadata
    said = contents.description
    for name, kinds in ATTENTION.items():
        if name == SLIDING and not several:
            continue
        numbers, layers = layers_of(shape, kinds if several else sum(ATTENTION.values(), ()))
        about = Description(**metadata[SLIDING]) if name == SLIDING else contents.description
        if about.sizes.get("l", len(layers)) != len(layers):
            kind = "with a window" if name == SLIDING else "of attention"
            wanted = f"a model of {about.sizes['l']} layers {kind}, as the file has"
            raise argument_error("model", wanted, f"{shape.name}, which has {len(layers)}")
        arrays["layers" if name == "cache" else f"{SLIDING}_layers"] = np.array(numbers)
        about = with_shape(about, layers, shape, name == SLIDING)
        said = about if name == "cache" else said
        if name == SLIDING:
            metadata[SLIDING] = about.to_dict()
    notes = tuple(note for note in contents.notes if note != HEADS)
    return replace(contents, arrays=arrays, metadata=metadata, description=said, notes=notes)


def layers_of(shape: ModelShape, kinds: tuple[str, ...]) -> tuple[list[int], list[LayerShape]]:
    """Return (numbers, shapes) of those layers of a model that are of these kinds."""
    found = [pair for pair in zip(shape.numbers, shape.layers, strict=True) if pair[1].kind in kinds]
    return [number for number, _ in found], [layer for _, layer in found]


def with_shape(said: Description, layers: list[LayerShape], shape: ModelShape, sliding: bool) -> Description:
    """Return a description with the model's heads and rotary embedding; raise if layers differ in heads."""
    shapes = {(layer.heads, layer.key_dim, layer.value_dim or layer.key_dim) for layer in layers}
    if len(shapes) > 1:
        raise argument_error("model", "layers of one kind that have the same heads", sorted(shapes))
    [(heads, dim, values)] = shapes or {(1, 1, 1)}
    sizes = dict(said.sizes) | {"h": heads}
    if said.format in [str(one) for one in FLOATS]:
        sizes |= {"c": dim} | ({} if values == dim else {"v": values})
    base = (shape.sliding_rope_base if sliding else None) or shape.rope_base
    return replace(
        said, sizes=sizes, rope_base=said.rope_base or base, rope_pairs=said.rope_pairs or shape.rope_pairs,
        rope_dim=said.rope_dim or (None if shape.rope_dim in (None, dim) else shape.rope_dim),
    )  # fmt: skip
