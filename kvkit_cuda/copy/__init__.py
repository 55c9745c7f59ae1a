"""Kernels that copy rows: append, gather, slots, blocks."""
