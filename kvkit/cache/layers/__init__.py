"""What a layer of a cache is, and its kinds."""
