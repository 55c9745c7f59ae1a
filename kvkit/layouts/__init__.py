"""Where the bytes of a cache lie, whoever's it is: a layout is one line, ``l | b kv n h c``.

parse          the layout of a line, or of its name in vLLM, LMCache, PMX, ...
NAMED          the layouts of engines: name -> line, versions, source
view           keys and values of a cache as arrays with axes l b n h c; no byte moves
"""

from kvkit.layouts.grammar import Layout
from kvkit.layouts.named import NAMED, Named, parse
from kvkit.layouts.views import KV, view

__all__ = ["KV", "NAMED", "Layout", "Named", "parse", "view"]
