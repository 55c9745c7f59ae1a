"""How code is compiled, kept on disk and run. Nothing here knows a KV cache; a newcomer may skip it."""
