"""Describe where each element of a cache lies. A layout is a line such as ``l | b kv n h c``.

parse          parse a line, or a name in vLLM, LMCache, PMX, ...
NAMED          the layouts of engines, {name: (line, versions, source)}
view           view a cache as keys and values with axes l b n h c, without moving bytes
fits           list the layouts that arrays may have
same_bytes     compare where two layouts place each element
convert        convert a cache to another layout, bit for bit, through page tables
tables         convert page tables of every convention to one form and back
"""

from typing import TYPE_CHECKING

from kvkit.layouts.grammar import Layout
from kvkit.layouts.named import NAMED, Named, parse
from kvkit.runtime.lazy_imports import lazy_names

if TYPE_CHECKING:
    from kvkit.calls.conversion import convert
    from kvkit.layouts import tables
    from kvkit.layouts.compare import fits, same_bytes
    from kvkit.layouts.views import KV, view

__all__ = ["KV", "NAMED", "Layout", "Named", "convert", "fits", "parse", "same_bytes", "tables", "view"]
# Names that checks of operators do not need are imported on first use.
MODULES = {
    **dict.fromkeys(("KV", "view"), "kvkit.layouts.views"),
    **dict.fromkeys(("fits", "same_bytes"), "kvkit.layouts.compare"),
    "convert": "kvkit.calls.conversion",
    "tables": "kvkit.layouts.tables",
}
__getattr__, __dir__ = lazy_names(__name__, MODULES, __all__)
