"""Where the bytes of a cache lie, whoever's it is: a layout is one line, ``l | b kv n h c``.

parse          the layout of a line, or of its name in vLLM, LMCache, PMX, ...
NAMED          the layouts of engines: name -> line, versions, source
view           keys and values of a cache as arrays with axes l b n h c; no byte moves
fits           the layouts that arrays may have: proposals
same_bytes     whether two layouts are one
tables         page tables of every convention, to and from one form
"""

import importlib
from typing import TYPE_CHECKING

from kvkit.layouts import tables
from kvkit.layouts.compare import fits, same_bytes
from kvkit.layouts.grammar import Layout
from kvkit.layouts.named import NAMED, Named, parse
from kvkit.layouts.views import KV, view

if TYPE_CHECKING:
    from kvkit.layouts.conversion import convert as convert

__all__ = ["KV", "NAMED", "Layout", "Named", "convert", "fits", "parse", "same_bytes", "tables", "view"]


def __getattr__(name):
    if name == "convert":  # on a floor of its own, as it calls kernels
        return importlib.import_module("kvkit.layouts.conversion").convert
    raise AttributeError(f"module 'kvkit.layouts' has no attribute {name!r}")
