"""Sequences in blocks; knows no arrays."""
