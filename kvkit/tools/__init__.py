"""Tools to bring up a device or debug an engine: functions whose results print themselves.

    inspect     list what is in a file or in arrays
    convert     write a cache to another file, in another layout or format
    join        join the caches of tensor-parallel ranks
    cut         cut a cache into those of tensor-parallel ranks
    draw        draw layouts, and the rows of caches by sequence, as text or SVG
    check       find errors in page tables, slots, layouts, scales and data
    diff        find where two caches or outputs differ, and why
    study       measure what quantization and eviction cost a cache, head by head
    write_scales    calibrate scales of 8-bit keys and values, and write them for engines
    size        compute how many bytes a model's cache takes
    vectors     make, verify, replay, compare and export packs of golden vectors

``str(result)`` is a text for a terminal, ``result.to_dict()`` has values for JSON. Each tool is also a verb
of the command line, and is imported on first use.
"""

from kvkit.runtime.lazy_imports import lazy_names

TOOLS = {  # {name: its module}
    "inspect": "kvkit.tools.inspection",
    "convert": "kvkit.tools.conversion",
    "join": "kvkit.tools.ranks",
    "cut": "kvkit.tools.ranks",
    "draw": "kvkit.tools.draw",
    "check": "kvkit.tools.checking",
    "diff": "kvkit.tools.comparison",
    "scheme": "kvkit.formats.schemes",
    "study": "kvkit.tools.studies.study",
    "write_scales": "kvkit.tools.studies.scales",
    "size": "kvkit.tools.sizing",
    "vectors": "kvkit.tools.vectors",
}
__getattr__, __dir__ = lazy_names(__name__, TOOLS)
