"""All that refuses: a check returns what kernels need, or raises before anything has been written."""
