"""The kernels of the positional neighbours."""
