"""Connect kvkit to other frameworks: `dask`, `onnx` and `transformers`.

Each module imports its framework when it is first used.
"""

from typing import TYPE_CHECKING

from kvkit.runtime.lazy_imports import lazy_modules

if TYPE_CHECKING:
    from kvkit.integrations import dask as dask
    from kvkit.integrations import onnx as onnx
    from kvkit.integrations import transformers as transformers

__all__: list[str] = []  # help() of this module needs no framework
__getattr__ = lazy_modules(__name__, "dask", "onnx", "transformers")
