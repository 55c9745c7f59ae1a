"""A pytest plugin for the CUDA simulator: `kvkit.ascend` is kvkit_cuda's, in small blocks."""

import kvkit.ascend
from kvkit_cuda import ascend, bias, device, means, merge, pieces, plain

assert device.SIMULATED
bias.THREADS = pieces.THREADS = means.THREADS = 8
plain.THREADS, merge.THREADS = 16, 4
for name in ascend.__all__:
    setattr(kvkit.ascend, name, getattr(ascend, name))
