"""The kernels of append and gather."""
