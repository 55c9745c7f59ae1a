"""The kinds of layers of a cache."""
