"""Compute rotary embedding, ALiBi masks and position indices on a GPU."""
