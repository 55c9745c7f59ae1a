"""`study`: what schemes of quantization cost a cache, head by head.

sources     layers of files, arrays, caches
schemes     formats by name, with rotations; classes of one's own
measures    errors of a side, and what they do to attention
report      Markdown, JSON, and a page that stands alone; its pictures in `plots`
"""

from kvkit.tools.study.schemes import scheme
from kvkit.tools.study.studying import Study, Summary, study

__all__ = ["Study", "Summary", "scheme", "study"]
