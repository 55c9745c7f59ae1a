"""All of numba-cuda, and all inline PTX."""
