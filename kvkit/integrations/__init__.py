"""Connect kvkit to other frameworks: `dask`, `onnx` and `transformers`.

Each module imports its framework when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvkit.integrations import dask as dask
    from kvkit.integrations import onnx as onnx
    from kvkit.integrations import transformers as transformers

__all__: list[str] = []  # help() of this module needs no framework


def __getattr__(name: str) -> Any:
    if name in ("dask", "onnx", "transformers"):
        return importlib.import_module(f"kvkit.integrations.{name}")
    raise AttributeError(f"module 'kvkit.integrations' has no attribute {name!r}")
