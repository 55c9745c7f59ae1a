"""Configurations of public models by name: the numbers that they publish, in the words that are read."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from kvkit.errors import nearest

ENDINGS = "-instruct", "-it", "-chat", "-base", "-hf"


@functools.cache
def known_models() -> dict[str, dict[str, Any]]:
    """Return the configurations of public models by name."""
    found: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("known.json").read_text())
    return found


def plain_name(name: str) -> str:
    """Return llama-3.1-8b for meta-llama/Llama-3.1-8B-Instruct: a name without owner and endings."""
    name = name.rpartition("/")[2].lower().replace("_", "-").removeprefix("meta-")
    for ending in ENDINGS:
        name = name.removesuffix(ending)
    return name


def known_model(name: str) -> dict[str, Any] | None:
    """Return the configuration of a public model by its name, or None."""
    found = known_models().get(plain_name(name))
    return None if found is None else {"_name_or_path": plain_name(name), **found}


def like_known(name: str) -> list[str]:
    """Return the names of known models that are like a name."""
    return nearest(plain_name(name), known_models(), 3)
