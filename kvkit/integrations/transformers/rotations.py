"""Find how a model of transformers rotates keys: its config has the angles, its code the order of pairs."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch

from kvkit.cache.layers.positions import KNOWN_ROTATION
from kvkit.errors import KvkitError, argument_error
from kvkit.models.rotations import NEIGHBOURS
from kvkit.rope import Rope

# {rotate_half([0, 1, 2, 3]): whether the pairs are neighbours, (0, 1) and (2, 3), and not (0, 2) and (1, 3)}
PAIRS = {(-2, -3, 0, 1): False, (-1, 0, -3, 2): True}


def rotations_of(config: Any) -> list[Any]:
    """Return how each layer's keys are rotated, a `kvkit.Rope` or "none".

    Raises
    ------
    KvkitError
        If config and code do not show it, or if keys with this rotation cannot be moved.
    """
    name = type(config).__name__
    if getattr(config, "qk_rope_head_dim", None):
        found = f"{name}, whose keys are rotated after their first elements"
        raise argument_error("rope", KNOWN_ROTATION, found)
    text = config.get_text_config(decoder=True)
    known = text.model_type in NEIGHBOURS  # then `Rope.from_config` knows the pairs
    interleaved = None
    if not known:
        path = type(text).__module__.replace(".configuration_", ".modeling_")
        with contextlib.suppress(ImportError, AttributeError):  # models without `rotate_half`
            line = importlib.import_module(path).rotate_half(torch.arange(4.0)[None, None, None])
            interleaved = PAIRS.get(tuple(line.flatten().int().tolist()))
    if interleaved is None and not known:
        found = f"{name}, whose model does not say which elements are pairs"
        raise argument_error("rope", KNOWN_ROTATION, found)
    try:
        return Rope.from_config(config, interleaved=interleaved)
    except KvkitError:
        raise
    except Exception as error:  # configs may lack numbers, or have one for each layer
        raise argument_error("rope", KNOWN_ROTATION, f"{name}, which cannot be read ({error})") from error
