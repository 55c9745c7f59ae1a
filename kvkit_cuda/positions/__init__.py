"""Kernels of rotary embedding, ALiBi and position indices."""
