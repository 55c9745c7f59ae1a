"""Say where each element of a cache lies. A layout is a line such as ``l | b kv n h c``.

parse          parse a line, or a name in vLLM, LMCache, PMX, ...
NAMED          the layouts of engines, {name: (line, versions, source)}
view           view a cache as keys and values with axes l b n h c, without moving bytes
fits           list the layouts that arrays may have
same_bytes     compare two layouts by the bytes that they give
convert        convert a cache to another layout, bit for bit, through page tables
tables         convert page tables of every convention to one form and back
"""

import importlib
from typing import TYPE_CHECKING, Any

from kvkit.layouts.grammar import Layout
from kvkit.layouts.named import NAMED, Named, parse

if TYPE_CHECKING:
    from kvkit.calls.conversion import convert as convert
    from kvkit.layouts import tables as tables
    from kvkit.layouts.compare import fits as fits
    from kvkit.layouts.compare import same_bytes as same_bytes
    from kvkit.layouts.views import KV as KV
    from kvkit.layouts.views import view as view

__all__ = ["KV", "NAMED", "Layout", "Named", "convert", "fits", "parse", "same_bytes", "tables", "view"]
# Names that checks of operators do not need are imported on first use.
MODULES = {
    "KV": "kvkit.layouts.views",
    "view": "kvkit.layouts.views",
    "fits": "kvkit.layouts.compare",
    "same_bytes": "kvkit.layouts.compare",
    "convert": "kvkit.calls.conversion",
}


def __getattr__(name: str) -> Any:
    if name == "tables":
        return importlib.import_module("kvkit.layouts.tables")
    if name in MODULES:
        globals()[name] = found = getattr(
            importlib.import_module(MODULES[name]), name
        )  # found directly next time
        return found
    raise AttributeError(f"module 'kvkit.layouts' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
