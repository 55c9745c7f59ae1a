"""Tools for whoever brings up a device or debugs an engine: functions whose results print themselves.

    inspect     what is in a file, or in arrays
    convert     a cache from layout to layout, or format to format, into another file
    join        caches of ranks, each with some of the heads, to a whole one
    draw        layouts and the rows of caches, for a terminal or a page
    check       whether page tables, slots, layouts, scales and data can be right
    diff        where two caches or outputs differ, and why
    study       what schemes of quantization cost a cache, head by head
    size        how many bytes the cache of a model takes, from its configuration
    vectors     packs of golden vectors: made, verified, replayed, compared, exported

A result is what a terminal shows (``str``) and what a program reads (``to_dict()``). Each tool is a verb of
the command line, too, and is loaded when it is first used.
"""

import importlib
from typing import Any

TOOLS = {  # name: the module that has it, or that it is
    "inspect": "kvkit.tools.inspection",
    "convert": "kvkit.tools.conversion",
    "join": "kvkit.tools.conversion",
    "draw": "kvkit.tools.draw",
    "check": "kvkit.tools.checking",
    "diff": "kvkit.tools.comparison",
    "scheme": "kvkit.formats.schemes",
    "study": "kvkit.tools.studies.study",
    "size": "kvkit.tools.sizing",
    "vectors": "kvkit.tools.vectors",
}


def __getattr__(name: str) -> Any:
    if name not in TOOLS:
        raise AttributeError(f"module 'kvkit.tools' has no attribute {name!r}")
    module = importlib.import_module(TOOLS[name])
    return module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(TOOLS)
