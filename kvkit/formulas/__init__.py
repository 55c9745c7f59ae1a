"""Scalar formulas that the kernels for CPU and GPU share."""
