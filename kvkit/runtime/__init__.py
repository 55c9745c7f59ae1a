"""Compiling, caching and running code. Nothing here knows a KV cache; a newcomer may skip it."""
