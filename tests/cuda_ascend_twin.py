"""A pytest plugin for the CUDA simulator: `kvkit.ascend` is kvkit_cuda's, in small blocks."""

import kvkit.ascend
from kvkit_cuda import ascend, device, means, pieces

assert device.SIMULATED
pieces.THREADS = means.THREADS = 8
for name in ascend.__all__:
    setattr(kvkit.ascend, name, getattr(ascend, name))
