"""`study`: what schemes of quantization cost a cache, head by head.

study       the tool, and its result
schemes     formats by name, with rotations; classes of one's own
measures    errors of a side, and what they do to attention
report      Markdown, JSON, and a page that stands alone; its pictures in `plots`
"""
