"""Sequences in blocks. This package decides where tokens lie; it has no arrays of keys or values."""
