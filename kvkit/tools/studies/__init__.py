"""Define the tool `study`: what quantization schemes, and policies that evict tokens, cost a cache.

study       the tool, and its result
schemes     find schemes: formats with rotations, users' classes
policies    parse policies: a scorer, the share of tokens that it keeps, perhaps a scheme
measures    measure errors of keys and values, and of attention over them
evicting    measure what attention loses to policies; `kept_tokens` computes it for a head
entropy     estimate the bits of a lossless coder
scales      calibrate scales, and write them as engines load them
report      write Markdown, JSON, and a self-contained page; `plots` draws its pictures
words       write tables and sentences about schemes and heads
"""
