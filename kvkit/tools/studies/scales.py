"""Calibrate scales of keys and values on a cache, and write them as engines load them.

vLLM (compressed-tensors, 8-bit floats) reads the arrays below from a checkpoint's safetensors files, and
``kv_cache_scheme`` from its configuration; a code is x / scale::

    model.layers.{number}.self_attn.k_scale    float32 [1], or [key heads] for the strategy attn_head
    model.layers.{number}.self_attn.v_scale    likewise, for values
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvkit import files
from kvkit.checks.values import text
from kvkit.errors import argument_error
from kvkit.formats.elements import E4M3
from kvkit.tools.readers import LayerReader, SideReader
from kvkit.tools.studies.measures import check_finite, floats, pieces
from kvkit.tools.studies.study import open_without_padding
from kvkit.typed import Array

NAME = "model.layers.{}.self_attn.{}_scale"
PER = "tensor", "head", "layer"


def write_scales(
    source: Any,
    target: str | os.PathLike[str],
    per: str = "tensor",
    *,
    layout: str | None = None,
    sizes: Mapping[str, int] | None = None,
    rotation: str | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> dict[str, Array]:
    """Write scales of 8-bit floats for the keys and values of a cache, as vLLM loads them.

    A scale is the largest magnitude among all tokens of the source, divided by 448, the largest e4m3. Put the
    file beside a checkpoint's files and name it in their index; the metadata ``quantization_config`` belongs
    into config.json.

    Parameters
    ----------
    source : path, mapping of arrays, or cache
        As in `study`. Its layers need the numbers that they have in the model.
    target : path
        A .safetensors file.
    per : str
        What has a scale: "tensor" (the keys of a layer, and its values), "head" (each key head), or "layer"
        (keys and values share the larger one).
    layout, sizes, rotation, progress
        As in `study`.

    Returns
    -------
    dict
        The arrays of the file: {name: float32 [1] or [key heads]}.

    Raises
    ------
    KvkitError
        If the source has latent rows, no tokens, or numbers that are not finite, or if the name of the file
        has another suffix.

    Examples
    --------
    >>> import os, tempfile, numpy as np
    >>> from kvkit.tools import write_scales
    >>> keys = np.full((1, 8, 2, 16), 448, np.float32)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = write_scales({"key": keys, "value": keys / 4}, os.path.join(folder, "scales.safetensors"))
    >>> {name: scale.tolist() for name, scale in found.items()}
    {'model.layers.0.self_attn.k_scale': [1.0], 'model.layers.0.self_attn.v_scale': [0.25]}
    """
    text("per", per, PER)
    if Path(target).suffix != ".safetensors":
        raise argument_error("target", "a name with the suffix .safetensors", target)
    opened = open_without_padding(source, layout, sizes, None, rotation)
    arrays: dict[str, Array] = {}
    ranges: dict[str, Any] = {}
    tokens = 0
    for i in range(opened.count):
        layer = opened.layer(i)
        found = re.fullmatch("layer ([0-9]+)", layer.name)
        if layer.value_dim or found is None:
            wanted = "layers of keys and values, with their numbers in the model"
            raise argument_error("source", wanted, layer.name + " of latent rows" * bool(layer.value_dim))
        both = [side_range(layer, side, reader) for side, reader in layer.sides.items()]
        largest_of = [np.abs(each).max(0) for each in both]  # [key heads]
        if per != "head":
            largest_of = [each.max(keepdims=True) for each in largest_of]
        if per == "layer":
            largest_of = [np.maximum(*largest_of)] * 2
        for side, own, extremes in zip("kv", largest_of, both, strict=True):
            name = NAME.format(found[1], side)
            arrays[name] = np.where(own > 0, own / E4M3.limits[1], 1).astype(np.float32)
            low, high = (extremes[0].min(), extremes[1].max()) if per != "head" else extremes
            ranges[name] = [np.asarray(low).tolist(), np.asarray(high).tolist()]
        tokens = max(tokens, layer.key.tokens)
        if progress:
            progress(i + 1, opened.count)
    strategy = "attn_head" if per == "head" else "tensor"
    scheme = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    config = {
        "quant_method": "compressed-tensors", "config_groups": {}, "ignore": [], "kv_cache_scheme": scheme,
    }  # fmt: skip
    files.write(target, arrays, metadata={
        "range": ranges, "calibrated_on": opened.name, "tokens": tokens, "per": per,
        "quantization_config": config,
    })  # fmt: skip
    return arrays


def side_range(layer: LayerReader, name: str, side: SideReader) -> Array:
    """Return the smallest and the largest number of each head, float64 [2, heads]."""
    if 0 in (side.tokens, side.heads, side.dim):
        raise argument_error("source", "a cache that holds tokens", f"none in {layer.name}")
    low, high = np.inf, -np.inf
    parts = pieces(0, side.tokens, side.heads * side.dim)
    for part, x in zip(parts, floats(side, parts), strict=True):
        check_finite(f"{layer.name}, {name}", x, part.start)
        low, high = np.minimum(low, x.min((0, 2))), np.maximum(high, x.max((0, 2)))
    return np.stack((low, high)).astype(np.float64)
