"""`study`: what schemes of quantization, and policies that evict tokens, cost a cache, head by head.

study       the tool, and its result
schemes     formats by name, with rotations; classes of one's own
policies    scorers with the share that they keep, and schemes
measures    errors of a side, and what they do to attention
evicting    what attention loses to policies
report      Markdown, JSON, and a page that stands alone; its pictures in `plots`
"""
